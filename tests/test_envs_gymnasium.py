"""Anyone's environment: how it is named, made, seeded and stepped, and one line for each way in which it can be wrong."""

import itertools
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from conftest import MODES, REWARD_CLASSES, counters
from dae.envs.check import check_env
from dae.envs.gymnasium import EnvList, VectorAdapter, declared_reward_classes, env_source
from dae.errors import ConfigError, DaeWarning, EnvironmentFault, MissingExtra


class Plain(gym.Env):
    """Two steps. What it returns can be replaced: `step_returns(t)` and `reset_returns()`."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    zeros = np.zeros(2, np.float32)

    def __init__(self, render_mode=None, **answers):
        self.render_mode, self.answers, self.t = render_mode, answers, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.answers.get("reset", (self.zeros, {}))

    def step(self, action):
        self.t += 1
        answer = self.answers.get("step", {}).get(self.t, (self.zeros, 0.0, self.t == 2, False, {}))
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Coin(Plain):
    """The first number of each observation is random."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}


def one_line(error, *words):
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)


# ------------------------------------------------------------------------------------------------------- naming and making


def test_by_id_class_path_class_callable_and_object(tmp_path, monkeypatch):
    """Catches: a source whose environments are one and the same, a class path that may be kept in files, options that get lost."""
    (tmp_path / "their_package.py").write_text("from test_envs_gymnasium import Plain\n\nclass Theirs(Plain):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = Plain(colour=3)
    expected = [
        ("CartPole-v1", "CartPole-v1", "CartPole-v1", {}),
        ("dae/TMaze-v0", "dae/TMaze-v0", "dae/TMaze-v0", {"length": 4}),
        ("their_package:Theirs", "Theirs", None, {"colour": 1}),
        (Plain, "Plain", None, {"colour": 1}),
        (lambda: Plain(colour=2), "env", None, {}),
        (made, "Plain", None, {}),
    ]
    for given, name, plain_id, kwargs in expected:
        source = env_source(given, kwargs)
        assert (source.name, source.plain_id) == (name, plain_id)
        one, two = source.make(), source.make()
        assert one is not two
        assert one.unwrapped is not two.unwrapped
        assert made not in (one, two)
        one.reset(seed=0)
        for key, value in kwargs.items():
            assert value in (getattr(one.unwrapped, key, None), getattr(one.unwrapped, "answers", {}).get(key))
    assert env_source(made).make().answers == {"colour": 3}
    assert env_source("CartPole-v1").make().unwrapped.spec.id == "CartPole-v1"


def test_rendering_is_asked_for_where_it_is_possible():
    """Catches: a render mode that is forced on a callable without one, or None where no mode was asked for."""
    assert env_source(Plain).make(render_mode="rgb_array").render_mode == "rgb_array"
    assert env_source(lambda: Plain()).make(render_mode="rgb_array").render_mode is None
    assert env_source("dae/TMaze-v0").make(render_mode="rgb_array").render_mode == "rgb_array"
    assert env_source("dae/TMaze-v0").make(render_mode=None).render_mode is None


def test_a_time_limit_of_ours():
    """Catches: a limit that terminates, or that is dropped for one kind of source."""
    for given in (Coin, lambda: Coin(), Coin(), "CartPole-v1"):
        env = env_source(given, {}, max_steps=1).make()
        env.reset(seed=0)
        *_, terminated, truncated, _ = env.step(0)
        assert (terminated, truncated) == (False, True)


@pytest.mark.parametrize(
    ("given", "kwargs", "error", "words"),
    [
        ("", {}, ConfigError, ["--env ID"]),
        ("CartPole-v9", {}, ConfigError, ["no environment 'CartPole-v9'", "did you mean 'CartPole-v1'?", "package.module:Class"]),
        ("dae/TMase-v0", {}, ConfigError, ["did you mean 'dae/TMaze-v0'?"]),
        ("no_such_module:Env", {}, ConfigError, ["No module named 'no_such_module'"]),
        ("test_envs_gymnasium:Plane", {}, ConfigError, ["has no Plane", "did you mean 'Plain'?"]),
        ("test_envs_gymnasium:MODES", {}, ConfigError, ["MODES can't be called"]),
        ("broken_module:Env", {}, ConfigError, ["importing broken_module raised ZeroDivisionError"]),
        ("leaving_module:Env", {}, ConfigError, ["importing leaving_module raised SystemExit: 4"]),
        (":Env", {}, ConfigError, ["importing"]),
        (Plain(), {"a": 1}, ConfigError, ["env_kwargs"]),
        (5, {}, ConfigError, ["env=5: must be an id, package.module:Class, a class"]),
        (["CartPole-v1"], {}, ConfigError, ["must be an id"]),
    ],
)
def test_what_cannot_be_named(given, kwargs, error, words, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    (tmp_path / "leaving_module.py").write_text("import sys\n\nsys.exit(4)\n")
    with pytest.raises(error) as caught:
        env_source(given, kwargs)
    one_line(caught, *words)


class Refuses(Plain):
    def __init__(self, size):
        raise ValueError(f"size={size}: too small")


class Leaves(Plain):
    def __init__(self, render_mode=None):
        sys.exit(4)


class Unfinished(gym.Env):
    action_space = spaces.Discrete(2)


class Duck:
    observation_space, action_space = Plain.observation_space, Plain.action_space


class Uncopyable(Plain):
    def __deepcopy__(self, memo):
        raise TypeError("holds a socket")


@pytest.mark.parametrize(
    ("given", "kwargs", "words"),
    [
        (lambda size: Plain(), {"length": 1}, ["can't be made with {'length': 1}", "length"]),
        ("dae/TMaze-v0", {"size": 1}, ["environment 'dae/TMaze-v0' can't be made with {'size': 1}", "size"]),
        (Refuses, {"size": 1}, ["can't be made with {'size': 1}: ValueError: size=1: too small"]),
        (Leaves, {}, ["can't be made with {}: SystemExit: 4"]),
        (Unfinished, {}, ["environment Unfinished: has no observation_space"]),
        (Duck, {}, ["type Duck, not a gymnasium.Env"]),
        (lambda: None, {}, ["type NoneType, not a gymnasium.Env"]),
        ("os:getcwd", {}, ["type str, not a gymnasium.Env"]),
        (Uncopyable(), {}, ["Uncopyable can't be copied", "TypeError: holds a socket", "DAE(lambda: Uncopyable())"]),
    ],
)
def test_what_cannot_be_made(given, kwargs, words):
    source = env_source(given, kwargs)
    with pytest.raises(EnvironmentFault) as caught:
        source.make()
    one_line(caught, *words)


# --------------------------------------------------------------------------------------------------------------- contract


NAN = np.array([np.nan, 0], np.float32)
STEPS = {
    "raises": (RuntimeError("the joystick broke"), "raised RuntimeError: the joystick broke"),
    "leaves": (SystemExit(3), "raised SystemExit: 3"),
    "raises at length": (ValueError("no such\n  joint"), "raised ValueError: no such joint"),
    "four values": ((Plain.zeros, 0.0, False, {}), "must return (observation, reward, terminated, truncated, info)"),
    "no tuple": (None, "must return (observation, reward, terminated, truncated, info)"),
    "NaN reward": ((Plain.zeros, float("nan"), False, False, {}), "returned the reward nan"),
    "infinite reward": ((Plain.zeros, -np.inf, False, False, {}), "returned the reward -inf"),
    "infinite in single precision": ((Plain.zeros, 1e39, False, False, {}), "returned the reward"),
    "a reward whose square overflows": ((Plain.zeros, 1e25, False, False, {}), "the reward 1e+25, but 1e+18 is the most"),
    "a reward beyond all floats": ((Plain.zeros, -(10**400), False, False, {}), "returned the reward inf"),
    "reward in text": ((Plain.zeros, "1", False, False, {}), "returned the reward '1', which is no number"),
    "raw reward in text": (
        (Plain.zeros, 0.0, False, False, {"dae.raw_reward": "1"}),
        "info['dae.raw_reward']: '1', which is no number",
    ),
    "raw reward NaN": ((Plain.zeros, 0.0, False, False, {"dae.raw_reward": np.nan}), "returned info['dae.raw_reward']: nan"),
    "reward None": ((Plain.zeros, None, False, False, {}), "returned the reward None, which is no number"),
    "rewards": ((Plain.zeros, np.zeros(2), False, False, {}), "which is no number"),
    "terminated 1": ((Plain.zeros, 0.0, 1, False, {}), "returned terminated=1, which is not a bool"),
    "truncated None": ((Plain.zeros, 0.0, False, None, {}), "returned truncated=None, which is not a bool"),
    "NaN observation": ((NAN, 0.0, False, False, {}), "returned what its space does not allow: observation 'obs' holds NaN"),
    "another shape": ((np.zeros(3, np.float32), 0.0, False, False, {}), "has the shape (3,), its space says (2,)"),
}
RESETS = {
    "no info": (Plain.zeros, "reset() must return (observation, info)"),
    "NaN observation": ((NAN, {}), "reset() returned what its space does not allow: observation 'obs' holds NaN"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_bad_step_is_named(name):
    """Catches: NaN that reaches the replay, a traceback of ours, and a message without environment, seed or step."""
    answer, words = STEPS[name]
    number = itertools.count()
    envs = EnvList(lambda: Plain(step={2: answer} if next(number) == 1 else {}), 3, np.random.SeedSequence(0))
    envs.reset()
    envs.step(np.zeros(3, np.int64))
    with pytest.raises(EnvironmentFault) as caught:
        envs.step(np.zeros(3, np.int64))
    one_line(caught, "environment 1, ", f"episode seed {envs.episode_seed(1)}, ", "step 2: step() ", words)


@pytest.mark.parametrize("name", RESETS)
def test_a_bad_reset_is_named(name):
    answer, words = RESETS[name]
    envs = EnvList(lambda: Plain(reset=answer), 1, np.random.SeedSequence(0))
    with pytest.raises(EnvironmentFault) as caught:
        envs.reset()
    one_line(caught, f"environment 0, episode seed {envs.episode_seed(0)}, step 0: ", words)


def test_other_exceptions_of_reset_are_named():
    class Broken(Plain):
        def reset(self, *, seed=None, options=None):
            raise OSError("no ROM")

    with pytest.raises(EnvironmentFault, match=r"reset\(\) raised OSError: no ROM"):
        EnvList(Broken, 1, np.random.SeedSequence(0)).reset()


def test_numbers_that_numpy_makes_are_welcome():
    """Catches: rewards and flags that are refused for being NumPy's."""
    answer = (np.zeros(2, np.float64), np.float64(0.5), np.bool_(True), np.bool_(False), {})
    envs = EnvList(lambda: Plain(step={1: answer}), 1, np.random.SeedSequence(0))
    envs.reset()
    stepped = envs.step(np.zeros(1, np.int64))
    assert (stepped.reward.tolist(), stepped.terminated.tolist(), stepped.truncated.tolist()) == ([0.5], [True], [False])
    assert stepped.obs["obs"].dtype == np.float32


def test_continuous_actions_are_refused_at_once():
    class Continuous(Plain):
        action_space = spaces.Box(-1, 1, (1,), np.float32)

    for make in (lambda seed: EnvList(Continuous, 1, seed), lambda seed: VectorAdapter(SyncVectorEnv([Continuous]), seed)):
        with pytest.raises(EnvironmentFault, match="actions of type Box are not supported"):
            make(np.random.SeedSequence(0))


def test_declared_reward_classes():
    """Catches: classes hidden by a wrapper, or ints that never equal a reward."""

    class Declares(Plain):
        metadata = {"reward_classes": (0, 1)}

    assert declared_reward_classes(Declares()) == (0.0, 1.0)
    assert declared_reward_classes(gym.wrappers.TimeLimit(Declares(), 3)) == (0.0, 1.0)
    assert declared_reward_classes(Plain()) == ()
    for nothing in (None, {}, {"reward_classes": ()}):
        assert declared_reward_classes(type("Silent", (Plain,), {"metadata": nothing})()) == ()
    for mode in MODES:
        assert counters(mode)[0].reward_classes == REWARD_CLASSES


@pytest.mark.parametrize("declared", ["abc", "01", 5, None, (0, "x"), (0, None), (0, np.nan)])
def test_reward_classes_that_are_no_numbers(declared):
    env = type("Odd", (Plain,), {"metadata": {"reward_classes": declared}})()
    with pytest.raises(EnvironmentFault) as caught:
        declared_reward_classes(env)
    one_line(caught, "metadata['reward_classes'] is", "must be a list of numbers")


class RaisesAtTheEnd(Plain):
    def close(self):
        raise RuntimeError("the window is gone")


@pytest.mark.parametrize("many", [EnvList, lambda make, num, seed: VectorAdapter(SyncVectorEnv([make] * num), seed)])
def test_what_close_raises_is_a_warning(many):
    """Catches: results that are lost at the very end."""
    envs = many(RaisesAtTheEnd, 2, np.random.SeedSequence(0))
    with pytest.warns(DaeWarning, match=r"close\(\) of .* raised RuntimeError: the window is gone"):
        envs.close()


# ------------------------------------------------------------------------------------------------------------------ check


def found(name, **kwargs):
    """What `dae check` says of one of the environments here: {rule: (verdict, what was seen)}."""
    return {row.rule: (row.verdict, row.seen) for row in check_env(f"test_envs_gymnasium:{name}", kwargs, 30, 0)}


class Answers(Plain):
    """Gives one fixed answer at its second step; `kind` names it."""

    ANSWERS = {
        "bounds": (np.array([0, 7], np.float32), 0.0, False, False, {}),
        "large reward": (Plain.zeros, 1e25, False, False, {}),
        "huge reward": (Plain.zeros, 10**400, False, False, {}),
        "text": (Plain.zeros, "1", False, False, {}),
        "markup": ValueError("bad tag [/red]"),
    }

    def __init__(self, kind):
        super().__init__(step={2: self.ANSWERS[kind]})


class Bytes(Plain):
    observation_space = spaces.Box(0, 255, (2,), np.uint8)
    zeros = np.array([0, 300])


class Picture(Plain):
    def __init__(self, shape):
        self.observation_space = spaces.Box(0, 255, tuple(shape), np.uint8)
        self.zeros = np.zeros(shape, np.uint8)
        super().__init__()

    def step(self, action):
        return self.zeros, *super().step(action)[1:]


class Declares(Plain):
    def __init__(self, classes):
        super().__init__()
        self.metadata = {"reward_classes": classes}


class Nothing(Plain):
    observation_space = spaces.Dict({})


BROKEN = [
    (
        "Answers",
        {"kind": "bounds"},
        "observations are in their space",
        "step 2, seed 0: step() returned what its space does not promise",
    ),
    ("Bytes", {}, "observations are in their space", "holds 300, outside its bounds 0 to 255"),
    ("Answers", {"kind": "large reward"}, "rewards are small enough to learn from", "the reward 1e+25"),
    ("Answers", {"kind": "huge reward"}, "rewards are finite", "inf"),
    ("Answers", {"kind": "text"}, "rewards are numbers", "'1', which is no number"),
    ("Answers", {"kind": "markup"}, "step works", "step 2, seed 0: step() raised ValueError: bad tag [/red]"),
    ("Declares", {"classes": "abc"}, "spaces and reward classes are supported", "must be a list of numbers"),
    ("Nothing", {}, "spaces and reward classes are supported", "there is nothing in them"),
    ("Duck", {}, "can be made", "not a gymnasium.Env"),
    ("Unfinished", {}, "can be made", "has no observation_space"),
    ("Refuses", {"size": 1}, "can be made", "ValueError: size=1"),
]


@pytest.mark.parametrize(("name", "kwargs", "rule", "words"), BROKEN)
def test_check_names_what_is_broken(name, kwargs, rule, words):
    """Catches: an `ok` for what training refuses, or what no space promises."""
    verdict, seen = found(name, **kwargs)[rule]
    assert verdict == "bad"
    assert words in seen
    assert "\n" not in seen


def test_check_is_content_with_a_sound_environment():
    assert {verdict for verdict, _ in found("Coin").values()} <= {"ok", "note"}
    assert found("Coin")["the same seed gives the same episode"][0] == "ok"


def test_check_tells_the_layout_of_pictures():
    rule = "where a picture's channels are"
    assert found("Picture", shape=[20, 30, 3])[rule] == ("ok", "'obs' (20, 30, 3): last (only that end is of 4 or fewer)")
    verdict, seen = found("Picture", shape=[4, 20, 3])[rule]
    assert verdict == "note"
    assert "first (a guess" in seen
    assert "--channels" in seen
    assert rule not in found("Coin")


def test_check_says_what_close_raises():
    rows = found("RaisesAtTheEnd")
    assert rows["close works"] == ("note", "close() of RaisesAtTheEnd raised RuntimeError: the window is gone")
    assert rows["episodes end"][0] == "ok"


def test_check_leaves_other_errors_their_exit_codes(monkeypatch):
    """Catches: an option that is wrong, or an extra that is missing, told as a fault of the environment."""
    with pytest.raises(ConfigError, match="no environment"):
        check_env("CartPol-v1", {}, 10, 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"dae-rl\[atari\]"):
        check_env("ALE/Pong-v5", {}, 10, 0)


# -------------------------------------------------------------------------------------------------------------- autoreset


@pytest.mark.parametrize("mode", MODES)
def test_what_a_step_returns_at_an_end(mode):
    """Catches: a last observation that is replaced by the next first one, and the reverse. Environment 1 ends with each step."""
    envs, made = counters(mode, lengths=(3, 1, 5))
    envs.reset()
    stepped = envs.step(np.zeros(3, np.int64))
    assert stepped.terminated.tolist() == [False, made[1].terminates(0), False]
    assert (stepped.terminated | stepped.truncated).tolist() == [False, True, False]
    if mode in ("list", "next_step"):
        assert stepped.final_obs is None
        assert stepped.obs["obs"].tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]
        stepped = envs.step(np.zeros(3, np.int64))
        assert stepped.reward[1] == 0
        assert not (stepped.terminated | stepped.truncated)[1]
        assert stepped.obs["obs"].tolist() == [[0, 0, 2], [1, 1, 0], [2, 0, 2]]
    else:
        assert stepped.obs["obs"].tolist() == [[0, 0, 1], [1, 1, 0], [2, 0, 1]]
        assert stepped.final_obs["obs"][1].tolist() == [1, 0, 1]
        assert envs.step(np.zeros(3, np.int64)).final_obs is None


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_raw_rewards_of_a_vector(mode):
    """Catches: scores of what was learned from, at an episode's last step above all, where SAME_STEP tells it elsewhere."""

    class Clipped(Plain):
        def __init__(self, length, says):
            super().__init__()
            self.length, self.says, self.t = length, says, 0

        def reset(self, **options):
            self.t = 0
            return super().reset(**options)

        def step(self, action):
            obs, _, _, _, info = super().step(action)
            return obs, 1.0, self.t == self.length, False, info | ({"dae.raw_reward": 10.0 * self.t} if self.says else {})

    make = [lambda: Clipped(1, True), lambda: Clipped(3, True), lambda: Clipped(2, False)]
    envs = VectorAdapter(SyncVectorEnv(make, autoreset_mode=mode), np.random.SeedSequence(0))
    envs.reset()
    one, two = envs.step(np.zeros(3, np.int64)), envs.step(np.zeros(3, np.int64))
    assert one.paid.tolist() == [10, 10, 1]
    assert two.paid.tolist()[1:] == [20, 1]
    assert one.reward.tolist() == [1, 1, 1]


def test_some_environments_only():
    """Catches: rows of `only` that belong to others. Evaluation steps those that still run."""
    envs, made = counters("list", 4)
    envs.reset()
    stepped = envs.step(np.array([1, 2]), only=[3, 1])
    assert stepped.obs["obs"].tolist() == [[3, 0, 1], [1, 0, 1]]
    assert [[h.action for h in counter.diary] for counter in made] == [[], [2], [], [1]]


def test_the_first_action_of_the_space():
    """Catches: Discrete(start=...) whose actions are shifted twice or never."""
    for mode in MODES:
        envs, made = counters(mode, first_action=-3)
        envs.reset()
        envs.step(np.array([0, 1, 2]))
        assert [counter.diary[0].action for counter in made] == [0, 1, 2]


def test_a_vector_that_does_not_say_what_it_ended_with():
    class Silent(SyncVectorEnv):
        def step(self, actions):
            *returned, info = super().step(actions)
            info.pop("final_obs", None)
            return *returned, info

    envs = VectorAdapter(Silent([Plain] * 2, autoreset_mode=AutoresetMode.SAME_STEP), np.random.SeedSequence(0))
    envs.reset()
    envs.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFault, match="without info"):
        envs.step(np.zeros(2, np.int64))


def test_a_vector_that_tells_its_ends_by_numbers():
    """Catches: 0 and 1 taken for indices: `score[ended]` would be the scores of environments 0 and 1, and `~ended` always true."""

    class Counting(SyncVectorEnv):
        def step(self, actions):
            obs, reward, terminated, truncated, info = super().step(actions)
            return obs, reward, terminated.astype(np.int8), truncated.astype(np.int8), info

    envs = VectorAdapter(Counting([Plain] * 2), np.random.SeedSequence(0))
    envs.reset()
    stepped = envs.step(np.zeros(2, np.int64))
    assert (stepped.terminated.dtype, stepped.truncated.dtype) == (np.bool_, np.bool_)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((Plain.zeros, np.nan, False, False, {}), "environment 1, step 1: a reward is not finite"),
        ((NAN, 0.0, False, False, {}), "step 1: observation 'obs' holds NaN or infinity"),
        ((Plain.zeros, 1e25, False, False, {}), "environment 1, step 1: a reward is above 1e+18"),
        (RuntimeError("the joystick\nbroke"), "step 1: step() of the vector raised RuntimeError: the joystick broke"),
    ],
)
def test_a_vector_with_a_fault(answer, words):
    made = [lambda: Plain(), lambda: Plain(step={1: answer})]
    envs = VectorAdapter(SyncVectorEnv(made), np.random.SeedSequence(0))
    envs.reset()
    with pytest.raises(EnvironmentFault) as caught:
        envs.step(np.zeros(2, np.int64))
    one_line(caught, words)


