"""Hostile clients for `hostile_load.py`: connections that are slow, idle, deaf or gone.

One coroutine for each behaviour over a plain socket, which says in a word how it ended, and the
client that sends a whole request and reads its answer. It refuses to hold a connection longer
than its patience. The easy mistake: asking this end whether the server has closed; the end of
a stream waits behind what nobody reads, so the table of the kernel tells the server's end.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from hostile_bodies import CHAT, MESSAGES, RESPONSES, TEXT, ask, get, post

ANSWERED, CLOSED, BROKEN = "answered", "closed by the server", "broken"
LEFT_OPEN, LEFT, NOT_ANSWERED = "left open", "left", "not answered"
KEEP = 1 << 22


class Answer(asyncio.Protocol):
    """Collects what a connection says until its end."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if len(self.data) < KEEP:
            self.data += data

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def status(self) -> int | None:
        """The status, None before the first line is whole."""
        head = bytes(self.data[:12])
        is_status = head.startswith(b"HTTP/1.1 ") and len(head) == 12 and head[9:].isdigit()
        return int(head[9:]) if is_status else None

    @property
    def content(self) -> bytes:
        """What follows the head, with the frames of chunks taken off."""
        head, _, rest = bytes(self.data).partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            return rest
        parts = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            number = int(size, 16)
            parts.append(rest[:number])
            rest = rest[number + 2 :]
        return b"".join(parts)


async def exchange(port: int, request: bytes, patience_s: float) -> tuple[str, Answer | None]:
    """Send a whole request; return how it ended and the answer, which may be half of one."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(patience_s):
            transport, answer = await loop.create_connection(Answer, "127.0.0.1", port)
    except (OSError, TimeoutError):
        return BROKEN, None
    try:
        transport.write(request)
        await asyncio.wait_for(answer.ended, patience_s)
    except TimeoutError:
        return NOT_ANSWERED, answer
    finally:
        transport.abort()
    if answer.status is not None:
        return ANSWERED, answer
    return (BROKEN if answer.data else CLOSED), answer


# --- behaviours ---------------------------------------------------------------------------------


async def _connected(port: int, receive_bytes: int = 0) -> socket.socket:
    made = socket.socket()
    if receive_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
    except OSError:
        made.close()
        raise
    return made


def _reset(made: socket.socket) -> None:
    """Close with RST."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()


async def _until_end(made: socket.socket, limit_s: float) -> tuple[bytes, str]:
    """Return what arrives until the server closes, or until `limit_s`, and which of the two."""
    loop, data = asyncio.get_running_loop(), b""
    try:
        async with asyncio.timeout(limit_s):
            while part := await loop.sock_recv(made, 1 << 16):
                data += part
    except TimeoutError:
        return data, LEFT_OPEN
    except OSError:
        pass
    return data, CLOSED


async def idle(port: int, draw: random.Random, patience_s: float) -> str:
    """A connection that says nothing, or nothing after one request."""
    made = await _connected(port)
    try:
        if draw.random() < 0.5:
            request = get("/health").replace(b"Connection: close\r\n", b"")
            await asyncio.get_running_loop().sock_sendall(made, request)
        return (await _until_end(made, patience_s))[1]
    finally:
        made.close()


async def _dripping(port: int, first: bytes, drop: bytes, patience_s: float) -> str:
    """Send `first`, then `drop` every two seconds."""
    loop = asyncio.get_running_loop()
    made = await _connected(port)

    async def drip() -> None:
        while True:
            await asyncio.sleep(2)
            await loop.sock_sendall(made, drop)

    try:
        await loop.sock_sendall(made, first)
        dripping = asyncio.create_task(drip())
        try:
            data, ended = await _until_end(made, patience_s)
        finally:
            dripping.cancel()
            await asyncio.gather(dripping, return_exceptions=True)
        return f"{data[9:12].decode()}, {ended}" if data.startswith(b"HTTP/1.1 ") else ended
    finally:
        made.close()


async def slow_head(port: int, _: random.Random, patience_s: float) -> str:
    """A header every two seconds."""
    return await _dripping(
        port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"X: 1\r\n", patience_s
    )


async def slow_body(port: int, draw: random.Random, patience_s: float) -> str:
    """A byte or a chunk of the body every two seconds."""
    head = f"POST {draw.choice((CHAT, MESSAGES))} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += "Content-Type: application/json\r\n"
    if draw.random() < 0.5:
        first, drop = f"{head}Content-Length: 5000\r\n\r\n", b" "
    else:
        first, drop = f"{head}Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"
    return await _dripping(port, first.encode(), drop, patience_s)


