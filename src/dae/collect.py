"""Acting in the environments and writing what happened to the replay (Algorithm 1, l.8-12).

Every vector step writes one slot for each environment: (o_t, the state before it, a_t, r_t, how it ended). An episode's last
observation gets a slot of its own that holds no transition: under NEXT_STEP it is the coming observation anyway, under SAME_STEP it
is written beside.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dae.agent import ActorState, Agent
from dae.envs.gymnasium import Arrays, Envs, Stepped
from dae.errors import EnvironmentFault
from dae.network import Inputs
from dae.replay import Replay


@dataclass(frozen=True)
class Episode:
    """One finished episode, with its raw score."""

    env: int
    score: float
    length_agent_steps: int
    truncated: bool
    agent_step: int = 0
    """When it ended, in agent steps of all environments."""


class FrameStacks:
    """The last observations of each environment, oldest first; zeros before an episode's first."""

    def __init__(self, num_envs: int, frame_stack: int):
        self.num_envs, self.frame_stack = num_envs, frame_stack
        self.frames: Arrays = {}

    def push(self, obs: Arrays, reset: NDArray[np.bool_]) -> Arrays:
        """[E, stack, *shape] with `obs` the newest; the older ones are forgotten where `reset`."""
        for name, newest in obs.items():
            if name not in self.frames:
                self.frames[name] = np.zeros((self.num_envs, self.frame_stack, *newest.shape[1:]), newest.dtype)
            old = self.frames[name]
            old[:, :-1] = old[:, 1:]
            old[reset] = 0
            old[:, -1] = newest
        return self.frames


class ActingInputs:
    """What an actor sees at each step, built from what the environments return; the same for training, evaluation and play."""

    def __init__(self, num_envs: int, frame_stack: int, device: torch.device):
        self.stacks, self.device = FrameStacks(num_envs, frame_stack), device

    def __call__(
        self, obs: Arrays, prev_action: NDArray[np.int64], prev_reward: NDArray[np.float32], reset: NDArray[np.bool_]
    ) -> Inputs:
        stacks = self.stacks.push(obs, reset)

        def tensor(array: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)[None]  # [1, E, ...]

        tensors = {name: tensor(frames) for name, frames in stacks.items()}
        return Inputs(tensors, tensor(prev_action), tensor(prev_reward), tensor(reset))


CARRIED = ("reset", "valid", "prev_action", "prev_reward", "score", "length")
"""Arrays of a collector, beside observations, frames and recurrent states."""


