"""The bundled environments: exact rewards, what is seen when and what never is, ends and limits, and the committed scores."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env

from dae.envs import BUNDLED, register, scores
from dae.envs.pomdps import CartPoleHidden, Confounding, Jackpot, TMaze
from dae.errors import ConfigError

HAS_PYGAME = importlib.util.find_spec("pygame") is not None
FORWARD, LEFT, RIGHT = 0, 1, 2


def play(env, actions, seed=0):
    """Observations [T+1], rewards [T], and how the last step ended."""
    obs, _ = env.reset(seed=seed)
    observed, rewards, ended = [obs], [], (False, False)
    for action in actions:
        assert not any(ended), "the episode was over before the script was"
        obs, reward, *ended, _ = env.step(action)
        observed.append(obs)
        rewards.append(reward)
    return np.stack(observed), rewards, tuple(ended)


def seed_with_cue(side, length=10):
    """A seed whose episode points there."""
    return next(s for s in range(100) if TMaze(length).reset(seed=s)[0][side - LEFT] == 1)


# ------------------------------------------------------------------------------------------------------------------- all four


@pytest.mark.parametrize("env_id", BUNDLED)
def test_passes_gymnasiums_own_check(env_id):
    env = gymnasium.make(env_id, disable_env_checker=True).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=isinstance(env, CartPoleHidden) and not HAS_PYGAME)


@pytest.mark.parametrize("env_id", BUNDLED)
def test_every_declared_reward_is_paid_and_no_other(env_id):
    env, rng, seen = gymnasium.make(env_id), np.random.default_rng(0), set()
    for seed in range(60):
        env.reset(seed=seed)
        over = False
        while not over:
            _, reward, terminated, truncated, _ = env.step(int(rng.integers(env.action_space.n)))
            seen.add(reward)
            over = terminated or truncated
    assert seen == set(env.metadata["reward_classes"])
    assert all(isinstance(value, float) for value in env.metadata["reward_classes"])


@pytest.mark.parametrize("env_id", BUNDLED)
def test_an_episode_follows_from_its_seed(env_id):
    env, other = gymnasium.make(env_id), gymnasium.make(env_id)
    num_steps = {"dae/Confounding-v0": 2, "dae/Jackpot-v0": 8}.get(env_id, 9)
    actions = np.random.default_rng(3).integers(2, size=num_steps)
    untouched = str(np.random.get_state())  # noqa: NPY002
    first = play(env, actions, seed=7)
    play(env, actions, seed=8)
    for again in (play(env, actions, seed=7), play(other, actions, seed=7)):
        np.testing.assert_array_equal(first[0], again[0])
        assert first[1:] == again[1:]
    assert str(np.random.get_state()) == untouched, "randomness from outside np_random"  # noqa: NPY002


@pytest.mark.parametrize("env_id", [env_id for env_id in BUNDLED if env_id != "dae/Confounding-v0"])
def test_chance_goes_on_from_episode_to_episode(env_id):
    def episode(env):
        over, record = False, [*env.reset()[0]]
        while not over:
            obs, _, *ended, _ = env.step(0 if len(record) % 4 else 1)
            over, record = any(ended), [*record, *obs]
        return tuple(record)

    env = gymnasium.make(env_id)
    env.reset(seed=0)
    assert len({episode(env) for _ in range(12)}) > 1


def test_registering_twice_is_harmless():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register()
    assert gymnasium.spec("dae/CartPoleHidden-v0").max_episode_steps == 500
    assert gymnasium.spec("dae/Jackpot-v0").max_episode_steps is None


def test_importing_the_ids_is_cheap():
    code = "import dae.envs, sys; print([m for m in ('torch', 'pygame', 'dae.envs.pomdps') if m in sys.modules])"
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("kind", "script"), [(Confounding, (0, 1)), (TMaze, (FORWARD,) * 10 + (LEFT,)), (Jackpot, (0,) * 8)])
def test_no_step_before_the_start_or_past_the_end_and_none_of_no_action(kind, script):
    env = kind()
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(InvalidAction):
        env.step(int(env.action_space.n))
    assert play(env, script)[2] == (True, False)
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.reset()
    env.step(0)


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (TMaze, {"length": 0}),
        (Confounding, {"gap": -1}),
        (Jackpot, {"steps": 0}),
        (Jackpot, {"risk": 1.5}),
        (Jackpot, {"stake": 0}),
        (TMaze, {"render_mode": "human"}),
    ],
)
def test_a_senseless_option_is_named(kind, kwargs):
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        kind(**kwargs)


# ---------------------------------------------------------------------------------------------------------------- Confounding


@pytest.mark.parametrize(("actions", "pay"), [((0, 0), 1.0), ((0, 1), 0.0), ((1, 0), 0.0), ((1, 1), 1.0)])
def test_confounding_pays_for_repeating(actions, pay):
    observed, rewards, ended = play(gymnasium.make("dae/Confounding-v0"), actions)
    assert rewards == [0.0, pay]
    assert ended == (True, False)
    np.testing.assert_array_equal(observed, np.eye(3))  # s1 and s2 look the same, and so do all ends
    assert observed.dtype == np.float32


def test_confounding_with_a_gap_compares_the_first_and_the_last_action():
    for first in (0, 1):
        for last in (0, 1):
            observed, rewards, ended = play(Confounding(gap=2), (first, 1 - first, 1 - last, last))
            assert rewards == [0, 0, 0, float(first == last)]
            assert ended == (True, False)
            np.testing.assert_array_equal(observed, np.eye(5))


# ---------------------------------------------------------------------------------------------------------------------- TMaze


@pytest.mark.parametrize("length", [1, 4, 10])
@pytest.mark.parametrize("cue", [LEFT, RIGHT])
@pytest.mark.parametrize("turn", [LEFT, RIGHT])
def test_tmaze_pays_for_the_turn_that_the_cue_told(length, cue, turn):
    observed, rewards, ended = play(TMaze(length), [FORWARD] * length + [turn], seed_with_cue(cue, length))
    assert rewards == [0.0] * length + [1.0 if turn == cue else -1.0]
    assert ended == (True, False)
    kinds = observed.argmax(-1).tolist()
    assert kinds == [cue - LEFT] + [TMaze.CORRIDOR] * (length - 1) + [TMaze.JUNCTION, TMaze.END]


def test_tmaze_shows_the_cue_once():
    """Whatever is done, the observations after the first are the same for both cues: nothing but memory tells them apart."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        walk = rng.permutation([FORWARD] * 9 + [LEFT] * 5 + [RIGHT] * 5).tolist() + [FORWARD] * 3 + [LEFT]
        told_left, told_right = (play(TMaze(), walk, seed_with_cue(cue))[0] for cue in (LEFT, RIGHT))
        assert not np.array_equal(told_left[0], told_right[0])
        np.testing.assert_array_equal(told_left[1:], told_right[1:])
        np.testing.assert_array_equal(told_left.sum(-1), 1)


