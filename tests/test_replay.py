"""The rings: what is written, what can be sampled, and the returns in them, each against a slow reference."""

import math

import numpy as np
import pytest
import torch

from conftest import VECTOR
from dae.encoders import ObsPart
from dae.replay import Replay, bytes_needed

SPEC = {"obs": ObsPart((2,), torch.float32), "look": ObsPart((1, 2, 2), torch.uint8)}


class Stream:
    """A replay, and beside it everything that was ever written to it, as plain lists."""

    def __init__(self, rng, num_envs=3, slots=12, frame_stack=3, p_end=0.3, uneven=True, length=40):
        self.replay, self.rng = Replay(SPEC, num_envs, slots * num_envs, 4, frame_stack), rng
        self.written = [[] for _ in range(num_envs)]
        opens = np.ones(num_envs, bool)
        for _ in range(length):
            ended = np.zeros(num_envs, bool)
            envs = np.flatnonzero(rng.random(num_envs) < (0.6 if uneven else 1.1))  # not every environment every time
            if not len(envs):
                continue
            rows = [self.row(e, len(self.written[e]), opens[e], p_end) for e in envs]
            for e, row in zip(envs, rows, strict=True):
                self.written[e].append(row)
                ended[e] = not row["valid"]
            self.replay.add(
                envs,
                {name: np.stack([row[name] for row in rows]) for name in SPEC},
                np.array([row["reset"] for row in rows]),
                torch.tensor(np.stack([row["core_in"] for row in rows])),
                np.array([row["action"] for row in rows]),
                np.array([row["reward"] for row in rows], np.float32),
                np.array([row["terminal"] for row in rows]),
                np.array([row["valid"] for row in rows]),
            )
            opens[envs] = ended[envs]

    def row(self, env, slot, opens, p_end):
        rng, before = self.rng, self.written[env][-1] if self.written[env] else None
        # A slot that is not valid follows a terminal, and sometimes none: then the episode was cut off.
        valid = not (before and before["terminal"]) and bool(opens or rng.random() > p_end)
        return {
            "obs": np.array([env, slot], np.float32),
            "look": rng.integers(0, 256, (1, 2, 2)).astype(np.uint8),
            "reset": bool(opens),
            "core_in": rng.normal(size=4).astype(np.float32),
            "action": int(rng.integers(0, 5)),
            "reward": float(rng.integers(-3, 4)),
            "terminal": bool(valid and rng.random() < p_end),
            "valid": valid,
        }

    def stack(self, env, slot, name):
        """The frames of that slot's episode, zeros before its first, one by one."""
        frames, at, opened = [], slot, False
        for _ in range(self.replay.frame_stack):
            row = self.written[env][max(at, 0)]
            frames.append(np.zeros_like(row[name]) if opened or at < 0 else row[name])
            opened, at = opened or row["reset"], at - 1
        return np.stack(frames[::-1])

    def kept(self, env):
        """The first slot that is not overwritten."""
        return max(0, len(self.written[env]) - self.replay.slots)


class Everything(np.random.Generator):
    """Draws each number once, in order."""

    def __init__(self):
        super().__init__(np.random.PCG64(0))

    def integers(self, low, high, size):
        assert (low, size) == (0, high)
        return np.arange(high)


def every_window(replay, length):
    """All that `sample` can return, with equal chances as long as its draw has them."""
    return replay.sample(Everything(), int(replay.num_starts(length).sum()), length)


@pytest.mark.parametrize("frame_stack", [1, 2, 4])
@pytest.mark.parametrize("written", [5, 12, 40])
def test_windows_hold_what_was_written(written, frame_stack, rng):
    """Catches: a wrong slot of the ring, an action or reward of another step, frames across an opening, a state of another slot.

    Every window that can be sampled at all is looked at, before the ring is full, when it just is, and after it turned.
    """
    stream = Stream(rng, frame_stack=frame_stack, length=written)
    window = every_window(stream.replay, 3)
    for b in range(window.action.shape[1]):
        env, start = (int(x) for x in window.inputs.obs["obs"][0, b, -1])
        np.testing.assert_array_equal(window.core_in[b], stream.written[env][start]["core_in"])
        for t in range(4):
            row = stream.written[env][start + t]
            for name in SPEC:
                np.testing.assert_array_equal(window.inputs.obs[name][t, b], stream.stack(env, start + t, name))
            assert window.inputs.reset[t, b] == row["reset"]
            if not row["reset"]:
                before = stream.written[env][start + t - 1]
                assert window.inputs.prev_action[t, b] == before["action"]
                assert window.inputs.prev_reward[t, b] == before["reward"]
            if t < 3:
                for name in ("action", "reward", "terminal", "valid"):
                    assert getattr(window, name)[t, b] == row[name], name
    assert window.inputs.obs["look"].dtype == torch.uint8


