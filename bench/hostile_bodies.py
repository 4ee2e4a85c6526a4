"""Hostile bodies for `hostile_load.py`: mutated, broken, extreme, and of megabytes.

A function makes the bytes of one whole HTTP/1.1 request from a random generator and a running
number, so that a run can be repeated with its seed. Large bodies are built once and kept. It
refuses to know the server's code: what is sent comes from the protocols alone. The easy mistake:
a mutation that drops `max_tokens` makes an honest request for 8,192 tokens.
"""

from __future__ import annotations

import functools
import json
import random
from typing import Any

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/anthropic/v1/messages", "/anthropic/v1/messages/count_tokens"
PROTOCOLS = (CHAT, TEXT, RESPONSES, MESSAGES)
TOOL, COMPARE = "/finwhale/tool", "/finwhale/compare"
# One body may have 8 MiB; the rest of it is the frame around a text.
MOST = (8 << 20) - 4096


def post(path: str, body: Any, *headers: str) -> bytes:
    """Return a request with a JSON body, or with the bytes of `body`."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    if not any(line.lower().startswith("content-type") for line in headers):
        lines.append("Content-Type: application/json")
    lines += [*headers, f"Content-Length: {len(raw)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + raw


def get(path: str, *headers: str, host: str = "127.0.0.1", method: str = "GET") -> bytes:
    """Return a request without a body."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def ask(path: str, text: Any, **fields: Any) -> dict[str, Any]:
    """Return the smallest sound body of a protocol, with two greedy tokens and `fields`."""
    if path == TEXT:
        body = {"prompt": text, "max_tokens": 2}
    elif path == RESPONSES:
        body = {"input": text, "max_output_tokens": 2}
    else:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    if path in (CHAT, MESSAGES):
        body["thinking"] = {"type": "disabled"}
    if path in (MESSAGES, COUNT):
        body["model"] = "deepseek-flash"
    if path == COUNT:
        del body["max_tokens"]
    else:
        body["temperature"] = 0
    return {**body, **fields}


# --- small bodies -------------------------------------------------------------------------------

_FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"a": {}}}}
_STRANGE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 1.5, -0.0, 1e308, float("nan"), float("inf"), 2**31, 2**63,
    2**64, 10**40, "", " ", "x" * 1000, "\x00", "\ud800", "\u202e\u2066", "\U0001f40b" * 20,
    "null", "-1", "<script>alert(1)</script>", "{{7*7}}", "%s%n", "../../etc/passwd",
    [], [[]], [None], {}, {"": 1}, {"type": "text"},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    ["a", 1, {}], {"role": "user"}, [{"role": "user", "content": "hi"}],
)  # fmt: skip
_FIELDS = (
    "model", "messages", "prompt", "input", "stream", "stream_options", "n", "max_tokens",
    "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "stop_sequences", "logit_bias", "logprobs", "top_logprobs", "echo", "suffix", "best_of",
    "tools", "tool_choice", "parallel_tool_calls", "response_format", "text", "thinking",
    "reasoning", "reasoning_effort", "system", "instructions", "metadata", "user", "include",
    "store", "truncation", "previous_response_id", "presence_penalty", "frequency_penalty",
    "service_tier", "modalities", "\U0001f40b", "__proto__", "x" * 300,
)  # fmt: skip


def _strange(draw: random.Random, depth: int = 0) -> Any:
    if depth < 3 and draw.random() < 0.2:
        return {draw.choice(_FIELDS): _strange(draw, depth + 1) for _ in range(draw.randint(1, 4))}
    if depth < 3 and draw.random() < 0.2:
        return [_strange(draw, depth + 1) for _ in range(draw.randint(1, 4))]
    return draw.choice(_STRANGE)


def _seed_body(draw: random.Random) -> tuple[str, dict[str, Any]]:
    path = draw.choice((*PROTOCOLS, CHAT, COUNT))
    body = ask(path, draw.choice(("hi", "What is 2 + 3?", "", "\u00e9\u00df\u6f22\U0001f40b")))
    if draw.random() < 0.3:
        body["stream"] = True
    if path == CHAT and draw.random() < 0.3:
        body["tools"] = [{"type": "function", "function": _FUNCTION}]
    if path == CHAT and draw.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": draw.choice((0, 5, 20))}
    if draw.random() < 0.2:
        body["stop"] = ["ab", "\n\n"]
    return path, body


