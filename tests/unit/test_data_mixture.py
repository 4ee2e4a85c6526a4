"""Shares of a mixture, documents that never come twice, and targets through packing."""

from __future__ import annotations

import numpy as np
import pytest

from finwhale.data.long_tasks import TaskError, alphabet
from finwhale.data.mixture import (
    MIXED_TASKS,
    Document,
    generated,
    mixed_document,
    repeated,
    shares,
    split_documents,
)
from finwhale.data.packing import NO_TARGET, pack

VOCAB = range(27, 400)
BOS = 0


def texts(*lengths: int) -> list[Document]:
    return [Document.of_text(np.arange(n) + 1000 * i) for i, n in enumerate(lengths)]


def made(kind: str, *, tokens: int = 3000, seed: int = 3, text=None) -> list[Document]:
    return generated(
        kind, tokens=tokens, seed=seed, vocab=VOCAB, bos_id=BOS, lengths=(96, 300), text=text
    )


def test_shares_are_read_and_wrong_ones_refused():
    assert shares(("needle=0.25", "a/b=c=0.5")) == {"needle": 0.25, "a/b=c": 0.5}
    for wrong in (("needle",), ("needle=",), ("=0.5",), ("needle=0",), ("needle=1.5",)):
        with pytest.raises(TaskError, match=r"NAME=SHARE"):
            shares(wrong)
    with pytest.raises(TaskError, match="twice"):
        shares(("needle=0.1", "needle=0.2"))
    with pytest.raises(TaskError, match=r"sum to 1\.1"):
        shares(("needle=0.6", "long_copy=0.5"))


@pytest.mark.parametrize("tokens", [1, 29, 30, 31, 60, 75])
def test_text_is_read_whole_epoch_by_epoch(tokens):
    documents = texts(5, 10, 15)
    found = repeated(documents, tokens=tokens, seed=1, max_epochs=4)
    size = sum(len(d.ids) for d in found)
    assert tokens <= size < tokens + 15
    # Every whole epoch holds each document once.
    first = [int(d.ids[0]) for d in found[:3]]
    if tokens >= 30:
        assert sorted(first) == [0, 1000, 2000]


def test_text_too_small_for_its_share_is_refused_before_it_is_memorised():
    with pytest.raises(TaskError, match=r"read 4\.33 times, expected at most 4"):
        repeated(texts(30), tokens=130, seed=0, max_epochs=4)
    with pytest.raises(TaskError, match="no text"):
        repeated([], tokens=1, seed=0, max_epochs=4)
    assert repeated([], tokens=0, seed=0, max_epochs=4) == []


@pytest.mark.parametrize("kind", sorted(MIXED_TASKS))
def test_generated_documents_fill_their_share_fit_and_never_repeat(kind):
    documents = made(kind)
    size = sum(len(d.ids) for d in documents)
    assert 3000 <= size < 3000 + 300
    seen = {d.ids.tobytes() for d in documents}
    assert len(seen) == len(documents)
    for document in documents:
        assert 96 <= len(document.ids) <= 300
        assert document.ids[0] == BOS
        assert not document.is_target[0]
        assert document.is_target.any()
        assert set(document.ids[1:].tolist()) <= set(VOCAB)


def test_documents_depend_on_seed_and_place_alone():
    whole = made("associative_recall", tokens=6000)
    start = made("associative_recall", tokens=2000)
    other = made("associative_recall", tokens=2000, seed=4)
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(start, whole, strict=False))
    assert not np.array_equal(start[0].ids, other[0].ids)


def test_answers_of_recall_follow_from_the_document():
    """A plain reader: the token after a key's first occurrence answers every later one."""
    for document in made("repeated_recall"):
        known: dict[int, int] = {}
        ids = document.ids.tolist()
        for place in np.flatnonzero(document.is_target).tolist():
            key = ids[place - 1]
            first = ids.index(key)
            known.setdefault(key, ids[first + 1])
            assert ids[place] == known[key]


def test_text_fills_only_kinds_whose_facts_have_a_marker():
    text = np.full(2000, 27, dtype=np.uint16)
    fillers = set(alphabet(VOCAB).fillers)
    roles = alphabet(VOCAB)

    def used_text(kind: str) -> bool:
        found = [
            mixed_document(
                kind=kind, seed=1, index=i, roles=roles, bos_id=BOS, lengths=(200, 300), text=text
            )
            for i in range(8)
        ]
        return any(len(fillers & set(d.ids[9:].tolist())) == 0 for d in found)

    assert used_text("needle")
    assert not used_text("associative_recall")


def test_both_halves_of_a_group_meet_the_pairs():
    """A shift before the first pair: otherwise every key would be at an odd place."""
    keys = set(alphabet(VOCAB).keys)
    parities = set()
    for document in made("repeated_recall"):
        first = next(i for i, token in enumerate(document.ids.tolist()) if token in keys)
        parities.add(first % 2)
    assert parities == {0, 1}


def test_packing_keeps_which_tokens_are_targets():
    ids = np.array([5, 6, 7, 8, 9])
    wanted = np.array([True, False, True, True, False])
    packed = pack([ids], sequence_length=6, pad_id=2, are_targets=[wanted])
    assert packed.inputs.tolist() == [[5, 6, 7, 8, 2, 2]]
    # Place i predicts token i + 1: 6 is no target, 7 and 8 are, 9 is none.
    assert packed.targets.tolist() == [[NO_TARGET, 7, 8, NO_TARGET, NO_TARGET, NO_TARGET]]
    everything = pack([ids], sequence_length=6, pad_id=2)
    assert everything.targets.tolist() == [[6, 7, 8, 9, NO_TARGET, NO_TARGET]]


def test_targets_stay_with_their_piece_when_text_is_cut():
    ids = np.arange(10, 19)
    wanted = np.arange(9) % 2 == 0
    packed = pack([ids], sequence_length=4, pad_id=2, are_targets=[wanted])
    flat = packed.targets[packed.targets != NO_TARGET]
    assert sorted(flat.tolist()) == [12, 14, 16, 18]


def test_a_generated_document_is_never_cut_and_one_without_targets_left_out():
    text, silent = texts(20)[0], Document(ids=np.arange(5), is_target=np.zeros(5, dtype=bool))
    kept = list(split_documents([text, silent], 8))
    assert len(kept) == 1
    asking = Document(ids=np.arange(20), is_target=np.arange(20) == 19)
    with pytest.raises(TaskError, match="20 tokens does not fit a row of 8"):
        list(split_documents([asking], 8))
    assert len(list(split_documents([asking], 19))) == 1


def test_unknown_kind_names_the_known_ones():
    with pytest.raises(TaskError, match="repeated_recall"):
        made("no_such_kind")
