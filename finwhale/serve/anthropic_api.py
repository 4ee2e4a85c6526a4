"""The Anthropic protocol: messages, whole or as events, counts of tokens, and models.

It owns the answers: pieces of an answer become blocks; messages_body.py has the requests. It
refuses Opus models, which the hosted service does not answer with Flash. A newcomer's mistake:
`input_tokens` counts the prompt tokens that no cache had, but not in a `message_start` that is
sent before the first token: there it counts the whole prompt, and the last event corrects it.
Source: spec/multimodal-serving.md section D.3.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from finwhale.config.server import ServerConfig
from finwhale.serve.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServeError,
    in_words_of,
)
from finwhale.serve.exchange import EventStream, Exchange, json_response
from finwhale.serve.generation import ChoiceEvent, Generation, Usage
from finwhale.serve.messages_body import CountTokensBody, MessagesBody
from finwhale.serve.notes import note_headers
from finwhale.serve.openai_api import models, one_model, served_model
from finwhale.serve.planning import MAX_NEW_TOKENS
from finwhale.serve.service import new_id
from finwhale.text.output_parser import Delta

# A stream says that it has begun after this time, whether there is a token or not.
BEGIN_WITHIN_S = 1.0
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {"server_error": "api_error"}
_WORDS = {
    "messages": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


async def messages(exchange: Exchange) -> Response:
    """Answer POST /anthropic/v1/messages."""
    asked = await exchange.read(MessagesBody)
    model = claude_model(asked.options.model, exchange.config)
    message_id = new_id("msg_")
    begun = exchange.begin(asked.plan, request_id=message_id)
    if asked.options.stream:
        generation = await exchange.while_connected(begun)
        keep_alive_s = exchange.config.keep_alive_s
        response: Response = EventStream(
            # The beginning comes before the first ping.
            _events(generation, model, begin_within_s=min(BEGIN_WITHIN_S, keep_alive_s / 2)),
            keep_alive_s=keep_alive_s,
            on_close=generation.cancel,
            error_event=lambda error: _event(anthropic_body(error)),
            keep_alive=_PING,
        )
    else:

        async def collected() -> tuple[Generation, dict[str, Any]]:
            generation = await begun
            blocks, last = AnswerBlocks(message_id), ChoiceEvent(index=0)
            async with aclosing(generation.events()) as events:
                async for event in events:
                    for _ in blocks.take(event.deltas):
                        pass
                    last = event
            for _ in blocks.close():
                pass
            message = _message(generation, model, blocks.content())
            return generation, {**message, **_stop_fields(last)}

        generation, whole = await exchange.while_connected(collected())
        response = json_response(whole)
    # The name that Anthropic's clients show.
    response.headers["request-id"] = exchange.request_id
    response.headers.update(note_headers(generation.notes, exchange.request_id))
    return response


async def count_tokens(exchange: Exchange) -> Response:
    """Answer POST /v1/messages/count_tokens: the tokens of the prompt, without an answer."""
    asked = await exchange.read(CountTokensBody)
    claude_model(asked.options.model, exchange.config)
    return json_response(
        {"input_tokens": len(asked.plan.prompt)},
        headers=note_headers(asked.plan.notes, exchange.request_id),
    )


async def claude_models(exchange: Exchange) -> Response:
    """Answer GET /v1/models in Anthropic's form, with its paging."""
    query, names = exchange.request.query_params, exchange.config.model_names
    told = query.get("limit", "20")
    if not (told.isascii() and told.isdigit() and 1 <= int(told[:6]) <= 1000):
        raise InvalidRequestError(f"limit: got {told[:20]!r}, expected 1 to 1000", param="limit")
    first, last = 0, len(names)
    for field in ("after_id", "before_id"):
        name = query.get(field)
        if name is None:
            continue
        if name not in names:
            raise InvalidRequestError(
                f"{field}: got {name[:80]!r}, expected one of {', '.join(names)}", param=field
            )
        if field == "after_id":
            first = names.index(name) + 1
        else:
            last = names.index(name)
    page = names[first:last]
    # Before an id are the nearest ones, not the first ones.
    cut = page[-int(told) :] if "before_id" in query else page[: int(told)]
    return json_response(
        {
            "data": [_model(name, exchange) for name in cut],
            "has_more": len(cut) < len(page),
            "first_id": cut[0] if cut else None,
            "last_id": cut[-1] if cut else None,
        }
    )


async def models_of_either(exchange: Exchange) -> Response:
    """Answer GET /v1/models: clients of Anthropic name their protocol's version in a header."""
    is_claude = "anthropic-version" in exchange.request.headers
    return await (claude_models if is_claude else models)(exchange)


async def one_model_of_either(exchange: Exchange) -> Response:
    """Answer GET /v1/models/{name} in the caller's protocol."""
    is_claude = "anthropic-version" in exchange.request.headers
    return await (one_claude_model if is_claude else one_model)(exchange)


async def one_claude_model(exchange: Exchange) -> Response:
    """Answer GET /v1/models/{name} in Anthropic's form."""
    name, names = exchange.request.path_params["name"], exchange.config.model_names
    if name not in names:
        raise NotFoundError(
            f"model: got {name[:80]!r}, expected one of {', '.join(names)}",
            param="model",
            code="model_not_found",
        )
    return json_response(_model(name, exchange))


