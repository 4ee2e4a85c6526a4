"""From the bytes of a body to its plan, without holding up the event loop.

Small bodies are planned in a thread, where their longest call lasts milliseconds, large ones in a
child process (finwhale/serve/body_process.py). It also owns the bound on the bytes of all bodies
that are being read, so that many clients together cannot fill the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from finwhale.serve.body_process import Asked, Body, BodyProcess, Options, plan_body
from finwhale.serve.errors import OverloadedError
from finwhale.serve.planning import Planner

# Planned in a thread up to here: decode, render and encode keep Python's lock for up to 26 ms.
SMALL_BODY_BYTES = 256 << 10


class BodyReader:
    """Reads the bodies of one server.

    max_pending_bytes  bytes of all bodies that arrive or wait for their plan; more are refused
    timeout_s          time for one large body
    """

    def __init__(
        self,
        planner: Planner,
        *,
        max_pending_bytes: int,
        timeout_s: float,
        small_body_bytes: int = SMALL_BODY_BYTES,
    ) -> None:
        """Start nothing yet: the child starts with the first large body or with `warm_up`."""
        self._planner, self._small_body_bytes = planner, small_body_bytes
        self._max_pending_bytes, self._pending_bytes = max_pending_bytes, 0
        self._child = BodyProcess(planner, timeout_s=timeout_s)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finwhale-bodies")

    def warm_up(self) -> None:
        """Start the child; blocks until it can take a body."""
        self._child.start()

    @contextmanager
    def room(self) -> Iterator[Room]:
        """Give room for one body that arrives in pieces; it is given back at the end."""
        room = Room(self)
        try:
            yield room
        finally:
            self._pending_bytes -= room.num_bytes

    async def read(self, raw: bytes, kind: type[Body[Options]], tenant: str) -> Asked[Options]:
        """Return the body decoded and planned; raise ServeError for what could not be served."""
        if len(raw) <= self._small_body_bytes:
            return await asyncio.to_thread(plan_body, self._planner, raw, kind, tenant)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._child.plan, raw, kind, tenant)

    def close(self) -> None:
        """End the child. Bodies that wait are refused."""
        self._child.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _take(self, num_bytes: int) -> None:
        if self._pending_bytes + num_bytes > self._max_pending_bytes:
            raise OverloadedError(
                f"bodies of {self._pending_bytes:,} bytes are being read, "
                f"{self._max_pending_bytes:,} may; try again later",
                code="overloaded",
                retry_after_s=1,
            )
        self._pending_bytes += num_bytes


class Room:
    """The share of one body in the bytes that may be pending."""

    def __init__(self, reader: BodyReader) -> None:
        """Begin with nothing."""
        self._reader, self.num_bytes = reader, 0

    def take(self, num_bytes: int) -> None:
        """Count `num_bytes` more; raise OverloadedError where all bodies together are too much."""
        self._reader._take(num_bytes)
        self.num_bytes += num_bytes
