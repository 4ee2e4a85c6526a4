"""Requests that wait for a trial of their grammars, apart from all others.

A grammar that is not plainly small is compiled first in a process of its own, for up to a second
(finwhale/text/grammar_trial.py). A request that needs such a trial goes through one thread here,
one of a tenant at a time, within a bound of waiting requests and of seconds for all its grammars
together. All others, those of known grammars among them, never enter. It refuses with 503
`grammars_busy` or, where one tenant waits too often, 429. A newcomer's mistake: reading
`budget_s` as a bound on the wait; it begins with the request's own turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from finwhale.serve.errors import OverloadedError, RateLimitError
from finwhale.serve.planning import Plan
from finwhale.serve.preparation import Prepared, Preparer
from finwhale.text.grammar import end_trials
from finwhale.text.grammar_trial import TrialLateError

MAX_WAITING = 32
MAX_TENANT_WAITING = 8
BUDGET_S = 3.0
_RETRY_AFTER_S = 1


class _Tenant:
    """The requests of one tenant that are here, and the turn that they take."""

    def __init__(self) -> None:
        self.num, self.turn = 0, asyncio.Lock()


class GrammarQueue:
    """Prepares requests to one model; call it from one event loop.

    max_waiting         requests that may wait or be tried, of all tenants together
    max_tenant_waiting  the same of one tenant
    budget_s            wall seconds for the trials of one request
    """

    def __init__(
        self,
        preparer: Preparer,
        *,
        max_waiting: int = MAX_WAITING,
        max_tenant_waiting: int = MAX_TENANT_WAITING,
        budget_s: float = BUDGET_S,
    ) -> None:
        """Start nothing yet."""
        self._preparer, self._budget_s = preparer, budget_s
        self._max_waiting, self._max_tenant_waiting = max_waiting, max_tenant_waiting
        self._tenants: dict[str, _Tenant] = {}
        # One, since the trials themselves stand in a row.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finwhale-grammars")
        self._is_closed = False

    async def prepared(self, plan: Plan) -> Prepared:
        """Return what the engine is given for a plan.

        Raises OverloadedError, RateLimitError, and what `Preparer.prepared` raises.
        """
        with contextlib.suppress(TrialLateError):
            return await asyncio.to_thread(self._preparer.prepared, plan, trials_until_s=0.0)
        with self._place(plan.tenant) as turn:
            async with turn:
                self._check_open()
                loop = asyncio.get_running_loop()
                try:
                    future = loop.run_in_executor(self._thread, self._tried, plan)
                except RuntimeError:
                    # Another thread has closed the queue since the check.
                    raise _closed() from None
                return await future

    def close(self) -> None:
        """Refuse those that wait, and end the trial that runs."""
        self._is_closed = True
        # Those that wait still run, to be refused: a cancelled one would cancel its caller.
        self._thread.shutdown(wait=False)
        end_trials(self._preparer.tokenizer)

    @contextlib.contextmanager
    def _place(self, name: str) -> Iterator[asyncio.Lock]:
        tenant = self._tenants.get(name) or _Tenant()
        if tenant.num >= self._max_tenant_waiting:
            raise RateLimitError(
                f"{tenant.num} requests of this key wait for a trial of their grammars, "
                f"{self._max_tenant_waiting} may; try again later",
                code="grammars_busy",
                retry_after_s=_RETRY_AFTER_S,
            )
        num = sum(each.num for each in self._tenants.values())
        if num >= self._max_waiting:
            raise _busy(
                f"{num} requests wait for a trial of their grammars, {self._max_waiting} may"
            )
        self._tenants[name] = tenant
        tenant.num += 1
        try:
            yield tenant.turn
        finally:
            tenant.num -= 1
            if not tenant.num:
                del self._tenants[name]

    def _check_open(self) -> None:
        if self._is_closed:
            raise _closed()

    def _tried(self, plan: Plan) -> Prepared:
        """Prepare in the thread, within the budget."""
        try:
            self._check_open()
            until_s = time.monotonic() + self._budget_s
            return self._preparer.prepared(plan, trials_until_s=until_s)
        except TrialLateError:
            raise _busy(
                f"the grammars of this request were not tried within {self._budget_s:g} s; "
                "send fewer or simpler ones"
            ) from None
        finally:
            # One that was started after `close` would stay.
            if self._is_closed:
                end_trials(self._preparer.tokenizer)


def _closed() -> OverloadedError:
    return OverloadedError("the server is shutting down", code="unavailable")


def _busy(reason: str) -> OverloadedError:
    return OverloadedError(
        f"{reason}; try again later", code="grammars_busy", retry_after_s=_RETRY_AFTER_S
    )
