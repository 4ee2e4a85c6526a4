"""`finwhale chat`: a conversation in the terminal, on the service of this very process.

Owns the lines a person types and what is written back: reasoning dim, calls with their results,
text, and one line of figures after each turn. It speaks no HTTP, and nothing of a chat is kept on
disk. It refuses control characters of a model's text, which could repaint the terminal.
A newcomer's mistake: taking Ctrl-C for the end of the program; it ends the reply, and what was
said of it stays in the conversation. Source: spec/multimodal-serving.md sections B.3 and B.5.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from finwhale.serve.errors import ServeError
from finwhale.serve.generation import ChoiceResult
from finwhale.serve.planning import ChatRequest, Sampling
from finwhale.text.prompt import PromptError, effort_of

if TYPE_CHECKING:
    from finwhale.chat_ui.demo_tools import DemoTools
    from finwhale.serve.generation import Usage
    from finwhale.serve.service import Service
    from finwhale.text.output_parser import Delta

MAX_ROUNDS = 8  # of calls and results in one turn
COMMANDS = "/reset, /effort N, /thinking on|off, /stats, /quit"
_PROMPT = "> "
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# All control characters but tab and newline, of both ranges.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(kw_only=True, slots=True)
class Settings:
    """How the next turn is asked for; commands change it."""

    thinking: bool = True
    effort: int = 75
    sampling: Sampling = field(default_factory=Sampling)
    system: str | None = None


@dataclass(kw_only=True, slots=True)
class Totals:
    """Sums over the turns since the start or the last /reset."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    context_tokens: int = 0
    seconds: float = 0.0

    def add(self, usage: Usage, seconds: float) -> None:
        """Count one reply of the model, of which a turn with calls has several."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.context_tokens = usage.total_tokens
        self.seconds += seconds


@dataclass(kw_only=True, slots=True)
class _Reply:
    """One answer of the model as it came."""

    result: ChoiceResult
    usage: Usage
    first_token_s: float | None
    seconds: float
    is_stopped: bool


@dataclass(kw_only=True)
class Terminal:
    """One conversation between a person and a started service.

    write            takes text to show
    is_styled        whether reasoning is dim by an escape sequence; otherwise it has a label alone
    bytes_per_token  global KV of a token; None: not shown
    tools            run locally when the model calls them; None: none are declared
    """

    service: Service
    write: Callable[[str], object]
    settings: Settings = field(default_factory=Settings)
    is_styled: bool = False
    bytes_per_token: float | None = None
    tools: DemoTools | None = None
    totals: Totals = field(default_factory=Totals)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def converse(self, read: Callable[[], str | None]) -> None:
        """Answer every line that `read` returns until it returns None or says /quit.

        KeyboardInterrupt in `read` begins a new line; during a reply it ends the reply.
        """
        # One loop for all turns, whose runner turns Ctrl-C into a cancellation of the turn.
        with asyncio.Runner() as runner:
            while True:
                try:
                    line = read()
                except KeyboardInterrupt:
                    self.write("\n(/quit or end of input leaves)\n")
                    continue
                if line is None or line.strip() == "/quit":
                    return
                if line.strip().startswith("/"):
                    self.write(self.command(line.strip()) + "\n")
                elif line.strip():
                    self._turn(runner, line.rstrip("\n"))

    def command(self, line: str) -> str:
        """Obey a line that begins with a slash; return what to say."""
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/reset" and not value:
            self.messages.clear()
            self.totals = Totals()
            return "a new conversation"
        if name == "/effort":
            try:
                self.settings.effort = effort_of(int(value) if value.isdecimal() else value)
            except PromptError as error:
                return str(error)
            return f"effort {self.settings.effort}"
        if name == "/thinking" and value in ("on", "off"):
            self.settings.thinking = value == "on"
            return f"thinking {value}"
        if name == "/stats" and not value:
            return self._stats()
        return f"{_shown(line)!r} is no command; there are {COMMANDS}"

    def _stats(self) -> str:
        totals, settings = self.totals, self.settings
        share = totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0
        lines = [
            f"turns {totals.turns}, messages {len(self.messages)}, thinking "
            f"{'on' if settings.thinking else 'off'}, effort {settings.effort}",
            f"prompt tokens {totals.prompt_tokens:,}, of them cached {totals.cached_tokens:,} "
            f"({share:.0%}); reply tokens {totals.completion_tokens:,} in {totals.seconds:.1f} s",
        ]
        if self.bytes_per_token is not None:
            held = round(self.bytes_per_token * totals.context_tokens)
            lines.append(
                f"global KV of the conversation: {totals.context_tokens:,} tokens x "
                f"{self.bytes_per_token:g} bytes = {held:,} bytes"
            )
        return "\n".join(lines)

    def _turn(self, runner: asyncio.Runner, text: str) -> None:
        """Say `text`; whatever goes wrong, the conversation is one that can go on."""
        before = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            runner.run(self._answered())
        except ServeError as error:
            self.write(f"\nerror: {error.message}\n(this turn is not part of the conversation)\n")
        except KeyboardInterrupt:
            # A second Ctrl-C while the first one was being obeyed.
            self.write("\n(stopped)\n")
        if self.messages[-1]["role"] != "assistant":
            del self.messages[before:]
        else:
            self.totals.turns += 1

    async def _answered(self) -> None:
        for _ in range(MAX_ROUNDS):
            reply = await self._reply()
            message = reply.result.message
            calls = message.get("tool_calls", ())
            if reply.is_stopped:
                # Half a call is none, and a reply without a word is no message.
                message.pop("tool_calls", None)
                self.write("\n(stopped)\n")
            if message["content"] or message.get("reasoning_content") or not reply.is_stopped:
                self.messages.append(message)
            self.write(self._figures(reply) + "\n")
            if reply.is_stopped or not calls or self.tools is None:
                return
            for call in calls:
                function = call["function"]
                result = self.tools.run(function["name"], function["arguments"])
                self.write(f"  {function['name']} -> {_shown(result)}\n")
                self.messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": result}
                )
        self.write(f"(stopped after {MAX_ROUNDS} rounds of calls)\n")

    async def _reply(self) -> _Reply:
        """Ask once and show the answer as it comes; a cancellation ends it early."""
        settings = self.settings
        started_s = time.perf_counter()
        system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        generation = await self.service.chat(
            ChatRequest(
                messages=[*system, *self.messages],
                tools=None if self.tools is None else self.tools.declared,
                thinking=settings.thinking,
                effort=settings.effort,
                sampling=settings.sampling,
            )
        )
        result, kind, is_stopped = ChoiceResult(index=0), "", False
        try:
            async with contextlib.aclosing(generation.events()) as events:
                async for event in events:
                    result.add(event)
                    for delta in event.deltas:
                        self._show(delta, kind)
                        kind = delta.kind
        except asyncio.CancelledError:
            # It came from Ctrl-C alone; the turn ends in good order.
            is_stopped = True
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        self.write((_PLAIN if self.is_styled and kind == "reasoning" else "") + "\n")
        return _Reply(
            result=result,
            usage=generation.usage,
            first_token_s=generation.first_token_s,
            seconds=time.perf_counter() - started_s,
            is_stopped=is_stopped,
        )

    def _show(self, delta: Delta, before: str) -> None:
        """Write one piece; `before` is the kind of the piece before it."""
        begins = delta.kind != before or delta.kind == "tool_call"
        text = _shown(delta.text)
        if begins and before == "reasoning" and self.is_styled:
            self.write(_PLAIN)
        if begins and before and delta.kind != "arguments":
            self.write("\n")
        if begins and delta.kind == "reasoning":
            self.write((_DIM if self.is_styled else "") + "thinking: ")
        elif delta.kind == "tool_call":
            self.write(f"call {_shown(delta.name or '')} ")
        self.write(text)

    def _figures(self, reply: _Reply) -> str:
        """Return the line under a reply, and count it."""
        usage = reply.usage
        self.totals.add(usage, reply.seconds)
        parts = [
            f"prompt {usage.prompt_tokens} tokens, {usage.cached_tokens} of them cache hits",
            f"reply {usage.completion_tokens} tokens, {usage.reasoning_tokens} of them reasoning",
        ]
        if self.bytes_per_token is not None:
            parts.append(f"{self.bytes_per_token:g} bytes per token")
        first_s = reply.first_token_s
        if first_s is not None:
            parts.append(f"first after {first_s:.2f} s")
            if usage.completion_tokens > 1 and reply.seconds > first_s:
                speed = (usage.completion_tokens - 1) / (reply.seconds - first_s)
                parts.append(f"{speed:.1f} tokens/s")
        if reply.result.finish_reason == "length":
            parts.append("cut at the token limit")
        text = "[" + "; ".join(parts) + "]"
        return f"{_DIM}{text}{_PLAIN}" if self.is_styled else text


def _shown(text: str) -> str:
    """Return a model's or a tool's text without what a terminal would obey."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def line_reader(source: TextIO, out: TextIO) -> Callable[[], str | None]:
    """Return a function that reads one line, with a prompt and line editing on a terminal."""
    if not (source.isatty() and out.isatty()):
        return lambda: source.readline() or None
    with contextlib.suppress(ImportError):
        # The import alone gives `input` a history and keys to edit with; Windows lacks it.
        importlib.import_module("readline")

    def read() -> str | None:
        try:
            return input(_PROMPT)
        except EOFError:
            out.write("\n")
            return None

    return read


def chat_on(
    service: Service,
    *,
    settings: Settings,
    bytes_per_token: float | None = None,
    tools: DemoTools | None = None,
    greeting: str = "",
) -> None:
    """Hold a conversation on standard input and output; the service is started and closed here."""
    source, out = sys.stdin, sys.stdout
    is_terminal = source.isatty() and out.isatty()

    def write(text: str) -> None:
        out.write(text)
        out.flush()

    terminal = Terminal(
        service=service,
        write=write,
        settings=settings,
        is_styled=out.isatty() and "NO_COLOR" not in os.environ,
        bytes_per_token=bytes_per_token,
        tools=tools,
    )
    service.start()
    try:
        if is_terminal:
            write(f"{greeting}\n{COMMANDS}; Ctrl-C stops a reply\n")
        terminal.converse(line_reader(source, out))
    finally:
        service.close(grace_s=0.0)
