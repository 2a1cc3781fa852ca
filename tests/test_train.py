"""Whole runs: exact counts, the same numbers again from the same seed, and small problems whose values are known."""

import hashlib
import itertools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from conftest import Counter, tiny_agent, tiny_config
from dae.config import Config
from dae.envs.gymnasium import EnvList
from dae.errors import ConfigError, Diverged
from dae.network import Inputs
from dae.train import Seeds, Trainer, build_agent, pick_device, pick_reward_classes

SHORT = {
    "num_envs": 4, "frame_stack": 1, "batch_size": 4, "replay_agent_steps": 2000, "min_replay_agent_steps": 40,
    "agent_steps_per_update": 4, "total_agent_steps": 160, "learning_rate": "1e-2", "log_every_agent_steps": 50,
    "eval_episodes": 2, "eval_every_agent_steps": 80, "variance_every_agent_steps": 32, "epsilon": "0:1, 100:0.1",
    "eps_wta": "0:1, 100:0",
}  # fmt: skip


def trainer(make=Counter, evaluation=True, **overrides):
    cfg = tiny_config(**SHORT | overrides)
    number = itertools.count()
    envs = EnvList(lambda: make(next(number)), cfg.environment.num_envs, Seeds.of(cfg.run.seed).envs)
    agent = build_agent(cfg, envs.spec, envs.num_actions, pick_reward_classes(cfg, envs.reward_classes))
    return Trainer(cfg, envs, agent, (lambda: make(0)) if evaluation else None)


