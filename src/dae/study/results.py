"""From the folders of single runs to tidy CSVs with a manifest, and back from these to arrays."""

import csv
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dae.run.checkpoint import read_json
from dae.run.record import commit
from dae.study.cell import CHOICES, EVAL, TRAIN, write_csv, write_whole
from dae.study.spec import Cell, Study

Row = dict[str, str]


def is_finished(folder: Path, cell: Cell) -> bool:
    """Whether the folder holds that very run: another budget or option makes it another one."""
    path = folder / "cell.json"
    return path.is_file() and read_json(path).get("fingerprint") == cell.fingerprint


def merge(study: Study, work: Path, out: Path) -> int:
    """Write `<env>.csv`, `<env>.train.csv`, `jackpot_choices.csv` and `manifest.json`; returns the number of finished runs.

    Always made anew from all finished runs, wherever they ran: the folders of several machines may be put together.
    """
    cells = [c for c in study.cells() if is_finished(work / c.key, c)]
    if not cells:
        return 0
    out.mkdir(parents=True, exist_ok=True)
    choices: list[Row] = []
    for env in study.environments:
        folders = [work / c.key for c in cells if c.env == env.id]
        if folders:
            write_csv(out / f"{env.slug}.csv", EVAL, [row for f in folders for row in read_csv(f / "eval.csv")])
            write_csv(out / f"{env.slug}.train.csv", TRAIN, [row for f in folders for row in read_csv(f / "train.csv")])
            choices += [row for f in folders if (f / "choices.csv").is_file() for row in read_csv(f / "choices.csv")]
    if choices:
        write_csv(out / "jackpot_choices.csv", CHOICES, choices)
    write_whole(out / "manifest.json", json.dumps(manifest(study, cells, work), indent=1) + "\n")
    return len(cells)


def manifest(study: Study, cells: Sequence[Cell], work: Path) -> dict[str, Any]:
    """Where the numbers come from."""
    about = [read_json(work / c.key / "cell.json") for c in cells]
    runs = [
        {key: a[key] for key in ("env", "agent", "seed", "agent_steps", "hours", "cpu_seconds", "fingerprint")} | {"machine": m}
        for a, m in zip(about, _indices([_machine(a) for a in about]), strict=True)
    ]
    planned = study.cells()
    return {
        "experiment": study.name,
        "description": study.description,
        "file": Path(study.path).name,
        "sha256": study.sha256,
        "merged": time.strftime("%Y-%m-%d", time.gmtime()),
        "started": min(a["started"] for a in about),
        "commits": sorted({a["commit"] or commit() for a in about}),
        "machines": _distinct([_machine(a) for a in about]),
        "runs_finished": len(cells),
        "runs_planned": len(planned),
        "seeds": {env.id: list(env.seeds) for env in study.environments},
        "cpu_hours": round(sum(a["cpu_seconds"] for a in about) / 3600, 3),
        "agents": [{"name": a.name, "title": a.title, "source": a.source, "outsider": a.outsider} for a in study.agents],
        "runs": runs,
    }


def read_csv(path: Path) -> list[Row]:
    """All rows, as text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _machine(about: Mapping[str, Any]) -> dict[str, Any]:
    return {**about["hardware"], "platform": about["platform"], "python": about["python"], "versions": about["versions"]}


def _distinct(things: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [thing for i, thing in enumerate(things) if thing not in things[:i]]


def _indices(things: Sequence[dict[str, Any]]) -> list[int]:
    distinct = _distinct(things)
    return [distinct.index(thing) for thing in things]
