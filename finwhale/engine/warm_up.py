"""Compiling the engine's kernels before somebody waits for them.

It owns one small run that meets every compiled kernel with the types that any served model gives
it; the compiler keeps what it made on disk, so later starts load it within a second. It refuses
nothing: without a compiler there is nothing to do. A newcomer's mistake: a list of kernels to
compile; the run itself is the list, and a kernel that an engine calls cannot be missing from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from finwhale.checkpoint.hashed_weights import fill_hashed
from finwhale.config import preset
from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine
from finwhale.engine.invariance import numba_missing
from finwhale.engine.request import SamplingParams
from finwhale.model import Backbone, Numerics
from finwhale.ops import FAST
from finwhale.telemetry import get_logger

logger = get_logger("kernels")


def compile_kernels() -> int:
    """Run a small engine once; return how many functions had to be compiled for it."""
    if numba_missing() is not None:
        return 0
    began_s = time.perf_counter()
    with _compilations() as compiled, _silent("engine"):
        config = preset("unit")
        c = config.text_config
        compressed = torch.arange(c.vocab_size) % c.engram_compressed_vocab_size
        model = Backbone(config, compressed, Numerics(), FAST)
        fill_hashed(model, 0)
        engine = Engine(model.eval(), EngineConfig(kernels="numba"))
        # Long enough to search the candidate pool and to decode shared rows once.
        engine.generate([list(range(1, 90)), [1, 2, 3]], SamplingParams(max_new_tokens=2))
        engine.close()
    if compiled:
        logger.info("kernels compiled in %.0f s", time.perf_counter() - began_s)
    return len(compiled)


@contextmanager
def _silent(room: str) -> Iterator[None]:
    """Keep a room's log below warnings back: the small engine's memory plan is nobody's."""
    own = get_logger(room)
    before = own.level
    own.setLevel(logging.WARNING)
    try:
        yield
    finally:
        own.setLevel(before)


@contextmanager
def _compilations() -> Iterator[list[str]]:
    """Give a list that grows with every function that is compiled; the first one is logged."""
    from numba.core import event

    compiled: list[str] = []

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            if not compiled:
                logger.info("compiling kernels (first start only, about half a minute)")
            compiled.append(str(event.data.get("dispatcher")))

        def on_end(self, event: Any) -> None:
            """Do nothing: the start has counted it."""

    listener = Listener()
    event.register("numba:compile", listener)
    try:
        yield compiled
    finally:
        event.unregister("numba:compile", listener)
