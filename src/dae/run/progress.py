"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections import deque

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dae.config import ObjectiveConfig
from dae.diagnostics import findings
from dae.train import Report

_SPARKS = "▁▂▃▄▅▆▇█"


class Progress:
    """Feed it every report; `speed` is what the log writes too."""

    def __init__(
        self, title: str, total_agent_steps: int, objective: ObjectiveConfig, quiet: bool = False,
        agent_steps: int = 0, updates: int = 0, seconds: float = 0.0, eval_seconds: float = 0.0,
    ):  # fmt: skip
        self.title, self.total, self.objective, self.quiet = title, total_agent_steps, objective, quiet
        self.console = Console(stderr=True)
        self.started = time.time() - seconds
        self._last_spent, self._last_steps = seconds - eval_seconds, agent_steps  # where it went on, if it was cut off before
        self.speed = 0.0
        self.scores: deque[float] = deque(maxlen=50)
        self.evals: list[tuple[int, float]] = []
        self.metrics: dict[str, float] = {}
        self.steps, self.updates = agent_steps, updates
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal and not quiet else None

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
            self._live.update(self.panel(), refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()

    def show(self, report: Report, eval_seconds: float = 0.0) -> dict[str, float]:
        """Take in a report, draw, and return the numbers on time and score for the record.

        `eval_seconds`, that training waited for evaluations so far, do not count in its speed.
        """
        now = time.time()
        if report.kind != "eval":  # which may be of a while ago
            self.steps, self.updates = report.agent_steps, report.updates
        if report.kind == "train":
            spent = now - self.started - eval_seconds
            self.speed = (report.agent_steps - self._last_steps) / max(1e-9, spent - self._last_spent)
            self._last_spent, self._last_steps = spent, report.agent_steps
            self.scores.extend(e.score for e in report.episodes)
            if "dae/adv_size" in report.metrics or not self.metrics:  # a last stretch without an update says nothing new
                self.metrics = report.metrics
        elif report.episodes:
            self.evals.append((report.agent_steps, sum(e.score for e in report.episodes) / len(report.episodes)))
        with contextlib.suppress(OSError):  # a terminal that was closed does not end the run
            self._draw(report)
        return self._numbers(report, now) | {"time/eval_seconds": eval_seconds}

    def _numbers(self, report: Report, now: float) -> dict[str, float]:
        numbers = {"time/seconds": now - self.started}
        if report.kind == "train":
            numbers["time/agent_steps_per_second"] = self.speed
            if report.episodes:
                numbers["rollout/ep_rew_mean"] = sum(e.score for e in report.episodes) / len(report.episodes)
                numbers["rollout/ep_len_mean"] = sum(e.length_agent_steps for e in report.episodes) / len(report.episodes)
        elif report.episodes:
            numbers["eval/mean_reward"] = self.evals[-1][1]
            numbers["eval/mean_ep_length"] = sum(e.length_agent_steps for e in report.episodes) / len(report.episodes)
        return numbers

    def _draw(self, report: Report) -> None:
        if self.quiet:
            return
        if self._live:
            self._live.update(self.panel(), refresh=True)
        elif report.kind == "eval" and report.episodes:
            print(
                f"{report.agent_steps:>10,} steps  evaluation {self.evals[-1][1]:.4g} over {len(report.episodes)} episodes",
                file=sys.stderr,
                flush=True,
            )
        elif report.kind == "train":
            score = f"{sum(self.scores) / len(self.scores):.4g}" if self.scores else "-"
            print(
                f"{self.steps:>10,} steps  {self.speed:>7,.0f}/s  {self._left()}score {score}  {self._health()}",
                file=sys.stderr,
                flush=True,
            )

    def _left(self) -> str:
        """Nothing before the first updates: steps without them are quick, and tell nothing of those to come."""
        if not (self.speed and self.updates):
            return ""
        seconds = round((self.total - self.steps) / self.speed)
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left  "

    def _health(self) -> str:
        m = self.metrics
        if "dae/adv_size" not in m:
            return "filling the replay"
        return (
            f"skill {m['dae/adv_size']:.3g}  luck {m['dae/luck_size']:.3g}  "
            f"prior entropy {m['dae/prior_entropy']:.2f}  T {m['dae/temperature']:.3g}  KL {m['dae/kl']:.3g}"
        )

    def panel(self) -> Panel:
        """What the live display shows."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", min_width=12)
        grid.add_column()
        score = (
            f"{sum(self.scores) / len(self.scores):.4g} (last {len(self.scores)} episodes)"
            if self.scores
            else "no episode has ended yet"
        )
        grid.add_row("steps", f"{self.steps:,} of {self.total:,}   {self.updates:,} updates")
        grid.add_row("speed", f"{self.speed:,.0f} steps/s   {self._left()}")
        grid.add_row("training", score)
        if self.evals:
            values = [v for _, v in self.evals]
            grid.add_row("evaluation", f"{values[-1]:.4g}   best {max(values):.4g}   {_sparkline(values[-40:])}")
        grid.add_row("health", self._health())
        notes = findings(self.metrics, self.objective)
        bar = ProgressBar(total=self.total, completed=self.steps, width=60)
        warnings = [Text(f"! {note.what}: {note.remedy}", style="yellow") for note in notes]
        return Panel(Group(Padding(bar, (0, 0, 1, 0)), grid, *warnings), title=self.title, title_align="left", width=100)


def _sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_SPARKS[round((v - low) / span * (len(_SPARKS) - 1))] for v in values)
