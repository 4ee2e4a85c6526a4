"""Request traces for the prefix cache: lengths, times and block hashes, read or generated.

A block of a trace is `block_tokens` tokens of a prompt; equal ids behind equal ids are equal
prefixes. Refused: a trace whose ids do not fit its lengths. A newcomer's mistake: to look for
answers in the ids; a trace tells an answer's length alone, and its tokens are new tokens of the
next prompt.
Source: spec/kv-cache.md section 6.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from finwhale.config.files import FileError, kind_of_file, parse_object, read_object, take

_MAX_TRACE_BYTES = 1 << 28


class TraceError(ValueError):
    """A file that is no trace of the kind that was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """One request: `blocks` are the ids of the whole blocks of its prompt, in order.

    at_s          arrival since the trace's start
    conversation  whose ids these are; requests of others share nothing, equal ids or not
    """

    at_s: float
    conversation: str
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Requests in order of arrival, and the tokens of a block."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def new_tokens(self) -> list[int]:
        """Return, per request, the tokens behind the longest prefix that was sent before.

        A prompt that goes on from all whole blocks of an earlier one goes on from its tail, too,
        which has no id of its own.
        """
        # Of every chain of blocks, the tokens of the longest prompt that ended with it.
        ended: dict[int, int] = {}
        found = []
        for request in self.requests:
            key, shared, is_shared = hash(request.conversation), 0, True
            for number, block in enumerate(request.blocks, start=1):
                # A chain of numbers would be deep; its hash stands for it.
                key = hash((key, block))
                is_shared = is_shared and key in ended
                if is_shared:
                    shared = max(number * self.block_tokens, ended[key])
                ended.setdefault(key, 0)
            ended[key] = max(ended.get(key, 0), request.input_tokens)
            found.append(max(1, request.input_tokens - shared))
        return found


def _request(at_s, conversation, row, ids, block_tokens) -> TraceRequest:
    whole = row[0] // block_tokens
    if not whole <= len(ids) <= whole + 1 or row[0] < 1:
        raise TraceError(
            f"{conversation or 'trace'} at {at_s} s: {len(ids)} ids for {row[0]} tokens in blocks "
            f"of {block_tokens}"
        )
    return TraceRequest(
        at_s=float(at_s),
        conversation=conversation,
        input_tokens=row[0],
        output_tokens=row[1],
        blocks=tuple(ids[:whole]),
    )


def read_mooncake(path: Path, *, limit: int | None = None, block_tokens: int = 512) -> Trace:
    """Return a trace of one JSON object a line, times in ms, ids global."""
    requests: list[TraceRequest] = []
    kind = kind_of_file(path)
    if kind != "a file":
        raise TraceError(f"{path}: {kind}, expected a trace")
    with path.open("rb") as lines:
        for line in lines:
            where = f"{path}: line {len(requests) + 1}"
            try:
                row = parse_object(line, where, expected="a request")
                sizes = tuple(take(row, n, int, where) for n in ("input_length", "output_length"))
                at_s = take(row, "timestamp", float, where) / 1000
                ids = take(row, "hash_ids", list, where)
            except FileError as error:
                raise TraceError(str(error)) from None
            requests.append(_request(at_s, "", sizes, ids, block_tokens))
            if len(requests) == limit:
                break
    return _trace(path.stem, block_tokens, requests)


def read_agents(folder: Path) -> Trace:
    """Return the conversations of a folder, a file each, all begun at once, ids of each its own."""
    requests: list[TraceRequest] = []
    sizes: set[int] = set()
    for path in sorted(folder.glob("*.json")):
        try:
            whole = read_object(path, max_bytes=_MAX_TRACE_BYTES, expected="a conversation")
            sizes.add(take(whole, "block_size", int, path))
            for number, row in enumerate(take(whole, "requests", list, path)):
                at = f"requests[{number}]."
                counts = tuple(take(row, name, int, path, at=at) for name in ("in", "out"))
                at_s, ids = (take(row, *x, path, at=at) for x in (("t", float), ("hash_ids", list)))
                requests.append(_request(at_s, path.stem, counts, ids, max(1, *sizes)))
        except FileError as error:
            raise TraceError(str(error)) from None
    if len(sizes) != 1:
        raise TraceError(f"{folder}: block sizes {sorted(sizes)}, expected one of all files")
    return _trace("agents", sizes.pop(), requests)


def _trace(name: str, block_tokens: int, requests: Iterable[TraceRequest]) -> Trace:
    ordered = tuple(sorted(requests, key=lambda request: request.at_s))
    if not ordered:
        raise TraceError(f"{name}: no requests")
    return Trace(name=name, block_tokens=block_tokens, requests=ordered)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentStatistics:
    """What generated conversations look like: medians of log-normal draws and their 90 % points.

    The defaults are those of 60 public agent traces (spec/kv-cache.md section 6): 4,076 requests;
    742 new tokens in a turn, 4,686 at 90 %; 19 s to the next turn, 143 s at 90 %; prompts of 110K
    tokens at the median of all turns, to which 32K at the start lead.
    """

    turns: int = 68
    first_tokens: int = 32_000
    new_tokens: tuple[float, float] = (742, 4686)
    gap_s: tuple[float, float] = (19, 143)
    output_tokens: int = 218
    max_tokens: int = 400_000


# A standard normal variable is below it with a chance of 90 %.
_Z90 = 1.2815515655446004


def generate_agents(
    conversations: int,
    *,
    seed: int = 0,
    statistics: AgentStatistics | None = None,
    block_tokens: int = 64,
) -> Trace:
    """Return conversations whose every prompt begins with the one before, all begun at once."""
    own, rng = statistics or AgentStatistics(), random.Random(seed)
    requests = []
    for number in range(conversations):
        tokens, at_s = max(1, own.first_tokens), 0.0
        for _ in range(own.turns):
            requests.append(
                TraceRequest(
                    at_s=at_s,
                    conversation=f"generated-{number}",
                    input_tokens=tokens,
                    output_tokens=own.output_tokens,
                    blocks=tuple(range(tokens // block_tokens)),
                )
            )
            tokens += max(1, round(_log_normal(rng, own.new_tokens)))
            at_s += _log_normal(rng, own.gap_s)
            if tokens > own.max_tokens:
                break
    return _trace("generated", block_tokens, requests)


def _log_normal(rng: random.Random, points: Sequence[float]) -> float:
    """Draw with the given median and 90 % point."""
    median, most = points
    return median * (most / median) ** (rng.gauss(0, 1) / _Z90)
