"""One HTTP exchange: who asks, a body within its limits, an answer or a stream, and its errors.

What every protocol shares, so that a protocol's file holds its bodies alone. A handler takes an
`Exchange` and returns a response; `endpoint` gives it a request id, checks the key and turns what
it raises into the protocol's error body. It refuses names of the server that it was not told, and
keys that no header can carry. A newcomer's mistake: awaiting an answer without `while_connected`;
nobody would notice that the client has left.
Source: spec/multimodal-serving.md section D.2.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from finwhale.config import ConfigError
from finwhale.config.server import ServerConfig
from finwhale.serve.bodies import read_body
from finwhale.serve.body_process import Asked, Body, Options
from finwhale.serve.errors import (
    ForbiddenError,
    InvalidRequestError,
    ServeError,
    UnauthorizedError,
    internal_error,
)
from finwhale.serve.generation import Generation
from finwhale.serve.planning import Plan
from finwhale.serve.reading import SMALL_BODY_BYTES
from finwhale.serve.service import Service, new_id
from finwhale.telemetry import get_logger

logger = get_logger("serve")

KEEP_ALIVE = b": keep-alive\n\n"
# How long a stream with queued events keeps the event loop for itself.
_LONGEST_TURN_S = 0.005
# No standard has a status for a client that left; it is for the log and reaches nobody.
_CLIENT_LEFT = 499
_Result = TypeVar("_Result")
_KEY_LETTERS = "printable ASCII letters (codes 33 to 126)"

ErrorBody = Callable[[ServeError], Mapping[str, Any]]


class ClientLeftError(Exception):
    """The client closed the connection before its answer."""


class ApiKeys:
    """Keys that may ask, each with its tenant; without keys everybody may, as one tenant."""

    def __init__(self, tenant_of_key: Mapping[str, str] | None = None) -> None:
        """Keep digests alone, which also makes the look-up independent of how much matches.

        Raises ConfigError for a key that no header can carry.
        """
        for key in tenant_of_key or {}:
            if not _is_key(key):
                raise ConfigError(f"api_keys: got a key with other than {_KEY_LETTERS}")
        self._tenants = {_digest(key): name for key, name in (tenant_of_key or {}).items()}

    @classmethod
    def from_file(cls, path: Path) -> ApiKeys:
        """Read lines `KEY` or `KEY TENANT`; keys without a tenant are tenants of their own."""
        keys: dict[str, str] = {}
        # Bytes that are no UTF-8 become letters outside ASCII, which no key has.
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.split("\n"), 1):
            # At blanks of ASCII alone: another one may stand inside a key and must not cut it.
            words = [word.decode() for word in line.encode().split()]
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2 or words[0] in keys:
                want = "a new KEY, or KEY TENANT"
                raise ConfigError(f"api_key_file: {path}, line {number}: expected {want}")
            if not _is_key(words[0]):
                raise ConfigError(
                    f"api_key_file: {path}, line {number}: the key has other than {_KEY_LETTERS}, "
                    "which clients do not send alike; replace it with a key of those"
                )
            keys[words[0]] = words[1] if len(words) == 2 else f"key-{_digest(words[0])[:16]}"
        if not keys:
            raise ConfigError(f"api_key_file: {path} has no key; write one a line, or leave it out")
        return cls(keys)

    def tenant(self, request: Request) -> str:
        """Return whose request it is; raise UnauthorizedError without a known key."""
        if not self._tenants:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise UnauthorizedError(
                "no valid API key; send Authorization: Bearer KEY", code="invalid_api_key"
            )
        return tenant


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A request with its id, its tenant and the service that answers it."""

    request: Request
    request_id: str
    tenant: str
    service: Service
    # Of time.perf_counter; the time limit of an answer counts from it.
    arrived_s: float = field(default_factory=time.perf_counter)

    @property
    def config(self) -> ServerConfig:
        """The server's settings."""
        return self.service.config

    async def read(self, kind: type[Body[Options]]) -> Asked[Options]:
        """Return the body decoded and planned; raise ServeError for what could not be served."""
        with self.service.body_room.part(self.tenant) as take:
            raw = await self._body(take, self.config.max_body_bytes)
            return await self.while_connected(self.service.reader.read(raw, kind, self.tenant))

    async def begin(self, plan: Plan, *, request_id: str | None = None) -> Generation:
        """Queue what was planned and return it once the engine has accepted it."""
        return await self.service.begin(plan, request_id=request_id, started_s=self.arrived_s)

    async def small_body(self) -> bytes:
        """Return a body that is decoded in the event loop; raise for one of over 256 KiB, too."""
        limit = min(SMALL_BODY_BYTES, self.config.max_body_bytes)
        with self.service.body_room.part(self.tenant) as take:
            return await self._body(take, limit)

    async def _body(self, take: Callable[[int], None], limit: int) -> bytes:
        try:
            return await read_body(self.request, self.config, take, limit=limit)
        except ClientDisconnect:
            raise ClientLeftError from None

    async def while_connected(self, answer: Coroutine[Any, Any, _Result]) -> _Result:
        """Return what `answer` returns; if the client leaves first, cancel it and raise.

        To be called after the body, since it listens for the end of the connection. A result that
        comes as the client leaves has no reader: the generations in it are cancelled.
        """
        task = asyncio.ensure_future(answer)
        left = asyncio.ensure_future(_left(self.request.receive))
        is_taken = False
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
            await _stop(left)
            if not left.cancelled():
                raise ClientLeftError
            # Nothing is awaited from here on, so nobody can leave between this and the caller.
            is_taken = True
            return task.result()
        finally:
            left.cancel()
            if not is_taken:
                # Not behind the wait, which a stop of the server may cut short.
                task.add_done_callback(_discard)
                await _stop(task)


