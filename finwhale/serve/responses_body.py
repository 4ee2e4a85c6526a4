"""Bodies of the Responses protocol: items become messages of a chat, tools become functions.

It owns the body of POST /v1/responses and of its token counting, and the few values that an answer
repeats of it. Functions inside a `namespace` are named `namespace::function` for the model and
named back in the answer. Tools that the client does not run as functions, and items of such tools,
are left out by name. It refuses images, files, references to stored items and answers (the server
keeps none), and unknown items. A newcomer's mistake: sending back only the messages; in a tool
loop the reasoning items belong to the history as well.
Source: spec/multimodal-serving.md section D.4.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from finwhale.serve.errors import InvalidRequestError
from finwhale.serve.notes import left_out
from finwhale.serve.planning import MAX_NEW_TOKENS, ChatRequest, Plan, Planner, Sampling
from finwhale.serve.schema import MAX_USER_ID, check_metadata

MAX_TOP_LOGPROBS = 20
# What an answer repeats of its request; three events of a stream have it.
MAX_ECHO_BYTES = 16_384
_TEXT_TYPES = ("input_text", "output_text", "text")
_ENCODED_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
# Tools whose calls this server cannot make; `web_search...` and `computer...` have versions.
_FOREIGN_TOOLS = (
    "custom",
    "image_generation",
    "local_shell",
    "shell",
    "apply_patch",
    "tool_search",
    "web_search",
    "file_search",
    "computer",
    "mcp",
    "code_interpreter",
    "programmatic_tool_calling",
)
# Items of tools that another server ran: their results are not text for this model.
_FOREIGN_ITEMS = (
    "web_search_call",
    "file_search_call",
    "computer_call",
    "computer_call_output",
    "image_generation_call",
    "code_interpreter_call",
    "tool_search_call",
    "tool_search_output",
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
)
_STORED_ITEMS = ("item_reference", "compaction", "context_compaction", "compaction_trigger")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


class Part(msgspec.Struct, frozen=True):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, frozen=True):
    """An item of the history; without a type it is a message."""

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    action: Any = None
    output: Any = None
    tools: list[dict[str, Any]] | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """`reasoning`; with a `summary` the reasoning is told as one, word for word."""

    effort: str | int | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """`text`; verbosity has no effect."""

    format: dict[str, Any] | None = None


class ResponsesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer needs of its body.

    echo             fields that the response object repeats, bounded
    namespaces       {name for the model: (namespace, name of the client)}
    has_summary      the reasoning is told as a summary
    has_logprobs     the text carries log-probabilities
    has_encoded      reasoning items carry their text a second time, encoded
    """

    model: str | None
    stream: bool
    echo: dict[str, Any]
    namespaces: dict[str, tuple[str, str]]
    has_summary: bool
    has_logprobs: bool
    has_encoded: bool


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/responses; unknown fields are ignored."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None

    def plans(self, planner: Planner, tenant: str) -> list[Plan]:
        """Return the one plan of this body; raise InvalidRequestError for a bad value."""
        return [planner.chat(self.request(tenant))]

    def request(self, tenant: str) -> ChatRequest:
        """Return what the service is asked for; raise InvalidRequestError for a bad value."""
        self._check()
        told = [] if not self.instructions else [{"role": "system", "content": self.instructions}]
        tools = _Tools(self._declared())
        choice = _chat_tool_choice(self.tool_choice, tools)
        given = self.input if isinstance(self.input, list) else []
        foreign = [item.type for item in given if item.type in _FOREIGN_ITEMS]
        return ChatRequest(
            messages=[*told, *_chat_messages(self.input)],
            tools=tools.functions or None,
            tool_choice=choice,
            effort=None if self.reasoning is None else self.reasoning.effort,
            response_format=_response_format((self.text or TextOptions()).format),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            sampling=Sampling(
                max_tokens=self.max_output_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                logprobs=self._has_logprobs,
                top_logprobs=self.top_logprobs or 0,
            ),
            tenant=tenant,
            notes=(*left_out("tools", tools.foreign), *left_out("input items", foreign)),
        )

    def options(self) -> ResponsesOptions:
        """Return what an answer needs of this body, which `request` has accepted."""
        tools = _Tools(self._declared())
        wanted = self.reasoning or Reasoning()
        summary = wanted.summary or wanted.generate_summary
        return ResponsesOptions(
            model=self.model,
            stream=bool(self.stream),
            echo=self._echo(summary),
            namespaces=tools.namespaces,
            has_summary=summary not in (None, "none"),
            has_logprobs=self._has_logprobs,
            has_encoded=_ENCODED_REASONING in (self.include or ()),
        )

    @property
    def _has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def _declared(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the tools of the body and those that items of its input add, with their places."""
        found = [(f"tools[{n}]", tool) for n, tool in enumerate(self.tools or ())]
        for number, item in enumerate(self.input if isinstance(self.input, list) else ()):
            if item.type == "additional_tools":
                where = f"input[{number}].tools"
                found += [(f"{where}[{n}]", tool) for n, tool in enumerate(item.tools or ())]
        return found

    def _check(self) -> None:
        want = "nothing, since this server keeps no answers; send the whole history as input"
        if self.previous_response_id is not None:
            raise _refused("previous_response_id", self.previous_response_id, want)
        for name in ("background", "conversation", "prompt"):
            if getattr(self, name):
                raise _refused(name, getattr(self, name), want)
        limit = self.max_output_tokens
        if limit is not None and not 1 <= limit <= MAX_NEW_TOKENS:
            raise _refused("max_output_tokens", limit, f"1 to {MAX_NEW_TOKENS}")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise _refused("temperature", self.temperature, "0 to 2")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise _refused("top_logprobs", self.top_logprobs, f"0 to {MAX_TOP_LOGPROBS}")
        if len(self.user or "") > MAX_USER_ID:
            raise _refused("user", "a long name", f"at most {MAX_USER_ID} characters")
        check_metadata(self.metadata)

    def _echo(self, summary: str | None) -> dict[str, Any]:
        form = (self.text or TextOptions()).format or {"type": "text"}
        short_form = {"type": form.get("type"), "name": str(form.get("name"))[:64], "schema": {}}
        effort = self.reasoning and self.reasoning.effort
        return {
            "instructions": _bounded(self.instructions, None),
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": summary},
            "temperature": self.temperature,
            "text": {"format": _bounded(form, short_form)},
            "tool_choice": _bounded(self.tool_choice or "auto", "auto"),
            "tools": _bounded(self.tools or [], []),
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "user": self.user,
        }


class InputTokensBody(ResponsesBody, frozen=True, kw_only=True):
    """Body of POST /v1/responses/input_tokens: what a response would be asked for."""

    input: str | list[Item] = ""

    def plans(self, planner: Planner, tenant: str) -> list[Plan]:
        """Return the plan whose prompt is counted; raise InvalidRequestError for a bad value."""
        # A request for no tokens needs no room after its prompt.
        counted = replace(self.request(tenant), sampling=Sampling(max_tokens=0))
        return [planner.chat(counted)]


class _Tools:
    """Declared tools sorted: functions of a chat, namespaces, and what is left out."""

    def __init__(self, declared: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Sort pairs of a place and a tool; raise InvalidRequestError for a wrong one."""
        self.functions: list[dict[str, Any]] = []
        self.namespaces: dict[str, tuple[str, str]] = {}
        self.foreign: list[str] = []
        for where, tool in declared:
            kind = tool.get("type")
            if kind == "namespace":
                self._take_namespace(tool, where)
            else:
                self._take(tool, where, "", "")

    def _take_namespace(self, tool: Mapping[str, Any], where: str) -> None:
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not isinstance(inner, list):
            raise _refused(where, "a namespace", "its name and a list of tools")
        about = tool.get("description")
        for number, each in enumerate(inner):
            place = f"{where}.tools[{number}]"
            if not isinstance(each, dict):
                raise _refused(place, each, "an object")
            self._take(each, place, name, about if isinstance(about, str) else "")

    def _take(self, tool: Mapping[str, Any], where: str, namespace: str, about: str) -> None:
        kind, name = tool.get("type"), tool.get("name")
        if kind != "function":
            if not isinstance(kind, str) or not _is_foreign(kind):
                raise _refused(f"{where}.type", kind, "type 'function' or 'namespace'")
            inside = f"{namespace}::" if namespace else ""
            self.foreign.append(f"{kind} {inside}{name}" if isinstance(name, str) else kind)
            return
        names = ("name", "description", "parameters", "strict")
        fields = {field: tool[field] for field in names if tool.get(field) is not None}
        if namespace:
            whole = f"{namespace}::{name}"
            self.namespaces[whole] = (namespace, str(name))
            fields["name"] = whole
            if about:
                # As the model was trained on: spec section B.2.
                fields["description"] = f"{about}\n{fields.get('description', '')}"
        self.functions.append({"type": "function", "function": fields})

    def full_name(self, name: str, namespace: str | None) -> str:
        """Return the model's name of a function that a client names, with or without namespace."""
        if namespace:
            return f"{namespace}::{name}"
        if any(tool["function"].get("name") == name for tool in self.functions):
            return name
        within = [whole for whole, (_, own) in self.namespaces.items() if own == name]
        return within[0] if len(within) == 1 else name


def _is_foreign(kind: str) -> bool:
    return any(kind == name or kind.startswith(f"{name}_") for name in _FOREIGN_TOOLS)


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
        if item.type == "additional_tools" or item.type in _FOREIGN_ITEMS:
            continue
        is_own = item.type in ("reasoning", *_CALLS) or (
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
    if not found:
        raise _refused("input", "items of foreign tools alone", "at least one message")
    return found


def _join(turn: dict[str, Any], name: str, text: str, between: str) -> None:
    before = turn.get(name)
    turn[name] = f"{before}{between}{text}" if before else text


def _others_message(item: Item, where: str) -> dict[str, Any]:
    if item.type in _OUTPUTS:
        # A local shell names its call by the item's own id.
        call_id = item.call_id or (item.id if item.type == "local_shell_call_output" else None)
        if call_id is None:
            raise _refused(f"{where}.call_id", None, "the call_id of a call")
        parts = [{"type": "text", "text": text} for text in _output_texts(item.output, where)]
        return {"role": "tool", "tool_call_id": call_id, "content": parts}
    if item.type in _STORED_ITEMS:
        want = "the items themselves, since this server keeps no answers"
        raise _refused(f"{where}.type", item.type, want)
    if item.type != "message":
        want = "message, reasoning, function_call or function_call_output"
        raise _refused(f"{where}.type", item.type, want)
    if item.role is None:
        raise _refused(f"{where}.role", None, "user, assistant, system or developer")
    role = "user" if item.role == "user" else "system"
    parts = [{"type": "text", "text": text} for text in _texts(item.content, where)]
    return {"role": role, "content": parts}


def _call(item: Item, where: str) -> dict[str, Any]:
    """Return a call of the history; foreign ones become calls of a function with one argument."""
    name, arguments = item.name, item.arguments
    if item.type == "custom_tool_call":
        arguments = None if item.input is None else json.dumps({"input": item.input})
    elif item.type == "local_shell_call":
        name, arguments = "local_shell", json.dumps(item.action if item.action is not None else {})
    call_id = item.call_id or (item.id if item.type == "local_shell_call" else None)
    for field, got in (("call_id", call_id), ("name", name), ("arguments", arguments)):
        if not isinstance(got, str):
            field = "input" if (item.type, field) == ("custom_tool_call", "arguments") else field
            raise _refused(f"{where}.{field}", got, "a text")
    whole = f"{item.namespace}::{name}" if item.namespace else name
    return {"id": call_id, "type": "function", "function": {"name": whole, "arguments": arguments}}


def _thoughts(item: Item) -> str:
    """Return an item's reasoning: its content, what this server encoded, or its summary."""
    if isinstance(item.content, str):
        return item.content
    if item.content:
        return "\n".join(part.text or "" for part in item.content)
    try:
        decoded = base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        # Another server's, which nobody here can read.
        decoded = ""
    return decoded or "\n".join(part.text or "" for part in item.summary or ())


def _texts(content: str | Sequence[Part] | None, where: str) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    texts = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXT_TYPES, "refusal") or text is None:
            want = "a text, since this server reads no images and no files"
            raise _refused(f"{where}.content", part.type, want)
        texts.append(text)
    return texts


def _output_texts(output: Any, where: str) -> list[str]:
    """Return the texts of a tool's output: a text, or a list of parts."""
    try:
        return _texts(msgspec.convert(output, str | list[Part] | None), where)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{where}.output: {error}", param="input") from None


def _chat_tool_choice(
    choice: str | Mapping[str, Any] | None, tools: _Tools
) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    name, namespace = choice.get("name"), choice.get("namespace")
    if choice.get("type") != "function" or not isinstance(name, str):
        raise _refused("tool_choice", choice.get("type"), "type 'function' and its name")
    whole = tools.full_name(name, namespace if isinstance(namespace, str) else None)
    return {"type": "function", "function": {"name": whole}}


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


def _bounded(value: Any, short: Any) -> Any:
    """Return the value, or `short` for one that is too long to be repeated in every event."""
    return value if len(msgspec.json.encode(value)) <= MAX_ECHO_BYTES else short


def _refused(name: str, got: object, want: str) -> InvalidRequestError:
    param = name if name == "text.format" else name.partition(".")[0].partition("[")[0]
    return InvalidRequestError(f"{name}: got {str(got)[:80]!r}, expected {want}", param=param)