def test_a_vector_whose_environment_breaks_at_reset():
    class Broken(Plain):
        def reset(self, *, seed=None, options=None):
            raise OSError("no ROM")

    with pytest.raises(EnvironmentFault, match=r"step 0: reset\(\) of the vector raised OSError: no ROM"):
        VectorAdapter(SyncVectorEnv([Broken]), np.random.SeedSequence(0)).reset()


# ------------------------------------------------------------------------------------------------------------------ seeds


def test_episodes_have_seeds_of_their_own():
    """Catches: seeds by adding: seed + i shares n - 1 of n episodes with the next seed, and episode 1 with the next environment.

    A seed has 32 bits, because many environments take no more. So two of 8,000 differ, and of 100,000 about one pair is the same.
    """

    def seeds(bases, episodes):
        for base in range(bases):
            for part in np.random.SeedSequence(base).spawn(2):
                envs = EnvList(Plain, 8, part)
                for episode in range(episodes):
                    envs._episode = [episode] * 8
                    yield from (envs.episode_seed(e) for e in range(8))

    few, many = list(seeds(20, 25)), list(seeds(20, 313))
    assert len(few) == len(set(few)) == 8_000
    assert len(many) - len(set(many)) < 10


def test_the_same_seed_gives_the_same_episodes():
    """Catches: a seed that is drawn anew, or given to the first episode only."""

    def firsts(seed):
        envs, found = EnvList(Coin, 3, np.random.SeedSequence(seed)), []
        obs = envs.reset()
        for _ in range(9):
            found.append(obs["obs"])
            obs = envs.step(np.zeros(3, np.int64)).obs
        return np.array(found)[::3]  # an episode has 3 slots: two steps, and its last observation

    one = firsts(0)
    np.testing.assert_array_equal(one, firsts(0))
    assert len({tuple(obs) for obs in one.reshape(-1, 2).tolist()}) == 9, "every episode starts in its own way"
    assert not np.isin(one, firsts(1)).any()


def test_vectors_are_seeded_apart():
    """Catches: one seed for all environments of a vector."""
    one, same, other = (
        VectorAdapter(SyncVectorEnv([Coin] * 3), np.random.SeedSequence(seed)).reset()["obs"] for seed in (0, 0, 1)
    )  # fmt: skip
    np.testing.assert_array_equal(one, same)
    assert len({tuple(obs) for obs in [*one.tolist(), *other.tolist()]}) == 6
