"""Generated text to reasoning, content and tool calls, while it arrives.

A walk through states; each state has its markers, and text is held back only where it may be the
beginning of one of them, or belongs to a call that has not ended. So the pieces may be cut anywhere
and their sum is the same. It refuses nothing that a model writes: what is no call becomes content
with a reason in brackets. A newcomer's mistake: feeding it EOS, which it takes for content; give
ids to a `TokenOutputParser`. Source: spec/multimodal-serving.md section B.6.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import secrets
import string
from collections.abc import Iterable, Sequence
from typing import Literal

from finwhale.text.special_tokens import DSML, END_THINK
from finwhale.text.text_search import TextSearch
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.tool_calls import NAMES, Call, CallsReader

MAX_STOPS = 16
MAX_STOP_CHARS = 4096
_CALL_ID_LETTERS = string.ascii_letters + string.digits

# Pieces of this many characters are walked at a time: what follows a marker is read again.
_WALK = 1024
_OPENERS = tuple(f"<{DSML}{blank}{name}" for blank in (" ", "") for name in NAMES)
# Closing tags, also with the slash behind the marker.
_STRAYS = tuple(
    tag
    for name in NAMES
    for tag in (f"</{DSML} {name}", f"</{DSML}{name}", f"<{DSML} /{name}", f"<{DSML}/{name}")
)
_BEGUN_TAGS = (f"<{DSML}", f"</{DSML}")
_FENCES = ("```json\n", "```\n")
_END_OF_FENCE = "\n```"
_JSON_OPENERS = ("{", "[")


class OutputParserError(ValueError):
    """Settings with which no output can be parsed."""


def check_stops(stop: Sequence[str], name: str = "stop") -> None:
    """Raise OutputParserError, which begins with `name`, for stop texts that are not served."""
    want = f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters"
    if isinstance(stop, str):
        got = "one text"
    elif len(stop) > MAX_STOPS:
        got = f"{len(stop)} texts"
    else:
        wrong = [text for text in stop if not 1 <= len(text) <= MAX_STOP_CHARS]
        if not wrong:
            return
        got = f"a text of {len(wrong[0])} characters"
    raise OutputParserError(f"{name}: got {got}, expected {want}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """A piece of the answer; pieces of one kind and index join to the whole.

    reasoning, content  `text` goes on
    tool_call           a call: `index` from 0, `call_id`, `name`; text is empty
    arguments           `text` is the JSON object of call `index`, always behind its `tool_call`
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
    IN_CALLS = enum.auto()
    ENDED = enum.auto()


# In JSON mode, text in these becomes blanks, one for one: prose around the value.
_AROUND_JSON = frozenset({_State.BEFORE_JSON, _State.AFTER_JSON})


