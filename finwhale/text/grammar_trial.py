"""A grammar compiled once in a process of its own, with limits of processor time and memory.

The library's parser takes fuel for its steps and none for compiling: intersections of patterns
ask for gigabytes, and a long chain of references overruns the stack, which ends the process. So
what is not plainly small is compiled here first, in a child that can be lost. The file is both:
the `Trial` of the parent, and, run as a script, the child, which imports llguidance alone.
A newcomer's mistake: taking a trial for a promise about later steps; those are bounded by fuel.
Source: llguidance 1.9.1; shared/attack.md [7].
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Fuel of one mask, a few milliseconds of processor, and the states that a matcher keeps in all.
STEP_LEXER_FUEL = 50_000
STEP_MAX_ITEMS = 50_000
# An object with N optional properties has rows of 4 N items.
MAX_ROW_ITEMS = 8_000
MAX_LEXER_STATES = 20_000
MAX_GRAMMAR_SIZE = 200_000
# Of one trial. Wall time counts too, on a machine that is busy with other things.
CPU_SECONDS = 1.0
WALL_SECONDS = 20.0
MEMORY_BYTES = 256 << 20
# A thread's stack where the system sets no limit to it.
_DEFAULT_STACK_BYTES = 2 << 20
_TRIED_STEPS = 16
_START_SECONDS = 60.0


_END_SECONDS = 10.0
_NO_START = "the process that tries grammars does not start"
_LATE = "the grammars of this request were not tried in time"
# How a child ends at its limits: of time, of memory (abort), of the stack.
_LIMIT_CODES = frozenset(
    {-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL}
)


class TrialError(ValueError):
    """A grammar that the library refuses, or that would take too much."""


class TrialLostError(RuntimeError):
    """A trial that the machine did not carry out; it says nothing about the grammar."""


class TrialLateError(RuntimeError):
    """A trial that was not carried out by its deadline."""


def vocabulary_of(tokenizer_json: str, *, vocab_size: int, eos_id: int) -> LLTokenizer:
    """Return the library's table of the tokens' bytes, without any marker."""
    from llguidance import LLTokenizer

    fields = json.loads(tokenizer_json)
    # So that a marker's text in a grammar is spelled in plain tokens.
    fields["added_tokens"] = []
    return LLTokenizer(json.dumps(fields, ensure_ascii=False), n_vocab=vocab_size, eos_token=eos_id)


def matcher_of(vocabulary: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Return the parser of a grammar at its start; raise TrialError for one it refuses.

    kind  "schema" (JSON, with the library's options inside), "pattern" or "lark"
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=MAX_ROW_ITEMS,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        # Verbose errors quote the parser's state, pages of it.
        verbose_errors=False,
    )
    make = {
        "schema": LLMatcher.grammar_from_json_schema,
        "pattern": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
    }[kind]
    try:
        matcher = LLMatcher(vocabulary, make(text), log_level=0, limits=limits)
    except ValueError as error:
        raise TrialError(str(error)) from None
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raise TrialError with the library's words if the matcher has given up."""
    if matcher.is_error():
        raise TrialError(matcher.get_error().removesuffix("\n<non-verbose/>"))


class Trial:
    """The child of one tokenizer, started at the first trial and again after a loss."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        eos_id: int,
        cpu_seconds: float = CPU_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Keep what the child is told at its start; the limits are those of one trial."""
        self._start_line = {
            "tokenizer": tokenizer_json,
            "vocab_size": vocab_size,
            "eos": eos_id,
            "cpu_seconds": cpu_seconds,
            "memory_bytes": memory_bytes,
        }
        self._limits = f"{cpu_seconds:g} s of processor time or {memory_bytes >> 20} MiB"
        self._lock = threading.Lock()
        self._is_ready, self._started_s = False, 0.0
        # The child, if there is one; it ends with this object, or with the process.
        self._children: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _end, self._children)

    def run(self, kind: str, text: str, *, deadline_s: float | None = None) -> int:
        """Try a grammar; return the bytes that it took. Any thread may call.

        deadline_s  of time.monotonic; what is not tried by then is given up

        Raises TrialError for a grammar that is refused, TrialLostError where the child does not
        start or is lost for a reason of its own, TrialLateError behind the deadline.
        """
        left = math.inf if deadline_s is None else deadline_s - time.monotonic()
        timeout = min(left, threading.TIMEOUT_MAX)
        if left <= 0 or not self._lock.acquire(timeout=timeout):
            raise TrialLateError(_LATE)
        try:
            self._make_ready(deadline_s)
            reply = self._ask({"kind": kind, "text": text}, deadline_s)
        except (TrialError, TrialLateError):
            # The child that they leave is a sound one.
            raise
        except BaseException:
            _end(self._children)
            raise
        finally:
            self._lock.release()
        if reply["error"] is not None:
            raise TrialError(reply["error"])
        return reply["bytes"]

    def close(self) -> None:
        """End the child; a trial that waits for it raises TrialLostError. The next starts one."""
        for child in list(self._children):
            child.kill()
        with self._lock:
            _end(self._children)

    def _start(self) -> None:
        """Start a child and tell it the tokenizer; its answer comes later."""
        self._is_ready, self._started_s = False, time.monotonic()
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                # A Ctrl-C is for the server, which lets running answers end.
                start_new_session=True,
            )
        except OSError as error:
            raise TrialLostError(f"{_NO_START} ({error.strerror or error})") from None
        self._children.append(child)
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        try:
            is_sent = _send(child, self._start_line, self._started_s + _START_SECONDS)
        except TimeoutError:
            is_sent = False
        if not is_sent:
            _end(self._children)
            raise TrialLostError(_NO_START)

    def _make_ready(self, deadline_s: float | None) -> None:
        """Wait for a child that has read the tokenizer; it goes on starting behind a deadline."""
        # A child that was lost between two trials says nothing about a grammar.
        if self._children and self._children[0].poll() is not None:
            _end(self._children)
        if not self._children:
            self._start()
        if self._is_ready:
            return
        last_s = self._started_s + _START_SECONDS
        try:
            line = _line(self._children[0], _earlier(last_s, deadline_s))
        except TimeoutError:
            if time.monotonic() < last_s:
                raise TrialLateError(_LATE) from None
            line = None
        if line is None:
            raise TrialLostError(_NO_START)
        self._is_ready = True

    def _ask(self, message: dict, deadline_s: float | None) -> dict:
        """Return the child's answer; the errors are those of `run`."""
        child, last_s = self._children[0], time.monotonic() + WALL_SECONDS
        limit_s = _earlier(last_s, deadline_s)
        try:
            line = _line(child, limit_s) if _send(child, message, limit_s) else None
        except TimeoutError:
            _end(self._children)
            if limit_s < last_s:
                raise TrialLateError(_LATE) from None
            raise TrialLostError(f"a trial took longer than {WALL_SECONDS:g} s") from None
        if line is not None:
            return json.loads(line)
        # The pipes of a child close with its end.
        code = child.wait(_END_SECONDS)
        _end(self._children)
        if code not in _LIMIT_CODES:
            raise TrialLostError(f"the process that tries grammars ended with code {code}")
        # The next one starts while nobody waits for it.
        with contextlib.suppress(TrialLostError):
            self._start()
        raise TrialError(f"compiling takes more than {self._limits}; simplify it")


