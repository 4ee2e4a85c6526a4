"""From the bytes of a body to its plan, without holding up the event loop.

Small bodies are planned in a thread, where their longest call lasts milliseconds, large ones in a
child process (finwhale/serve/body_process.py). Bytes come from finwhale/serve/bodies.py.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from finwhale.serve.body_process import Asked, Body, BodyProcess, Options, plan_body
from finwhale.serve.planning import Planner

# Planned in a thread up to here: decode, render and encode keep Python's lock for up to 26 ms.
SMALL_BODY_BYTES = 256 << 10


class BodyReader:
    """Reads the bodies of one server.

    timeout_s  time for one large body
    """

    def __init__(
        self,
        planner: Planner,
        *,
        timeout_s: float,
        small_body_bytes: int = SMALL_BODY_BYTES,
    ) -> None:
        """Start nothing yet: the child starts with the first large body or with `warm_up`."""
        self._planner, self._small_body_bytes = planner, small_body_bytes
        self._child = BodyProcess(planner, timeout_s=timeout_s)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finwhale-bodies")

    def warm_up(self) -> None:
        """Start the child; blocks until it can take a body."""
        self._child.start()

    async def read(self, raw: bytes, kind: type[Body[Options]], tenant: str) -> Asked[Options]:
        """Return the body decoded and planned; raise ServeError for what could not be served."""
        if len(raw) <= self._small_body_bytes:
            return await asyncio.to_thread(plan_body, self._planner, raw, kind, tenant)
        loop = asyncio.get_running_loop()
        # One at a time of each tenant, so that nobody waits for a second body of another.
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn:
            return await loop.run_in_executor(self._thread, self._child.plan, raw, kind, tenant)

    def close(self) -> None:
        """End the child. Bodies that wait are refused."""
        self._child.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
