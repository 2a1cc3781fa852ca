"""Anyone's environment: by id, class, callable or object; stepped side by side; every autoreset mode read right.

`EnvList` steps environments that we build ourselves, in the NEXT_STEP manner: the step that ends an episode returns its last
observation, and the next call of `step` ignores the action and returns the next episode's first. `VectorAdapter` takes a
Gymnasium VectorEnv of any mode. `Stepped.final_obs` tells the two manners apart, and the collector stores either without a single
fake or lost transition.
"""

import copy
import importlib
import math
import reprlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from numpy.typing import NDArray

from dae.encoders import ObsSpec
from dae.envs.spaces import ObservationReader, num_actions
from dae.errors import ConfigError, DaeError, DaeWarning, EnvironmentFault, MissingExtra, nearest

AnyEnv = gym.Env[Any, Any]
LARGEST_REWARD = 1e18
"""Squares of returns must fit into single precision."""
RAISED = (Exception, SystemExit)
"""What foreign code may end with; some calls sys.exit."""
Arrays = dict[str, NDArray[np.generic]]
RAW_REWARD = "dae.raw_reward"
"""In a step's info: what was paid, where the reward is something else (a clipped one, say). Scores count it."""


@dataclass(frozen=True)
class Stepped:
    """What came of one step of every environment."""

    obs: Arrays
    """o_{t+1}; where `final_obs` is given and an episode ended, the next episode's first observation."""
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_obs: Arrays | None = None
    """SAME_STEP only: the last observations, in the rows of the environments whose episode ended."""
    raw_reward: NDArray[np.float64] | None = None
    """What the environments paid, where `reward`, which is learned from, is something else."""

    @property
    def paid(self) -> NDArray[np.floating[Any]]:
        """What scores count."""
        return self.reward if self.raw_reward is None else self.raw_reward


class Envs(Protocol):
    """What the collector needs of environments."""

    num_envs: int
    num_actions: int
    spec: ObsSpec
    reward_classes: tuple[float, ...]

    def reset(self) -> Arrays: ...
    def send(self, actions: NDArray[np.int64]) -> None: ...
    def recv(self) -> Stepped: ...
    def close(self) -> None: ...


class OwnEnvs(Envs, Protocol):
    """Those that we make ourselves: NEXT_STEP, and some of them can be stepped without the others."""

    first_action: int
    reader: ObservationReader

    def send(self, actions: NDArray[np.int64], only: Sequence[int] | None = None) -> None: ...
    def step(self, actions: NDArray[np.int64], only: Sequence[int] | None = None) -> Stepped: ...


@dataclass(frozen=True)
class EnvSource:
    """How to make the environment that the user named."""

    name: str
    """For folders and tables."""
    plain_id: str | None
    """A Gymnasium id that may be kept in files and made again from there; no other source may."""
    make: Callable[..., AnyEnv]
    """make(render_mode=None)"""
    make_many: Callable[[int, np.random.SeedSequence, str], OwnEnvs] | None = None
    """make_many(num_envs, seed, channels), where many are more than a list of single ones."""
    frames_per_agent_step: int = 1
    protocol: Mapping[str, Any] = field(default_factory=dict)
    """What was decided about the environment, for people and for the record."""

    def many(self, num_envs: int, seed: np.random.SeedSequence, channels: str) -> OwnEnvs:
        """So many of them, side by side."""
        if self.make_many is not None:
            return self.make_many(num_envs, seed, channels)
        return EnvList(self.make, num_envs, seed, channels)


def env_source(env: str | Callable[..., AnyEnv] | AnyEnv, kwargs: Mapping[str, Any] | None = None, max_steps: int = 0) -> EnvSource:
    """From a Gymnasium id, `package.module:Class`, a callable that makes an environment, or one environment to be copied."""
    kwargs = dict(kwargs or {})

    def source(name: str, plain_id: str | None, make: Callable[..., Any]) -> EnvSource:
        def made(**more: Any) -> AnyEnv:
            one = _sound(make(**more), name)
            return gym.wrappers.TimeLimit(one, max_steps) if max_steps else one

        return EnvSource(name, plain_id, made)

    if isinstance(env, gym.Env):
        if kwargs:
            raise ConfigError("env_kwargs go with an id or a class, not with an environment that is already made")
        return source(_class_name(env), None, lambda **_: _copy(env))
    if callable(env):
        name = getattr(env, "__name__", type(env).__name__)
        return source("env" if name == "<lambda>" else name, None, lambda **more: _call(env, {**kwargs, **more}, name))
    if not env:
        raise ConfigError("no environment given: --env ID, for example --env CartPole-v1")
    if not isinstance(env, str):
        raise ConfigError(f"env={reprlib.repr(env)}: must be an id, package.module:Class, a class, a callable or an environment")
    if ":" in env:
        made = _load_class(env)
        return source(env.split(":")[1], None, lambda **more: _call(made, {**kwargs, **more}, env))
    if env.startswith("ALE/"):
        from dae.envs.atari import atari_source

        return atari_source(env, kwargs, max_steps)
    _find_spec(env)
    return source(env, env, lambda **more: _make(env, {**kwargs, **more}))


