"""Shapes of whole answers, as the description at /openapi.json publishes them.

The handlers write dictionaries, for speed; these structs say what is in them, and a test holds real
answers of every endpoint against them. They own no behaviour. Unknown fields are refused, so a
field that a handler adds has to be added here as well. A newcomer's mistake: reading these as the
bodies of streams, whose events have shapes of their own (docs/server.md).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "aborted"]


class _Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All shapes are closed."""


class Health(_Shape, frozen=True, kw_only=True):
    """Whether requests are served."""

    status: str
    reason: str | None = None


class ErrorFields(_Shape, frozen=True, kw_only=True):
    """Why a request has no answer."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(_Shape, frozen=True, kw_only=True):
    """An error of the OpenAI protocols."""

    error: ErrorFields


class ClaudeErrorFields(_Shape, frozen=True, kw_only=True):
    """Why a request has no answer."""

    type: str
    message: str


class AnthropicError(_Shape, frozen=True, kw_only=True):
    """An error of the Anthropic protocol."""

    type: Literal["error"]
    error: ClaudeErrorFields


class Model(_Shape, frozen=True, kw_only=True):
    """A model's entry."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(_Shape, frozen=True, kw_only=True):
    """All names that this server answers under."""

    object: Literal["list"]
    data: list[Model]


class TopLogprob(_Shape, frozen=True, kw_only=True):
    """A token that might have come, and its log-probability; `bytes` are of its text."""

    token: str
    logprob: float | None
    bytes: list[int]


class Logprob(_Shape, frozen=True, kw_only=True):
    """A token and its log-probability; `bytes` are of its text."""

    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Shape, frozen=True, kw_only=True):
    """Log-probabilities of the text and of the reasoning."""

    content: list[Logprob]
    reasoning_content: list[Logprob]


class CalledFunction(_Shape, frozen=True, kw_only=True):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(_Shape, frozen=True, kw_only=True):
    """A call of a tool."""

    index: int
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Shape, frozen=True, kw_only=True):
    """What the assistant said."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Shape, frozen=True, kw_only=True):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class CachedTokens(_Shape, frozen=True, kw_only=True):
    """Prompt tokens that came from the cache."""

    cached_tokens: int


class ReasoningTokens(_Shape, frozen=True, kw_only=True):
    """Tokens of the reasoning."""

    reasoning_tokens: int


class Usage(_Shape, frozen=True, kw_only=True):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class ChatAnswer(_Shape, frozen=True, kw_only=True):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(_Shape, frozen=True, kw_only=True):
    """Four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]]
    text_offset: list[int]


class TextChoice(_Shape, frozen=True, kw_only=True):
    """One of the answers."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class TextAnswer(_Shape, frozen=True, kw_only=True):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ThoughtPart(_Shape, frozen=True, kw_only=True):
    """Reasoning, or a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class OutputText(_Shape, frozen=True, kw_only=True):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Logprob]


class ReasoningItem(_Shape, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of an answer."""

    id: str
    status: ItemStatus
    summary: list[ThoughtPart]
    content: list[ThoughtPart]
    encrypted_content: str | None


class MessageItem(_Shape, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Text of an answer."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    phase: Literal["commentary", "final_answer"]
    content: list[OutputText]


class CallItem(_Shape, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function; `namespace` where the tool was declared in one."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class InputDetails(_Shape, frozen=True, kw_only=True):
    """Where the input tokens came from."""

    cached_tokens: int
    cache_write_tokens: int


class ResponsesUsage(_Shape, frozen=True, kw_only=True):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponsesAnswer(_Shape, frozen=True, kw_only=True):
    """Answer of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    background: bool
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[ReasoningItem | MessageItem | CallItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
    user: str | None


class InputTokens(_Shape, frozen=True, kw_only=True):
    """Answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class SaidThinking(_Shape, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of an answer."""

    thinking: str
    signature: str


class SaidText(_Shape, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class SaidToolUse(_Shape, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class ClaudeUsage(_Shape, frozen=True, kw_only=True):
    """Counts of tokens; `input_tokens` are those that no cache had."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]


class MessageAnswer(_Shape, frozen=True, kw_only=True):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[SaidThinking | SaidText | SaidToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]
    stop_sequence: str | None
    usage: ClaudeUsage


class CountedTokens(_Shape, frozen=True, kw_only=True):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class ClaudeModel(_Shape, frozen=True, kw_only=True):
    """A model's entry in Anthropic's form."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ClaudeModelList(_Shape, frozen=True, kw_only=True):
    """A page of names in Anthropic's form."""

    data: list[ClaudeModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
