"""Weights and learner state on disk: safetensors for tensors, JSON for the rest. Nothing that is read can run.

A checkpoint is a folder that appears whole (written beside, then renamed) and is never changed:
    agent.safetensors    `Agent.state_dict()`
    checkpoint.json      configuration, spaces, counters; of a run also its generators, and the chunks of its replay (chunks.py)
    run.safetensors      of a run: where its environments and its actor are
    manifest.json        size and SHA-256 of each
An export is one safetensors file of the acting part in 16 bit, with the same JSON in its header.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dae.config import Config
from dae.encoders import ObsPart, ObsSpec
from dae.errors import ConfigError, Diverged, FileError
from dae.files import whole_file, writing

FORMAT = 1
RUN = "run.safetensors"
FILES = ("agent.safetensors", "checkpoint.json", "manifest.json", RUN)
_DTYPES = {"uint8": torch.uint8, "float32": torch.float32}
ACTING_PARTS = ("encoder.", "prev_action.", "prev_reward.", "core.", "adv.")


@dataclass(frozen=True)
class Blueprint:
    """What must be known to build the network again."""

    config: Config
    spec: ObsSpec
    num_actions: int
    reward_classes: tuple[float, ...]
    env_id: str | None
    """A plain Gymnasium id, or nothing: code is never named by data."""
    env_kwargs: Mapping[str, Any]
    agent_steps: int = 0
    updates: int = 0

    def to_json(self) -> dict[str, Any]:
        spec = {
            n: {"shape": list(p.shape), "dtype": str(p.dtype).removeprefix("torch."), "scale": p.scale}
            for n, p in self.spec.items()
        }
        return {
            "format": FORMAT, "config": self.config.flat(), "observation": spec, "num_actions": self.num_actions,
            "reward_classes": list(self.reward_classes), "env_id": self.env_id, "env_kwargs": dict(self.env_kwargs),
            "agent_steps": self.agent_steps, "updates": self.updates,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Any, where: str) -> "Blueprint":
        try:
            if data["format"] != FORMAT:
                raise FileError(f"{where}: format {data['format']}, this version reads {FORMAT}")
            spec = {
                str(n): ObsPart(tuple(int(x) for x in p["shape"]), _DTYPES[p["dtype"]], float(p["scale"]))
                for n, p in data["observation"].items()
            }
            env_id = data["env_id"]
            if env_id is not None and (not isinstance(env_id, str) or ":" in env_id):
                raise FileError(f"{where}: env_id {env_id!r} is no plain Gymnasium id")
            return cls(
                Config().override(**data["config"]), spec, int(data["num_actions"]), tuple(float(r) for r in data["reward_classes"]),
                env_id, dict(data["env_kwargs"]), int(data["agent_steps"]), int(data["updates"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(f"{where}: not a description of an agent ({type(error).__name__}: {error})") from error


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    blueprint: Blueprint,
    more: Mapping[str, Any],
    run: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write the checkpoint `folder`, whole or not at all. What is there already is replaced only if it is a checkpoint, or empty.

    `run` has what a run carries beside the learner, where it shall go on from here.
    """
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise Diverged(
                f"learning has diverged: '{name}' is not finite, so {folder} is not written; lower learning_rate, or look for huge "
                "rewards or observations"
            )
    with writing(folder):
        _refuse_what_is_not_ours(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            _write(partial, tensors, run or {}, {**blueprint.to_json(), "saved": time.time(), **more})
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # of a save that failed; else it is not there any more
        sync(folder.parent)
    return folder


def _refuse_what_is_not_ours(folder: Path) -> None:
    if folder.name in ("", ".."):
        raise ConfigError(f"{str(folder)!r} names no folder that could be made: give the checkpoint a name")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{folder} is no folder: choose another name for the checkpoint")
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if there and not ("manifest.json" in there and there <= set(FILES)):
        raise ConfigError(f"{folder} holds something that is no checkpoint: it is not replaced; choose another name")


def _write(folder: Path, tensors: Mapping[str, Tensor], run: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    for name, part in (("agent.safetensors", tensors), (RUN, run)):
        if part:
            save_file({k: v.detach().cpu().contiguous() for k, v in part.items()}, folder / name)
    (folder / "checkpoint.json").write_text(json.dumps(description, indent=1))
    names = sorted(path.name for path in folder.iterdir())
    manifest = {name: {"bytes": (folder / name).stat().st_size, "sha256": digest(folder / name)} for name in names}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for path in (*folder.iterdir(), folder):
        sync(path)


def _verify(folder: Path, *names: str) -> None:
    manifest = read_json(folder / "manifest.json")
    for name in names:
        known = manifest.get(name) if isinstance(manifest, dict) else None
        if not isinstance(known, dict) or not (folder / name).is_file() or digest(folder / name) != known.get("sha256"):
            raise FileError(f"{folder / name}: missing or damaged (its SHA-256 is not the manifest's)")


def load_run(folder: Path) -> dict[str, Tensor]:
    """What a run carried beside its learner, likewise."""
    _verify(folder, RUN)
    return load_file(folder / RUN)


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], Blueprint, dict[str, Any]]:
    """Tensors, blueprint and the rest, after the manifest was verified."""
    _verify(folder, "agent.safetensors", "checkpoint.json")
    data = read_json(folder / "checkpoint.json")
    return load_file(folder / "agent.safetensors"), Blueprint.from_json(data, str(folder)), data


