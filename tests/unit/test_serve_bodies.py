"""A body comes out as it was sent, however it is coded and cut, and never longer than the limit."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import random
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request

from finwhale.config import ConfigError
from finwhale.config.server import ServerConfig
from finwhale.serve.bodies import BodyRoom, read_body
from finwhale.serve.errors import (
    InvalidRequestError,
    MediaTypeError,
    OverloadedError,
    RateLimitError,
    SlowRequestError,
    TooLargeError,
)

CONFIG = ServerConfig(max_body_bytes=1 << 20, body_timeout_s=5)


def raw_deflate(data: bytes) -> bytes:
    """RFC 1951 without the frame of RFC 1950, as some clients send "deflate"."""
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PIECES = [(1 << 18) - 1, 1 << 18, (1 << 18) + 1]
OTHERS = ["br", "zstd", "compress", "gzip, gzip", "identity, br", "x" * 500]
CODINGS = {
    "identity": ("identity", bytes),
    "none": ("", bytes),
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate-raw": ("deflate", raw_deflate),
}


async def within(room, request, config, tenant=""):
    """The body, counted in `room` while it comes, as an exchange does it."""
    with room.part(tenant) as take:
        return await read_body(request, config, take, limit=config.max_body_bytes)


def read(parts, coding="", config=CONFIG, **headers):
    """What `read_body` makes of these parts; None is a client that leaves, ... one that waits."""
    left = list(parts)

    async def receive():
        if left:
            part = left.pop(0)
            if part is None:
                return {"type": "http.disconnect"}
            if part is ...:
                await asyncio.sleep(60)
            return {"type": "http.request", "body": part, "more_body": bool(left)}
        raise AssertionError("read behind the end")

    told = {"content-type": "application/json", **headers}
    if coding:
        told["content-encoding"] = coding
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in told.items()]
    request = Request({"type": "http", "headers": pairs}, receive)
    room = BodyRoom(config)
    try:
        return asyncio.run(within(room, request, config))
    finally:
        # However it ended.
        assert room.num_bytes == 0


@pytest.mark.parametrize("coding", CODINGS)
@settings(max_examples=25, deadline=None)
@given(data=st.binary(max_size=3000), cuts=st.lists(st.integers(0, 4000), max_size=6))
def test_any_cut_of_a_coded_body_is_the_whole(coding, data, cuts):
    name, encode = CODINGS[coding]
    sent = encode(data)
    borders = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    parts = [sent[a:b] for a, b in itertools.pairwise(borders)]
    assert read(parts, name) == data


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("length", [0, 1, *PIECES, (1 << 20) - 1, 1 << 20])
def test_lengths_about_a_piece_and_the_limit_are_taken(coding, length):
    name, encode = CODINGS[coding]
    for data in (b"a" * length, random.Random(length).randbytes(length)):
        sent = encode(data)
        # What does not shrink may be longer coded than the limit, and is refused by that.
        if len(sent) <= CONFIG.max_body_bytes:
            assert read([sent], name) == data


@pytest.mark.parametrize("coding", [name for name in CODINGS if name not in ("none", "identity")])
def test_a_bomb_is_refused_before_it_is_unpacked(coding):
    name, encode = CODINGS[coding]
    with pytest.raises(TooLargeError):
        read([encode(bytes((1 << 20) + 1))], name)
    sent = encode(bytes(300 << 20))
    assert len(sent) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match="longer than 1048576 bytes"):
            read([sent], name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The limit, a piece behind it and copies of what was sent: nothing near 300 MB.
    assert peak < 4 << 20


@pytest.mark.parametrize("coding", [name for name in CODINGS if name not in ("none", "identity")])
def test_a_coded_body_that_is_cut_broken_or_followed_by_more_is_refused(coding):
    name, encode = CODINGS[coding]
    sent = encode(b'{"a": 1}' * 50)
    for parts in ([sent[:-1]], [b""], [sent[:5], b""], [sent, b"x"], [sent + sent], [b"{" + sent]):
        with pytest.raises(InvalidRequestError, match=r"body: not .* as content-encoding says"):
            read(parts, name)


@pytest.mark.parametrize("coding", OTHERS)
def test_a_coding_that_is_not_taken_is_415_and_says_what_is(coding):
    with pytest.raises(MediaTypeError) as refused:
        read([b"{}"], coding)
    assert f"got '{coding[:80]}'" in refused.value.message
    # RFC 9110 section 15.5.16.
    assert refused.value.headers == {"accept-encoding": "gzip, deflate, identity"}
    assert refused.value.status == 415


def test_a_plain_body_over_the_limit_is_refused_by_its_length_and_by_its_bytes():
    with pytest.raises(TooLargeError):
        read([], content_length=str((1 << 20) + 1))
    with pytest.raises(TooLargeError):
        read([b"x" * (1 << 19)] * 3)
    with pytest.raises(TooLargeError):
        read([], content_length="9" * 400)


def test_a_body_that_stops_coming_is_408_and_a_client_that_leaves_is_no_answer():
    short = ServerConfig(body_timeout_s=0.05)
    with pytest.raises(SlowRequestError) as late:
        read([b"{", ...], config=short)
    assert late.value.status == 408
    with pytest.raises(ClientDisconnect):
        read([b"{", None])


def test_bodies_that_arrive_together_share_their_room():
    config = ServerConfig(max_body_bytes=100, max_bodies_bytes=250, body_timeout_s=5)

    async def main():
        room = BodyRoom(config)
        coming = [asyncio.Queue() for _ in range(4)]

        def reading(queue):
            headers = [(b"content-type", b"application/json")]
            return asyncio.ensure_future(
                within(room, Request({"type": "http", "headers": headers}, queue.get), config)
            )

        async def send(queue, length, *, more=True):
            await queue.put({"type": "http.request", "body": b"x" * length, "more_body": more})
            for _ in range(5):
                await asyncio.sleep(0)

        tasks = [reading(queue) for queue in coming]
        for queue in coming[:3]:
            await send(queue, 80)
        assert room.num_bytes == 240
        await send(coming[3], 20)
        with pytest.raises(OverloadedError) as refused:
            await tasks[3]
        assert (refused.value.status, refused.value.headers) == (503, {"retry-after": "1"})
        # What is there goes on, and what ends gives its room back.
        await send(coming[0], 10, more=False)
        assert await tasks[0] == b"x" * 90
        assert room.num_bytes == 160
        coming[1].put_nowait({"type": "http.disconnect"})
        with pytest.raises(ClientDisconnect):
            await tasks[1]
        assert room.num_bytes == 80
        tasks[3] = reading(coming[3])
        await send(coming[3], 100, more=False)
        assert len(await tasks[3]) == 100
        tasks[2].cancel()
        await asyncio.wait({tasks[2]})
        return room.num_bytes

    assert asyncio.run(main()) == 0


def test_the_room_of_all_bodies_is_never_less_than_that_of_one():
    with pytest.raises(ConfigError, match=r"server.max_bodies_bytes: got 99"):
        ServerConfig(max_body_bytes=100, max_bodies_bytes=99)


def test_one_tenant_may_have_half_of_the_room_and_gives_it_back():
    config = ServerConfig(max_body_bytes=100, max_bodies_bytes=200, body_timeout_s=5)
    room = BodyRoom(config)
    with room.part("a") as take:
        take(100)
        with room.part("a") as more, pytest.raises(RateLimitError) as refused:
            more(1)
        assert (refused.value.status, refused.value.headers) == (429, {"retry-after": "1"})
        with room.part("b") as other:
            other(100)
            with room.part("c") as third, pytest.raises(OverloadedError):
                third(1)
    assert room.num_bytes == 0
    with room.part("a") as take:
        take(100)
    # Without keys all are one tenant.
    with room.part("") as take:
        take(200)
