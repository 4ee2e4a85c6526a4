"""One request on its way: engine outputs to events of text, for each of its choices.

A `Generation` owns the parsers of its choices, the usage so far and the end of the request: all
choices done, a time limit, or a reader who left. It writes no protocol. A newcomer's mistake:
taking the engine's last output for the end of a choice; a stop text ends it earlier, and what
the engine still says about that choice is dropped.
Source: spec/multimodal-serving.md sections B.6 and D.2.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from finwhale.engine.request import RequestOutput, TokenResult
from finwhale.serve.errors import ServeError, TimeLimitError
from finwhale.serve.worker import Message
from finwhale.text.output_parser import (
    Delta,
    OutputParser,
    TokenOutputParser,
    check_stops,
    message_of,
)
from finwhale.text.text_search import TextSearch
from finwhale.text.tokenizer import Tokenizer

# The engine's reasons in the words of the protocol.
_REASONS = {"cancelled": "aborted"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A token as text, its log-probability, and the best alternatives there.

    logprob  None for the first token of an echoed prompt
    top      (text, bytes, log-probability), best first
    offset   whole characters before the token in the returned text; of completions alone
    """

    kind: Literal["reasoning", "content"]
    token: str
    token_bytes: bytes
    logprob: float | None
    top: tuple[tuple[str, bytes, float], ...] = ()
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceEvent:
    """News of one choice; never empty.

    deltas         pieces of reasoning, content and tool calls, in order (`output_parser.Delta`)
    logprobs       tokens whose text has become certain; markers and tool markup have none
    finish_reason  stop, length, tool_calls or aborted, in the last event of the choice
    stop_text      the stop text that ended the choice, if one did
    """

    index: int
    deltas: tuple[Delta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_text: str | None = None

    def at(self, index: int) -> ChoiceEvent:
        """Return the same event of a choice with another number."""
        return replace(self, index=index)


@dataclass(kw_only=True, slots=True)
class Usage:
    """Token counts of a request; completion and reasoning are sums over the choices.

    cached_tokens  prompt tokens that came from the prefix cache
    """

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def missed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(kw_only=True, slots=True)
class ChoiceResult:
    """A whole choice: all its events joined."""

    index: int
    deltas: list[Delta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = "aborted"
    stop_text: str | None = None

    def add(self, event: ChoiceEvent) -> None:
        """Join one event of this choice."""
        self.deltas += event.deltas
        self.logprobs += event.logprobs
        if event.finish_reason is not None:
            self.finish_reason, self.stop_text = event.finish_reason, event.stop_text

    @property
    def message(self) -> dict:
        """The assistant message: role, content, reasoning_content, tool_calls."""
        return message_of(self.deltas)

    @property
    def text(self) -> str:
        """The content alone."""
        return "".join(delta.text for delta in self.deltas if delta.kind == "content")


class ChoiceReader(Protocol):
    """Turns the tokens of one choice into text."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens before `</think>`."""
        ...

    @property
    def stop_text(self) -> str | None:
        """The stop text that has ended the choice."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether a stop text or the last allowed call has ended the choice."""
        ...

    def feed(self, result: TokenResult) -> tuple[list[Delta], list[TokenLogprob]]:
        """Take one token; return what became certain."""
        ...

    def finish(self, reason: str) -> tuple[list[Delta], list[TokenLogprob], str]:
        """End the choice; return the rest and the finish reason."""
        ...


class ChatReader:
    """Reasoning, content and calls of one choice of a chat."""

    def __init__(self, tokenizer: Tokenizer, parser: OutputParser) -> None:
        """Parse with `parser`."""
        self._tokenizer = tokenizer
        self._parser = TokenOutputParser(tokenizer, parser)
        # Tokens whose text is held back by the parser.
        self._pending: list[TokenLogprob] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens before `</think>`."""
        return self._parser.num_reasoning_tokens

    @property
    def stop_text(self) -> str | None:
        """The stop text that has ended the choice."""
        return self._parser.parser.stop_text

    @property
    def is_complete(self) -> bool:
        """Whether a stop text or the last allowed call has ended the choice."""
        return self._parser.parser.is_complete

    def feed(self, result: TokenResult) -> tuple[list[Delta], list[TokenLogprob]]:
        """Take one token; return what became certain."""
        parser = self._parser.parser
        was_reasoning, is_marker = parser.in_reasoning, parser.in_calls
        deltas = self._parser.feed([result.token])
        is_marker = is_marker or was_reasoning != parser.in_reasoning
        is_marker = is_marker or result.token == self._tokenizer.eos_id
        if result.logprob is not None and not is_marker:
            kind = "reasoning" if parser.in_reasoning else "content"
            self._pending.append(told(self._tokenizer, result, kind))
        return deltas, self._certain(deltas)

    def finish(self, reason: str) -> tuple[list[Delta], list[TokenLogprob], str]:
        """End the choice; return the rest and the finish reason."""
        deltas = self._parser.finish(reason)
        finish_reason = self._parser.parser.finish_reason or reason
        return deltas, self._certain(deltas), finish_reason

    def _certain(self, deltas: list[Delta]) -> list[TokenLogprob]:
        """Return the pending tokens that these deltas have settled; those of markup never."""
        is_text = any(delta.kind in ("reasoning", "content") for delta in deltas)
        told_now = self._pending if is_text else []
        if is_text or self._parser.parser.in_calls:
            self._pending = []
        return told_now


class TextReader:
    """Plain text of one choice of a completion, cut at the first stop text."""

    num_reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        """Decode with `tokenizer`; raise OutputParserError for stop texts that are not served."""
        check_stops(stop)
        self._tokenizer, self._search = tokenizer, TextSearch(stop)
        self._decoder = tokenizer.stream()
        self._held = ""
        # Characters that were decoded, and those of them that are part of the answer.
        self._num_read = 0
        self._num_said = 0
        self._pending: list[TokenLogprob] = []
        self.stop_text: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether a stop text has ended the choice."""
        return self.stop_text is not None

    def feed(self, result: TokenResult) -> tuple[list[Delta], list[TokenLogprob]]:
        """Take one token; return what became certain."""
        if result.token == self._tokenizer.eos_id:
            return [], []
        if result.logprob is not None:
            entry = told(self._tokenizer, result, "content")
            self._pending.append(replace(entry, offset=self._num_read))
        return self._certain(self._decoder.push(result.token))

    def finish(self, reason: str) -> tuple[list[Delta], list[TokenLogprob], str]:
        """End the choice; return the rest and the finish reason.

        A character that a limit has cut is left out: it is none that the model wrote. Its bytes
        are those of the told tokens.
        """
        rest = self._decoder.finish() if reason == "stop" else ""
        deltas, logprobs = self._certain(rest, is_end=True)
        return deltas, logprobs, reason

    def _certain(self, text: str, *, is_end: bool = False) -> tuple[list[Delta], list]:
        if self.stop_text is not None:
            return [], []
        self._num_read += len(text)
        found = self._search.feed(text)
        if found is not None:
            end, self.stop_text = found
            text, self._held = (self._held + text[:end]).removesuffix(self.stop_text), ""
        else:
            text = self._held + text
            certain = len(text) - (0 if is_end else self._search.num_open)
            text, self._held = text[:certain], text[certain:]
        self._num_said += len(text)
        if not text and not is_end:
            return [], []
        logprobs, self._pending = self._pending, []
        if self.stop_text is not None:
            logprobs = [each for each in logprobs if each.offset < self._num_said]
        return ([Delta(kind="content", text=text)] if text else []), logprobs


class Generation:
    """A request that the engine has accepted. Read `events` to the end, or `cancel` it.

    request_id  of the engine and of the log
    created_s   Unix time
    usage       grows while events are read, complete after the last one
    notes       what was served otherwise than asked, in words for the client
    """

    def __init__(
        self,
        *,
        request_id: str,
        tokenizer: Tokenizer,
        readers: Sequence[ChoiceReader],
        usage: Usage,
        messages: asyncio.Queue[Message],
        cancel: Callable[[str], None],
        timeout_s: float,
        started_s: float | None = None,
        echo: Sequence[int] | None = None,
        on_end: Callable[[Generation, str], None] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """Read `messages`, which a worker's listener fills.

        started_s  when the request arrived, of time.perf_counter; the time limit counts from it
        echo       prompt ids that every choice repeats before its own text
        on_end     called once with how the request ended
        """
        self.request_id, self.usage, self.notes = request_id, usage, notes
        self.created_s = int(time.time())
        self.started_s = time.perf_counter() if started_s is None else started_s
        self.first_token_s: float | None = None
        self._tokenizer, self._readers, self._messages = tokenizer, list(readers), messages
        self._cancel, self._timeout_s = cancel, timeout_s
        self._echo, self._on_end = echo, on_end
        # Characters of the repeated prompt.
        self._num_echoed = 0
        # Choices whose end has been told.
        self._done: set[int] = set()
        self._is_told_ended = False
        self._has_begun = False

    @property
    def num_choices(self) -> int:
        """Choices of the request, `n`."""
        return len(self._readers)

    def cancel(self) -> None:
        """Let the engine end the request; `events` then ends with the reason "aborted"."""
        self._cancel(self.request_id)

    async def events(self) -> AsyncGenerator[ChoiceEvent, None]:
        """Yield the events of all choices as they come; closing the iterator early cancels.

        A loop that is left early does not close it: use contextlib.aclosing.

        Raises EngineFailedError where the engine failed, TimeLimitError after the time limit.
        """
        outcome, is_engine_done = "aborted", False
        # The limit comes in the same queue as the outputs: no token pays for a timer of its own.
        left_s = self._timeout_s - (time.perf_counter() - self.started_s)
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(left_s, self._messages.put_nowait, _time_limit())
        try:
            while len(self._done) < self.num_choices:
                message = await self._messages.get()
                if isinstance(message, ServeError):
                    is_engine_done = not isinstance(message, TimeLimitError)
                    raise message
                if isinstance(message, RequestOutput):
                    for event in self._events_of(message):
                        yield event
            outcome = "ok"
        except ServeError as error:
            outcome = error.kind
            raise
        finally:
            alarm.cancel()
            if not is_engine_done:
                # Harmless where the engine is done as well; a stop text ends before it.
                self.cancel()
            self._end(outcome)

    async def collect(self) -> list[ChoiceResult]:
        """Read all events; return the whole choices in order."""
        results = [ChoiceResult(index=index) for index in range(self.num_choices)]
        async for event in self.events():
            results[event.index].add(event)
        return results

    def _events_of(self, output: RequestOutput) -> list[ChoiceEvent]:
        usage, index = self.usage, output.index
        if index == 0 and not self._has_begun:
            # Later outputs also count what a preempted sequence found again.
            self._has_begun = True
            usage.cached_tokens = output.num_cached_tokens
        events = self._echoed(output)
        if index in self._done:
            return events
        reader = self._readers[index]
        deltas: list[Delta] = []
        logprobs: list[TokenLogprob] = []
        before = reader.num_reasoning_tokens
        for result in output.new:
            if self.first_token_s is None:
                self.first_token_s = time.perf_counter() - self.started_s
            usage.completion_tokens += 1
            for own, new in zip((deltas, logprobs), reader.feed(result), strict=True):
                own += new
            if reader.is_complete:
                break
        reason = output.finish_reason
        finish_reason = None
        if reader.is_complete or reason is not None:
            wanted = "stop" if reader.is_complete else _REASONS.get(reason or "", reason)
            rest, more, finish_reason = reader.finish(wanted or "stop")
            deltas += rest
            logprobs += more
            self._done.add(index)
        usage.reasoning_tokens += reader.num_reasoning_tokens - before
        if deltas or logprobs or finish_reason:
            events.append(
                ChoiceEvent(
                    index=index,
                    deltas=tuple(deltas),
                    logprobs=_moved(logprobs, self._num_echoed),
                    finish_reason=finish_reason,
                    stop_text=reader.stop_text,
                )
            )
        return events

    def _echoed(self, output: RequestOutput) -> list[ChoiceEvent]:
        """Return the prompt as an event of each choice, once."""
        if self._echo is None:
            return []
        # A begin marker that the server put before the prompt is not repeated.
        results = output.prompt_logprobs or ()
        results = results[max(0, len(results) - len(self._echo)) :]
        offsets, text = _offsets(self._tokenizer, self._echo)
        offsets = offsets[len(offsets) - len(results) :]
        logprobs = tuple(
            replace(told(self._tokenizer, result, "content"), offset=offset)
            for result, offset in zip(results, offsets, strict=True)
        )
        self._echo, self._num_echoed = None, len(text)
        deltas = (Delta(kind="content", text=text),) if text else ()
        return [
            ChoiceEvent(index=index, deltas=deltas, logprobs=logprobs)
            for index in range(self.num_choices)
            if text or logprobs
        ]

    def _end(self, outcome: str) -> None:
        if not self._is_told_ended and self._on_end is not None:
            self._is_told_ended = True
            self._on_end(self, outcome)


def _time_limit() -> TimeLimitError:
    want = "ask for fewer tokens, or raise the server's request_timeout_s"
    return TimeLimitError(f"the answer took too long; {want}", code="timeout")


def told(
    tokenizer: Tokenizer, result: TokenResult, kind: Literal["reasoning", "content"]
) -> TokenLogprob:
    """Return a token's result in text."""
    raw = _bytes_of(tokenizer, result.token)
    top = [(_bytes_of(tokenizer, token), logprob) for token, logprob in result.top]
    return TokenLogprob(
        kind=kind,
        token=_shown(raw),
        token_bytes=raw,
        logprob=result.logprob,
        top=tuple((_shown(each), each, logprob) for each, logprob in top),
    )


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """Return a token's bytes; none for a row of the head that the tokenizer does not know."""
    return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""


def _shown(raw: bytes) -> str:
    r"""Return text, with `\xNN` for each byte that is part of no whole character."""
    return raw.decode("utf-8", errors="backslashreplace")


def _moved(logprobs: Sequence[TokenLogprob], by: int) -> tuple[TokenLogprob, ...]:
    """Return the same tokens behind `by` more characters."""
    if not by:
        return tuple(logprobs)
    return tuple(replace(each, offset=each.offset + by) for each in logprobs)


def _offsets(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], str]:
    """Return the whole characters before each token, and the text of all."""
    decoder, offsets, pieces, num = tokenizer.stream(), [], [], 0
    for token in ids:
        offsets.append(num)
        pieces.append(decoder.push(token))
        num += len(pieces[-1])
    return offsets, "".join([*pieces, decoder.finish()])
