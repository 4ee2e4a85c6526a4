"""A stream closes what it reads, whoever ends it, and a body's errors reach the client."""

from __future__ import annotations

import asyncio

import pytest

from finwhale.serve.errors import EngineFailedError
from finwhale.serve.exchange import KEEP_ALIVE, EventStream


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
