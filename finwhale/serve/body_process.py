"""Bodies to plans: in this process, or in one beside it that a large body cannot make wait.

Decoding, rendering and encoding are calls into compiled code that keep Python's lock: 0.1 s for a
megabyte of short messages. So a large body is planned by a child process, which speaks pickles over
its pipes, ends when its parent is gone, and is ended and replaced when a body takes too long. It
refuses nothing of its own but time and memory. A newcomer's mistake: importing torch here; the
child would start in seconds and hold 200 MB.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Generic, Protocol, TypeVar, cast

from finwhale.serve.errors import (
    InvalidRequestError,
    OverloadedError,
    ServeError,
    TooLargeError,
)
from finwhale.serve.planning import Plan, Planner
from finwhale.serve.schema import decode
from finwhale.telemetry import get_logger

logger = get_logger("serve")

# Address space of the child; 8 MB of body have needed at most a tenth of it.
MAX_CHILD_BYTES = 4 << 30
_NICE = 5
_START_S = 60.0
# Not with -m, under which the classes of this file would be those of `__main__`.
_PROGRAM = "from finwhale.serve.body_process import main; main()"


Options = TypeVar("Options", covariant=True)


class Body(Protocol[Options]):
    """A decoded body: what `plan_body` needs of it."""

    def plans(self, planner: Planner, tenant: str) -> list[Plan]:
        """Return the plan of each prompt; raise InvalidRequestError for a bad value."""
        ...

    def options(self) -> Options:
        """Return what an answer needs of the body; small, since it travels between processes."""
        ...


@dataclass(frozen=True, slots=True)
class Asked(Generic[Options]):
    """A body that was read: its options, and a plan for each of its prompts."""

    options: Options
    plans: list[Plan]

    @property
    def plan(self) -> Plan:
        """The plan of a body that has one prompt."""
        (plan,) = self.plans
        return plan


def plan_body(
    planner: Planner, raw: bytes, kind: type[Body[Options]], tenant: str
) -> Asked[Options]:
    """Return a body decoded and planned; raise ServeError for what could not be served."""
    try:
        body = decode(raw, cast("Any", kind))
        plans = body.plans(planner, tenant)
        return Asked(body.options(), plans)
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError("body: nested too deeply; flatten it", code="invalid_body")


class BodyProcess:
    """A child that plans bodies, one at a time. It starts with the first one or with `start`.

    timeout_s  time for one body; then the child is ended and the body refused
    """

    def __init__(self, planner: Planner, *, timeout_s: float) -> None:
        """Keep what the child is told at its start."""
        self._planner, self._timeout_s = planner, timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the child if there is none; blocks until it can take a body."""
        with self._lock:
            self._running()

    def plan(self, raw: bytes, kind: type[Body[Options]], tenant: str) -> Asked[Options]:
        """Return what `plan_body` returns or raise what it raises. Blocks.

        Raises TooLargeError for a body that takes too much time or memory, OverloadedError where
        the child ended for another reason.
        """
        with self._lock:
            child = self._running()
            is_late = threading.Event()

            def end() -> None:
                is_late.set()
                child.kill()

            timer = threading.Timer(self._timeout_s, end)
            timer.start()
            try:
                _send(_pipe(child.stdin), (raw, kind, tenant))
                answer = _receive(_pipe(child.stdout))
            except (OSError, EOFError, pickle.UnpicklingError):
                self._end()
                if is_late.is_set():
                    want = f"one that is read within {self._timeout_s:g} s; shorten it"
                    raise TooLargeError(f"body: expected {want}", code="slow_to_read") from None
                logger.warning("the process that reads large bodies ended and is replaced")
                raise OverloadedError(
                    "the process that reads large bodies ended; ask again, or send less",
                    code="overloaded",
                    retry_after_s=1,
                ) from None
            finally:
                timer.cancel()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the child, also while it works; a body that comes later is refused."""
        self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise OverloadedError("the server is shutting down", code="unavailable")
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        self._child = child = subprocess.Popen(
            # -P: what lies in the working folder is not imported.
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Packages are found where this process finds them.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            # Ctrl-C is for the server, which lets running answers end first.
            start_new_session=True,
        )
        timer = threading.Timer(_START_S, child.kill)
        timer.start()
        try:
            _send(_pipe(child.stdin), self._planner)
            _receive(_pipe(child.stdout))
        except (OSError, EOFError, pickle.UnpicklingError):
            self._end()
            raise OverloadedError(
                "the process that reads large bodies does not start; the log says why",
                code="overloaded",
                retry_after_s=1,
            ) from None
        finally:
            timer.cancel()
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                _pipe(pipe).close()
        child.wait()


def _pipe(pipe: Any) -> BinaryIO:
    return cast("BinaryIO", pipe)


def _send(pipe: BinaryIO, value: object) -> None:
    pickle.dump(value, pipe, protocol=5)
    pipe.flush()


def _receive(pipe: BinaryIO) -> Any:
    return pickle.load(pipe)


def _answers(planner: Planner, inbox: BinaryIO) -> Iterator[bytes]:
    """Yield the answer to each body of `inbox`, pickled, until it ends."""
    while True:
        try:
            raw, kind, tenant = _receive(inbox)
        except EOFError:
            return
        try:
            yield pickle.dumps(plan_body(planner, raw, kind, tenant), protocol=5)
        except ServeError as error:
            yield pickle.dumps(error)
        except RecursionError:
            yield pickle.dumps(_too_deep())
        except MemoryError:
            want = "one that needs less memory to read; shorten it"
            yield pickle.dumps(TooLargeError(f"body: expected {want}", code="memory"))
        except Exception as error:
            logger.exception("a large body could not be read")
            yield pickle.dumps(RuntimeError(f"body process: {type(error).__name__}: {error}"))


def main() -> None:
    """Plan bodies from standard input until it ends."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        os.nice(_NICE)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_CHILD_BYTES, MAX_CHILD_BYTES))
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    # What a library prints must not get between the pickles.
    sys.stdout = sys.stderr
    planner: Planner = _receive(inbox)
    planner.warm_up()
    _send(outbox, "ready")
    for answer in _answers(planner, inbox):
        outbox.write(answer)
        outbox.flush()
