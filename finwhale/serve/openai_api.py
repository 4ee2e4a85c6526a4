"""The OpenAI protocol with DeepSeek's fields: chat completions, completions, models.

It owns the bodies of answers and chunks and nothing else; what happens between them is the
service's. The usage of a stream rides on the last chunk that has a choice, as in the hosted
service. `stream_options.include_usage` asks for OpenAI's form: the usage in a chunk of its own
without choices, null in all others; twice would be wrong, since clients add up what they see.
A newcomer's mistake: a field that is null and one that is absent differ for `reasoning_content`:
it is absent where the request does not think.
Source: spec/multimodal-serving.md section D.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from finwhale.config.server import ServerConfig
from finwhale.serve.errors import (
    InvalidRequestError,
    NotFoundError,
    ServeError,
    in_words_of,
    openai_body,
)
from finwhale.serve.exchange import EventStream, Exchange, json_response
from finwhale.serve.generation import ChoiceEvent, ChoiceResult, Generation, TokenLogprob, Usage
from finwhale.serve.notes import note_headers
from finwhale.serve.planning import Plan
from finwhale.serve.schema import ChatBody, CompletionBody
from finwhale.text.output_parser import Delta

DONE = b"data: [DONE]\n\n"


async def chat_completions(exchange: Exchange) -> Response:
    """Answer POST /v1/chat/completions."""
    asked = await exchange.read(ChatBody)
    options, plan = asked.options, asked.plan
    model = served_model(options.model, exchange.config)
    if not options.stream:
        generation, results = await exchange.while_connected(_collected(exchange, plan))
        answer = _chat_answer(generation, results, model, is_thinking=plan.is_thinking)
        response = json_response(answer)
    else:
        generation = await exchange.while_connected(exchange.begin(plan))
        events = _chat_events(
            generation, model, is_thinking=plan.is_thinking, wants_usage=options.wants_usage
        )
        response = EventStream(
            events,
            keep_alive_s=exchange.config.keep_alive_s,
            on_close=generation.cancel,
            error_event=_last_error,
        )
    response.headers.update(note_headers(generation.notes, exchange.request_id))
    return response


async def completions(exchange: Exchange) -> Response:
    """Answer POST /v1/completions."""
    asked = await exchange.read(CompletionBody)
    options = asked.options
    model = served_model(options.model, exchange.config)

    async def begun() -> list[Generation]:
        generations: list[Generation] = []
        try:
            for plan in asked.plans:
                generations.append(await exchange.begin(plan))
        except BaseException:
            # A body is served as a whole or not at all.
            for generation in generations:
                generation.cancel()
            raise
        return generations

    async def collected() -> tuple[list[Generation], list[ChoiceResult]]:
        generations = await begun()
        num = generations[0].num_choices
        results = [ChoiceResult(index=index) for index in range(num * len(generations))]
        async with aclosing(_merged(generations)) as events:
            async for event in events:
                results[event.index].add(event)
        return generations, results

    if not options.stream:
        generations, results = await exchange.while_connected(collected())
        response = json_response(_text_answer(generations, results, model))
    else:
        generations = await exchange.while_connected(begun())

        def close() -> None:
            for generation in generations:
                generation.cancel()

        response = EventStream(
            _text_events(generations, model, wants_usage=options.wants_usage),
            keep_alive_s=exchange.config.keep_alive_s,
            on_close=close,
            error_event=_last_error,
        )
    notes = [note for generation in generations for note in generation.notes]
    response.headers.update(note_headers(notes, exchange.request_id))
    return response


def chat_error(error: ServeError) -> dict[str, Any]:
    """Return the error body of a chat completion."""
    return openai_body(in_words_of({}, error))


def completion_error(error: ServeError) -> dict[str, Any]:
    """Return the error body of a completion, whose prompt is no list of messages."""
    return openai_body(in_words_of({"messages": "prompt"}, error))


async def models(exchange: Exchange) -> Response:
    """Answer GET /v1/models."""
    return json_response(
        {"object": "list", "data": [_model(name) for name in exchange.config.model_names]}
    )


async def one_model(exchange: Exchange) -> Response:
    """Answer GET /v1/models/{name}."""
    name = exchange.request.path_params["name"]
    if name not in exchange.config.model_names:
        raise NotFoundError(
            f"model: got {name[:80]!r}, expected one of {', '.join(exchange.config.model_names)}",
            param="model",
            code="model_not_found",
        )
    return json_response(_model(name))


def served_model(name: str | None, config: ServerConfig) -> str:
    """Return the name to answer under; raise InvalidRequestError for an unknown one."""
    if name is None:
        return config.model_names[0]
    if name not in config.model_names:
        raise InvalidRequestError(
            f"model: got {name[:80]!r}, expected one of {', '.join(config.model_names)}",
            param="model",
            code="model_not_found",
        )
    return name


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "finwhale"}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return the usage object with both vendors' names of the cached tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_cache_hit_tokens": usage.cached_tokens,
        "prompt_cache_miss_tokens": usage.missed_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


async def _collected(exchange: Exchange, plan: Plan) -> tuple[Generation, list[ChoiceResult]]:
    generation = await exchange.begin(plan)
    return generation, await generation.collect()


def _chat_answer(
    generation: Generation, results: Sequence[ChoiceResult], model: str, *, is_thinking: bool
) -> dict[str, Any]:
    choices = []
    for result in results:
        message = result.message
        if is_thinking:
            message.setdefault("reasoning_content", "")
        calls = message.get("tool_calls", ())
        for index, call in enumerate(calls):
            call["index"] = index
        choices.append(
            {
                "index": result.index,
                "message": message,
                "logprobs": _chat_logprobs(result.logprobs),
                "finish_reason": result.finish_reason,
            }
        )
    head = _head(generation.request_id, "chat.completion", generation.created_s, model)
    return {**head, "choices": choices, "usage": usage_body(generation.usage)}


async def _chat_events(
    generation: Generation, model: str, *, is_thinking: bool, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of a chat, `[DONE]` at the end."""
    head = _head(generation.request_id, "chat.completion.chunk", generation.created_s, model)
    num_left = generation.num_choices

    def chunk(index: int, delta: dict, logprobs: Sequence[TokenLogprob], reason: str | None):
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _chat_logprobs(logprobs),
            "finish_reason": reason,
        }
        is_final = reason is not None and not num_left
        return _event(head, choice, generation.usage if is_final else None, wants_usage)

    first: dict[str, Any] = {"role": "assistant", "content": ""}
    if is_thinking:
        first |= {"content": None, "reasoning_content": ""}
    for index in range(generation.num_choices):
        yield chunk(index, first, (), None)
    async with aclosing(generation.events()) as events:
        async for event in events:
            logprobs = list(event.logprobs)
            for delta in event.deltas:
                own = [told for told in logprobs if told.kind == delta.kind]
                logprobs = [told for told in logprobs if told.kind != delta.kind]
                fields = _delta_fields(delta, is_thinking=is_thinking)
                yield chunk(event.index, fields, own, None)
            if event.finish_reason is not None:
                num_left -= 1
                last: dict[str, Any] = {"content": ""}
                if is_thinking:
                    last["reasoning_content"] = None
                yield chunk(event.index, last, logprobs, event.finish_reason)
    if wants_usage:
        yield _usage_event(head, generation.usage)
    yield DONE


