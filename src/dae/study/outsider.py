"""Other people's agents under our protocol: the same environments, the same evaluation, one thread.

RecurrentPPO of sb3-contrib sees what our agent's encoder sees of one observation (pictures channel-first), stepped by SB3's own
DummyVecEnv. Scores come from `dae.evaluate`, with the actor replaced. Whether it plays its most likely action or samples is the
setting `deterministic`: RL Baselines3 Zoo samples on Atari and is deterministic elsewhere, and the experiment files follow it,
since either way taken everywhere would cost it points somewhere.
"""

import dataclasses
import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from dae.collect import Episode
from dae.errors import ConfigError, EnvironmentFault, MissingExtra, nearest

if TYPE_CHECKING:
    from dae.study.spec import Cell
    from dae.train import Report

Make = Callable[[], gym.Env[Any, Any]]
Emit = Callable[["Report"], None]


@dataclass(frozen=True)
class Settings:
    """RecurrentPPO's; the defaults are sb3-contrib's where it has one. `linear`: falls to 0 over the run (RL Zoo's `lin_`)."""

    num_envs: int = 8
    n_steps: int = 128
    batch_size: int = 128
    n_epochs: int = 10
    gamma: float = 0.99
    gae_lambda: float = 0.95
    learning_rate: float = 3e-4
    clip_range: float = 0.2
    linear: bool = False
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    lstm_hidden_size: int = 256
    hidden: int = 64
    """Width of the layers behind the LSTM (SB3: 64 and 64)."""
    embedding: int = 128
    """Of pictures: two 3x3 convolutions, as our agent has them, and one linear layer."""
    deterministic: bool = True
    """How it plays in evaluation."""

    def override(self, **options: Any) -> Self:
        """A copy with the named settings changed."""
        kinds = {f.name: type(f.default) for f in dataclasses.fields(self)}
        for name, value in options.items():
            if name not in kinds:
                raise ConfigError(f"no outsider's setting '{name}'{nearest(name, kinds)}; there are {', '.join(kinds)}")
            fits = isinstance(value, kinds[name]) or (kinds[name] is float and isinstance(value, int))
            if not fits or (isinstance(value, bool) and kinds[name] is not bool):
                raise ConfigError(f"{name}={value!r}: must be of type {kinds[name].__name__}")
        return dataclasses.replace(self, **options)

    def flat(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)


class AsArray(gym.ObservationWrapper[NDArray[np.float32], Any, Any]):
    """One float array in place of whatever the environment observes; pictures channel-first."""

    def __init__(self, env: gym.Env[Any, Any]):
        from dae.envs.spaces import ObservationReader

        super().__init__(env)
        self.reader = ObservationReader(env.observation_space)
        if len(self.reader.spec) != 1:
            raise EnvironmentFault("an outsider's environment must observe one array")
        (self.part,) = self.reader.spec.values()
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, self.part.shape, np.float32)

    def observation(self, observation: Any) -> NDArray[np.float32]:
        (array,) = self.reader.read(observation).values()
        return array.astype(np.float32) * np.float32(self.part.scale)


