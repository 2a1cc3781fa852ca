"""The same command goes on with a run that was cut off: what of it is on disk, and how the run gets back to it.

A checkpoint of a run holds, beside the learner, all that the run carried (`Trainer.state`), the names of the chunks of its replay, and
how long the run's files were. Going on cuts these files to that length, so that nothing stands in them twice.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dae.api import DAE
from dae.config import Config, read_options
from dae.errors import ConfigError, FileError, ResourceError
from dae.run.checkpoint import Blueprint, load_checkpoint, load_run, read_json, save_checkpoint
from dae.run.chunks import Chunk, ReplayStore
from dae.run.record import Recorder
from dae.train import Trainer

KEPT_CHECKPOINTS = 2
MAY_CHANGE = (
    "stop_after_minutes", "stop_after_agent_steps", "tensorboard", "video", "out", "checkpoint_every_agent_steps", "resumable",
)  # fmt: skip
"""Options that may be others when a run goes on: what is learned does not depend on them."""


@dataclass(frozen=True)
class Point:
    """Where a run can go on."""

    path: Path
    agent: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    run: Mapping[str, Any]
    blueprint: Blueprint


def same_run(folder: Path, cfg: Config, weights: str) -> str:
    """How the run that this command asks for stands: `new`, `unfinished` or `finished`. A folder with another run is refused."""
    if not (folder / "run.json").is_file() or not (folder / "config.yaml").is_file():
        return "new"
    about, was, now = read_json(folder / "run.json"), read_options(folder / "config.yaml").flat(), cfg.flat()
    if about.get("ended") == "failed" and not (folder / "checkpoints").exists():
        return "new"
    now["from"], was["from"] = weights, about.get("from", "")
    other = [name for name in now if now[name] != was[name] and name not in MAY_CHANGE]
    if other:
        name = other[0]
        raise ConfigError(
            f"{folder} already holds a run with other options ({name}={was[name]} there, {now[name]} here): choose another --name "
            "or --seed, or give --overwrite"
        )
    stopped_here = about.get("ended") == "stopped" and about.get("agent_steps", 0) >= cfg.last_agent_step
    return "finished" if about.get("ended") == "finished" or stopped_here else "unfinished"


def newest_point(folder: Path) -> tuple[Point | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with those after it."""
    wrong: list[str] = []
    for path in sorted(_checkpoints(folder), reverse=True):
        try:
            agent, blueprint, about = load_checkpoint(path)
            if "run" not in about:
                wrong.append(f"{path} can't be gone on from: it holds the networks only")
                continue
            tensors, run = load_run(path), about["run"]
            ReplayStore(folder / "replay", chunks_of(run, path)).verify()
            return Point(path, agent, tensors, run, blueprint), wrong
        except FileError as error:
            wrong.append(str(error))
    return None, wrong


def chunks_of(run: Mapping[str, Any], where: Path) -> list[Chunk]:
    """Those that a checkpoint refers to."""
    return [Chunk.from_json(chunk, str(where)) for chunk in run.get("chunks", ())]


def refuse_to_begin_again(folder: Path, overwrite: bool) -> None:
    """A run that has got somewhere and can't go on is not thrown away for that."""
    if not overwrite and _checkpoints(folder):
        raise ConfigError(
            f"{folder}: there is nothing that this run could go on from: --overwrite makes it anew, another --name with "
            f"--from {folder} starts from its networks"
        )


def drop_newer(folder: Path, point: Point) -> None:
    """Checkpoints that are damaged, or hold the networks only: the run will pass there again."""
    for path in _checkpoints(folder):
        if int(path.name) > int(point.path.name):
            shutil.rmtree(path)


def go_on(agent: DAE, trainer: Trainer, point: Point, store: ReplayStore) -> bool:
    """The agent and its run, back to that point. Whether it is as if the run had never stopped."""
    try:
        agent.agent.load_state_dict(point.agent)
        store.load(trainer.replay)
        return trainer.go_on(point.tensors, point.run)
    except (KeyError, RuntimeError, ValueError, TypeError) as error:
        raise FileError(f"{point.path}: does not fit this run ({type(error).__name__}: {error})") from error


def keep_checkpoint(agent: DAE, recorder: Recorder, store: ReplayStore | None, seconds: float = 0.0) -> Path:
    """Save, and drop all but the newest few. Without a `store`, the networks only: nothing can go on from there."""
    folder, now = recorder.folder, agent.now()
    path = folder / "checkpoints" / f"{now.agent_steps:012d}"
    if path.exists():
        return path
    more: dict[str, Any] = {"reward_scale": agent.reward_scale}
    tensors: Mapping[str, Tensor] = {}
    if store is not None:
        assert agent.trainer is not None
        tensors, run = agent.trainer.state()
        chunks = [chunk.to_json() for chunk in store.save(agent.trainer.replay)]
        more["run"] = {**run, "chunks": chunks, "sizes": recorder.sizes(), "seconds": seconds}
    save_checkpoint(path, agent.agent.state_dict(), now, more, tensors)
    for old in sorted(_checkpoints(folder))[:-KEPT_CHECKPOINTS]:
        shutil.rmtree(old)
    if store is not None:
        kept = [(p, read_json(p / "checkpoint.json").get("run", {})) for p in _checkpoints(folder)]
        store.delete_all_but(chunk for where, run in kept for chunk in chunks_of(run, where))
    return path


def refuse_small_disk(agent: DAE, folder: Path) -> None:
    """Whether the replay fits on the disk, once more than it is large: chunks that are overwritten by and by stay for a while."""
    need = agent.replay_bytes
    there = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        raise ResourceError(
            f"{folder}: the replay needs {need / 2**30:.1f} GiB of disk, {free / 2**30:.1f} GiB are free; --no-resumable keeps only networks"
        )


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]