def _delta_fields(delta: Delta, *, is_thinking: bool) -> dict[str, Any]:
    if delta.kind in ("reasoning", "content"):
        if not is_thinking:
            return {"content": delta.text}
        is_content = delta.kind == "content"
        return {
            "content": delta.text if is_content else None,
            "reasoning_content": None if is_content else delta.text,
        }
    call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.text}}
    if delta.kind == "tool_call":
        call |= {"id": delta.call_id, "type": "function"}
        call["function"] = {"name": delta.name, "arguments": ""}
    return {"tool_calls": [call]}


def _chat_logprobs(told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """Return the two lists, or None where nobody asked or nothing has become certain."""
    if not told:
        return None
    lists: dict[str, Any] = {"content": [], "reasoning_content": []}
    for each in told:
        kind = "content" if each.kind == "content" else "reasoning_content"
        lists[kind].append(logprob_body(each))
    return lists


def logprob_body(told: TokenLogprob) -> dict[str, Any]:
    """Return {token, logprob, bytes, top_logprobs} of one token."""
    entry = _logprob_entry(told.token, told.token_bytes, told.logprob)
    entry["top_logprobs"] = [_logprob_entry(*other) for other in told.top]
    return entry


def _logprob_entry(token: str, token_bytes: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token_bytes)}


