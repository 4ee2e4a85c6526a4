"""Generated tasks whose answer lies farther back than a window: recall, needle, copy, tracking.

Owns token-level generators over an abstract alphabet: they take a range of ids and no
tokenizer. Each returns exactly `length` tokens and marks the answers, the only tokens a loss
should count: `answer_mask[i]` says that tokens[i] is to be predicted from tokens[:i]. `chance`
is what a reader gets who has seen every value of the document but cannot look one up. Refused:
a length that leaves no room for the distance asked for. The easy mistake: fillers that may equal
a key make a second, wrong fact; here markers, keys, values and fillers share no id.
Measured with: tests/unit/test_data_long_tasks.py solves every kind in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature

import numpy as np

NUM_MARKERS = 5
MIN_VOCAB = 64


class TaskError(ValueError):
    """A task that does not fit its length or its alphabet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One document. answer_mask has one entry per token; chance is per answer token."""

    tokens: list[int]
    answer_mask: list[bool]
    kind: str
    chance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Alphabet:
    """Disjoint roles of the ids of `vocab`: 5 markers, then keys, values and fillers in thirds.

    text  ids of real text, pieces of which stand where fillers would; it may hold any id
    """

    query: int
    fact: int
    copy: int
    assign: int
    same: int
    keys: range
    values: range
    fillers: range
    text: np.ndarray | None = None


def alphabet(vocab: range | Alphabet) -> Alphabet:
    """Return the roles of the ids of a contiguous range of at least 64, or those given."""
    if isinstance(vocab, Alphabet):
        return vocab
    if vocab.step != 1 or len(vocab) < MIN_VOCAB:
        raise TaskError(f"vocab: got {vocab}, expected at least {MIN_VOCAB} consecutive ids")
    query, fact, copy, assign, same = vocab[:NUM_MARKERS]
    rest = vocab[NUM_MARKERS:]
    third = len(rest) // 3
    return Alphabet(
        query=query,
        fact=fact,
        copy=copy,
        assign=assign,
        same=same,
        keys=rest[:third],
        values=rest[third : 2 * third],
        fillers=rest[2 * third :],
    )


def _draw(rng: np.random.Generator, ids: range, count: int, field: str) -> list[int]:
    """Return `count` distinct ids in random order."""
    if not 1 <= count <= len(ids):
        raise TaskError(f"{field}: got {count}, expected 1 to {len(ids)}; use a larger vocab")
    return [ids[int(i)] for i in rng.choice(len(ids), size=count, replace=False)]


def _fill(rng: np.random.Generator, roles: Alphabet, count: int) -> list[int]:
    """Return `count` fillers drawn with replacement, or a piece of the text."""
    if roles.text is None:
        ids = roles.fillers
        return [ids[int(i)] for i in rng.integers(len(ids), size=count)]
    if count > len(roles.text):
        raise TaskError(f"text: got {len(roles.text)} ids, expected at least {count}")
    start = int(rng.integers(len(roles.text) - count + 1))
    return roles.text[start : start + count].tolist()


def _values(rng: np.random.Generator, ids: range, count: int) -> list[int]:
    """Return `count` ids drawn with replacement."""
    return [ids[int(i)] for i in rng.integers(len(ids), size=count)]


def _room(length: int, used: int, at_least: int = 0) -> int:
    """Return the number of fillers that bring a document to `length`."""
    if length - used < at_least:
        want = f"at least {used + at_least} for these facts, questions and distance"
        raise TaskError(f"length: got {length}, expected {want}")
    return length - used


def _example(kind: str, parts: Sequence[tuple[Sequence[int], bool]], chance: float) -> Example:
    tokens = [token for ids, _ in parts for token in ids]
    mask = [is_answer for ids, is_answer in parts for _ in ids]
    return Example(tokens=tokens, answer_mask=mask, kind=kind, chance=chance)


def _questions(query: int, pairs: Sequence[tuple[int, int]]) -> list[tuple[list[int], bool]]:
    """Return the parts QUERY key *value* of each pair, the value being the answer."""
    return [part for key, value in pairs for part in (([query, key], False), ([value], True))]


def _pick(rng: np.random.Generator, items: Sequence, count: int, field: str) -> list:
    """Return `count` different items in random order."""
    return [items[i] for i in _draw(rng, range(len(items)), count, field)]


def associative_recall(
    rng: np.random.Generator,
    *,
    length: int,
    vocab: range | Alphabet,
    num_pairs: int = 8,
    num_queries: int = 4,
    window: int = 0,
    num_keys: int = 0,
    scattered: int = 0,
    min_pairs: int = 0,
) -> Example:
    """Return key-value pairs, fillers, then questions: k v k v .. filler .. QUERY k *v* ..

    Every asked key is more than `window` tokens after every pair. Keys and values are distinct.
    `num_keys` draws keys from that many only, so that a small model can learn each by heart;
    `scattered` = 1 puts the pairs at random places among the first fillers, whole, instead of in
    front. With `min_pairs` the number of pairs is drawn from min_pairs to num_pairs, evenly in its
    logarithm, and at most as many are asked. Chance: 1 / pairs.
    """
    roles = alphabet(vocab)
    if not 0 <= min_pairs <= num_pairs:
        raise TaskError(f"min_pairs: got {min_pairs}, expected 0 to num_pairs = {num_pairs}")
    if min_pairs:
        num_pairs = int(min_pairs * ((num_pairs + 1) / min_pairs) ** rng.random())
        num_queries = min(num_queries, num_pairs)
    keys = _draw(rng, roles.keys[: num_keys or None], num_pairs, "num_pairs")
    values = _draw(rng, roles.values, num_pairs, "num_pairs")
    pairs = list(zip(keys, values, strict=True))
    asked = _pick(rng, pairs, num_queries, "num_queries")
    room = _room(length, 2 * num_pairs + 3 * num_queries, window)
    filler = _fill(rng, roles, room)
    places = [0] * num_pairs
    if scattered:
        places = rng.integers(0, room - window + 1, size=num_pairs).tolist()
    body = _with_inserted(filler, [list(pair) for pair in pairs], places)
    parts = [(body, False), *_questions(roles.query, asked)]
    return _example("associative_recall", parts, 1 / num_pairs)


def repeated_recall(
    rng: np.random.Generator,
    *,
    length: int,
    vocab: range | Alphabet,
    num_keys: int = 24,
    window: int = 8,
) -> Example:
    """Return k v k v ..: every key comes again and again with the value it had at first.

    An answer is a value whose key was last seen more than `window` tokens before the key at hand,
    so no window holds both. Keys come in random order, each round of all keys in another one.
    Chance: 1 / num_keys.
    """
    roles = alphabet(vocab)
    keys = _draw(rng, roles.keys, num_keys, "num_keys")
    values = _draw(rng, roles.values, num_keys, "num_keys")
    tokens: list[int] = []
    mask: list[bool] = []
    last: dict[int, int] = {}
    while len(tokens) < length:
        for which in rng.permutation(num_keys).tolist():
            at = len(tokens)
            tokens += [keys[which], values[which]]
            mask += [False, at - last[which] > window if which in last else False]
            last[which] = at
    if not any(mask[:length]):
        want = f"more than two rounds of {num_keys} keys and the distance {window}"
        raise TaskError(f"length: got {length}, expected {want}")
    return Example(
        tokens=tokens[:length],
        answer_mask=mask[:length],
        kind="repeated_recall",
        chance=1 / num_keys,
    )


def needle(
    rng: np.random.Generator,
    *,
    length: int,
    vocab: range | Alphabet,
    depth: float = 0.5,
    num_values: int = 1,
    num_distractors: int = 3,
) -> Example:
    """Return fillers with FACT k v.. at `depth` and QUERY k *v..* at the end.

    depth 0 puts the fact first, 1 last before the question. Distractors are facts about other
    keys at random places. Chance of the first answer token: 1 / (1 + num_distractors); a model
    that has it can copy the others, so count whole answers.
    """
    if not 0 <= depth <= 1:
        raise TaskError(f"depth: got {depth}, expected 0 to 1")
    if num_values < 1 or num_distractors < 0:
        got = f"{num_values} and {num_distractors}"
        raise TaskError(f"num_values, num_distractors: got {got}, expected at least 1 and 0")
    roles = alphabet(vocab)
    num_facts = 1 + num_distractors
    keys = _draw(rng, roles.keys, num_facts, "num_distractors")
    values = np.array(_draw(rng, roles.values, num_facts * num_values, "num_values"))
    facts = [
        [roles.fact, key, *row]
        for key, row in zip(keys, values.reshape(num_facts, num_values).tolist(), strict=True)
    ]
    room = _room(length, num_facts * (2 + num_values) + 2 + num_values)
    places = [round(depth * room), *rng.integers(0, room + 1, size=num_distractors).tolist()]
    body = _with_inserted(_fill(rng, roles, room), facts, places)
    parts = [(body, False), ([roles.query, keys[0]], False), (facts[0][2:], True)]
    return _example("needle", parts, 1 / num_facts)


def needles(
    rng: np.random.Generator,
    *,
    length: int,
    vocab: range | Alphabet,
    num_facts: int = 8,
    num_values: int = 1,
) -> Example:
    """Return FACT k v.. at random places of fillers, then QUERY k *v*.. of every fact, shuffled.

    What `needle` asks once at the end of a document, as often as there are facts. Chance of the
    first answer token: 1 / num_facts.
    """
    if num_values < 1:
        raise TaskError(f"num_values: got {num_values}, expected at least 1")
    roles = alphabet(vocab)
    keys = _draw(rng, roles.keys, num_facts, "num_facts")
    values = np.array(_draw(rng, roles.values, num_facts * num_values, "num_values"))
    facts = list(zip(keys, values.reshape(num_facts, num_values).tolist(), strict=True))
    room = _room(length, 2 * num_facts * (2 + num_values))
    places = rng.integers(0, room + 1, size=num_facts).tolist()
    pieces = [[roles.fact, key, *own] for key, own in facts]
    body = _with_inserted(_fill(rng, roles, room), pieces, places)
    asked = _pick(rng, facts, num_facts, "num_facts")
    parts = [(body, False)]
    for key, own in asked:
        parts += [([roles.query, key], False), (own, True)]
    return _example("needles", parts, 1 / num_facts)


def _with_inserted(
    filler: list[int], pieces: Sequence[list[int]], places: Sequence[int]
) -> list[int]:
    """Return the filler with each piece before its place; equal places keep the pieces' order."""
    body: list[int] = []
    done = 0
    for place, piece in sorted(zip(places, pieces, strict=True), key=lambda pair: pair[0]):
        body += filler[done:place] + piece
        done = place
    return body + filler[done:]