def _mutate(draw: random.Random, value: Any, left: int) -> Any:
    """Return `value` with one place inside it changed."""
    if isinstance(value, dict) and value and left:
        name = draw.choice(list(value))
        return {**value, name: _mutate(draw, value[name], left - 1)}
    if isinstance(value, list) and value and left:
        place = draw.randrange(len(value))
        return [*value[:place], _mutate(draw, value[place], left - 1), *value[place + 1 :]]
    return _strange(draw)


def mutated(draw: random.Random, _: int) -> bytes:
    """A sound body (one of five) or one with up to three places changed."""
    path, body = _seed_body(draw)
    for _ in range(0 if draw.random() < 0.2 else draw.randint(1, 3)):
        how = draw.random()
        if how < 0.5:
            body = _mutate(draw, body, draw.randint(1, 4))
        elif how < 0.9:
            body = {**body, draw.choice(_FIELDS): _strange(draw)}
        elif body:
            body = dict(body)
            del body[draw.choice(list(body))]
    return post(path, body)


def random_json(draw: random.Random, _: int) -> bytes:
    """JSON of no protocol."""
    return post(draw.choice((*PROTOCOLS, COUNT, TOOL, COMPARE)), _strange(draw))


def cut_body(draw: random.Random, _: int) -> bytes:
    """A body that ends too early, told with its true length."""
    path, body = _seed_body(draw)
    raw = json.dumps(body).encode()
    return post(path, raw[: draw.randrange(len(raw))])


def flipped_bytes(draw: random.Random, _: int) -> bytes:
    """A body with some bytes drawn anew, so that it may be no UTF-8."""
    path, body = _seed_body(draw)
    raw = bytearray(json.dumps(body).encode())
    for _ in range(draw.randint(1, 8)):
        raw[draw.randrange(len(raw))] = draw.randrange(256)
    return post(path, bytes(raw))


def wrong_method(draw: random.Random, _: int) -> bytes:
    """A path with a method that it does not have."""
    method = draw.choice(("PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "BREW", "X" * 200))
    return get(draw.choice((*PROTOCOLS, "/health", "/metrics", "/")), method=method)


def unknown_path(draw: random.Random, number: int) -> bytes:
    """A path that does not exist."""
    return get(
        draw.choice((f"/v1/none/{number}", "/v1/" + "a/" * 2000, "/%00", "/\xff", "//", "/.."))
    )


def wrong_type(draw: random.Random, _: int) -> bytes:
    """A kind of body that a page of another origin may send unasked."""
    kind = draw.choice(
        ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "")
    )
    return post(draw.choice(PROTOCOLS), ask(CHAT, "hi"), f"Content-Type: {kind}")


def wrong_host(draw: random.Random, _: int) -> bytes:
    """A name that another page may have pointed here."""
    name = draw.choice(
        ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "[", "a" * 5000)
    )
    return get("/v1/models", host=name)


def traversal(draw: random.Random, _: int) -> bytes:
    """A path that leaves its folder."""
    start = draw.choice(("/", "/v1/models/", "/finwhale/", "/static/"))
    return get(
        start + draw.choice(("../", "%2e%2e/", "..%2f", "..\\", "%c0%ae/")) * 6 + "etc/passwd"
    )


def extreme_numbers(draw: random.Random, _: int) -> bytes:
    """A number far outside its range."""
    field = draw.choice(("n", "max_tokens", "top_k", "seed", "temperature", "top_p", "top_logprobs",
                         "presence_penalty", "reasoning_effort", "min_p", "best_of"))  # fmt: skip
    value = draw.choice((10**9, -(10**9), 2**62, 2**63, 393_216, -1, 1e308, 5e-324, -1e-300))
    return post(draw.choice(PROTOCOLS), ask(CHAT, "hi", **{field: value}))


def huge_numbers(draw: random.Random, number: int) -> bytes:
    """A number of thousands or millions of digits, or with a huge exponent."""
    digits = (5_000, 20_000, 300_000, 7_000_000)[number % 4 if number % 20 == 3 else number % 3]
    value = draw.choice(("9" * digits, "-" + "9" * digits, "1e999999999", "0." + "1" * digits))
    return post(
        CHAT, b'{"messages":[{"role":"user","content":"x"}],"max_tokens":%s}' % value.encode()
    )


