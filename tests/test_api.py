"""`DAE` and `Player`: what a user calls."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch

from dae import DAE, load_player
from dae.envs.pomdps import TMaze
from dae.errors import ConfigError, DaeWarning, EnvironmentFault, FileError, ResourceError
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


def test_predict_has_two_warnings():
    """Catches: the second one, which the first one silences."""
    agent, obs = DAE("dae/TMaze-v0", **TINY), np.zeros(5, np.float32)
    _, state = agent.predict(obs)
    with pytest.warns(UserWarning, match="without `reward`"):
        agent.predict(obs, state)
    with pytest.warns(UserWarning, match="without the state of the step before"):
        agent.predict(obs, episode_start=False, reward=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent.predict(obs, state)
        agent.predict(obs, episode_start=False, reward=0.0)


ROWS = np.zeros((4, 5), np.float32)


@pytest.mark.parametrize(
    ("obs", "options", "error", "words"),
    [
        (ROWS[:0], {}, ConfigError, "an empty batch"),
        (ROWS[:3], {"reward": 0.0}, ConfigError, r"3 observation\(s\), and the state of 4"),
        (ROWS[0], {"reward": 0.0}, ConfigError, r"1 observation\(s\), and the state of 4"),
        (
            ROWS,
            {"episode_start": [True, False], "reward": 0.0},
            ConfigError,
            "episode_start must be one value, or one for each of the 4",
        ),
        (ROWS, {"reward": [0.0, 1.0]}, ConfigError, "reward must be one value, or one for each of the 4"),
        (ROWS, {"reward": np.array([0, 1, np.nan, 0])}, ConfigError, "reward is not finite"),
        (ROWS, {"reward": "much"}, ConfigError, "reward must be one value"),
        (ROWS * np.nan, {"reward": 0.0}, EnvironmentFault, "holds NaN or infinity"),
        (np.zeros((4, 6)), {"reward": 0.0}, EnvironmentFault, r"has the shape \(6,\)"),
        (None, {"reward": 0.0}, EnvironmentFault, "does not allow"),
    ],
)
def test_what_predict_refuses(learned, obs, options, error, words):
    _, state = learned.predict(ROWS, episode_start=True)
    with pytest.raises(error, match=words) as caught:
        learned.predict(obs, state, **options)
    assert "\n" not in str(caught.value)


def test_predict_names_a_missing_part():
    agent = DAE(Own, **TINY)
    with pytest.raises(EnvironmentFault, match="has no part 'look'"):
        agent.predict({"time": 0})


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


FAULTS = {
    "NaN observation": ({}, {2: (np.full(5, np.nan), 0.0, False, False, {})}, "step 2: step.*holds NaN"),
    "NaN reward": ({}, {2: (np.zeros(5), np.nan, False, False, {})}, "step 2: .*the reward nan"),
    "no reward": ({}, {1: (np.zeros(5), None, False, False, {})}, "step 1: .*the reward None, which is no number"),
    "four values": ({}, {1: (np.zeros(5), 0.0, False, {})}, "step 1: .*must return"),
    "step raises": ({}, {1: OSError("the socket\nis closed")}, "step 1: step.. raised OSError: the socket is closed"),
    "reset raises": ({"reset": KeyError("nope")}, {}, "step 0: reset.. raised KeyError"),
    "reset without info": ({"reset": np.zeros(5)}, {}, "step 0: reset.. must return .observation, info"),
    "render raises": ({"render": ValueError("no display")}, {}, "step 1: render.. raised ValueError: no display"),
}


class Faulty(gym.Env):
    """Observed as the T-maze is."""

    observation_space, action_space = gym.spaces.Box(0, 1, (5,), np.float32), gym.spaces.Discrete(3)
    render_mode = "rgb_array"

    def __init__(self, others, steps):
        self.others, self.steps, self.t = others, steps, 0

    def answer(self, answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reset(self, *, seed=None, options=None):
        return self.answer(self.others.get("reset", (np.zeros(5), {})))

    def step(self, action):
        self.t += 1
        return self.answer(self.steps.get(self.t, (np.zeros(5), 0.0, self.t == 3, False, {})))

    def render(self):
        return self.answer(self.others.get("render"))


@pytest.mark.parametrize("name", FAULTS)
def test_playing_checks_what_training_checks(learned, name):
    """Catches: a traceback, and a score of NaN."""
    others, steps, words = FAULTS[name]
    with pytest.raises(EnvironmentFault, match=f"^episode seed 7, {words}") as caught:
        list(learned.player().play(Faulty(others, steps), seed=7))
    assert "\n" not in str(caught.value)
    assert len(list(learned.player().play(Faulty({}, {})))) == 3


@pytest.mark.parametrize(
    ("obs", "reward", "words"),
    [
        (ROWS[0], None, "the reward is None"),
        (ROWS[0], np.nan, "the reward is nan"),
        (ROWS[0] + np.nan, 0.0, "NaN"),
        (None, 0.0, "shape"),
    ],
)
def test_what_a_player_refuses(learned, obs, reward, words):
    with pytest.raises(EnvironmentFault, match=words):
        learned.player().act(obs, reward)


@pytest.mark.parametrize("options", [{"epsilon": 2}, {"epsilon": -0.1}, {"epsilon": float("nan")}, {"seed": -1}])
def test_limits_of_playing(learned, options):
    """Catches: shares above one, NaN that compares as false, and a seed that NumPy refuses at length."""
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*must be"):
        learned.player(**options)
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*must be"):
        learned.evaluate(1, **options)
    with pytest.raises(ConfigError, match="episodes=0: must be at least 1"):
        learned.evaluate(0)


def test_whose_keyword_arguments_are_used(learned, tmp_path):
    """Catches: another task that is played without a word, and arguments that are given and dropped."""
    path = learned.save(tmp_path / "agent")

    def length(env, **options):
        return load_player(path, env, **options)[1].make().unwrapped.length

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert length(None) == length("dae/TMaze-v0") == 3
        assert length(TMaze, env_kwargs={"length": 7}) == length(None, env_kwargs={"length": 7}) == 7
        assert length(TMaze, env_kwargs={}) == length(TMaze()) == 10
        assert DAE.load(path, TMaze, env_kwargs={"length": 7}).source.make().length == 7
    for env in (TMaze, "dae.envs.pomdps:TMaze", lambda: TMaze()):
        with pytest.warns(DaeWarning, match=r"env_kwargs \{'length': 3\} are not used") as said:
            assert length(env) == 10
        assert len(said) == 1
        with pytest.warns(DaeWarning, match="are not used"):
            assert DAE.load(path, env).source.make().length == 10


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
    words = r"trained with other observations \(obs \(5,\) float32\) than this environment has \(obs \(4,\) float32\)"
    with pytest.raises(ConfigError, match=words):
        DAE.load(path, env="CartPole-v1", env_kwargs={})
    with pytest.raises(ConfigError, match=words):
        DAE("CartPole-v1", **TINY).load_weights(path)
    with pytest.raises(ConfigError, match=words):
        load_player(path, env="CartPole-v1", env_kwargs={})
    with pytest.raises(EnvironmentFault, match="actions of type Box are not supported"):
        load_player(path, env="Pendulum-v1", env_kwargs={})
    with pytest.raises(ConfigError, match=r"options that were given \(core_dim\) make another network"):
        DAE.load(path, core_dim=64)
    exported = export(tmp_path / "a.safetensors", learned.agent.state_dict(), learned.blueprint)
    with pytest.raises(FileError, match="an export can only be played"):
        DAE.load(exported)
    with pytest.raises(FileError, match="an export can only be played"):
        learned.load_weights(exported)
    with pytest.raises(FileError, match="not an exported agent"):
        DAE.load(path / "agent.safetensors")
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


@pytest.mark.parametrize("preset", [None, 5, [5], {"laptop"}])
def test_presets_that_are_no_names(preset):
    with pytest.raises(ConfigError, match=r"preset=.*must be the name of a preset"):
        DAE("CartPole-v1", preset=preset)


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
