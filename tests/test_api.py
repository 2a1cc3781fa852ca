"""`DAE` and `Player`: what a user calls."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch

from dae import DAE, load_player
from dae.errors import ConfigError, EnvironmentFault, FileError, ResourceError
from dae.ledger import Diary
from dae.run.checkpoint import export, load_checkpoint

TINY = {
    "preset": "laptop", "num_envs": 2, "embedding_dim": 8, "core_dim": 8, "core_blocks": 2, "value_hidden": 8, "prediction_hidden": 8,
    "prior_hidden": 8, "backup_steps": 3, "burn_in_steps": 2, "batch_size": 4, "min_replay_agent_steps": 40, "replay_agent_steps": 400,
    "total_agent_steps": 120, "learning_rate": "1e-3", "eps_wta": "0", "epsilon": "0.5", "eval_episodes": 2, "eval_every_agent_steps": 0,
    "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def learned():
    return DAE("dae/TMaze-v0", env_kwargs={"length": 3}, **TINY).learn()


def play(act, episodes=3):
    """Actions of greedy play, by seed; `act(obs, reward, first)`."""
    env, actions = gym.make("dae/TMaze-v0", length=3), []
    for seed in range(episodes):
        obs, _ = env.reset(seed=seed)
        reward, first, over = 0.0, True, False
        while not over:
            actions.append(act(obs, reward, first))
            obs, reward, terminated, truncated, _ = env.step(actions[-1])
            first, over = False, terminated or truncated
    return actions


def by_player(player):
    def act(obs, reward, first):
        if first:
            player.reset()
        return player.act(obs, reward)

    return act


def test_learning_moves_every_part_of_the_network(learned):
    fresh = DAE("dae/TMaze-v0", env_kwargs={"length": 3}, **TINY)
    for (name, one), other in zip(learned.agent.net.named_parameters(), fresh.agent.net.parameters(), strict=True):
        assert not torch.equal(one, other), name
    assert learned.trainer.updates == (learned.trainer.agent_steps - 40) // 8


def test_predict_and_player_act_alike(learned):
    """Catches: a state that predict loses, a reward or an episode's start that it ignores."""
    state = None

    def predict(obs, reward, first):
        nonlocal state
        action, state = learned.predict(obs, state, episode_start=first, reward=reward)
        return action

    assert play(predict) == play(by_player(learned.player()))


def test_predict_takes_a_batch(learned):
    """Catches: rows that are mixed up: each row of a batch must act as it would alone."""
    rng = np.random.default_rng(0)
    rows = rng.random((6, 4, 5)).astype(np.float32)
    rewards = rng.choice([-1.0, 0.0, 1.0], (6, 4)).astype(np.float32)
    starts = rng.random((6, 4)) < 0.3
    starts[0] = True
    batch, together = None, []
    for obs, reward, start in zip(rows, rewards, starts, strict=True):
        action, batch = learned.predict(obs, batch, episode_start=start, reward=reward)
        together.append(action)
    for e in range(4):
        state, alone = None, []
        for obs, reward, start in zip(rows[:, e], rewards[:, e], starts[:, e], strict=True):
            action, state = learned.predict(obs, state, episode_start=bool(start), reward=float(reward))
            alone.append(action)
        assert alone == [a[e] for a in together]


