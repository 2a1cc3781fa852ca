"""What the tests share: axes checked at run time, a tiny agent, and an environment that always tells where it is."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import gymnasium as gym
import jaxtyping
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from jaxtyping import install_import_hook

# Before anything else imports them: the modules that carry the time axis check every shape and type they are given.
with install_import_hook(["dae.objective", "dae.network", "dae.replay", "dae.lstm"], "beartype.beartype"):
    import dae.lstm
    import dae.network
    import dae.objective
    import dae.replay
    from dae.agent import Signals
    from dae.collect import Collector
    from dae.config import Config
    from dae.encoders import ObsPart
    from dae.envs.gymnasium import EnvList, VectorAdapter
    from dae.graphs import Captured
    from dae.network import Inputs
    from dae.replay import Window
    from dae.train import build_agent

torch.set_num_threads(1)
Captured.strict = True

MODES = ("list", "next_step", "same_step", "disabled")
"""Every way in which environments reset: our own list, and Gymnasium's vectors."""
REWARD_CLASSES = (-1.0, 0.0, 1.0)
VECTOR = {"obs": ObsPart((3,), torch.float32)}

TINY = {
    "num_envs": 3, "frame_stack": 2, "width": 0.0625, "embedding_dim": 8, "core_dim": 8, "core_blocks": 2, "value_hidden": 12,
    "prediction_hidden": 12, "prior_hidden": 12, "num_outcomes": 4, "burn_in_steps": 2, "backup_steps": 3, "batch_size": 4,
    "device": "cpu",
}  # fmt: skip


def tiny_config(**overrides):
    """A configuration whose networks have a few hundred weights."""
    return Config().override(**(TINY | overrides))


def tiny_agent(cfg=None, spec=VECTOR, num_actions=3, reward_classes=REWARD_CLASSES, seed=0, stir=True):
    """An agent with all weights stirred, slow ones too, so that no term of the objective is zero or equal to another by chance."""
    agent = build_agent((cfg or tiny_config()).override(seed=seed), spec, num_actions, reward_classes)
    if stir:
        with torch.no_grad():
            for i, parameter in enumerate((*agent.net.parameters(), *agent.ema.parameters())):
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1000 * seed + i))
            agent.log_temperature.fill_(-0.4)
            agent.ema_temperature.fill_(0.8)
    return agent


@dataclass(frozen=True)
class Happened:
    """One real transition, as the environment itself saw it."""

    episode: int
    t: int
    action: int
    reward: float
    terminated: bool
    truncated: bool


class Counter(gym.Env):
    """Observes (environment, episode, t), pays -1, 0 or 1 by these and the action, keeps a diary, refuses to step past an end."""

    metadata = {"reward_classes": REWARD_CLASSES}

    def __init__(self, number, nested=False, first_action=0, lengths=(4, 1, 6, 2, 3, 9)):
        self.number, self.nested, self.first_action, self.lengths = number, nested, first_action, lengths
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)  # without bounds it is stored as it is
        self.observation_space = spaces.Dict(where=box, t=spaces.Discrete(20)) if nested else box
        self.action_space = spaces.Discrete(3, start=first_action)
        self.episode, self.over, self.diary = -1, True, []

    def length(self, episode):
        return self.lengths[(self.number + episode) % len(self.lengths)]

    def terminates(self, episode):
        """Or is cut off; both kinds at every length."""
        return (self.number + episode) // len(self.lengths) % 2 == 0

    def reset(self, *, seed=None, options=None):
        self.episode, self.t, self.over = self.episode + 1, 0, False
        return self.observe(), {}

    def step(self, action):
        assert not self.over, "stepped past the end of an episode"
        assert self.action_space.contains(action), f"{action} is no action"
        reward = float((self.number + self.episode + self.t + 2 * (action - self.first_action)) % 3 - 1)
        here = self.t
        self.t += 1
        self.over = self.t == self.length(self.episode)
        terminated = self.over and self.terminates(self.episode)
        truncated = self.over and not terminated
        self.diary.append(Happened(self.episode, here, int(action - self.first_action), reward, terminated, truncated))
        return self.observe(), reward, terminated, truncated, {}

    def observe(self):
        where = np.array([self.number, self.episode, self.t], np.float32)
        return {"where": where, "t": self.t} if self.nested else where


