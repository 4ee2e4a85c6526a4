"""Grammars and frames for `hostile_load.py`: what costs before or beside the body's own text.

Schemas and patterns that are given up, slow, endless or that point elsewhere; bodies under content
encodings, bombs among them; chunks and heads that no client writes. Sources: JSON Schema 2020-12,
RFC 9110 and 9112.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

from hostile_bodies import CHAT, PROTOCOLS, RESPONSES, ask, post

# --- grammars -----------------------------------------------------------------------------------


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _pattern(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "regex": pattern}


@functools.cache
def optional_properties(count: int) -> bytes:
    properties = {f"p{n}": {"type": "string"} for n in range(count)}
    return post(
        CHAT, ask(CHAT, "hi", response_format=_schema({"type": "object", "properties": properties}))
    )


@functools.cache
def large_enum() -> bytes:
    values = [f"v{n}" for n in range(600_000)]
    return post(CHAT, ask(CHAT, "hi", response_format=_schema({"enum": values})))


_GIVEN_UP = (_schema({"$ref": "#"}), _pattern("(a{1000}){1000}"), _pattern("(a{500}){500}b"))


def grammar_given_up(_: random.Random, number: int) -> bytes:
    """A grammar that compiles, and that the grammar library gives up later."""
    if number % 4 == 3:
        return optional_properties(499)
    return post(CHAT, ask(CHAT, "hi", max_tokens=6, response_format=_GIVEN_UP[number % 4]))


@functools.cache
def _slow_grammars() -> tuple[dict[str, Any], ...]:
    doubled = {f"d{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 2}
               for n in range(25)} | {"d25": {"type": "null"}}  # fmt: skip
    ring = {f"r{n}": {"anyOf": [{"$ref": f"#/$defs/r{(n + k) % 60}"} for k in range(1, 6)]}
            for n in range(60)}  # fmt: skip
    deep: Any = {"type": "null"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    return (
        _pattern(".*a.{200}"),
        _pattern("((((a*)*)*)*)*b"),
        _pattern(r"\p{L}{100000}"),
        _pattern("|".join(f"w{n}" for n in range(100_000))),
        _pattern("(" * 5_000 + "a" + ")" * 5_000),
        _pattern("(a|b|ab)*c{1,5000}"),
        _schema({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefgh"]}),
        _schema({"type": "array", "items": {"type": "null"}, "minItems": 10**9}),
        _schema({"type": "string", "minLength": 10**9}),
        _schema({"$ref": "#/$defs/d0", "$defs": doubled}),
        _schema({"$ref": "#/$defs/r0", "$defs": ring}),
        _schema({"oneOf": [{"type": "object", "properties": {f"k{n}": {}}} for n in range(300)]}),
        _schema({"type": "number", "multipleOf": 1e-300}),
        _schema({"type": "object", "patternProperties": {"(a+)+$": {}, ".*": {"type": "null"}}}),
        _schema(deep),
    )


def grammar_slow(_: random.Random, number: int) -> bytes:
    """A grammar that costs the compiler much, or asks for an answer without an end."""
    grammars = _slow_grammars()
    grammar = grammars[number % len(grammars)]
    if number % 3 == 2 and "json_schema" in grammar:
        function = {"name": "f", "parameters": grammar["json_schema"]["schema"]}
        tools = [{"type": "function", "function": function}]
        return post(CHAT, ask(CHAT, "hi", tools=tools, tool_choice="required"))
    return post(CHAT, ask(CHAT, "hi", response_format=grammar))


def grammar_remote(port: int) -> Callable[[random.Random, int], bytes]:
    """A schema that points to another place; nothing may ever connect to `port`."""

    def make(draw: random.Random, number: int) -> bytes:
        place = draw.choice(
            (
                f"http://127.0.0.1:{port}/{number}",
                f"https://127.0.0.1:{port}/s",
                "file:///etc/passwd",
            )
        )
        return post(CHAT, ask(CHAT, "hi", response_format=_schema({"$ref": place})))

    return make


# --- encodings and frames -----------------------------------------------------------------------


@functools.cache
def _bomb(kind: str, layers: int) -> bytes:
    """256 MB of blanks in a body of kilobytes; two layers are smaller still."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31 if kind == "gzip" else 15)
    raw = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(256)) + packer.flush()
    return raw if layers == 1 else gzip.compress(raw, 9)


