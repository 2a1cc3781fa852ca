"""The replay on disk: sealed chunks, each written once, that checkpoints refer to by name and SHA-256.

A save writes the slots that were added since the save before it. A chunk holds, for each environment, the slots `first` to `last`
(counted as `Replay.count` counts them); the chunks of a checkpoint together hold everything that was in its rings. One that has been
overwritten whole is referred to no more, and deleted once no checkpoint that is kept refers to it.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dae.errors import FileError
from dae.replay import Replay
from dae.run.checkpoint import digest, sync

CHUNK_BYTES = 2**28
"""A chunk is at most about so large: it passes through memory whole."""


@dataclass(frozen=True)
class Chunk:
    """A file of slots, as a checkpoint knows it."""

    name: str
    sha256: str
    first: tuple[int, ...]
    """By environment: the count of its first slot in here, and ..."""
    last: tuple[int, ...]
    """... of the one behind its last."""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256, "first": list(self.first), "last": list(self.last)}

    @classmethod
    def from_json(cls, data: Any, where: str) -> "Chunk":
        try:
            name, sums = str(data["name"]), str(data["sha256"])
            first, last = (tuple(int(n) for n in data[end]) for end in ("first", "last"))
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{where}: not a list of chunks of a replay ({type(error).__name__}: {error})") from error
        if Path(name).name != name or len(first) != len(last):
            raise FileError(f"{where}: '{name}' is no chunk of a replay")
        return cls(name, sums, first, last)


class ReplayStore:
    """The chunks of one run, in the folder `folder`."""

    def __init__(self, folder: Path, chunks: Sequence[Chunk] = ()):
        self.folder, self.chunks = folder, list(chunks)

    def save(self, replay: Replay) -> list[Chunk]:
        """Write what is new; returns the chunks that hold all of the replay."""
        self.folder.mkdir(parents=True, exist_ok=True)
        oldest = np.maximum(0, replay.count - replay.slots)
        written = np.array(self.chunks[-1].last if self.chunks else np.zeros(replay.num_envs), np.int64)
        start = np.maximum(written, oldest)
        for first, last in _pieces(start, replay.count, _rows_of(replay)):
            self.chunks.append(self._write(replay, first, last))
        sync(self.folder)
        self.chunks = [chunk for chunk in self.chunks if (np.array(chunk.last) > oldest).any()]
        return list(self.chunks)

    def verify(self) -> None:
        """Whether all chunks are there, and as they were written."""
        for chunk in self.chunks:
            self._verify(chunk)

    def load(self, replay: Replay) -> None:
        """Fill an empty replay."""
        for chunk in self.chunks:
            tensors = self._read(chunk, replay)
            at = slots(np.array(chunk.first), np.array(chunk.last), replay.slots)
            for name, ring in replay.rings().items():
                ring[at] = tensors[name].to(ring.device)
            replay.count[:] = chunk.last

    def delete_all_but(self, kept: Iterable[Chunk]) -> None:
        """Files that nobody refers to any more, those of a save that was cut off included."""
        names = {chunk.name for chunk in kept}
        for path in self.folder.glob("*"):
            if path.name not in names and (path.suffix == ".safetensors" or path.name.endswith(".partial")):
                path.unlink()

    def _write(self, replay: Replay, first: NDArray[np.int64], last: NDArray[np.int64]) -> Chunk:
        at = slots(first, last, replay.slots)
        tensors = {name: ring[at].cpu().contiguous() for name, ring in replay.rings().items()}
        number = 1 + max((int(path.stem) for path in self.folder.glob("*.safetensors") if path.stem.isdigit()), default=-1)
        path = self.folder / f"{number:08d}.safetensors"
        partial = self.folder / f".{path.name}.partial"
        ends = {"first": [int(n) for n in first], "last": [int(n) for n in last]}
        save_file(tensors, partial, metadata={"dae": json.dumps(ends)})
        sync(partial)
        sums = digest(partial)
        partial.rename(path)
        return Chunk(path.name, sums, tuple(ends["first"]), tuple(ends["last"]))

    def _verify(self, chunk: Chunk) -> Path:
        path = self.folder / chunk.name
        if not path.is_file() or digest(path) != chunk.sha256:
            raise FileError(f"{path}: missing or damaged (its SHA-256 is not the checkpoint's)")
        return path

    def _read(self, chunk: Chunk, replay: Replay) -> dict[str, Tensor]:
        path = self._verify(chunk)
        rings, rows = replay.rings(), sum(last - first for first, last in zip(chunk.first, chunk.last, strict=True))
        if len(chunk.first) != replay.num_envs:
            raise FileError(f"{path}: of {len(chunk.first)} environments, not of {replay.num_envs}")
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in rings}
        except (SafetensorError, OSError) as error:
            raise FileError(f"{path}: not a chunk of this replay ({error})") from error
        for name, ring in rings.items():
            if tensors[name].shape != (rows, *ring.shape[2:]) or tensors[name].dtype != ring.dtype:
                raise FileError(f"{path}: its {name} is of another shape or type than this replay's")
        return tensors


def slots(first: NDArray[np.int64], last: NDArray[np.int64], size: int) -> tuple[Tensor, Tensor]:
    """Where they lie in the rings: all slots of the first environment, then all of the second ..."""
    counts = last - first
    envs = np.repeat(np.arange(len(first)), counts)
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return torch.from_numpy((np.repeat(first, counts) + within) % size), torch.from_numpy(envs)


def _rows_of(replay: Replay) -> int:
    """Slots of one environment that a chunk may hold."""
    each = sum(ring[0, 0].numel() * ring.element_size() for ring in replay.rings().values())
    return max(1, CHUNK_BYTES // max(1, each * replay.num_envs))


def _pieces(start: NDArray[np.int64], end: NDArray[np.int64], rows: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    while (start < end).any():
        stop = np.minimum(end, start + rows)
        yield start, stop
        start = stop