def long_copy(
    rng: np.random.Generator,
    *,
    length: int,
    vocab: range | Alphabet,
    span: int = 32,
    window: int = 0,
) -> Example:
    """Return FACT span, fillers, then COPY *span*; the copy is more than `window` after it.

    Span tokens are values drawn with replacement. Chance: 1 / number of values.
    """
    if span < 1:
        raise TaskError(f"span: got {span}, expected at least 1")
    roles = alphabet(vocab)
    tokens = _values(rng, roles.values, span)
    room = _room(length, 2 + 2 * span, window)
    parts = [
        ([roles.fact, *tokens], False),
        (_fill(rng, roles, room), False),
        ([roles.copy], False),
        (tokens, True),
    ]
    return _example("long_copy", parts, 1 / len(roles.values))


def variable_tracking(
    rng: np.random.Generator,
    *,
    length: int,
    vocab: range | Alphabet,
    hops: int = 2,
    num_chains: int = 4,
) -> Example:
    """Return chains of assignments in fillers; the question is the end of one chain.

    ASSIGN x0 v starts a chain and SAME x1 x0, SAME x2 x1, .. continue it for `hops` steps, in
    this order among the statements of the other chains. QUERY x_hops *v*. Chance: 1 / num_chains.
    """
    if hops < 1:
        raise TaskError(f"hops: got {hops}, expected at least 1")
    roles = alphabet(vocab)
    values = _draw(rng, roles.values, num_chains, "num_chains")
    names = np.array(_draw(rng, roles.keys, num_chains * (hops + 1), "num_chains, hops"))
    chains = names.reshape(num_chains, hops + 1).tolist()
    num_statements = num_chains * (hops + 1)
    # A shuffled list of chain numbers says whose next statement comes; order in a chain stays.
    turns = rng.permutation(np.repeat(np.arange(num_chains), hops + 1)).tolist()
    steps = [0] * num_chains
    statements = []
    for chain in turns:
        step = steps[chain]
        steps[chain] += 1
        name = chains[chain][step]
        before = chains[chain][step - 1] if step else values[chain]
        statements.append([roles.same if step else roles.assign, name, before])
    room = _room(length, 3 * num_statements + 3)
    places = sorted(rng.integers(0, room + 1, size=num_statements).tolist())
    body = _with_inserted(_fill(rng, roles, room), statements, places)
    parts = [(body, False), *_questions(roles.query, [(chains[0][hops], values[0])])]
    return _example("variable_tracking", parts, 1 / num_chains)


