"""Functions of static tensors, replayed as CUDA graphs.

A training step is thousands of small kernels; a graph launches them as one. The first call of a key
runs as it stands (it compiles kernels and allocates optimiser state), the second is captured, every
later one replays what was captured on the same tensors. On a CPU, and with capture off, every call
runs. What is captured may not wait for the device, and reads its inputs from tensors that stay.
The easy mistake: passing a Python number that changes, which a replay would never see.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Captured:
    """Runs functions by key; `enabled` on a GPU captures them."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._seen: set[Hashable] = set()
        self._stream = torch.cuda.Stream() if enabled else None
        self._pool = None

    def __call__(self, key: Hashable, function: Callable[[], Result]) -> Result:
        """Run `function`, or replay it; returns its tensor, which a later replay overwrites."""
        if self._stream is None:
            return function()
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.replay()
            return result
        self._stream.wait_stream(torch.cuda.current_stream())
        if key not in self._seen:
            self._seen.add(key)
            with torch.cuda.stream(self._stream):
                result = function()
            torch.cuda.current_stream().wait_stream(self._stream)
            return result
        graph = torch.cuda.CUDAGraph()
        # Other models of this process may work on other streams meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = function()
        self._pool = graph.pool()
        self._graphs[key] = graph, result
        graph.replay()
        return result

    def forget(self) -> None:
        """Drop every graph: the next calls run, are captured and replayed anew."""
        self._graphs.clear()
        self._seen.clear()
        self._pool = None
