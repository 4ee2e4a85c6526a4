"""The Anthropic protocol: POST /anthropic/v1/messages, whole or as events.

It owns bodies alone: blocks of a request become messages of a chat, pieces of an answer become
blocks. Requests think unless they say otherwise, as the hosted service and not Anthropic does it.
It refuses images, server tools and Opus models, which it cannot serve, and continues no prefill.
A newcomer's mistake: `input_tokens` counts the prompt tokens that no cache had, not all of them.
Source: spec/multimodal-serving.md section D.3.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from finwhale.config.server import ServerConfig
from finwhale.serve.errors import InvalidRequestError, OverloadedError, ServeError
from finwhale.serve.exchange import EventStream, Exchange, json_response
from finwhale.serve.generation import ChoiceEvent, Generation, Usage
from finwhale.serve.openai_api import served_model
from finwhale.serve.planning import MAX_NEW_TOKENS, ChatRequest, Plan, Planner, Sampling
from finwhale.serve.schema import MAX_USER_ID
from finwhale.serve.service import new_id
from finwhale.text.output_parser import Delta, OutputParserError, check_stops

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {"server_error": "api_error"}


class _Block(msgspec.Struct, frozen=True, tag_field="type"):
    """A part of a message; `cache_control` and citations have no effect here."""


class TextBlock(_Block, frozen=True, tag="text"):
    """Text of anybody."""

    text: str


class ThinkingBlock(_Block, frozen=True, tag="thinking"):
    """Reasoning of an earlier answer; its signature is not looked at."""

    thinking: str


class RedactedBlock(_Block, frozen=True, tag="redacted_thinking"):
    """Reasoning that only its maker can read; left out."""


class ToolUseBlock(_Block, frozen=True, tag="tool_use"):
    """A call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]


class ImageBlock(_Block, frozen=True, tag="image"):
    """Refused: this server reads no images."""


class DocumentBlock(_Block, frozen=True, tag="document"):
    """Read where its source is text, refused otherwise."""

    source: dict[str, Any]


class ToolResultBlock(_Block, frozen=True, tag="tool_result"):
    """The answer of a tool; `is_error` leaves no trace in the prompt."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct, frozen=True):
    """One message of the history."""

    role: Literal["user", "assistant", "system"]
    content: (
        str
        | list[
            TextBlock
            | ThinkingBlock
            | RedactedBlock
            | ToolUseBlock
            | ToolResultBlock
            | ImageBlock
            | DocumentBlock
        ]
    )


class Tool(msgspec.Struct, frozen=True):
    """A tool of the client; one with another type than "custom" is a server's, and refused."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """Which tools may be called; `disable_parallel_tool_use` has no effect."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class ThinkingChoice(msgspec.Struct, frozen=True):
    """`thinking`; its budget has no effect, see `output_config.effort`."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(msgspec.Struct, frozen=True):
    """`output_config`: effort as spec section B.3, format {"type": "json_schema", "schema"}."""

    effort: str | int | None = None
    format: dict[str, Any] | None = None


class Metadata(msgspec.Struct, frozen=True):
    """`metadata`."""

    user_id: str | None = None


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /anthropic/v1/messages; unknown fields are ignored."""

    messages: list[Turn]
    max_tokens: int
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    stream: bool | None = None

    def plans(self, planner: Planner, tenant: str) -> list[Plan]:
        """Return the one plan of this body; raise InvalidRequestError for a bad value."""
        return [planner.chat(self.request(tenant))]

    def lean(self) -> MessagesBody:
        """Return the body without its conversation."""
        return msgspec.structs.replace(self, messages=[], system=None, tools=None)

    def request(self, tenant: str) -> ChatRequest:
        """Return what the service is asked for; raise InvalidRequestError for a bad value."""
        if not 1 <= self.max_tokens <= MAX_NEW_TOKENS:
            raise _refused("max_tokens", self.max_tokens, f"1 to {MAX_NEW_TOKENS}")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise _refused("temperature", self.temperature, "0 to 2")
        stop = tuple(self.stop_sequences or ())
        try:
            check_stops(stop, "stop_sequences")
        except OutputParserError as error:
            raise InvalidRequestError(str(error), param="stop_sequences") from None
        if self.metadata is not None and len(self.metadata.user_id or "") > MAX_USER_ID:
            raise _refused("metadata", "a long user_id", f"at most {MAX_USER_ID} characters")
        output = self.output_config or OutputConfig()
        return ChatRequest(
            messages=_chat_messages(self.system, self.messages),
            tools=[_function(tool) for tool in self.tools or ()] or None,
            tool_choice=_chat_tool_choice(self.tool_choice),
            thinking=None if self.thinking is None else self.thinking.type != "disabled",
            effort=output.effort,
            response_format=_response_format(output.format),
            sampling=Sampling(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k or 0,
                stop=stop,
            ),
            tenant=tenant,
        )


