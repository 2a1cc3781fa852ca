"""Gymnasium spaces to what the replay stores: a dict of float vectors and channel-first pictures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from dae.encoders import ObsPart, ObsSpec
from dae.errors import EnvironmentFault

Observation = Mapping[str, NDArray[np.generic]]
"""One array for each part of an observation; with a leading axis of environments where several are meant."""


@dataclass(frozen=True)
class Layout:
    """Where a picture's channels are."""

    last: bool
    why: str
    guessed: bool = False
    """Its shape could mean either."""


@dataclass(frozen=True)
class _Leaf:
    path: tuple[str | int, ...]
    space: gym.Space[Any]
    part: ObsPart
    layout: Layout | None = None
    bounds: tuple[NDArray[Any], NDArray[Any]] | None = None


class ObservationReader:
    """Turns what an environment returns into named arrays, and refuses what its space does not promise."""

    def __init__(self, space: gym.Space[Any], channels: str = "auto"):
        found = _walk(space, ())
        self.leaves = {_name(path): _leaf(path, s, channels) for path, s in found}
        if len(self.leaves) < len(found):
            raise EnvironmentFault("two parts of the observation have the same name (a dot joins the names of nested parts)")
        if not self.leaves or any(0 in part.shape for part in self.spec.values()):
            raise EnvironmentFault(f"observations of {space} are not supported: there is nothing in them")

    @property
    def spec(self) -> ObsSpec:
        """Shapes and types as they are stored."""
        return {name: leaf.part for name, leaf in self.leaves.items()}

    def read(self, raw: Any) -> dict[str, NDArray[np.generic]]:
        """One observation of one environment. Raises ValueError that says what is wrong with it."""
        return {name: _read(follow(raw, leaf.path), leaf, batch=()) for name, leaf in self.leaves.items()}

    def read_batch(self, raw: Any, num_envs: int) -> dict[str, NDArray[np.generic]]:
        """The batched observation of a vector environment."""
        return {name: _read(follow(raw, leaf.path), leaf, batch=(num_envs,)) for name, leaf in self.leaves.items()}

    def outside(self, raw: Any) -> str:
        """How an observation that can be read is not what its space promises; empty if it is. Training lets it pass."""
        found = (_outside(np.asarray(follow(raw, leaf.path)), leaf.space, name) for name, leaf in self.leaves.items())
        return next(filter(None, found), "")


def in_words(spec: ObsSpec) -> str:
    """Shapes and types, for people."""
    parts = (f"{name} {part.shape} {str(part.dtype).removeprefix('torch.')} x {part.scale:.4g}" for name, part in spec.items())
    return ", ".join(part.removesuffix(" x 1") for part in parts)


def num_actions(space: gym.Space[Any]) -> int:
    """Of a discrete action space; any other is refused."""
    if not isinstance(space, spaces.Discrete):
        raise EnvironmentFault(
            f"actions of type {type(space).__name__} are not supported: dae needs one choice among finitely many "
            "(gymnasium.spaces.Discrete); discretise them in a wrapper"
        )
    return int(space.n)


