"""The run: collect, learn, evaluate. No maths, no files: what happened comes out as `Report`s."""

import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dae.agent import Actor, Agent, Signals
from dae.collect import Collector, Episode
from dae.config import Config
from dae.encoders import Impala, ObsSpec
from dae.envs.gymnasium import AnyEnv, EnvList, Envs, EnvSource
from dae.errors import ConfigError, Diverged, enough_memory
from dae.evaluate import Evaluation
from dae.graphs import Captured
from dae.network import Network, RecurrentCore, Sizes, make_sizes
from dae.replay import Replay

COPIES = 5
"""Of all weights, in a learner: two networks, the gradient, and Adam's two moments."""
CUDNN_PLANS = 0
"""How many of cuDNN's ways are tried for each convolution; 0: all of them."""


@dataclass(frozen=True)
class Report:
    """Something worth writing down."""

    kind: Literal["train", "eval", "stopped", "end"]
    """stopped: asked to, between two steps; what was not reported yet is kept, for the run may go on."""
    agent_steps: int
    updates: int
    episodes: list[Episode] = field(default_factory=list)
    """Finished since the last report of this kind."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Seeds:
    """All randomness of a run: independent streams of one seed."""

    network: np.random.SeedSequence
    envs: np.random.SeedSequence
    acting: np.random.SeedSequence
    replay: np.random.SeedSequence
    evaluation: np.random.SeedSequence

    @classmethod
    def of(cls, seed: int) -> "Seeds":
        return cls(*np.random.SeedSequence(seed).spawn(5))

    def evaluation_at(self, agent_steps: int, fresh: int = 0) -> np.random.SeedSequence:
        """A stream that depends on when, not on how often, the agent was evaluated before; other ones are `fresh`."""
        key = (agent_steps, fresh) if fresh else (agent_steps,)
        return np.random.SeedSequence(self.evaluation.entropy, spawn_key=(*self.evaluation.spawn_key, *key))


def pick_device(name: str) -> torch.device:
    """`auto`: CUDA where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[name]:
        raise ConfigError(f"device={name}: this machine has none; use device=auto or device=cpu")
    return torch.device(name)


def pick_precision(name: str, fast: bool) -> torch.dtype:
    """`auto`: 16 bits where `fast` is in force."""
    return torch.bfloat16 if name == "bfloat16" or (name == "auto" and fast) else torch.float32


def pick_reward_classes(cfg: Config, declared: tuple[float, ...]) -> tuple[float, ...]:
    """The classes in force; empty: general rewards."""
    mode, given = cfg.environment.rewards, cfg.environment.reward_classes
    if mode == "classes" and not (given or declared):
        raise ConfigError(
            "rewards=classes: the environment declares no reward classes; name them, for example --reward-classes -1 0 1"
        )
    return () if mode == "general" else given or declared


def physical_memory() -> float:
    """Bytes of this machine, used or not; no limit where the system does not tell."""
    known = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else math.inf


def network_sizes(cfg: Config, num_actions: int, reward_classes: tuple[float, ...]) -> Sizes:
    """Everything that fixes the network's shape, gathered from the sections it is spread over."""
    return make_sizes(
        cfg.network, num_actions, reward_classes,
        frame_stack=cfg.environment.frame_stack, num_outcomes=cfg.objective.num_outcomes,
        outcome_prior=cfg.objective.outcome_prior, luck_form=cfg.objective.luck_form,
    )  # fmt: skip


def build_agent(cfg: Config, spec: ObsSpec, num_actions: int, reward_classes: tuple[float, ...]) -> Agent:
    """Network, slow network and optimiser, from the run's seed."""
    sizes = f"width={cfg.network.width:g}, core_dim={cfg.network.core_dim}, num_outcomes={cfg.objective.num_outcomes}"
    with enough_memory(f"a network of {sizes} and the like"):
        return _build_agent(cfg, spec, network_sizes(cfg, num_actions, reward_classes))


