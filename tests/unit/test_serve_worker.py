"""A worker answers every request exactly once with an end or an error, whatever its engine does."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace

import pytest

from finwhale.engine.engine import QueueFullError
from finwhale.engine.request import RequestError, RequestOutput, SamplingParams, TokenResult
from finwhale.serve.errors import (
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
    RateLimitError,
    ServeError,
)
from finwhale.serve.worker import MAX_FAILED_STEPS, Worker
from tests.scripted_engine import CONTEXT_TOKENS, ScriptedEngine

STOP = 1
PARAMS = SamplingParams(max_new_tokens=3000, stop_ids=(STOP,))


class Listener:
    def __init__(self):
        self.messages = queue.Queue()

    def __call__(self, message):
        self.messages.put(message)

    def next(self):
        return self.messages.get(timeout=5)

    def rest(self):
        """All messages up to an error or the first last output."""
        found = [self.next()]
        while not (
            isinstance(found[-1], ServeError)
            or (isinstance(found[-1], RequestOutput) and found[-1].is_last)
        ):
            found.append(self.next())
        return found


def words(length):
    return lambda prompt, index: [5] * length + [STOP]


@pytest.fixture
def start():
    """Return a function that starts a worker; all are closed at the end."""
    workers = []

    def begin(engine, **limits):
        workers.append(Worker(engine, **limits))
        workers[-1].start()
        return workers[-1]

    yield begin
    for worker in workers:
        worker.close()


def submit(worker, name="a", tenant="", params=PARAMS, prompt=(3, 4)):
    listener = Listener()
    worker.submit(prompt, params, request_id=name, tenant=tenant, listener=listener)
    return listener


def tokens(messages):
    return [r.token for m in messages if isinstance(m, RequestOutput) for r in m.new]


def test_a_listener_hears_accepted_then_every_token_then_the_end(start):
    worker = start(ScriptedEngine(words(3)))
    messages = submit(worker).rest()
    assert messages[0] == "accepted"
    assert tokens(messages) == [5, 5, 5, STOP]
    assert messages[-1].finish_reason == "stop"
    assert worker.num_in_flight == 0


def test_an_idle_engine_is_asked_what_is_too_old(start):
    asked, left = threading.Semaphore(0), [0.001, 0.001, 1e300]

    class Resting(ScriptedEngine):
        def rest(self):
            asked.release()
            return left.pop(0) if left else None

    worker = start(Resting(words(3)))
    # Nothing is sent, and it is asked again when the time that it named is over.
    for _ in range(3):
        assert asked.acquire(timeout=10)
    listener = submit(worker)
    listener.next()


def test_all_calls_to_the_engine_come_from_one_thread_that_is_not_the_callers(start):
    seen = set()

    class Watched(ScriptedEngine):
        def add(self, *args, **options):
            seen.add(threading.get_ident())
            return super().add(*args, **options)

        def step(self):
            seen.add(threading.get_ident())
            return super().step()

        def cancel(self, request_id):
            seen.add(threading.get_ident())
            return super().cancel(request_id)

    worker = start(Watched(words(500)))
    listener = submit(worker)
    listener.next()
    worker.cancel("a")
    assert listener.rest()[-1].finish_reason in ("cancelled", "stop")
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_what_the_engine_refuses_comes_in_place_of_accepted(start):
    class Full(ScriptedEngine):
        def add(self, prompt, *args, **options):
            if prompt[0] == 9:
                raise QueueFullError("full")
            if prompt[0] == 8:
                raise KeyError("a fault")
            return super().add(prompt, *args, **options)

    worker = start(Full(words(1)))
    too_long = SamplingParams(max_new_tokens=CONTEXT_TOKENS)
    refused = submit(worker, params=too_long).rest()
    assert len(refused) == 1
    assert isinstance(refused[0], InvalidRequestError)
    assert (refused[0].param, refused[0].code) == ("max_tokens", "context_length_exceeded")
    assert isinstance(submit(worker, prompt=(9,)).rest()[0], OverloadedError)
    assert isinstance(submit(worker, prompt=(8,)).rest()[0], EngineFailedError)
    # Their places are free again.
    assert worker.num_in_flight == 0
    assert submit(worker).rest()[-1].is_last


def test_limits_count_choices_of_a_tenant_and_of_all(start):
    worker = start(ScriptedEngine(words(2000), step_s=0.005), max_requests=5, max_tenant_requests=3)
    two = SamplingParams(max_new_tokens=3000, stop_ids=(STOP,), n=2)
    held = [submit(worker, "a", "x", two), submit(worker, "b", "y", two)]
    assert worker.num_in_flight == 4
    with pytest.raises(RateLimitError):
        submit(worker, "c", "x", two)
    with pytest.raises(OverloadedError) as refused:
        submit(worker, "c", "z", two)
    assert refused.value.retry_after_s == 1
    held.append(submit(worker, "c", "z"))
    assert worker.num_in_flight == 5
    for name, listener in zip("abc", held, strict=True):
        worker.cancel(name)
        assert listener.rest()[-1].finish_reason == "cancelled"


def test_a_request_is_cancelled_alone(start):
    worker = start(ScriptedEngine(words(20), step_s=0.002))
    first, second = submit(worker, "a"), submit(worker, "b")
    worker.cancel("a")
    worker.cancel("nobody")
    assert first.rest()[-1].finish_reason == "cancelled"
    assert tokens(second.rest()) == [5] * 20 + [STOP]


def test_a_step_that_raises_fails_those_in_it_and_nobody_later(start):
    engine = ScriptedEngine(words(50), step_s=0.002)
    worker = start(engine)
    listeners = [submit(worker, name) for name in "ab"]
    for listener in listeners:
        assert listener.next() == "accepted"
    engine.num_failures = 1
    for listener in listeners:
        assert isinstance(listener.rest()[-1], EngineFailedError)
    assert worker.num_in_flight == 0
    assert tokens(submit(worker, "a").rest()) == [5] * 50 + [STOP]
    assert worker.unavailable is None


def test_an_engine_that_always_fails_is_given_up_and_says_so(start):
    engine = ScriptedEngine(words(5), num_failures=10**6)
    worker = start(engine)
    failed = submit(worker).rest()[-1]
    assert isinstance(failed, EngineFailedError)
    # The engine's own words stay in the log.
    assert "planted" not in str(failed)
    # The cancelled choice is still to be told, so the worker goes on stepping, but not for ever.
    deadline = time.monotonic() + 5
    while worker.unavailable is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert f"failed {MAX_FAILED_STEPS} times" in worker.unavailable
    left = engine.num_failures
    with pytest.raises(OverloadedError):
        submit(worker)
    assert engine.num_failures == left


class Faulty(ScriptedEngine):
    """Says what a test plans for each step: outputs by request, or an exception."""

    def __init__(self, plan):
        super().__init__(words(3000))
        self.plan = list(plan)

    def step(self):
        super().step()
        told = self.plan.pop(0) if self.plan else "sound"
        if told == "raises":
            raise RuntimeError("a planted failure")
        said = {
            "sound": {"new": (TokenResult(token=5),)},
            "cancelled": {"finish_reason": "cancelled"},
            "fault": {"finish_reason": "error", "error": "layer 0", "fault": "model"},
            "own": {"finish_reason": "error", "error": "GrammarError: no", "fault": "request"},
            "nothing": None,
        }[told]
        names = list(dict.fromkeys(name for name, _ in self._running))
        if told in ("fault", "own", "cancelled"):
            self._running.clear()
        return [] if said is None else [RequestOutput(request_id=name, **said) for name in names]


def walk(plan):
    """Drive a worker by hand, a new request before each step; return failures after each."""
    worker = Worker(Faulty(plan))
    worker._thread = SimpleNamespace(is_alive=lambda: True, ident=None)
    counts = []
    for number in range(len(plan)):
        if worker.unavailable is None:
            submit(worker, str(number))
        worker._read_inbox(wait=False)
        worker._step()
        counts.append(worker._failed_steps)
    return worker, counts


@pytest.mark.parametrize(
    ("plan", "counts"),
    [
        # Ends of requests that a failed step took along do not reset the count.
        (["raises", "cancelled", "raises", "cancelled", "raises"], [1, 1, 2, 2, 3]),
        # Every request fails, no step does: weights that make rows without numbers.
        (["fault", "fault", "fault"], [1, 2, 3]),
        (["raises", "fault", "raises"], [1, 2, 3]),
        # A step of a prompt tells nothing yet.
        (["raises", "nothing", "raises", "nothing", "raises"], [1, 1, 2, 2, 3]),
        # What a request brought along is not the engine's fault, and no sign of its health.
        (["own", "own", "own", "own"], [0, 0, 0, 0]),
        (["raises", "own", "raises", "own", "raises"], [1, 1, 2, 2, 3]),
        # A token of a request that goes on is.
        (["raises", "raises", "sound", "raises", "raises"], [1, 2, 0, 1, 2]),
        (["fault", "fault", "sound", "fault"], [1, 2, 0, 1]),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_only_an_output_of_a_sound_request_says_that_the_engine_works(plan, counts):
    worker, found = walk(plan)
    assert found == counts
    is_broken = counts[-1] >= MAX_FAILED_STEPS
    assert (worker.unavailable is not None) == (worker.dead is not None) == is_broken
    if is_broken:
        assert "restart" in worker.unavailable
        # Nobody waits for an engine that has been given up.
        assert worker.num_in_flight == 0


def test_a_request_one_choice_of_which_fails_is_no_sign_of_health():
    class Half(Faulty):
        def step(self):
            outputs = super().step()
            return [*outputs, RequestOutput(request_id="0", index=1, new=(TokenResult(token=5),))]

    worker = Worker(Half(["fault"]))
    worker._thread = SimpleNamespace(is_alive=lambda: True, ident=None)
    submit(worker, "0", params=SamplingParams(max_new_tokens=9, stop_ids=(STOP,), n=2))
    worker._read_inbox(wait=False)
    worker._step()
    assert worker._failed_steps == 1


def test_a_full_queue_is_busy_and_neither_dead_nor_unavailable(start):
    worker = start(ScriptedEngine(words(2000), step_s=0.005), max_requests=2)
    assert (worker.busy, worker.dead, worker.unavailable) == (None, None, None)
    two = SamplingParams(max_new_tokens=3000, stop_ids=(STOP,), n=2)
    listener = submit(worker, params=two)
    assert worker.busy == "2 requests are queued or running, 2 may"
    assert (worker.dead, worker.unavailable) == (None, None)
    worker.cancel("a")
    listener.rest()
    listener.rest()
    assert worker.busy is None
    worker.close()
    assert "shutting down" in worker.busy


def test_a_listener_that_raises_costs_the_others_nothing(start):
    worker = start(ScriptedEngine(words(5)))

    def broken(message):
        raise RuntimeError("the loop is closed")

    worker.submit([3], PARAMS, request_id="bad", tenant="", listener=broken)
    assert tokens(submit(worker, "good").rest()) == [5] * 5 + [STOP]


def test_an_error_of_one_choice_ends_the_request_with_that_error(start):
    class Refusing:
        def copy(self):
            return self

        def mask(self):
            raise RuntimeError("this request cannot say what may follow")

        is_finished = False

        def advance(self, token):
            raise RequestError("constraint", "a planted one", "not allowed")

    worker = start(ScriptedEngine(words(5)))
    params = SamplingParams(max_new_tokens=9, stop_ids=(STOP,), n=2, constraint=Refusing())
    messages = submit(worker, params=params).rest()
    # 400 and not 500: what the request brought along could not be followed.
    assert isinstance(messages[-1], InvalidRequestError)
    assert "not allowed" in str(messages[-1])
    assert worker.num_in_flight == 0


@pytest.mark.parametrize(("grace_s", "reason"), [(5.0, "stop"), (0.0, "cancelled")])
def test_closing_gives_running_answers_their_time_and_refuses_new_ones(start, grace_s, reason):
    worker = start(ScriptedEngine(words(30), step_s=0.005))
    listener = submit(worker)
    assert listener.next() == "accepted"
    closing = threading.Thread(target=worker.close, kwargs={"grace_s": grace_s})
    closing.start()
    last = listener.rest()[-1]
    closing.join(timeout=5)
    assert not closing.is_alive()
    assert last.finish_reason == reason
    with pytest.raises(OverloadedError, match="shutting down"):
        submit(worker, "b")


def test_a_thread_that_dies_leaves_nobody_waiting(start):
    class Dying(ScriptedEngine):
        @property
        def has_work(self):
            if self.added:
                raise MemoryError
            return False

    worker = start(Dying(words(5)))
    assert isinstance(submit(worker).rest()[-1], EngineFailedError)
    assert worker.unavailable is not None
    with pytest.raises(OverloadedError):
        submit(worker, "b")