def _walk(space: gym.Space[Any], path: tuple[str | int, ...]) -> list[tuple[tuple[str | int, ...], gym.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        return [leaf for key, sub in space.spaces.items() for leaf in _walk(sub, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for i, sub in enumerate(space.spaces) for leaf in _walk(sub, (*path, i))]
    return [(path, space)]


def _name(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path)) or "obs"


def follow(raw: Any, path: tuple[str | int, ...]) -> Any:
    """The part of an observation that lies at the end of the path."""
    for key in path:
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the observation has no part '{_name(path)}'") from None
    return raw


def _leaf(path: tuple[str | int, ...], space: gym.Space[Any], channels: str) -> _Leaf:
    if isinstance(space, spaces.Discrete):
        return _Leaf(path, space, ObsPart((int(space.n),), torch.float32))
    if isinstance(space, spaces.MultiDiscrete):
        return _Leaf(path, space, ObsPart((int(space.nvec.sum()),), torch.float32))
    if isinstance(space, spaces.MultiBinary):
        return _Leaf(path, space, ObsPart((int(np.prod(space.shape)),), torch.float32))
    if isinstance(space, spaces.Box):
        image = len(space.shape) == 3 or (len(space.shape) == 2 and space.dtype == np.uint8)
        if not image and len(space.shape) <= 2:
            return _Leaf(path, space, ObsPart((int(np.prod(space.shape)),), torch.float32), bounds=_bounds(space))
        if image:
            return _image_leaf(path, space, channels)
    raise EnvironmentFault(
        f"observations of {space} ('{_name(path)}') are not supported: dae takes numbers, vectors, pictures (3 axes), "
        "and Dict or Tuple of these; convert them in a gymnasium.ObservationWrapper"
    )


def _image_leaf(path: tuple[str | int, ...], space: spaces.Box, channels: str) -> _Leaf:
    shape = space.shape if len(space.shape) == 3 else (1, *space.shape)
    layout = _layout(space.shape, channels)
    if layout.last:
        shape = (shape[2], shape[0], shape[1])
    if space.dtype == np.uint8:
        return _Leaf(path, space, ObsPart(shape, torch.uint8, 1 / max(1.0, float(space.high.max()))), layout)
    if space.dtype == np.bool_:
        return _Leaf(path, space, ObsPart(shape, torch.uint8), layout)
    largest = float(np.abs(space.high).max()) if space.is_bounded() else 1.0
    return _Leaf(path, space, ObsPart(shape, torch.float32, 1 / largest if 1 < largest <= 1e6 else 1.0), layout)


def _layout(shape: tuple[int, ...], channels: str) -> Layout:
    if len(shape) == 2:
        return Layout(False, "one for all")
    if channels != "auto":
        return Layout(channels == "last", "as named")
    square_first, square_last = shape[1] == shape[2], shape[0] == shape[1]  # where pictures are square, that tells
    if square_first != square_last:
        return Layout(square_last, "the other two sides are equal")
    last = shape[0] > 4
    if last == (shape[2] <= 4):
        return Layout(last, "only that end is of 4 or fewer")
    return Layout(last, "a guess, both ends could be it", guessed=True)


def _read(raw: Any, leaf: _Leaf, batch: tuple[int, ...]) -> NDArray[np.generic]:
    name, space = _name(leaf.path), leaf.space
    array = np.asarray(raw)
    if array.shape != (*batch, *(space.shape or ())):
        raise ValueError(f"observation '{name}' has the shape {array.shape[len(batch) :]}, its space says {space.shape}")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"observation '{name}' holds {array.dtype}, not numbers")
    if isinstance(space, spaces.Discrete):
        return _one_hot(array - space.start, int(space.n), name)
    if isinstance(space, spaces.MultiDiscrete):
        sizes, digits = space.nvec.reshape(-1), (array - space.start).reshape(*batch, -1)
        return np.concatenate([_one_hot(digits[..., i], int(n), name) for i, n in enumerate(sizes)], -1)
    if len(leaf.part.shape) == 3:
        array = np.moveaxis(array, -1, -3) if leaf.layout is not None and leaf.layout.last else array
        array = array.reshape(*batch, *leaf.part.shape)
        return _bytes(array, name) if leaf.part.dtype == torch.uint8 else _single(array, name)
    if leaf.bounds is not None:
        array = (array - leaf.bounds[0]) / leaf.bounds[1]
    return _single(array.reshape(*batch, -1), name)


def _single(array: NDArray[Any], name: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        found = array.astype(np.float32)
    if not np.isfinite(found).all():
        raise ValueError(f"observation '{name}' holds NaN or infinity")
    return found


def _bytes(array: NDArray[Any], name: str) -> NDArray[np.uint8]:
    found = array.astype(np.uint8)
    if array.dtype not in (np.uint8, np.bool_) and not np.array_equal(found, array):
        raise ValueError(f"observation '{name}' holds numbers that are no bytes (0 to 255)")
    return found


def _bounds(space: spaces.Box) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Middle and half width, where a space of numbers says them and means them: such vectors are read as -1 .. 1."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if space.dtype == np.bool_ or not space.is_bounded() or np.abs([low, high]).max(initial=0) > 1e6:
        return None
    return (high + low) / 2, np.where(high > low, (high - low) / 2, 1.0)


def _outside(array: NDArray[Any], space: gym.Space[Any], name: str) -> str:
    if isinstance(space, spaces.Box):
        low, high, kind = space.low, space.high, space.low.dtype
    elif isinstance(space, spaces.MultiBinary):
        low, high, kind = np.zeros(space.shape), np.ones(space.shape), np.dtype(np.int8)
    else:
        return ""  # of choices, `read` takes nothing else
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(kind)
    kept = cast if kind.kind == "f" else array  # a double that rounds to the bound is forgiven
    outside = (kept < low) | (kept > high)
    if outside.any():
        i = np.unravel_index(int(np.argmax(outside)), outside.shape)
        return f"observation '{name}' holds {float(array[i]):g}, outside its bounds {float(low[i]):g} to {float(high[i]):g}"
    return f"observation '{name}' holds numbers that are no {kind}" if (kept != cast).any() else ""


def _one_hot(index: NDArray[Any], size: int, name: str) -> NDArray[np.float32]:
    if index.dtype.kind not in "iub" or ((index < 0) | (index >= size)).any():
        raise ValueError(f"observation '{name}' is {index}, outside its space of {size} values")
    return np.eye(size, dtype=np.float32)[index]
