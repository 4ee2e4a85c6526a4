"""Bodies of the OpenAI protocol with DeepSeek's fields, decoded and checked.

One struct for each endpoint; a null is a field left out, unknown fields are ignored, and a wrong
type is refused with its path. It owns ranges that are the protocol's own (those of sampling are
the engine's, finwhale/engine/request.py), and the forms of messages that agents send beside the
ones the prompt encoder knows: the role `developer`, parts of other protocols, refusals. It refuses
images and parts of unknown kinds by their name.
Source: spec/multimodal-serving.md sections B.3 and D.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from finwhale.serve.errors import InvalidRequestError
from finwhale.serve.notes import left_out
from finwhale.serve.planning import (
    MAX_NEW_TOKENS,
    ChatRequest,
    CompletionRequest,
    Plan,
    Planner,
    Sampling,
)

MAX_USER_ID = 512
# Limits of OpenAI's `metadata`.
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
_TEXT_PARTS = ("text", "input_text", "output_text")
_ASSISTANT_PARTS = ("refusal", "thinking", "redacted_thinking")
_PATH = re.compile(r" - at `\$\.?([A-Za-z_]+)?")

Body = TypeVar("Body", bound=msgspec.Struct)


class Thinking(msgspec.Struct, frozen=True):
    """`thinking`: {"type": "enabled"} or {"type": "disabled"}."""

    type: Literal["enabled", "disabled"]


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer needs of its body.

    wants_usage  every chunk of a stream has the key `usage`
    """

    model: str | None
    stream: bool = False
    wants_usage: bool = False


class _Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both endpoints have."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    user_id: str | None = None

    def options(self) -> AnswerOptions:
        """Return what an answer needs of this body."""
        usage = self.stream_options is not None and self.stream_options.include_usage
        return AnswerOptions(model=self.model, stream=bool(self.stream), wants_usage=bool(usage))


class ChatBody(_Sampled, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | int | None = None
    response_format: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None

    def plans(self, planner: Planner, tenant: str) -> list[Plan]:
        """Return the one plan of this body; raise InvalidRequestError for a bad value."""
        return [planner.chat(self.request(tenant))]

    def request(self, tenant: str) -> ChatRequest:
        """Return what the service is asked for; raise InvalidRequestError for a bad value."""
        newer = self.max_completion_tokens
        check_metadata(self.metadata)
        own_tools = [tool for tool in self.tools or () if tool.get("type") != "custom"]
        foreign = [tool for tool in self.tools or () if tool.get("type") == "custom"]
        return ChatRequest(
            messages=chat_messages(self.messages),
            tools=own_tools or None,
            tool_choice=self.tool_choice,
            thinking=None if self.thinking is None else self.thinking.type == "enabled",
            effort=self.reasoning_effort,
            response_format=self.response_format,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            sampling=_sampling(
                self,
                max_tokens=_max_tokens(self.max_tokens, low=1)
                if newer is None
                else _max_tokens(newer, low=1, name="max_completion_tokens"),
                logprobs=bool(self.logprobs),
                top_logprobs=self.top_logprobs or 0,
            ),
            tenant=tenant,
            notes=left_out("tools", [_custom_name(tool) for tool in foreign]),
        )


class CompletionBody(_Sampled, frozen=True, kw_only=True):
    """Body of POST /v1/completions; a prompt is text, ids, or a list of either."""

    prompt: str | list[Any]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def plans(self, planner: Planner, tenant: str) -> list[Plan]:
        """Return the plan of each prompt; raise InvalidRequestError for a bad value."""
        requests = self.requests(tenant, max_choices=planner.config.max_choices)
        return [planner.text(request) for request in requests]

    def requests(self, tenant: str, *, max_choices: int) -> list[CompletionRequest]:
        """Return one request for each prompt; raise InvalidRequestError for a bad value."""
        prompts = _prompts(self.prompt)
        if len(prompts) * (self.n or 1) > max_choices:
            raise InvalidRequestError(
                f"prompt: got {len(prompts)} prompts times n = {self.n or 1}, expected at most "
                f"{max_choices} choices in all",
                param="prompt",
            )
        if self.suffix:
            want = "nothing: the order of prefix and suffix is not published for this model"
            raise InvalidRequestError(f"suffix: got a text, expected {want}", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                f"best_of: got {self.best_of}, expected n or nothing", param="best_of"
            )
        sampling = _sampling(
            self,
            max_tokens=_max_tokens(16 if self.max_tokens is None else self.max_tokens, low=0),
            logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
        )
        if sampling.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens: got 0, expected 1 or more unless echo is true", param="max_tokens"
            )
        return [
            CompletionRequest(prompt=prompt, echo=bool(self.echo), sampling=sampling, tenant=tenant)
            for prompt in prompts
        ]


def decode(raw: bytes, kind: type[Body]) -> Body:
    """Return the body as `kind`; raise InvalidRequestError with the field at fault."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        found = _PATH.search(str(error))
        param = found.group(1) if found is not None else None
        raise InvalidRequestError(f"body: {error}", param=param, code="invalid_body") from None
    except RecursionError:
        raise InvalidRequestError("body: nested too deeply; flatten it") from None


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the forms that the prompt encoder knows.

    `developer` is a system message. Text parts of the Responses protocol are text; a refusal is
    what the assistant said; `thinking` parts of an assistant are its reasoning, unless the message
    has `reasoning_content`. Raise InvalidRequestError for a part of another kind.
    """
    return [_chat_message(dict(each), f"messages[{n}]") for n, each in enumerate(messages)]