def signals(eps_wta=0.4, learning_rate=1e-3, return_variance=2.0, reward_scale=0.7):
    return Signals(*(torch.tensor(float(x)) for x in (eps_wta, learning_rate, return_variance, reward_scale)))


def random_window(cfg, rng, batch=6, general=False, p_end=0.25):
    """Windows in which episodes end in both ways, everywhere."""
    steps = cfg.window_steps
    reset, valid, terminal = np.zeros((steps + 1, batch), bool), np.zeros((steps, batch), bool), np.zeros((steps, batch), bool)
    for b in range(batch):
        opens, last = rng.random() < 0.3, rng.random() < 0.1
        for t in range(steps):
            reset[t, b], valid[t, b] = opens, not last
            ends = not last and rng.random() < p_end
            terminal[t, b] = ends and rng.random() < 0.5
            opens, last = last, ends
        reset[steps, b] = opens
    rewards = (rng.normal(size=(2, steps + 1, batch)) if general else rng.integers(-1, 2, (2, steps + 1, batch))).astype(np.float32)
    actions = rng.integers(0, 3, (2, steps + 1, batch))
    obs = rng.normal(size=(steps + 1, batch, cfg.environment.frame_stack, 3)).astype(np.float32)
    t = torch.from_numpy
    inputs = Inputs({"obs": t(obs)}, t(actions[0]), t(rewards[0]), t(reset))
    core = rng.normal(size=(batch, 2 * cfg.network.core_dim if cfg.network.core == "lstm" else 0)).astype(np.float32)
    return Window(inputs, t(actions[1, :-1]), t(rewards[1, :-1]), t(terminal), t(valid), t(core))


def counters(mode, num_envs=3, **options):
    """`num_envs` counters behind the adapter of that mode, and the counters themselves."""
    number = itertools.count()
    seed = np.random.SeedSequence(0)
    if mode == "list":
        envs = EnvList(lambda: Counter(next(number), **options), num_envs, seed)
        return envs, envs.envs
    make = [lambda: Counter(next(number), **options)] * num_envs
    vector = SyncVectorEnv(make, autoreset_mode={m.name.lower(): m for m in AutoresetMode}[mode])
    return VectorAdapter(vector, seed), vector.envs


def collected(mode, vector_steps, *, cfg=None, slots=1000, epsilon=0.5, num_envs=3, **options):
    """Counters stepped by a real agent through the real collector into a real replay, and every acting feature on the way."""
    cfg = cfg or tiny_config()
    envs, made = counters(mode, num_envs, **options)
    agent = tiny_agent(cfg, envs.spec, envs.num_actions, envs.reward_classes)
    replay = dae.replay.Replay(envs.spec, num_envs, slots * num_envs, agent.net.state_dim, cfg.environment.frame_stack)
    seen, plain = {}, agent.features

    def features(inputs, state):
        result, after = plain(inputs, state)
        newest = next(iter(inputs.obs.values())) if not options.get("nested") else inputs.obs["where"]
        for place, row in zip(newest[0, :, -1], result, strict=True):
            seen[tuple(int(x) for x in place)] = row.clone()
        return result, after

    agent.features = features
    collector = Collector(envs, agent, replay, np.random.default_rng(0), envs.reward_classes)
    episodes = [episode for _ in range(vector_steps) for episode in collector.step(epsilon)]
    return SimpleNamespace(
        cfg=cfg, envs=envs, counters=made, agent=agent, replay=replay, seen=seen, collector=collector, episodes=episodes
    )  # fmt: skip


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def unchecked():
    """Without the checks of axes, for tests that train: they take as long as the update itself."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
