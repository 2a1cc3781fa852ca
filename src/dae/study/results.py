"""From the folders of single runs to tidy CSVs with a manifest, and back from these to arrays."""

import csv
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dae.run.checkpoint import read_json
from dae.run.record import commit
from dae.study.cell import CHOICES, EVAL, TRAIN, write_csv, write_whole
from dae.study.spec import Cell, Study

Row = dict[str, str]
_FILES = ("eval", "train", "choices")


def is_finished(folder: Path, cell: Cell) -> bool:
    """Whether the folder holds that very run: another budget or option makes it another one."""
    path = folder / "cell.json"
    return path.is_file() and read_json(path).get("fingerprint") == cell.fingerprint


def merge(study: Study, work: Path, out: Path) -> int:
    """Write `<env>.csv`, `<env>.train.csv`, `jackpot_choices.csv` and `manifest.json`; returns the number of finished runs.

    Made anew from the runs below `work`, wherever they ran: the folders of several machines may be put together. A run that is in
    `out` only stays there, as long as the experiment file still asks for that very run: running one cell again loses no other.
    """
    runs = _finished(study, work) | {
        key: run for key, run in _published(study, out).items() if not is_finished(work / key, run.cell)
    }
    in_order = [runs[cell.key] for cell in study.cells() if cell.key in runs]
    if not in_order:
        return 0
    out.mkdir(parents=True, exist_ok=True)
    for env in study.environments:
        of_env = [run for run in in_order if run.cell.env == env.id]
        if of_env:
            write_csv(out / f"{env.slug}.csv", EVAL, [row for run in of_env for row in run.scores])
            write_csv(out / f"{env.slug}.train.csv", TRAIN, [row for run in of_env for row in run.metrics])
    choices = [row for run in in_order for row in run.choices]
    if choices:
        write_csv(out / "jackpot_choices.csv", CHOICES, choices)
    write_whole(out / "manifest.json", json.dumps(manifest(study, in_order), indent=1) + "\n")
    return len(in_order)


@dataclass(frozen=True)
class Run:
    """A finished run: its rows, and what the manifest says of it."""

    cell: Cell
    about: dict[str, Any]
    machine: dict[str, Any]
    scores: list[Row]
    metrics: list[Row]
    choices: list[Row]


_ABOUT = ("env", "agent", "seed", "agent_steps", "hours", "cpu_seconds", "fingerprint", "started", "commit")


def _finished(study: Study, work: Path) -> dict[str, Run]:
    """Those whose folders are below `work`."""
    runs = {}
    for cell in study.cells():
        folder = work / cell.key
        if is_finished(folder, cell):
            about = read_json(folder / "cell.json")
            about["commit"] = about["commit"] or commit()
            machine = {**about["hardware"], "platform": about["platform"], "python": about["python"], "versions": about["versions"]}
            rows = [read_csv(folder / f"{name}.csv") if (folder / f"{name}.csv").is_file() else [] for name in _FILES]
            runs[cell.key] = Run(cell, {key: about[key] for key in _ABOUT}, machine, *rows)
    return runs


def _published(study: Study, out: Path) -> dict[str, Run]:
    """Those that `out` has, with the settings of today."""
    if not (out / "manifest.json").is_file():
        return {}
    old, runs = read_json(out / "manifest.json"), {}
    tables = {env.id: [_rows_by_run(out / f"{env.slug}{end}.csv") for end in ("", ".train")] for env in study.environments}
    choices = _rows_by_run(out / "jackpot_choices.csv")
    known = {about.get("fingerprint"): about for about in old["runs"] if all(key in about for key in (*_ABOUT, "machine"))}
    for cell in study.cells():
        about = known.get(cell.fingerprint)
        if about is not None and (about["env"], about["agent"], about["seed"]) == (cell.env, cell.agent, cell.seed):
            which = (cell.agent, str(cell.seed))
            scores, metrics = (table.get(which, []) for table in tables[cell.env])
            told = [row for row in choices.get(which, []) if row["env"] == cell.env]
            runs[cell.key] = Run(
                cell, {key: about[key] for key in _ABOUT}, old["machines"][about["machine"]], scores, metrics, told
            )
    return runs


def _rows_by_run(path: Path) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in read_csv(path) if path.is_file() else []:
        found.setdefault((row["agent"], row["seed"]), []).append(row)
    return found


def manifest(study: Study, runs: Sequence[Run]) -> dict[str, Any]:
    """Where the numbers come from."""
    machines: list[dict[str, Any]] = []
    for run in runs:
        if run.machine not in machines:
            machines.append(run.machine)
    return {
        "experiment": study.name,
        "description": study.description,
        "file": Path(study.path).name,
        "sha256": study.sha256,
        "merged": time.strftime("%Y-%m-%d", time.gmtime()),
        "started": min(run.about["started"] for run in runs),
        "commits": sorted({run.about["commit"] for run in runs}),
        "machines": machines,
        "runs_finished": len(runs),
        "runs_planned": len(study.cells()),
        "seeds": {env.id: list(env.seeds) for env in study.environments},
        "cpu_hours": round(sum(run.about["cpu_seconds"] for run in runs) / 3600, 3),
        "agents": [
            {"name": a.name, "title": a.title, "source": a.source, "outsider": a.outsider, "published": a.published}
            for a in study.agents
        ],
        "runs": [{**run.about, "machine": machines.index(run.machine)} for run in runs],
    }


def read_csv(path: Path) -> list[Row]:
    """All rows, as text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
