"""The run folder: OUT/NAME/ENV/seedSEED with config.yaml, run.json and three append-only JSONL files."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import yaml

from dae.config import Config
from dae.errors import ConfigError, FileError
from dae.files import whole_file, writing
from dae.run.checkpoint import read_json
from dae.run.lock import LOCK, Lock
from dae.train import Report


def run_folder(cfg: Config, env_name: str) -> Path:
    """OUT/NAME/ENV/seedSEED."""
    return Path(cfg.run.out) / cfg.run.name / env_name.replace("/", "-").replace(":", "-") / f"seed{cfg.run.seed}"


def refuse_taken(folder: Path, overwrite: bool, mine: bool = False) -> None:
    """A folder where something is that may not be replaced, or where a run is going on (whose lock is not `mine`)."""
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file: choose another --name or --out")
        if not mine and (folder / LOCK).is_file():
            Lock(folder).release()
        there = {path.name for path in folder.iterdir()} - {LOCK} if folder.exists() else set()
    if there and "run.json" not in there:
        raise ConfigError(f"{folder} holds something that is no run: it is not overwritten; choose another --name or --out")
    if there and not overwrite and not _never_began(folder):
        raise ConfigError(f"{folder} already holds a run: choose another --name or --seed, or give --overwrite")


def _never_began(folder: Path) -> bool:
    """Whether its run failed before there was anything to keep: a wrong option or environment, which is tried again."""
    try:
        failed = read_json(folder / "run.json").get("ended") == "failed"
    except (FileError, AttributeError):
        return False
    return failed and not read_jsonl(folder / "metrics.jsonl") and not (folder / "checkpoints").exists()


def _clear(folder: Path) -> None:
    """All but the lock, which is held."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


