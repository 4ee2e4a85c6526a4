"""Functions of static tensors, replayed as CUDA graphs.

A training step is thousands of small kernels; a graph launches them as one. A key runs as it is in
the first step that uses it (kernels are compiled, optimiser state is allocated), is captured in the
next step, and replayed from then on. The step counts, not the call: a pass that several parts of
one step share must not be captured before the pass that makes the gradients it adds to. On a CPU,
and with capture off, every call runs. What is captured may not wait for the device, and reads its
inputs from tensors that stay. The easy mistake: a Python number that changes, which a replay would
never see.
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
        self._first_step: dict[Hashable, int] = {}
        self._step = 0
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
        if self.runs_plainly(key):
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

    def begin_step(self) -> None:
        """Say that a step begins: what ran first in an earlier one may be captured now."""
        self._step += 1

    def runs_plainly(self, key: Hashable) -> bool:
        """Return whether `key` has to run as it stands: it was not used in an earlier step."""
        return self._first_step.setdefault(key, self._step) == self._step

    def forget(self) -> None:
        """Drop every graph: the next calls run, are captured and replayed anew."""
        self._graphs.clear()
        self._first_step.clear()
        self._pool = None