def hidden_pairs(vocab: range | Alphabet, pairing_seed: int) -> tuple[tuple[int, int], ...]:
    """Return the fixed pairing of keys for `latent_needle`: each key is in at most one pair.

    The first of a pair occurs in facts, the second in questions; only `pairing_seed` links them.
    """
    keys = alphabet(vocab).keys
    order = np.random.default_rng(pairing_seed).permutation(len(keys)).tolist()
    half = len(keys) // 2
    return tuple((keys[order[i]], keys[order[half + i]]) for i in range(half))


def pairing(
    rng: np.random.Generator,
    *,
    length: int,
    vocab: range | Alphabet,
    num_pairs: int = 8,
    pairing_seed: int = 0,
) -> Example:
    """Return statements SAME a *b* of hidden pairs in fillers: where the pairing is learned.

    Nothing in the document says b: it has to be remembered by the weights. Chance: 1 / pairs.
    """
    pairs = hidden_pairs(vocab, pairing_seed)
    roles = alphabet(vocab)
    chosen = _pick(rng, pairs, num_pairs, "num_pairs")
    parts: list[tuple[Sequence[int], bool]] = [
        (_fill(rng, roles, _room(length, 3 * num_pairs)), False)
    ]
    for first, second in chosen:
        parts += [([roles.same, first], False), ([second], True)]
    return _example("pairing", parts, 1 / len(pairs))