class OutputParser:
    """Parses one generated turn. `feed` text without EOS, then `finish` once.

    thinking         the prompt ended with `<think>`; otherwise the turn begins with content
    tools_declared   calls are looked for; otherwise their markup is content
    stop             at most 16 texts that end the answer; only answer text is searched
    json_mode        prose and fences around the JSON value become blanks
    starts_in_calls  the prompt opened the calls block (a required or named tool choice)
    max_calls        None, or the number of calls with which the answer is complete

    A call comes whole, when its invoke has ended: a `tool_call` and its `arguments` in one piece.
    What `CallsReader` cannot read as a call, or a limit has cut off, is content: its text, and on
    a line of its own the reason, `[unreadable tool call: the block has no invoke]`. Text behind a
    block with calls is dropped; behind any other it is content.

    Follows deepseek-recipe 0.2. Deviates in this, and where that loses text: a DSML marker that
    begins no known tag stays content, names of parameters may hold blanks, a call after JSON is a
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
        max_calls: int | None = None,
    ) -> None:
        """Raise OutputParserError for stop texts that `check_stops` refuses, or max_calls < 1."""
        check_stops(stop)
        if max_calls is not None and max_calls < 1:
            raise OutputParserError(f"max_calls: got {max_calls}, expected None or at least 1")
        self._after_reasoning = _State.BEFORE_JSON if json_mode else _State.CONTENT
        self._state = _State.REASONING if thinking else self._after_reasoning
        self._tools_declared, self._max_calls = tools_declared, max_calls
        self._searches = _searches(tuple(stop), tools_declared)
        self._stops = frozenset(stop)
        self._held = ""
        # Newlines that are part of the text only if more text follows them.
        self._newlines = 0
        self._is_at_start = True
        # Kinds of text that have been said.
        self._said: set[str] = set()
        self._block = CallsReader()
        # Where text goes on behind a block without calls.
        self._behind_block = self._after_reasoning
        if starts_in_calls:
            self._state = _State.IN_CALLS
        self._reasons: set[str] = set()
        # Text behind a reason begins a line.
        self._owes_newline = False
        self._num_calls = 0
        self._deltas: list[Delta] = []
        self.finish_reason: str | None = None
        # The stop text that has ended the answer.
        self.stop_text: str | None = None

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        is_within = self._state is _State.IN_CALLS and self._block.is_stray
        return (self._behind_block if is_within else self._state) is _State.REASONING

    @property
    def in_calls(self) -> bool:
        """Whether the text so far ends inside or behind a calls block."""
        return self._state is _State.IN_CALLS or (
            self._state is _State.ENDED and not self.is_stopped
        )

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text has ended the answer; generation can end."""
        return self.stop_text is not None

    @property
    def is_complete(self) -> bool:
        """Whether a stop text or the last allowed call has ended the answer."""
        return self.is_stopped or (
            self._max_calls is not None and self._num_calls >= self._max_calls
        )

    def feed(self, text: str) -> list[Delta]:
        """Return what `text` makes certain; the rest waits for the next piece."""
        for begin in range(0, len(text), _WALK):
            self._walk(text[begin : begin + _WALK])
        return self._flush()

    def finish(self, reason: str = "stop") -> list[Delta]:
        """Return what was held back; `reason` is the engine's ("stop", "length", ...).

        Sets `finish_reason`: "tool_calls" where a call was given out and the engine stopped by
        itself.
        """
        held, self._held = self._held, ""
        if held.startswith(_BEGUN_TAGS) and (reason != "stop" or held not in _BEGUN_TAGS):
            self._block.read(self._enter_block(held))
        if self._state is _State.IN_CALLS:
            self._block.finish(is_cut=reason != "stop")
            self._leave_block()
        elif self._state is not _State.ENDED:
            self._say(held)
            self._release_newlines()
        self.finish_reason = "tool_calls" if reason == "stop" and self._num_calls else reason
        self._state = _State.ENDED
        return self._flush()

    def _walk(self, rest: str) -> None:
        while rest and self._state is not _State.ENDED:
            if self._state is _State.IN_CALLS:
                rest = self._read_block(rest)
                continue
            if self._is_at_start and not self._held:
                rest = rest.lstrip("\n")
            search = self._searches[self._state]
            found = search.feed(rest)
            if found is None:
                text = self._held + rest
                certain = len(text) - search.num_open
                self._held = text[certain:]
                self._say(text[:certain])
                return
            end, marker = found
            text, self._held = self._held + rest[:end], ""
            self._say(text.removesuffix(marker))
            rest = self._take_marker(marker) + rest[end:]

    def _take_marker(self, marker: str) -> str:
        """Move to the state after `marker`; return what of it is to be read again."""
        if not self.in_reasoning and marker in self._stops:
            self._release_newlines()
            self.stop_text, self._state = marker, _State.ENDED
        elif DSML in marker:
            return self._enter_block(marker)
        elif self.in_reasoning:
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
        return ""

    def _enter_block(self, marker: str) -> str:
        opener, _, tag = marker.partition(DSML)
        self._block = CallsReader(opener, is_stray=marker.startswith("</") or marker in _STRAYS)
        self._newlines = 0
        ends_reasoning = self._state is _State.REASONING and not self._block.is_stray
        self._behind_block = self._after_reasoning if ends_reasoning else self._state
        self._state = _State.IN_CALLS
        return tag

    def _read_block(self, text: str) -> str:
        rest, call = self._block.read(text)
        if call is not None:
            self._deliver(call)
        if self._block.is_ended or self.is_complete:
            self._leave_block()
        return rest

    def _leave_block(self) -> None:
        """Say what the block had beside calls, and go on behind it."""
        self._state = self._behind_block
        unread = self._block.unread()
        if unread is not None:
            self._say_unread(*unread)
        if self._num_calls:
            self._state = _State.ENDED

    def _say_unread(self, text: str, reason: str) -> None:
        """Say text that is no call, and why, each reason once in an answer."""
        is_new = reason not in self._reasons
        self._reasons.add(reason)
        lines = [text] if text else []
        lines += [f"[unreadable tool call: {reason}]"] if is_new else []
        if lines:
            begin = "\n" if self._kind in self._said else ""
            self._append(begin + "\n".join(lines))
        self._owes_newline = True
        self._is_at_start = False

    def _deliver(self, call: Call) -> None:
        letters = "".join(secrets.choice(_CALL_ID_LETTERS) for _ in range(24))
        index, self._num_calls = self._num_calls, self._num_calls + 1
        call_id = f"call_{index:02d}_{letters}"
        self._deltas += [
            Delta(kind="tool_call", index=index, call_id=call_id, name=call.name),
            Delta(kind="arguments", index=index, text=call.arguments),
        ]

    def _say(self, text: str) -> None:
        """Pass on answer or reasoning, but hold newlines that a marker may take away."""
        if not text:
            return
        self._is_at_start = False
        if self._owes_newline:
            self._owes_newline = False
            text = text if text.startswith("\n") else f"\n{text}"
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
        self._append(" " * len(text) if self._state in _AROUND_JSON else text)

    def _append(self, text: str) -> None:
        if text:
            self._said.add(self._kind)
            self._deltas.append(Delta(kind=self._kind, text=text))

    @property
    def _kind(self) -> Literal["reasoning", "content"]:
        return "reasoning" if self.in_reasoning else "content"

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
        """Return what was held back, in the order in which it was written.

        A character that a limit has cut is left out: it is none that the model wrote.
        """
        rest = self._decoder.finish() if reason == "stop" else ""
        return join_deltas([*self.parser.feed(rest), *self.parser.finish(reason)])


