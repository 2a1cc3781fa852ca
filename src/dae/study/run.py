"""Run a study: `python -m dae.study.run experiments/laptop.toml` plans, skips what is finished, runs the rest in parallel, merges.

Every cell (environment, agent, seed) is a process of its own on one thread, the longest first. A cell that fails is reported and
the others go on; the same command tries it again. Exit code 1 where something failed, else 0.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dae.errors import ConfigError, DaeError
from dae.study.cell import run_cell
from dae.study.results import is_finished, merge
from dae.study.spec import Cell, Study, read_study

GRACE_SECONDS = 5


@dataclass
class Running:
    """A cell that is at work."""

    cell: Cell
    process: subprocess.Popen[bytes]
    folder: Path
    began: float


@dataclass(frozen=True)
class Outcome:
    """How the cells of one call ended."""

    finished: list[Cell]
    failed: list[tuple[Cell, str]]
    left: list[Cell]
    """Not begun, or stopped at the time limit."""


def cost(cell: Cell) -> float:
    """CPU-seconds, roughly: it orders the queue and warns before anything starts. 30 ms for an update of the laptop preset."""
    cfg, total = cell.config, cell.total_agent_steps
    picture = 2.5 if cfg.environment.env.startswith(("MinAtar/", "ALE/")) else 1.0
    if cell.settings is not None:
        return total * (0.6e-3 * picture + 0.08e-3 * cell.settings.n_epochs)
    slots = (cfg.train_steps + cfg.objective.burn_in_steps / 2) / 20
    updates = max(0, total - cfg.learning.min_replay_agent_steps) / cfg.learning.agent_steps_per_update
    each = 0.030 * picture * (0.3 + 0.7 * slots * cfg.learning.batch_size / 32)
    return updates * each + total * 1.5e-3 / cfg.environment.num_envs


def plan(study: Study, work: Path, agents: Sequence[str], environments: Sequence[str]) -> tuple[list[Cell], list[Cell]]:
    """(to be run, the longest first; finished already)"""
    cells = study.cells(agents, environments)
    done = [c for c in cells if is_finished(work / c.key, c)]
    return sorted((c for c in cells if c not in done), key=cost, reverse=True), done


def execute(study: Study, queue: Sequence[Cell], work: Path, jobs: int, minutes: float) -> Outcome:
    """Run the cells; stops at the limit, and on Ctrl-C, without leaving a process behind."""
    began, waiting, running, outcome = time.time(), list(queue), [], Outcome([], [], [])  # type: float, list[Cell], list[Running], Outcome
    limit = began + 60 * minutes if minutes else float("inf")
    try:
        while waiting or running:
            if time.time() >= limit:
                break
            while waiting and len(running) < jobs:
                running.append(_start(study, waiting.pop(0), work))
            time.sleep(0.2)
            for one in [r for r in running if r.process.poll() is not None]:
                running.remove(one)
                _settle(one, outcome)
                ended = len(outcome.finished) + len(outcome.failed)
                _say(f"[{ended}/{len(queue)}] {_ended(one)}; {len(running)} running, {len(waiting)} waiting")
    finally:
        _stop(running)
    outcome.left.extend([r.cell for r in running] + waiting)
    return outcome


def _start(study: Study, cell: Cell, work: Path) -> Running:
    folder = work / cell.key
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    if cell.config.run.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # many processes that each look at a GPU take its memory and a second of time
    which = ["--cell", cell.agent, cell.env, str(cell.seed), "--work", str(work)]
    command = [sys.executable, "-m", "dae.study.run", study.path, *which]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
    return Running(cell, process, folder, time.time())


def _settle(one: Running, outcome: Outcome) -> None:
    if one.process.returncode == 0 and is_finished(one.folder, one.cell):
        outcome.finished.append(one.cell)
    else:
        outcome.failed.append((one.cell, last_line(one.folder / "log.txt") or f"exit code {one.process.returncode}"))


def _ended(one: Running) -> str:
    how = "finished" if one.process.returncode == 0 else f"FAILED: {last_line(one.folder / 'log.txt')}"
    return f"{one.cell.key} {how} after {time.time() - one.began:.0f} s"


def _stop(running: Sequence[Running]) -> None:
    for one in running:
        one.process.terminate()
    deadline = time.time() + GRACE_SECONDS
    for one in running:
        try:
            one.process.wait(max(0.1, deadline - time.time()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


def last_line(path: Path) -> str:
    """Of a log: the error, after a traceback."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()] if path.is_file() else []
    return lines[-1] if lines else ""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _describe(queue: Sequence[Cell], done: Sequence[Cell], jobs: int) -> None:
    hours = sum(map(cost, queue)) / 3600
    price = f"about {hours:.1f} CPU-hours, {60 * hours / jobs:.0f} minutes on {jobs} processes"
    _say(f"{len(queue)} runs to do, {len(done)} finished already: {price}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dae.study.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("spec", help="the experiment file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side (default: one for each core)")
    parser.add_argument("--out", type=Path, help="folder of the CSVs (default: results/NAME)")
    parser.add_argument("--work", type=Path, help="folder of the single runs (default: runs/study/NAME)")
    parser.add_argument("--only", default="", metavar="AGENT,...", help="these agents only")
    parser.add_argument("--env", default="", metavar="ID,...", help="these environments only")
    parser.add_argument("--minutes", type=float, default=0, help="stop after so long, merging what is finished (default: never)")
    parser.add_argument("--plan", action="store_true", help="say what would be run, and run nothing")
    parser.add_argument("--merge-only", action="store_true", help="make the CSVs of the runs that are there, and run nothing")
    parser.add_argument("--cell", nargs=3, metavar=("AGENT", "ENV", "SEED"), help=argparse.SUPPRESS)
    return parser


def run(options: argparse.Namespace) -> int:
    """What the command line asks for."""
    study = read_study(options.spec)
    work, out = options.work or Path("runs/study") / study.name, options.out or Path("results") / study.name
    if options.cell:
        agent, env, seed = options.cell
        (cell,) = [c for c in study.cells([agent], [env]) if c.seed == int(seed)]
        run_cell(study.name, cell, work / cell.key)
        return 0
    if options.jobs < 1 or options.minutes < 0:
        raise ConfigError("--jobs must be at least 1, and --minutes 0 or more")
    agents, environments = [[name for name in text.split(",") if name] for text in (options.only, options.env)]
    queue, done = plan(study, work, agents, environments)
    _describe(queue, done, options.jobs)
    if options.plan:
        for cell in queue:
            print(f"{cost(cell):7.0f} s  {cell.total_agent_steps:>9,} agent steps  {cell.key}")
        return 0
    outcome = Outcome([], [], []) if options.merge_only else execute(study, queue, work, options.jobs, options.minutes)
    for cell, error in outcome.failed:
        _say(f"failed: {cell.key}: {error} (all of it: {work / cell.key / 'log.txt'})")
    if outcome.left:
        _say(f"{len(outcome.left)} runs are left: the same command goes on with them")
    merged = merge(study, work, out)
    _say(f"{out}: {merged} of {len(study.cells())} runs")
    return 1 if outcome.failed else 0


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that no cell is left behind
    try:
        sys.exit(run(_parser().parse_args()))
    except DaeError as error:
        print(f"dae: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("dae: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
