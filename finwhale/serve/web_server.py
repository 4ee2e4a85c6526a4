"""The process's web server: its socket, uvicorn with this package's limits, and the way down.

It owns what `finwhale serve`, the load benchmark and the tests need alike: a socket that is bound
before it listens, the settings of uvicorn, and an end by SIGTERM or SIGINT that is an end in order.
It refuses websockets, which nothing here speaks. A newcomer's mistake: listening before the model
is ready; whoever connects then waits, and a health check takes the open port for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.server import HANDLED_SIGNALS

from finwhale.serve.connections import ACCEPTS_PER_TURN, Connections
from finwhale.serve.service import Service

# Connections that the system keeps until they are accepted.
_BACKLOG = 256
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet; port 0 takes a free one.

    Raises OSError that names host and port, for one that is taken or not this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name often has addresses of both kinds, and some clients try the older kind alone.
        family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        # The protocol is named, or asyncio leaves Nagle's algorithm on: on a kept connection the
        # body of each answer then waits 40 ms for the acknowledgement of its head.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise OSError(error.errno, f"--host: {host!r}: {error.strerror}") from None
    try:
        # A port whose last connections have just ended is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _not_bound(host, port, error) from None
    return listener


def listen(listener: socket.socket) -> None:
    """Open the bound socket for connections; raises OSError like `bind`."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _not_bound(host, port, error) from None


def _not_bound(host: str, port: int, error: OSError) -> OSError:
    remedy = "; choose another --port" if error.errno == errno.EADDRINUSE else ""
    return OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}{remedy}")


def web_server(application: Starlette, service: Service, *, log_level: str = "warning") -> Server:
    """Return a server of `application`; call `run(sockets=[listener])` on it, once."""
    connections = Connections(service.config, service.metrics)
    return Server(
        uvicorn.Config(
            application,
            http=connections.protocol(),
            ws="none",
            lifespan="on",
            # Requests are logged by the service, with their tokens.
            access_log=False,
            log_level=log_level,
            server_header=False,
            # Also the number of connections that one turn of the event loop accepts.
            backlog=ACCEPTS_PER_TURN,
            timeout_keep_alive=math.ceil(service.config.header_timeout_s),
            timeout_graceful_shutdown=max(1, round(service.config.shutdown_grace_s)),
        ),
        connections,
    )


class Server(uvicorn.Server):
    """uvicorn's server, which ends in order on SIGTERM and SIGINT and returns from `run`."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        """Serve with `config`, whose protocol reports to `connections`."""
        super().__init__(config)
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, with a queue of connections that is longer than one turn of the loop takes."""
        asyncio.get_running_loop().set_exception_handler(self._lost)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let the first signal end the server in order, and a second Ctrl-C at once.

        uvicorn raises the signal again after its end, and the process would not end with 0.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _lost(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count connections that no file was free for; the loop has a traceback for each."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_FILES:
            self._connections.note("no_file")
        else:
            loop.default_exception_handler(context)