def _sound(made: Any, name: str) -> AnyEnv:
    """What was made, if it is an environment; duck-typed ones lack what wrappers and rendering need."""
    if not isinstance(made, gym.Env):
        raise EnvironmentFault(
            f"environment {name}: made something of type {type(made).__name__}, not a gymnasium.Env: derive it from that"
        )
    for space in ("observation_space", "action_space"):
        if not isinstance(getattr(made, space, None), gym.Space):
            raise EnvironmentFault(f"environment {name}: has no {space}; set it in __init__")
    return made


def _class_name(env: AnyEnv) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def _copy(env: AnyEnv) -> AnyEnv:
    try:
        return copy.deepcopy(env)
    except Exception as error:
        name = type(env.unwrapped).__name__
        raise EnvironmentFault(
            f"{name} can't be copied ({one_line(error)}); give a callable that makes it: DAE(lambda: {name}())"
        ) from error


def _call(make: Callable[..., AnyEnv], kwargs: Mapping[str, Any], name: str) -> AnyEnv:
    """Call with `render_mode` only where it is taken."""
    kwargs = {k: v for k, v in kwargs.items() if k != "render_mode" or v is not None}
    try:
        return make(**kwargs)
    except RAISED as error:
        if isinstance(error, TypeError) and "render_mode" in kwargs and "render_mode" in str(error):
            return _call(make, {k: v for k, v in kwargs.items() if k != "render_mode"}, name)
        raise EnvironmentFault(f"environment {name}: can't be made with {dict(kwargs)}: {one_line(error)}") from error


def _load_class(name: str) -> Callable[..., AnyEnv]:
    """`package.module:Class`, named by the user on the command line; never by data."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        there = importlib.import_module(module)
    except RAISED as error:
        raise ConfigError(f"environment '{name}': importing {module} raised {one_line(error)}") from error
    found = getattr(there, attribute, None)
    if found is None:
        known = [n for n in dir(there) if not n.startswith("_")]
        raise ConfigError(f"environment '{name}': module {module} has no {attribute}{nearest(attribute, known)}")
    if not callable(found):
        raise ConfigError(f"environment '{name}': {attribute} can't be called")
    return found


def _find_spec(env_id: str) -> None:
    import dae.envs  # noqa: F401  registers the bundled ones

    if env_id.startswith("MinAtar/"):
        from dae.envs import minatar

        minatar.register()
    try:
        gym.spec(env_id)
    except gym.error.Error as error:
        raise ConfigError(
            f"no environment '{env_id}'{nearest(env_id, gym.registry)}; your own goes by package.module:Class"
        ) from error


def _make(env_id: str, kwargs: Mapping[str, Any]) -> AnyEnv:
    try:
        return gym.make(
            env_id, disable_env_checker=True, **{k: v for k, v in kwargs.items() if k != "render_mode" or v is not None}
        )
    except RAISED as error:
        raise EnvironmentFault(f"environment '{env_id}' can't be made with {dict(kwargs)}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Type and words of an exception."""
    return " ".join(f"{type(error).__name__}: {error}".split())


# --------------------------------------------------------------------------------------------------- the contract of one environment


class Broken(Exception):
    """A rule that an environment broke, and how. Where that was, the caller knows."""

    def __init__(self, rule: str, how: str):
        super().__init__(" ".join(how.split()))  # one line, whatever the environment's own words were
        self.rule = rule


