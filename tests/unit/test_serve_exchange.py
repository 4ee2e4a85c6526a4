"""A stream closes what it reads, whoever ends it; no sequence stays without a reader."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from finwhale.serve.errors import EngineFailedError
from finwhale.serve.exchange import (
    KEEP_ALIVE,
    ClientLeftError,
    EventStream,
    Exchange,
    cancel_generations,
)
from finwhale.serve.planning import CompletionRequest, Sampling
from tests.scripted_engine import ScriptedEngine, byte_tokenizer, scripted_service


class Connection:
    """One connection: bodies that were sent, and the moment when the client leaves."""

    def __init__(self):
        self.sent = []
        self.left = asyncio.Event()

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def bodies(self):
        return [m["body"] for m in self.sent if m["type"] == "http.response.body"]


class Source:
    """An iterator that remembers how it ended."""

    def __init__(self, *steps):
        self.steps = steps
        self.ended = None

    async def events(self):
        try:
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield step
            self.ended = "whole"
        except BaseException as error:
            self.ended = type(error).__name__
            raise


def run(source, leave_after_s=None):
    """Bodies that were sent, and how often `on_close` was called."""

    async def main():
        connection, closed = Connection(), []
        stream = EventStream(
            source.events(),
            keep_alive_s=0.05,
            on_close=lambda: closed.append(True),
            error_event=lambda error: f"error {error.status} {error.message}".encode(),
        )
        if leave_after_s is not None:
            asyncio.get_running_loop().call_later(leave_after_s, connection.left.set)
        await stream({"type": "http"}, connection.receive, connection.send)
        assert connection.sent[0]["status"] == 200
        assert "content-length" not in stream.headers
        return connection, len(closed)

    return asyncio.run(asyncio.wait_for(main(), 5))


def test_a_whole_stream_is_sent_in_order_and_ended():
    source = Source(b"a", b"b")
    connection, closed = run(source)
    assert connection.bodies == [b"a", b"b", b""]
    assert [m["more_body"] for m in connection.sent[1:]] == [True, True, False]
    assert (source.ended, closed) == ("whole", 1)


def test_an_empty_stream_is_a_whole_response():
    connection, _ = run(Source())
    assert connection.bodies == [b""]


def test_silence_sends_comments_and_speech_does_not():
    assert KEEP_ALIVE in run(Source(b"a", 0.12, b"b"))[0].bodies
    steps = [step for _ in range(12) for step in (b"a", 0.01)]
    assert KEEP_ALIVE not in run(Source(*steps))[0].bodies


def test_a_stream_with_queued_events_lets_others_run():
    async def main():
        connection, num_turns = Connection(), 0

        async def queued():
            for _ in range(40):
                # An event that is there already, and the work of making it.
                time.sleep(0.002)
                yield b"a"

        async def other():
            nonlocal num_turns
            while True:
                await asyncio.sleep(0)
                num_turns += 1

        stream = EventStream(queued(), keep_alive_s=9, on_close=bool, error_event=lambda error: b"")
        beside = asyncio.ensure_future(other())
        before = num_turns
        await stream({"type": "http"}, connection.receive, connection.send)
        beside.cancel()
        return num_turns - before

    # 80 ms of work in turns of about 5 ms; a few turns come from the start and the end alone.
    assert asyncio.run(main()) >= 12


def test_a_client_that_leaves_closes_a_source_that_waits():
    source = Source(b"a", 60.0)
    connection, closed = run(source, leave_after_s=0.02)
    assert connection.bodies == [b"a"]
    assert (source.ended, closed) == ("CancelledError", 1)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (EngineFailedError("the engine failed"), "error 500 the engine failed"),
        (KeyError("a secret"), "error 500 internal error"),
    ],
    ids=["known", "unknown"],
)
def test_a_fault_in_the_middle_is_the_last_event(fault, told):
    source = Source(b"a", fault)
    connection, closed = run(source)
    assert connection.bodies[0] == b"a"
    assert connection.bodies[1].decode().startswith(told)
    assert b"secret" not in connection.bodies[1]
    assert connection.bodies[2:] == [b""]
    assert closed == 1


# --- the sequence that nobody reads --------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class ByHand:
    """A service whose worker takes its turns when the test says so."""

    def __init__(self, tokenizer):
        self.engine = ScriptedEngine(lambda prompt, index: [5] * 4000)
        self.service = scripted_service(tokenizer, self.engine)
        self.worker = self.service.worker
        # Its own thread is not started, so a check that it lives would refuse everything.
        self.worker._thread = SimpleNamespace(is_alive=lambda: True, ident=None)

    def turn(self):
        self.worker._read_inbox(wait=False)

    def settle(self):
        """Let the worker do all it has been told; return what is in flight then."""
        self.turn()
        if self.engine.has_work:
            self.worker._step()
        return self.worker.num_in_flight


async def complete(service):
    sampling = Sampling(max_tokens=3000)
    return await service.complete(CompletionRequest(prompt="hi", sampling=sampling))


async def two(service):
    """A body of two prompts, as /v1/completions takes it: served as a whole or not at all."""
    begun = []
    try:
        for _ in range(2):
            begun.append(await complete(service))
    except BaseException:
        cancel_generations(begun)
        raise
    return begun


async def inside(service):
    return ([await complete(service)], "results")


async def turns(number):
    for _ in range(number):
        await asyncio.sleep(0)


async def race(tokenizer, answer, event, lead, is_first):
    """Let `event` come `lead` turns of the loop after the engine has accepted, or before.

    Returns the result if one was handed out, and what is in flight after it was cancelled.
    """
    world, connection = ByHand(tokenizer), Connection()
    request = Request({"type": "http", "headers": []}, connection.receive)
    exchange = Exchange(request=request, request_id="r", tenant="", service=world.service)
    asking = asyncio.ensure_future(exchange.while_connected(answer(world.service)))
    interrupt = {"leaves": connection.left.set, "stops": asking.cancel}[event]

    async def inbox(number):
        while world.worker._inbox.qsize() + len(world.worker._jobs) < number:
            await asyncio.sleep(0.001)

    await inbox(1)
    if answer is two:
        world.turn()
        await inbox(2)
    moves = [(max(-lead, 0), world.turn), (max(lead, 0), interrupt)]
    for turn in range(abs(lead) + 1):
        due = [move for when, move in moves if when == turn]
        for move in due if is_first else reversed(due):
            move()
        await turns(1)
    try:
        result = await asyncio.wait_for(asking, 5)
    except (ClientLeftError, asyncio.CancelledError):
        result = None
    await turns(3)
    num_held = len(world.worker._jobs) if result is not None else None
    if result is not None:
        # As a response does when it finds that the client has left.
        cancel_generations(result)
    return num_held, world.settle()


@pytest.mark.parametrize("event", ["leaves", "stops"])
@pytest.mark.parametrize("answer", [complete, two, inside])
def test_no_sequence_stays_when_the_client_leaves_in_any_turn(tokenizer, answer, event):
    handed_out = set()
    for lead in range(-3, 9):
        for is_first in (True, False):
            num_held, left = asyncio.run(race(tokenizer, answer, event, lead, is_first))
            assert left == 0, (lead, is_first)
            handed_out.add(num_held is not None)
            # What is handed out is alive: only what nobody takes is cancelled.
            assert num_held in (None, 2 if answer is two else 1)
    # The turns tried lie on both sides of the result.
    assert handed_out == {True, False}


def test_a_stream_that_never_began_lets_its_generation_go(tokenizer):
    async def main():
        world, connection = ByHand(tokenizer), Connection()
        asking = asyncio.ensure_future(complete(world.service))
        while not world.worker._inbox.qsize():
            await asyncio.sleep(0.001)
        world.turn()
        generation = await asking
        stream = EventStream(
            Source(b"a").events(),
            keep_alive_s=1,
            on_close=generation.cancel,
            error_event=lambda error: b"",
        )
        connection.left.set()

        async def broken(message):
            raise OSError("the transport is closed")

        with pytest.raises(OSError, match="closed"):
            await stream({"type": "http"}, connection.receive, broken)
        return world.settle()

    assert asyncio.run(main()) == 0


def test_only_generations_in_a_result_are_cancelled(tokenizer):
    # Results of other endpoints pass through the same door.
    for result in (None, {}, [], ({"tokens": []}, [1, "x"])):
        cancel_generations(result)
