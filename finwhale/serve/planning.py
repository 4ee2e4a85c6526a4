"""What a client asks, as values, and the plan the engine is given: prompt ids and settled options.

Everything here is plain data or makes plain data, without torch and without a web framework, so a
large body can be planned in another process (finwhale/serve/body_process.py) while the event loop
and the engine go on. It owns `ChatRequest`, `CompletionRequest` and `Sampling`, the default of
every field that a client left out, and the translation of each room's refusal to an
`InvalidRequestError` with the field at fault. Grammars and readers are built from a plan by
finwhale/serve/preparation.py. Source: spec/multimodal-serving.md sections B.2 to B.7.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from finwhale.config.server import ServerConfig
from finwhale.serve.errors import ROOM_WORDS, InvalidRequestError, ServeError
from finwhale.telemetry import get_logger
from finwhale.text.output_parser import OutputParserError, check_stops
from finwhale.text.prompt import (
    PromptError,
    encode_prompt,
    strict_parameters,
    strict_response_schema,
    thinking_and_effort,
)
from finwhale.text.special_tokens import END_THINK, THINK
from finwhale.text.tokenizer import Tokenizer, TokenizerError

logger = get_logger("serve")

MAX_NEW_TOKENS = 393_216  # spec/multimodal-serving.md section B.7
_TEXT_PARTS = ("text", "tool_result")
_FIELD = re.compile(r"[A-Za-z_]\w*(?=[.:\[])")
_NO_THINKING = (
    "tool_choice: got a forced call while thinking is on, expected thinking off; send "
    "thinking disabled or reasoning_effort none"
)
_THINKING_OFF = "thinking is off for this request, since tool_choice forces a call"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen; None takes the server's default. The client's values are honoured.

    max_tokens         None: the server's default, as far as the context has room
    stop               at most 16 texts; matched in the answer alone and not part of it
    n                  choices
    logprobs           whether tokens carry log-probabilities, `top_logprobs` alternatives beside
    logit_bias         added to the logit of an id
    presence_penalty   subtracted from the logit of each id that was drawn, -2 to 2
    frequency_penalty  subtracted for each time that the id was drawn, -2 to 2
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A conversation to go on with.

    messages         OpenAI style: role, content, reasoning_content, tool_calls, tool_call_id
    tools            OpenAI style: {"type": "function", "function": {name, parameters, ...}}
    tool_choice      "auto", "none", "required" or a named function
    thinking         None: think unless the effort is "none"
    effort           a name of finwhale.text.prompt.EFFORTS, "none" or 1 to 100
    response_format  {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema"}},
                     {"type": "regex", "regex": ...}; enforced unless tools may be called
    parallel_tool_calls  whether one answer may hold several calls
    tenant           cached prefixes are shared within it alone
    notes            what the protocol left out of the body, in words for the client
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    thinking: bool | None = None
    effort: str | int | None = None
    response_format: Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    sampling: Sampling = Sampling()
    tenant: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A raw prompt to go on with: text, in which no marker counts, or token ids.

    A text gets the begin marker before it, ids are taken as they are. The answer's text is not
    parsed: reasoning and calls are part of it.

    echo  every choice repeats the prompt; with `sampling.logprobs` its tokens carry theirs
    """

    prompt: str | Sequence[int]
    echo: bool = False
    sampling: Sampling = Sampling()
    tenant: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One request with everything settled that needs no grammar library and no engine.

    prompt        [T] int32 token ids
    sampling      the client's options; temperature, top_p and max_tokens are settled
    reads_chat    whether the answer is parsed as reasoning, content and calls
    is_thinking   whether the request thinks
    is_reasoning  whether the prompt ends inside a reasoning
    may_call      whether calls are looked for in the answer
    max_calls     most calls of the answer, None for any number
    must_call     (name, JSON schema of the arguments) of the functions that the answer has to
                  call one of; () leaves it free
    response_format  as asked, a strict schema written out; enforced unless tools may be called
    num_prefix    how many ids at the prompt's end begin the answer
    echo          how many ids at the prompt's end every choice repeats, 0 for none
    notes         what is served otherwise than asked, in words for the client
    """

    prompt: np.ndarray
    sampling: Sampling
    tenant: str
    reads_chat: bool
    is_thinking: bool = False
    is_reasoning: bool = False
    may_call: bool = False
    max_calls: int | None = None
    must_call: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    response_format: Mapping[str, Any] | None = None
    num_prefix: int = 0
    echo: int = 0
    notes: tuple[str, ...] = ()


class Planner:
    """Plans requests to one model; may run in any thread, and travels to another process.

    context_tokens  prompt and answer together, at most
    """

    def __init__(self, tokenizer: Tokenizer, config: ServerConfig, *, context_tokens: int) -> None:
        """Keep what every request needs."""
        self.tokenizer, self.config, self.context_tokens = tokenizer, config, context_tokens
        self._most_bytes = context_tokens * tokenizer.longest_token_bytes

    def warm_up(self) -> None:
        """Load what the first plan would load."""
        message = {"role": "user", "content": "a"}
        # A tokenizer without markers serves completions alone.
        with contextlib.suppress(ServeError):
            self.chat(ChatRequest(messages=[message], thinking=False))

    def chat(self, request: ChatRequest) -> Plan:
        """Return the plan of a chat; raise InvalidRequestError for what could not be served."""
        return _with_refusals(self._chat, request)

    def text(self, request: CompletionRequest) -> Plan:
        """Return the plan of a completion; raise InvalidRequestError as `chat` does."""
        return _with_refusals(self._text, request)

    def _chat(self, request: ChatRequest) -> Plan:
        _check_messages(request.messages)
        self._check_length(_texts_of(request), "messages")
        check_stops(request.sampling.stop)
        thinking, effort = thinking_and_effort(request.thinking, request.effort)
        tools = list(request.tools or ())
        must_call = _check_tool_choice(tools, request.tool_choice)
        notes = request.notes
        if must_call and thinking:
            if self.config.strict_tool_choice:
                raise InvalidRequestError(_NO_THINKING, param="tool_choice")
            thinking, notes = False, (*notes, _THINKING_OFF)
        prompt = encode_prompt(
            self.tokenizer,
            request.messages,
            tools=tools or None,
            thinking=thinking,
            effort=effort,
            response_format=request.response_format,
            tool_choice=request.tool_choice,
        )
        self._check_room(prompt, request.sampling, "messages")
        tag = _last_tag(self.tokenizer, prompt)
        is_reasoning = tag is not None and prompt[tag] == self.tokenizer.marker_id(THINK)
        called = _called_tools(tools, request.tool_choice) if must_call else []
        return Plan(
            prompt=np.array(prompt, np.int32),
            sampling=self._settled(request.sampling, len(prompt), is_thinking=thinking),
            tenant=request.tenant,
            reads_chat=True,
            is_thinking=thinking,
            is_reasoning=is_reasoning,
            may_call=bool(tools) and request.tool_choice != "none",
            max_calls=None if request.parallel_tool_calls else 1,
            must_call=tuple(called),
            response_format=_explicit(request.response_format),
            # What stands after the tag is the beginning of the answer, a prefix.
            num_prefix=0 if tag is None or is_reasoning else len(prompt) - tag - 1,
            notes=notes,
        )

    def _text(self, request: CompletionRequest) -> Plan:
        check_stops(request.sampling.stop)
        if isinstance(request.prompt, str):
            self._check_length([request.prompt], "prompt")
            ids = self.tokenizer.encode(request.prompt)
            prompt = [self.tokenizer.bos_id, *ids]
        else:
            ids = prompt = list(request.prompt)
        if not all(0 <= token < 2**31 for token in prompt):
            bad = next(token for token in prompt if not 0 <= token < 2**31)
            raise InvalidRequestError(
                f"prompt: got id {bad}, expected ids of the vocabulary", param="prompt"
            )
        self._check_room(prompt, request.sampling, "prompt")
        return Plan(
            prompt=np.array(prompt, np.int32),
            sampling=self._settled(request.sampling, len(prompt), is_thinking=False),
            tenant=request.tenant,
            reads_chat=False,
            echo=len(ids) if request.echo else 0,
        )

    def _settled(self, sampling: Sampling, num_prompt: int, *, is_thinking: bool) -> Sampling:
        """Return the options: the client's values, then defaults, then normalisation."""
        config = self.config
        if sampling.n > config.max_choices:
            want = f"at most {config.max_choices}"
            raise InvalidRequestError(f"n: got {sampling.n}, expected {want}", param="n")
        temperature = config.temperature if sampling.temperature is None else sampling.temperature
        top_p = config.top_p if sampling.top_p is None else sampling.top_p
        if config.deepseek_normalise:
            # spec/multimodal-serving.md section B.7
            temperature = 1.0 if is_thinking else temperature
            top_p = min(1.0, max(0.95, top_p)) if is_thinking else 1.0
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            max_tokens = min(config.default_max_tokens, self.context_tokens - num_prompt)
        return replace(sampling, max_tokens=max_tokens, temperature=temperature, top_p=top_p)

    def _check_length(self, texts: Iterable[str], param: str) -> None:
        """Refuse texts whose bytes no number of tokens of the context could hold."""
        most, got = self._most_bytes, 0
        for text in texts:
            # A text of N characters has at least N bytes, and is not encoded to be refused.
            got += len(text) if len(text) > most else len(text.encode("utf-8", "replace"))
            if got > most:
                raise _too_long(param, f"more than {most} bytes", self.context_tokens)

    def _check_room(self, prompt: Sequence[int], sampling: Sampling, param: str) -> None:
        """Refuse a prompt that leaves no token to generate where one is asked for."""
        if len(prompt) >= self.context_tokens and sampling.max_tokens != 0:
            raise _too_long(param, f"{len(prompt)} tokens", self.context_tokens)


