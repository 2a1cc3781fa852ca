"""`DAE`: an agent and its environment in one object, with the verbs that users know."""

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from dae.agent import Actor, ActorState, Agent
from dae.collect import ActingInputs, Episode
from dae.config import Config
from dae.encoders import ObsSpec
from dae.envs.gymnasium import (
    AnyEnv,
    Arrays,
    Broken,
    EnvSource,
    OwnEnvs,
    VectorAdapter,
    check_reward,
    close_env,
    env_source,
    read_obs,
    render_env,
    reset_env,
    step_env,
)
from dae.envs.spaces import ObservationReader, follow, in_words, num_actions
from dae.errors import ConfigError, DaeWarning, EnvironmentFault, FileError, ResourceError, within
from dae.evaluate import evaluate
from dae.ledger import Diary
from dae.network import Network
from dae.presets import with_presets
from dae.replay import bytes_needed
from dae.run.checkpoint import ACTING_PARTS, Blueprint, advance, latest_checkpoint, load_acting, load_checkpoint, save_checkpoint
from dae.train import Report, Seeds, Trainer, build_agent, network_sizes, pick_device, pick_reward_classes

Callback = Callable[["DAE", Report], bool | None]
"""Called with every report; returning False ends the run."""


@dataclass
class PredictState:
    """What `predict` carries between two calls: the recurrent state, the frames, and the action taken before."""

    actor: ActorState
    inputs: ActingInputs
    prev_action: NDArray[np.int64]


