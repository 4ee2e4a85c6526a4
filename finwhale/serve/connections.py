"""Limits of open connections: how many, how long to a request header, how long a reader may stall.

`Connection` is uvicorn's h11 protocol with the limits that uvicorn leaves out; `Connections` knows
all connections of one server and looks at them about once a second. It owns the log line and the
figures of what it ended; bodies and answers are the application's. It refuses a new connection at
the bound only where no older one idles. A newcomer's mistake: `transport.close()` for a client
that does not read; it waits for the client to read what is left, so only `abort` ends it.
Source: RFC 9110 sections 15.5.9 and 15.6.4, RFC 9112 section 9.5 for timeouts of servers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import MutableMapping
from typing import Any, cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from finwhale.config import ConfigError
from finwhale.config.server import ServerConfig
from finwhale.serve.errors import (
    InvalidRequestError,
    OverloadedError,
    ServeError,
    SlowRequestError,
    openai_body,
)
from finwhale.serve.metrics import Gauges, Metrics
from finwhale.telemetry import get_logger

try:
    import resource
except ImportError:  # No such limit on this system.
    resource = None

logger = get_logger("serve")

# Connections that one turn of the event loop accepts. A new one is seen by `Connections` up to
# three turns later, so so many times three may be open above the bound for a moment.
ACCEPTS_PER_TURN = 16
# Files that are no connections: libraries, segments of a cache, pipes.
_RESERVED_FILES = 64 + 4 * ACCEPTS_PER_TURN
_LEAST_CONNECTIONS = 8
# A younger connection is not closed to make room: its request may be on the way.
_EVICTABLE_AFTER_S = 1.0
_EVICTABLE_TRIES = 8
# What the system holds of one answer. Linux wakes a writer when a third of it is free, so a slow
# reader's progress is seen in steps of about this size.
_SEND_BUFFER_BYTES = 128 << 10
# So much must leave within write_timeout_s, or everything.
_LEAST_PROGRESS_BYTES = 64 << 10
_LOG_INTERVAL_S = 10.0
# What may wait behind the request that is being answered.
_PIPELINED_BYTES = 64 << 10


def connection_limit(wanted: int) -> int:
    """Return how many connections may be open: `wanted`, or what the limit of open files allows.

    Raises ConfigError where that limit leaves no room for a server.
    """
    soft = None if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if resource is None or soft is None or soft == resource.RLIM_INFINITY:
        return wanted
    most = soft - _RESERVED_FILES
    if most < _LEAST_CONNECTIONS:
        raise ConfigError(
            f"open files: the process may open {soft}, expected at least "
            f"{_RESERVED_FILES + _LEAST_CONNECTIONS}; raise it with `ulimit -n`"
        )
    return min(wanted, most)


class Connections:
    """The open connections of one server; every method is called in its event loop but `_figures`.

    limit  connections that may be open, at most `max_connections`
    """

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        """Count what is ended into `metrics`, and let it tell the figures."""
        self.limit = connection_limit(config.max_connections)
        self._header_timeout_s = config.header_timeout_s
        self._write_timeout_s = config.write_timeout_s
        # The answer's own limit is the first one that is met: it can still say so.
        waits_s = config.body_timeout_s + config.write_timeout_s
        self._answer_timeout_s = config.request_timeout_s + waits_s
        self._interval_s = min(1.0, config.header_timeout_s / 4, config.write_timeout_s / 4)
        self._metrics = metrics
        self._open: set[Connection] = set()
        # Those that wait for a request header, the one that has waited longest first.
        self._waiting: dict[Connection, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._swept_at = 0.0
        self._clock_s = 0.0
        self._untold: Counter[str] = Counter()
        self._told_at = -math.inf
        metrics.watch(self._figures)

    @property
    def now_s(self) -> float:
        """Seconds that the event loop has run: its own gaps are nobody's slowness."""
        return self._clock_s + min(time.monotonic() - self._swept_at, 2 * self._interval_s)

    def protocol(self) -> type[Connection]:
        """Return the class for `uvicorn.Config(http=...)`."""
        return type("Connection", (Connection,), {"registry": self})

    def open(self, connection: Connection) -> bool:
        """Take a new connection; return False if there is no room for it."""
        if self._timer is None:
            self._clock_s, self._swept_at = self.now_s, time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._sweep)
        if len(self._open) >= self.limit:
            idle = self._idle()
            if idle is None:
                self.note("refused")
                return False
            self._end_waiting(idle, "no_room")
        self._open.add(connection)
        connection.begun_s = connection.progress_s = self.now_s
        self.wait(connection)
        return True

    def wait(self, connection: Connection) -> None:
        """Count the time of `connection` to a request header from this moment."""
        connection.waits_since_s = self.now_s
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def begin(self, connection: Connection) -> None:
        """Take a connection whose request header has come."""
        if connection in self._waiting:
            del self._waiting[connection]
            connection.begun_s = self.now_s

    def lost(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def note(self, reason: str) -> None:
        """Count a connection that the server ends; a log line tells many of them together."""
        self._metrics.count("connections_ended_total", reason=reason)
        self._untold[reason] += 1

    def _idle(self) -> Connection | None:
        """Return one of the connections that have idled longest, if closing it makes room."""
        for connection in itertools.islice(self._waiting, _EVICTABLE_TRIES):
            if self.now_s - connection.waits_since_s < _EVICTABLE_AFTER_S:
                break
            # One with an answer that nobody reads would stay open.
            if not connection.is_answering:
                return connection
        return None

    def _end_waiting(self, connection: Connection, reason: str) -> None:
        self.note(reason)
        self._waiting.pop(connection)
        connection.end_waiting()

    def _sweep(self) -> None:
        # First, so that nothing below can end the limits.
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._sweep)
        self._clock_s, self._swept_at = self.now_s, time.monotonic()
        for connection in list(self._waiting):
            if self._clock_s - connection.waits_since_s < self._header_timeout_s:
                break
            self._end_waiting(connection, "slow_header")
        for connection in list(self._open):
            is_stalled = connection.stalled_s(self._clock_s) >= self._write_timeout_s
            answers_s = self._clock_s - connection.begun_s if connection.is_answering else 0.0
            if is_stalled or answers_s >= self._answer_timeout_s:
                self.note("slow_reader")
                connection.transport.abort()
        if self._untold and self._swept_at - self._told_at >= _LOG_INTERVAL_S:
            told = ", ".join(f"{reason} {num}" for reason, num in sorted(self._untold.items()))
            logger.warning(
                "connections ended: %s; %d open, %d may", told, len(self._open), self.limit
            )
            self._told_at = self._swept_at
            self._untold.clear()
        if not self._open and not self._untold:
            self._timer.cancel()
            self._timer = None

    def _figures(self) -> Gauges:
        found = list(self._open)
        return {
            "open_connections": ("Connections that are open.", len(found)),
            "connection_limit": ("Connections that may be open.", self.limit),
            "responses_in_flight": (
                "Requests whose answer has not been sent, or not been read by the system yet.",
                sum(connection.is_answering for connection in found),
            ),
            "stalled_readers": (
                "Connections whose reader has taken nothing for two seconds or longer.",
                sum(connection.stalled_s(self.now_s) >= 2 for connection in found),
            ),
        }


