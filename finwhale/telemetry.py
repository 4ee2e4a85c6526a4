"""Logging and counters for every room; imports nothing of the package.

A library configures no handlers, so importing finwhale prints nothing. The command line calls
`configure` once. The easy mistake: printing from a room, which no caller can silence.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def get_logger(room: str) -> logging.Logger:
    """Return the logger of a room, a child of `finwhale`."""
    return logging.getLogger(f"finwhale.{room}")


def configure(*, verbose: bool = False) -> None:
    """Send the package's log to standard error, one line a record. Calling it twice is harmless."""
    root = logging.getLogger("finwhale")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        root.addHandler(handler)
    root.setLevel(logging.DEBUG if verbose else logging.INFO)


@contextmanager
def span(name: str, log: logging.Logger) -> Iterator[None]:
    """Log at debug level how many seconds the block took, also when it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        log.debug("%s: %.3f s", name, time.perf_counter() - start)
