"""Atari by ale-py's vector of emulators: what Dopamine does between game and agent. The only module that knows ALE and its frames.

A step of the agent is `frame_skip` frames of the emulator, 4 by default. What comes out is one picture for each step, 84x84 bytes of
grey: the stack of the last ones is made by the collector and by the replay, zeros before an episode's first.

Rewards are clipped for learning; `Stepped.raw_reward` has what the game paid, and scores count that.

Randomness. The games have none: all chance comes from sticky actions, drawn by a generator in each emulator. Each gets a seed of its
own from the run's SeedSequence (a plain number would seed emulator i with number + i, so that the runs of seeds 0 and 1 shared all
emulators but one), once: a new seed means that the ROM is loaded anew, which takes twenty times as long as a reset. From then on each
emulator's episodes follow from its seed and from the actions it was given, with as many threads as there may be. What AtariVectorEnv
does not allow: a seed for an episode that it opens by itself, so that no later episode can be had without those before it; and seeds
of more than 31 bits, so that two of n emulators of different runs meet with probability n^2 / 2^32.

Where the game ends within a step, the frames of that step are not looked at, here as in Dopamine: the episode's last picture is the
one before. (At the step's very last frame one of its frames is, and then the two differ in which older one it is laid over.)
Truncation is counted here and not by AtariVectorEnv, whose last picture would lack the last frame.
"""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from dae.envs.gymnasium import RAW_REWARD, Arrays, EnvSource, Stepped
from dae.envs.spaces import ObservationReader, num_actions
from dae.errors import ConfigError, MissingExtra, nearest

if TYPE_CHECKING:
    from ale_py.vector_env import AtariVectorEnv

PICTURE = (84, 84)
SCREEN = (210, 160)
"""Of most games; others are scaled to it for videos."""
NEVER = 2**30
"""Frames: a limit of AtariVectorEnv that no episode reaches."""


@dataclass(frozen=True)
class AtariProtocol:
    """What lies between a game and the agent, as far as it can be chosen. The defaults are Dopamine's."""

    sticky: float = 0.25
    """Probability, at each frame, that the emulator repeats the action of the frame before."""
    full_actions: bool = False
    """All 18 actions, not only those that the game knows."""
    frame_skip: int = 4
    """Frames of a step, all with the same action."""
    max_frames: int = 108_000
    """An episode is truncated after so many: half an hour of play."""
    clip_rewards: bool = True
    """Learn from rewards clipped to -1, 0 and 1."""

    def __post_init__(self) -> None:
        for name, least, most in (("sticky", 0, 1), ("frame_skip", 1, NEVER), ("max_frames", self.frame_skip, NEVER)):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"env_kwargs {name}={getattr(self, name)}: must be between {least} and {most}")

    @property
    def reward_classes(self) -> tuple[float, ...]:
        """All that learning can be paid, if these are few."""
        return (-1.0, 0.0, 1.0) if self.clip_rewards else ()

    @property
    def limit_agent_steps(self) -> int:
        """Of an episode."""
        return self.max_frames // self.frame_skip

    def table(self) -> dict[str, Any]:
        """Every decision, those that can't be chosen included: what is printed, and kept in run.json."""
        usual = PROTOCOLS["dopamine"]
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(usual, f.name)]
        return {
            "protocol": "dopamine" + (f", but for {', '.join(changed)}" if changed else ""),
            "emulator": f"ale-py {importlib.metadata.version('ale-py')}",
            "sticky_actions": self.sticky,
            "action_set": "all 18" if self.full_actions else "minimal",
            "frames_per_agent_step": self.frame_skip,
            "max_over_last_frames": 2,
            "picture": f"{PICTURE[0]}x{PICTURE[1]} grey, area interpolation",
            "no_ops_at_reset": 0,
            "fire_at_reset": False,
            "episode_limit_agent_steps": self.limit_agent_steps,
            "episode_limit_frames": self.limit_agent_steps * self.frame_skip,
            "at_the_limit": "truncated",
            "at_life_loss": "goes on",
            "rewards_learned_from": "clipped to -1, 0, 1" if self.clip_rewards else "as paid",
            "scores": "as paid",
        }


PROTOCOLS = {"dopamine": AtariProtocol(), "full-actions": AtariProtocol(full_actions=True)}


