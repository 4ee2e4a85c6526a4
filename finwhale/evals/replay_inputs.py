"""Prompts whose content lies where a hit could hurt: facts, copies and n-grams around its end.

Owns token sequences over the roles of `finwhale.data.long_tasks.alphabet`, no model. A prompt says
where its hit ends, what stands behind it and which tokens are right; facts of one prompt lie before
the replayed window, across its start, inside it, across the hit's end and behind it, so one prefix
serves all questions and the places differ in nothing else. Refused: a hit too short to hold them.
The easy mistake: a fact that is also a filler; roles share no id.
Source: spec/kv-cache.md section 3.1, item 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from finwhale.data.long_tasks import Alphabet, alphabet
from finwhale.evals.position_bits import EvaluationError

# Tokens from the end of the hit to the question.
_GAP = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """One question about a prefix.

    shared  ids that all questions of a prefix begin with; the hit lies inside
    tail    ids behind them; the last of them asks
    answer  right ids, one after the other; only `answer[0]` is asked by `tail` itself
    hit     length of the prefix that comes from a cache
    place   where the fact, or the crossing, lies
    """

    shared: tuple[int, ...]
    tail: tuple[int, ...]
    answer: tuple[int, ...]
    hit: int
    place: str

    @property
    def ids(self) -> list[int]:
        return [*self.shared, *self.tail]


def _fillers(rng: np.random.Generator, roles: Alphabet, count: int) -> np.ndarray:
    return rng.choice(np.array(roles.fillers), size=count)


def fact_questions(
    rng: np.random.Generator, *, vocab: range, hit: int, window: int, bos_id: int | None = None
) -> list[Placed]:
    """Return six questions FACT k v .. QUERY k *v* about one prefix, the window being replayed.

    Places: `far` at half of the part before the window, `before` it by half a window,
    `window start` with the value as the first replayed token, `inside` at its middle, `hit` with
    the value as the first new token, `behind` in the suffix. Chance of a reader who knows all
    values but not which: 1 / 6.
    """
    roles = alphabet(vocab)
    # Less, and two of the facts would lie on each other.
    if window < 12 or hit < 2 * window + 4:
        got = f"{hit} with a window of {window}"
        raise EvaluationError(f"hit: got {got}, expected two windows of at least 12 and 4 more")
    places = {
        "far": (hit - window) // 2 - 1,
        "before": hit - window - window // 2,
        "window start": hit - window - 2,
        "inside": hit - window // 2,
        "hit": hit - 2,
        "behind": hit + 3,
    }
    body = _fillers(rng, roles, hit + _GAP)
    keys = rng.choice(np.array(roles.keys), size=len(places), replace=False)
    values = rng.choice(np.array(roles.values), size=len(places), replace=False)
    for at, key, value in zip(places.values(), keys, values, strict=True):
        body[at : at + 3] = roles.fact, key, value
    if bos_id is not None:
        body[0] = bos_id
    shared = tuple(body.tolist())
    return [
        Placed(
            shared=shared,
            tail=(roles.query, int(key)),
            answer=(int(value),),
            hit=hit,
            place=place,
        )
        for place, key, value in zip(places, keys, values, strict=True)
    ]


def copy_out(
    rng: np.random.Generator, *, vocab: range, hit: int, window: int, bos_id: int | None = None
) -> Placed:
    """Return FACT span .. COPY span whose copy the hit cuts in the middle; span = 32.

    The source lies before the replayed window.
    """
    return _copy(rng, vocab, hit, hit - window - 64, hit - 16 - 1, bos_id, "copy cut by the hit")


def copy_source(
    rng: np.random.Generator, *, vocab: range, hit: int, window: int, bos_id: int | None = None
) -> Placed:
    """Return the same with the source cut by the hit, and the copy half a window behind."""
    return _copy(rng, vocab, hit, hit - 17, hit + window // 2, bos_id, "source cut by the hit")


def _copy(rng, vocab: range, hit: int, source: int, copy: int, bos_id, place: str) -> Placed:
    roles, span = alphabet(vocab), 32
    if source < 1:
        raise EvaluationError(f"hit: got {hit}, expected {1 - source} more for the source")
    values = rng.choice(np.array(roles.values), size=span)
    body = _fillers(rng, roles, copy + 1 + span)
    body[source] = roles.fact
    body[source + 1 : source + 1 + span] = values
    body[copy] = roles.copy
    body[copy + 1 :] = values
    if bos_id is not None:
        body[0] = bos_id
    # At least one new token is read before the first that counts.
    stop = max(hit, copy) + 1
    ids = body.tolist()
    return Placed(
        shared=tuple(ids[:hit]),
        tail=tuple(ids[hit:stop]),
        answer=tuple(ids[stop:]),
        hit=hit,
        place=place,
    )


def gram_loop(
    rng: np.random.Generator, *, vocab: range, hit: int, window: int, bos_id: int | None = None
) -> Placed:
    """Return a loop of four ids that begins nine tokens before the hit's end and goes on.

    Every n-gram of up to four ids around the end crosses it.
    """
    roles = alphabet(vocab)
    if hit < window + 10:
        raise EvaluationError(f"hit: got {hit}, expected at least {window + 10}")
    loop = rng.choice(np.array(roles.values), size=4, replace=False)
    # One id into the loop, so that no group of two and no repetition ends with the hit.
    body = np.concatenate((_fillers(rng, roles, hit - 9), np.tile(loop, 7)))
    if bos_id is not None:
        body[0] = bos_id
    ids = body.tolist()
    stop = hit + 1
    return Placed(
        shared=tuple(ids[:hit]),
        tail=tuple(ids[hit:stop]),
        answer=tuple(ids[stop:]),
        hit=hit,
        place="4-gram across the hit",
    )


CROSSINGS: tuple[Callable[..., Placed], ...] = (copy_out, copy_source, gram_loop)
