"""Generated text to reasoning, content and tool calls, while it arrives.

A walk through states; each state has a table of markers, and text is held back only where it may
be the beginning of one of them. So the pieces may be cut anywhere and their sum is the same.
It refuses nothing: what the model wrote wrong becomes content or is dropped, as in DeepSeek's own
stream parser. A newcomer's mistake: feeding it EOS, which it takes for content; give ids to a
`TokenOutputParser`. Source: spec/multimodal-serving.md section B.6.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import secrets
import string
from collections.abc import Iterable, Sequence
from typing import Literal

from finwhale.text.special_tokens import DSML, END_THINK
from finwhale.text.tokenizer import Tokenizer

MAX_STOPS = 16
_CALL_ID_LETTERS = string.ascii_letters + string.digits

# The released spelling has a blank after the marker; that of V4 has none and says `tool_calls`.
_BLOCK_NAMES = tuple(f"{blank}{name}" for blank in (" ", "") for name in ("calls", "tool_calls"))
_OPENERS = tuple(f"<{DSML}{name}" for name in (*_BLOCK_NAMES, " invoke", "invoke"))
_CLOSERS = tuple(f"</{DSML}{name}>" for name in _BLOCK_NAMES)
_END = f"</{DSML}"
_CALL_NAME = 'invoke name="'
_PARAMETER_NAME = 'parameter name="'
_STRING_FOLLOWS = '" string="true">'
_JSON_FOLLOWS = '" string="false">'
_UNTYPED_FOLLOWS = '">'
_FENCES = ("```json\n", "```\n")
_END_OF_FENCE = "\n```"
_JSON_OPENERS = ("{", "[")


class OutputParserError(ValueError):
    """Settings with which no output can be parsed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """A piece of the answer; pieces of one kind and index join to the whole.

    reasoning, content  `text` goes on
    tool_call           a call begins: `index` from 0, `call_id`, `name`; text is empty
    arguments           `text` goes on with the JSON object of call `index`
    """

    kind: Literal["reasoning", "content", "tool_call", "arguments"]
    text: str = ""
    index: int | None = None
    call_id: str | None = None
    name: str | None = None


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    BEFORE_JSON = enum.auto()
    IN_JSON = enum.auto()
    AFTER_JSON = enum.auto()
    BETWEEN_CALLS = enum.auto()
    CALL_NAME = enum.auto()
    IN_CALL = enum.auto()
    PARAMETER_NAME = enum.auto()
    STRING_VALUE = enum.auto()
    JSON_VALUE = enum.auto()
    AFTER_CALLS = enum.auto()
    STOPPED = enum.auto()


# In JSON mode, text in these becomes blanks, one for one: prose around the value.
_AROUND_JSON = frozenset({_State.BEFORE_JSON, _State.AFTER_JSON})
_ANSWER = frozenset({_State.CONTENT, _State.IN_JSON}) | _AROUND_JSON
_SPEECH = _ANSWER | {_State.REASONING}
_NAMES = frozenset({_State.CALL_NAME, _State.PARAMETER_NAME})
_SILENT = frozenset({_State.AFTER_CALLS, _State.STOPPED})


