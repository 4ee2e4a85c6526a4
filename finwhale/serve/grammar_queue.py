"""Preparation of plans: those with a grammar in a queue of their own, with bounds.

A grammar may take a second of processor time to compile, so requests without one never wait behind
it, and one tenant cannot fill the queue. It refuses what would wait too long, with Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

from finwhale.serve.errors import OverloadedError, RateLimitError
from finwhale.serve.planning import Plan
from finwhale.serve.preparation import Prepared, Preparer

MAX_WAITING = 32
MAX_TENANT_WAITING = 16
_THREADS = 4


class GrammarQueue:
    """Prepares plans of one server; `prepared` is called in its event loop alone."""

    def __init__(self, preparer: Preparer) -> None:
        """Start nothing yet."""
        self._preparer = preparer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="finwhale-grammars")
        self._num_waiting: Counter[str] = Counter()

    async def prepared(self, plan: Plan) -> Prepared:
        """Return the plan prepared; raise ServeError for what cannot be served, or not now."""
        if not plan.has_grammar:
            return await asyncio.to_thread(self._preparer.prepared, plan)
        own, everyone = self._num_waiting[plan.tenant], self._num_waiting.total()
        if everyone >= MAX_WAITING or (plan.tenant and own >= MAX_TENANT_WAITING):
            error = OverloadedError if everyone >= MAX_WAITING else RateLimitError
            raise error(
                f"{everyone} grammars are being compiled or wait for it, {own} of this key; "
                "try again later",
                code="grammars",
                retry_after_s=1,
            )
        self._num_waiting[plan.tenant] += 1
        # Given back when the thread has ended: a client that leaves ends nothing there.
        work = self._threads.submit(self._preparer.prepared, plan)
        loop = asyncio.get_running_loop()

        def ended(_: Future[Prepared]) -> None:
            # A server that has ended counts no more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._ended, plan.tenant)

        work.add_done_callback(ended)
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Refuse what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, tenant: str) -> None:
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
