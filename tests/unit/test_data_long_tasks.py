"""Every generated task is solved by a plain reader of its tokens, and by nothing less."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finwhale.data.long_tasks import (
    TASKS,
    Example,
    TaskError,
    alphabet,
    associative_recall,
    decoder_recall,
    hidden_pairs,
    latent_needle,
    long_copy,
    needle,
    pairing,
    task_example,
    variable_tracking,
)

VOCAB = range(1_000, 1_305)
ROLES = alphabet(VOCAB)
OPTIONS = {
    "associative_recall": {"num_pairs": 8, "num_queries": 4, "window": 64},
    "repeated_recall": {"num_keys": 24, "window": 16},
    "needle": {"depth": 0.3, "num_values": 3, "num_distractors": 4},
    "needles": {"num_facts": 6, "num_values": 2},
    "long_copy": {"span": 24, "window": 64},
    "variable_tracking": {"hops": 3, "num_chains": 4},
    "pairing": {"num_pairs": 8, "pairing_seed": 5},
    "latent_needle": {"num_facts": 4, "pairing_seed": 5, "window": 64},
    "decoder_recall": {"num_pairs": 7, "num_links": 3, "num_queries": 2, "window": 64},
}


def _make(kind: str, index: int = 0, length: int = 257, **options) -> Example:
    values = {**OPTIONS[kind], **options}
    return task_example(kind, seed=11, index=index, length=length, vocab=VOCAB, **values)


def _facts(context: list[int], marker: int) -> dict[int, int]:
    """Map the first to the second token after each marker."""
    at = [i for i, token in enumerate(context) if token == marker]
    return {context[i + 1]: context[i + 2] for i in at if i + 2 < len(context)}


def _solve(kind: str, before: list[int]) -> int:
    """Return the answer that follows `before`, from these tokens (and the fixed pairing) alone."""
    if kind == "long_copy":
        start = before.index(ROLES.fact)
        return before[start + 1 + len(before) - 1 - before.index(ROLES.copy)]
    if kind == "repeated_recall":
        return before[before.index(before[-1]) + 1]
    if kind == "pairing":
        return dict(hidden_pairs(VOCAB, 5))[before[-1]]
    asked = max(i for i, token in enumerate(before) if token == ROLES.query)
    key, context = before[asked + 1], before[:asked]
    if kind == "associative_recall":
        return context[context.index(key) + 1]
    if kind in ("needle", "needles"):
        fact = next(i for i in range(asked) if context[i : i + 2] == [ROLES.fact, key])
        return context[fact + len(before) - asked]
    if kind == "latent_needle":
        partner = {second: first for first, second in hidden_pairs(VOCAB, 5)}
        return _facts(context, ROLES.fact)[partner[key]]
    if kind == "decoder_recall":
        return _facts(context, ROLES.assign)[_facts(context, ROLES.fact)[key]]
    same, value = _facts(context, ROLES.same), _facts(context, ROLES.assign)
    while key in same:
        key = same[key]
    return value[key]


@pytest.mark.parametrize("length", [256, 257, 1_001])
@pytest.mark.parametrize("kind", TASKS)
def test_plain_reader_solves_every_answer(kind, length):
    for index in range(20):
        example = _make(kind, index, length)
        assert len(example.tokens) == len(example.answer_mask) == length
        assert set(example.tokens) <= set(VOCAB)
        assert example.kind == kind
        places = [i for i, is_answer in enumerate(example.answer_mask) if is_answer]
        assert places
        for place in places:
            assert _solve(kind, example.tokens[:place]) == example.tokens[place]


# The facts of `pairing` are not in the document (see the test of hidden_pairs); those of
# `repeated_recall` come again in every round.
@pytest.mark.parametrize(
    "kind", [kind for kind in TASKS if kind not in ("pairing", "repeated_recall")]
)
def test_reader_fails_when_the_facts_are_swapped_for_another_document(kind):
    """Negative control: with the facts of one document, the questions of another stay open."""
    num_right = num_asked = 0
    for index in range(10):
        example, other = _make(kind, index), _make(kind, index + 100)
        first = example.answer_mask.index(True)
        question = {"long_copy": 1}.get(kind, 2)
        for place in (i for i, is_answer in enumerate(example.answer_mask) if is_answer):
            before = other.tokens[: first - question] + example.tokens[first - question : place]
            num_asked += 1
            with contextlib.suppress(KeyError, ValueError, StopIteration):
                num_right += _solve(kind, before) == example.tokens[place]
    assert num_right < 0.2 * num_asked


@pytest.mark.parametrize("kind", TASKS)
def test_example_is_a_function_of_seed_and_index(kind):
    assert _make(kind, 3) == _make(kind, 3)
    assert _make(kind, 3).tokens != _make(kind, 4).tokens
    rest = {**OPTIONS[kind], "length": 257, "vocab": VOCAB}
    other = task_example(kind, seed=12, index=3, **rest)
    assert other.tokens != _make(kind, 3).tokens


@pytest.mark.parametrize("window", [0, 8, 31])
def test_repeated_recall_asks_exactly_what_left_the_window(window):
    example = _make("repeated_recall", length=240, window=window)
    for place in range(1, 240, 2):
        earlier = [
            i for i in range(0, place - 1, 2) if example.tokens[i] == example.tokens[place - 1]
        ]
        is_asked = bool(earlier) and place - 1 - earlier[-1] > window
        assert example.answer_mask[place] == is_asked
    assert not any(example.answer_mask[0::2])


@pytest.mark.parametrize("window", [0, 1, 64, 128])
@pytest.mark.parametrize("kind", ["associative_recall", "latent_needle", "decoder_recall"])
def test_facts_are_farther_back_than_the_window(kind, window):
    for index in range(20):
        example = _make(kind, index, window=window)
        first = example.answer_mask.index(True)
        facts = [i for i, token in enumerate(example.tokens[: first - 2]) if token in ROLES.values]
        # The asked key is the token before the answer.
        assert (first - 1) - max(facts) > window


def test_shortest_document_for_a_window_and_one_token_less():
    # 4 pairs and 2 questions are 14 tokens; 10 fillers put the key 12 tokens after the last value.
    options = {"vocab": VOCAB, "num_pairs": 4, "num_queries": 2, "window": 10}
    rng = np.random.default_rng(0)
    assert len(associative_recall(rng, length=24, **options).tokens) == 24
    with pytest.raises(TaskError, match="length: got 23, expected at least 24"):
        associative_recall(rng, length=23, **options)


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 1])
def test_needle_lies_at_its_depth(depth):
    example = _make("needle", depth=depth, num_distractors=0, num_values=1, length=405)
    # Fact 3 tokens, question 2, answer 1: 399 fillers.
    assert example.tokens.index(ROLES.fact) == round(depth * 399)


def test_copy_by_hand():
    example = _make("long_copy", length=12, span=3, window=4)
    span = example.tokens[1:4]
    assert example.tokens[0] == ROLES.fact
    assert set(example.tokens[4:8]) <= set(ROLES.fillers)
    assert example.tokens[8:] == [ROLES.copy, *span]
    assert example.answer_mask == [False] * 9 + [True] * 3
    with pytest.raises(TaskError, match="length: got 11"):
        _make("long_copy", length=11, span=3, window=4)


def test_question_of_a_latent_needle_shares_no_token_with_the_facts():
    for index in range(20):
        example = _make("latent_needle", index)
        place = example.answer_mask.index(True)
        assert example.tokens[place - 1] not in example.tokens[: place - 1]
        assert example.tokens[place] in example.tokens[:place]


def test_second_key_of_a_decoder_recall_is_in_no_question():
    for index in range(20):
        example = _make("decoder_recall", index)
        place = example.answer_mask.index(True)
        table = _facts(example.tokens[: place - 2], ROLES.fact)
        assert not set(table.values()) & set(example.tokens[place - 2 :])
        # One lookup alone does not answer: the key itself stands beside no value.
        key = example.tokens[place - 1]
        after = {b for a, b in zip(example.tokens, example.tokens[1:], strict=False) if a == key}
        assert after & set(ROLES.values) == {example.tokens[place]}  # in the question itself


@pytest.mark.parametrize("num_links", [1, 3, 7])
def test_every_link_of_a_decoder_recall_has_its_share_of_keys(num_links):
    example = _make("decoder_recall", num_links=num_links)
    place = example.answer_mask.index(True)
    table = _facts(example.tokens[: place - 2], ROLES.fact)
    counts = [list(table.values()).count(link) for link in set(table.values())]
    assert len(table) == 7
    assert len(counts) == num_links
    assert max(counts) - min(counts) <= 1


def test_hidden_pairs_use_each_key_once_and_depend_on_their_seed():
    pairs = hidden_pairs(VOCAB, 5)
    used = [key for pair in pairs for key in pair]
    assert len(set(used)) == len(used) == len(ROLES.keys) // 2 * 2
    assert set(used) <= set(ROLES.keys)
    assert pairs == hidden_pairs(VOCAB, 5)
    assert pairs != hidden_pairs(VOCAB, 6)


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_tracking_follows_exactly_its_hops(hops):
    example = _make("variable_tracking", hops=hops)
    place = example.answer_mask.index(True)
    same = _facts(example.tokens[: place - 2], ROLES.same)
    key, steps = example.tokens[place - 1], 0
    while key in same:
        key, steps = same[key], steps + 1
    assert steps == hops
    assert len(same) == 4 * hops


@pytest.mark.parametrize("kind", TASKS)
def test_guessing_among_what_is_there_scores_the_stated_chance(kind):
    candidates = {"long_copy": len(ROLES.values), "pairing": len(ROLES.keys) // 2}
    candidates["repeated_recall"] = OPTIONS["repeated_recall"]["num_keys"]
    example = _make(kind)
    first = example.answer_mask.index(True)
    seen = set(example.tokens[: first - 2]) & set(ROLES.values)
    num_values = OPTIONS[kind].get("num_values", 1)
    expected = candidates.get(kind, len(seen) // num_values)
    assert example.chance == pytest.approx(1 / expected)


def test_first_chain_has_no_place_of_its_own():
    """The asked chain's value is not always the first or the last assignment."""
    ranks = set()
    for index in range(60):
        example = _make("variable_tracking", index)
        place = example.answer_mask.index(True)
        values = list(_facts(example.tokens[: place - 2], ROLES.assign).values())
        ranks.add(values.index(example.tokens[place]))
    assert ranks == {0, 1, 2, 3}


