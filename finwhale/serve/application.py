"""The web application: paths to handlers, errors of paths, and the life of the service.

It owns the table of routes and nothing of their bodies. A protocol adds its own with
`create_application(service, routes=...)`, made by `finwhale.serve.exchange.endpoint`. It refuses
cross-origin calls unless origins are named. A newcomer's mistake: running it in several processes;
each would load a model and have a cache of its own. Source: spec/multimodal-serving.md D.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finwhale.serve import metrics
from finwhale.serve.anthropic_api import anthropic_body
from finwhale.serve.endpoints import description, endpoints, is_anthropic
from finwhale.serve.errors import (
    MethodNotAllowedError,
    NotFoundError,
    ServeError,
    internal_error,
    openai_body,
)
from finwhale.serve.exchange import ApiKeys, Exchange, endpoint, json_response, note_refusal
from finwhale.serve.service import Service, new_id

_NO_SNIFF = ("x-content-type-options", "nosniff")


def create_application(
    service: Service, keys: ApiKeys | None = None, *, routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """Return the application; its start and end are those of the service's worker.

    keys    who may ask; None lets everybody
    routes  of other protocols and pages, behind the ones of this file
    """
    keys = keys or ApiKeys()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            # Connections are gone by now, so what still runs has no reader.
            await asyncio.to_thread(service.close, grace_s=0.0)

    async def ready(_: Request) -> Response:
        return _state(service.worker.busy)

    async def live(_: Request) -> Response:
        return _state(service.worker.dead)

    async def figures(_: Exchange) -> Response:
        return PlainTextResponse(
            service.metrics.text(), headers={"content-type": metrics.CONTENT_TYPE}
        )

    async def described(_: Request) -> Response:
        return Response(description(service.config), media_type="application/json")

    own: list[BaseRoute] = [
        Route("/health", ready, methods=["GET"]),
        Route("/readyz", ready, methods=["GET"]),
        Route("/livez", live, methods=["GET"]),
        Route("/openapi.json", described, methods=["GET"]),
        Route("/metrics", endpoint(service, keys, figures, openai_body), methods=["GET"]),
    ]
    for each in endpoints():
        answer = endpoint(service, keys, each.handler, each.error_body)
        # A model's name may hold slashes.
        path = each.path.replace("{name}", "{name:path}")
        own.append(Route(path, answer, methods=[each.method]))
    origins = service.config.cors_origins
    middleware = [Middleware(_NoSniff)]
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=["GET", "HEAD", "POST", "DELETE"],
                # Of an admitted origin: every SDK sends headers of its own, and more with each
                # version. Starlette answers with those that were asked for.
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after"],
            )
        )

    def refused(request: Request, error: ServeError, more: Mapping[str, str]) -> Response:
        note_refusal(service, request, error)
        body = _body_of(str(request.scope["path"]), error)
        return json_response(body, status_code=error.status, headers={**error.headers, **more})

    async def no_path(request: Request, _: Exception) -> Response:
        path = str(request.scope["path"])[:200]
        return refused(request, NotFoundError(f"no path {path!r}", code="not_found"), {})

    async def no_method(request: Request, error: Exception) -> Response:
        told = f"method {request.method[:20]!r} is not one of this path"
        headers = error.headers if isinstance(error, HTTPException) else None
        method = MethodNotAllowedError(told, code="method_not_allowed")
        return refused(request, method, headers or {})

    async def failed(request: Request, _: Exception) -> Response:
        # It stands outside of the middleware, and the server logs the exception.
        error = internal_error(new_id("req-"))
        return refused(request, error, dict([_NO_SNIFF]))

    application = Starlette(
        routes=[*own, *routes],
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={404: no_path, 405: no_method, Exception: failed},
    )
    # A client that was told another address would ask twice, and a body would travel twice.
    application.router.redirect_slashes = False
    return application


def _state(reason: str | None) -> Response:
    """Return what a probe is told: 200, or 503 and why."""
    if reason is None:
        return json_response({"status": "ok"})
    fields = {"status": "unavailable", "reason": reason}
    return json_response(fields, status_code=503, headers={"retry-after": "1"})


def _body_of(path: str, error: ServeError) -> dict[str, Any]:
    """Return the error in the protocol that the path belongs to."""
    return anthropic_body(error) if is_anthropic(path) else openai_body(error)


class _NoSniff:
    """Lets no browser take an answer for another kind than it says: errors quote values."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(*_NO_SNIFF)
            await send(message)

        await self._app(scope, receive, sent if scope["type"] == "http" else send)
