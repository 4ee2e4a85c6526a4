"""The Responses protocol: POST /v1/responses, whole or as events.

It owns bodies alone: items of a request become messages of a chat, pieces of an answer become
items. The server keeps no answers, so `store` and `previous_response_id` have no effect, as in the
hosted service, and an answer says so with `store: false`. It refuses images, files, conversations,
background answers and tools that the client does not run; a web search is left out.
A newcomer's mistake: sending back only the messages; in a tool loop the reasoning items belong
to the history as well. Source: spec/multimodal-serving.md section D.4.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from finwhale.serve.errors import InvalidRequestError, OverloadedError, ServeError
from finwhale.serve.exchange import EventStream, Exchange, json_response
from finwhale.serve.generation import ChoiceEvent, Generation, Usage
from finwhale.serve.openai_api import served_model
from finwhale.serve.planning import MAX_NEW_TOKENS, ChatRequest, Plan, Planner, Sampling
from finwhale.serve.schema import MAX_USER_ID
from finwhale.serve.service import new_id
from finwhale.text.output_parser import Delta

_TEXT_TYPES = ("input_text", "output_text", "text")
_ENCODED_REASONING = "reasoning.encrypted_content"
_TEXT_EVENTS = {"reasoning": "reasoning_text", "message": "output_text"}


class Part(msgspec.Struct, frozen=True):
    """A part of an item's content."""

    type: str
    text: str | None = None