def reset_env(env: AnyEnv, seed: int | None) -> Any:
    """The first observation, as the environment gives it."""
    try:
        returned = env.reset(seed=seed)
    except RAISED as error:
        raise Broken("reset works", f"reset() raised {one_line(error)}") from error
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise Broken("reset returns (observation, info)", "reset() must return (observation, info)")
    return returned[0]


def step_env(env: AnyEnv, action: int) -> tuple[Any, float, bool, bool, float | None]:
    """Observation, reward, terminated, truncated, and what was paid where that is something else than the reward."""
    try:
        returned = env.step(action)
    except RAISED as error:
        raise Broken("step works", f"step() raised {one_line(error)}") from error
    if not (isinstance(returned, tuple) and len(returned) == 5):
        five = "(observation, reward, terminated, truncated, info)"
        raise Broken(f"step returns {five}", f"step() must return {five}")
    obs, reward, terminated, truncated, info = returned
    number = check_reward(reward, "step() returned the reward")
    for word, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise Broken(f"{word} is a bool", f"step() returned {word}={flag!r}, which is not a bool")
    paid = info[RAW_REWARD] if isinstance(info, Mapping) and RAW_REWARD in info else None
    if paid is not None:
        paid = check_reward(paid, f"step() returned info['{RAW_REWARD}']:", most=math.inf)
    return obs, number, bool(terminated), bool(truncated), paid


def read_obs(reader: ObservationReader, raw: Any, where: str) -> Arrays:
    """The observation that `where` returned, as it is stored."""
    try:
        return reader.read(raw)
    except ValueError as error:
        raise Broken("observations are in their space", f"{where}() returned what its space does not allow: {error}") from None


def check_reward(reward: Any, said: str, most: float = LARGEST_REWARD) -> float:
    """The reward as a number. `said` opens the complaint."""
    try:
        if isinstance(reward, str | bytes):
            raise TypeError("text")  # though float() would read it
        number = float(reward)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise Broken("rewards are numbers", f"{said} {reprlib.repr(reward)}, which is no number") from None
    if not math.isfinite(number):
        raise Broken("rewards are finite", f"{said} {number}")
    if abs(number) > most:
        raise Broken("rewards are small enough to learn from", f"{said} {number:g}, but {most:g} is the most: scale it down")
    return number


def render_env(env: AnyEnv) -> Any:
    """What it renders, where it was made to."""
    if env.render_mode != "rgb_array":
        return None
    try:
        return env.render()
    except RAISED as error:
        if isinstance(error, gym.error.DependencyNotInstalled) and "pygame" in str(error):
            raise MissingExtra("rendering", "render") from error
        raise Broken("render works", f"render() raised {one_line(error)}") from error


def close_env(env: AnyEnv | VectorEnv[Any, Any, Any]) -> None:
    """Whatever it was for is done: what it raises now is said, and spoils nothing."""
    try:
        env.close()
    except RAISED as error:
        warnings.warn(f"close() of {type(env.unwrapped).__name__} raised {one_line(error)}", DaeWarning, stacklevel=2)


def raw_rewards(info: Mapping[str, Any], reward: NDArray[np.float32]) -> NDArray[np.float64] | None:
    """The same of a vector's info, where an episode's last step may be told apart (SAME_STEP); those that say nothing paid `reward`."""
    paid = None
    for part in (info, info.get("final_info")):
        if isinstance(part, Mapping) and RAW_REWARD in part:
            paid = reward.astype(np.float64) if paid is None else paid
            said = np.asarray(part.get(f"_{RAW_REWARD}", np.ones(len(reward), bool)), bool)
            paid[said] = np.asarray(part[RAW_REWARD], np.float64)[said]
    return paid


def declared_reward_classes(env: AnyEnv | VectorEnv[Any, Any, Any]) -> tuple[float, ...]:
    """The values that a reward can take, where the environment says so in its metadata."""
    metadata = env.unwrapped.metadata if isinstance(env, gym.Env) else env.metadata
    declared = (metadata or {}).get("reward_classes", ())
    try:
        return tuple(check_reward(r, "") for r in declared)
    except (Broken, TypeError):
        raise EnvironmentFault(f"metadata['reward_classes'] is {reprlib.repr(declared)}: must be a list of numbers") from None


# ------------------------------------------------------------------------------------------------------- many environments