def _parts(arrays: Mapping[str, NDArray[np.generic]], prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


class Collector:
    """Holds where each environment is. `act` and `observe` move all of them by one; between the two the learner may work."""

    def __init__(self, envs: Envs, agent: Agent, replay: Replay, rng: np.random.Generator, reward_classes: tuple[float, ...]):
        self.envs, self.agent, self.replay, self.rng = envs, agent, replay, rng
        self.reward_classes = np.array(reward_classes, np.float32)
        e = envs.num_envs
        self.inputs = ActingInputs(e, replay.frame_stack, torch.device("cpu"))  # `act` sends them on
        self.agent_steps = 0
        self.obs = envs.reset()
        self.reset, self.valid = np.ones(e, bool), np.ones(e, bool)  # o_t opens an episode; o_t is not an episode's last
        self.prev_action, self.prev_reward = np.zeros(e, np.int64), np.zeros(e, np.float32)
        self.state: ActorState = agent.initial_state(e)
        self.score, self.length = np.zeros(e), np.zeros(e, np.int64)
        self._acted: tuple[NDArray[np.int64], ActorState] | None = None

    def step(self, epsilon: float) -> list[Episode]:
        """Both at once."""
        self.act(epsilon)
        return self.observe()

    def act(self, epsilon: float, meanwhile: Callable[[], None] | None = None) -> None:
        """Choose an action in every environment; those that step by themselves begin to. `meanwhile` the device chooses."""
        inputs = self.inputs(self.obs, self.prev_action, self.prev_reward, self.reset)
        action, after = self.agent.act(inputs, self.state, epsilon, self.rng, meanwhile)
        self.envs.send(action)
        self._acted = action, after

    def observe(self) -> list[Episode]:
        """What came of it goes into the replay. Returns the episodes that ended."""
        return self.store(self.envs.recv())

    def store(self, stepped: Stepped) -> list[Episode]:
        """The same, of what the environments returned."""
        assert self._acted is not None, "act() comes first"
        (action, after), self._acted = self._acted, None
        before = self.state  # H_t, the state BEFORE o_t was seen: what the replay keeps
        self._check_rewards(stepped)

        everyone = np.arange(self.envs.num_envs)
        ended = (stepped.terminated | stepped.truncated) & self.valid
        terminal = stepped.terminated & self.valid
        reward = np.where(self.valid, stepped.reward, 0).astype(np.float32)
        self.replay.add(everyone, self.obs, self.reset, before.core, action, reward, terminal, self.valid)
        self.agent_steps += int(self.valid.sum())
        self.score += np.where(self.valid, stepped.paid, 0)
        self.length += self.valid
        episodes = [
            Episode(int(e), float(self.score[e]), int(self.length[e]), not bool(terminal[e]), self.agent_steps)
            for e in np.flatnonzero(ended)
        ]
        self.score[ended], self.length[ended] = 0, 0

        if stepped.final_obs is None:  # NEXT_STEP: the coming observation is the episode's last, and what follows it opens the next
            self.reset, self.valid = ~self.valid, ~ended
        else:
            self._add_last_observations(np.flatnonzero(ended), stepped.final_obs, after)
            self.reset, self.valid = ended, np.ones_like(ended)
        self.obs, self.prev_action, self.prev_reward, self.state = stepped.obs, action, reward, after
        return episodes

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that is carried from step to step, but for the environments themselves."""
        arrays = {name: getattr(self, name) for name in CARRIED}
        arrays |= {f"obs.{name}": array for name, array in self.obs.items()}
        arrays |= {f"frames.{name}": array for name, array in self.inputs.stacks.frames.items()}
        states = {name: getattr(self.state, name) for name in ("core", "embeddings", "resets")}
        found = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        return found | {name: tensor.cpu().clone() for name, tensor in states.items() if tensor is not None}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `tensors`."""
        arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        for name in CARRIED:
            setattr(self, name, arrays[name])
        self.obs, self.inputs.stacks.frames = _parts(arrays, "obs."), _parts(arrays, "frames.")
        there = {name: tensors[name].to(self.agent.device) for name in ("core", "embeddings", "resets") if name in tensors}
        self.state = ActorState(**there)

    def begin_anew(self) -> None:
        """New episodes in environments that can't be brought back to where they were: the old ones count as cut off there."""
        none, no, e = np.zeros_like(self.prev_action), np.zeros_like(self.valid), self.envs.num_envs
        everyone = np.arange(e)
        self.replay.add(everyone, self.obs, self.reset, self.state.core, none, none.astype(np.float32), no, no)
        self.obs = self.envs.reset()
        self.reset, self.valid, self.prev_action, self.prev_reward = ~no, ~no, none, np.zeros_like(self.prev_reward)
        self.state, self.score, self.length = self.agent.initial_state(e), np.zeros(e), np.zeros(e, np.int64)

    def _add_last_observations(self, envs: NDArray[np.int64], final_obs: Arrays, after: ActorState) -> None:
        none, no = np.zeros(len(envs), np.int64), np.zeros(len(envs), bool)
        rows = {name: array[envs] for name, array in final_obs.items()}
        self.replay.add(envs, rows, no, after.core[torch.from_numpy(envs)], none, none.astype(np.float32), no, no)

    def _check_rewards(self, stepped: Stepped) -> None:
        if not len(self.reward_classes):
            return
        known = np.isclose(stepped.reward[:, None], self.reward_classes).any(-1) | ~self.valid
        if not known.all():
            e = int(np.argmin(known))
            raise EnvironmentFault(
                f"environment {e} paid {stepped.reward[e]:g}, which is none of reward_classes={self.reward_classes.tolist()}: "
                "declare every value, or set rewards=general"
            )
