"""Each environment's stream of slots in a ring, sampled as time-major windows.

The one rule: `core_in` of a slot is the recurrent state BEFORE the network saw the slot's observation. A window that starts at slot
i is unrolled from core_in[i] and consumes o_i first.

A slot is an observation and, where `valid`, the transition that left it. An episode's last observation has a slot of its own without
a transition: the target x_{t+1} of the last transition, and what a truncated episode bootstraps from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dae.encoders import ObsSpec
from dae.graphs import Captured
from dae.network import Inputs


@dataclass(frozen=True)
class Window:
    """T = k + n transitions, and T + 1 observations: the last one to bootstrap from."""

    inputs: Inputs
    """T + 1 slots."""
    action: Int[Tensor, "t b"]
    """a_t."""
    reward: Float[Tensor, "t b"]
    """r_t, paid for a_t."""
    terminal: Bool[Tensor, "t b"]
    """o_{t+1} ends the episode for good: bootstrap from nothing."""
    valid: Bool[Tensor, "t b"]
    """Transition t is real."""
    core_in: Float[Tensor, "b s"]
    """Recurrent state before o_0."""


def state_type(device: torch.device) -> torch.dtype:
    """Of stored recurrent states: exact, but for 16 bits on CUDA, where a million of them would take 8 GB (PAPER.md D8)."""
    return torch.float16 if device.type == "cuda" else torch.float32


def bytes_needed(spec: ObsSpec, capacity: int, state_dim: int, device: torch.device) -> int:
    """Size of a replay of `capacity` slots."""
    obs = sum(math.prod(part.shape) * part.dtype.itemsize for part in spec.values())
    return capacity * (obs + state_type(device).itemsize * state_dim + 8 + 4 + 3)


class Replay:
    """Rings of `capacity // num_envs` slots, one for each environment, each with its own write head."""

    def __init__(
        self,
        spec: ObsSpec,
        num_envs: int,
        capacity: int,
        state_dim: int,
        frame_stack: int,
        device: torch.device | str = "cpu",
        state_dtype: torch.dtype | None = None,
        fast: bool = False,
    ):
        self.slots, self.num_envs, self.frame_stack, self.device = capacity // num_envs, num_envs, frame_stack, torch.device(device)

        def ring(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(self.slots, num_envs, *shape, dtype=dtype, device=device)

        self.obs = {name: ring(*part.shape, dtype=part.dtype) for name, part in spec.items()}
        self.action, self.reward = ring(dtype=torch.long), ring(dtype=torch.float32)
        self.reset, self.terminal, self.valid = (ring(dtype=torch.bool) for _ in range(3))
        self.core_in = ring(state_dim, dtype=state_type(self.device) if state_dtype is None else state_dtype)
        self.count = np.zeros(num_envs, np.int64)  # slots ever written, by environment
        self.packed = fast  # pictures of bytes leave with the channels of a pixel beside each other, as a GPU's convolutions want
        self._write = Captured(self._put, self.device, fast)

    def rings(self) -> dict[str, Tensor]:
        """Everything that is stored, by name, [slots, num_envs, ...]: what a checkpoint keeps, with `count`."""
        names = ("action", "reward", "reset", "terminal", "valid", "core_in")
        return {f"obs.{name}": ring for name, ring in self.obs.items()} | {name: getattr(self, name) for name in names}

    def add(
        self,
        envs: NDArray[np.int64],
        obs: Mapping[str, NDArray[np.generic]],
        reset: NDArray[np.bool_],
        core_in: Float[Tensor, "e s"],
        action: NDArray[np.int64],
        reward: NDArray[np.float32],
        terminal: NDArray[np.bool_],
        valid: NDArray[np.bool_],
    ) -> None:
        """Write one slot for each of `envs` (no environment twice)."""
        rows = *(obs[name] for name in self.obs), reset, action, reward, terminal, valid
        tensors = (torch.as_tensor(row, dtype=ring.dtype) for ring, row in zip(self._rings(), rows, strict=True))
        self._write(torch.from_numpy(self.count[envs] % self.slots), torch.from_numpy(envs), core_in, *tensors)
        self.count[envs] += 1

    def _rings(self) -> tuple[Tensor, ...]:
        return *self.obs.values(), self.reset, self.action, self.reward, self.terminal, self.valid

    def _put(self, slot: Tensor, env: Tensor, core_in: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """Behind the updates that are under way, on a GPU: what they read is what was there before."""
        for ring, row in zip(self._rings(), rows, strict=True):
            ring[slot, env] = row
        largest = torch.finfo(self.core_in.dtype).max  # a cell grows by at most 1 a step, and could outgrow 16 bits
        self.core_in[slot, env] = core_in.clamp(-largest, largest).to(self.core_in)
        return ()

    def oldest(self) -> NDArray[np.int64]:
        """The first slot, by count, that a window may start at: what it looks back on must not be overwritten."""
        behind = max(1, self.frame_stack - 1)  # the action and reward before it, and the frames of its stack
        return np.where(self.count > self.slots, self.count - self.slots + behind, 0)

    def num_starts(self, length: int) -> NDArray[np.int64]:
        """Starts of windows of `length` transitions, by environment; none crosses the write head."""
        return np.maximum(self.count - length - self.oldest(), 0)

    def sample(self, rng: np.random.Generator, batch_size: int, length: int) -> Window:
        """Uniform over all windows that are stored."""
        return self.window(*self.draw(rng, batch_size, length), length)

    def draw(self, rng: np.random.Generator, batch_size: int, length: int) -> tuple[Int[Tensor, "b"], Int[Tensor, "b"]]:
        """Where windows start: slots, counted from the beginning of the run, and environments."""
        ends = self.num_starts(length).cumsum()
        if ends[-1] == 0:
            raise ValueError(f"no window of {length} transitions is stored yet")
        return self.place(rng.integers(0, ends[-1], batch_size), length)

    def place(self, number: NDArray[np.int64], length: int) -> tuple[Int[Tensor, "b"], Int[Tensor, "b"]]:
        """Start and environment of each of the numbered windows: all of the first environment, then all of the second ..."""
        each = self.num_starts(length)
        envs = np.searchsorted(each.cumsum(), number, side="right")
        starts = self.oldest()[envs] + number - (each.cumsum() - each)[envs]
        return torch.from_numpy(starts), torch.from_numpy(envs)

    def window(self, starts: Int[Tensor, "b"], envs: Int[Tensor, "b"], length: int) -> Window:
        """The windows that start there."""
        env = envs.to(self.device)  # [B]
        slot = starts.to(self.device) + torch.arange(length + 1, device=self.device)[:, None]  # [T+1, B]
        at, before = (slot % self.slots, env), ((slot - 1) % self.slots, env)
        inputs = Inputs(self._stacks(slot, env), self.action[before], self.reward[before], self.reset[at])
        now = slot[:-1] % self.slots, env
        core_in = self.core_in[at[0][0], env].float()
        return Window(inputs, self.action[now], self.reward[now], self.terminal[now], self.valid[now], core_in)

    def _stacks(self, slot: Int[Tensor, "t b"], env: Int[Tensor, "b"]) -> dict[str, Tensor]:
        """[T+1, B, stack, ...], oldest frame first; zeros where a frame would be from before the episode's first."""
        back = torch.arange(self.frame_stack - 1, -1, -1, device=self.device)
        frames = (slot[..., None] - back) % self.slots, env[:, None]  # [T+1, B, stack]
        opens = self.reset[frames]
        # A frame is of this episode unless an opening frame lies between it and the newest one, the newest included.
        later_open = opens.flip(-1).cumsum(-1).flip(-1) - opens.long()
        same = later_open == 0
        found = {}
        for name, ring in self.obs.items():
            if self.packed and ring.dtype == torch.uint8 and ring.dim() == 5 and ring[0, 0].numel() % 8 == 0:
                found[name] = self._packed(ring, frames, same)
            else:
                found[name] = ring[frames] * same.view(*same.shape, *[1] * (ring.dim() - 2)).to(ring.dtype)
        return found

    def _packed(self, ring: Tensor, frames: tuple[Tensor, Tensor], same: Tensor) -> Tensor:
        """The same numbers, [T+1, B, stack, c, h, w], but in memory they lie as [T+1, B, h, w, stack, c]."""
        eights = ring.flatten(2).view(torch.int64)[frames] * same[..., None]  # eight bytes at a time
        pictures = eights.view(torch.uint8).unflatten(-1, ring.shape[2:])
        return pictures.permute(0, 1, 4, 5, 2, 3).contiguous().permute(0, 1, 4, 5, 2, 3)

    def rewards(self) -> Float[Tensor, "n"]:
        """All rewards that are stored, of real transitions."""
        return self.reward[self.valid]

    def reward_scale(self) -> float:
        """The standard deviation of the rewards, and at least a tenth of the largest; their size where they do not vary, 1 where all are 0.

        The floor is for rare rewards: a single one in a million steps has a thousand times their standard deviation, and its square
        would drown all other losses.
        """
        rewards = self.rewards().cpu().double()
        if not len(rewards):
            return 1.0
        size, spread = float(rewards.abs().max()), float(rewards.std(correction=0))
        return max(spread, 0.1 * size) if spread > 1e-6 * size else size or 1.0

    def return_variance(self, discount: float) -> float:
        """Var(G): of the discounted return from every stored step on (PAPER.md D7).

        The ends of unfinished episodes lack what is to come; steps that would miss more than 5% of their weight are left out, unless
        they are most of what is stored.
        """
        returns, whole = self.returns(discount)
        kept = returns[whole] if 2 * whole.sum() >= len(returns) else returns  # else few short episodes would speak for all
        return float(kept.var(correction=0)) if len(kept) > 1 else 0.0

    def returns(self, discount: float) -> tuple[Float[Tensor, "n"], Bool[Tensor, "n"]]:
        """G of every real stored transition, and whether it has at least 95% of its weight before it."""
        stored = np.minimum(self.count, self.slots)
        length = int(stored.max())
        row = torch.arange(length, device=self.device)[:, None]  # oldest first; the last row is each environment's newest slot
        at = (
            (torch.from_numpy(self.count - length).to(self.device) + row) % self.slots,
            torch.arange(self.num_envs, device=self.device),
        )
        real = self.valid[at] & (row >= length - torch.from_numpy(stored).to(self.device))
        goes_on = self.valid[at] & ~self.terminal[at]

        exact = torch.float32 if self.device.type == "mps" else torch.float64
        g, weight = torch.where(real, self.reward[at], 0).to(exact), discount * goes_on.to(exact)
        span = 1
        while span < length and discount**span > 1e-18:  # G_t = r_t + weight_t G_{t+1}; each round doubles how far G looks ahead
            g[:-span] += weight[:-span] * g[span:]
            weight[:-span] = weight[:-span] * weight[span:]
            span *= 2
        horizon = math.ceil(math.log(0.05) / math.log(discount)) if 0 < discount < 1 else 1
        has_end = (~goes_on).flip(0).int().cummax(0).values.flip(0).bool()  # an end lies at t or behind it
        whole = has_end | (length - row >= horizon)
        return g[real], whole[real]
