"""The run folder: OUT/NAME/ENV/seedSEED with config.yaml, run.json and three append-only JSONL files."""

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
from dae.train import Report


def run_folder(cfg: Config, env_name: str) -> Path:
    """OUT/NAME/ENV/seedSEED."""
    return Path(cfg.run.out) / cfg.run.name / env_name.replace("/", "-").replace(":", "-") / f"seed{cfg.run.seed}"


class Tracker(Protocol):
    """Anything that follows a run: TensorBoard here, others by the same two methods."""

    def log(self, numbers: Mapping[str, float], agent_steps: int) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Writes reports as they come; every line is whole when it is on disk."""

    def __init__(self, folder: Path, trackers: list[Tracker], frames_per_agent_step: int = 1):
        self.folder, self.trackers, self.frames = folder, trackers, frames_per_agent_step
        self.started = time.time()
        self._files = {name: (folder / f"{name}.jsonl").open("a") for name in ("metrics", "episodes", "eval")}

    @classmethod
    def create(cls, folder: Path, cfg: Config, about: Mapping[str, Any], overwrite: bool) -> Self:
        """A new run folder; one that holds a run is refused."""
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file: choose another --name or --out")
        if folder.exists() and any(folder.iterdir()):
            if not overwrite:
                raise ConfigError(f"{folder} already holds a run: choose another --name or --seed, or give --overwrite")
            if not (folder / "run.json").is_file():
                raise ConfigError(f"{folder} holds something that is no run: it is not overwritten; choose another --name or --out")
            shutil.rmtree(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"{folder}: can't be made: {error.strerror}") from error
        (folder / "config.yaml").write_text(yaml.safe_dump(cfg.nested(), sort_keys=False))
        (folder / "run.json").write_text(json.dumps({**provenance(), **about}, indent=1))
        trackers: list[Tracker] = [TensorBoard(folder)] if cfg.run.tensorboard and TensorBoard.available() else []
        return cls(folder, trackers, int(about.get("frames_per_agent_step", 1)))

    def write(self, report: Report, more: Mapping[str, float]) -> None:
        """One line of metrics, or one line for each evaluation episode; one for each training episode."""
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
        for file in self._files.values():
            file.flush()

    def finish(self, how: str) -> None:
        """Close the files and write how the run ended into run.json."""
        for file in self._files.values():
            file.close()
        for tracker in self.trackers:
            tracker.close()
        path = self.folder / "run.json"
        about = json.loads(path.read_text()) | {"ended": how, "hours": round((time.time() - self.started) / 3600, 4)}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(about, indent=1))
        os.replace(partial, path)

    def _line(self, file: str, values: Mapping[str, Any]) -> None:
        self._files[file].write(json.dumps({k: _round(v) for k, v in values.items()}) + "\n")


class TensorBoard:
    """TensorBoard's event files, in the run folder."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

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
        "command": ["dae", *sys.argv[1:]] if Path(sys.argv[0]).name == "dae" else [],
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
    """All whole lines of a JSONL file; a torn last line is dropped."""
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _round(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
