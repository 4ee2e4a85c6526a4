"""The kinds of hostile bodies of `hostile_load.py`, how many there are of each, and what is right.

Which statuses are right comes from the protocols and RFC 9110 and not from the server's code; the
counts let 5,000 bodies take about ten minutes on two cores, so large ones are few.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import hostile_bodies as bodies
import hostile_frames as frames

BAD = frozenset({400, 404, 413, 422})


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of request.

    share       how many of 5,000 bodies
    make        (random, running number) to the bytes of a request
    is_large    built of megabytes, so few are sent at a time
    expected    the statuses that are right; None: all below 500, and 503 and 504
    may_close   the server may close the connection without an answer
    patience_s  after this the client leaves, which is no fault; None: it has to be answered
    """

    name: str
    share: int
    make: Callable[[random.Random, int], bytes]
    is_large: bool = False
    expected: frozenset[int] | None = None
    may_close: bool = False
    patience_s: float | None = None


def _always(made: Callable[[], bytes]) -> Callable[[random.Random, int], bytes]:
    return lambda _, __: made()


def _on_each(made: Callable[[str], bytes], *paths: str) -> Callable[[random.Random, int], bytes]:
    return lambda _, number: made(paths[number % len(paths)])


def kinds(closed_port: int) -> tuple[Kind, ...]:
    """Return all kinds; `closed_port` is one that nothing may connect to."""
    return (
        Kind(name="mutated", share=2383, make=bodies.mutated, patience_s=20),
        Kind(name="random JSON", share=200, make=bodies.random_json, patience_s=20),
        Kind(name="cut body", share=150, make=bodies.cut_body, expected=BAD),
        Kind(name="flipped bytes", share=150, make=bodies.flipped_bytes, patience_s=20),
        Kind(name="wrong method", share=100, make=bodies.wrong_method, may_close=True),
        Kind(name="unknown path", share=100, make=bodies.unknown_path, may_close=True),
        Kind(name="wrong media type", share=100, make=bodies.wrong_type, expected=frozenset({415})),
        Kind(
            name="wrong host", share=60, make=bodies.wrong_host, expected=frozenset({400, 403, 431})
        ),
        Kind(name="traversal", share=60, make=bodies.traversal, expected=frozenset({400, 404})),
        Kind(name="extreme numbers", share=200, make=bodies.extreme_numbers, patience_s=20),
        Kind(name="huge numbers", share=60, make=bodies.huge_numbers, expected=BAD),
        Kind(name="nested JSON", share=60, make=bodies.nested_json, expected=BAD, is_large=True),
        Kind(name="page tool", share=60, make=bodies.page_tool),
        Kind(name="page compare", share=20, make=bodies.page_compare),
        Kind(name="stop texts", share=100, make=bodies.stop_texts),
        Kind(name="long text", share=48, make=bodies.long_texts, is_large=True),
        Kind(
            name="100,001 messages",
            share=9,
            make=_on_each(
                bodies.many_messages, bodies.CHAT, bodies.RESPONSES, bodies.MESSAGES, bodies.COUNT
            ),
            is_large=True,
        ),
        Kind(
            name="35,000 tool calls", share=4, make=_always(bodies.many_tool_calls), is_large=True
        ),
        Kind(name="50,000 tools", share=6, make=_always(bodies.many_tools), is_large=True),
        Kind(
            name="3,500,000 ids",
            share=10,
            make=_always(bodies.many_ids),
            is_large=True,
            expected=BAD,
        ),
        Kind(
            name="1,500,000 prompts",
            share=6,
            make=_always(bodies.many_prompts),
            is_large=True,
            expected=BAD,
        ),
        Kind(
            name="1,500,000 stops",
            share=6,
            make=_always(bodies.many_stops),
            is_large=True,
            expected=BAD,
        ),
        Kind(
            name="400,000 biases",
            share=6,
            make=_always(bodies.large_bias),
            is_large=True,
            expected=BAD,
        ),
        Kind(
            name="6 MB of metadata",
            share=10,
            make=_on_each(bodies.large_metadata, bodies.RESPONSES, bodies.CHAT, bodies.MESSAGES),
            is_large=True,
        ),
        Kind(
            name="9 MB body",
            share=6,
            make=_always(bodies.over_the_limit),
            is_large=True,
            expected=frozenset({413}),
            may_close=True,
        ),
        Kind(name="enum of 600,000", share=4, make=_always(frames.large_enum), is_large=True),
        Kind(
            name="10,000 optional properties",
            share=6,
            make=_always(functools.partial(frames.optional_properties, 10_000)),
            is_large=True,
        ),
        Kind(name="grammar given up", share=60, make=frames.grammar_given_up),
        Kind(name="grammar slow", share=100, make=frames.grammar_slow, patience_s=60),
        Kind(
            name="grammar remote", share=20, make=frames.grammar_remote(closed_port), expected=BAD
        ),
        Kind(name="coded body", share=80, make=frames.coded_body),
        Kind(name="broken chunks", share=80, make=frames.broken_chunks, may_close=True),
        Kind(name="broken head", share=150, make=frames.broken_head, may_close=True),
    )
