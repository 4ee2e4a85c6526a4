"""Copies: shingle hashes against a plain loop, and what counts as seen."""

from __future__ import annotations

import numpy as np
import pytest

from finwhale.data import deduplicate
from finwhale.data.deduplicate import MIN_SAMPLE, SHINGLE_CHARS, SeenText, sampled_shingles

MASK = 2**64 - 1


def _words(seed: int, count: int) -> str:
    rows = np.random.default_rng(seed).integers(97, 123, size=(count, 6), dtype=np.uint8)
    return " ".join(row.tobytes().decode("ascii") for row in rows)


def _hashes_by_loop(data: bytes) -> list[int]:
    """The formula of the docstring with Python integers, one window at a time."""
    values = [int(value) for value in deduplicate._VALUES]
    hashes = []
    for start in range(len(data) - SHINGLE_CHARS + 1):
        h = 0
        for j in range(SHINGLE_CHARS):
            h += values[data[start + j]] * pow(0x9E3779B97F4A7C15, j, 2**64)
        h &= MASK
        h ^= h >> 31
        h = h * 0xD6E8FEB86659FD93 & MASK
        hashes.append(h ^ (h >> 32))
    return hashes


@pytest.mark.parametrize("length", [0, 1, 49, 50, 51, 173])
def test_window_hashes_equal_a_plain_loop(length):
    text = _words(0, 40)[:length].strip()
    expected = sorted(set(_hashes_by_loop(text.encode())))
    assert sampled_shingles(text, sample_one_in=1).tolist() == expected


@pytest.mark.parametrize("extra", [-1, 0, 1, 49, 50])
def test_blocks_hash_every_window_once(monkeypatch, extra):
    text = _words(1, 40)[: 100 + extra].strip()
    whole = sampled_shingles(text, sample_one_in=1)
    monkeypatch.setattr(deduplicate, "_BLOCK_BYTES", 50)
    assert sampled_shingles(text, sample_one_in=1).tolist() == whole.tolist()


def test_sample_is_a_function_of_the_window_not_of_its_place():
    text = _words(2, 400)
    moved = _words(3, 17) + " " + text
    assert set(sampled_shingles(text).tolist()) <= set(sampled_shingles(moved).tolist())


def test_sample_takes_about_one_window_in_32():
    text = _words(4, 4_000)
    share = len(sampled_shingles(text)) / (len(text) - SHINGLE_CHARS + 1)
    assert 0.8 / 32 < share < 1.2 / 32


def _seen(*texts: str) -> SeenText:
    seen = SeenText()
    for text in texts:
        assert seen.copy_reason(text, max_share=1.0) is None
    return seen


def test_copy_that_differs_in_case_and_blanks_is_exact():
    seen = _seen("One  two\nthree.")
    assert seen.copy_reason("one TWO three.", max_share=0.5) == "exact copy"
    assert seen.copy_reason("one two four.", max_share=0.5) is None


@pytest.mark.parametrize(("share_copied", "is_copy"), [(0.3, False), (0.7, True)])
def test_near_copy_is_decided_by_the_share_of_the_later_document(share_copied, is_copy):
    first = _words(5, 1_000)
    copied = int(1_000 * share_copied)
    later = " ".join([*first.split()[:copied], *_words(6, 1_000 - copied).split()])
    assert (_seen(first).copy_reason(later, max_share=0.5) == "near copy") is is_copy


def test_chapter_after_its_book_is_a_copy_and_book_after_a_chapter_is_not():
    chapters = [_words(seed, 500) for seed in range(4)]
    book = "\n".join(chapters)
    assert _seen(book).copy_reason(chapters[2], max_share=0.5) == "near copy"
    assert _seen(chapters[2]).copy_reason(book, max_share=0.5) is None
    # With the limit of the held-out sides a quarter is too much.
    assert _seen(chapters[2]).copy_reason(book, max_share=0.2) == "near copy"


def test_refused_text_is_not_remembered():
    first, second = _words(9, 500), _words(10, 200)
    seen = _seen(first)
    assert seen.copy_reason(first + " " + second, max_share=0.5) == "near copy"
    assert seen.copy_reason(second, max_share=0.0) is None


def test_unrelated_text_shares_nothing_and_short_text_is_not_judged():
    text = _words(7, 2_000)
    seen = _seen(text)
    assert seen.copy_reason(_words(8, 2_000), max_share=0.0) is None
    short = text[:120]
    assert len(sampled_shingles(short)) < MIN_SAMPLE
    assert seen.copy_reason(short, max_share=0.0) is None
    assert seen.copy_reason("", max_share=0.0) is None