def _too_long(param: str, got: str, context_tokens: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param}: got {got}, expected fewer than the context of {context_tokens} tokens; "
        "shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )


def refusal(error: Exception) -> InvalidRequestError:
    """Return a room's refusal with the field at fault, which begins its message."""
    # The path of a field ends with a colon, and its name with the first dot or bracket.
    field_name = _FIELD.match(str(error))
    name = field_name.group() if field_name is not None else None
    text = str(error).replace("max_new_tokens", "max_tokens")
    return InvalidRequestError(text, param=ROOM_WORDS.get(name or "", name), code="invalid_value")


def _with_refusals(plan: Callable[[Any], Plan], request: Any) -> Plan:
    """Return plan(request); what it refuses becomes an InvalidRequestError with its field."""
    try:
        return plan(request)
    except ServeError:
        raise
    except TokenizerError as error:
        # The message names a file of this machine, which is nobody's business.
        logger.warning("a prompt could not be encoded: %s", error)
        raise InvalidRequestError(
            "model: its tokenizer lacks a marker that the prompt needs; ask for a completion of "
            "token ids instead",
            param="model",
            code="no_marker",
        ) from None
    except (PromptError, OutputParserError) as error:
        raise refusal(error) from None
    except ModuleNotFoundError as error:
        raise InvalidRequestError(str(error), code="not_installed") from None
    except OverflowError as error:
        # The prompt library's numbers are those of 64 bits.
        raise InvalidRequestError(f"messages: {error}", param="messages") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply; flatten it") from None
    except BaseException as error:
        # A panic of the prompt library's Rust code; nothing of the process is harmed by it.
        if not type(error).__module__.startswith("pyo3_runtime"):
            raise
        logger.exception("a prompt could not be rendered")
        raise InvalidRequestError(
            "messages: this conversation cannot be rendered; simplify it", param="messages"
        ) from None


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what the prompt encoder does not look at: foreign shapes, and images."""
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        calls = message.get("tool_calls")
        if calls is not None and not (
            isinstance(calls, list)
            and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)
        ):
            want = "a list of objects with a function object"
            raise InvalidRequestError(
                f"{where}.tool_calls: got {str(calls)[:80]}, expected {want}", param="messages"
            )
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in _TEXT_PARTS:
                want = "a part of type 'text', since this server reads no images"
                raise InvalidRequestError(
                    f"{where}.content: got {str(kind)[:80]!r}, expected {want}", param="messages"
                )


def _texts_of(request: ChatRequest) -> Iterator[str]:
    """Yield the long texts of a chat: contents, reasoning and arguments of its messages."""
    for message in request.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        values = [part.get("text") if isinstance(part, dict) else part for part in parts]
        for call in message.get("tool_calls") or ():
            values.append(call["function"].get("arguments"))
        yield from (v for v in (*values, message.get("reasoning_content")) if isinstance(v, str))


def _last_tag(tokenizer: Tokenizer, prompt: Sequence[int]) -> int | None:
    """Return where the prompt's last `<think>` or `</think>` marker stands.

    The header of the turn to generate ends with one, behind which only a prefix can stand.
    """
    tags = (tokenizer.marker_id(THINK), tokenizer.marker_id(END_THINK))
    return next((i for i in reversed(range(len(prompt))) if prompt[i] in tags), None)


def _check_tool_choice(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None
) -> bool:
    """Return whether a call is forced; refuse a choice that no declared tool can satisfy."""
    if choice in (None, "auto", "none"):
        return False
    if not isinstance(choice, Mapping) and choice != "required":
        want = "'auto', 'none', 'required' or a named function"
        raise InvalidRequestError(
            f"tool_choice: got {str(choice)[:80]!r}, expected {want}", param="tool_choice"
        )
    names = [_name_of(tool) for tool in tools]
    wanted = _name_of(choice) if isinstance(choice, Mapping) else None
    if not tools or (wanted is not None and wanted not in names):
        got = "required" if wanted is None else f"the function {wanted[:80]!r}"
        declared = ", ".join(names[:8]) if names else "none is declared"
        raise InvalidRequestError(
            f"tool_choice: got {got}, expected a tool of this request ({declared}); "
            "declare it in tools, or leave tool_choice out",
            param="tool_choice",
        )
    return True


def _name_of(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str(function.get("name")) if isinstance(function, Mapping) else "None"


def _called_tools(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (name, schema) of the functions that a required or named choice may call."""
    wanted = _name_of(choice) if isinstance(choice, Mapping) else None
    found = []
    for index, tool in enumerate(tools):
        if wanted in (None, _name_of(tool)):
            strict = strict_parameters(tool, index)
            schema = tool["function"].get("parameters") or {}
            found.append((_name_of(tool), schema if strict is None else strict))
    return found


def _explicit(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a response format in which a strict schema says all that it means."""
    schema = strict_response_schema(response_format)
    if response_format is None or schema is None:
        return response_format
    return {**response_format, "json_schema": {**response_format["json_schema"], "schema": schema}}