def fingerprint(made):
    """Of everything that was learned and collected."""
    digest = hashlib.sha256()
    for name, tensor in sorted(made.agent.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    for tensor in (*made.replay.obs.values(), made.replay.action, made.replay.reward, made.replay.core_in):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------ determinism


@pytest.mark.parametrize("options", [{}, {"rewards": "general"}, {"behaviour": "aligned", "stored_states": False}, {"core": "mlp"}])
def test_the_same_seed_is_the_same_run_to_the_last_bit(options):
    """Catches: randomness that does not descend from the seed, and a seed that some part ignores."""
    made = []
    for seed in (0, 0, 1):
        torch.rand(3)
        np.random.rand(3)  # noqa: NPY002  nobody may depend on the global generators
        run = trainer(seed=seed, **options)
        reports = [(r.kind, r.agent_steps, r.updates, r.episodes, sorted(r.metrics.items())) for r in run.run()]
        made.append((fingerprint(run), reports))
    assert made[0] == made[1]
    assert made[0][0] != made[2][0]


def test_evaluation_and_logging_do_not_touch_the_run():
    """Catches: an evaluation that draws from the run's generators, a metric that moves the sampler, a state that is left behind."""
    one, other = trainer(), trainer(evaluation=False, eval_every_agent_steps=0, log_every_agent_steps=7)
    for run in (one, other):
        list(run.run())
    assert fingerprint(one) == fingerprint(other)


def test_seeds_are_apart():
    """Catches: two parts of a run that share a stream, evaluations that all play the same episodes."""
    streams = [vars(Seeds.of(seed)).values() for seed in range(3)]
    states = [tuple(s.generate_state(4)) for parts in streams for s in parts]
    states += [tuple(Seeds.of(0).evaluation_at(step).generate_state(4)) for step in (0, 1, 2)]
    assert len(set(states)) == len(states)
    assert (Seeds.of(0).evaluation_at(5).generate_state(4) == Seeds.of(0).evaluation_at(5).generate_state(4)).all()


# ----------------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize("every", [1, 4, 6, 16])
def test_the_replay_ratio_is_exact(every):
    """Catches: updates before the minimum, one too many or too few, and vector steps counted for agent steps."""
    often = {"log_every_agent_steps": 1, "eval_every_agent_steps": 0}
    run = trainer(agent_steps_per_update=every, evaluation=False, min_replay_agent_steps=37, **often)
    before = 0
    for report in run.run():
        diary = sum(len(env.diary) for env in run.envs.envs)
        assert report.agent_steps == run.agent_steps == diary
        known = diary if diary >= 160 else before  # the learner works while the environments step; in the end it catches up
        assert report.updates == run.updates == max(0, known - 37) // every
        before = diary
    assert run.updates == (run.agent_steps - 37) // every
    assert 160 <= run.agent_steps < 164


def test_updates_that_had_to_wait_are_made_up_for():
    """Catches: a replay ratio that is short of the updates that were owed before the first whole window was stored."""
    run = trainer(min_replay_agent_steps=0, burn_in_steps=20, log_every_agent_steps=1, evaluation=False)
    counts = [report.updates for report in run.run()]
    assert counts[4] == 0
    assert run.updates == run.agent_steps // 4


def test_the_reports_of_a_run():
    """Catches: episodes reported twice or never, an evaluation too many, a last stretch without a report."""
    run, reports, rings = trainer(), [], []
    for report in run.run():
        reports.append(report)
        rings.append(run.updates)
    assert [r.kind for r in reports] == ["train", "eval", "train", "train", "train", "eval", "end"]
    assert [r.updates for r in reports] == rings
    trained = [e for r in reports if r.kind == "train" for e in r.episodes]
    finished = sum(h.terminated or h.truncated for env in run.envs.envs for h in env.diary)
    assert len(trained) == finished > 20
    for r in reports:
        if r.kind == "train":
            assert all(e.agent_step <= r.agent_steps for e in r.episodes)
            assert r.metrics["rollout/epsilon"] == run.cfg.acting.epsilon(r.agent_steps, 160)
        if r.kind == "eval":
            assert [(e.env, e.length_agent_steps) for e in r.episodes] == [(0, 4), (1, 4)]
    assert reports[-1].agent_steps == run.agent_steps


def test_the_signals_follow_their_schedules():
    """Catches: a schedule by updates, one that lags, Var(G) of long ago."""
    run = trainer(log_every_agent_steps=1, evaluation=False, eps_wta="0:1, 100:0", learning_rate="0:0, 100:1e-2, end:1e-3")
    due, seen, variances, plain = 0, [], [], run.agent.update

    def update(window, signals):
        nonlocal due
        seen.append(run.agent_steps)
        now = min(run.agent_steps, 160)
        assert signals.eps_wta.item() == pytest.approx(max(0.0, 1 - now / 100), abs=1e-6)
        assert signals.learning_rate.item() == pytest.approx(1e-4 * now if now < 100 else 1e-2 - 9e-3 * (now - 100) / 60, rel=1e-5)
        if run.agent_steps >= due:
            variances.append(signals.return_variance.item())
            assert variances[-1] == pytest.approx(run.replay.return_variance(0.99), rel=1e-6)
            due = run.agent_steps + 32
        assert signals.return_variance.item() == variances[-1]
        return plain(window, signals)

    run.agent.update = update
    list(run.run())
    assert len(seen) == 30
    assert len(variances) == 4


def test_metrics_are_means_over_the_updates_since_the_last():
    """Catches: the last update's numbers passed for all, and sums that are not cleared."""
    run, rows = trainer(evaluation=False), []
    plain = run.agent.update

    def update(window, signals):
        rows.append({name: x.item() for name, x in plain(window, signals).items()})
        return {name: torch.tensor(x) for name, x in rows[-1].items()}

    run.agent.update, done = update, 0
    for report in run.run():
        if report.kind == "train":
            for name in rows[0] if rows[done:] else ():
                assert report.metrics[name] == pytest.approx(np.mean([row[name] for row in rows[done:]]), rel=1e-4, abs=1e-7), name
            done = len(rows)
    assert done == 30


def test_states_drift_only_when_weights_change():
    """Catches: a drift that compares states of different slots, or across an episode's end."""
    still, moving = (trainer(evaluation=False, learning_rate=rate) for rate in ("0", "3e-2"))
    drifts = [[r.metrics["dae/state_drift"] for r in run.run() if r.updates and r.kind == "train"] for run in (still, moving)]
    assert max(drifts[0]) < 1e-5
    assert min(drifts[1]) > 1e-3


def test_epsilon_follows_its_schedule_and_evaluation_has_its_own():
    """Catches: a schedule by updates or vector steps, acting with the evaluation epsilon, or the reverse."""
    run = trainer(total_agent_steps=200, epsilon="0:1, 150:0.2", eval_epsilon=0.75, evaluation=True)
    plain, expected = run.agent.act, {4: lambda now: max(0.2, 1 - 0.8 * now / 150), 2: lambda now: 0.75}
    acted = []

    def act(inputs, state, epsilon, rng, meanwhile=None):
        envs = len(inputs.reset[0])
        acted.append(envs)
        assert epsilon == pytest.approx(expected[envs](run.agent_steps))
        return plain(inputs, state, epsilon, rng, meanwhile)

    run.agent.act = act
    list(run.run())
    assert set(acted) == {4, 2}


# -------------------------------------------------------------------------------------------------------------- the pieces


def test_which_reward_classes_are_in_force():
    assert pick_reward_classes(Config(), ()) == ()
    assert pick_reward_classes(Config(), (0.0, 1.0)) == (0.0, 1.0)
    assert pick_reward_classes(Config().override(reward_classes=[-1, 1]), (0.0, 1.0)) == (-1.0, 1.0)
    assert pick_reward_classes(Config().override(rewards="general"), (0.0, 1.0)) == ()
    assert pick_reward_classes(Config().override(rewards="classes"), (0.0, 1.0)) == (0.0, 1.0)
    with pytest.raises(ConfigError, match="declares no reward classes"):
        pick_reward_classes(Config().override(rewards="classes"), ())


def test_which_device():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device=cuda: this machine has none"):
            pick_device("cuda")


class Costly(gym.Env):
    """Pays -0.1, whatever happens."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, number):
        self.t = 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(3, np.float32), -0.1, self.t == 10, False, {}


def test_rewards_that_never_change_have_a_scale():
    """Catches: a standard deviation of rounding errors, by which equal rewards become millions."""
    run = trainer(Costly, evaluation=False, rewards="general")
    list(run.run())
    assert run.signals.reward_scale.item() > 0.01
    assert run.metrics() is not None
    assert all(x.isfinite().all() and x.abs().max() < 1e3 for x in run.agent.state_dict().values())


# ------------------------------------------------------------------------------------------------------ values that are known


class Probe(gym.Env):
    """`observe(t)` and `pay(t)` at each step of an episode of `steps`; `coin` is tossed at its beginning."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    metadata = {"reward_classes": (-1.0, 0.0, 1.0)}
    steps, terminates = 1, True

    def __init__(self, number):
        self.t, self.coin = 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.coin = 0, int(self.np_random.choice([-1, 1]))
        return np.array(self.observe(0), np.float32), {}

    def step(self, action):
        reward, self.t = self.pay(self.t, int(action)), self.t + 1
        over = self.t == self.steps
        return np.array(self.observe(self.t), np.float32), float(reward), over and self.terminates, over and not self.terminates, {}

    def observe(self, t):
        return t == 0, t == 1, t == 2

    def pay(self, t, action):
        return 0


QUICK = {
    "embedding_dim": 16, "core_dim": 16, "value_hidden": 32, "prediction_hidden": 16, "prior_hidden": 16, "batch_size": 16,
    "num_envs": 8, "agent_steps_per_update": 8, "learning_rate": "0:1e-2, end:1e-3", "ema_decay": 0.9, "discount": 0.9,
    "epsilon": "0.5", "eps_wta": "0", "min_replay_agent_steps": 80, "total_agent_steps": 1600, "replay_agent_steps": 1600,
    "log_every_agent_steps": 10_000,
}  # fmt: skip


def learned(make, temperature=1.0, **overrides):
    run = trainer(make, evaluation=False, **QUICK | overrides)
    with torch.no_grad():
        run.agent.log_temperature.fill_(math.log(temperature))
        run.agent.ema_temperature.fill_(temperature)
    list(run.run())
    return run


def along(run, coin=0, actions=None):
    """Values and advantages of one episode, from its first observation to the last one before its end; and its features."""
    env = run.envs.envs[0]
    env.coin, reward, core, rows = coin, 0.0, torch.zeros(1, run.agent.net.state_dim), []
    for t in range(env.steps):
        action = (actions or [0] * env.steps)[t - 1] if t else 0
        inputs = Inputs(
            {"obs": torch.tensor(env.observe(t), dtype=torch.float32).view(1, 1, 1, 3)}, torch.tensor([[action]]),
            torch.tensor([[reward]]), torch.tensor([[t == 0]]),
        )  # fmt: skip
        with torch.no_grad():
            trunk = run.agent.net.trunk(inputs, core)
            adv = run.agent.net.raw_adv(trunk.features)[0, 0]
            rows.append((run.agent.net.state_value(trunk.features).item(), (adv - adv.mean()).tolist(), trunk.features))
        core, reward = trunk.core, float(env.pay(t, (actions or [0] * env.steps)[t]))
    return rows


trains = pytest.mark.usefixtures("unchecked")


@trains
def test_probe_one_step():
    """V = 1 where each episode is one step that pays 1. Catches: a reward of another slot, a bootstrap behind the end."""

    class OneStep(Probe):
        def pay(self, t, action):
            return 1

    ((value, adv, _),) = along(learned(OneStep))
    assert value == pytest.approx(1, abs=0.05)
    assert adv == pytest.approx([0, 0], abs=0.05)


@trains
@pytest.mark.parametrize("backup_steps", [1, 3])
def test_probe_delay(backup_steps):
    """V = gamma^2, gamma, 1 on the way to a reward two steps later. Catches: a discount that is missing, doubled or shifted."""

    class Delay(Probe):
        steps = 3

        def pay(self, t, action):
            return t == 2

    values = [value for value, _, _ in along(learned(Delay, backup_steps=backup_steps, train_steps=3))]
    assert values == pytest.approx([0.81, 0.9, 1], abs=0.06)


@trains
@pytest.mark.parametrize("options", [{"corrections": "skill"}, {"beta_prior": 1, "total_agent_steps": 2400}])
def test_probe_memory(options):
    """The reward is the cue that was seen two steps before, and no longer: V = gamma^2 cue, gamma cue, cue.

    Catches: a recurrent state that does not last, in acting or in learning. With luck it takes longer: a prior that has not learned
    to remember leaves the reward to B, and V has nothing left to explain.
    """

    class Memory(Probe):
        steps = 3

        def observe(self, t):
            return self.coin if t == 0 else 0, t == 1, t == 2

        def pay(self, t, action):
            return self.coin if t == 2 else 0

    run = learned(Memory, **options)
    for cue in (-1, 1):
        values = [value for value, _, _ in along(run, cue)]
        assert values == pytest.approx([0.81 * cue, 0.9 * cue, cue], abs=0.1)


@trains
def test_probe_truncation():
    """A reward of 1 for ever, cut off after 4 steps: V = 1 / (1 - gamma), where a terminal would give less than 2.

    Catches: a truncated episode that is not bootstrapped, or is from the next episode's first observation.
    """

    class Endless(Probe):
        steps, terminates = 4, False

        def observe(self, t):
            return 1, 0, 0

        def pay(self, t, action):
            return 1

    values = [value for value, _, _ in along(learned(Endless, discount=0.5))]
    assert values == pytest.approx([2] * 4, abs=0.1)


@trains
def test_probe_skill():
    """One action pays 1, the other 0, from random behaviour, under a cold target policy: V is the better one's, A is 0 and -1.

    Catches: advantages that are not centred under the target policy: V would be the behaviour's, 1/2.
    """

    class Choice(Probe):
        def pay(self, t, action):
            return action

    run = learned(Choice, temperature=0.02, epsilon="1", temperature_lr_multiplier=0.0)
    ((value, adv, _),) = along(run)
    assert adv == pytest.approx([-0.5, 0.5], abs=0.06)  # raw, less their mean
    assert value == pytest.approx(1, abs=0.06)


@trains
def test_probe_luck():
    """A coin of +-1 is all there is: V = 0, and B explains the coin. Without B the residual is as large as the coin.

    Catches: luck of the wrong sign, of another slot's reward, not centred, or never let in.
    """

    class Coin(Probe):
        def pay(self, t, action):
            return self.coin

    residuals = {}
    for corrections in ("skill+luck", "skill"):
        run = learned(Coin, corrections=corrections)
        window = run.replay.sample(np.random.default_rng(0), 64, run.cfg.window_steps)
        with torch.no_grad():
            _, parts = run.agent.losses(window, run.signals)
        residuals[corrections] = parts["dae"].item()
        ((value, _, _),) = along(run, coin=1)
        assert value == pytest.approx(0, abs=0.25)
        if corrections == "skill+luck":
            valid = window.valid[run.cfg.objective.burn_in_steps :]
            reward = window.reward[run.cfg.objective.burn_in_steps :]
            torch.testing.assert_close(parts["luck"][valid], reward[valid], atol=0.3, rtol=0)
    assert residuals["skill+luck"] < 0.02
    assert residuals["skill"] > 0.8


def test_a_tiny_agent_is_what_build_agent_makes():
    """The helper that most tests use must not be another network."""
    cfg = tiny_config()
    one = tiny_agent(cfg, stir=False).state_dict()
    other = build_agent(cfg, tiny_agent(cfg).net.spec, 3, (-1.0, 0.0, 1.0)).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in other)