class EnvList:
    """Environments in this process, each episode with a seed of its own (a hash in 32 bits: two of 100,000 may well be equal)."""

    def __init__(self, make: Callable[[], AnyEnv], num_envs: int, seed: np.random.SeedSequence, channels: str = "auto"):
        self.envs = [make() for _ in range(num_envs)]
        if len({id(env.unwrapped) for env in self.envs}) < num_envs:
            raise EnvironmentFault("the callable returned the same environment twice: it must make a new one at each call")
        first = self.envs[0]
        self.num_envs, self.num_actions = num_envs, num_actions(first.action_space)
        self.first_action = int(first.action_space.start)  # type: ignore[attr-defined]
        self.reader = ObservationReader(first.observation_space, channels)
        self.spec, self.reward_classes = self.reader.spec, declared_reward_classes(first)
        self._seed, self._episode = seed, [0] * num_envs
        self._ended, self._steps = [False] * num_envs, [0] * num_envs
        self._sent: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self._only: Sequence[int] | None = None
        self._taken: list[list[int]] = [[] for _ in range(num_envs)]  # actions of the episode that each environment is in

    def episode_seed(self, env: int) -> int:
        """Of the episode that environment `env` is in. 32 bits: many environments take no more."""
        key = (*self._seed.spawn_key, env, self._episode[env])
        return int(np.random.SeedSequence(self._seed.entropy, spawn_key=key).generate_state(1)[0])

    def reset(self) -> Arrays:
        """First observations of all."""
        return _stack([self._reset(e) for e in range(self.num_envs)])

    def send(self, actions: NDArray[np.int64], only: Sequence[int] | None = None) -> None:
        """The actions of the coming step, of all environments or of those in `only`, whose rows `recv` returns in that order."""
        self._sent, self._only = actions, only

    def recv(self) -> Stepped:
        """Take the step; in this process nothing could begin before."""
        return self.step(self._sent, self._only)

    def step(self, actions: NDArray[np.int64], only: Sequence[int] | None = None) -> Stepped:
        """Both at once."""
        which = range(self.num_envs) if only is None else only
        results = [self._step(e, int(a)) for e, a in zip(which, actions, strict=True)]
        obs, reward, terminated, truncated, raw = zip(*results, strict=True)
        paid = None if all(x is None for x in raw) else np.array([r if x is None else x for r, x in zip(reward, raw, strict=True)])
        return Stepped(_stack(obs), np.array(reward, np.float32), np.array(terminated), np.array(truncated), raw_reward=paid)

    def journal(self) -> dict[str, Any]:
        """How every environment came to where it is: the number of its episode, and the actions taken in it."""
        return {"episodes": list(self._episode), "actions": [list(taken) for taken in self._taken]}

    def replay(self, journal: Mapping[str, Any]) -> Arrays:
        """There again, by the same seeds and actions. Returns what is observed there."""
        obs = []
        for e, (episode, actions) in enumerate(zip(journal["episodes"], journal["actions"], strict=True)):
            self._episode[e] = int(episode)
            seen = self._reset(e)
            for action in actions:
                seen = self._step(e, int(action))[0]
            obs.append(seen)
        return _stack(obs)

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            close_env(env)

    def _reset(self, e: int) -> Arrays:
        self._ended[e], self._steps[e], self._taken[e] = False, 0, []
        try:
            return read_obs(self.reader, reset_env(self.envs[e], self.episode_seed(e)), "reset")
        except Broken as broken:
            raise self._fault(e, broken) from broken.__cause__

    def _step(self, e: int, action: int) -> tuple[Arrays, float, bool, bool, float | None]:
        if self._ended[e]:
            self._episode[e] += 1
            return self._reset(e), 0.0, False, False, None
        self._steps[e] += 1
        self._taken[e].append(action)
        try:
            raw, reward, terminated, truncated, paid = step_env(self.envs[e], self.first_action + action)
            obs = read_obs(self.reader, raw, "step")
        except Broken as broken:
            raise self._fault(e, broken) from broken.__cause__
        self._ended[e] = terminated or truncated
        return obs, reward, terminated, truncated, paid

    def _fault(self, e: int, broken: Broken) -> EnvironmentFault:
        return EnvironmentFault(f"environment {e}, episode seed {self.episode_seed(e)}, step {self._steps[e]}: {broken}")