class Item(msgspec.Struct, frozen=True):
    """An item of the history; without a type it is a message."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """`reasoning`; summaries are none."""

    effort: str | int | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """`text`; verbosity has no effect."""

    format: dict[str, Any] | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/responses; unknown fields are ignored."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    stream: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    def plans(self, planner: Planner, tenant: str) -> list[Plan]:
        """Return the one plan of this body; raise InvalidRequestError for a bad value."""
        return [planner.chat(self.request(tenant))]

    def lean(self) -> ResponsesBody:
        """Return the body without its history; an answer repeats the rest."""
        return msgspec.structs.replace(self, input="")

    def request(self, tenant: str) -> ChatRequest:
        """Return what the service is asked for; raise InvalidRequestError for a bad value."""
        for name in ("background", "conversation", "prompt"):
            if getattr(self, name):
                want = "nothing, since this server keeps no state; send all of it as input"
                raise _refused(name, getattr(self, name), want)
        limit = self.max_output_tokens
        if limit is not None and not 1 <= limit <= MAX_NEW_TOKENS:
            raise _refused("max_output_tokens", limit, f"1 to {MAX_NEW_TOKENS}")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise _refused("temperature", self.temperature, "0 to 2")
        if len(self.user or "") > MAX_USER_ID:
            raise _refused("user", "a long name", f"at most {MAX_USER_ID} characters")
        told = [] if not self.instructions else [{"role": "system", "content": self.instructions}]
        form = (self.text or TextOptions()).format
        return ChatRequest(
            messages=[*told, *_chat_messages(self.input)],
            tools=_functions(self.tools or ()),
            tool_choice=_chat_tool_choice(self.tool_choice),
            effort=None if self.reasoning is None else self.reasoning.effort,
            response_format=_response_format(form),
            sampling=Sampling(max_tokens=limit, temperature=self.temperature, top_p=self.top_p),
            tenant=tenant,
        )


async def responses(exchange: Exchange) -> Response:
    """Answer POST /v1/responses."""
    asked = await exchange.read(ResponsesBody)
    body = asked.body
    model = served_model(body.model, exchange.config)
    response_id = new_id("resp_")
    answer = Answer(response_id, model, body)
    begun = exchange.begin(asked.plan, request_id=response_id)
    if body.stream:
        generation = await exchange.while_connected(begun)
        return EventStream(
            _events(generation, answer),
            keep_alive_s=exchange.config.keep_alive_s,
            on_close=generation.cancel,
            error_event=lambda error: _event(answer.fail(error)),
        )

    async def collected() -> dict[str, Any]:
        generation = await begun
        async for _ in _events(generation, answer):
            pass
        return answer.response()

    return json_response(await exchange.while_connected(collected()))


class Answer:
    """The items of one answer, made of its deltas; each step also gives its stream events.

    The whole answer is the same walk with the events thrown away.
    """

    def __init__(self, response_id: str, model: str, body: ResponsesBody) -> None:
        """Begin without items."""
        self._id, self._model, self._body = response_id, model, body
        self._created_s = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        self._is_open = False
        self._num_events = 0
        self._status = "in_progress"
        self._usage: Usage | None = None
        self._error: dict[str, str] | None = None
        self._keeps_reasoning = _ENCODED_REASONING in (body.include or ())

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the first events."""
        yield self._numbered("created", response=self.response())
        yield self._numbered("in_progress", response=self.response())

    def take(self, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """Add deltas; yield their events."""
        for delta in deltas:
            kind = {"reasoning": "reasoning", "content": "message"}.get(delta.kind, "function_call")
            is_same = self._is_open and self._items[-1]["type"] == kind
            if delta.kind == "tool_call" or not is_same:
                yield from self._close(phase="commentary")
                yield from self._open(kind, delta)
            if not delta.text:
                continue
            self._pieces.append(delta.text)
            if kind == "function_call":
                yield self._of_item("function_call_arguments.delta", delta=delta.text)
            else:
                yield self._of_text(f"{_TEXT_EVENTS[kind]}.delta", kind, delta=delta.text)

    def end(self, event: ChoiceEvent, usage: Usage) -> Iterator[dict[str, Any]]:
        """End the answer as its last event says; raise OverloadedError if the server ended it."""
        if event.finish_reason not in ("stop", "length", "tool_calls"):
            raise OverloadedError("the server ended the answer; ask again", code="aborted")
        self._status = "incomplete" if event.finish_reason == "length" else "completed"
        yield from self._close(phase="final_answer", status=self._status)
        self._usage = usage
        yield self._numbered(self._status, response=self.response())

    def fail(self, error: ServeError) -> dict[str, Any]:
        """Return the last event of a stream that failed."""
        self._status = "failed"
        self._error = {"code": "server_error", "message": error.message}
        return self._numbered("failed", response=self.response())

    def response(self) -> dict[str, Any]:
        """Return the response object as it stands; an open item is no part of it yet."""
        body = self._body
        is_cut = self._status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items[:-1] if self._is_open else list(self._items),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if self._usage is None else _usage(self._usage),
            "user": body.user,
        }

    def _open(self, kind: str, delta: Delta) -> Iterator[dict[str, Any]]:
        prefix = {"reasoning": "rs", "message": "msg"}.get(kind, "fc")
        own_id = f"{prefix}_{self._id.removeprefix('resp_')}_{len(self._items)}"
        item: dict[str, Any] = {"id": own_id, "type": kind, "status": "in_progress"}
        if kind == "reasoning":
            item |= {"summary": [], "content": [], "encrypted_content": None}
        elif kind == "message":
            # Whether calls follow is not known yet; the whole item says it.
            item |= {"role": "assistant", "phase": "final_answer", "content": []}
        else:
            item |= {"call_id": delta.call_id, "name": delta.name, "arguments": ""}
        self._items.append(item)
        self._pieces, self._is_open = [], True
        yield self._numbered("output_item.added", output_index=self._index, item=item)
        if kind != "function_call":
            yield self._of_text("content_part.added", None, part=_part(kind, ""))

    def _close(self, *, phase: str, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Complete the open item, if there is one; yield its last events."""
        if not self._is_open:
            return
        item, text = self._items[-1], "".join(self._pieces)
        kind = item["type"]
        whole = {**item, "status": status}
        if kind == "function_call":
            whole["arguments"] = text
            yield self._of_item("function_call_arguments.done", arguments=text)
        else:
            part = _part(kind, text)
            whole["content"] = [part]
            yield self._of_text(f"{_TEXT_EVENTS[kind]}.done", kind, text=text)
            yield self._of_text("content_part.done", None, part=part)
        if kind == "message":
            whole["phase"] = phase
        if kind == "reasoning" and self._keeps_reasoning:
            whole["encrypted_content"] = base64.b64encode(text.encode()).decode()
        self._items[-1], self._is_open = whole, False
        yield self._numbered("output_item.done", output_index=self._index, item=whole)

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _numbered(self, name: str, **fields: Any) -> dict[str, Any]:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": f"response.{name}", "sequence_number": number, **fields}

    def _of_item(self, name: str, **fields: Any) -> dict[str, Any]:
        own = {"item_id": self._items[-1]["id"], "output_index": self._index}
        return self._numbered(name, **own, **fields)

    def _of_text(self, name: str, kind: str | None, **fields: Any) -> dict[str, Any]:
        # Events of an answer's text carry log-probabilities, of which there are none.
        extra = {"logprobs": []} if kind == "message" else {}
        return self._of_item(name, content_index=0, **extra, **fields)


async def _events(generation: Generation, answer: Answer) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of an answer; there is no `[DONE]`."""
    for fields in answer.begin():
        yield _event(fields)
    async with aclosing(generation.events()) as events:
        async for event in events:
            for fields in answer.take(event.deltas):
                yield _event(fields)
            if event.finish_reason is not None:
                for fields in answer.end(event, generation.usage):
                    yield _event(fields)


def _event(fields: Mapping[str, Any]) -> bytes:
    name = fields["type"].encode()
    return b"event: " + name + b"\ndata: " + msgspec.json.encode(fields) + b"\n\n"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _chat_messages(given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """Return the history in the form of a chat; raise InvalidRequestError for a foreign item.

    Reasoning, messages of the assistant and calls that follow each other are one turn; after a
    message or a call, reasoning begins the next one.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise _refused("input", [], "a text or at least one item")
    found: list[dict[str, Any]] = []
    # The assistant's turn that may go on, and whether it has said more than reasoning.
    turn: dict[str, Any] | None = None
    has_spoken = False
    for number, item in enumerate(given):
        where = f"input[{number}]"
        is_own = item.type in ("reasoning", "function_call") or (
            item.type == "message" and item.role == "assistant"
        )
        if not is_own:
            found.append(_others_message(item, where))
            turn = None
            continue
        if turn is None or (item.type == "reasoning" and has_spoken):
            begun: dict[str, Any] = {"role": "assistant", "content": ""}
            turn, has_spoken = begun, False
            found.append(begun)
        if item.type == "reasoning":
            _join(turn, "reasoning_content", _thoughts(item), "\n")
        elif item.type == "message":
            _join(turn, "content", "\n\n".join(_texts(item.content, where)), "\n\n")
        else:
            turn.setdefault("tool_calls", []).append(_call(item, where))
        has_spoken = item.type != "reasoning"
    return found


def _join(turn: dict[str, Any], name: str, text: str, between: str) -> None:
    before = turn.get(name)
    turn[name] = f"{before}{between}{text}" if before else text


def _others_message(item: Item, where: str) -> dict[str, Any]:
    if item.type == "function_call_output":
        if item.call_id is None:
            raise _refused(f"{where}.call_id", None, "the call_id of a function_call")
        parts = [{"type": "text", "text": text} for text in _texts(item.output, where)]
        return {"role": "tool", "tool_call_id": item.call_id, "content": parts}
    if item.type != "message":
        want = "message, reasoning, function_call or function_call_output"
        raise _refused(f"{where}.type", item.type, want)
    if item.role is None:
        raise _refused(f"{where}.role", None, "user, assistant, system or developer")
    role = "user" if item.role == "user" else "system"
    parts = [{"type": "text", "text": text} for text in _texts(item.content, where)]
    return {"role": role, "content": parts}


def _call(item: Item, where: str) -> dict[str, Any]:
    for name in ("call_id", "name", "arguments"):
        if getattr(item, name) is None:
            raise _refused(f"{where}.{name}", None, "a text")
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _thoughts(item: Item) -> str:
    """Return an item's reasoning: its content, or what an answer of this server encoded."""
    if isinstance(item.content, str):
        return item.content
    if item.content:
        return "\n".join(part.text or "" for part in item.content)
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        # Another server's, which nobody here can read.
        return ""


def _texts(content: str | Sequence[Part] | None, where: str) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    texts = []
    for part in content:
        if part.type not in _TEXT_TYPES or part.text is None:
            want = "a text, since this server reads no images and no files"
            raise _refused(f"{where}.content", part.type, want)
        texts.append(part.text)
    return texts


def _functions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    found = []
    for tool in tools:
        kind = tool.get("type")
        if isinstance(kind, str) and kind.startswith("web_search"):
            continue
        if kind != "function":
            raise _refused("tools", kind, "type 'function'; leave the others out")
        names = ("name", "description", "parameters", "strict")
        fields = {name: tool[name] for name in names if tool.get(name) is not None}
        found.append({"type": "function", "function": fields})
    return found or None


def _chat_tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise _refused("tool_choice", choice.get("type"), "type 'function' and its name")
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.get("type") == "json_schema":
        inner = {name: form[name] for name in ("name", "schema", "strict") if name in form}
        return {"type": "json_schema", "json_schema": inner}
    if form.get("type") not in ("text", "json_object"):
        want = "type 'text', 'json_object' or 'json_schema'"
        raise _refused("text.format", form.get("type"), want)
    return {"type": form["type"]}


def _refused(name: str, got: object, want: str) -> InvalidRequestError:
    param = name.partition(".")[0].partition("[")[0]
    return InvalidRequestError(f"{name}: got {str(got)[:80]!r}, expected {want}", param=param)