def test_tmaze_cue_is_further_back_than_a_stack_of_four_frames():
    observed, _, _ = play(gymnasium.make("dae/TMaze-v0"), [FORWARD] * 10, seed=0)
    assert observed[-1].argmax() == TMaze.JUNCTION
    assert observed[-4:, [TMaze.CUE_LEFT, TMaze.CUE_RIGHT]].sum() == 0


def test_tmaze_turns_do_nothing_in_the_corridor_nor_forward_at_the_junction():
    seed = seed_with_cue(RIGHT)
    walk = [LEFT, RIGHT, FORWARD, LEFT] + [FORWARD] * 8 + [RIGHT]
    assert (play(TMaze(), walk, seed)[0][-1]).argmax() == TMaze.CORRIDOR
    observed, rewards, ended = play(TMaze(), walk + [FORWARD] * 3 + [RIGHT], seed)
    assert (observed[-4:-1].argmax(-1) == TMaze.JUNCTION).all()
    assert rewards[-1] == 1.0
    assert ended == (True, False)


def test_tmaze_cues_are_equally_likely():
    env = TMaze()
    env.reset(seed=0)
    assert 0.45 < np.mean([env.reset()[0][TMaze.CUE_LEFT] for _ in range(2000)]) < 0.55  # 4.5 standard errors