def join_deltas(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the same pieces with neighbours of one kind and index joined."""
    joined = []
    for (kind, index), run in itertools.groupby(deltas, lambda each: (each.kind, each.index)):
        pieces = list(run)
        if kind == "tool_call" or len(pieces) == 1:
            joined += pieces
        else:
            joined.append(Delta(kind=kind, index=index, text="".join(p.text for p in pieces)))
    return joined


def message_of(deltas: Iterable[Delta]) -> dict:
    """Return the assistant message that all deltas of a turn make, in the form of a request."""
    text: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls: list[dict] = []
    for delta in deltas:
        if delta.kind == "tool_call":
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": delta.call_id, "type": "function", "function": function})
        elif delta.kind == "arguments":
            calls[-1]["function"]["arguments"] += delta.text
        else:
            text[delta.kind].append(delta.text)
    message: dict = {"role": "assistant", "content": "".join(text["content"])}
    if text["reasoning"]:
        message["reasoning_content"] = "".join(text["reasoning"])
    if calls:
        message["tool_calls"] = calls
    return message


def _searches(stops: tuple[str, ...], tools_declared: bool) -> dict[_State, TextSearch]:
    """Return the search of each state; where two markers end together, the first listed counts."""
    tags = (*_OPENERS, *_STRAYS) if tools_declared else ()
    markers = {
        _State.REASONING: (END_THINK, *tags),
        _State.CONTENT: (*stops, END_THINK, *tags),
        _State.BEFORE_JSON: (END_THINK, *_FENCES, *_JSON_OPENERS, *tags),
        _State.IN_JSON: (*stops, _END_OF_FENCE, *tags),
        _State.AFTER_JSON: tags,
    }
    return {state: TextSearch(wanted) for state, wanted in markers.items()}
