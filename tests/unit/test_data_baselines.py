"""N-gram baselines against hand arithmetic, and the laws of a probability."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finwhale.data.baselines import NgramCounts, choose_masses, ngram_baseline, text_baselines

# Five symbols over {0, 1, 2}; the first is context only for a bigram.
CORPUS = [np.array([0, 1, 2, 1, 2])]


def test_unigram_by_hand():
    """Counts 1, 2, 2 of 5, a_1 = 3 (add one): P = 2/8, 3/8, 3/8."""
    counts = NgramCounts(CORPUS, order=1, vocab_size=3)
    bits = counts.bits(np.array([0, 1, 2]), [3.0])
    assert bits == pytest.approx(-math.log2(2 / 8 * 3 / 8 * 3 / 8))


def test_bigram_by_hand():
    """Predicted 1, 2, 1, 2 with a_1 = 1 and a_2 = 2.

    P_1 = (c + 1/3) / 5: 1/15, 7/15, 7/15. Then P_2(1|0) = (1 + 14/15) / 3 = 29/45,
    P_2(2|1) = (2 + 14/15) / 4 = 11/15, P_2(0|2) = (0 + 2/15) / 3 = 2/45.
    """
    counts = NgramCounts(CORPUS, order=2, vocab_size=3)
    bits = counts.bits(np.array([0, 1, 2, 0]), [1.0, 2.0])
    assert bits == pytest.approx(-math.log2(29 / 45 * 11 / 15 * 2 / 45))


def test_unseen_context_falls_back_to_the_lower_order():
    """Nothing follows a second 0 in the corpus, so P_2(w|00) is P_1(w) whatever a_2 is."""
    counts = NgramCounts([np.array([0, 1, 1])], order=2, vocab_size=3)
    low = counts.bits(np.array([2, 1]), [1.0, 0.1])
    assert low == pytest.approx(-math.log2((2 + 1 / 3) / 3))


@given(
    corpus=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=12), min_size=1, max_size=4),
    context=st.lists(st.integers(0, 3), min_size=2, max_size=2),
    masses=st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
)
def test_probabilities_of_a_context_sum_to_one(corpus, context, masses):
    counts = NgramCounts([np.array(s) for s in corpus], order=3, vocab_size=4)
    total = sum(2 ** -counts.bits(np.array([*context, w]), masses) for w in range(4))
    assert total == pytest.approx(1)


def test_masses_come_from_training_text():
    """A deterministic sequence wants the smallest bigram mass, noise a large one."""
    regular = [np.array([0, 1, 2, 3] * 25) for _ in range(20)]
    generator = np.random.default_rng(0)
    noise = [generator.integers(0, 4, 100) for _ in range(20)]
    masses = [choose_masses(text, order=2, vocab_size=4) for text in (regular, noise)]
    assert masses[0][1] == 0.1
    assert masses[1][1] > 10


def test_higher_orders_help_on_regular_text():
    text = [np.array([0, 1, 2, 3, 2, 1] * 20) for _ in range(12)]
    bits = [
        ngram_baseline("x", text[2:], text[:2], order=n, vocab_size=4, validation_bytes=240)
        for n in (1, 2, 3)
    ]
    assert bits[0].bits_per_byte > bits[1].bits_per_byte > bits[2].bits_per_byte
    assert [len(b.masses) for b in bits] == [1, 2, 3]


def test_text_baselines_predict_tokens_and_the_end_alone():
    """One token type between the markers: unigram of {token, end} only, two bytes per text.

    Counts 2 : 1, so with a small mass about 2 * log2(3/2) + log2(3) = 2.75 bits per text.
    """
    ids = [[0, 5, 5, 1]] * 10
    unigram, bigram, trigram = text_baselines(["ab"] * 10, ["ab"] * 3, ids, ids[:3], vocab_size=6)
    assert (unigram.name, bigram.name, trigram.name) == (
        "token unigram",
        "token bigram",
        "byte trigram",
    )
    assert unigram.bits_per_byte == pytest.approx((2 * math.log2(1.5) + math.log2(3)) / 2, rel=0.02)
    # After the start always 5; after 5, 5 or the end evenly: about 2 bits per text.
    assert bigram.bits_per_byte == pytest.approx(1, rel=0.1)
    # Fully determined by two bytes of context.
    assert trigram.bits_per_byte < 0.1


def test_key_overflow_is_refused():
    with pytest.raises(ValueError, match=r"order: got 4, expected vocab_size\*\*order below"):
        NgramCounts(CORPUS, order=4, vocab_size=129_280)