def latest_checkpoint(path: Path) -> Path:
    """`path` itself, or the newest checkpoint of the run folder `path`."""
    if (path / "checkpoint.json").is_file():
        return path
    folders = sorted((p for p in (path / "checkpoints").glob("*") if p.name.isdigit()), key=lambda p: int(p.name))
    found = [p for p in folders if (p / "manifest.json").is_file()]
    if found:
        return found[-1]
    if folders:
        raise FileError(f"{folders[-1] / 'manifest.json'}: is missing: this checkpoint is not whole, and there is no other")
    if path.resolve().name == "checkpoints":
        raise FileError(f"{path}: give the run folder that it is in, {path.resolve().parent}, or one of the checkpoints in it")
    raise FileError(f"{path}: neither a run folder with checkpoints, nor a checkpoint, nor an exported agent")


def export(path: Path, tensors: Mapping[str, Tensor], blueprint: Blueprint) -> Path:
    """Only what acting needs, in 16 bit, in one file."""
    acting = {k: v.detach().cpu().half().contiguous() for k, v in _acting(tensors, blueprint).items()}
    for name, tensor in acting.items():
        if not tensor.isfinite().all():
            raise FileError(f"{path}: the weights '{name}' do not fit into 16 bit")
    with whole_file(path) as partial:
        save_file(acting, partial, metadata={"dae": json.dumps(blueprint.to_json())})
    return path


def load_acting(path: Path) -> tuple[dict[str, Tensor], Blueprint]:
    """Acting weights in 32 bit (without the `net.` prefix), from an export, a checkpoint or a run folder."""
    if path.is_dir():
        tensors, blueprint, _ = load_checkpoint(latest_checkpoint(path))
        return _acting(tensors, blueprint), blueprint
    if not path.is_file():
        raise FileError(f"{path}: there is no such file or folder")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path}: not a safetensors file ({error})") from error
    if "dae" not in metadata:
        raise FileError(f"{path}: not an exported agent")
    try:
        data = json.loads(metadata["dae"])
    except ValueError as error:
        raise FileError(f"{path}: its description is damaged") from error
    return {k: v.float() for k, v in tensors.items()}, Blueprint.from_json(data, str(path))


def _acting(tensors: Mapping[str, Tensor], blueprint: Blueprint) -> dict[str, Tensor]:
    """The part that acts, of the network that is played (`eval_weights`)."""
    which = "net." if blueprint.config.acting.eval_weights == "online" else "ema."
    network = {k.removeprefix(which): v for k, v in tensors.items() if k.startswith(which)}
    return {k: v for k, v in network.items() if k.startswith(ACTING_PARTS)}


def read_json(path: Path) -> Any:
    """A JSON file, or one line about why not."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise FileError(f"{path}: not JSON ({error})") from error


def advance(blueprint: Blueprint, agent_steps: int, updates: int) -> Blueprint:
    """The same agent, later."""
    return dataclasses.replace(blueprint, agent_steps=agent_steps, updates=updates)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """A file or a folder, down to the disk."""
    if os.name == "nt":  # Windows flushes no folders, and no handles that only read
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
