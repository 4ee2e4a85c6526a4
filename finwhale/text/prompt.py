"""Conversations to token ids: the prompt of a request, and a whole conversation with its targets.

The text is written by `deepseek-recipe` (the extra `chat`); this file owns the ids. Markers that
the template wrote become marker ids, and all other text is encoded as plain text, so a user who
types `<think>` cannot open a reasoning. It adds integer efforts and refuses arguments that would
end their own markup. A newcomer's mistake: training on a rendered history. Without tools it has
lost the reasoning of every closed turn; `encode_conversation` says what the model really writes.
Source: spec/multimodal-serving.md sections B.2 to B.5.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from finwhale.text.special_tokens import DSML, END_THINK, EOS, IMAGE
from finwhale.text.tokenizer import Tokenizer

EFFORTS = {
    "minimal": 50,
    "low": 50,
    "medium": 75,
    "high": 75,
    "xhigh": 75,
    "max": 100,
    "ultra": 100,
}
DEFAULT_EFFORT = 75
_MODEL = "DeepSeek-V4.1-Flash"
# The line that the library writes at its default effort; ours differs in the number alone.
_EFFORT_LINE = "Reasoning Effort: {} (range 1-100"
_END_OF_ARGUMENT = f"</{DSML}"
# `namespace::tool`, as the library names a tool in a namespace and refuses it in a chat.
_NAMESPACED = re.compile(r"[A-Za-z0-9_-]+::[A-Za-z0-9_-]+")


class PromptError(ValueError):
    """A conversation that cannot be rendered; the text names the field and the remedy."""


class Segment(NamedTuple):
    """A run of prompt text: one marker that the template wrote, or plain text."""

    text: str
    is_marker: bool


def effort_of(effort: str | int) -> int:
    """Return the number that the prompt shows for an effort, 1 to 100.

    Names give 50, 75 or 100; an integer stands for itself. "none" is the default of a request
    that asked for thinking all the same. spec/multimodal-serving.md section B.3.
    """
    if isinstance(effort, str) and effort in {*EFFORTS, "none"}:
        return EFFORTS.get(effort, DEFAULT_EFFORT)
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    want = f"an integer from 1 to 100 or one of {', '.join(['none', *EFFORTS])}"
    raise PromptError(f"effort: got {effort!r}, expected {want}")


def thinking_and_effort(
    thinking: bool | None = None, effort: str | int | None = None
) -> tuple[bool, int]:
    """Return whether a request thinks and its effort, None standing for a field it left out.

    Thinking decides where it is given; otherwise the request thinks unless its effort is "none".
    spec/multimodal-serving.md section B.3.
    """
    number = DEFAULT_EFFORT if effort is None else effort_of(effort)
    return (effort != "none" if thinking is None else thinking), number


def render_prompt(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | int = DEFAULT_EFFORT,
    response_format: Mapping[str, Any] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
) -> list[Segment]:
    """Return the prompt of a request as segments; their texts joined are the prompt.

    messages         OpenAI style: role, content, reasoning_content, tool_calls, tool_call_id
    tools            OpenAI style: {"type": "function", "function": {name, parameters, ...}}
    response_format  {"type": "json_object"} or {"type": "json_schema", ...}
    tool_choice      "auto", "none", "required" or a named function; the latter two open the calls

    The prompt ends with the header of the turn to generate, `<Assistant><think>` or
    `<Assistant></think>`; an image is one marker. spec/multimodal-serving.md section B.2.
    """
    number = effort_of(effort)
    for message in messages:
        _refuse_arguments_that_end_their_markup(message)
    optional = {
        "tools": list(tools) if tools else None,
        "response_format": response_format,
        "tool_choice": tool_choice,
    }
    body = {
        "model": _MODEL,
        "messages": list(messages),
        "thinking": {"type": "enabled" if thinking else "disabled"},
        **{name: value for name, value in optional.items() if value is not None},
    }
    segments = _render(*_without_namespaces(body))
    if thinking:
        # Markers 0 and 1 are begin-of-sentence and system; the effort line opens the next segment.
        written, wanted = _EFFORT_LINE.format(DEFAULT_EFFORT), _EFFORT_LINE.format(number)
        if segments[2].is_marker or not segments[2].text.startswith(written):
            want = "its effort line after the system marker; finwhale knows version 0.2"
            raise PromptError(f"deepseek-recipe: got {segments[2].text[:40]!r}, expected {want}")
        segments[2] = Segment(wanted + segments[2].text.removeprefix(written), False)
    return segments


def render_reply(message: Mapping[str, Any], *, thinking: bool = True) -> list[Segment]:
    """Return what the model generates after its header to say `message`, EOS included.

    Thinking: `reasoning </think> content calls EOS`; otherwise `content calls EOS`.
    spec/multimodal-serving.md section B.5.
    """
    if message.get("role") != "assistant" or message.get("prefix"):
        got = {name: message.get(name) for name in ("role", "prefix")}
        raise PromptError(f"message: got {got}, expected a whole turn of role 'assistant'")
    _refuse_arguments_that_end_their_markup(message)
    reasoning = message.get("reasoning_content") or ""
    calls = [{**call, "id": str(i)} for i, call in enumerate(message.get("tool_calls") or ())]
    turn_alone = {**message, "reasoning_content": None, "tool_calls": calls or None}
    # The library renders calls only with their results, which stand after this turn's EOS.
    results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
    messages = [{"role": "user", "content": ""}, turn_alone, *results]
    # Without thinking the turn begins after the header's own `</think>`, the first in the text.
    body = {"model": _MODEL, "messages": messages, "thinking": {"type": "disabled"}}
    turn = _render(*_without_namespaces(body))
    begin = turn.index(Segment(END_THINK, True)) + 1
    reply = turn[begin : turn.index(Segment(EOS, True)) + 1]
    if not thinking:
        return reply
    thoughts = [Segment(reasoning, False)] if reasoning else []
    return [*thoughts, Segment(END_THINK, True), *reply]


def encode_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | int = DEFAULT_EFFORT,
    response_format: Mapping[str, Any] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids of `render_prompt`; raise TokenizerError for a marker the file lacks."""
    segments = render_prompt(
        messages,
        tools=tools,
        thinking=thinking,
        effort=effort,
        response_format=response_format,
        tool_choice=tool_choice,
    )
    return [token for segment in segments for token in encode_segment(tokenizer, segment)]