def make_protocol(kwargs: Mapping[str, Any]) -> AtariProtocol:
    """From an environment's keyword arguments: `protocol`, one of PROTOCOLS, and single fields that override it."""
    name = kwargs.get("protocol", "dopamine")
    if name not in PROTOCOLS:
        raise ConfigError(f"env_kwargs protocol={name}: must be one of {', '.join(PROTOCOLS)}{nearest(str(name), PROTOCOLS)}")
    kinds = {f.name: f.type for f in dataclasses.fields(AtariProtocol)}
    changes = {}
    for key, value in kwargs.items():
        if key == "protocol":
            continue
        if key not in kinds:
            known = ("protocol", *kinds)
            raise ConfigError(f"env_kwargs {key}: Atari has no such argument{nearest(key, known)}; there are {', '.join(known)}")
        kind: Any = kinds[key]
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, int if kind is int else int | float):
            raise ConfigError(f"env_kwargs {key}={value!r}: must be of type {kind.__name__}")
        changes[key] = kind(value)
    return dataclasses.replace(PROTOCOLS[name], **changes)


def atari_source(env_id: str, kwargs: Mapping[str, Any], max_agent_steps: int = 0) -> EnvSource:
    """Of an id such as `ALE/Pong-v5`; `max_agent_steps`, if given, shortens episodes further."""
    if importlib.util.find_spec("ale_py") is None:
        raise MissingExtra(f"environment '{env_id}'", "atari")
    import ale_py

    gym.register_envs(ale_py)
    try:
        game = str(gym.spec(env_id).kwargs["game"])
    except (gym.error.Error, KeyError):
        known = [name for name in gym.registry if name.startswith("ALE/")]
        raise ConfigError(f"no environment '{env_id}'{nearest(env_id, known)}") from None
    protocol = make_protocol(kwargs)
    if max_agent_steps:
        protocol = dataclasses.replace(protocol, max_frames=min(protocol.max_frames, max_agent_steps * protocol.frame_skip))
    return EnvSource(
        env_id,
        env_id,
        lambda render_mode=None: AtariGame(game, protocol, render_mode),
        lambda num_envs, seed, channels: AtariEnvs(game, protocol, num_envs, seed, channels),
        protocol.frame_skip,
        protocol.table(),
    )


def emulators(game: str, protocol: AtariProtocol, num_envs: int, **changes: Any) -> "AtariVectorEnv":
    """So many of one game. Everything is named: AtariVectorEnv's defaults are not Dopamine's."""
    from ale_py.vector_env import AtariVectorEnv

    class Emulators(AtariVectorEnv):
        # AtariVectorEnv writes its autoreset mode into this dict, which would be the one of all of Gymnasium's vectors.
        metadata: dict[str, Any] = {}

    options: dict[str, Any] = {
        "repeat_action_probability": protocol.sticky, "full_action_space": protocol.full_actions, "frameskip": protocol.frame_skip,
        "maxpool": True, "grayscale": True, "img_height": PICTURE[0], "img_width": PICTURE[1], "stack_num": 1, "noop_max": 0,
        "use_fire_reset": False, "episodic_life": False, "life_loss_info": False, "reward_clipping": False,
        "max_num_frames_per_episode": NEVER, "autoreset_mode": AutoresetMode.NEXT_STEP,
    }  # fmt: skip
    return Emulators(game, num_envs, **(options | changes))


def stream_seeds(seed: np.random.SeedSequence, num: int) -> NDArray[np.int64]:
    """So many different numbers of 31 bits: negative ones would mean the clock."""
    drawn = (seed.generate_state(2 * num) >> 1).tolist()
    return np.array(list(dict.fromkeys(drawn))[:num], np.int64)