def nested_json(draw: random.Random, number: int) -> bytes:
    """Lists or objects inside each other, in a known or an unknown field."""
    depth = (500, 5_000, 100_000, 1_000_000)[number % 4]
    opened, closed = draw.choice((("[", "]"), ('{"a":', "}")))
    nest = opened * depth + "1" + closed * depth
    field = draw.choice(("messages", "zzz", "metadata", "tools", "response_format"))
    return post(draw.choice(PROTOCOLS), f'{{"{field}":{nest}}}'.encode())


def page_tool(draw: random.Random, _: int) -> bytes:
    """A calculation that costs the square of its length."""
    text = draw.choice(
        ("*".join(["9" * 60] * 14), "(" * 450 + "1" + ")" * 450, "9" * 900, "2**9**9")
    )
    arguments = json.dumps({"expression": text})
    return post(
        TOOL, {"name": draw.choice(("calculate", "read_file", "x")), "arguments": arguments}
    )


def page_compare(draw: random.Random, _: int) -> bytes:
    """A comparison of a conversation that is no conversation."""
    reply = {"role": "assistant", "content": _strange(draw)}
    messages = [{"role": "user", "content": draw.choice(("hi", "x" * 200_000))}, reply]
    return post(COMPARE, {"messages": messages, "off": draw.choice(([], ["engram"], ["x" * 500]))})


# --- large bodies -------------------------------------------------------------------------------

TEXTS = {
    "words": "The quick brown fox jumps over the lazy dog. ",
    "one_word": "a",
    "spaces": " ",
    "emoji": "\U0001f40b\U0001f30a",
}


@functools.cache
def long_text(kind: str, megabytes: int, path: str = CHAT) -> bytes:
    """One text that fills the body; emoji go as UTF-8 and not as escapes."""
    unit = TEXTS[kind]
    room = min(megabytes << 20, MOST)
    text = unit * (room // len(unit.encode()))
    return post(path, json.dumps(ask(path, text), ensure_ascii=False).encode())


def long_texts(_: random.Random, number: int) -> bytes:
    kind = tuple(TEXTS)[number % 4]
    path = (CHAT, TEXT, MESSAGES, RESPONSES, COUNT)[number // 4 % 5]
    return long_text(kind, (8, 1, 4, 2)[number // 4 % 4], path)


@functools.cache
def many_messages(path: str = CHAT) -> bytes:
    turns = [{"role": ("user", "assistant")[n % 2], "content": "hi"} for n in range(100_001)]
    return post(path, ask(path, "") | {"input" if path == RESPONSES else "messages": turns})


@functools.cache
def many_tool_calls() -> bytes:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for n in range(35_000):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": f"c{n}", "content": "1"})
    return post(CHAT, {**ask(CHAT, ""), "messages": turns})


@functools.cache
def many_tools() -> bytes:
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(50_000)]
    return post(CHAT, ask(CHAT, "hi", tools=tools))


@functools.cache
def many_ids() -> bytes:
    return post(
        TEXT,
        json.dumps({"prompt": [7] * 3_500_000, "max_tokens": 1}, separators=(",", ":")).encode(),
    )


@functools.cache
def many_prompts() -> bytes:
    return post(TEXT, json.dumps({"prompt": ["a"] * 1_500_000}, separators=(",", ":")).encode())


@functools.cache
def many_stops() -> bytes:
    body = {**ask(CHAT, "hi"), "stop": ["a"] * 1_500_000}
    return post(CHAT, json.dumps(body, separators=(",", ":")).encode())


@functools.cache
def large_bias() -> bytes:
    return post(CHAT, ask(CHAT, "hi", logit_bias={str(n): 1 for n in range(400_000)}))


@functools.cache
def large_metadata(path: str = RESPONSES) -> bytes:
    return post(path, ask(path, "hi", metadata={"a": "x" * 6_000_000}))


@functools.cache
def over_the_limit() -> bytes:
    return post(CHAT, ask(CHAT, "x" * (9 << 20)))


def stop_texts(draw: random.Random, number: int) -> bytes:
    """Stop texts of 1 byte to 400 kB, one to sixteen of them, no two alike."""
    length = (10, 300, 2_000, 10_000, 20_000, 60_000, 400_000)[number % 7]
    stops = [
        draw.choice("abcd") + "a" * (length - 1) + str(n) for n in range((1, 4, 16)[number % 3])
    ]
    path = draw.choice(PROTOCOLS)
    return post(path, ask(path, "hi", **{"stop_sequences" if path == MESSAGES else "stop": stops}))
