"""The Responses protocol: POST /v1/responses, whole or as events, and its count of tokens.

It owns the answers: pieces of an answer become items; responses_body.py has the requests. The
server keeps no answers, and each answer says so with `store: false`. Reasoning is told as
`reasoning_text`, or as a summary where the request asks for one: official clients show that alone.
A newcomer's mistake: building on the order of text and calls; reasoning may come between them.
Source: spec/multimodal-serving.md section D.4.
"""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from finwhale.serve.errors import OverloadedError, ServeError, in_words_of, openai_body
from finwhale.serve.exchange import EventStream, Exchange, json_response
from finwhale.serve.generation import ChoiceEvent, Generation, TokenLogprob, Usage
from finwhale.serve.notes import note_headers
from finwhale.serve.openai_api import logprob_body, served_model
from finwhale.serve.responses_body import InputTokensBody, ResponsesBody, ResponsesOptions
from finwhale.serve.service import new_id
from finwhale.text.output_parser import Delta

_WORDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "user_id": "user",
}


async def responses(exchange: Exchange) -> Response:
    """Answer POST /v1/responses."""
    asked = await exchange.read(ResponsesBody)
    options = asked.options
    model = served_model(options.model, exchange.config)
    response_id = new_id("resp_")
    answer = Answer(response_id, model, options)
    begun = exchange.begin(asked.plan, request_id=response_id)
    if options.stream:
        generation = await exchange.while_connected(begun)
        response: Response = EventStream(
            _events(generation, answer),
            keep_alive_s=exchange.config.keep_alive_s,
            on_close=generation.cancel,
            error_event=lambda error: _event(answer.fail(error)),
        )
    else:

        async def collected() -> Generation:
            generation = await begun
            async for _ in _events(generation, answer):
                pass
            return generation

        generation = await exchange.while_connected(collected())
        response = json_response(answer.response())
    response.headers.update(note_headers(generation.notes, exchange.request_id))
    return response


async def input_tokens(exchange: Exchange) -> Response:
    """Answer POST /v1/responses/input_tokens: the tokens of the prompt, without an answer."""
    asked = await exchange.read(InputTokensBody)
    served_model(asked.options.model, exchange.config)
    return json_response(
        {"object": "response.input_tokens", "input_tokens": len(asked.plan.prompt)},
        headers=note_headers(asked.plan.notes, exchange.request_id),
    )


def responses_error(error: ServeError) -> dict[str, Any]:
    """Return the error body, whose fields are those of a Responses request."""
    return openai_body(in_words_of(_WORDS, error))


class Answer:
    """The items of one answer, made of its deltas; each step also gives its stream events.

    The whole answer is the same walk with the events thrown away.
    """

    def __init__(self, response_id: str, model: str, options: ResponsesOptions) -> None:
        """Begin without items."""
        self._id, self._model, self._options = response_id, model, options
        self._created_s = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        # Log-probabilities of the open message, and those that no delta has carried yet.
        self._logprobs: list[dict[str, Any]] = []
        self._untold: list[dict[str, Any]] = []
        self._is_open = False
        self._num_events = 0
        self._status = "in_progress"
        self._usage: Usage | None = None
        self._error: dict[str, str] | None = None

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the first events."""
        yield self._numbered("created", response=self.response())
        yield self._numbered("in_progress", response=self.response())

    def take(
        self, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[dict[str, Any]]:
        """Add deltas, and log-probabilities of their text if they are told; yield the events."""
        if self._options.has_logprobs:
            self._untold += [logprob_body(told) for told in logprobs if told.kind == "content"]
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
            elif kind == "message":
                told, self._untold = self._untold, []
                self._logprobs += told
                yield self._of_text("output_text.delta", delta=delta.text, logprobs=told)
            else:
                yield self._of_thought("delta", delta=delta.text)

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
        code = "invalid_prompt" if error.status < 500 else "server_error"
        self._error = {"code": code, "message": error.message}
        return self._numbered("failed", response=self.response())

    def response(self) -> dict[str, Any]:
        """Return the response object as it stands; an open item is no part of it yet."""
        is_cut = self._status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._model,
            "output": self._items[:-1] if self._is_open else list(self._items),
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if self._usage is None else _usage(self._usage),
            **self._options.echo,
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
            own = {"name": delta.name}
            if delta.name in self._options.namespaces:
                namespace, name = self._options.namespaces[delta.name]
                own = {"name": name, "namespace": namespace}
            item |= {"call_id": delta.call_id, **own, "arguments": ""}
        self._items.append(item)
        self._pieces, self._logprobs, self._is_open = [], [], True
        yield self._numbered("output_item.added", output_index=self._index, item=item)
        if kind == "message":
            yield self._of_text("content_part.added", part=_text_part("", []))
        elif kind == "reasoning":
            yield self._of_thought("part.added", part=self._thought(""))

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
        elif kind == "message":
            logprobs = [*self._logprobs, *self._untold]
            self._untold = []
            part = _text_part(text, logprobs)
            whole |= {"content": [part], "phase": phase}
            yield self._of_text("output_text.done", text=text, logprobs=logprobs)
            yield self._of_text("content_part.done", part=part)
        else:
            part = self._thought(text)
            whole["summary" if self._options.has_summary else "content"] = [part]
            yield self._of_thought("done", text=text)
            yield self._of_thought("part.done", part=part)
            if self._options.has_encoded:
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

    def _of_text(self, name: str, **fields: Any) -> dict[str, Any]:
        return self._of_item(name, content_index=0, **fields)

    def _of_thought(self, name: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the reasoning, which is a text or the only part of a summary."""
        if self._options.has_summary:
            middle = "_" if name.startswith("part") else "_text."
            return self._of_item(f"reasoning_summary{middle}{name}", summary_index=0, **fields)
        whole_name = f"content_{name}" if name.startswith("part") else f"reasoning_text.{name}"
        return self._of_item(whole_name, content_index=0, **fields)

    def _thought(self, text: str) -> dict[str, Any]:
        return {
            "type": "summary_text" if self._options.has_summary else "reasoning_text",
            "text": text,
        }


async def _events(generation: Generation, answer: Answer) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of an answer; there is no `[DONE]`."""
    for fields in answer.begin():
        yield _event(fields)
    async with aclosing(generation.events()) as events:
        async for event in events:
            for fields in answer.take(event.deltas, event.logprobs):
                yield _event(fields)
            if event.finish_reason is not None:
                for fields in answer.end(event, generation.usage):
                    yield _event(fields)


def _event(fields: Mapping[str, Any]) -> bytes:
    name = fields["type"].encode()
    return b"event: " + name + b"\ndata: " + msgspec.json.encode(fields) + b"\n\n"


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