def _chat_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if message.get("role") == "developer":
        message["role"] = "system"
    is_assistant = message.get("role") == "assistant"
    content = message.get("content")
    if isinstance(content, list):
        parts: list[dict[str, Any]] = []
        thoughts: list[str] = []
        for number, part in enumerate(content):
            _take_part(part, f"{where}.content[{number}]", is_assistant, parts, thoughts)
        # A turn of reasoning alone has said nothing.
        message["content"] = "" if content and not parts else parts
        if thoughts and not message.get("reasoning_content"):
            message["reasoning_content"] = "\n".join(thoughts)
    if is_assistant and isinstance(message.get("reasoning"), str):
        # The name that some servers and their clients have for it.
        message.setdefault("reasoning_content", message["reasoning"])
    refusal = message.pop("refusal", None)
    if is_assistant and isinstance(refusal, str) and not message.get("content"):
        message["content"] = refusal
    return message


def _take_part(
    part: Any, where: str, is_assistant: bool, parts: list[dict[str, Any]], thoughts: list[str]
) -> None:
    """Add one part of a message's content to its text parts or its reasoning, or refuse it."""
    kind = part.get("type") if isinstance(part, dict) else None
    name = {"refusal": "refusal", "thinking": "thinking"}.get(str(kind), "text")
    known = (*_TEXT_PARTS, *_ASSISTANT_PARTS) if is_assistant else _TEXT_PARTS
    if kind not in known:
        want = f"a part of type {', '.join(known)}, since this server reads no images and no files"
        raise InvalidRequestError(
            f"{where}.type: got {str(kind)[:80]!r}, expected {want}", param="messages"
        )
    if kind == "redacted_thinking":
        # Only its maker can read it.
        return
    text = part.get(name)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{name}: expected a text", param="messages")
    if kind == "thinking":
        thoughts.append(text)
    else:
        parts.append({"type": "text", "text": text})


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raise InvalidRequestError for metadata over OpenAI's limits."""
    pairs = metadata or {}
    longest_key = max(map(len, pairs), default=0)
    longest_value = max(map(len, pairs.values()), default=0)
    for got, limit, what in (
        (len(pairs), MAX_METADATA, "pairs"),
        (longest_key, MAX_METADATA_KEY, "characters in a key"),
        (longest_value, MAX_METADATA_VALUE, "characters in a value"),
    ):
        if got > limit:
            raise InvalidRequestError(
                f"metadata: got {got} {what}, expected at most {limit}", param="metadata"
            )


def _custom_name(tool: Mapping[str, Any]) -> str:
    inner = tool.get("custom")
    name = inner.get("name") if isinstance(inner, dict) else None
    return f"custom {name}" if isinstance(name, str) else "custom"


def _sampling(
    body: _Sampled, *, max_tokens: int | None, logprobs: bool, top_logprobs: int
) -> Sampling:
    _check_span("temperature", body.temperature, 0, 2)
    _check_span("presence_penalty", body.presence_penalty, -2, 2)
    _check_span("frequency_penalty", body.frequency_penalty, -2, 2)
    for name, got in (("user_id", body.user_id), ("user", body.user)):
        if got is not None and len(got) > MAX_USER_ID:
            want = f"at most {MAX_USER_ID}"
            raise InvalidRequestError(
                f"{name}: got {len(got)} characters, expected {want}", param=name
            )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return Sampling(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k or 0,
        min_p=body.min_p or 0.0,
        seed=body.seed,
        n=1 if body.n is None else body.n,
        stop=stop,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        logit_bias=_logit_bias(body.logit_bias or {}),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
    )


def _max_tokens(limit: int | None, *, low: int, name: str = "max_tokens") -> int | None:
    if limit is not None and not low <= limit <= MAX_NEW_TOKENS:
        want = f"{low} to {MAX_NEW_TOKENS}"
        raise InvalidRequestError(f"{name}: got {limit}, expected {want}", param=name)
    return limit


def _check_span(name: str, got: float | None, low: float, high: float) -> None:
    if got is not None and not low <= got <= high:
        raise InvalidRequestError(f"{name}: got {got}, expected {low} to {high}", param=name)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    found = {}
    for token, added in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidRequestError(
                f"logit_bias: got key {token[:20]!r}, expected a token id", param="logit_bias"
            )
        _check_span("logit_bias", added, -100, 100)
        found[int(token)] = added
    return found


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts of a body: one text, one list of ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(_is_id(token) for token in prompt):
        return [prompt]
    if prompt and all(
        isinstance(each, str) or (isinstance(each, list) and each and all(map(_is_id, each)))
        for each in prompt
    ):
        return list(prompt)
    raise InvalidRequestError(
        "prompt: expected a text, a list of token ids, or a list of either, none empty",
        param="prompt",
    )


def _is_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool)
