"""The web application: paths to handlers, errors of paths, and the life of the service.

It owns the table of routes and nothing of their bodies. A protocol adds its own with
`create_application(service, routes=...)`, made by `finwhale.serve.exchange.endpoint`. It refuses
cross-origin calls unless origins are named. A newcomer's mistake: running it in several processes;
each would load a model and have a cache of its own. Source: spec/multimodal-serving.md D.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from finwhale.serve import metrics
from finwhale.serve.anthropic_api import anthropic_body
from finwhale.serve.endpoints import description, endpoints, is_anthropic
from finwhale.serve.errors import MethodNotAllowedError, NotFoundError, ServeError, openai_body
from finwhale.serve.exchange import ApiKeys, Exchange, endpoint, json_response
from finwhale.serve.service import Service


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

    async def health(_: Request) -> Response:
        reason = service.worker.unavailable
        fields = {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
        return json_response(fields, status_code=200 if reason is None else 503)

    async def figures(_: Exchange) -> Response:
        return PlainTextResponse(
            service.metrics.text(), headers={"content-type": metrics.CONTENT_TYPE}
        )

    async def described(_: Request) -> Response:
        return Response(description(service.config), media_type="application/json")

    own: list[BaseRoute] = [
        Route("/health", health, methods=["GET"]),
        Route("/openapi.json", described, methods=["GET"]),
        Route("/metrics", endpoint(service, keys, figures, openai_body), methods=["GET"]),
    ]
    for each in endpoints():
        answer = endpoint(service, keys, each.handler, each.error_body)
        # A model's name may hold slashes.
        path = each.path.replace("{name}", "{name:path}")
        own.append(Route(path, answer, methods=[each.method]))
    origins = service.config.cors_origins
    middleware = []
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-api-key", "anthropic-version"],
            )
        )
    application = Starlette(
        routes=[*own, *routes],
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={404: _no_path, 405: _no_method},
    )
    # A client that was told another address would ask twice, and a body would travel twice.
    application.router.redirect_slashes = False
    return application


async def _no_path(request: Request, _: Exception) -> Response:
    path = str(request.scope["path"])
    error = NotFoundError(f"no path {path[:200]!r}", code="not_found")
    return json_response(_body_of(path, error), status_code=error.status)


async def _no_method(request: Request, error: Exception) -> Response:
    refused = MethodNotAllowedError(
        f"method {request.method[:20]!r} is not one of this path", code="method_not_allowed"
    )
    headers = error.headers if isinstance(error, HTTPException) else None
    body = _body_of(str(request.scope["path"]), refused)
    return json_response(body, status_code=refused.status, headers=headers)


def _body_of(path: str, error: ServeError) -> dict[str, Any]:
    """Return the error in the protocol that the path belongs to."""
    return anthropic_body(error) if is_anthropic(path) else openai_body(error)