def _is_held(port: int, own: int) -> bool:
    """Return whether the server's end of the connection from port `own` is established."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if (int(local[9:], 16), int(remote[9:], 16)) == (port, own):
            return state == "01"
    return False


async def no_reader(port: int, draw: random.Random, patience_s: float) -> str:
    """A stream of large events that nobody reads."""
    large = ask(RESPONSES, "hi", stream=True, metadata={"a": "x" * draw.choice((500, 2_000_000))})
    probable = {"stream": True, "logprobs": True, "top_logprobs": 20, "n": 4, "max_tokens": 200}
    echo = {"prompt": [7, 9, 300] * 500, "echo": True, "logprobs": 5, "max_tokens": 2}
    path, body = draw.choice(
        ((RESPONSES, large), (CHAT, ask(CHAT, "hi", **probable)), (TEXT, {**echo, "stream": True}))
    )
    made = await _connected(port, receive_bytes=1024)
    try:
        await asyncio.get_running_loop().sock_sendall(made, post(path, body))
        for _ in range(round(patience_s / 3)):
            await asyncio.sleep(3)
            if not _is_held(port, made.getsockname()[1]):
                return CLOSED
        return LEFT_OPEN
    finally:
        _reset(made)


def long_answer(draw: random.Random) -> bytes:
    """Return a request for thousands of tokens in one of the protocols."""
    forever = {"logit_bias": {"1": -100}, "stream": draw.random() < 0.7}
    path = draw.choice((TEXT, TEXT, CHAT, RESPONSES, MESSAGES))
    if path == TEXT:
        return post(path, {"prompt": "hi", "max_tokens": 60_000, **forever})
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    extra = forever if path == CHAT else {"stream": forever["stream"]}
    return post(path, ask(path, "Tell me a long story.", **{limit: 60_000}, **extra))


async def leaver(port: int, draw: random.Random, _: float) -> str:
    """A client that leaves: in the body, at once, or while the answer comes; FIN, RST or half."""
    request = long_answer(draw).replace(b"Connection: close\r\n", b"")
    made = await _connected(port)
    loop = asyncio.get_running_loop()
    if draw.random() < 0.15:
        request = request[: draw.randrange(1, len(request))]
    try:
        await loop.sock_sendall(made, request)
        await asyncio.sleep(draw.choice((0, 0.001, 0.002, 0.004, 0.008, 0.02, 0.1, 0.5)))
        if draw.random() < 0.2:
            made.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.3)
    finally:
        if draw.random() < 0.5:
            _reset(made)
        else:
            made.close()
    return LEFT


async def flood(port: int, _: random.Random, __: float) -> str:
    """1,200 connections that say nothing for 15 s, more than a server of 1,024 files can hold."""
    made: list[socket.socket] = []
    try:
        for _ in range(1200):
            try:
                async with asyncio.timeout(2):
                    made.append(await _connected(port))
            except (OSError, TimeoutError):
                break
        await asyncio.sleep(15)
        return LEFT
    finally:
        for each in made:
            each.close()


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """A kind of connection: its share of 5,000, and whether one that stays open is a fault."""

    name: str
    share: int
    run: Callable[[int, random.Random, float], Awaitable[str]]
    has_to_close: bool = False


BEHAVIOURS = (
    Behaviour(name="idle", share=40, run=idle, has_to_close=True),
    Behaviour(name="slow head", share=40, run=slow_head, has_to_close=True),
    Behaviour(name="slow body", share=40, run=slow_body, has_to_close=True),
    Behaviour(name="no reader", share=20, run=no_reader, has_to_close=True),
    Behaviour(name="leaver", share=250, run=leaver),
    Behaviour(name="flood of idle ones", share=2, run=flood),
)
# One after the other on an idle server, where the moment between two steps is wide.
ALONE = Behaviour(name="leaver, alone", share=200, run=leaver)


# --- honest requests ----------------------------------------------------------------------------

_NOTE = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "note", "schema": _NOTE}}
_LONG = "The cache holds 890 bytes per token and the window 128 tokens. " * 40
HONEST: tuple[tuple[str, dict[str, object]], ...] = (
    (CHAT, ask(CHAT, "Hello, who are you?", max_tokens=12)),
    (CHAT, ask(CHAT, "What is 2 + 3?", max_tokens=12, stream=True)),
    (CHAT, ask(CHAT, "Give me JSON.", max_tokens=16, response_format=_FORMAT)),
    (CHAT, ask(CHAT, _LONG + "What does it hold?", max_tokens=8)),
    (CHAT, ask(CHAT, "Count to five.", max_tokens=16, stop=["3"])),
    (TEXT, {"prompt": list(range(300, 340)), "max_tokens": 8, "temperature": 0}),
    (TEXT, {"prompt": "The whale", "max_tokens": 12, "temperature": 0, "stream": True}),
    (RESPONSES, ask(RESPONSES, "Name a colour.", max_output_tokens=12)),
    (MESSAGES, ask(MESSAGES, "Name an animal.", max_tokens=12)),
    (MESSAGES, ask(MESSAGES, "Name a sea.", max_tokens=12, stream=True)),
)


def said(content: bytes) -> str:
    """Return the text of an answer, whole or streamed, and its reason to end; no ids or times."""
    if not content.lstrip().startswith(b"{"):
        lines = content.decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(_words(event) for event in events)
    return _words(json.loads(content))


def _words(value: object) -> str:
    """Return the strings under the names that hold what a model says, in order."""
    names = ("content", "reasoning_content", "text", "delta", "message", "output", "choices")
    names = (*names, "arguments", "thinking", "finish_reason", "stop_reason", "status")
    if isinstance(value, dict):
        return "".join(_words(value[name]) for name in names if name in value)
    if isinstance(value, list):
        return "".join(map(_words, value))
    return f"<{value}>" if isinstance(value, str) else ""