@pytest.mark.parametrize("frame_stack", [1, 2, 4])
@pytest.mark.parametrize("written", [4, 5, 12, 13, 14, 40])
def test_every_stored_window_is_sampled_and_no_other(written, frame_stack, rng):
    """Catches: a window across the write head of its own environment, one that looks back on an overwritten slot, one never drawn."""
    stream = Stream(rng, frame_stack=frame_stack, length=written, uneven=written > 14)
    expected = set()
    for env, rows in enumerate(stream.written):
        oldest = stream.kept(env)
        for start in range(oldest, len(rows) - 3):
            looks_back = max(1, frame_stack - 1)
            if start - looks_back >= oldest or oldest == 0:  # before the first slot of the run there is nothing to look back on
                expected.add((env, start))
    if expected:
        places = every_window(stream.replay, 3).inputs.obs["obs"][0, :, -1].long().tolist()
        assert sorted(map(tuple, places)) == sorted(expected)
        assert stream.replay.num_starts(3).sum() == len(expected)
    if written == 40:
        assert len({len(rows) for rows in stream.written}) > 1, "write heads that lie apart"


def test_sampling_draws_from_all_of_them(rng):
    """Catches: environments drawn with equal chances though one of them holds fewer windows."""
    stream = Stream(rng, length=14)
    total = int(stream.replay.num_starts(3).sum())
    places = stream.replay.sample(rng, 400 * total, 3).inputs.obs["obs"][0, :, -1]
    counts = places.unique(dim=0, return_counts=True)[1]
    assert len(counts) == total
    assert ((counts - 400).abs() < 5 * 20).all(), "five standard deviations"


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 2, 4), (1, 3, 3)])
def test_packed_windows_are_the_same_windows(shape, rng):
    """Catches: frames or channels in another order, frames of another episode, and a layout that convolutions have to copy."""
    spec, no = {"look": ObsPart(shape, torch.uint8), "obs": ObsPart((2,), torch.float32)}, np.zeros(2, bool)
    plain, packed = (Replay(spec, 2, 24, 1, 4, fast=packed) for packed in (False, True))
    for step in range(30):
        rows = {"look": rng.integers(0, 256, (2, *shape)).astype(np.uint8), "obs": rng.normal(size=(2, 2)).astype(np.float32)}
        reset, number = rng.random(2) < 0.3, np.full(2, step)
        for replay in (plain, packed):
            replay.add(np.arange(2), rows, reset, torch.zeros(2, 1), number, number.astype(np.float32), no, ~no)
    one, other = (every_window(replay, 5) for replay in (plain, packed))
    assert all(torch.equal(one.inputs.obs[name], other.inputs.obs[name]) for name in spec)
    look = other.inputs.obs["look"].flatten(0, 1).flatten(1, 2)  # as an encoder sees it
    assert look.is_contiguous(memory_format=torch.channels_last) == (shape != (1, 3, 3)), "9 bytes can't be moved by the eight"


def test_too_little_is_refused(rng):
    stream = Stream(rng, length=3, uneven=False)
    assert stream.replay.num_starts(2).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="no window of 3 transitions is stored yet"):
        stream.replay.sample(rng, 1, 3)


def test_the_same_generator_draws_the_same_windows(rng):
    stream = Stream(rng)
    one, two = (stream.replay.sample(np.random.default_rng(3), 20, 4) for _ in range(2))
    assert torch.equal(one.inputs.obs["obs"], two.inputs.obs["obs"])