def encode_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | int = DEFAULT_EFFORT,
    response_format: Mapping[str, Any] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
) -> tuple[list[int], list[bool]]:
    """Return the ids of a finished conversation and, for each, whether the model generates it.

    The last message is the assistant's. Generated are reasoning, `</think>`, content, calls and
    EOS of every assistant turn whose ids up to its header equal `encode_prompt` of the messages
    before it. Others are history as a later request shows it: without tools, a thinking
    conversation has one such turn, the last. spec/multimodal-serving.md section B.4.
    """
    if not messages or messages[-1].get("role") != "assistant":
        role = messages[-1].get("role") if messages else None
        raise PromptError(f"messages: last role: got {role!r}, expected 'assistant'")
    if tool_choice not in (None, "auto", "none"):
        want = "'auto' or 'none', since an opened calls block is part of no finished turn"
        raise PromptError(f"tool_choice: got {tool_choice!r}, expected {want}")

    def prompt_before(index: int) -> list[Segment]:
        return render_prompt(
            messages[:index],
            tools=tools,
            thinking=thinking,
            effort=effort,
            response_format=response_format,
            tool_choice=tool_choice,
        )

    segments = [*prompt_before(len(messages) - 1), *render_reply(messages[-1], thinking=thinking)]
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and i]
    prompts = [prompt_before(index) for index in turns]
    starts = {len(prompt) for prompt in prompts if segments[: len(prompt)] == prompt}
    ids: list[int] = []
    is_target: list[bool] = []
    is_generated = False
    for position, segment in enumerate(segments):
        is_generated = is_generated or position in starts
        tokens = encode_segment(tokenizer, segment)
        ids.extend(tokens)
        is_target.extend([is_generated] * len(tokens))
        is_generated = is_generated and segment != Segment(EOS, True)
    return ids, is_target


def encode_segment(tokenizer: Tokenizer, segment: Segment) -> list[int]:
    """Return the marker's id, or the ids of plain text, in which no marker id can occur."""
    if segment.is_marker:
        return [tokenizer.marker_id(segment.text)]
    return tokenizer.encode(segment.text)


def _refuse_arguments_that_end_their_markup(message: Mapping[str, Any]) -> None:
    """Raise for a call whose text would close its own parameter: the format has no escape."""
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = str(function.get("arguments"))
        # Escapes in the JSON text would hide the marker.
        with contextlib.suppress(ValueError):
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
        for name, text in (("name", str(function.get("name"))), ("arguments", arguments)):
            if _END_OF_ARGUMENT in text:
                want = f"text without {_END_OF_ARGUMENT!r}, which ends an argument; take it out"
                raise PromptError(
                    f"tool_calls: function.{name}: got {text[:80]!r}, expected {want}"
                )