class AtariEnvs:
    """One game in many emulators, which ale-py steps in threads of its own; in the NEXT_STEP manner (see `EnvList`)."""

    first_action = 0

    def __init__(self, game: str, protocol: AtariProtocol, num_envs: int, seed: np.random.SeedSequence, channels: str = "auto"):
        self.vector, self.num_envs, self.protocol = emulators(game, protocol, num_envs), num_envs, protocol
        self.num_actions = num_actions(self.vector.single_action_space)
        self.reader = ObservationReader(self.vector.single_observation_space, channels)
        self.spec, self.reward_classes = self.reader.spec, protocol.reward_classes
        self._seeds = stream_seeds(seed, num_envs)
        self._rows: NDArray[np.int64] | None = None
        self._length = np.zeros(num_envs, np.int64)
        self._over, self._cut = np.zeros(num_envs, bool), np.zeros(num_envs, bool)  # at the step before; cut: by us

    def reset(self) -> Arrays:
        """First observations of all."""
        return self.restart(self._seeds)

    def restart(self, seeds: NDArray[np.int64] | None) -> Arrays:
        """The same with other seeds; None: each emulator's generator goes on."""
        raw, _ = self.vector.reset(seed=seeds)
        self._length = np.zeros_like(self._length)
        self._over, self._cut = np.zeros_like(self._over), np.zeros_like(self._cut)
        return self.reader.read_batch(raw, self.num_envs)

    def send(self, actions: NDArray[np.int64], only: Sequence[int] | None = None) -> None:
        """The actions of the coming step; the emulators begin at once.

        With `only`, those rows are returned. The others run too, doing nothing: the vector steps as a whole.
        """
        self._rows = None if only is None else np.asarray(only, np.int64)
        if self._rows is None:
            self.vector.send(actions)
            return
        sent = np.zeros(self.num_envs, np.int64)
        sent[self._rows] = actions
        self.vector.send(sent)

    def recv(self) -> Stepped:
        """What came of it."""
        stepped, rows = self._recv(), self._rows
        if rows is None:
            return stepped
        obs = {name: array[rows] for name, array in stepped.obs.items()}
        return Stepped(
            obs,
            stepped.reward[rows],
            stepped.terminated[rows],
            stepped.truncated[rows],
            raw_reward=np.asarray(stepped.paid[rows], np.float64),
        )

    def _recv(self) -> Stepped:
        raw, paid, terminated, _, _ = self.vector.recv()
        if self._cut.any():  # the vector, which does not know that their episodes are over, has stepped on
            raw, _ = self.vector.reset(options={"reset_mask": self._cut})
        opens = self._over
        paid, terminated = np.where(opens, 0.0, paid), terminated & ~opens
        self._length = np.where(opens, 0, self._length + 1)
        self._cut = ~terminated & (self._length >= self.protocol.limit_agent_steps)
        self._over = terminated | self._cut
        reward = np.clip(paid, -1, 1) if self.protocol.clip_rewards else paid
        obs = self.reader.read_batch(raw, self.num_envs)
        return Stepped(obs, reward.astype(np.float32), terminated, self._cut, raw_reward=paid)

    def step(self, actions: NDArray[np.int64], only: Sequence[int] | None = None) -> Stepped:
        """Both at once."""
        self.send(actions, only)
        return self.recv()

    def close(self) -> None:
        """Close the vector."""
        self.vector.close()


class AtariGame(gym.Env[NDArray[np.uint8], int]):
    """One game as a Gymnasium environment, with the pictures and rewards of `AtariEnvs`; `info` has what the game paid.

    To render, a second emulator plays the same game in colour: same seed, same actions, hence the same chance.
    """

    def __init__(self, game: str, protocol: AtariProtocol, render_mode: str | None = None):
        self.envs = AtariEnvs(game, protocol, 1, np.random.SeedSequence(0))
        self.observation_space = self.envs.vector.single_observation_space
        self.action_space = self.envs.vector.single_action_space
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": max(1, round(60 / protocol.frame_skip)),
            "reward_classes": protocol.reward_classes,
        }
        self.render_mode, self.screen = render_mode, None
        if render_mode == "rgb_array":
            self.screen = emulators(game, protocol, 1, grayscale=False, img_height=SCREEN[0], img_width=SCREEN[1])
        elif render_mode is not None:
            raise ConfigError(f"render_mode={render_mode}: Atari renders rgb_array only")
        self._seeded = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Without a seed chance goes on where it was, which is quick."""
        super().reset(seed=seed)
        seeds = None
        if seed is not None or not self._seeded:
            seeds, self._seeded = self.np_random.integers(2**31, size=1), True
        if self.screen is not None:
            self._picture = self.screen.reset(seed=seeds)[0][0, 0]
        return self._only(self.envs.restart(seeds)), {}

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        actions = np.array([action], np.int64)
        if self.screen is not None:
            self._picture = self.screen.step(actions)[0][0, 0]
        stepped = self.envs.step(actions)
        info = {RAW_REWARD: float(stepped.paid[0])}
        return self._only(stepped.obs), float(stepped.reward[0]), bool(stepped.terminated[0]), bool(stepped.truncated[0]), info

    def render(self) -> NDArray[np.uint8] | None:
        """The screen in colour."""
        return None if self.screen is None else self._picture

    def close(self) -> None:
        """Close the emulators."""
        self.envs.close()
        if self.screen is not None:
            self.screen.close()

    def _only(self, obs: Arrays) -> NDArray[np.uint8]:
        return np.asarray(obs["obs"][0], np.uint8)