def _discard(ended: asyncio.Future[Any]) -> None:
    if not ended.cancelled() and ended.exception() is None:
        cancel_generations(ended.result())


def cancel_generations(result: object) -> None:
    """Cancel every Generation of a result that nobody will read: itself, or in lists and tuples."""
    if isinstance(result, Generation):
        result.cancel()
    elif isinstance(result, (list, tuple)):
        for part in result:
            cancel_generations(part)


Handler = Callable[[Exchange], Awaitable[Response]]


def endpoint(
    service: Service, keys: ApiKeys, handler: Handler, error_body: ErrorBody
) -> Callable[[Request], Awaitable[Response]]:
    """Return `handler` as a web endpoint: key, request id, and errors in the protocol's body."""

    async def answer(request: Request) -> Response:
        request_id = new_id("req-")
        tenant: str | None = None
        try:
            _check_host(request, service.config)
            tenant = keys.tenant(request)
            exchange = Exchange(
                request=request, request_id=request_id, tenant=tenant, service=service
            )
            response = await handler(exchange)
        except ServeError as error:
            note_refusal(service, request, error, request_id=request_id, tenant=tenant)
            response = json_response(
                error_body(error), status_code=error.status, headers=error.headers
            )
        except ClientLeftError:
            response = Response(status_code=_CLIENT_LEFT)
        except RecursionError:
            deep = InvalidRequestError("body: nested too deeply; flatten it", code="invalid_body")
            note_refusal(service, request, deep, request_id=request_id, tenant=tenant)
            response = json_response(error_body(deep), status_code=deep.status)
        except Exception:
            logger.exception("request %s failed", request_id)
            failed = internal_error(request_id)
            service.metrics.count("refused_total", status=str(failed.status))
            response = json_response(error_body(failed), status_code=failed.status)
        response.headers["x-request-id"] = request_id
        return response

    return answer