class VectorAdapter:
    """A Gymnasium VectorEnv, whichever way it resets."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], seed: np.random.SeedSequence, channels: str = "auto"):
        self.envs, self.num_envs = envs, envs.num_envs
        self.num_actions = num_actions(envs.single_action_space)
        self.first_action = int(envs.single_action_space.start)  # type: ignore[attr-defined]
        self.reader = ObservationReader(envs.single_observation_space, channels)
        self.spec, self.reward_classes = self.reader.spec, declared_reward_classes(envs)
        mode = envs.metadata.get("autoreset_mode")
        if mode is None:
            raise ConfigError("this VectorEnv does not say how it resets: set metadata['autoreset_mode'] to an AutoresetMode")
        self.mode = AutoresetMode(mode)
        self._seed = int(seed.generate_state(1)[0]) >> 1  # one number: native vectors take no list
        self._sent: NDArray[np.int64] = np.zeros(self.num_envs, np.int64)
        self._steps = 0

    def reset(self) -> Arrays:
        """First observations of all."""
        raw, _ = self._ask(lambda: self.envs.reset(seed=self._seed), "reset")
        return self._read(raw)

    def send(self, actions: NDArray[np.int64]) -> None:
        """The actions of the coming step; an AsyncVectorEnv's workers begin at once."""
        self._sent = actions + self.first_action
        if isinstance(self.envs, AsyncVectorEnv):
            self.envs.step_async(self._sent)

    def recv(self) -> Stepped:
        """What came of it."""
        self._steps += 1
        wait = self.envs.step_wait if isinstance(self.envs, AsyncVectorEnv) else lambda: self.envs.step(self._sent)
        raw, paid, terminated, truncated, info = self._ask(wait, "step")
        reward, terminated, truncated = np.asarray(paid, np.float32), np.asarray(terminated, bool), np.asarray(truncated, bool)
        if not np.isfinite(reward).all():
            raise EnvironmentFault(f"environment {int(np.argmin(np.isfinite(reward)))}, step {self._steps}: a reward is not finite")
        if np.abs(reward).max() > LARGEST_REWARD:
            raise EnvironmentFault(
                f"environment {int(np.argmax(np.abs(reward)))}, step {self._steps}: a reward is above {LARGEST_REWARD:g}: scale it down"
            )
        obs, ended, unclipped = self._read(raw), terminated | truncated, raw_rewards(info, reward)
        if self.mode == AutoresetMode.NEXT_STEP or not ended.any():
            return Stepped(obs, reward, terminated, truncated, raw_reward=unclipped)
        if self.mode == AutoresetMode.SAME_STEP:
            return Stepped(obs, reward, terminated, truncated, self._final_observations(obs, info, ended), unclipped)
        opened, _ = self._ask(lambda: self.envs.reset(options={"reset_mask": ended}), "reset")  # DISABLED: resetting is ours to do
        return Stepped(self._read(opened), reward, terminated, truncated, final_obs=obs, raw_reward=unclipped)

    def step(self, actions: NDArray[np.int64]) -> Stepped:
        """Both at once."""
        self.send(actions)
        return self.recv()

    def close(self) -> None:
        """Close the vector."""
        close_env(self.envs)

    def _ask(self, call: Callable[[], Any], word: str) -> Any:
        try:
            return call()
        except DaeError:
            raise
        except RAISED as error:
            raise EnvironmentFault(f"step {self._steps}: {word}() of the vector raised {one_line(error)}") from error

    def _final_observations(self, obs: Arrays, info: Mapping[str, Any], ended: NDArray[np.bool_]) -> Arrays:
        final = info.get("final_obs")
        if final is None:
            raise EnvironmentFault("a SAME_STEP VectorEnv ended an episode without info['final_obs']")
        rows = {name: array.copy() for name, array in obs.items()}
        for e in np.flatnonzero(ended):
            one = final[e] if isinstance(final, np.ndarray) and final.dtype == object else _row(final, int(e))
            for name, array in self.reader.read(one).items():
                rows[name][e] = array
        return rows

    def _read(self, raw: Any) -> Arrays:
        try:
            return self.reader.read_batch(raw, self.num_envs)
        except ValueError as error:
            raise EnvironmentFault(f"step {self._steps}: {error}") from None


def _row(batched: Any, e: int) -> Any:
    if isinstance(batched, Mapping):
        return {key: _row(value, e) for key, value in batched.items()}
    if isinstance(batched, tuple):
        return tuple(_row(value, e) for value in batched)
    return batched[e]


def _stack(rows: Sequence[Arrays]) -> Arrays:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
