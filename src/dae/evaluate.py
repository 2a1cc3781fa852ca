"""Scores: the first episode of each of so many fresh environments, at the evaluation epsilon."""

from collections.abc import Callable
from functools import partial

import numpy as np

from dae.agent import Actor, ActorState
from dae.collect import ActingInputs, Episode
from dae.envs.gymnasium import AnyEnv, EnvList, EnvSource, OwnEnvs
from dae.errors import EnvironmentFault
from dae.ledger import Diary

LONGEST_EPISODE = 200_000
"""Agent steps after which an evaluation gives up: some environments never end."""


def evaluate(
    agent: Actor,
    source: EnvSource | Callable[[], AnyEnv],
    episodes: int,
    epsilon: float,
    seed: np.random.SeedSequence,
    channels: str = "auto",
    diary: Diary | None = None,
) -> list[Episode]:
    """One episode of each environment: taking the first to finish would favour short ones. Raw scores. A `diary` is kept if given."""
    env_seed, acting_seed = seed.spawn(2)
    many = source.many if isinstance(source, EnvSource) else partial(EnvList, source)
    envs: OwnEnvs = many(episodes, env_seed, channels)
    rng = np.random.default_rng(acting_seed)
    inputs = ActingInputs(episodes, agent.net.sizes.frame_stack, agent.device)
    obs, reset = envs.reset(), np.ones(episodes, bool)
    prev_action, prev_reward = np.zeros(episodes, np.int64), np.zeros(episodes, np.float32)
    state: ActorState = agent.initial_state(episodes)
    score, length, truncated = np.zeros(episodes), np.zeros(episodes, np.int64), np.zeros(episodes, bool)
    running = np.ones(episodes, bool)
    try:
        while running.any():
            if length.max() >= LONGEST_EPISODE:
                raise EnvironmentFault(
                    f"an evaluation episode has not ended after {LONGEST_EPISODE:,} steps: give --max-episode-agent-steps a limit"
                )
            seen = inputs(obs, prev_action, prev_reward, reset)
            action, state = agent.act(seen, state, epsilon, rng)
            which = np.flatnonzero(running)
            stepped = envs.step(action[which], [int(e) for e in which])
            for name, array in stepped.obs.items():
                obs[name][which] = array
            reward = np.zeros(episodes, np.float32)
            reward[which] = stepped.reward
            score[which] += stepped.paid
            length[which] += 1
            truncated[which] = stepped.truncated & ~stepped.terminated
            if diary is not None:
                terminal = np.zeros(episodes, bool)
                terminal[which] = stepped.terminated
                diary.did(seen, action, reward, terminal, running)
            running[which] = ~(stepped.terminated | stepped.truncated)
            prev_action, prev_reward, reset = action, reward, np.zeros(episodes, bool)
        if diary is not None:
            diary.see(inputs(obs, prev_action, prev_reward, reset))
    finally:
        envs.close()
    return [Episode(e, float(score[e]), int(length[e]), bool(truncated[e])) for e in range(episodes)]