class Connection(H11Protocol):
    """One connection; `Connections.protocol` gives the class its server's registry."""

    registry: Connections
    waits_since_s = 0.0
    begun_s = 0.0
    progress_s = 0.0
    _num_taken = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it where there is no room."""
        self._counted = _CountedTransport(transport)
        super().connection_made(cast("asyncio.Transport", self._counted))
        self.logger = cast("logging.Logger", _Log(self.logger))
        own = transport.get_extra_info("socket")
        if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if not self.registry.open(self):
            limit = self.registry.limit
            self._refuse(
                OverloadedError(
                    f"{limit} connections are open and all are busy; try again later",
                    code="connections",
                    retry_after_s=1,
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.registry.lost(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has come; see whether a header is among it."""
        super().handle_events()
        if self._has_request:
            self.registry.begin(self)
        # uvicorn stops reading at a second request, and would not see that the client leaves.
        if self.flow.read_paused and self.conn.their_state is h11.DONE:
            if len(self.conn.trailing_data[0]) <= _PIPELINED_BYTES:
                self.flow.resume_reading()
            else:
                self.registry.note("pipelined")
                self.transport.abort()

    def on_response_complete(self) -> None:
        """Wait for the next request, which may be here already."""
        if not self.transport.is_closing():
            self.registry.wait(self)
        super().on_response_complete()

    def shutdown(self) -> None:
        """End the connection, after its answer if one is on the way."""
        if not self.transport.is_closing():
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the body of the other errors."""
        self.registry.note("malformed")
        self._refuse(InvalidRequestError(msg, code="malformed_http"))

    def end_waiting(self) -> None:
        """Close a connection that waits for a header; 408 where a part of it has come."""
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            want = "within the time limit"
            self._refuse(SlowRequestError(f"header: expected whole {want}", code="slow_header"))
        else:
            self.transport.close()

    def stalled_s(self, clock_s: float) -> float:
        """Return for how many seconds something has waited of which the reader takes nothing."""
        num_unsent = self._counted.get_write_buffer_size()
        num_taken = self._counted.num_written - num_unsent
        if not num_unsent or num_taken - self._num_taken >= _LEAST_PROGRESS_BYTES:
            self._num_taken, self.progress_s = num_taken, clock_s
        return clock_s - self.progress_s

    @property
    def is_answering(self) -> bool:
        """Whether an answer is made, or is not yet with the system as a whole."""
        return self._has_request or self._counted.get_write_buffer_size() > 0

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ServeError) -> None:
        """Answer in place of the application, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # Another answer is on its way, and nothing can be said in the middle of it.
            self.transport.abort()
            return
        body = msgspec.json.encode(openai_body(error))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-content-type-options": "nosniff",
            **error.headers,
        }
        events = (
            h11.Response(status_code=error.status, headers=list(headers.items())),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()


class _CountedTransport:
    """A transport that counts what is written to it, so that what was taken can be told."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self.num_written = transport, 0

    def write(self, data: bytes) -> None:
        self.num_written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Log(logging.LoggerAdapter):
    """uvicorn's log without its warnings: one packet of a stranger causes one, a flood fills disks.

    Malformed requests are counted by `Connections` instead.
    """

    def __init__(self, own: logging.Logger) -> None:
        super().__init__(own)
        self.level = own.level

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, Any]:
        return msg, kwargs

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Write nothing."""