class DAE:
    """The agent of the paper on one environment.

    >>> agent = DAE("dae/CartPoleHidden-v0", preset="laptop")
    >>> agent.learn(30_000)
    >>> player = agent.player()
    """

    def __init__(
        self,
        env: str | Callable[..., AnyEnv] | AnyEnv | VectorEnv[Any, Any, Any] | None = None,
        *,
        preset: str | Sequence[str] = (),
        config: Config | None = None,
        **overrides: Any,
    ):
        names = [preset] if isinstance(preset, str) else preset
        if not (isinstance(names, Sequence) and all(isinstance(name, str) for name in names)):
            raise ConfigError(f"preset={preset!r}: must be the name of a preset, or a list of names")
        cfg = with_presets(names, config).override(**overrides)
        if isinstance(env, str):
            cfg = cfg.override(env=env)
        if cfg.run.threads:
            torch.set_num_threads(cfg.run.threads)
        self.vector = env if isinstance(env, VectorEnv) else None
        named = cfg.environment.env if env is None or isinstance(env, str) else env
        self.source: EnvSource | None = None
        if not isinstance(named, VectorEnv):
            self.source = env_source(named, cfg.environment.env_kwargs, cfg.environment.max_episode_agent_steps)
        if self.vector is not None:
            cfg = _for_vector(cfg, self.vector)
        self.config = cfg
        self.envs = self._make_envs()
        self.reader: ObservationReader = self.envs.reader
        classes = pick_reward_classes(cfg, self.envs.reward_classes)
        self.agent: Agent = build_agent(cfg, self.envs.spec, self.envs.num_actions, classes)
        self.blueprint = Blueprint(
            cfg, self.envs.spec, self.envs.num_actions, classes,
            self.source.plain_id if self.source else None, dict(cfg.environment.env_kwargs),
        )  # fmt: skip
        try:
            json.dumps(self.blueprint.to_json())
        except TypeError:
            raise ConfigError("env_kwargs must be JSON values; bind others in a callable: DAE(lambda: MyEnv(...))") from None
        self.trainer: Trainer | None = None
        self._warned: set[str] = set()
        self._stateless, self._reward_scale = 0, 1.0
        self._rng = np.random.default_rng(cfg.run.seed)  # of predict(deterministic=False) only

    # ---------------------------------------------------------------------------------------------------------- learning

    def reports(self, total_agent_steps: int | None = None) -> Iterator[Report]:
        """Train, and hand out what happens: the loop behind `learn`, for those who want to hold it themselves."""
        if total_agent_steps is not None:
            self.config = self.config.override(total_agent_steps=total_agent_steps)
            self.blueprint = dataclasses.replace(self.blueprint, config=self.config)
        if self.trainer is not None:
            raise ConfigError("this agent has learned already; make a new one, or load its weights with DAE.load")
        self.refuse_too_large()
        if self.blueprint.agent_steps:
            warnings.warn(
                "learning goes on from loaded weights, optimiser and temperature; schedules and replay start anew", stacklevel=2
            )
        self.trainer = Trainer(self.config, self.envs, self.agent, self.source)
        yield from self.trainer.run()

    def learn(self, total_agent_steps: int | None = None, callback: Callback | None = None) -> Self:
        """Train for so many agent steps, summed over the environments. Writes no files: `dae train` does."""
        for report in self.reports(total_agent_steps):
            if callback is not None and callback(self, report) is False:
                break
        return self

    @property
    def replay_bytes(self) -> int:
        """What the replay takes, in memory and on disk alike."""
        slots = self.config.learning.replay_agent_steps
        return bytes_needed(self.envs.spec, slots, self.agent.net.state_dim, self.agent.device)

    def refuse_too_large(self) -> None:
        """Whether there is room for the replay; asked before learning only, since playing needs none."""
        cfg, need = self.config, self.replay_bytes
        have = _free_memory(pick_device(cfg.run.device))
        if have is not None and need > have:
            fits = int(cfg.learning.replay_agent_steps * have / need * 0.8)
            raise ResourceError(
                f"replay_agent_steps={cfg.learning.replay_agent_steps}: the replay needs {need / 2**30:.1f} GiB of memory, "
                f"{have / 2**30:.1f} GiB are free; at most about {fits} fit"
            )
        if cfg.learning.replay_agent_steps // self.envs.num_envs <= cfg.window_steps + cfg.environment.frame_stack:
            raise ConfigError(
                f"replay_agent_steps={cfg.learning.replay_agent_steps}: {self.envs.num_envs} environments with windows of "
                f"{cfg.window_steps} steps need more than {self.envs.num_envs * (cfg.window_steps + cfg.environment.frame_stack + 1)}"
            )

    def evaluate(
        self, episodes: int | None = None, epsilon: float | None = None, seed: int | None = None, diary: Diary | None = None
    ) -> list[Episode]:
        """Raw scores: the first episode of each of `episodes` fresh environments. A `dae.ledger.Diary` keeps what happened.

        The episodes are others than those of the evaluations while it learned; the same call gives the same ones again.
        """
        if self.source is None:
            raise ConfigError("a VectorEnv object can't be evaluated: make the agent from an id, a class or a callable")
        acting = self.config.acting
        episodes = acting.eval_episodes if episodes is None else episodes
        epsilon = acting.eval_epsilon if epsilon is None else epsilon
        seed = self.config.run.seed if seed is None else seed
        within("episodes", episodes, 1)
        within("epsilon", epsilon, 0, 1)
        within("seed", seed, 0)
        sequence = Seeds.of(seed).evaluation_at(self.now().agent_steps, fresh=1)
        return evaluate(self.agent.player, self.source, episodes, epsilon, sequence, self.config.network.channels, diary)

    # ------------------------------------------------------------------------------------------------------------ acting

    def predict(
        self,
        obs: Any,
        state: PredictState | None = None,
        episode_start: NDArray[np.bool_] | bool | None = None,
        deterministic: bool = True,
        reward: NDArray[np.float32] | float | None = None,
    ) -> tuple[Any, PredictState]:
        """One action, or one for each row of a batch of observations, and the state for the next call.

        Give the returned state back, and the `reward` that the action earned: the agent sees rewards too. `episode_start` marks
        observations that open an episode. `player()` does all of it for you. Not `deterministic`: epsilon-greedy as in evaluation.
        """
        single, arrays = self._given(obs)
        size = len(next(iter(arrays.values())))
        if state is not None and len(state.prev_action) != size:
            raise ConfigError(f"predict() was given {size} observation(s), and the state of {len(state.prev_action)}")
        start = _each("episode_start", state is None if episode_start is None else episode_start, size).astype(bool)
        if state is None:
            acting = ActingInputs(size, self.config.environment.frame_stack, self.agent.device)
            state = PredictState(self.agent.initial_state(size), acting, np.zeros(size, np.int64))
            self._stateless += episode_start is None
            if not start.all() or self._stateless > 2:  # one such call opens an episode; three in a row have lost the state
                self._warn(
                    "predict() was called without the state of the step before: the agent has forgotten the episode; give state=, "
                    "or episode_start=True where a new one begins"
                )
            start[:] = True
        else:
            self._stateless = 0
        if reward is None and not start.all():
            self._warn(
                "predict() was called without `reward`: the agent, which sees rewards, is told 0; player() keeps account of it"
            )
        earned = _each("reward", 0.0 if reward is None else reward, size)
        epsilon = 0.0 if deterministic else self.config.acting.eval_epsilon
        acting = copy.deepcopy(state.inputs)  # the given state stays as it is, so that it may be used again
        action, actor = self.agent.player.act(acting(arrays, state.prev_action, earned, start), state.actor, epsilon, self._rng)
        following = PredictState(actor, acting, action)
        action = action + self.envs.first_action
        return (int(action[0]) if single else action), following

    def player(self, epsilon: float = 0.0, seed: int = 0) -> "Player":
        """Plays one environment, keeping the state for you."""
        return Player(self.agent.player, self.reader, self.config, self.envs.first_action, epsilon, seed)

    # -------------------------------------------------------------------------------------------------------------- files

    def save(self, path: str | Path) -> Path:
        """A checkpoint folder: weights, optimiser, configuration. The replay is not in it.

        A checkpoint that is there is replaced; any other folder that holds something is refused.
        """
        return save_checkpoint(Path(path), self.agent.state_dict(), self.now(), {"reward_scale": self.reward_scale})

    @property
    def reward_scale(self) -> float:
        """The unit of predicted rewards, where they are general (PAPER.md D12)."""
        return self._reward_scale if self.trainer is None else float(self.trainer.signals.reward_scale)

    def now(self) -> Blueprint:
        """What this agent is, with the counters as they stand."""
        if self.trainer is not None:
            self.blueprint = advance(self.blueprint, self.trainer.agent_steps, self.trainer.updates)
        return self.blueprint

    @classmethod
    def load(cls, path: str | Path, env: Any = None, **overrides: Any) -> Self:
        """From a checkpoint or a run folder. An environment that is no plain Gymnasium id must be given again.

        Weights, optimiser and temperature come back; should it learn further, schedules and replay start anew.
        """
        tensors, blueprint, more = _load_whole(Path(path))
        options = overrides | {"env_kwargs": _kwargs_for(env, blueprint, overrides.get("env_kwargs"))}
        agent = cls(_named_env(env, blueprint, str(path)), config=blueprint.config, **options)
        agent._check_fits(blueprint, str(path))
        if agent.agent.net.sizes != network_sizes(blueprint.config, blueprint.num_actions, blueprint.reward_classes):
            raise ConfigError(f"{path}: the options that were given ({', '.join(overrides)}) make another network than was saved")
        try:
            agent.agent.load_state_dict(tensors)
        except (KeyError, RuntimeError, ValueError) as error:
            raise FileError(f"{path}: its tensors do not fit its own description ({type(error).__name__})") from error
        agent.blueprint = advance(agent.blueprint, blueprint.agent_steps, blueprint.updates)
        agent._reward_scale = float(more.get("reward_scale", 1.0))
        return agent

    def load_weights(self, path: str | Path) -> None:
        """The networks of another run, nothing else: optimiser, temperature, schedules and replay start anew."""
        tensors, blueprint, _ = _load_whole(Path(path))
        self._check_fits(blueprint, str(path))
        try:
            self.agent.load_weights(tensors)
        except RuntimeError as error:
            raise ConfigError(f"{path}: was trained with another network; give the same sizes and presets") from error

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()

    # ------------------------------------------------------------------------------------------------------------ private

    def _make_envs(self) -> OwnEnvs | VectorAdapter:
        cfg, seed = self.config, Seeds.of(self.config.run.seed).envs
        if self.vector is not None:
            return VectorAdapter(self.vector, seed, cfg.network.channels)
        assert self.source is not None
        return self.source.many(cfg.environment.num_envs, seed, cfg.network.channels)

    def _check_fits(self, blueprint: Blueprint, path: str) -> None:
        _refuse_misfit(path, blueprint, self.envs.spec, self.envs.num_actions, self.blueprint.reward_classes)

    def _given(self, obs: Any) -> tuple[bool, Arrays]:
        """Whether it is one observation, and the rows that were read."""
        leaf = next(iter(self.reader.leaves.values()))
        try:
            if np.ndim(follow(obs, leaf.path)) == len(leaf.space.shape or ()):
                return True, _one_row(self.reader.read(obs))
            if not _rows(obs):
                raise ConfigError("predict() was given an empty batch")
            return False, self.reader.read_batch(obs, _rows(obs))
        except (ValueError, TypeError) as error:
            raise EnvironmentFault(f"predict() was given what the observation space does not allow: {error}") from None

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            warnings.warn(text, stacklevel=3)
            self._warned.add(text)