class Tracker(Protocol):
    """Anything that follows a run: TensorBoard here, others by the same two methods."""

    def log(self, numbers: Mapping[str, float], agent_steps: int) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Writes reports as they come; every line is whole when it is on disk."""

    def __init__(
        self, folder: Path, lock: Lock, trackers: list[Tracker], frames_per_agent_step: int = 1, seconds_before: float = 0.0
    ):
        self.folder, self.lock, self.trackers, self.frames = folder, lock, trackers, frames_per_agent_step
        self.started = time.time() - seconds_before
        self._files = {name: (folder / f"{name}.jsonl").open("a") for name in ("metrics", "episodes", "eval")}

    @classmethod
    def create(cls, folder: Path, cfg: Config, about: Mapping[str, Any], overwrite: bool) -> Self:
        """A new run folder, locked until `finish`; one that holds a run is refused."""
        refuse_taken(folder, overwrite)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = Lock(folder)
            try:
                refuse_taken(folder, overwrite, mine=True)  # somebody may have been quicker
                lock.sign()
                _clear(folder)
                (folder / "run.json").write_text(json.dumps({**provenance(), **about}, indent=1))
                (folder / "config.yaml").write_text(yaml.safe_dump(cfg.nested(), sort_keys=False))
                trackers: list[Tracker] = [TensorBoard(folder)] if cfg.run.tensorboard and TensorBoard.available() else []
                return cls(folder, lock, trackers, int(about.get("frames_per_agent_step", 1)))
            except BaseException:
                lock.release()
                raise

    @classmethod
    def go_on(cls, folder: Path, cfg: Config, frames_per_agent_step: int, agent_steps: int, run: Mapping[str, Any]) -> Self:
        """The folder of a run that goes on after so many steps: its files as they were then."""
        with writing(folder):
            lock = Lock(folder)
            try:
                lock.sign()
                for name, size in run["sizes"].items():
                    with (folder / f"{name}.jsonl").open("r+b") as file:
                        file.truncate(size)
                about = read_json(folder / "run.json")
                about.pop("ended", None)
                about.setdefault("gone_on", []).append({"agent_steps": agent_steps, **provenance()})
                _replace(folder / "run.json", json.dumps(about, indent=1))
                _replace(folder / "config.yaml", yaml.safe_dump(cfg.nested(), sort_keys=False))
                trackers: list[Tracker] = []
                if cfg.run.tensorboard and TensorBoard.available():
                    trackers.append(TensorBoard(folder, agent_steps + 1))
                return cls(folder, lock, trackers, frames_per_agent_step, float(run["seconds"]))
            except BaseException:
                lock.release()
                raise

    def sizes(self) -> dict[str, int]:
        """Of the files, in bytes, as they are on disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}

    def write(self, report: Report, more: Mapping[str, float]) -> None:
        """One line of metrics, or one line for each evaluation episode; one for each training episode."""
        with writing(self.folder):
            self._write(report, more)
            for file in self._files.values():
                file.flush()

    def _write(self, report: Report, more: Mapping[str, float]) -> None:
        where = {"agent_steps": report.agent_steps, "frames": report.agent_steps * self.frames}
        if report.kind == "train":
            numbers = {**report.metrics, **more}
            self._line("metrics", {**where, "updates": report.updates, **numbers})
            for episode in report.episodes:
                self._line("episodes", {
                    "agent_steps": episode.agent_step, "env": episode.env, "score": episode.score,
                    "length": episode.length_agent_steps, "truncated": episode.truncated,
                })  # fmt: skip
        else:
            numbers = dict(more)
            for episode in report.episodes:
                self._line("eval", {
                    **where, "episode": episode.env, "score": episode.score,
                    "length": episode.length_agent_steps, "truncated": episode.truncated,
                })  # fmt: skip
        for tracker in self.trackers:
            tracker.log(numbers, report.agent_steps)

    def finish(self, how: str, agent_steps: int | None = None) -> None:
        """Close the files, write into run.json how the run ended (and after how many steps), and let go of the folder."""
        path = self.folder / "run.json"
        with writing(self.folder), contextlib.ExitStack() as closing:  # all of them, even if one can't be written to any more
            for closes in (self.lock.release, *(f.close for f in self._files.values()), *(t.close for t in self.trackers)):
                closing.callback(closes)
            about = json.loads(path.read_text()) | {"ended": how, "hours": round((time.time() - self.started) / 3600, 4)}
            about |= {} if agent_steps is None else {"agent_steps": agent_steps}
            _replace(path, json.dumps(about, indent=1))

    def _line(self, file: str, values: Mapping[str, Any]) -> None:
        self._files[file].write(json.dumps({k: _round(v) for k, v in values.items()}) + "\n")


def _replace(path: Path, text: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(text)


class TensorBoard:
    """TensorBoard's event files, in the run folder."""

    def __init__(self, folder: Path, from_agent_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=from_agent_step)

    @staticmethod
    def available() -> bool:
        """Whether the extra is installed."""
        return importlib.util.find_spec("tensorboard") is not None

    def log(self, numbers: Mapping[str, float], agent_steps: int) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, agent_steps)

    def close(self) -> None:
        self.writer.close()


def provenance() -> dict[str, Any]:
    """Where numbers come from: code, versions, machine, and the command as it was typed. No environment variables."""
    packages = ("dae-rl", "torch", "numpy", "gymnasium", "ale-py")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {p: _version(p) for p in packages},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "gpu": device,
        "command": ["dae", *sys.argv[1:]] if Path(sys.argv[0]).name == "dae" or _as_module() else [],
    }


def commit() -> str:
    """The commit of the source tree that dae is imported from, `+` where it has changes; empty for an installed package."""
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return ""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain", "src"], cwd=here, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if dirty.strip() else "")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSONL file; a torn last line is dropped, and lines of something else are refused."""
    if not path.is_file():
        return []
    rows = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise FileError(f"{path}: is no text in UTF-8") from None
    odd = [i for i, row in enumerate(rows, 1) if not isinstance(row, dict)]
    if odd:
        raise FileError(f"{path}: line {odd[0]} is no JSON object")
    return rows


def _as_module() -> bool:
    """`python -m dae`."""
    return Path(sys.argv[0]).parts[-2:] == ("dae", "__main__.py")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _round(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
