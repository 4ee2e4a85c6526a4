"""The chat page at `/`, and the three small endpoints that only the page asks.

Owns the page's headers and the bodies of its endpoints; the chat itself goes through
/v1/chat/completions like any other client. It refuses resources of other places: the page is one
file, and its policy names its own script and style by their hashes. A newcomer's mistake: editing
the page while a server runs; the policy is made from the text that was read at the start.
Source: spec/multimodal-serving.md section D; Content Security Policy Level 3 for the hashes.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any

import msgspec
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from finwhale.chat_ui.comparison import MECHANISMS, NOT_SWITCHABLE, Comparison
from finwhale.chat_ui.demo_tools import MAX_KEYS, STORE, DemoTools
from finwhale.serve.errors import NotFoundError, openai_body
from finwhale.serve.exchange import ApiKeys, Exchange, Handler, endpoint, json_response
from finwhale.serve.planning import ChatRequest
from finwhale.serve.schema import decode
from finwhale.serve.service import Service

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class ToolBody(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a demo tool; `store` is the chat's own and comes back changed."""

    name: str
    arguments: str
    store: Annotated[dict[str, int], msgspec.Meta(max_length=MAX_KEYS)] | None = None


class CompareBody(msgspec.Struct, forbid_unknown_fields=True):
    """A conversation that ends with a reply, and the mechanisms to switch off."""

    messages: list[dict[str, Any]]
    off: list[str] = []
    tools: list[dict[str, Any]] | None = None
    thinking: bool | None = None
    effort: int | str | None = None


def page_text() -> str:
    """Return the page: HTML, style and script in one."""
    return (
        resources.files("finwhale.chat_ui").joinpath("chat_page.html").read_text(encoding="utf-8")
    )


def page_headers(page: str) -> dict[str, str]:
    """Return the headers that let a page do what it does itself, and nothing else."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = (
        "default-src 'none'",
        f"script-src {' '.join(hashes['script'])}",
        f"style-src {' '.join(hashes['style'])}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def page_routes(
    service: Service,
    keys: ApiKeys | None = None,
    *,
    bytes_per_token: float | None = None,
    comparison: Comparison | None = None,
) -> list[BaseRoute]:
    """Return the routes for `create_application(..., routes=)`.

    keys             as for the application; the page itself needs none and asks for one
    bytes_per_token  global KV of a token, `config.accounting.kv_bytes_per_token`; None: not told
    comparison       of the served model; None: the page has no mechanisms to switch
    """
    page = page_text()
    headers = page_headers(page)

    async def shown(_: Exchange) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def told(_: Exchange) -> Response:
        return json_response(_model_facts(service, bytes_per_token, comparison))

    async def tool(exchange: Exchange) -> Response:
        body = decode(await exchange.small_body(), ToolBody)
        tools = DemoTools(body.store)
        # A calculation may take a while, and others wait for this thread.
        result = await asyncio.to_thread(tools.run, body.name, body.arguments)
        return json_response({"result": result, "store": tools.store})

    async def compare(exchange: Exchange) -> Response:
        body = decode(await exchange.small_body(), CompareBody)
        if comparison is None:
            raise NotFoundError("this server compares nothing", code="not_found")
        # A client that has left waits for nothing; the thread ends its pass all the same.
        scored = asyncio.to_thread(_compared, comparison, body, exchange.tenant)
        return json_response(await exchange.while_connected(scored))

    def route(path: str, handler: Handler, method: str, own_keys: ApiKeys | None) -> Route:
        answer = endpoint(service, own_keys or ApiKeys(), handler, openai_body)
        return Route(path, answer, methods=[method])

    return [
        route("/", shown, "GET", None),
        route("/finwhale/model", told, "GET", keys),
        route("/finwhale/tool", tool, "POST", keys),
        route("/finwhale/compare", compare, "POST", keys),
    ]


def _model_facts(
    service: Service, bytes_per_token: float | None, comparison: Comparison | None
) -> Mapping[str, Any]:
    unsupported = {} if comparison is None else comparison.unsupported
    return {
        "model": service.config.model_names[0],
        "bytes_per_token": bytes_per_token,
        "context_tokens": service.preparer.context_tokens,
        "tools": DemoTools().declared,
        "store": STORE,
        "mechanisms": []
        if comparison is None
        else [
            {"name": name, "title": title, "what": what, "unsupported": unsupported.get(name)}
            for name, (title, what) in MECHANISMS.items()
        ],
        "not_switchable": NOT_SWITCHABLE,
    }


def _compared(comparison: Comparison, body: CompareBody, tenant: str) -> dict[str, Any]:
    *before, reply = body.messages or [{}]
    request = ChatRequest(
        messages=before,
        tools=body.tools,
        thinking=body.thinking,
        effort=body.effort,
        tenant=tenant,
    )
    return comparison.run(request, reply, body.off)