class RecurrentPPO:
    """sb3-contrib's agent, behind what a cell needs: `run` and `evaluate`."""

    settings = Settings

    def __init__(self, cell: "Cell", make: Make):
        if importlib.util.find_spec("sb3_contrib") is None:
            raise MissingExtra("RecurrentPPO", "outsider")
        assert cell.settings is not None
        self.cell, self.make, self.s = cell, make, cell.settings
        self.agent_steps = 0
        sb3 = importlib.import_module("stable_baselines3.common.vec_env")
        monitor = importlib.import_module("stable_baselines3.common.monitor").Monitor
        self.vec = sb3.DummyVecEnv([lambda: monitor(AsArray(make()))] * self.s.num_envs)
        self.image = len(self.vec.observation_space.shape) == 3
        self.model = self._model()

    def _model(self) -> Any:
        from dae.train import Seeds

        s, linear = self.s, self.s.linear
        # SB3 gives environment i this number + i: seeds 0 and 1 as they are would share all environments but one.
        seed = int(Seeds.of(self.cell.seed).envs.generate_state(1)[0]) >> 1
        behind = {"pi": [s.hidden] * 2, "vf": [s.hidden] * 2}
        keywords: dict[str, Any] = {"lstm_hidden_size": s.lstm_hidden_size, "net_arch": behind}
        if self.image:
            keywords |= {
                "features_extractor_class": small_cnn(), "features_extractor_kwargs": {"features_dim": s.embedding},
                "normalize_images": False,
            }  # fmt: skip
        return importlib.import_module("sb3_contrib").RecurrentPPO(
            "MlpLstmPolicy", self.vec, n_steps=s.n_steps, batch_size=s.batch_size, n_epochs=s.n_epochs, gamma=s.gamma,
            gae_lambda=s.gae_lambda, ent_coef=s.ent_coef, vf_coef=s.vf_coef, policy_kwargs=keywords, seed=seed,
            device="cpu",
            learning_rate=(lambda left: left * s.learning_rate) if linear else s.learning_rate,
            clip_range=(lambda left: left * s.clip_range) if linear else s.clip_range,
        )  # fmt: skip

    def run(self, emit: Emit) -> None:
        """Train; every boundary that was passed gives a report, after the update that followed it."""
        self.model.learn(self.cell.total_agent_steps, callback=_callback(self, emit))

    def evaluate(self, make: Make, episodes: int, seed: np.random.SeedSequence, greedy: bool) -> list[Episode]:
        """As our agents are evaluated, by the same code."""
        from dae.evaluate import evaluate

        actor: Any = _Actor(self.model, greedy or self.s.deterministic)
        return evaluate(actor, lambda: AsArray(make()), episodes, 0.0, seed, "first")


class _Actor:
    """What `dae.evaluate` needs of an agent."""

    device = torch.device("cpu")
    net = SimpleNamespace(sizes=SimpleNamespace(frame_stack=1))

    def __init__(self, model: Any, deterministic: bool):
        self.model, self.deterministic = model, deterministic

    def initial_state(self, num_envs: int) -> None:
        """SB3 begins with zeros by itself."""

    def act(self, inputs: Any, state: Any, epsilon: float, rng: np.random.Generator) -> tuple[NDArray[np.int64], Any]:
        obs, start = inputs.obs["obs"][0, :, -1].numpy(), inputs.reset[0].numpy()
        action, state = self.model.predict(obs, state, start, self.deterministic)
        return action.astype(np.int64), state


def small_cnn() -> type:
    """Our encoder of small pictures as SB3 wants it; a class made late, since its base needs the extra."""
    base: Any = importlib.import_module("stable_baselines3.common.torch_layers").BaseFeaturesExtractor

    class SmallPictures(base):  # type: ignore[misc]
        def __init__(self, observation_space: Any, features_dim: int):
            from dae.encoders import SmallCNN

            super().__init__(observation_space, features_dim)
            channels, height, width = observation_space.shape
            self.cnn = SmallCNN(channels, height, width, 1, features_dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.cnn(x[:, None]))  # [N, stack of 1, C, H, W]

    return SmallPictures


def _callback(learner: RecurrentPPO, emit: Emit) -> Any:
    """SB3 calls back between updates and acting: the place where our agents are evaluated too."""
    from dae.train import Report, Seeds

    base: Any = importlib.import_module("stable_baselines3.common.callbacks").BaseCallback
    cfg = learner.cell.config
    total, eval_every, log_every = cfg.learning.total_agent_steps, cfg.acting.eval_every_agent_steps, cfg.run.log_every_agent_steps

    class Reports(base):  # type: ignore[misc]
        before, finished, began = 0, 0, time.time()

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            self._report(last=False)

        def _on_training_end(self) -> None:
            self._report(last=True)

        def _report(self, last: bool) -> None:
            now = learner.agent_steps = int(self.num_timesteps)
            if now // log_every != self.before // log_every or last:
                emit(Report("train", now, int(self.model._n_updates), self._episodes(now), {}))
            if last or (now // eval_every != self.before // eval_every and now < total):
                seed = Seeds.of(cfg.run.seed).evaluation_at(now)
                episodes = learner.evaluate(learner.make, cfg.acting.eval_episodes, seed, False)
                emit(Report("eval", now, int(self.model._n_updates), episodes))
            self.before = now

        def _episodes(self, now: int) -> list[Episode]:
            """SB3 keeps the last hundred."""
            return [Episode(0, float(e["r"]), int(e["l"]), False, now) for e in self.model.ep_info_buffer or ()]

    return Reports()


OUTSIDERS: dict[str, type[RecurrentPPO]] = {"RecurrentPPO": RecurrentPPO}
