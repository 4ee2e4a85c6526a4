"""Packing: each token a target once, in its own document, in few rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finwhale.data.packing import NO_TARGET, pack

LENGTHS = st.lists(st.integers(0, 40), max_size=30)
# Token = 100 * document + place: it says where it came from.
PAD = 99_999


def _documents(lengths: list[int]) -> list[list[int]]:
    return [[100 * n + place for place in range(length)] for n, length in enumerate(lengths)]


@given(lengths=LENGTHS, width=st.integers(1, 17))
def test_every_token_but_the_first_is_a_target_once(lengths, width):
    packed = pack(_documents(lengths), sequence_length=width, pad_id=PAD)
    targets = packed.targets[packed.targets != NO_TARGET]
    expected = [token for document in _documents(lengths) for token in document[1:]]
    assert sorted(targets.tolist()) == expected
    assert packed.num_targets == len(expected)


@given(lengths=LENGTHS, width=st.integers(1, 17))
def test_targets_never_leave_their_document(lengths, width):
    packed = pack(_documents(lengths), sequence_length=width, pad_id=PAD)
    has_target = packed.targets != NO_TARGET
    assert (packed.targets[has_target] == packed.inputs[has_target] + 1).all()
    assert (packed.inputs[~has_target] == PAD).all()


@given(lengths=LENGTHS, width=st.integers(1, 17))
def test_lengths_are_the_borders_of_the_pieces(lengths, width):
    packed = pack(_documents(lengths), sequence_length=width, pad_id=PAD)
    assert packed.inputs.shape == packed.targets.shape == (packed.num_rows, width)
    for row, pieces in enumerate(packed.lengths):
        assert 0 < sum(pieces) <= width
        starts = np.concatenate([[0], np.cumsum(pieces)])
        for start, stop in itertools.pairwise(starts):
            piece = packed.inputs[row, start:stop]
            assert (np.diff(piece) == 1).all()
        assert (packed.inputs[row, starts[-1] :] == PAD).all()


def test_rows_by_hand():
    """Pairs 4, 3, 2, 1 in rows of 5: best fit puts 4 with 1 and 3 with 2, nothing is padded."""
    packed = pack(_documents([5, 4, 3, 2]), sequence_length=5, pad_id=PAD)
    assert packed.lengths == ((4, 1), (3, 2))
    assert packed.inputs.tolist() == [[0, 1, 2, 3, 300], [100, 101, 102, 200, 201]]
    assert packed.targets.tolist() == [[1, 2, 3, 4, 301], [101, 102, 103, 201, 202]]
    assert packed.padding_rate == 0


def test_long_documents_are_cut_without_losing_a_pair():
    packed = pack(_documents([8]), sequence_length=3, pad_id=PAD)
    assert packed.inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, PAD, PAD]]
    assert packed.targets.tolist() == [[1, 2, 3], [4, 5, 6], [7, NO_TARGET, NO_TARGET]]
    assert packed.padding_rate == pytest.approx(2 / 9)


def test_shifting_after_packing_would_cross_borders():
    """Control: the easy mistake makes one document's last token predict the next one's first."""
    packed = pack(_documents([3, 3]), sequence_length=4, pad_id=PAD)
    shifted = packed.inputs[:, 1:]
    assert (shifted != packed.inputs[:, :-1] + 1).any()


def test_documents_without_a_pair_give_no_rows():
    packed = pack([[], [7]], sequence_length=4, pad_id=PAD)
    assert packed.inputs.shape == (0, 4)
    assert packed.padding_rate == 1


def test_empty_rows_are_refused():
    with pytest.raises(ValueError, match="sequence_length: got 0, expected at least 1"):
        pack([[1, 2]], sequence_length=0, pad_id=PAD)