class Player:
    """Plays one environment: `reset()` before each episode, then `act(obs, reward)` with the reward of the action before."""

    def __init__(self, actor: Actor, reader: ObservationReader, config: Config, first_action: int, epsilon: float, seed: int):
        within("epsilon", epsilon, 0, 1)
        within("seed", seed, 0)
        self.actor, self.reader, self.config = actor, reader, config
        self.first_action, self.epsilon, self.rng = first_action, epsilon, np.random.default_rng(seed)
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next observation opens an episode."""
        self.inputs = ActingInputs(1, self.config.environment.frame_stack, self.actor.device)
        self.state, self.prev_action, self.opens = self.actor.initial_state(1), np.zeros(1, np.int64), True

    def act(self, obs: Any, reward: float = 0.0) -> int:
        """The next action."""
        try:
            seen, number = self.reader.read(obs), check_reward(reward, "the reward is")
        except (ValueError, Broken) as error:
            raise EnvironmentFault(f"act() was given what no sound environment returns: {error}") from None
        return self._act(seen, number)

    def _act(self, obs: Arrays, reward: float) -> int:
        inputs = self.inputs(_one_row(obs), self.prev_action, np.array([reward], np.float32), np.array([self.opens]))
        self.prev_action, self.state = self.actor.act(inputs, self.state, self.epsilon, self.rng)
        self.opens = False
        return self.first_action + int(self.prev_action[0])

    def play(self, env: AnyEnv, seed: int | None = None) -> Iterator[tuple[float, Any]]:
        """One episode; yields what each step was paid, unclipped, and what the environment renders."""
        self.reset()
        reward, steps, over = 0.0, 0, False
        try:
            obs = read_obs(self.reader, reset_env(env, seed), "reset")
            while not over:
                action, steps = self._act(obs, reward), steps + 1
                raw, reward, terminated, truncated, paid = step_env(env, action)
                obs, over = read_obs(self.reader, raw, "step"), terminated or truncated
                yield reward if paid is None else paid, render_env(env)
        except Broken as broken:
            raise EnvironmentFault(f"episode seed {seed}, step {steps}: {broken}") from broken.__cause__


def load_player(
    path: str | Path,
    env: Any = None,
    epsilon: float = 0.0,
    seed: int = 0,
    device: str = "cpu",
    env_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Player, EnvSource]:
    """A player and its environment from an export, a checkpoint or a run folder."""
    tensors, blueprint = load_acting(Path(path))
    cfg = blueprint.config
    kwargs = _kwargs_for(env, blueprint, env_kwargs)
    source = env_source(_named_env(env, blueprint, str(path)), kwargs, cfg.environment.max_episode_agent_steps)
    one = source.make()
    reader = ObservationReader(one.observation_space, cfg.network.channels)
    _refuse_misfit(str(path), blueprint, reader.spec, num_actions(one.action_space), blueprint.reward_classes)
    first_action = int(one.action_space.start)  # type: ignore[attr-defined]
    close_env(one)
    network = Network(blueprint.spec, network_sizes(cfg, blueprint.num_actions, blueprint.reward_classes))
    missing, unexpected = network.load_state_dict(tensors, strict=False)
    if unexpected or any(name.startswith(ACTING_PARTS) for name in missing):
        raise FileError(f"{path}: its tensors do not fit its own description")
    actor = Actor(network.to(pick_device(device)).requires_grad_(False), cfg.acting.behaviour, cfg.objective.burn_in_steps)
    return Player(actor, reader, cfg, first_action, epsilon, seed), source


def _named_env(env: Any, blueprint: Blueprint, path: str) -> Any:
    if env is not None:
        return env
    if blueprint.env_id is None:
        name = blueprint.config.environment.env or "package.module:Class"
        raise ConfigError(
            f"{path}: its environment is not a plain Gymnasium id, so name it again: --env {name} (in Python: env=...)"
        )
    return blueprint.env_id


def _for_vector(cfg: Config, vector: VectorEnv[Any, Any, Any]) -> Config:
    """A VectorEnv is already made: its size is in force, and options that would make or evaluate environments are refused."""
    for name, off in (("max_episode_agent_steps", 0), ("env_kwargs", {}), ("stop_at_score", None)):
        if cfg.flat()[name] != off:
            raise ConfigError(
                f"{name}={cfg.flat()[name]}: not with a VectorEnv object, which is already made and can't be evaluated"
            )
    return cfg.override(num_envs=vector.num_envs)


def _kwargs_for(env: Any, blueprint: Blueprint, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Those given; else the checkpoint's, for the environment that they belong to. Another one may be another task without them."""
    if given is not None:
        return given
    if env is None or (isinstance(env, str) and env == (blueprint.env_id or blueprint.config.environment.env)):
        return blueprint.env_kwargs
    if blueprint.env_kwargs and not isinstance(env, gym.Env | VectorEnv):
        warnings.warn(
            f"the checkpoint's env_kwargs {dict(blueprint.env_kwargs)} are not used for the environment that was named; "
            "give its own as env_kwargs (--env-kwargs)",
            DaeWarning,
            stacklevel=3,
        )
    return {}