def note_refusal(
    service: Service,
    request: Request,
    error: ServeError,
    *,
    request_id: str | None = None,
    tenant: str | None = None,
) -> None:
    """Count a refusal and log where it happened; not its message, which may quote a user's text.

    tenant  its name, never a key; None where the request had no valid key
    """
    service.metrics.count("refused_total", status=str(error.status))
    note = {
        "request_id": request_id,
        "method": request.method[:20],
        "path": str(request.scope["path"])[:200],
        "status": error.status,
        "code": error.code,
        "param": error.param,
        "tenant": tenant,
    }
    logger.info("refused %s", json.dumps(note))


def _check_host(request: Request, config: ServerConfig) -> None:
    """Refuse a page that made its own name point here, which makes it one origin with us."""
    if not config.allowed_hosts:
        return
    try:
        name = urlsplit(f"//{request.headers.get('host', '')}").hostname
    except ValueError:
        name = None
    if name is None or _same_host(name) not in map(_same_host, config.allowed_hosts):
        want = f"one of {', '.join(config.allowed_hosts)}"
        raise ForbiddenError(f"host: got {str(name)[:80]!r}, expected {want}", code="host")


def _same_host(name: str) -> str:
    """Return the one spelling of a name, or of an address that has several."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower()


def json_response(
    fields: Any, *, status_code: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response of JSON."""
    return Response(
        msgspec.json.encode(fields),
        status_code=status_code,
        headers=dict(headers or {}),
        media_type="application/json",
    )


class EventStream(Response):
    """Server-sent events from an iterator of bytes, each a whole event.

    The iterator is closed when the client leaves, at once and not at the next event, so what it
    holds can let go; `on_close` is called in any case, also if it was never begun. A silence of
    `keep_alive_s` seconds sends `keep_alive`, a comment if not told otherwise. What the iterator
    raises becomes a last event, the bytes of `error_event`, since the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        *,
        keep_alive_s: float,
        on_close: Callable[[], None],
        error_event: Callable[[ServeError], bytes],
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        """Send what `source` yields."""
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        # Its length is not known.
        del self.headers["content-length"]
        self._source, self._keep_alive_s, self._on_close = source, keep_alive_s, on_close
        self._error_event, self._keep_alive = error_event, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the iterator ends or the client leaves."""
        self._num_sent = 0
        left = asyncio.ensure_future(_left(receive))
        sending: asyncio.Future[None] | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            sending = asyncio.ensure_future(self._send_all(send))
            while not (sending.done() or left.done()):
                num_sent = self._num_sent
                await asyncio.wait(
                    {sending, left},
                    timeout=self._keep_alive_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                is_silent = num_sent == self._num_sent
                if is_silent and not (sending.done() or left.done()):
                    await send(_body(self._keep_alive))
            if sending.done():
                sending.result()
                await send(_body(b"", is_last=True))
        finally:
            # First, since the waits below may be cut short at the server's end.
            self._on_close()
            await _stop(left)
            if sending is not None:
                await _stop(sending)
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        try:
            seen_s = time.perf_counter()
            async for event in self._source:
                await send(_body(event))
                self._num_sent += 1
                # Neither waits while events are queued and the connection takes them, and they are
                # many after a reader has stalled: others get their turn between.
                if time.perf_counter() - seen_s > _LONGEST_TURN_S:
                    await asyncio.sleep(0)
                    seen_s = time.perf_counter()
        except ServeError as error:
            await send(_body(self._error_event(error)))
        except Exception:
            request_id = self.headers.get("x-request-id", "")
            logger.exception("stream of request %s failed", request_id)
            await send(_body(self._error_event(internal_error(request_id))))


def _body(event: bytes, *, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": event, "more_body": not is_last}


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it has let go."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        # Read, so that the loop does not report it as lost.
        task.exception()


def _is_key(key: str) -> bool:
    """Whether every client sends it in a header with the same bytes."""
    return bool(key) and all("!" <= letter <= "~" for letter in key)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).hexdigest()
