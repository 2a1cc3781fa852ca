"""CUDA graphs: a function of tensors, recorded once and replayed from then on. On any other device it is the plain function.

What is recorded must not look at a number on the host, and may depend on what lies outside of its arguments only through tensors
that stay where they are: the ring of the replay, weights, the optimiser's state, `Signals`.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

WARM_UP = 3
"""Calls that are made in the plain way first, on the stream of the recording: libraries set themselves up in them. They count: an
update that warms up is an update."""
MOST_SHAPES = 8
"""Recorded of one function: each keeps memory of its own. Calls with further shapes stay plain ones."""

Tensors = tuple[Tensor, ...]


class Parcel:
    """Tensors of the host that go to a device together: one copy from pinned memory, for which nobody waits."""

    def __init__(self, like: Sequence[Tensor], device: torch.device):
        self.kinds = [(x.dtype, x.shape, x.numel() * x.element_size()) for x in like]
        self.arrived = torch.empty(sum(_aligned(size) for _, _, size in self.kinds), dtype=torch.uint8, device=device)
        self.places = list(self._split(self.arrived))
        """Where they come out, always the same memory."""

    def send(self, tensors: Iterable[Tensor]) -> None:
        """They may be written over as soon as this returns: PyTorch keeps the pinned copy until it has gone."""
        packed = torch.empty(len(self.arrived), dtype=torch.uint8, pin_memory=self.arrived.device.type == "cuda")
        for place, x in zip(self._split(packed), tensors, strict=True):
            place.copy_(x)
        self.arrived.copy_(packed, non_blocking=True)

    def _split(self, memory: Tensor) -> Iterator[Tensor]:
        at = 0
        for dtype, shape, size in self.kinds:
            yield memory[at : at + size].view(dtype).view(shape)
            at += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def fetch(x: Tensor) -> Callable[[], Tensor]:
    """`x` on its way to the host. The result waits for it, and for nothing that the device is asked for in between."""
    if x.device.type != "cuda":
        return x.cpu
    there, arrived = x.to("cpu", non_blocking=True), torch.cuda.Event()  # into pinned memory
    arrived.record(torch.cuda.current_stream(x.device))

    def wait() -> Tensor:
        arrived.synchronize()
        return there

    return wait


@dataclass
class _Recorded:
    graph: Any
    parcel: Parcel
    places: list[Tensor]
    result: Tensors


class Captured:
    """`function(*tensors) -> tensors`, replayed as a graph on CUDA; one graph for each set of shapes.

    The tensors may lie on the host: they are sent, and not waited for. Where recording fails, there is a warning, and the plain
    function from then on.
    """

    strict: ClassVar[bool] = False
    """Raise where recording fails; for tests, which would else compare the plain function with itself."""

    def __init__(self, function: Callable[..., Tensors], device: torch.device, record: bool):
        self.function, self.device = function, device
        self.calls: dict[Any, int] = {}
        self.recorded: dict[Any, _Recorded] = {}
        self.stream = torch.cuda.Stream(device) if record and device.type == "cuda" else None

    @property
    def records(self) -> bool:
        """Whether there is anything to record here."""
        return self.stream is not None

    def __call__(self, *args: Tensor) -> Tensors:
        """The results are the caller's own until the next call with these shapes."""
        if self.stream is None:
            return self._plain(args)
        key = tuple((tuple(a.shape), a.dtype, a.device.type) for a in args)
        if key not in self.recorded:
            if len(self.recorded) >= MOST_SHAPES:
                return self._plain(args)
            self.calls[key] = self.calls.get(key, 0) + 1
            if self.calls[key] <= WARM_UP:
                return self._aside(args)
            try:
                self.recorded[key] = self._record(args)
            except Exception as error:
                self._give_up(error)
                return self._plain(args)
        known = self.recorded[key]
        known.parcel.send(a for a in args if _on_host(a))
        for place, arg in zip(known.places, args, strict=True):
            if not _on_host(arg):
                place.copy_(arg)
        known.graph.replay()
        return known.result

    def _plain(self, args: Tensors) -> Tensors:
        return self.function(*(a.to(self.device) for a in args))

    def _aside(self, args: Tensors) -> Tensors:
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            result = self._plain(args)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return result

    def _record(self, args: Tensors) -> _Recorded:
        parcel = Parcel([a for a in args if _on_host(a)], self.device)
        sent = iter(parcel.places)
        places = [next(sent) if _on_host(a) else torch.empty_like(a) for a in args]
        graph, result = self._capture(places)
        return _Recorded(graph, parcel, places, result)

    def _capture(self, places: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensors]:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # thread_local: another thread that allocates memory meanwhile does no harm
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                result = self.function(*places)
        except Exception:
            torch.cuda.set_stream(before)  # where a recording can't be ended, torch.cuda.graph does not return to it
            torch.cuda.synchronize(self.device)
            raise
        return graph, result

    def _give_up(self, error: Exception) -> None:
        """Nothing of what failed was run, so that the plain function may take its place in the middle of a run."""
        if self.strict:
            raise error
        self.stream = None
        self.recorded.clear()
        cause = error.__context__ or error  # the end of a broken recording raises an error of its own, which says nothing
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        warnings.warn(f"a CUDA graph could not be recorded, and training goes on without it, slower ({reason})", stacklevel=3)


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"