def _earlier(last_s: float, deadline_s: float | None) -> float:
    return last_s if deadline_s is None else min(last_s, deadline_s)


def _wait(pipe: IO[bytes], event: int, limit_s: float) -> None:
    """Wait until a pipe is ready; raise TimeoutError behind `limit_s` of time.monotonic."""
    # Not select, which refuses descriptors above 1023.
    poll = select.poll()
    poll.register(pipe.fileno(), event)
    if not poll.poll(1000 * max(0.0, limit_s - time.monotonic())):
        raise TimeoutError


def _send(child: subprocess.Popen[bytes], message: dict, limit_s: float) -> bool:
    """Write a line to the child; return False where it is gone."""
    assert child.stdin is not None
    left = memoryview(json.dumps(message).encode() + b"\n")
    while left:
        _wait(child.stdin, select.POLLOUT, limit_s)
        try:
            left = left[os.write(child.stdin.fileno(), left) :]
        except BlockingIOError:
            continue
        except OSError:
            return False
    return True


def _line(child: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
    """Return the next line of the child; None where it is gone."""
    assert child.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        _wait(child.stdout, select.POLLIN, limit_s)
        piece = os.read(child.stdout.fileno(), 1 << 16)
        if not piece:
            return None
        line += piece
    return line


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    while children:
        child = children.pop()
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                # Closing writes what is left in a buffer, and nobody reads it.
                with contextlib.suppress(OSError):
                    pipe.close()


def _bytes(column: int) -> int | None:
    """Return bytes of this process: column 0 is its address space, 1 what is in memory.

    None where the system does not tell.
    """
    try:
        pages = Path("/proc/self/statm").read_text().split()[column]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _tried(vocabulary: LLTokenizer, kind: str, text: str) -> dict:
    """Compile, and walk some steps at random; the walk meets what the first mask does not."""
    before = _bytes(1)
    rng = random.Random(0)
    try:
        matcher = matcher_of(vocabulary, kind, text)
        for step in range(_TRIED_STEPS):
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            # What fails behind the first mask ends that generation alone, and may never come.
            if not step:
                check(matcher)
            if matcher.is_stopped() or not bits:
                break
            skipped = rng.randrange(min(bits.bit_count(), 64))
            for _ in range(skipped):
                bits &= bits - 1
            matcher.consume_token((bits & -bits).bit_length() - 1)
    except TrialError as error:
        return {"error": str(error)[:500], "bytes": 0}
    after = _bytes(1)
    taken = 0 if after is None or before is None else max(0, after - before)
    return {"error": None, "bytes": taken}


def _serve() -> None:
    """Read messages to the end of the input, and answer each with a line."""
    import resource

    fields = json.loads(sys.stdin.buffer.readline())
    vocabulary = vocabulary_of(
        fields["tokenizer"], vocab_size=fields["vocab_size"], eos_id=fields["eos"]
    )
    _answer({"error": None})
    for line in sys.stdin.buffer:
        message = json.loads(line)
        used = _bytes(0)
        if used is not None:
            room = used + fields["memory_bytes"] + len(line)
            # A hard limit can be lowered alone, and the soft one is never above it.
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            soft = room if hard == resource.RLIM_INFINITY else min(room, hard)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        # The signal has no handler, so it ends the process inside the library, too.
        signal.setitimer(signal.ITIMER_PROF, fields["cpu_seconds"])
        try:
            reply = _tried(vocabulary, message["kind"], message["text"])
        except BaseException:
            # Memory that Python asked for; the library's own requests abort by themselves.
            os.abort()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(reply)


def _answer(reply: dict) -> None:
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


def _main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What passes here is compiled again by a thread of the parent, which has a third more.
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack = _DEFAULT_STACK_BYTES if soft == resource.RLIM_INFINITY else soft
    threading.stack_size((stack * 3 // 4) & -4096)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main()
