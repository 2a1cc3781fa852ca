"""CUDA graphs: a function of tensors, recorded once and replayed from then on. On any other device it is the plain function.

What is recorded must not look at a number on the host, and may depend on what lies outside of its arguments only through tensors
that stay where they are: the ring of the replay, weights, the optimiser's state, `Signals`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3
"""Calls that are made in the plain way first, on the stream of the recording: libraries set themselves up in them. They count: an
update that warms up is an update."""

Tensors = tuple[Tensor, ...]


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    places: list[Tensor]
    result: Tensors


class Captured:
    """`function(*tensors) -> tensors`, replayed as a graph on CUDA; one graph for each set of shapes."""

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
            return self.function(*args)
        key = tuple((tuple(a.shape), a.dtype) for a in args)
        if key not in self.recorded:
            self.calls[key] = self.calls.get(key, 0) + 1
            if self.calls[key] <= WARM_UP:
                return self._aside(args)
            self.recorded[key] = self._record(args)
        known = self.recorded[key]
        for place, arg in zip(known.places, args, strict=True):
            place.copy_(arg, non_blocking=True)
        known.graph.replay()
        return known.result

    def _aside(self, args: Tensors) -> Tensors:
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            result = self.function(*(a.to(self.device) for a in args))
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return result

    def _record(self, args: Tensors) -> _Recorded:
        places = [a.to(self.device, copy=True) for a in args]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            result = self.function(*places)
        return _Recorded(graph, places, result)