def test_predict_warns_of_a_lost_state_and_of_a_missing_reward(learned):
    for given in ({"episode_start": False}, {}):
        agent = DAE("dae/TMaze-v0", **TINY)
        obs = np.zeros(5, np.float32)
        _, state = agent.predict(obs)
        with pytest.warns(UserWarning, match=r"predict\(\) was called without"):
            agent.predict(obs, None if given else state, **given)
    agent = DAE("dae/TMaze-v0", **TINY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # `state=None` where an episode opens is fine, however often
            _, state = agent.predict(obs)
            agent.predict(obs, state, reward=0.0)
        agent.predict(obs), agent.predict(obs)
    with pytest.warns(UserWarning, match="without the state of the step before"):
        agent.predict(obs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        action, state = learned.predict(np.zeros(5, np.float32))
        learned.predict(np.zeros(5, np.float32), state, reward=0.0)
    assert isinstance(action, int)


def test_a_saved_agent_comes_back_whole(learned, tmp_path):
    """Catches: a part of the learner that the checkpoint forgets."""
    path = learned.save(tmp_path / "agent")
    again = DAE.load(path)
    assert again.config == learned.config
    for name, tensor in learned.agent.state_dict().items():
        assert torch.equal(tensor, again.agent.state_dict()[name]), name
    assert (again.blueprint.agent_steps, again.blueprint.updates) == (learned.trainer.agent_steps, learned.trainer.updates)
    window = learned.trainer.replay.sample(np.random.default_rng(0), 4, learned.config.window_steps)
    for agent in (learned, again):
        agent.agent.update(window, learned.trainer.signals)
    for name, tensor in learned.agent.state_dict().items():
        assert torch.equal(tensor, again.agent.state_dict()[name]), f"{name} after one more update"


def test_an_export_plays_like_the_agent_and_holds_nothing_else(learned, tmp_path):
    path = export(tmp_path / "agent.safetensors", learned.agent.state_dict(), learned.blueprint)
    player, source = load_player(path)
    assert source.name == "dae/TMaze-v0"
    assert source.make().unwrapped.length == 3
    assert play(by_player(player)) == play(by_player(learned.player()))
    sixteen_bit = 2 * sum(
        v.numel() for k, v in learned.agent.state_dict().items() if k.startswith(("net.encoder", "net.core", "net.adv"))
    )
    assert path.stat().st_size < sixteen_bit + 8_000


def test_weights_only(learned, tmp_path):
    """Catches: an optimiser, a temperature or counters that come along."""
    path = learned.save(tmp_path / "agent")
    other = DAE("dae/TMaze-v0", env_kwargs={"length": 3}, **TINY | {"seed": 1})
    other.load_weights(path)
    for one, two in zip(learned.agent.net.parameters(), other.agent.net.parameters(), strict=True):
        assert torch.equal(one, two)
    assert other.agent.log_temperature == 0
    assert not other.agent.optimizer.state_dict()["state"]
    assert other.blueprint.agent_steps == 0
    other.learn()


def test_an_agent_too_large_to_learn_here_can_still_play():
    """Catches: a laptop that can't load what a large machine trained, for want of a replay that playing does not need."""
    agent = DAE("dae/TMaze-v0", **TINY | {"replay_agent_steps": 10**12})
    assert agent.evaluate(2)
    with pytest.raises(ResourceError):
        next(agent.reports())


@pytest.mark.parametrize("which", ["online", "ema"])
def test_whose_actions_are_played(which, learned, tmp_path):
    """`eval_weights` holds for evaluate, predict, player, load and export alike. Catches: one of them on the other network."""
    agent = DAE("dae/TMaze-v0", **TINY | {"eval_weights": which})
    agent.agent.load_state_dict(learned.agent.state_dict())
    with torch.no_grad():
        for net, favourite in ((agent.agent.net, 1), (agent.agent.ema, 2)):
            net.adv[-1].weight.zero_()
            net.adv[-1].bias.copy_(100 * torch.eye(3)[favourite])
    wanted, obs = {"online": 1, "ema": 2}[which], np.zeros(5, np.float32)
    assert agent.predict(obs)[0] == agent.player().act(obs) == wanted
    path = agent.save(tmp_path / "agent")
    assert DAE.load(path).predict(obs)[0] == wanted
    assert load_player(path)[0].act(obs) == wanted
    tensors, blueprint, _ = load_checkpoint(path)
    assert load_player(export(tmp_path / "a.safetensors", tensors, blueprint))[0].act(obs) == wanted
    diary = Diary()
    agent.evaluate(3, epsilon=0.0, diary=diary)
    assert all((action[running] == wanted).all() for action, running in zip(diary.action, diary.valid, strict=True))


def test_what_does_not_fit_is_refused(learned, tmp_path):
    path = learned.save(tmp_path / "agent")
    with pytest.raises(ConfigError, match="trained with other observations"):
        DAE.load(path, env="CartPole-v1")
    with pytest.raises(ConfigError, match="trained with another network"):
        DAE("dae/TMaze-v0", **TINY | {"embedding_dim": 16}).load_weights(path)
    with pytest.raises(ResourceError, match=r"GiB of memory.*at most about"):
        DAE("dae/TMaze-v0", **TINY | {"replay_agent_steps": 10**12}).learn()
    with pytest.raises(ConfigError, match="need more than"):
        DAE("dae/TMaze-v0", **TINY | {"replay_agent_steps": 12, "min_replay_agent_steps": 10}).learn()
    with pytest.raises(EnvironmentFault, match="Box are not supported"):
        DAE("Pendulum-v1", **TINY)
    with pytest.raises(FileError, match="neither a run folder"):
        DAE.load(tmp_path)


class Own(gym.Env):
    """Somebody's own environment: a dict of a picture and a number, actions from 3 on, rewards of any size."""

    observation_space = gym.spaces.Dict(look=gym.spaces.Box(0, 255, (10, 10, 3), np.uint8), time=gym.spaces.Discrete(5))
    action_space = gym.spaces.Discrete(2, start=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample() | {"time": 0}, {}

    def step(self, action):
        assert action in (3, 4)
        self.t += 1
        return self.observation_space.sample() | {"time": self.t}, 12.5 * action, self.t == 4, False, {}


@pytest.mark.parametrize("env", [Own, Own(), lambda: Own(), "test_api:Own"])
def test_own_environments(env, tmp_path):
    """Catches: a way of naming an environment that does not work, and code that is named by data."""
    agent = DAE(env, **TINY).learn()
    assert agent.evaluate(2)[0].length_agent_steps == 4
    path = agent.save(tmp_path / "agent")
    with pytest.raises(ConfigError, match="name it again: --env"):
        DAE.load(path)
    again = DAE.load(path, env=Own)
    assert again.player().act(Own().reset()[0]) in (3, 4)


@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode))
def test_vector_environments(mode):
    vector = gym.vector.SyncVectorEnv([lambda: gym.make("dae/TMaze-v0", length=3)] * 2, autoreset_mode=mode)
    agent = DAE(vector, **TINY, reward_classes=[-1, 0, 1]).learn()
    assert agent.trainer.updates == (agent.trainer.agent_steps - 40) // 8
    with pytest.raises(ConfigError, match="can't be evaluated"):
        agent.evaluate(1)


def test_evaluations_after_a_run_are_of_other_episodes():
    """Catches: the run's last evaluation, which may have ended it for being good, played again and passed for a fresh one."""
    agent = DAE("CartPole-v1", **TINY | {"eval_epsilon": 0.5})
    *_, last = [report.episodes for report in agent.reports() if report.kind == "eval"]
    again = agent.evaluate(len(last))
    assert [e.score for e in again] != [e.score for e in last]
    assert agent.evaluate(len(last)) == again


def test_a_callback_may_stop_the_run():
    seen = []
    DAE("dae/TMaze-v0", **TINY | {"log_every_agent_steps": 10}).learn(
        1000, lambda agent, report: seen.append(report.agent_steps) or len(seen) < 3
    )
    assert len(seen) == 3


def test_the_run_ends_at_the_score_that_was_asked_for():
    """Catches: a goal that is ignored, and one that is reached by any evaluation."""
    for goal, ends in ((-1.0, True), (1.5, False)):
        options = TINY | {"eval_every_agent_steps": 60, "stop_at_score": goal}
        agent = DAE("dae/TMaze-v0", env_kwargs={"length": 3}, **options).learn()
        assert (agent.trainer.agent_steps < 120) == ends