class OutputParser:
    """Parses one generated turn. `feed` text without EOS, then `finish` once.

    thinking         the prompt ended with `<think>`; otherwise the turn begins with content
    tools_declared   calls are looked for; otherwise their markup is content
    stop             at most 16 texts that end the answer; only answer text is searched
    json_mode        prose and fences around the JSON value become blanks
    starts_in_calls  the prompt opened the calls block (a required or named tool choice)

    Follows deepseek-recipe 0.2. Deviates where that loses text or breaks JSON: a DSML marker that
    opens no block stays content, names of parameters may hold blanks, a call after JSON is a
    call, and newlines before the first text of an answer match no stop text.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tools_declared: bool,
        stop: Sequence[str] = (),
        json_mode: bool = False,
        starts_in_calls: bool = False,
    ) -> None:
        """Raise OutputParserError for an empty stop text or more than 16 of them."""
        if isinstance(stop, str) or len(stop) > MAX_STOPS or not all(stop):
            want = f"a sequence of at most {MAX_STOPS} texts, none empty"
            raise OutputParserError(f"stop: got {stop!r}, expected {want}")
        self._after_reasoning = _State.BEFORE_JSON if json_mode else _State.CONTENT
        self._state = _State.REASONING if thinking else self._after_reasoning
        if starts_in_calls:
            self._state = _State.BETWEEN_CALLS
        self._tools_declared = tools_declared
        self._markers = _marker_tables(tuple(stop), tools_declared)
        self._stops = frozenset(stop)
        self._held = ""
        # Newlines that are part of the text only if more text follows them.
        self._newlines = 0
        self._is_at_start = True
        self._name = ""
        self._num_calls = 0
        self._num_parameters = 0
        self._deltas: list[Delta] = []
        self.finish_reason: str | None = None

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._state is _State.REASONING

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text has ended the answer; generation can end."""
        return self._state is _State.STOPPED

    def feed(self, text: str) -> list[Delta]:
        """Return what `text` makes certain; the rest waits for the next piece."""
        rest = self._held + text
        self._held = ""
        while rest and self._state not in _SILENT:
            if self._is_at_start and self._state in _SPEECH:
                rest = rest.lstrip("\n")
            markers = self._markers[self._state]
            found = _first_marker(rest, markers)
            if found is None:
                certain = len(rest) - _open_length(rest, markers)
                self._take_text(rest[:certain])
                self._held = rest[certain:]
                break
            begin, marker = found
            self._take_text(rest[:begin])
            rest = self._take_marker(marker) + rest[begin + len(marker) :]
        return self._flush()

    def finish(self, reason: str = "stop") -> list[Delta]:
        """Return what was held back; `reason` is the engine's ("stop", "length", ...).

        Sets `finish_reason`: "tool_calls" where a call began and the engine stopped by itself.
        """
        held, self._held = self._held, ""
        if self._state not in _SILENT | _NAMES:
            self._take_text(held)
            self._release_newlines()
        self.finish_reason = "tool_calls" if reason == "stop" and self._num_calls else reason
        self._state = _State.AFTER_CALLS
        return self._flush()

    def _take_text(self, text: str) -> None:
        """Take text that is part of no marker."""
        if not text:
            return
        if self._state in _NAMES:
            self._name += text
        elif self._state is _State.STRING_VALUE:
            self._say_arguments(_escaped(text))
        elif self._state is _State.JSON_VALUE:
            self._say_arguments(text)
        elif self._state in _SPEECH:
            self._say(text)

    def _take_marker(self, marker: str) -> str:
        """Move to the state after `marker`; return what of it is to be read again."""
        state = self._state
        if state in _ANSWER and marker in self._stops:
            self._release_newlines()
            self._state = _State.STOPPED
        elif marker in _OPENERS:
            self._newlines = 0
            self._state = _State.BETWEEN_CALLS
            # A call without a block around it begins with the opener itself.
            return "invoke" if marker.endswith("invoke") else ""
        elif state in _SPEECH:
            self._take_answer_marker(marker)
        elif marker == _CALL_NAME:
            self._name, self._state = "", _State.CALL_NAME
        elif state is _State.CALL_NAME:
            self._begin_call()
        elif marker == _PARAMETER_NAME:
            self._name, self._state = "", _State.PARAMETER_NAME
        elif state is _State.PARAMETER_NAME:
            self._begin_value(marker)
        elif state in {_State.STRING_VALUE, _State.JSON_VALUE}:
            self._say_arguments('"' if state is _State.STRING_VALUE else "")
            self._state = _State.IN_CALL
        elif state is _State.IN_CALL:
            self._say_arguments("}" if self._num_parameters else "{}")
            self._state = _State.BETWEEN_CALLS
        else:
            self._state = _State.AFTER_CALLS
        return ""

    def _take_answer_marker(self, marker: str) -> None:
        """Take a marker of the answer itself that neither ends it nor opens calls."""
        if self.in_reasoning:
            self._newlines = 0
            self._is_at_start = True
            self._state = self._after_reasoning
        elif marker in _JSON_OPENERS:
            self._release_newlines()
            self._state = _State.IN_JSON
            self._say(marker)
        elif marker in _FENCES:
            self._release_newlines()
            self._state = _State.IN_JSON
            self._is_at_start = False
        elif marker == _END_OF_FENCE:
            self._release_newlines()
            self._state = _State.AFTER_JSON
        else:
            # A surplus `</think>` leaves no trace, but what stood before it is certain.
            self._release_newlines()
            self._is_at_start = False

    def _begin_call(self) -> None:
        letters = "".join(secrets.choice(_CALL_ID_LETTERS) for _ in range(24))
        index, self._num_calls, self._num_parameters = self._num_calls, self._num_calls + 1, 0
        call_id = f"call_{index:02d}_{letters}"
        self._deltas.append(Delta(kind="tool_call", index=index, call_id=call_id, name=self._name))
        self._state = _State.IN_CALL

    def _begin_value(self, marker: str) -> None:
        """Say the name of a parameter, and the quote of a value that is raw text."""
        is_json = marker == _JSON_FOLLOWS
        opening = ", " if self._num_parameters else "{"
        quote = "" if is_json else '"'
        self._say_arguments(f'{opening}"{_escaped(self._name)}": {quote}')
        self._num_parameters += 1
        self._state = _State.JSON_VALUE if is_json else _State.STRING_VALUE

    def _say(self, text: str) -> None:
        """Pass on answer or reasoning, but hold newlines that a marker may take away."""
        self._is_at_start = False
        if not (self.in_reasoning or self._tools_declared):
            self._add(text)
            return
        body = text.rstrip("\n")
        if body:
            self._add("\n" * self._newlines + body)
            self._newlines = 0
        self._newlines += len(text) - len(body)

    def _release_newlines(self) -> None:
        self._add("\n" * self._newlines)
        self._newlines = 0

    def _add(self, text: str) -> None:
        if self._state in _AROUND_JSON:
            text = " " * len(text)
        if text:
            kind = "reasoning" if self.in_reasoning else "content"
            self._deltas.append(Delta(kind=kind, text=text))

    def _say_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(Delta(kind="arguments", text=text, index=self._num_calls - 1))

    def _flush(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return join_deltas(deltas)


class TokenOutputParser:
    """Parses one generated turn from token ids: EOS ends it and is never text."""

    def __init__(self, tokenizer: Tokenizer, parser: OutputParser) -> None:
        """Decode with `tokenizer` and parse with `parser`, which belongs to this object."""
        self.parser = parser
        self._eos_id = tokenizer.eos_id
        self._decoder = tokenizer.stream()
        self._is_ended = False
        # Tokens before `</think>`, the tag not counted.
        self.num_reasoning_tokens = 0

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """Return what `ids` make certain; a character cut in the middle waits for its rest."""
        deltas: list[Delta] = []
        for token_id in ids:
            self._is_ended = self._is_ended or token_id == self._eos_id
            if not self._is_ended:
                deltas += self.parser.feed(self._decoder.push(token_id))
                self.num_reasoning_tokens += self.parser.in_reasoning
        return join_deltas(deltas)

    def finish(self, reason: str = "stop") -> list[Delta]:
        """Return what was held back, in the order in which it was written."""
        return join_deltas([*self.parser.feed(self._decoder.finish()), *self.parser.finish(reason)])


def join_deltas(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the same pieces with neighbours of one kind and index joined."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if (
            last
            and delta.kind != "tool_call"
            and (last.kind, last.index)
            == (
                delta.kind,
                delta.index,
            )
        ):
            joined[-1] = dataclasses.replace(last, text=last.text + delta.text)
        else:
            joined.append(delta)
    return joined


def message_of(deltas: Iterable[Delta]) -> dict:
    """Return the assistant message that all deltas of a turn make, in the form of a request."""
    text = {"reasoning": "", "content": ""}
    calls: list[dict] = []
    for delta in deltas:
        if delta.kind == "tool_call":
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": delta.call_id, "type": "function", "function": function})
        elif delta.kind == "arguments":
            calls[-1]["function"]["arguments"] += delta.text
        else:
            text[delta.kind] += delta.text
    message: dict = {"role": "assistant", "content": text["content"]}
    if text["reasoning"]:
        message["reasoning_content"] = text["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message


def _marker_tables(stops: tuple[str, ...], tools_declared: bool) -> dict[_State, tuple[str, ...]]:
    """Return the markers of each state; where two end together, the first listed counts."""
    openers = _OPENERS if tools_declared else ()
    return {
        _State.REASONING: (END_THINK, *openers),
        _State.CONTENT: (*stops, END_THINK, *openers),
        _State.BEFORE_JSON: (END_THINK, *_FENCES, *_JSON_OPENERS, *openers),
        _State.IN_JSON: (*stops, _END_OF_FENCE, *openers),
        _State.AFTER_JSON: openers,
        _State.BETWEEN_CALLS: (_CALL_NAME, *_CLOSERS),
        _State.CALL_NAME: ('"',),
        _State.IN_CALL: (_PARAMETER_NAME, _END),
        _State.PARAMETER_NAME: (_STRING_FOLLOWS, _JSON_FOLLOWS, _UNTYPED_FOLLOWS),
        _State.STRING_VALUE: (_END,),
        _State.JSON_VALUE: (_END,),
    }


def _first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """Return where the marker begins that is complete first, and the marker.

    The earliest end, not the earliest begin: a longer marker may never be completed, and waiting
    for it would make the answer depend on what follows.
    """
    best: tuple[int, str] | None = None
    for marker in markers:
        begin = text.find(marker)
        if begin >= 0 and (best is None or begin + len(marker) < best[0] + len(best[1])):
            best = begin, marker
    return best


def _open_length(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that a marker may begin with."""
    beginnings = _beginnings(markers)
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        if text[len(text) - length :] in beginnings:
            return length
    return 0


@functools.lru_cache(maxsize=256)
def _beginnings(markers: tuple[str, ...]) -> frozenset[str]:
    """Return every text that a marker begins with, short of the marker itself."""
    return frozenset(marker[:end] for marker in markers for end in range(1, len(marker)))


def _escaped(text: str) -> str:
    """Return raw text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