@settings(max_examples=30, deadline=None)
@given(size=st.integers(64, 400), start=st.integers(0, 9))
def test_roles_share_no_id(size, start):
    roles = alphabet(range(start, start + size))
    markers = [roles.query, roles.fact, roles.copy, roles.assign, roles.same]
    ids = [*markers, *roles.keys, *roles.values, *roles.fillers]
    assert sorted(ids) == list(range(start, start + size))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rng: needle(rng, length=99, vocab=range(63)), "vocab: got"),
        (lambda rng: needle(rng, length=99, vocab=range(0, 400, 2)), "vocab: got"),
        (lambda rng: needle(rng, length=99, vocab=VOCAB, depth=1.1), "depth: got 1.1"),
        (lambda rng: needle(rng, length=99, vocab=VOCAB, num_values=0), "num_values"),
        (lambda rng: long_copy(rng, length=99, vocab=VOCAB, span=0), "span: got 0"),
        (lambda rng: variable_tracking(rng, length=99, vocab=VOCAB, hops=0), "hops: got 0"),
        (lambda rng: decoder_recall(rng, length=99, vocab=VOCAB, num_pairs=98), "num_pairs"),
        (lambda rng: decoder_recall(rng, length=38, vocab=VOCAB), "length: got 38"),
        (
            lambda rng: decoder_recall(rng, length=99, vocab=VOCAB, num_pairs=3),
            "num_links: got 4, expected 1 to num_pairs = 3",
        ),
        (
            lambda rng: associative_recall(rng, length=99, vocab=VOCAB, num_queries=9),
            "num_queries: got 9, expected 1 to 8",
        ),
        (
            lambda rng: latent_needle(rng, length=99, vocab=VOCAB, pairing_seed=0, num_facts=0),
            "num_facts: got 0",
        ),
        (
            lambda rng: pairing(rng, length=99, vocab=VOCAB, pairing_seed=0, num_pairs=51),
            "num_pairs: got 51, expected 1 to 50",
        ),
        (lambda rng: task_example("sort", seed=0, index=0), "kind: got 'sort'"),
    ],
)
def test_task_that_does_not_fit_is_refused(make, message):
    with pytest.raises(TaskError, match=message):
        make(np.random.default_rng(0))
