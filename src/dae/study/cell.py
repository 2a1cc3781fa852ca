"""One run of a study: train, evaluate, and leave small files behind.

    eval.csv      one row for each evaluation episode
    train.csv     thinned training metrics
    choices.csv   Jackpot only: the greedy policy's choices at odd steps, after a coin won and after one lost
    cell.json     settings, hours, machine

`cell.json` is written last: a folder without it holds no finished run.
"""

import csv
import json
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch

from dae.api import DAE
from dae.collect import Episode
from dae.envs import minatar
from dae.envs.gymnasium import env_source
from dae.envs.pomdps import Jackpot
from dae.evaluate import evaluate
from dae.run.record import provenance
from dae.study.outsider import OUTSIDERS, Emit
from dae.study.spec import Cell
from dae.train import Report, Seeds

Make = Callable[[], gym.Env[Any, Any]]

EVAL = ("experiment", "agent", "env", "seed", "agent_steps", "frames", "episode", "score", "length")
CHOICES = ("experiment", "agent", "env", "seed", "agent_steps", "after", "decisions", "wrong")
METRICS = {
    "adv_size": "dae/adv_size", "luck_size": "dae/luck_size", "luck_mean": "dae/luck_mean", "value_mean": "train/value_mean",
    "squared_residual": "train/dae_squared_residual", "prior_entropy": "dae/prior_entropy", "live_outcomes": "dae/live_outcomes",
    "policy_entropy": "dae/policy_entropy", "temperature": "dae/temperature", "kl": "dae/kl", "state_drift": "dae/state_drift",
}  # fmt: skip
TRAIN = ("agent", "seed", "agent_steps", "seconds", "score", *METRICS)
CHOICE_EPISODES = 500


class Learner(Protocol):
    """What a cell needs of an agent, ours or not."""

    agent_steps: int

    def run(self, emit: Emit) -> None: ...
    def evaluate(self, make: Make, episodes: int, seed: np.random.SeedSequence, greedy: bool) -> list[Episode]: ...


class Ours:
    """Our agent."""

    def __init__(self, cell: Cell, make: Make):
        self.dae, self.agent_steps = DAE(config=cell.config), 0

    def run(self, emit: Emit) -> None:
        for report in self.dae.reports():
            self.agent_steps = report.agent_steps
            emit(report)

    def evaluate(self, make: Make, episodes: int, seed: np.random.SeedSequence, greedy: bool) -> list[Episode]:
        cfg = self.dae.config
        return evaluate(
            self.dae.agent.player, make, episodes, 0.0 if greedy else cfg.acting.eval_epsilon, seed, cfg.network.channels
        )


class Diary(gym.Wrapper[Any, Any, Any, Any]):
    """Counts Jackpot's choices at odd steps: (after the coin was won or lost) -> [decisions, wrong ones]."""

    def __init__(self, env: gym.Env[Any, Any], counts: Mapping[str, list[int]]):
        super().__init__(env)
        self.counts, self.taken, self.coin = counts, 0, 0.0

    def reset(self, **options: Any) -> Any:
        self.taken = 0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        if self.taken % 2 == 1:
            count = self.counts["won" if self.coin > 0 else "lost"]
            count[0] += 1
            count[1] += int(action == 1)
        result = super().step(action)
        self.taken, self.coin = self.taken + 1, float(result[1])
        return result


def run_cell(study: str, cell: Cell, folder: Path) -> None:
    """Everything of one run, in this process and on one thread."""
    torch.set_num_threads(1)
    began, scores, metrics = time.time(), [], []  # type: float, list[dict[str, Any]], list[dict[str, Any]]
    where = {"experiment": study, "agent": cell.agent, "env": cell.env, "seed": cell.seed}
    environment = cell.config.environment
    if cell.env.startswith("MinAtar/"):
        minatar.register()
    source = env_source(environment.env, environment.env_kwargs, environment.max_episode_agent_steps)
    make = source.make
    learner: Learner = OUTSIDERS[cell.outsider](cell, make) if cell.outsider else Ours(cell, make)

    def take(report: Report) -> None:
        if report.kind == "eval":
            scores.extend(_eval_rows(report, where, source.frames_per_agent_step))
            mean = np.mean([e.score for e in report.episodes])
            print(f"{report.agent_steps} agent steps, {time.time() - began:.0f} s: {mean:.4g}", flush=True)
            write_csv(folder / "eval.csv", EVAL, scores)  # as they come: of a run that is cut off, what was seen is there
            write_csv(folder / "train.csv", TRAIN, metrics)
        elif report.kind == "train":
            metrics.append(_train_row(report, where, time.time() - began))

    folder.mkdir(parents=True, exist_ok=True)
    learner.run(take)
    seconds = time.time() - began
    write_csv(folder / "train.csv", TRAIN, metrics)
    if is_jackpot(make):
        write_csv(folder / "choices.csv", CHOICES, jackpot_choices(learner, make, cell, where))
    used = resource.getrusage(resource.RUSAGE_SELF)
    about = {
        **where, "fingerprint": cell.fingerprint, "agent_steps": learner.agent_steps, "hours": round(seconds / 3600, 5),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1), "hardware": hardware(), **provenance(),
        "config": cell.config.flat(), "settings": cell.settings.flat() if cell.settings else None,
    }  # fmt: skip
    write_whole(folder / "cell.json", json.dumps(about, indent=1) + "\n")


def is_jackpot(make: Make) -> bool:
    """Whether there is luck to be counted."""
    env = make()
    env.close()
    return isinstance(env.unwrapped, Jackpot)


def jackpot_choices(learner: Learner, make: Make, cell: Cell, where: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How often the greedy policy errs where it should not care: luck that got into the advantages shows as a difference."""
    counts = {"won": [0, 0], "lost": [0, 0]}
    seed = Seeds.of(cell.seed).evaluation_at(learner.agent_steps + 1)  # other episodes than those of the last evaluation
    learner.evaluate(lambda: Diary(make(), counts), CHOICE_EPISODES, seed, True)
    steps = {"agent_steps": learner.agent_steps}
    return [{**where, **steps, "after": after, "decisions": n, "wrong": wrong} for after, (n, wrong) in counts.items()]


def hardware() -> dict[str, Any]:
    """Of this machine: wall-clock means nothing without it."""
    return {"cpu": cpu_model(), "cores": os.cpu_count()}


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """By its makers' name, where the system tells it."""
    try:
        names = [line.split(":", 1)[1].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "unknown"


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows({k: _short(v) for k, v in row.items()} for row in rows)
    partial.replace(path)


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def _eval_rows(report: Report, where: Mapping[str, Any], frames_per_agent_step: int) -> list[dict[str, Any]]:
    steps = {"agent_steps": report.agent_steps, "frames": report.agent_steps * frames_per_agent_step}
    return [{**where, **steps, "episode": e.env, "score": e.score, "length": e.length_agent_steps} for e in report.episodes]


def _train_row(report: Report, where: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    row = {**where, "agent_steps": report.agent_steps, "seconds": round(seconds, 1)}
    if report.episodes:
        row["score"] = float(np.mean([e.score for e in report.episodes]))
    return row | {short: report.metrics[name] for short, name in METRICS.items() if name in report.metrics}


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