def test_tmaze_limit_truncates_and_a_turn_terminates():
    env = gymnasium.make("dae/TMaze-v0")
    assert play(env, [LEFT] * 99)[2] == (False, False)
    assert play(env, [LEFT] * 100)[1:] == ([0.0] * 100, (False, True))
    assert play(env, [LEFT] * 89 + [FORWARD] * 10 + [LEFT])[2][0]  # at the limit, but ended for good


# ------------------------------------------------------------------------------------------------------------- CartPoleHidden


def test_cartpole_is_gymnasiums_without_the_velocities():
    hidden, whole = gymnasium.make("dae/CartPoleHidden-v0"), gymnasium.make("CartPole-v1")
    actions = [1, 1, 0, 1, 0, 0, 1, 1]
    observed, rewards, ended = play(hidden, actions, seed=5)
    expected, *rest = play(whole, actions, seed=5)
    np.testing.assert_array_equal(observed, expected[:, [0, 2]])
    assert [rewards, ended] == rest
    assert observed.dtype == np.float32
    assert hidden.observation_space.shape == (2,)
    np.testing.assert_allclose(hidden.observation_space.high, [4.8, np.deg2rad(24)], rtol=1e-6)


def test_cartpole_one_observation_does_not_tell_the_velocities():
    env = CartPoleHidden()
    env.reset(seed=0)
    futures = []
    for speed in (-1.0, 1.0):
        env.state = np.array([0.0, speed, 0.0, -speed])
        futures.append(env.step(0)[0])
    assert not np.allclose(*futures)


def test_cartpole_fall_terminates_and_limit_truncates():
    env = gymnasium.make("dae/CartPoleHidden-v0")
    obs, _ = env.reset(seed=0)
    ended, rewards = [False, False], []
    while not any(ended):
        _, reward, *ended, _ = env.step(0)
        rewards.append(reward)
    assert ended == [True, False]
    assert len(rewards) < 15
    assert set(rewards) == {1.0}

    policy, ended, length = scores.balance(np.random.default_rng(0)), [False, False], 0
    obs, _ = env.reset(seed=0)
    while not any(ended):
        obs, _, *ended, _ = env.step(policy(obs))
        length += 1
    assert ended == [False, True]
    assert length == 500


# -------------------------------------------------------------------------------------------------------------------- Jackpot


def test_jackpot_shows_each_coin_in_the_next_observation_and_the_step_always():
    for seed in range(20):
        observed, rewards, ended = play(gymnasium.make("dae/Jackpot-v0"), [1, 0] * 4, seed)
        assert ended == (True, False)
        np.testing.assert_array_equal(observed[:, :9], np.eye(9))
        assert set(np.abs(rewards[::2])) == {1.0}
        assert set(rewards[1::2]) == {0.0}
        np.testing.assert_array_equal(observed[1::2, 9], rewards[::2])
        np.testing.assert_array_equal(observed[::2, 9], 0)


def test_jackpot_coins_depend_on_the_seed_and_not_on_the_actions():
    rng, coins = np.random.default_rng(0), set()
    for seed in range(10):
        runs = [tuple(play(Jackpot(), rng.integers(2, size=8), seed)[1][::2]) for _ in range(8)]
        assert len(set(runs)) == 1
        coins |= set(runs)
    assert len(coins) > 3


def test_jackpot_chances():
    risky = np.array([play(Jackpot(), [0, 1] * 4, seed)[1] for seed in range(2000)])
    assert set(np.unique(risky[:, 1::2])) == {-1.0, 0.0}
    assert abs(np.mean(risky[:, 1::2] < 0) - 0.1) < 4.5 * np.sqrt(0.09 / 8000)
    assert abs(np.mean(risky[:, ::2])) < 4.5 / np.sqrt(8000)
    assert (np.abs(np.corrcoef(risky.T) - np.eye(8)) < 4.5 / np.sqrt(2000)).all(), "chances hang together"