def _build_agent(cfg: Config, spec: ObsSpec, sizes: Sizes) -> Agent:
    with torch.random.fork_rng(devices=[]):
        with torch.device("meta"):  # counted before it is made: Linux promises memory that it does not have, and kills who uses it
            weights = sum(weight.numel() for weight in Network(spec, sizes).parameters())
        if COPIES * 4 * weights > physical_memory():
            raise MemoryError(f"{weights:,} weights, of which a learner needs {COPIES} copies")
        torch.manual_seed(int(Seeds.of(cfg.run.seed).network.generate_state(1)[0]))
        network = Network(spec, sizes)
    device = pick_device(cfg.run.device)
    fast = cfg.run.fast and device.type == "cuda"
    if fast:
        prepare(network)
    precision = pick_precision(cfg.run.precision, fast)
    return Agent(network.to(device), cfg.objective, cfg.learning, cfg.acting, precision, fast)


def prepare(network: Network) -> None:
    """For `fast`: kernels in the place of plain loops; channels beside each other; cuDNN tries out what is fastest for each shape."""
    if isinstance(network.core, RecurrentCore):
        network.core.lstm.implementation = "auto"
    for part in network.encoder.parts:
        if isinstance(part, Impala):
            part.stem = "auto"
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # before there are a copy and an optimiser
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, CUDNN_PLANS