async def messages(exchange: Exchange) -> Response:
    """Answer POST /anthropic/v1/messages."""
    asked = await exchange.read(MessagesBody)
    body = asked.body
    model = claude_model(body.model, exchange.config)
    message_id = new_id("msg_")
    begun = exchange.begin(asked.plan, request_id=message_id)
    if body.stream:
        generation = await exchange.while_connected(begun)
        response: Response = EventStream(
            _events(generation, model),
            keep_alive_s=exchange.config.keep_alive_s,
            on_close=generation.cancel,
            error_event=lambda error: _event(anthropic_body(error)),
        )
    else:

        async def collected() -> dict[str, Any]:
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
            return {**message, **_stop_fields(last)}

        response = json_response(await exchange.while_connected(collected()))
    # The name that Anthropic's clients show.
    response.headers["request-id"] = exchange.request_id
    return response


def claude_model(name: str | None, config: ServerConfig) -> str:
    """Return the name to answer under: a Claude that the hosted service takes for Flash is ours.

    Opus stands for another model there, and is refused here. spec/multimodal-serving.md D.3.
    """
    is_flash = name is not None and name.startswith("claude") and "opus" not in name
    return served_model(None if is_flash else name, config)


def anthropic_body(error: ServeError) -> dict[str, Any]:
    """Return {"type": "error", "error": {type, message}}, of both HTTP and stream errors."""
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


async def _events(generation: Generation, model: str) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of an answer."""
    blocks = AnswerBlocks(generation.request_id)
    is_begun = False
    async with aclosing(generation.events()) as events:
        async for event in events:
            if not is_begun:
                # Not earlier: what the cache had is known with the first token.
                is_begun = True
                yield _event({"type": "message_start", "message": _message(generation, model, [])})
            for fields in blocks.take(event.deltas):
                yield _event(fields)
            if event.finish_reason is not None:
                stop = _stop_fields(event)
                for fields in blocks.close():
                    yield _event(fields)
                usage = _usage(generation.usage)
                yield _event({"type": "message_delta", "delta": stop, "usage": usage})
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


def _chat_messages(
    system: str | list[TextBlock] | None, turns: Sequence[Turn]
) -> list[dict[str, Any]]:
    """Return the history in the form of a chat; raise InvalidRequestError for a foreign block."""
    found: list[dict[str, Any]] = []
    if system:
        text = system if isinstance(system, str) else "\n\n".join(block.text for block in system)
        found.append({"role": "system", "content": text})
    for number, turn in enumerate(turns):
        where = f"messages.{number}.content"
        if isinstance(turn.content, str):
            found.append({"role": turn.role, "content": turn.content})
        elif not turn.content:
            raise _refused(where, "no block", "a text or at least one block")
        elif turn.role == "assistant":
            found.append(_assistant_message(turn.content, where))
        else:
            found += _user_messages(turn.role, turn.content, where)
    return found


def _assistant_message(blocks: Sequence[Any], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, RedactedBlock):
            raise _refused(f"{where}.{number}", block, "text, thinking or tool_use here")
    message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(role: str, blocks: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Return a tool message for each result, and the text between them as messages of `role`."""
    found: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}.{number}"
        if isinstance(block, ToolResultBlock) and role == "user":
            content = block.content or ""
            if not isinstance(content, str):
                content = [_text_part(part, place) for part in content]
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            continue
        part = _text_part(block, place)
        if found and found[-1]["role"] == role:
            found[-1]["content"].append(part)
        else:
            found.append({"role": role, "content": [part]})
    return found


def _text_part(block: Any, where: str) -> dict[str, str]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    if isinstance(block, DocumentBlock) and block.source.get("type") == "text":
        return {"type": "text", "text": str(block.source.get("data", ""))}
    raise _refused(where, block, "text, since this server reads no images and no files")


def _function(tool: Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise _refused("tools", tool.type, "a tool that the client runs; leave the others out")
    optional = {
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    fields = {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **fields}}


def _chat_tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise _refused("tool_choice.name", None, "the name of a tool")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _response_format(wanted: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema":
        raise _refused("output_config.format", wanted.get("type"), "type 'json_schema'")
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


def _refused(name: str, got: object, want: str) -> InvalidRequestError:
    shown = f"block {type(got).__name__}" if isinstance(got, _Block) else repr(got)[:80]
    param = name.partition(".")[0]
    return InvalidRequestError(f"{name}: got {shown}, expected {want}", param=param)