def test_jackpot_options():
    env = Jackpot(steps=4, risk=1.0, stake=10)
    assert env.metadata["reward_classes"] == (-10.0, -1.0, 0.0, 10.0)
    assert Jackpot.metadata["reward_classes"] == Jackpot().metadata["reward_classes"] == (-1.0, 0.0, 1.0)
    observed, rewards, ended = play(env, [1, 1, 1, 1])
    assert [abs(r) for r in rewards[::2]] == [10.0, 10.0]
    assert rewards[1::2] == [-1.0, -1.0]
    assert ended == (True, False)
    assert observed.shape == (5, 6)
    np.testing.assert_array_equal(observed[1::2, -1], np.sign(rewards[::2]))


# ------------------------------------------------------------------------------------------------------------------- pictures


def pictures(env_id, actions):
    env = gymnasium.make(env_id, render_mode="rgb_array")
    env.reset(seed=0)
    drawn = [env.render()]
    for action in actions:
        env.step(action)
        drawn.append(env.render())
    env.close()
    assert all(p.dtype == np.uint8 and p.ndim == 3 and p.shape == drawn[0].shape for p in drawn)
    assert env.metadata["render_modes"] == ["rgb_array"]
    assert env.metadata["render_fps"] > 0
    return drawn


@pytest.mark.parametrize(
    ("env_id", "actions"),
    [("dae/Confounding-v0", (0, 0)), ("dae/TMaze-v0", (FORWARD,) * 10 + (LEFT,)), ("dae/Jackpot-v0", (0, 1, 0, 0, 0, 1, 0, 0))],
)
def test_every_step_changes_the_picture(env_id, actions):
    drawn = pictures(env_id, actions)
    assert drawn[0].shape == (160, 160, 3)
    assert all((a != b).any() for a, b in itertools.pairwise(drawn))


@pytest.mark.skipif(not HAS_PYGAME, reason="pygame renders it")
def test_cartpole_moves_in_the_picture():
    drawn = pictures("dae/CartPoleHidden-v0", [1] * 6)
    assert (drawn[0] != drawn[-1]).any()


def test_without_a_render_mode_nothing_is_drawn():
    env = TMaze()
    env.reset(seed=0)
    assert env.render() is None


# --------------------------------------------------------------------------------------------------------------------- scores


def test_scores_name_every_environment_and_agree_with_what_is_known():
    loaded, known = scores.load(), scores.references()
    assert set(loaded) == set(BUNDLED) == set(known)
    for env_id, by_name in loaded.items():
        exact = {"random": known[env_id].exact_random, "reference": known[env_id].exact}
        for name, score in by_name.items():
            assert score["exact"] == exact[name]
            assert score["episodes"] == 1000
            if score["exact"] is not None:
                assert abs(score["mean"] - score["exact"]) <= 4 * score["standard_error"]
        assert by_name["random"]["mean"] < by_name["reference"]["mean"]
    assert loaded["dae/CartPoleHidden-v0"]["reference"]["mean"] == 500


@pytest.mark.parametrize("env_id", ["dae/Confounding-v0", "dae/Jackpot-v0"])
def test_scores_are_those_of_this_code(env_id):
    reference = scores.references()[env_id]
    for maker, score in ((None, scores.load()[env_id]["random"]), (reference.make, scores.load()[env_id]["reference"])):
        again = scores.measure(env_id, maker, score["episodes"], score["seed"])
        np.testing.assert_allclose(again, (score["mean"], score["standard_error"]))


@pytest.mark.parametrize(("env_id", "episodes"), [("dae/TMaze-v0", 300), ("dae/CartPoleHidden-v0", 200)])
def test_scores_come_out_again_with_another_seed(env_id, episodes):
    loaded, reference = scores.load()[env_id], scores.references()[env_id]
    mean, error = scores.measure(env_id, None, episodes, seed=1)
    assert abs(mean - loaded["random"]["mean"]) < 4.5 * np.hypot(error, loaded["random"]["standard_error"])
    assert scores.measure(env_id, reference.make, 20, seed=1) == (loaded["reference"]["mean"], 0.0)


def test_scores_command_writes_and_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scores", "--episodes", "2", "--seed", "5", "--out", str(tmp_path / "s.json")])
    scores.main()
    written = json.loads((tmp_path / "s.json").read_text())
    assert set(written) == set(BUNDLED)
    assert written["dae/Jackpot-v0"]["random"]["seed"] == 5
    printed = capsys.readouterr().out
    assert all(env_id in printed for env_id in BUNDLED)
