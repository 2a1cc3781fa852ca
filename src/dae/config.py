"""Every number of the paper's tables, once.

The defaults are the paper's (Table "Default hyperparameters", Table "ALE preprocessing parameters", Algorithm 1); where the
paper is silent the comment names the deviation in PAPER.md. Presets and experiment files list differences only.

Every option has a name of its own across all sections, so that `Config.override(backup_steps=1)`, `--backup-steps 1` and a line
`backup_steps = 1` in a TOML file all mean the same thing.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import yaml

from dae.errors import ConfigError, FileError, nearest

_UNITS = {"": 1, "k": 1_000, "M": 1_000_000}
LONGEST_NAME = 100


@dataclass(frozen=True)
class Schedule:
    """Linear between points (agent step, value), constant outside. The step `None`, written `end`, is the run's last step."""

    points: tuple[tuple[int | None, float], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """`"0:1, 1M:0.01"`, `"0:0, 100k:1.25e-4, end:1.25e-5"`, or one number for a constant."""
        points: list[tuple[int | None, float]] = []
        for part in str(text).split(","):
            match = re.fullmatch(r"\s*(?:(end|[\d.]+([kM]?)):)?\s*([-+\d.eE]+)\s*", part)
            if match is None:
                raise ConfigError(
                    f"schedule '{text}': '{part.strip()}' is not STEP:VALUE, for example '0:1, 10k:0.01' or 'end:0.1'"
                )
            step, unit, value = match.groups()
            try:
                agent_step = None if step == "end" else round(float((step or "0").rstrip("kM")) * _UNITS[unit or ""])
                points.append((agent_step, float(value)))
                if not math.isfinite(points[-1][1]):
                    raise ValueError
            except (ValueError, OverflowError):
                raise ConfigError(f"schedule '{text}': '{part.strip()}' holds no number") from None
        steps = [step for step, _ in points if step is not None]
        if steps != sorted(set(steps)) or any(step is None for step, _ in points[:-1]):
            raise ConfigError(f"schedule '{text}': the steps must rise, and 'end' comes last")
        return cls(tuple(points))

    def __str__(self) -> str:
        return ", ".join(f"{'end' if step is None else step}:{value!r}" for step, value in self.points)

    def __call__(self, agent_step: int, total_agent_steps: int) -> float:
        before: tuple[int, float] | None = None
        for step, value in self.points:
            at = total_agent_steps if step is None else step
            if agent_step < at:
                if before is None:
                    return value
                share = (agent_step - before[0]) / (at - before[0])
                return (1 - share) * before[1] + share * value
            before = (at, value)
        return self.points[-1][1]


def _schedule(text: str) -> Any:
    return field(default_factory=lambda: Schedule.parse(text))


@dataclass(frozen=True)
class EnvironmentConfig:
    """Where the agent acts."""

    env: str = ""
    """A Gymnasium id, or package.module:Class."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment: name=value ..."""
    num_envs: int = 16
    """Environments stepped side by side (the paper's parallel actors)."""
    frame_stack: int = 4
    """Observations given to the encoder at once; zeros before an episode's first."""
    rewards: Literal["auto", "classes", "general"] = "auto"
    """classes: the next reward is one of `reward_classes`; general: any number (PAPER.md D12); auto: classes where declared."""
    reward_classes: tuple[float, ...] = ()
    """The values that a reward can take, where the environment does not declare them itself."""
    max_episode_agent_steps: int = 0
    """Truncate episodes after so many steps; 0: the environment's own limit only."""


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes. Only `width` is scaled in the paper."""

    width: float = 4.0
    """m: multiplies the width of the encoder."""
    encoder: Literal["auto", "mlp", "cnn", "impala"] = "auto"
    """auto: by the shape of the observation."""
    channels: Literal["auto", "first", "last"] = "auto"
    """Where an image's channels are."""
    skipinit: bool = False
    """A learnable factor, 0 at first, on each residual branch of IMPALA."""
    embedding_dim: int = 512
    """d: image embedding, action and reward embeddings, features."""
    core: Literal["lstm", "mlp"] = "lstm"
    """mlp: the frame-stacking ablation, with as many parameters as the LSTM."""
    core_dim: int = 1024
    """Width of the LSTM."""
    core_blocks: int = 16
    """Blocks of its recurrent matrix."""
    value_hidden: int = 2048
    """Hidden width of the heads A, B and V."""
    prediction_hidden: int = 2048
    """Hidden width of the head that predicts the next embedding."""
    prior_hidden: int = 1024
    """Hidden width of the prior and the reward head."""
    normalise_predictions: bool = True
    """RMS-normalise predicted embeddings like their targets (PAPER.md D6)."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """Eq. 6-8 and the ablations of Section 4."""

    backup_steps: int = 16
    """n: backup length."""
    train_steps: int = 0
    """Trained slots of a window, a multiple of n, in blocks of n that bootstrap at their own end; 0: n."""
    burn_in_steps: int = 16
    """k: slots that only bring the recurrent state up to date."""
    discount: float = 0.99
    """Gamma."""
    num_outcomes: int = 16
    """|Z_O|: predictions of the next embedding."""
    beta_prior: float = 0.025
    """Weight of the prior loss."""
    beta_rec: float = 1.0
    """Weight of the reconstruction loss."""
    beta_kl: float = 20.0
    """Weight of the KL term in the temperature loss."""
    beta_reward: float = 1.0
    """Weight of the predicted reward in the distance to an outcome; rewards=general only."""
    eps_wta: Schedule = _schedule("0:1, 500k:0")
    """Softness of the winner-takes-all posterior."""
    luck_from_eps_wta: float = 0.75
    """Luck enters the objective once eps_wta is at or below this."""
    corrections: Literal["skill+luck", "skill", "none"] = "skill+luck"
    """skill: B = 0, the paper's 'no off-policy correction'; none: plain multi-step targets."""
    dae_starts: Literal["all", "first"] = "all"
    """Start steps of the DAE residual inside a window (PAPER.md D2)."""
    outcome_prior: Literal["factorised", "joint"] = "factorised"
    """p(z_o) p(r), the paper's, or p(z_o, r)."""
    luck_form: Literal["product", "additive"] = "product"
    """g(z_o, r), the paper's, or g(z_o) + g(r)."""
    variance_floor: float = 0.01
    """Least Var(G) in beta_V = 1 / Var(G)."""
    burn_in_grad: bool = False
    """Let gradients run through the burn-in."""
    stored_states: bool = True
    """Start windows from the recurrent state that the actor had; off: from zero."""


@dataclass(frozen=True)
class LearningConfig:
    """Optimiser and replay."""

    total_agent_steps: int = 5_000_000
    """Length of the run, summed over the environments (20M Atari frames)."""
    batch_size: int = 16
    """Windows per update."""
    replay_agent_steps: int = 1_000_000
    """Capacity of the replay buffer."""
    min_replay_agent_steps: int = 20_000
    """Steps before the first update."""
    agent_steps_per_update: int = 16
    """1 / replay ratio."""
    learning_rate: Schedule = _schedule("0:0, 100k:1.25e-4, end:1.25e-5")
    """Adam's, by agent step."""
    adam_beta1: float = 0.9
    """Adam's first decay."""
    adam_beta2: float = 0.95
    """Adam's second decay."""
    adam_eps: float = 1e-6
    """Adam's epsilon."""
    ema_decay: float = 0.995
    """Tau of the slow network."""
    temperature_lr_multiplier: float = 1.0
    """Learning rate of log T over that of the weights."""
    variance_every_agent_steps: int = 10_000
    """How often Var(G) is measured anew."""


@dataclass(frozen=True)
class ActingConfig:
    """How data are collected and scores measured."""

    epsilon: Schedule = _schedule("0:1, 1M:0.01")
    """Share of random actions in training."""
    behaviour: Literal["recurrent", "aligned"] = "recurrent"
    """aligned: the actor sees only the last burn_in_steps + 1 observations (confounding study)."""
    eval_epsilon: float = 0.001
    """Share of random actions in evaluation."""
    eval_weights: Literal["online", "ema"] = "online"
    """Whose actions are scored, played and exported: those of the weights that collect the data, or of their average (PAPER.md D33)."""
    eval_episodes: int = 50
    """The first episode of each of so many environments."""
    eval_every_agent_steps: int = 250_000
    """0: only at the end."""
    eval_beside: bool = False
    """Score a copy of the weights while training goes on, one step of each episode at a time; off: training waits."""
    stop_at_score: float | None = None
    """End the run after an evaluation whose mean score is at least this."""


@dataclass(frozen=True)
class RunConfig:
    """The run itself."""

    seed: int = 0
    """Everything random descends from it."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where tensors live."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of products in the network (PAPER.md D29); auto: bfloat16 where `fast` is in force, else float32."""
    fast: bool = True
    """On CUDA: graphs, kernels, products in 16 bits. Elsewhere there is nothing to choose."""
    threads: int = 0
    """CPU threads of PyTorch; 0: its own choice."""
    out: str = "runs"
    """Folder of all runs."""
    name: str = "default"
    """The run is written to OUT/NAME/ENV/seedSEED."""
    stop_after_agent_steps: int = 0
    """End the run here, with schedules that still reach to `total_agent_steps`; 0: at their end."""
    stop_after_minutes: float = 0.0
    """The same, after so much time; what evaluation is left comes on top. 0: never."""
    log_every_agent_steps: int = 10_000
    """Distance between lines of metrics.jsonl."""
    checkpoint_every_agent_steps: int = 250_000
    """0: only at the end."""
    resumable: bool = True
    """Keep in checkpoints all that the same command needs to go on with the run, the replay included."""
    tensorboard: bool = True
    """Also write TensorBoard files, where it is installed."""
    video: bool = True
    """Record a short video at the end, where the environment renders."""


@dataclass(frozen=True)
class Config:
    """One run, completely."""

    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    learning: LearningConfig = field(default_factory=LearningConfig)
    acting: ActingConfig = field(default_factory=ActingConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for name, rule, limit in _LIMITS:
            value = getattr(getattr(self, _SECTION_OF[name]), name)
            values = [v for _, v in value.points] if isinstance(value, Schedule) else [value]
            if not all(math.isfinite(v) and rule(v) for v in values):
                raise ConfigError(f"{name}={value}: must be {limit}")
        n, trained = self.objective.backup_steps, self.train_steps
        if trained % n:
            raise ConfigError(f"train_steps={trained}: must be a multiple of backup_steps={n}")
        if self.network.core_dim % self.network.core_blocks:
            raise ConfigError(f"core_blocks={self.network.core_blocks}: must divide core_dim={self.network.core_dim}")
        if self.learning.min_replay_agent_steps > self.learning.replay_agent_steps:
            raise ConfigError(
                f"min_replay_agent_steps={self.learning.min_replay_agent_steps}: must be at most "
                f"replay_agent_steps={self.learning.replay_agent_steps}"
            )
        if not re.fullmatch(r"[\w.+-]+", self.run.name) or self.run.name.startswith("."):
            raise ConfigError(f"name={self.run.name!r}: must be of letters, digits, '_', '-', '+' and '.', and not begin with '.'")
        if len(self.run.name) > LONGEST_NAME:
            raise ConfigError(f"name={self.run.name[:20]}...: must have at most {LONGEST_NAME} characters, for it names a folder")
        goal = self.acting.stop_at_score
        if goal is not None and not math.isfinite(goal):
            raise ConfigError(f"stop_at_score={goal}: must be a finite number")
        if self.acting.behaviour == "aligned" and self.objective.stored_states:
            raise ConfigError("behaviour=aligned needs stored_states=False: a stored state remembers what the actor has forgotten")
        classes = self.environment.reward_classes
        if len(set(classes)) != len(classes):
            raise ConfigError(f"reward_classes={classes}: the values must differ")
        if self.environment.rewards == "general" and classes:
            raise ConfigError("reward_classes go with rewards=classes, not with rewards=general")

    @property
    def train_steps(self) -> int:
        """Trained slots of a window."""
        return self.objective.train_steps or self.objective.backup_steps

    @property
    def window_steps(self) -> int:
        """T: transitions of a window, burn-in included."""
        return self.objective.burn_in_steps + self.train_steps

    @property
    def last_agent_step(self) -> int:
        """Where the run ends, if time does not end it before."""
        total = self.learning.total_agent_steps
        return min(total, self.run.stop_after_agent_steps or total)

    @property
    def luck_enters(self) -> bool:
        """Whether the run is long enough for luck to come into the objective (or is not meant to have any)."""
        eps, last = self.objective.eps_wta, self.last_agent_step
        steps = [step for step, _ in eps.points if step is not None and step <= last]
        least = min(eps(step, self.learning.total_agent_steps) for step in [*steps, last])
        return self.objective.corrections != "skill+luck" or least <= self.objective.luck_from_eps_wta

    def override(self, **options: Any) -> "Config":
        """A copy with the named options changed, whatever section they are in."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            section = _SECTION_OF.get(name)
            if section is None:
                raise ConfigError(f"no option '{name}'{nearest(name, _SECTION_OF)}")
            changes.setdefault(section, {})[name] = _coerce(name, value)
        return dataclasses.replace(self, **{s: dataclasses.replace(getattr(self, s), **c) for s, c in changes.items()})

    def flat(self) -> dict[str, Any]:
        """Every option by name, as plain JSON values."""
        return {name: _plain(getattr(getattr(self, section), name)) for name, section in _SECTION_OF.items()}

    def nested(self) -> dict[str, dict[str, Any]]:
        """The same by section, for config.yaml."""
        flat, sections = self.flat(), {f.name: {} for f in dataclasses.fields(self)}  # type: dict[str, Any], dict[str, dict[str, Any]]
        for name, section in _SECTION_OF.items():
            sections[section][name] = flat[name]
        return sections


_SECTIONS: dict[str, type] = {
    "environment": EnvironmentConfig,
    "network": NetworkConfig,
    "objective": ObjectiveConfig,
    "learning": LearningConfig,
    "acting": ActingConfig,
    "run": RunConfig,
}
_FIELDS = {f.name: f for kind in _SECTIONS.values() for f in dataclasses.fields(kind)}
_SECTION_OF = {f.name: section for section, kind in _SECTIONS.items() for f in dataclasses.fields(kind)}
OPTIONS = tuple(_SECTION_OF)


def read_options(path: Path) -> Config:
    """A config.yaml: options, by section or not."""
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: can't be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds no options")
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= value if name in _SECTIONS and isinstance(value, dict) else {str(name): value}
    return Config().override(**{str(name): value for name, value in flat.items()})


_positive, _not_negative, _share = (lambda x: x > 0), (lambda x: x >= 0), (lambda x: 0 <= x <= 1)
_LIMITS: list[tuple[str, Callable[[Any], bool], str]] = [
    *((name, lambda x: x >= 1, "at least 1") for name in (
        "num_envs", "frame_stack", "embedding_dim", "core_dim", "core_blocks", "value_hidden", "prediction_hidden",
        "prior_hidden", "backup_steps", "num_outcomes", "total_agent_steps", "batch_size", "replay_agent_steps",
        "agent_steps_per_update", "eval_episodes", "log_every_agent_steps", "variance_every_agent_steps",
    )),
    *((name, _not_negative, "0 or more") for name in (
        "burn_in_steps", "train_steps", "min_replay_agent_steps", "eval_every_agent_steps", "checkpoint_every_agent_steps",
        "seed", "max_episode_agent_steps", "stop_after_agent_steps", "stop_after_minutes",
        "beta_prior", "beta_rec", "beta_kl", "beta_reward",
        "temperature_lr_multiplier", "learning_rate",
    )),
    ("threads", lambda x: 0 <= x <= 1024, "between 0 and 1024"),
    *((name, _positive, "above 0") for name in ("width", "variance_floor", "adam_eps")),
    *((name, lambda x: 0 <= x < 1, "at least 0 and below 1") for name in ("discount", "ema_decay", "adam_beta1", "adam_beta2")),
    *((name, _share, "between 0 and 1") for name in ("eval_epsilon", "luck_from_eps_wta", "epsilon", "eps_wta")),
]  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Schedule):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _native(value: Any) -> Any:
    """Python's own number for one of NumPy's, and a list for an array."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _coerce(name: str, value: Any) -> Any:
    """The value as the option's type; strict, so that a wrong type is an error here and not a surprise later."""
    kind, value = _FIELDS[name].type, _native(value)
    if kind is Schedule:
        return value if isinstance(value, Schedule) else Schedule.parse(str(value))
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{name}={value}: must be a finite number")
        if value == int(value):
            return int(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, str):
        return value
    if kind == float | None and (value is None or (isinstance(value, int | float) and not isinstance(value, bool))):
        return None if value is None else float(value)
    choices = getattr(kind, "__args__", ())
    if name == "reward_classes" and isinstance(value, list | tuple):
        numbers = [_native(x) for x in value]
        if all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
            return tuple(float(x) for x in numbers)
        raise ConfigError(f"reward_classes={numbers}: must be finite numbers")
    if name == "env_kwargs" and isinstance(value, Mapping):
        return dict(value)
    if getattr(kind, "__origin__", None) is Literal:
        if value in choices:
            return value
        raise ConfigError(f"{name}={value}: must be one of {', '.join(choices)}{nearest(str(value), choices)}")
    raise ConfigError(f"{name}={value!r}: must be of type {getattr(kind, '__name__', kind)}")