def test_states_in_sixteen_bits(rng):
    """As CUDA stores them: half the memory, the nearest half-precision number, and never infinity."""
    assert 2 * bytes_needed({}, 1, 10, torch.device("cuda")) - bytes_needed({}, 1, 10, torch.device("cpu")) == 15
    replay = Replay(VECTOR, 2, 40, 3, 1, state_dtype=torch.float16)
    no, states = np.zeros(2, bool), torch.tensor([[0.1, -2.0, 3.0], [1e6, -1e6, 1e-3]])
    for _ in range(3):
        row = {"obs": np.zeros((2, 3), np.float32)}
        replay.add(np.arange(2), row, no, states, np.zeros(2, np.int64), np.zeros(2, np.float32), no, ~no)
    core = replay.window(torch.tensor([0, 0]), torch.tensor([0, 1]), 2).core_in
    assert core.dtype == torch.float32
    torch.testing.assert_close(core[0], states[0], rtol=1e-3, atol=0)
    assert core[1].tolist()[:2] == [65504.0, -65504.0]


@pytest.mark.parametrize("spec", [SPEC, VECTOR, {"obs": ObsPart((1, 84, 84), torch.uint8)}])
def test_bytes_needed_is_what_is_allocated(spec):
    """Catches: a ring that the preflight does not know of."""
    replay = Replay(spec, 4, 80, 10, 4)
    rings = [x for x in (*replay.obs.values(), *vars(replay).values()) if isinstance(x, torch.Tensor)]
    assert sum(x.numel() * x.element_size() for x in rings) == bytes_needed(spec, 80, 10, torch.device("cpu"))
    assert {x.shape[:2] for x in rings} == {(20, 4)}


# ----------------------------------------------------------------------------------------------------------------- returns


def slow_returns(stream, discount):
    """(environment, slot) -> the return from there on, and whether 95% of its weight was seen. Episode by episode, sum by sum."""
    found = {}
    for env, rows in enumerate(stream.written):
        for slot in range(stream.kept(env), len(rows)):
            total, terms, ended = 0.0, 0, False
            for row in rows[slot:]:
                if not row["valid"]:
                    ended = True
                    break
                total += discount**terms * row["reward"]
                terms += 1
                if row["terminal"]:
                    ended = True
                    break
            if rows[slot]["valid"]:
                found[env, slot] = total, ended or 1 - discount**terms >= 0.95
    return found


@pytest.mark.parametrize("p_end", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("length", [3, 30, 90])
def test_returns_against_the_sums(length, discount, p_end, rng):
    """Catches: a return across an end or the write head, one that starts from a slot without a transition, and an unfinished tail that
    is counted as whole, or left out where it has its 95%.
    """
    stream = Stream(rng, slots=50, length=length, p_end=p_end)
    expected = slow_returns(stream, discount)
    returns, whole = stream.replay.returns(discount)
    assert len(returns) == len(expected)
    np.testing.assert_allclose(sorted(returns.tolist()), sorted(total for total, _ in expected.values()), atol=1e-9)
    np.testing.assert_allclose(
        sorted(returns[whole].tolist()), sorted(total for total, seen in expected.values() if seen), atol=1e-9
    )

    kept = [total for total, seen in expected.values() if seen]
    kept = kept if 2 * len(kept) >= len(expected) else [total for total, _ in expected.values()]  # few would speak for all
    assert math.isclose(stream.replay.return_variance(discount), np.var(kept), abs_tol=1e-9)


def test_rewards_are_those_of_real_transitions(rng):
    """Catches: the empty part of the ring, and last observations, in the rewards' scale."""
    for length in (5, 60):
        stream = Stream(rng, length=length)
        expected = [row["reward"] for env, rows in enumerate(stream.written) for row in rows[stream.kept(env) :] if row["valid"]]
        assert sorted(stream.replay.rewards().tolist()) == sorted(expected)


def test_the_scale_of_rewards(rng):
    """Catches: a rare reward that counts a thousand times its size, and a division by nothing."""
    replay = Replay(VECTOR, 1, 2000, 1, 1)
    for i in range(1000):
        rewards = np.array([1.0 if i == 500 else 0.0], np.float32)
        no = np.zeros(1, bool)
        replay.add(
            np.zeros(1, np.int64),
            {"obs": np.zeros((1, 3), np.float32)},
            no,
            torch.zeros(1, 1),
            np.zeros(1, np.int64),
            rewards,
            no,
            ~no,
        )
        if i == 100:
            assert replay.reward_scale() == 1.0
    assert replay.rewards().std(correction=0) < 0.04
    assert replay.reward_scale() == pytest.approx(0.1)
    replay.reward[:] = torch.from_numpy(rng.normal(5, 2, (2000, 1)).astype(np.float32))
    assert replay.reward_scale() == pytest.approx(replay.rewards().std(correction=0).item(), rel=1e-5)
