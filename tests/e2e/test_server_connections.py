"""Connections that idle, dribble or do not read: they end in time, and others are served.

Raw sockets against a server on loopback. Time limits are short here; the tests wait for what must
happen within them and bound nothing else by the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import resource
import socket
import time
from urllib.parse import urlsplit

import pytest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from finwhale.config import ConfigError
from finwhale.serve.connections import connection_limit
from tests.scripted_engine import World, running, scripted_service, until

BIG = 24_000_000


async def big(_):
    return Response(b"x" * BIG)


async def endless(_):
    async def parts():
        while True:
            yield b"x" * 10_000
            await asyncio.sleep(0)

    return StreamingResponse(parts())


async def gap(_):
    """Stop the event loop for longer than the test's time limit."""
    time.sleep(3.0)
    return Response(b"")


@contextlib.contextmanager
def serving(tokenizer, **settings):
    """A world with the settings, and paths that misbehave: two of them with endless answers."""
    world = World(tokenizer)
    world.parts = ("x" * 3000,)
    world.service = scripted_service(tokenizer, world.engine, **settings)
    routes = [Route("/big", big), Route("/endless", endless), Route("/gap", gap)]
    with running(world.service, routes=routes) as world.url:
        world.address = urlsplit(world.url).hostname, urlsplit(world.url).port
        yield world


def connect(world, receive_bytes=None):
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(20)
    connection.connect(world.address)
    return connection


