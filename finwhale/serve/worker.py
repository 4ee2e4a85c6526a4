"""One engine in one thread: requests go in through an inbox, outputs come back through callbacks.

It owns the only thread that touches the engine, the count of what is in flight and its limits,
and the way down: no new work, time for the running answers, then cancellation. It speaks token
ids and knows neither text nor HTTP. A newcomer's mistake: doing work in a `listener`, which is
called in the engine's thread; hand the output on and return.
Source: spec/multimodal-serving.md section D.2; docs/engine.md (one thread drives an engine).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from finwhale.engine.engine import QueueFullError
from finwhale.engine.request import RequestError, RequestOutput, SamplingParams
from finwhale.serve.errors import (
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
    RateLimitError,
    ServeError,
)
from finwhale.telemetry import get_logger

logger = get_logger("serve")

# After so many failed steps in a row, with no output of a sound request between them, the engine is
# taken for broken, and no request is accepted.
MAX_FAILED_STEPS = 3
_RETRY_AFTER_S = 1
_MOST_REST_S = 3600.0


class ServedEngine(Protocol):
    """What the worker needs of an engine; `finwhale.engine.engine.Engine` has it."""

    @property
    def has_work(self) -> bool:
        """Whether a step could bring anything."""
        ...

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: str = "",
    ) -> str:
        """Queue a request."""
        ...

    def cancel(self, request_id: str) -> bool:
        """End a request; its choices report "cancelled" in the next step."""
        ...

    def step(self) -> list[RequestOutput]:
        """Run one forward and return the increments."""
        ...

    def rest(self) -> float | None:
        """Free what is too old; return the seconds until there is more, None: nothing to free."""
        ...


# What a listener gets: "accepted" once, then outputs; or an error, and nothing after it.
Message = Literal["accepted"] | RequestOutput | ServeError
Listener = Callable[[Message], None]


@dataclass(slots=True)
class _Job:
    prompt: Sequence[int]
    params: SamplingParams
    request_id: str
    tenant: str
    listener: Listener
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_left = self.params.n


class Worker:
    """Drives `engine` in a thread of its own; `start` it once and `close` it once.

    max_requests         choices queued or running, of all tenants; one more is refused with 503
    max_tenant_requests  the same of one tenant; one more is refused with 429
    on_step              called in the thread after each step with its seconds and outputs
    """

    def __init__(
        self,
        engine: ServedEngine,
        *,
        max_requests: int = 256,
        max_tenant_requests: int = 128,
        on_step: Callable[[float, list[RequestOutput]], None] | None = None,
    ) -> None:
        """Keep the engine; nothing else may touch it from `start` to the end of `close`."""
        self._engine = engine
        self._max_requests, self._max_tenant_requests = max_requests, max_tenant_requests
        self._on_step = on_step
        self._inbox: queue.SimpleQueue[_Job | str | None] = queue.SimpleQueue()
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()
        self._num_in_flight: dict[str, int] = {}
        self._is_closing = False
        self._cancel_at: float | None = None
        self._failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="finwhale-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        """Choices that are queued or running."""
        with self._lock:
            return sum(self._num_in_flight.values())

    @property
    def _is_broken(self) -> bool:
        return self._failed_steps >= MAX_FAILED_STEPS

    @property
    def dead(self) -> str | None:
        """Why nothing but a restart helps; None while the engine's thread works."""
        if self._is_broken:
            return f"the engine failed {self._failed_steps} times in a row; restart the server"
        if not self._thread.is_alive():
            return "the engine's thread is not running"
        return None

    @property
    def unavailable(self) -> str | None:
        """Why no request is accepted; None while the worker serves."""
        return "the server is shutting down" if self._is_closing else self.dead

    @property
    def busy(self) -> str | None:
        """Why a request of one choice would be refused at this moment; None if it would not be."""
        num = self.num_in_flight
        is_full = num >= self._max_requests
        full = f"{num} requests are queued or running, {self._max_requests} may"
        return self.unavailable or (full if is_full else None)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        tenant: str,
        listener: Listener,
    ) -> None:
        """Queue a request, from any thread; `listener` is called in the engine's thread.

        tenant  cached prefixes are shared within it alone

        Raises OverloadedError or RateLimitError at once where a limit is reached. What the engine
        refuses comes to the listener, in place of "accepted".
        """
        with self._lock:
            reason = self.unavailable
            if reason is not None:
                raise OverloadedError(reason, code="unavailable", retry_after_s=_RETRY_AFTER_S)
            own, everyone = (
                self._num_in_flight.get(tenant, 0),
                sum(self._num_in_flight.values()),
            )
            if own + params.n > self._max_tenant_requests:
                raise RateLimitError(
                    f"{own} requests of this key are queued or running, "
                    f"{self._max_tenant_requests} may; try again later",
                    code="rate_limit_exceeded",
                    retry_after_s=_RETRY_AFTER_S,
                )
            if everyone + params.n > self._max_requests:
                raise OverloadedError(
                    f"{everyone} requests are queued or running, {self._max_requests} may; "
                    "try again later",
                    code="overloaded",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._num_in_flight[tenant] = own + params.n
            # Inside the lock: a job must not be queued behind the message that ends the thread.
            self._inbox.put(_Job(prompt, params, request_id, tenant, listener))

    def cancel(self, request_id: str) -> None:
        """End a request, from any thread; harmless if it has ended."""
        self._inbox.put(request_id)

    def close(self, *, grace_s: float = 0.0) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, cancel the rest and stop."""
        with self._lock:
            self._is_closing = True
            self._cancel_at = time.monotonic() + grace_s
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            # Nobody may wait for a thread that is gone.
            logger.exception("the engine's thread failed")
            self._failed_steps = MAX_FAILED_STEPS
        with self._lock:
            self._is_closing = True
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Job):
                self._jobs[message.request_id] = message
        for job in list(self._jobs.values()):
            self._fail(job, EngineFailedError("the server stopped before the answer was complete"))

    def _serve(self) -> None:
        while True:
            # Work of a broken engine is left alone, or this loop would spin on it.
            is_idle = not self._engine.has_work or self._is_broken
            if is_idle and self._is_closing and self._inbox.empty():
                break
            # While there is work, the inbox is looked at and not waited for.
            self._read_inbox(wait=is_idle and not self._is_closing)
            if self._cancel_at is not None and time.monotonic() >= self._cancel_at:
                for request_id in list(self._jobs):
                    self._engine_cancel(request_id)
            if self._engine.has_work and not self._is_broken:
                self._step()

    def _read_inbox(self, *, wait: bool) -> None:
        try:
            # Nobody asks an idle engine for anything, and what is too old would stay.
            left = self._engine.rest() if wait else None
            timeout = None if left is None else min(left, _MOST_REST_S)
            message = self._inbox.get(block=wait, timeout=timeout)
            while True:
                if isinstance(message, _Job):
                    self._add(message)
                elif message in self._jobs:
                    self._engine_cancel(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _add(self, job: _Job) -> None:
        try:
            self._engine.add(job.prompt, job.params, request_id=job.request_id, salt=job.tenant)
        except RequestError as error:
            is_too_long = error.field == "max_new_tokens"
            code = "context_length_exceeded" if is_too_long else "invalid_value"
            # Clients know the field by its name in the protocol.
            param = "max_tokens" if is_too_long else error.field
            text = str(error).replace("max_new_tokens", "max_tokens")
            self._fail(job, InvalidRequestError(text, param=param, code=code))
        except QueueFullError as error:
            self._fail(
                job,
                OverloadedError(str(error), code="overloaded", retry_after_s=_RETRY_AFTER_S),
            )
        except Exception as error:
            logger.exception("request %s was not accepted", job.request_id)
            self._fail(job, EngineFailedError(f"the engine failed: {type(error).__name__}"))
        else:
            self._jobs[job.request_id] = job
            self._tell(job, "accepted")

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            outputs = self._engine.step()
        except Exception:
            logger.exception("a step of the engine failed")
            self._failed_steps += 1
            self._fail_all()
            return
        self._judge(outputs)
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                continue
            if output.error is None:
                self._tell(job, output)
            else:
                # One choice that failed leaves no whole answer, so the others end with it.
                self._engine_cancel(job.request_id)
                self._fail(job, _error_of(output))
                continue
            if output.is_last:
                job.num_left -= 1
                self._release(job, 1)
                if not job.num_left:
                    del self._jobs[job.request_id]
        if self._is_broken:
            self._fail_all()
        if self._on_step is not None:
            self._on_step(time.perf_counter() - start, outputs)

    def _judge(self, outputs: Sequence[RequestOutput]) -> None:
        """Count a step in which the model's rows were at fault, or see that the engine works."""
        own = [output for output in outputs if output.request_id in self._jobs]
        failed = {output.request_id for output in own if output.error is not None}
        # Ends of requests that were cancelled, by a failed step or a client, say nothing of it.
        if any(o.request_id not in failed and o.finish_reason != "cancelled" for o in own):
            self._failed_steps = 0
        elif any(output.fault == "model" for output in own):
            self._failed_steps += 1

    def _fail_all(self) -> None:
        """End every request: a step that raised belongs to all of them."""
        for job in list(self._jobs.values()):
            self._engine_cancel(job.request_id)
            self._fail(job, EngineFailedError("the engine failed; the server's log says why"))

    def _engine_cancel(self, request_id: str) -> None:
        try:
            self._engine.cancel(request_id)
        except Exception:
            logger.exception("request %s could not be cancelled", request_id)

    def _fail(self, job: _Job, error: ServeError) -> None:
        self._jobs.pop(job.request_id, None)
        self._release(job, job.num_left)
        self._tell(job, error)

    def _release(self, job: _Job, count: int) -> None:
        with self._lock:
            left = self._num_in_flight[job.tenant] - count
            if left:
                self._num_in_flight[job.tenant] = left
            else:
                del self._num_in_flight[job.tenant]

    def _tell(self, job: _Job, message: Message) -> None:
        try:
            job.listener(message)
        except Exception:
            # A listener whose event loop is gone must not end the thread of the others.
            logger.exception("request %s has lost its listener", job.request_id)


def _error_of(output: RequestOutput) -> ServeError:
    """Return what a client learns of a choice that failed: 400 where its grammar is at fault."""
    if output.fault == "request":
        return InvalidRequestError(str(output.error), code="not_followed")
    return EngineFailedError(f"the engine failed: {output.error}")
