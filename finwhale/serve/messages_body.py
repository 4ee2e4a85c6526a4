"""Bodies of the Anthropic protocol: blocks of a request become messages of a chat.

It owns the bodies of POST /v1/messages and of its token counting. Requests think unless they say
otherwise, as the hosted service and not Anthropic does it. Text is read wherever it stands: text
documents and search results also inside a tool's result, whose `is_error` becomes the words
"Error: " before its text. Tools that Anthropic's servers would run are left out by name. It
refuses images, PDFs and blocks of unknown kinds, and continues no prefill. A newcomer's mistake:
expecting `cache_control`, citations or a thinking budget to change an answer; they have no effect.
Source: spec/multimodal-serving.md section D.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from finwhale.serve.errors import InvalidRequestError
from finwhale.serve.notes import left_out
from finwhale.serve.planning import MAX_NEW_TOKENS, ChatRequest, Plan, Planner, Sampling
from finwhale.serve.schema import MAX_USER_ID, AnswerOptions
from finwhale.text.output_parser import OutputParserError, check_stops

ERROR_MARK = "Error: "


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


class SearchResultBlock(_Block, frozen=True, tag="search_result"):
    """A search result of the client: title, source and text."""

    source: str
    title: str
    content: list[TextBlock]


class ToolReferenceBlock(_Block, frozen=True, tag="tool_reference"):
    """The name of a tool, in the result of a search for tools."""

    tool_name: str


class ToolResultBlock(_Block, frozen=True, tag="tool_result"):
    """The answer of a tool; `is_error` puts "Error: " before its text."""

    tool_use_id: str
    content: (
        str
        | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock]
        | None
    ) = None
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
            | SearchResultBlock
        ]
    )


class Tool(msgspec.Struct, frozen=True):
    """A tool of the client; one with another type than "custom" is Anthropic's, and left out."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """Which tools may be called, and whether one answer may hold several calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


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


class _Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer and a count of tokens are asked with; unknown fields are ignored."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None

    def _request(self, tenant: str, sampling: Sampling) -> ChatRequest:
        output = self.output_config or OutputConfig()
        choice = self.tool_choice
        foreign = [tool for tool in self.tools or () if not _is_own(tool)]
        return ChatRequest(
            messages=_chat_messages(self.system, self.messages),
            tools=[_function(tool) for tool in self.tools or () if _is_own(tool)] or None,
            tool_choice=_chat_tool_choice(choice, self.tools or ()),
            thinking=None if self.thinking is None else self.thinking.type != "disabled",
            effort=output.effort,
            response_format=_response_format(output.format),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            sampling=sampling,
            tenant=tenant,
            notes=left_out("tools", [tool.type or "" for tool in foreign]),
        )


class MessagesBody(_Conversation, frozen=True, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    stream: bool | None = None

    def plans(self, planner: Planner, tenant: str) -> list[Plan]:
        """Return the one plan of this body; raise InvalidRequestError for a bad value."""
        return [planner.chat(self.request(tenant))]

    def options(self) -> AnswerOptions:
        """Return what an answer needs of this body."""
        return AnswerOptions(model=self.model, stream=bool(self.stream))

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
        sampling = Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or 0,
            stop=stop,
        )
        return self._request(tenant, sampling)


class CountTokensBody(_Conversation, frozen=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    def plans(self, planner: Planner, tenant: str) -> list[Plan]:
        """Return the plan whose prompt is counted; raise InvalidRequestError for a bad value."""
        return [planner.chat(self.request(tenant))]

    def options(self) -> AnswerOptions:
        """Return what an answer needs of this body."""
        return AnswerOptions(model=self.model)

    def request(self, tenant: str) -> ChatRequest:
        """Return the request whose prompt is counted; raise InvalidRequestError for a bad value."""
        # A request for no tokens needs no room after its prompt.
        return self._request(tenant, Sampling(max_tokens=0))


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
            found.append(_tool_message(block, place))
            continue
        part = _text_part(block, place)
        if found and found[-1]["role"] == role:
            found[-1]["content"].append(part)
        else:
            found.append({"role": role, "content": [part]})
    return found


def _tool_message(block: ToolResultBlock, where: str) -> dict[str, Any]:
    """Return a tool's result; a failed one begins with ERROR_MARK, the only trace of `is_error`."""
    content = block.content or ""
    if not isinstance(content, str):
        content = [_text_part(part, f"{where}.content.{n}") for n, part in enumerate(content)]
    if block.is_error:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        begin = parts[0]["text"]
        if not begin.startswith(ERROR_MARK):
            parts[0] = {"type": "text", "text": f"{ERROR_MARK}{begin}"}
        content = parts
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _text_part(block: Any, where: str) -> dict[str, str]:
    text = None
    if isinstance(block, TextBlock):
        text = block.text
    elif isinstance(block, SearchResultBlock):
        passages = "\n\n".join(passage.text for passage in block.content)
        text = f"{block.title}\n{block.source}\n\n{passages}"
    elif isinstance(block, ToolReferenceBlock):
        text = block.tool_name
    elif isinstance(block, DocumentBlock):
        text = _document_text(block.source)
    if text is None:
        raise _refused(where, block, "text, since this server reads no images and no files")
    return {"type": "text", "text": text}


def _document_text(source: Mapping[str, Any]) -> str | None:
    """Return the text of a document: plain, or the text blocks that it is given as."""
    kind, content = source.get("type"), source.get("content")
    if kind == "text":
        return str(source.get("data", ""))
    if kind == "content" and isinstance(content, str):
        return content
    if kind == "content" and isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n\n".join(map(str, texts))
    return None


def _is_own(tool: Tool) -> bool:
    """Return whether the client runs this tool and says how to call it."""
    return tool.type in (None, "custom")


def _function(tool: Tool) -> dict[str, Any]:
    if tool.name is None:
        raise _refused("tools", None, "a name in each tool")
    optional = {
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    fields = {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **fields}}


def _chat_tool_choice(
    choice: ToolChoice | None, tools: Sequence[Tool]
) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise _refused("tool_choice.name", None, "the name of a tool")
        foreign = {tool.name for tool in tools if not _is_own(tool)}
        if choice.name in foreign:
            want = "a tool that the client runs, since this server has none of Anthropic's"
            raise _refused("tool_choice.name", choice.name, want)
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