# ------------------------------------------------------------------------------------------------- evaluation beside training


@pytest.mark.parametrize("every", [40, 12])
def test_an_evaluation_beside_training_is_the_one_that_training_waits_for(every):
    """The same episodes, reported for the same steps, and the same run; also where the next is due before one is over. Catches:
    weights that change under an evaluation, one that is lost, and agent steps of when it ended in place of when it began."""
    made = []
    for beside in (False, True):
        options = {"total_agent_steps": 320, "eval_every_agent_steps": every, "eval_epsilon": 0.3}
        run, evaluated, when = trainer(eval_beside=beside, **options), [], []
        for report in run.run():
            if report.kind == "eval":
                evaluated.append((report.agent_steps, report.updates, report.episodes))
                when.append(run.agent_steps)
        made.append((evaluated, fingerprint(run)))
        assert (when != [steps for steps, _, _ in evaluated]) == beside, "evaluations beside training end later than they begin"
    assert made[0] == made[1]
    assert len(made[0][0]) == -(-320 // every)


def test_an_evaluation_beside_training_is_left_when_the_run_is_stopped():
    """Catches: environments that stay open, and a report of episodes that never ended."""
    run, closed = trainer(eval_beside=True, eval_every_agent_steps=40), []
    for report in run.run():
        assert report.kind != "eval"
        if run.running is not None and not run.stop:
            run.stop, evaluation = True, run.running.evaluation
            evaluation.envs.close = lambda: closed.append(True)
    assert closed == [True]
    assert report.kind == "end"


def test_a_goal_reached_beside_training_ends_the_run():
    run = trainer(eval_beside=True, eval_every_agent_steps=40, stop_at_score=-100.0)
    kinds = [report.kind for report in run.run()]
    assert kinds[-3:] == ["eval", "train", "end"]
    assert kinds.count("eval") == 1
    assert run.agent_steps < 160


@pytest.mark.parametrize("beside", [False, True])
def test_a_run_that_is_stopped_drops_its_evaluation(beside):
    """Catches: an evaluation that must be waited for, one that is begun though the run is over, and one that is reported half."""
    run, began = trainer(eval_beside=beside, eval_every_agent_steps=80), []
    run.before_evaluation = lambda: began.append(run.agent_steps)
    plain = run.agent.act

    def act(*given):
        run.stop = bool(began)  # while the evaluation plays its first step, or training its first step beside it
        return plain(*given)

    run.agent.act = act
    kinds = [report.kind for report in run.run()]
    assert kinds[-1] == "end"
    assert set(kinds) == {"train", "end"} | ({"stopped"} if beside else set())  # else it ends where the evaluation was to be
    assert len(began) == 1
    assert run.agent_steps <= began[0] + 4
    assert run.running is None


def test_losses_that_are_not_finite_end_the_run():
    """Catches: NaN that is learned from to the end. The line that says so is still reported."""
    run, reports = trainer(evaluation=False, learning_rate="0:1e-2, 80:1e-2, 81:1e30", log_every_agent_steps=20), []
    with pytest.raises(Diverged, match=r"train/loss_\w+ is (nan|inf) after \d+ agent steps"):
        reports.extend(run.run())
    assert not math.isfinite(sum(reports[-1].metrics.values()))
    assert reports[-1].agent_steps < 140


# ---------------------------------------------------------------------------------------------------------- an early end


def test_a_run_may_end_before_its_schedules():
    """Catches: schedules that end with the run, a last stretch without a report, an end without an evaluation."""
    whole, cut = trainer(total_agent_steps=320, learning_rate="0:1e-2, end:0"), trainer(
        total_agent_steps=320, learning_rate="0:1e-2, end:0", stop_after_agent_steps=160
    )  # fmt: skip
    until = [(r.agent_steps, r.episodes) for r in whole.run() if r.kind == "eval" and r.agent_steps < 165]
    reports = list(cut.run())
    assert 160 <= cut.agent_steps < 164
    assert [(r.agent_steps, r.episodes) for r in reports if r.kind == "eval"] == until
    assert [r.kind for r in reports[-3:]] == ["train", "eval", "end"]
    assert cut.signals.learning_rate.item() == pytest.approx(1e-2 * (1 - cut.agent_steps / 320), rel=1e-5)


def test_a_run_may_end_after_some_time(monkeypatch):
    """Catches: seconds taken for minutes, and an end without an evaluation."""
    clock = itertools.count()
    monkeypatch.setattr("dae.train.time.monotonic", lambda: 20.0 * next(clock))
    run = trainer(stop_after_minutes=2.0)
    kinds = [report.kind for report in run.run()]
    assert kinds == ["train", "eval", "end"]
    assert run.agent_steps <= 6 * 4