def _model(name: str, exchange: Exchange) -> dict[str, Any]:
    context_tokens = exchange.service.preparer.context_tokens
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        # Not known; the protocol wants the epoch then.
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": context_tokens,
        "max_tokens": min(MAX_NEW_TOKENS, context_tokens),
    }


def claude_model(name: str | None, config: ServerConfig) -> str:
    """Return the name to answer under: a Claude that the hosted service takes for Flash is ours.

    Opus stands for another model there, and is refused here. spec/multimodal-serving.md D.3.
    """
    is_flash = name is not None and name.startswith("claude") and "opus" not in name
    return served_model(None if is_flash else name, config)


def anthropic_body(error: ServeError) -> dict[str, Any]:
    """Return {"type": "error", "error": {type, message}}, of both HTTP and stream errors."""
    error = in_words_of(_WORDS, error)
    kind = _ERROR_TYPES.get(error.kind, error.kind)
    if error.status == 413:
        kind = "request_too_large"
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class AnswerBlocks:
    """The blocks of one answer, made of its deltas; each step also gives its stream events.

    signature  put under every thinking block, the id of the response
    """

    def __init__(self, signature: str) -> None:
        """Begin without blocks."""
        self._signature = signature
        # (type, start fields, pieces of text) of each block; the last one is open.
        self._blocks: list[tuple[str, dict[str, Any], list[str]]] = []
        self._is_open = False

    def take(self, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """Add deltas; yield their events, with a ping behind the start of the first block."""
        for delta in deltas:
            kind, name = {
                "reasoning": ("thinking", "thinking"),
                "content": ("text", "text"),
            }.get(delta.kind, ("tool_use", "partial_json"))
            is_same = self._is_open and self._blocks[-1][0] == kind
            if delta.kind == "tool_call" or not is_same:
                yield from self.close()
                yield from self._begin(kind, delta)
            if delta.text:
                self._blocks[-1][2].append(delta.text)
                kind = "input_json" if kind == "tool_use" else kind
                yield self._delta({"type": f"{kind}_delta", name: delta.text})

    def close(self) -> Iterator[dict[str, Any]]:
        """End the open block, if there is one; yield its last events."""
        if not self._is_open:
            return
        if self._blocks[-1][0] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        self._is_open = False

    def content(self) -> list[dict[str, Any]]:
        """Return the whole blocks."""
        whole = []
        for kind, fields, pieces in self._blocks:
            text = "".join(pieces)
            if kind == "thinking":
                own = {"thinking": text, "signature": self._signature}
            else:
                own = {"text": text} if kind == "text" else {"input": msgspec.Raw(text.encode())}
            whole.append({**fields, **own})
        return whole

    def _begin(self, kind: str, delta: Delta) -> Iterator[dict[str, Any]]:
        fields: dict[str, Any] = {"type": kind}
        if kind == "thinking":
            fields |= {"thinking": "", "signature": ""}
        elif kind == "text":
            fields |= {"text": ""}
        else:
            fields |= {"id": delta.call_id, "name": delta.name, "input": {}}
        self._blocks.append((kind, fields, []))
        self._is_open = True
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": fields}
        if not index:
            yield {"type": "ping"}

    def _delta(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": fields}


async def _events(
    generation: Generation, model: str, *, begin_within_s: float
) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of an answer.

    The first one waits `begin_within_s` for the first token, with which it is known what the cache
    had; a client that hears nothing during a long prefill would give up.
    """
    blocks = AnswerBlocks(generation.request_id)
    async with aclosing(generation.events()) as events:
        first = asyncio.ensure_future(anext(events, None))
        try:
            await asyncio.wait({first}, timeout=begin_within_s)
            if first.done():
                # An answer that has failed already never began.
                first.result()
            yield _event({"type": "message_start", "message": _message(generation, model, [])})
            event = await first
        finally:
            # An iterator that is being waited for cannot be closed.
            first.cancel()
            await asyncio.wait({first})
        while event is not None:
            for fields in blocks.take(event.deltas):
                yield _event(fields)
            if event.finish_reason is not None:
                stop = _stop_fields(event)
                for fields in blocks.close():
                    yield _event(fields)
                usage = _usage(generation.usage)
                yield _event({"type": "message_delta", "delta": stop, "usage": usage})
            event = await anext(events, None)
    yield _event({"type": "message_stop"})


def _message(generation: Generation, model: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": generation.request_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(generation.usage),
    }


def _stop_fields(event: ChoiceEvent) -> dict[str, Any]:
    """Return why the answer ended; raise OverloadedError where the server ended it."""
    if event.finish_reason == "stop" and event.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": event.stop_text}
    reason = _STOP_REASONS.get(event.finish_reason or "")
    if reason is None:
        raise OverloadedError("the server ended the answer; ask again", code="aborted")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.missed_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    }


def _event(fields: Mapping[str, Any]) -> bytes:
    name = fields["type"].encode()
    return b"event: " + name + b"\ndata: " + msgspec.json.encode(fields) + b"\n\n"