def latent_needle(
    rng: np.random.Generator,
    *,
    length: int,
    vocab: range | Alphabet,
    pairing_seed: int = 0,
    num_facts: int = 4,
    window: int = 0,
) -> Example:
    """Return FACT a v in fillers and QUERY b *v*, where b is the hidden partner of a.

    Fact and question share no token, so matching tokens finds nothing: the pairing comes from
    other documents (`pairing`). Facts precede the question by more than `window` tokens.
    Chance: 1 / num_facts.
    """
    roles = alphabet(vocab)
    chosen = _pick(rng, hidden_pairs(vocab, pairing_seed), num_facts, "num_facts")
    values = _draw(rng, roles.values, num_facts, "num_facts")
    facts = [[roles.fact, pair[0], value] for pair, value in zip(chosen, values, strict=True)]
    room = _room(length, 3 * num_facts + 3, window)
    places = rng.integers(0, room - window + 1, size=num_facts).tolist()
    body = _with_inserted(_fill(rng, roles, room), facts, places)
    asked = int(rng.integers(num_facts))
    parts = [(body, False), *_questions(roles.query, [(chosen[asked][1], values[asked])])]
    return _example("latent_needle", parts, 1 / num_facts)


def decoder_recall(
    rng: np.random.Generator,
    *,
    length: int,
    vocab: range | Alphabet,
    num_pairs: int = 8,
    num_links: int = 4,
    num_queries: int = 1,
    window: int = 0,
    num_keys: int = 0,
) -> Example:
    """Return two tables and questions whose lookup key is itself the result of a lookup.

    FACT k m (all keys), ASSIGN m v (all links, in another order), fillers, then QUERY k *v*. The
    link m is in no question: whoever looks up v must have looked up m first, so the second
    search key exists only in deep layers; an index computed from shallow states finds the first
    table's row, never the second's. Limit: a model may also resolve links while it reads the
    second table; several keys per link (num_pairs / num_links) make that the harder way, not an
    impossible one, so compare with `associative_recall`. `num_keys` draws keys and links from that
    many names only. Chance: 1 / num_links.
    """
    roles = alphabet(vocab)
    if not 1 <= num_links <= num_pairs:
        raise TaskError(f"num_links: got {num_links}, expected 1 to num_pairs = {num_pairs}")
    names = _draw(rng, roles.keys[: num_keys or None], num_pairs + num_links, "num_pairs")
    keys, links = names[:num_pairs], names[num_pairs:]
    values = _draw(rng, roles.values, num_links, "num_links")
    # Every link is used, as evenly as the numbers allow.
    owners = [int(i) % num_links for i in rng.permutation(num_pairs)]
    first = [[roles.fact, key, links[i]] for key, i in zip(keys, owners, strict=True)]
    second = [[roles.assign, link, v] for link, v in zip(links, values, strict=True)]
    second = [second[int(i)] for i in rng.permutation(num_links)]
    answers = [(key, values[i]) for key, i in zip(keys, owners, strict=True)]
    asked = _pick(rng, answers, num_queries, "num_queries")
    room = _room(length, 3 * (num_pairs + num_links + num_queries), window)
    parts = [
        ([token for row in (*first, *second) for token in row], False),
        (_fill(rng, roles, room), False),
        *_questions(roles.query, asked),
    ]
    return _example("decoder_recall", parts, 1 / num_links)


TASKS: dict[str, Callable[..., Example]] = {
    task.__name__: task
    for task in (
        associative_recall,
        repeated_recall,
        needle,
        needles,
        long_copy,
        variable_tracking,
        pairing,
        latent_needle,
        decoder_recall,
    )
}


def task_example(kind: str, *, seed: int, index: int, **options) -> Example:
    """Return example number `index` of a kind: a function of kind, seed, index and options."""
    if kind not in TASKS:
        raise TaskError(f"kind: got {kind!r}, expected one of {', '.join(TASKS)}")
    return TASKS[kind](np.random.default_rng((seed, index)), **options)


def task_options(kind: str) -> tuple[str, ...]:
    """Return the names of a kind's own options."""
    given = ("rng", "length", "vocab")
    return tuple(name for name in signature(TASKS[kind]).parameters if name not in given)