def rest(connection):
    """All bytes up to the end of the connection, however it ends."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            found += part
    return found


def post(path, body):
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


def health(world):
    connection = http.client.HTTPConnection(*world.address, timeout=10)
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def figure(world, name):
    """A value of /metrics, 0 if it has not been counted; asked on a connection of its own."""
    connection = http.client.HTTPConnection(*world.address, timeout=10)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
    return float(values.get(f"finwhale_{name}", 0))


def ended(world, reason):
    return figure(world, f'connections_ended_total{{reason="{reason}"}}')


# --- headers -------------------------------------------------------------------------------------


def test_a_connection_without_a_request_is_closed_at_the_limit(tokenizer):
    with serving(tokenizer, header_timeout_s=0.4) as world:
        silent = [connect(world) for _ in range(5)]
        half = connect(world)
        half.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        assert [rest(connection) for connection in silent] == [b""] * 5
        # Whoever has begun to ask is told why.
        told = rest(half)
        assert told.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"slow_header"' in told
        assert health(world) == 200
        until(lambda: ended(world, "slow_header") == 6)


def dribble(connection):
    """Send a header that never ends, a line at a time; return the answer."""
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
    connection.settimeout(0.05)
    told, deadline = b"", time.monotonic() + 20
    while not told:
        assert time.monotonic() < deadline
        connection.sendall(b"x-more: 1\r\n")
        with contextlib.suppress(TimeoutError):
            told = connection.recv(4096)
    return told


def test_a_header_that_dribbles_is_closed_although_bytes_come(tokenizer):
    with serving(tokenizer, header_timeout_s=0.4) as world, connect(world) as slow:
        assert dribble(slow).startswith(b"HTTP/1.1 408 ")


def test_a_kept_connection_has_the_same_limit_after_each_answer(tokenizer):
    with serving(tokenizer, header_timeout_s=0.6) as world, connect(world) as kept:
        ask = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        for _ in range(4):
            kept.sendall(ask)
            told = b""
            while not told.endswith(b"}"):
                told += kept.recv(4096)
            assert told.startswith(b"HTTP/1.1 200 ")
            # Together longer than the limit: it begins anew with each answer.
            time.sleep(0.3)
        assert dribble(kept).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_nobody_asked_for_does_not_keep_a_connection(tokenizer):
    with serving(tokenizer, header_timeout_s=0.4) as world, connect(world) as slow:
        slow.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        assert slow.recv(4096).startswith(b"HTTP/1.1 404 ")
        slow.settimeout(0.05)
        deadline = time.monotonic() + 20
        with contextlib.suppress(ConnectionError):
            while True:
                assert time.monotonic() < deadline
                slow.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if slow.recv(4096) == b"":
                        break


def test_a_long_answer_is_no_idle_connection(tokenizer):
    with serving(tokenizer, header_timeout_s=0.3) as world:
        world.engine.step_s = 0.002
        answer = world.chat("y" * 600, max_tokens=3000)
        assert answer.choices[0].message.content == "y" * 600


# --- room ----------------------------------------------------------------------------------------


def test_a_full_server_refuses_at_once_and_serves_when_there_is_room(tokenizer):
    with serving(tokenizer, max_connections=4) as world:
        busy = [connect(world, 4096) for _ in range(4)]
        for connection in busy:
            connection.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        with connect(world) as refused:
            head, _, body = rest(refused).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1" in head
            assert b"\r\nx-content-type-options: nosniff" in head
            assert json.loads(body)["error"]["code"] == "connections"
        busy.pop().close()
        until(lambda: health(world) == 200)
        assert ended(world, "refused") >= 1
        assert figure(world, "responses_in_flight") == 3 + 1
        for connection in busy:
            connection.close()
        until(lambda: figure(world, "responses_in_flight") == 1)


def test_a_young_connection_is_not_closed_to_make_room(tokenizer):
    with serving(tokenizer, max_connections=4, header_timeout_s=60) as world:
        for _ in range(3):
            # Whenever they come: its age is its own, and not that of a tick of the server's clock.
            time.sleep(0.35)
            young = [connect(world) for _ in range(4)]
            with connect(world) as refused:
                assert rest(refused).startswith(b"HTTP/1.1 503 ")
            for connection in young:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                assert rest(connection).startswith(b"HTTP/1.1 200 ")
                connection.close()
            # All are closed on the server's side too before the next four come.
            until(lambda: figure(world, "open_connections") == 1)
        assert ended(world, "no_room") == 0


def test_idle_connections_make_room_the_oldest_first(tokenizer):
    with serving(tokenizer, max_connections=4, header_timeout_s=60) as world:
        idle = []
        for _ in range(4):
            idle.append(connect(world))
            time.sleep(0.01)
        # Younger ones than a second may be on the point of asking.
        until(lambda: health(world) == 200, seconds=20)
        assert rest(idle[0]) == b""
        # The others are still there, and asked on.
        for connection in idle[1:]:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert rest(connection).startswith(b"HTTP/1.1 200 ")
        assert ended(world, "no_room") == 1


def test_the_bound_stays_below_the_limit_of_open_files(monkeypatch):
    def limit(soft):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, 10**6))

    limit(256)
    # 256 less 64 files of others, less four turns of 16 accepted connections.
    assert connection_limit(1024) == 128
    assert connection_limit(5) == 5
    limit(resource.RLIM_INFINITY)
    assert connection_limit(1024) == 1024
    limit(1 << 20)
    assert connection_limit(1024) == 1024
    limit(100)
    with pytest.raises(ConfigError, match=r"open files: .* 100, expected at least 136.*ulimit -n"):
        connection_limit(1024)


def test_a_flood_is_one_line_in_the_log(tokenizer, caplog, capfd):
    # uvicorn writes to standard error, the package to its logger.
    with serving(tokenizer, max_connections=4) as world:
        with caplog.at_level(logging.INFO):
            for _ in range(40):
                with connect(world) as garbage:
                    garbage.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
                    told = rest(garbage)
                assert told.startswith(b"HTTP/1.1 400 ")
                assert b"\r\nx-content-type-options: nosniff" in told
            until(lambda: any("malformed" in r.getMessage() for r in caplog.records))
        assert ended(world, "malformed") == 40
        assert len(caplog.records) <= 2
        assert capfd.readouterr().err == ""


# --- readers -------------------------------------------------------------------------------------

ASK_BIG = b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n"
ASK_ENDLESS = b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSING = b"GET /big HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("ask", [ASK_BIG, ASK_ENDLESS, CLOSING], ids=["kept", "stream", "closing"])
def test_a_reader_that_does_not_read_is_ended_whatever_it_asked_for(tokenizer, ask):
    with serving(tokenizer, write_timeout_s=3.0) as world:
        stalled = [connect(world, 1024) for _ in range(3)]
        for connection in stalled:
            connection.sendall(ask)
        until(lambda: figure(world, "responses_in_flight") == 3 + 1)
        until(lambda: figure(world, "stalled_readers") == 3)
        # Nothing is closed in order here: what was not read is dropped with the connection.
        until(lambda: ended(world, "slow_reader") == 3, seconds=20)
        assert figure(world, "open_connections") == 1
        assert figure(world, "stalled_readers") == 0
        for connection in stalled:
            assert len(rest(connection)) < BIG
            connection.close()


def test_an_answer_that_never_ends_is_cut_off_however_fast_it_is_read(tokenizer):
    limits = {"request_timeout_s": 0.5, "body_timeout_s": 0.2, "write_timeout_s": 0.5}
    with serving(tokenizer, **limits) as world, connect(world) as fast:
        fast.sendall(ASK_ENDLESS)
        assert len(rest(fast)) > 1_000_000
        until(lambda: ended(world, "slow_reader") == 1)
        # The time is that of one answer, and not of the connection.
        with connect(world) as kept:
            for _ in range(6):
                kept.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                told = b""
                while not told.endswith(b"}"):
                    told += kept.recv(4096)
                time.sleep(0.3)
            assert ended(world, "slow_reader") == 1


def test_a_slow_reader_gets_all_of_it(tokenizer):
    with serving(tokenizer, write_timeout_s=0.5) as world, connect(world) as slow:
        slow.sendall(CLOSING)
        size, pauses = 0, 0
        while part := slow.recv(1 << 20):
            size += len(part)
            # Never so long without a read, and longer than the limit together.
            if size > (pauses + 1) << 20:
                pauses += 1
                time.sleep(0.1)
        assert size > BIG
        assert pauses >= 10
        assert ended(world, "slow_reader") == 0


def test_a_stream_whose_reader_stalls_is_cancelled_in_the_engine(tokenizer):
    with serving(tokenizer, write_timeout_s=0.5, keep_alive_s=0.1) as world:
        world.parts = ("x" * 4000,)
        world.engine.step_s = 0.002
        cut = []
        end = world.engine._end

        def noted(said, reason, **fields):
            cut.append((said.request_id, said.num_told))
            end(said, reason, **fields)

        world.engine._end = noted
        body = {"prompt": "hi", "max_tokens": 3800, "logprobs": 5, "stream": True}
        with connect(world, 1024) as stalled:
            stalled.sendall(post("/v1/completions", body))
            until(lambda: world.service.worker.num_in_flight == 1)
            until(lambda: ended(world, "slow_reader") == 1, seconds=20)
            until(lambda: world.service.worker.num_in_flight == 0)
        # Before its end: it has said less than it was asked for.
        assert set(world.engine.cancelled) == {name for name, _ in cut}
        assert 0 < cut[0][1] < 3800
        world.engine.step_s = 0.0
        assert world.chat("fine").choices[0].message.content == "fine"


def test_requests_in_one_packet_are_answered_in_order_and_hide_no_client_that_leaves(tokenizer):
    with serving(tokenizer) as world:
        world.parts = ("one", " two")
        ask = post("/v1/completions", {"prompt": "hi", "max_tokens": 20})
        with connect(world) as both:
            both.sendall(ask + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            told = rest(both)
        assert told.count(b"HTTP/1.1 200 ") == 2
        assert told.index(b"one two") < told.index(b'"status":"ok"')
        world.parts = ("x" * 3000,)
        world.engine.step_s = 0.01
        ask = post("/v1/completions", {"prompt": "hi", "max_tokens": 3000})
        for behind in (b"", b"GET /health HTTP/1.1\r\n", ask, b"x" * 1000, ask * 3, ask * 9000):
            with connect(world) as leaving:
                leaving.sendall(ask)
                until(lambda: world.service.worker.num_in_flight == 1)
                # While the first is being answered.
                with contextlib.suppress(ConnectionError):
                    leaving.sendall(behind)
            until(lambda: world.service.worker.num_in_flight == 0)
        until(lambda: ended(world, "pipelined") == 1)


def test_a_gap_of_the_event_loop_is_nobodys_slowness(tokenizer):
    ask = "GET {} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with serving(tokenizer, header_timeout_s=2.0) as world, connect(world) as young:
        assert health(world) == 200
        with connect(world) as other:
            other.sendall(ask.format("/gap").encode())
            assert rest(other).startswith(b"HTTP/1.1 200 ")
        young.sendall(ask.format("/health").encode())
        assert rest(young).startswith(b"HTTP/1.1 200 ")
        assert ended(world, "slow_header") == 0