def coded_body(draw: random.Random, number: int) -> bytes:
    """A body under a content encoding: sound, broken, mislabelled or a bomb."""
    sound = gzip.compress(json.dumps(ask(CHAT, "hi")).encode())
    bodies = (
        ("gzip", _bomb("gzip", 1)),
        ("gzip, gzip", _bomb("gzip", 2)),
        ("deflate", _bomb("deflate", 1)),
        ("gzip", sound),
        ("gzip", sound[:-9]),
        ("gzip", sound[:-8] + bytes(8)),
        ("gzip", sound + b"rest"),
        ("gzip", b"\x1f\x8b" + draw.randbytes(500)),
        ("deflate", zlib.compress(json.dumps(ask(CHAT, "hi")).encode())),
        (
            draw.choice(
                ("br", "zstd", "compress", "x", "gzip;q=1", "\xff", ",".join(["gzip"] * 900))
            ),
            sound,
        ),
    )
    coding, raw = bodies[number % len(bodies)]
    return post(draw.choice((CHAT, RESPONSES)), raw, f"Content-Encoding: {coding}")


_CHUNKED = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" \
    b"Content-Type: application/json\r\nTransfer-Encoding: %s\r\n%s\r\n"  # fmt: skip


def broken_chunks(draw: random.Random, number: int) -> bytes:
    """A chunked body whose frame is wrong, or a sound one of many small chunks."""
    raw = json.dumps(ask(CHAT, "hi")).encode()
    sound = b"%x\r\n%s\r\n0\r\n\r\n" % (len(raw), raw)
    cases = (
        (b"chunked", b"", b"zz\r\n" + raw),
        (b"chunked", b"", b"-5\r\n" + raw),
        (b"chunked", b"", b"f" * 40 + b"\r\n" + raw),
        (b"chunked", b"", b"%x\r\n%sXX0\r\n\r\n" % (len(raw), raw)),
        (b"chunked", b"", b"%x;%s\r\n%s\r\n0\r\n\r\n" % (len(raw), b"e" * 100_000, raw)),
        (b"chunked", b"Content-Length: 5\r\n", sound),
        (b"gzip, chunked", b"", sound),
        (b"identity", b"", sound),
        (b"chunked, chunked", b"", sound),
        (b"chunked", b"", b"".join(b"1\r\n%c\r\n" % c for c in raw) + b"0\r\n\r\n"),
        (b"chunked", b"", sound[:-5] + b"0\r\n" + b"a: b\r\n" * 20_000 + b"\r\n"),
        (b"chunked", b"", b"1\r\n \r\n" * 400_000 + b"0\r\n\r\n"),
    )
    coding, headers, body = cases[number % len(cases)]
    return _CHUNKED % (draw.choice(PROTOCOLS).encode(), coding, headers) + body


def broken_head(draw: random.Random, number: int) -> bytes:
    """A request head that no client writes."""
    host = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    sized = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" \
        b"Content-Type: application/json\r\nContent-Length: "  # fmt: skip
    cases = (
        host + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n",
        host + b"".join(b"X%d: 1\r\n" % n for n in range(100_000)) + b"\r\n",
        host + b"X: a\x00b\r\n\r\n",
        host + b"X: a\rb\r\n\r\n",
        host + b" folded: 1\r\n\r\n",
        host + b"Host: evil.example\r\n\r\n",
        host + b"No colon\r\n\r\n",
        host + b": no name\r\n\r\n",
        sized + b"-1\r\n\r\n{}",
        sized + b"5\r\nContent-Length: 6\r\n\r\n{}    ",
        sized + b"9" * 4_000 + b"\r\n\r\n{}",
        sized + b"0x10\r\n\r\n{}",
        sized + b"\xb2\r\n\r\n{}",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(500),
        draw.randbytes(2_000),
        host + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: eA==\r\n\r\n",
        host + b"Expect: 100-continue\r\n\r\n",
        host + b"Authorization: Bearer " + "\u043a\u043b\u044e\u0447".encode() + b"\r\n\r\n",
    )  # fmt: skip
    return cases[number % len(cases)]