def _render(body: dict[str, Any], names: Mapping[str, str]) -> list[Segment]:
    """Return the library's rendering of a chat request, cut at the markers it wrote.

    names  {stand-in: name} of `_without_namespaces`
    """
    recipe = _recipe()
    markers = recipe.SpecialTokens(image=IMAGE)
    try:
        request = recipe.ChatCompletionRequest(body)
        options = recipe.ConversionOptions().with_special_tokens(markers)
        conversation = request.convert(options).conversation
        if names:
            conversation = _with_names(conversation, names)
        encoding = recipe.DeepseekV41Encoding().with_special_tokens(markers)
        rendered = encoding.render_conversation(conversation)
    except (ValueError, TypeError, recipe.ConversionError) as error:
        told = str(error)
        for stand_in, name in names.items():
            told = told.replace(stand_in, name)
        raise PromptError(f"conversation: {told}") from None
    prompt, at = rendered.prompt, 0
    segments = []
    for begin, end in [*rendered.special_ranges, (len(prompt), len(prompt))]:
        segments += [Segment(prompt[at:begin], False), Segment(prompt[begin:end], True)]
        at = end
    return [segment for segment in segments if segment.text]


def _without_namespaces(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the body with a stand-in for each name `namespace::tool`, and {stand-in: name}.

    Tools, calls of the history and a named choice have names.
    """
    functions = [
        function
        for holder in (
            *(body.get("tools") or ()),
            *(call for m in body["messages"] for call in m.get("tool_calls") or ()),
            body.get("tool_choice"),
        )
        if isinstance(holder, Mapping) and isinstance(function := holder.get("function"), dict)
    ]
    given = {str(function.get("name")) for function in functions}
    spaced = sorted(name for name in given if _NAMESPACED.fullmatch(name))
    if not spaced:
        return body, {}
    free = (name for i in itertools.count() if (name := f"namespaced-{i:06}") not in given)
    stand_ins = dict(zip(spaced, free, strict=False))

    def renamed(holder: Any) -> Any:
        function: Any = holder.get("function") if isinstance(holder, Mapping) else None
        if not isinstance(function, dict) or str(function.get("name")) not in stand_ins:
            return holder
        return {**holder, "function": {**function, "name": stand_ins[str(function["name"])]}}

    messages = [
        {**m, "tool_calls": [renamed(call) for call in m["tool_calls"]]}
        if m.get("tool_calls")
        else m
        for m in body["messages"]
    ]
    changed = {**body, "messages": messages}
    if body.get("tools"):
        changed["tools"] = [renamed(tool) for tool in body["tools"]]
    if body.get("tool_choice"):
        changed["tool_choice"] = renamed(body["tool_choice"])
    return changed, {stand_in: name for name, stand_in in stand_ins.items()}


def _with_names(conversation: Any, names: Mapping[str, str]) -> Any:
    """Return the library's conversation with the names that stand-ins stood for."""
    recipe = _recipe()

    def named(message: Any) -> Any:
        if message.role != "assistant" or not message.tool_calls:
            return message
        calls = [
            recipe.ToolCall(call.id, names.get(call.name, call.name), call.arguments)
            for call in message.tool_calls
        ]
        return recipe.AssistantMessage(
            message.content, message.reasoning_content, calls, message.prefix
        )

    tools = [
        recipe.ToolDefinition(
            names.get(tool.name, tool.name),
            tool.description,
            tool.parameters,
            tool.strict,
            tool.defer_loading,
        )
        for tool in conversation.tools
    ]
    form = conversation.response_format
    return recipe.Conversation(
        [named(message) for message in conversation.messages],
        thinking_mode=conversation.thinking_mode,
        tools=tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
        response_format=form if form == "json_object" else "text",
        response_schema=conversation.response_schema,
        response_regex=conversation.response_regex,
    )


@functools.cache
def _recipe() -> ModuleType:
    """Return the library, imported at the first prompt."""
    try:
        import deepseek_recipe
    except ImportError:
        raise ModuleNotFoundError(
            "a prompt needs deepseek-recipe, which is not installed; pip install 'finwhale[chat]'",
            name="deepseek_recipe",
        ) from None
    return deepseek_recipe