class Trainer:
    """One run. Iterate over `run()`; between two reports everything here may be read."""

    def __init__(self, cfg: Config, envs: Envs, agent: Agent, eval_source: EnvSource | Callable[[], AnyEnv] | None):
        self.cfg, self.envs, self.agent, self.eval_source = cfg, envs, agent, eval_source
        seeds = self.seeds = Seeds.of(cfg.run.seed)
        self.replay = Replay(
            envs.spec,
            envs.num_envs,
            cfg.learning.replay_agent_steps,
            agent.net.state_dim,
            cfg.environment.frame_stack,
            agent.device,
            fast=cfg.run.fast and agent.device.type == "cuda",
        )
        self.replay_rng = np.random.default_rng(seeds.replay)
        self.collector = Collector(envs, agent, self.replay, np.random.default_rng(seeds.acting), agent.net.sizes.reward_classes)
        self.updates = 0
        zero = torch.zeros((), device=agent.device)
        self.signals = Signals(zero.clone(), zero.clone(), zero.clone(), zero + 1)
        self.stop = False
        """Set it, from a callback or a signal handler, to end the run between two steps; an evaluation is dropped."""
        self.before_evaluation: Callable[[], None] = lambda: None
        """Called when an evaluation begins."""
        self.ended = False
        """No more is to be learned: only the last evaluation may be left."""
        self.due = False
        """An evaluation of the agent as it is now is owed."""
        self.running: Scoring | None = None
        """The evaluation that goes on beside training (`eval_beside`)."""
        self.eval_seconds = 0.0
        """That training has waited for evaluations so far."""
        self._snapshot: Actor | None = None
        self._variance_due = 0
        self._update = Captured(self._learn_from, agent.device, cfg.run.fast)
        self.ahead = self.recorded
        """A device that works by itself is sent the updates before its choice of actions is waited for: it is never idle."""
        self._episodes: list[Episode] = []
        self._sums: list[Tensor] = []
        self._names: list[str] = []
        self._summed = 0

    @property
    def recorded(self) -> bool:
        """Whether updates are graphs of CUDA."""
        return self._update.records

    @property
    def agent_steps(self) -> int:
        """Real transitions collected so far, over all environments."""
        return self.collector.agent_steps

    def run(self) -> Iterator[Report]:
        """Train to the end. Each boundary of a report interval that was passed gives one report."""
        run, acting, began = self.cfg.run, self.cfg.acting, time.monotonic()
        over = False
        while not over:
            if not self.due:  # else the run goes on from a checkpoint that was made before an evaluation
                before = self.agent_steps
                self._episodes += self.step()
                late = run.stop_after_minutes > 0 and time.monotonic() - began >= 60 * run.stop_after_minutes
                self.ended = late or self.agent_steps >= self.cfg.last_agent_step
                self.due = self.ended or passed(before, self.agent_steps, acting.eval_every_agent_steps)
                if self.ended:  # not where it was stopped: it may go on, and would make these updates one step later
                    self.catch_up()
                if self.ended or passed(before, self.agent_steps, run.log_every_agent_steps):
                    report = self.report()
                    yield report
                    refuse_divergence(report)
                if self.stop and not self.ended:
                    yield Report("stopped", self.agent_steps, self.updates)
            over = self.ended or self.stop
            for scored in self.evaluations(self.due, wait=over or not acting.eval_beside):
                yield scored
                if not over and self.reached(scored):
                    over = True
                    yield self.report()
            self.due = self.due and self.stop  # an evaluation that a stop has dropped is still owed
        if self.running is not None:
            self.running.close()
        yield Report("end", self.agent_steps, self.updates)

    def step(self) -> list[Episode]:
        """One step of every environment, and the updates that fall due. Returns the episodes that ended."""
        epsilon = self.cfg.acting.epsilon(self.agent_steps, self.cfg.learning.total_agent_steps)
        # l.8-9: the environments are set going, and while they step, the learner learns from what was there before (PAPER.md D32).
        if self.ahead:
            self.collector.act(epsilon, self.catch_up)
        else:
            self.collector.act(epsilon)
            self.catch_up()
        return self.collector.observe()  # l.10-12

    def snapshot(self) -> Actor:
        """The player with its weights as they are now, to be scored while they change: one copy, which the next call writes over."""
        player = self.agent.player
        if self._snapshot is None:
            net = copy.deepcopy(player.net).requires_grad_(False)
            self._snapshot = Actor(net, player.behaviour, player.memory_steps, player.precision, self.cfg.run.fast)
        with torch.no_grad():
            torch._foreach_copy_(list(self._snapshot.net.parameters()), list(player.net.parameters()))
        return self._snapshot

    def report(self) -> Report:
        """What happened since the last one."""
        episodes, self._episodes = self._episodes, []
        return Report("train", self.agent_steps, self.updates, episodes, self.metrics())

    def reached(self, report: Report) -> bool:
        """Whether an evaluation was as good as was asked for."""
        goal, scores = self.cfg.acting.stop_at_score, [e.score for e in report.episodes]
        return goal is not None and bool(scores) and float(np.mean(scores)) >= goal

    def catch_up(self) -> None:
        """All updates that are owed for the agent steps collected so far.                                 # l.13"""
        for _ in range(self.updates_owed()):
            self.learn()

    def updates_owed(self) -> int:
        """The replay ratio: one update for every so many agent steps since learning began."""
        learning = self.cfg.learning
        begun = self.agent_steps - learning.min_replay_agent_steps
        if begun < 0 or not self.replay.num_starts(self.cfg.window_steps).any():
            return 0
        return max(0, begun // learning.agent_steps_per_update - self.updates)

    def learn(self) -> None:
        """One update."""
        self.set_signals()
        drawn = self.replay.draw(self.replay_rng, self.cfg.learning.batch_size, self.cfg.window_steps)  # l.15
        numbers = self._update(*drawn)
        if not self._sums:
            self._sums = [torch.zeros_like(number) for number in numbers]
        torch._foreach_add_(self._sums, list(numbers))
        self.updates += 1
        self._summed += 1

    def _learn_from(self, starts: Tensor, envs: Tensor) -> tuple[Tensor, ...]:
        """One update, from where its windows lie to its metrics: tensors in, tensors out, so that CUDA can record it whole."""
        metrics = self.agent.update(self.replay.window(starts, envs, self.cfg.window_steps), self.signals)
        self._names = list(metrics)
        return tuple(metrics.values())

    def set_signals(self) -> None:
        """Schedules by agent step; Var(G) and the rewards' scale every so often."""
        cfg, s = self.cfg, self.signals
        total, now = cfg.learning.total_agent_steps, self.agent_steps
        s.eps_wta.fill_(cfg.objective.eps_wta(now, total))  # l.14
        s.learning_rate.fill_(cfg.learning.learning_rate(now, total))
        if now >= self._variance_due:
            s.return_variance.fill_(self.replay.return_variance(cfg.objective.discount))
            s.reward_scale.fill_(self.replay.reward_scale())
            self._variance_due = now + cfg.learning.variance_every_agent_steps

    def metrics(self) -> dict[str, float]:
        """Means over the updates since the last call; the one place where numbers leave the device."""
        totals = torch.stack(self._sums).tolist() if self._summed else []  # one copy from the device
        numbers = {name: total / self._summed for name, total in zip(self._names, totals, strict=False)}
        self._sums = []
        k, stored = self.cfg.objective.burn_in_steps, self.cfg.objective.stored_states
        if self._summed and k and stored and self.agent.net.state_dim:
            numbers["dae/state_drift"] = self.state_drift()
        self._summed = 0
        return numbers | {"rollout/epsilon": self.cfg.acting.epsilon(self.agent_steps, self.cfg.learning.total_agent_steps)}

    @torch.no_grad()
    def state_drift(self) -> float:
        """How far states recomputed through the burn-in are from those stored behind it, relative to their size."""
        k, batch, agent = self.cfg.objective.burn_in_steps, self.cfg.learning.batch_size, self.agent
        spread = np.linspace(0, self.replay.num_starts(k).sum() - 1, batch).astype(np.int64)  # logging must not move the sampler
        starts, envs = self.replay.place(spread, k)
        window = self.replay.window(starts, envs, k)
        after = self.replay.window(starts + k, envs, 0)
        same = ~after.inputs.reset[0]  # what lies behind an episode's end is forgotten anyway
        with agent.autocast() if agent.device.type == "cuda" else nullcontext():  # with what an update has set up and compiled
            core = agent.net.trunk(window.inputs[:k], window.core_in).core
        recomputed, stored = core[same], after.core_in[same]
        return float((recomputed - stored).norm() / stored.norm().clamp_min(1e-6))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the run carries at a report, beside the agent and the replay: tensors, and what JSON can hold."""
        tensors = {f"collector.{name}": tensor for name, tensor in self.collector.tensors().items()}
        tensors |= {f"signals.{name}": tensor.cpu().clone() for name, tensor in vars(self.signals).items()}
        numbers = {
            "agent_steps": self.agent_steps, "updates": self.updates, "due": self.due, "variance_due": self._variance_due,
            "names": self._names, "summed": self._summed, "episodes": [astuple(episode) for episode in self._episodes],
            "eval_seconds": self.eval_seconds, "acting": self.collector.rng.bit_generator.state,
            "sampling": self.replay_rng.bit_generator.state,
            "journal": self.envs.journal() if isinstance(self.envs, EnvList) else None,
        }  # fmt: skip
        tensors |= {"sums": torch.stack(self._sums).cpu()} if self._sums else {}
        if self.running is not None and self._snapshot is not None:  # it will begin again
            numbers["running"] = {"agent_steps": self.running.agent_steps, "updates": self.running.updates}
            tensors |= {f"snapshot.{name}": p.cpu().clone() for name, p in self._snapshot.net.state_dict().items()}
        return tensors, numbers

    def go_on(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> bool:
        """From where `state` was taken; agent and replay are there already. Whether it is as if the run had never stopped."""
        self.collector.load(_named(tensors, "collector."))
        for name, tensor in _named(tensors, "signals.").items():
            getattr(self.signals, name).copy_(tensor)
        self.collector.agent_steps, self.updates, self.due = numbers["agent_steps"], numbers["updates"], numbers["due"]
        self._variance_due, self.eval_seconds = numbers["variance_due"], numbers["eval_seconds"]
        self.collector.rng.bit_generator.state = numbers["acting"]
        self.replay_rng.bit_generator.state = numbers["sampling"]
        self._names, self._summed = numbers["names"], numbers["summed"]
        self._episodes = [Episode(*episode) for episode in numbers["episodes"]]
        self._sums = list(tensors["sums"].to(self.agent.device).clone().unbind()) if "sums" in tensors else []
        self.ended = self.agent_steps >= self.cfg.last_agent_step
        if "running" in numbers:
            player = self.snapshot()
            player.net.load_state_dict(_named(tensors, "snapshot."))
            self.running = Scoring(self, player, **numbers["running"])
        return self._back_to(numbers["journal"])

    def _back_to(self, journal: Mapping[str, Any] | None) -> bool:
        """The environments to where they were; where they can't be brought there, new episodes."""
        if journal is not None and isinstance(self.envs, EnvList):
            there = self.envs.replay(journal)
            if all(np.array_equal(there[name], array) for name, array in self.collector.obs.items()):
                return self.agent.device.type == "cpu"
        self.collector.begin_anew()
        return False

    def evaluations(self, due: bool, wait: bool) -> list[Report]:
        """Those that have ended. One that is due begins, once the one before it is over; `wait` for it, or go on beside it."""
        began, reports = time.perf_counter(), []
        if self.running is not None and (self.running.finish() if due else not self.running.advance()):
            reports.append(self.running.report())
            self.running = None
        if due and not self.stop:
            self.before_evaluation()
            player = self.agent.player if wait else self.snapshot()
            self.running = Scoring(self, player, self.agent_steps, self.updates)
            if wait and self.running.finish():
                reports.append(self.running.report())
                self.running = None
        if self.stop and self.running is not None:
            self.running.close()
            self.running = None
        self.eval_seconds += time.perf_counter() - began
        return reports


class Scoring:
    """An evaluation of the agent as it was after so many steps, in the middle of a run."""

    def __init__(self, run: Trainer, player: Actor, agent_steps: int, updates: int):
        self.run, acting, self.agent_steps, self.updates = run, run.cfg.acting, agent_steps, updates
        self.evaluation: Evaluation | None = None
        if run.eval_source is not None:
            self.evaluation = Evaluation(
                player, run.eval_source, acting.eval_episodes, acting.eval_epsilon,
                run.seeds.evaluation_at(agent_steps), run.cfg.network.channels,
            )  # fmt: skip

    def advance(self) -> bool:
        """One step of every episode; False once all have ended."""
        return self.evaluation is not None and self.evaluation.advance()

    def finish(self) -> bool:
        """All that is left of it. True, then: it has ended; False where the run was stopped first."""
        while self.advance():
            if self.run.stop:
                return False
        return True

    def report(self) -> Report:
        """What came out."""
        episodes = [] if self.evaluation is None else self.evaluation.episodes()
        self.close()
        return Report("eval", self.agent_steps, self.updates, episodes)

    def close(self) -> None:
        """Close the environments."""
        if self.evaluation is not None:
            self.evaluation.close()


def refuse_divergence(report: Report) -> None:
    """Losses that are not finite stay so: the weights have gone with them."""
    for name, value in report.metrics.items():
        if "loss_" in name and not math.isfinite(value):
            raise Diverged(
                f"learning has diverged: {name} is {value} after {report.agent_steps:,} agent steps; lower learning_rate, or look "
                "for huge rewards or observations"
            )


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def passed(before: int, now: int, every: int) -> bool:
    """Whether a multiple of `every` lies behind `before` and not behind `now`; never where `every` is 0."""
    return every > 0 and before // every != now // every