def _finite(logprob: float | None) -> float | None:
    """Return what JSON can say: a forbidden token has minus infinity, told as -9999."""
    return None if logprob is None else max(logprob, -9999.0)


def _text_answer(
    generations: Sequence[Generation], results: Sequence[ChoiceResult], model: str
) -> dict[str, Any]:
    choices = [
        {
            "index": result.index,
            "text": result.text,
            "logprobs": _text_logprobs(result.logprobs),
            "finish_reason": result.finish_reason,
        }
        for result in results
    ]
    first = generations[0]
    head = _head(first.request_id, "text_completion", first.created_s, model)
    return {**head, "choices": choices, "usage": usage_body(_sum(generations))}


async def _text_events(
    generations: Sequence[Generation], model: str, *, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of a completion, `[DONE]` at the end."""
    first = generations[0]
    head = _head(first.request_id, "text_completion", first.created_s, model)
    num_left = first.num_choices * len(generations)
    async with aclosing(_merged(generations)) as events:
        async for event in events:
            text = "".join(delta.text for delta in event.deltas)
            num_left -= event.finish_reason is not None
            logprobs = _text_logprobs(event.logprobs)
            choice = {
                "index": event.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": event.finish_reason,
            }
            yield _event(head, choice, None if num_left else _sum(generations), wants_usage)
    if wants_usage:
        yield _usage_event(head, _sum(generations))
    yield DONE


def _text_logprobs(told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """Return the four lists of the older protocol, or None."""
    if not told:
        return None
    return {
        "tokens": [each.token for each in told],
        "token_logprobs": [_finite(each.logprob) for each in told],
        "top_logprobs": [
            {token: _finite(logprob) for token, _, logprob in each.top} for each in told
        ],
        "text_offset": [each.offset for each in told],
    }


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[ChoiceEvent, None]:
    """Yield the events of several requests as they come, choices numbered through."""
    coming: asyncio.Queue[ChoiceEvent | Exception | None] = asyncio.Queue()

    async def pump(number: int, generation: Generation) -> None:
        try:
            async with aclosing(generation.events()) as events:
                async for event in events:
                    index = number * generation.num_choices + event.index
                    coming.put_nowait(event.at(index))
            coming.put_nowait(None)
        except Exception as error:
            # Of any kind: without it the reader would wait for ever.
            coming.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(*pair)) for pair in enumerate(generations)]
    try:
        num_left = len(tasks)
        while num_left:
            event = await coming.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_left -= 1
            else:
                yield event
    finally:
        for task, generation in zip(tasks, generations, strict=True):
            task.cancel()
            generation.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sum(generations: Sequence[Generation]) -> Usage:
    total = Usage(prompt_tokens=0)
    for usage in (generation.usage for generation in generations):
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens += usage.completion_tokens
        total.cached_tokens += usage.cached_tokens
    return total


def _head(request_id: str, kind: str, created_s: int, model: str) -> dict[str, Any]:
    return {"id": request_id, "object": kind, "created": created_s, "model": model}


def _event(
    head: dict[str, Any], choice: dict[str, Any], usage: Usage | None, wants_usage: bool
) -> bytes:
    """Return a chunk of one choice; `usage` is told here unless it has a chunk of its own."""
    chunk = {**head, "choices": [choice]}
    if wants_usage:
        chunk["usage"] = None
    elif usage is not None:
        chunk["usage"] = usage_body(usage)
    return sse(chunk)


def _usage_event(head: dict[str, Any], usage: Usage) -> bytes:
    return sse({**head, "choices": [], "usage": usage_body(usage)})


def _last_error(error: ServeError) -> bytes:
    return sse(openai_body(error)) + DONE


def sse(fields: Any) -> bytes:
    """Return one server-sent event without a name."""
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"
