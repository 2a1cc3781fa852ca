"""Scores: the first episode of each of so many fresh environments, at the evaluation epsilon."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from dae.agent import Actor, ActorState
from dae.collect import ActingInputs, Episode
from dae.envs.gymnasium import AnyEnv, EnvList, EnvSource, OwnEnvs
from dae.errors import EnvironmentFault
from dae.ledger import Diary
from dae.network import Inputs

LONGEST_EPISODE = 200_000
"""Agent steps after which an evaluation gives up: some environments never end."""


class Evaluation:
    """One episode of each environment: taking the first to finish would favour short ones. Raw scores.

    It moves by one step at a call of `advance`, so that training can go on in between; what comes out does not depend on when it is
    called, as long as the agent's weights stay as they are.
    """

    def __init__(
        self,
        agent: Actor,
        source: EnvSource | Callable[[], AnyEnv],
        episodes: int,
        epsilon: float,
        seed: np.random.SeedSequence,
        channels: str = "auto",
        diary: Diary | None = None,
    ):
        env_seed, acting_seed = seed.spawn(2)
        many = source.many if isinstance(source, EnvSource) else partial(EnvList, source)
        self.agent, self.epsilon, self.diary, self.rng = agent, epsilon, diary, np.random.default_rng(acting_seed)
        self.envs: OwnEnvs = many(episodes, env_seed, channels)
        self.inputs = ActingInputs(episodes, agent.net.sizes.frame_stack, torch.device("cpu"))  # `act` sends them on
        self.obs, self.reset = self.envs.reset(), np.ones(episodes, bool)
        self.prev_action, self.prev_reward = np.zeros(episodes, np.int64), np.zeros(episodes, np.float32)
        self.state: ActorState = agent.initial_state(episodes)
        self.score, self.length = np.zeros(episodes), np.zeros(episodes, np.int64)
        self.truncated, self.running = np.zeros(episodes, bool), np.ones(episodes, bool)
        self._acted: tuple[Inputs, NDArray[np.int64]] | None = None

    def advance(self) -> bool:
        """Take in what the last actions brought, choose the next ones and send them off. False once every episode has ended."""
        if self._acted is not None:
            self._observe(*self._acted)
            self._acted = None
        if self.running.any():
            self._act()
            return True
        if self.diary is not None:
            self.diary.see(self.inputs(self.obs, self.prev_action, self.prev_reward, self.reset))
        return False

    def episodes(self) -> list[Episode]:
        """How they ended."""
        numbers = zip(self.score, self.length, self.truncated, strict=True)
        return [Episode(e, float(score), int(length), bool(cut)) for e, (score, length, cut) in enumerate(numbers)]

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()

    def _act(self) -> None:
        if self.length.max() >= LONGEST_EPISODE:
            raise EnvironmentFault(
                f"an evaluation episode has not ended after {LONGEST_EPISODE:,} steps: give --max-episode-agent-steps a limit"
            )
        seen = self.inputs(self.obs, self.prev_action, self.prev_reward, self.reset)
        action, self.state = self.agent.act(seen, self.state, self.epsilon, self.rng)
        which = np.flatnonzero(self.running)
        self.envs.send(action[which], [int(e) for e in which])
        self._acted = seen, action

    def _observe(self, seen: Inputs, action: NDArray[np.int64]) -> None:
        which, stepped = np.flatnonzero(self.running), self.envs.recv()
        for name, array in stepped.obs.items():
            self.obs[name][which] = array
        reward, terminal = np.zeros(len(action), np.float32), np.zeros(len(action), bool)
        reward[which], terminal[which] = stepped.reward, stepped.terminated
        self.score[which] += stepped.paid
        self.length[which] += 1
        self.truncated[which] = stepped.truncated & ~stepped.terminated
        if self.diary is not None:
            self.diary.did(seen, action, reward, terminal, self.running)
        self.running[which] = ~(stepped.terminated | stepped.truncated)
        self.prev_action, self.prev_reward, self.reset = action, reward, np.zeros(len(action), bool)


def evaluate(
    agent: Actor,
    source: EnvSource | Callable[[], AnyEnv],
    episodes: int,
    epsilon: float,
    seed: np.random.SeedSequence,
    channels: str = "auto",
    diary: Diary | None = None,
) -> list[Episode]:
    """An `Evaluation` from beginning to end. A `diary` is kept if given."""
    evaluation = Evaluation(agent, source, episodes, epsilon, seed, channels, diary)
    try:
        while evaluation.advance():
            pass
    finally:
        evaluation.close()
    return evaluation.episodes()