def _load_whole(path: Path) -> tuple[dict[str, Tensor], Blueprint, dict[str, Any]]:
    """A checkpoint, with all that learning needs."""
    if path.is_file():
        load_acting(path)  # says what is wrong with a file that is no export
        raise FileError(f"{path}: an export can only be played (load_player, dae play, dae eval); give the run it was made from")
    return load_checkpoint(latest_checkpoint(path))


def _refuse_misfit(path: str, blueprint: Blueprint, spec: ObsSpec, actions: int, reward_classes: tuple[float, ...]) -> None:
    """An agent on an environment that it was not trained for."""
    for what, there, here in (
        ("observations", dict(blueprint.spec), dict(spec)),
        ("number of actions", blueprint.num_actions, actions),
        ("reward classes", blueprint.reward_classes, reward_classes),
    ):
        if there != here:
            a, b = (in_words(x) if isinstance(x, dict) else x for x in (there, here))
            raise ConfigError(f"{path}: was trained with other {what} ({a}) than this environment has ({b})")


def _one_row(obs: Arrays) -> Arrays:
    return {name: array[None] for name, array in obs.items()}


def _each(name: str, value: Any, size: int) -> NDArray[np.float32]:
    """One number for each observation of a batch."""
    try:
        rows = np.broadcast_to(np.asarray(value, np.float32), (size,)).copy()
    except (TypeError, ValueError):
        raise ConfigError(f"predict(): {name} must be one value, or one for each of the {size} observations") from None
    if not np.isfinite(rows).all():
        raise ConfigError(f"predict(): {name} is not finite")
    return rows


def _rows(obs: Any) -> int:
    while isinstance(obs, Mapping | tuple):
        obs = next(iter(obs.values())) if isinstance(obs, Mapping) else obs[0]
    return len(obs)


def _free_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
