"""Bits per byte of n-gram counts: what a model must beat before its loss means anything.

One formula for every order, a lower order mixed in by a fixed mass a_n per context:

    P_0(w)     = 1 / V
    P_n(w | h) = (c(h w) + a_n * P_{n-1}(w | h')) / (c(h) + a_n)

with h' = h without its oldest symbol. At order 1 this is add-k smoothing with k = a_1 / V. Each
a_n is chosen from a grid, lowest order first, on every tenth training document, with counts of
the other nine tenths; then all training documents are counted. Validation text is only scored.
Every sequence ends in an end symbol that is predicted like any other; the symbols before the
start are one padding symbol that is never predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MASSES = tuple(float(10**e * m) for e in range(-1, 5) for m in (1, 3))
_BYTE_END = 256
_BYTE_START = 257


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """Name, bits per byte on the validation text, and the smoothing masses a_1 .. a_n chosen."""

    name: str
    bits_per_byte: float
    masses: tuple[float, ...]


class NgramCounts:
    """Counts of n-grams of orders 1..n over `vocab_size` symbols, and their probabilities.

    A sequence is an int array whose first `order - 1` symbols are context only.
    """

    def __init__(self, sequences: Sequence[np.ndarray], *, order: int, vocab_size: int) -> None:
        if vocab_size**order >= 2**63:
            raise ValueError(f"order: got {order}, expected vocab_size**order below 2**63")
        self.order = order
        self.vocab_size = vocab_size
        self._context: list[tuple[np.ndarray, np.ndarray]] = []
        self._ngram: list[tuple[np.ndarray, np.ndarray]] = []
        for n in range(1, order + 1):
            keys = [self._keys(sequence, n) for sequence in sequences]
            joined = np.concatenate(keys) if keys else np.empty(0, dtype=np.int64)
            self._ngram.append(np.unique(joined, return_counts=True))
            self._context.append(np.unique(joined // vocab_size, return_counts=True))

    def _keys(self, sequence: np.ndarray, n: int) -> np.ndarray:
        """Return one int64 per predicted symbol: its n-gram read as a number in base V."""
        first = self.order - 1
        keys = np.zeros(max(0, len(sequence) - first), dtype=np.int64)
        for back in range(n - 1, -1, -1):
            symbols = np.asarray(sequence[first - back : len(sequence) - back], dtype=np.int64)
            keys = keys * self.vocab_size + symbols
        return keys

    def level(self, sequence: np.ndarray, n: int, mass: float, lower: np.ndarray) -> np.ndarray:
        """Return P_n of each predicted symbol given P_{n-1} of each, fp64."""
        keys = self._keys(sequence, n)
        counts = _look_up(self._ngram[n - 1], keys)
        context = _look_up(self._context[n - 1], keys // self.vocab_size)
        return (counts + mass * lower) / (context + mass)

    def bits(self, sequence: np.ndarray, masses: Sequence[float]) -> float:
        """Return the bits needed for the predicted symbols of `sequence` with masses a_1 .. a_n."""
        probability = np.full(max(0, len(sequence) - self.order + 1), 1 / self.vocab_size)
        for n, mass in enumerate(masses, start=1):
            probability = self.level(sequence, n, mass, probability)
        return float(-np.log2(probability).sum())


def _look_up(table: tuple[np.ndarray, np.ndarray], keys: np.ndarray) -> np.ndarray:
    """Return the count of each key, 0 where the sorted table has none."""
    known, counts = table
    if not len(known):
        return np.zeros(len(keys))
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[at] == keys, counts[at], 0)


def choose_masses(
    sequences: Sequence[np.ndarray], *, order: int, vocab_size: int
) -> tuple[float, ...]:
    """Return a_1 .. a_n from training sequences alone, lowest order first."""
    held_out = [s for i, s in enumerate(sequences) if i % 10 == 0]
    counted = [s for i, s in enumerate(sequences) if i % 10 or len(sequences) == 1]
    counts = NgramCounts(counted, order=order, vocab_size=vocab_size)
    lower = [np.full(max(0, len(s) - order + 1), 1 / vocab_size) for s in held_out]
    masses: list[float] = []
    for n in range(1, order + 1):
        best = math.inf
        for mass in _MASSES:
            levels = [counts.level(s, n, mass, low) for s, low in zip(held_out, lower, strict=True)]
            bits = -sum(float(np.log2(p).sum()) for p in levels)
            if bits < best:
                best, chosen, kept = bits, mass, levels
        masses.append(chosen)
        lower = kept
    return tuple(masses)


def ngram_baseline(
    name: str,
    train: Sequence[np.ndarray],
    validation: Sequence[np.ndarray],
    *,
    order: int,
    vocab_size: int,
    validation_bytes: int,
) -> Baseline:
    """Return the bits per byte of an n-gram model on the validation sequences."""
    masses = choose_masses(train, order=order, vocab_size=vocab_size)
    counts = NgramCounts(train, order=order, vocab_size=vocab_size)
    bits = sum(counts.bits(sequence, masses) for sequence in validation)
    return Baseline(name=name, bits_per_byte=bits / validation_bytes, masses=masses)


def _byte_sequence(text: str) -> np.ndarray:
    data = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)
    return np.concatenate([[_BYTE_START, _BYTE_START], data, [_BYTE_END]])


def text_baselines(
    train_texts: Sequence[str],
    validation_texts: Sequence[str],
    train_ids: Sequence[Sequence[int]],
    validation_ids: Sequence[Sequence[int]],
    *,
    vocab_size: int,
) -> tuple[Baseline, Baseline, Baseline]:
    """Return token unigram, token bigram and byte trigram, all on the same validation text.

    The ids of a document start with the begin marker, which is context only, and end with the
    end marker, which is predicted: the same targets that a model is scored on.
    """
    num_bytes = sum(len(text.encode("utf-8")) for text in validation_texts)
    tokens = [np.asarray(ids, dtype=np.int64) for ids in train_ids]
    held_out = [np.asarray(ids, dtype=np.int64) for ids in validation_ids]
    # A unigram has no context: the begin marker would otherwise count as a symbol to predict.
    size = {"vocab_size": vocab_size, "validation_bytes": num_bytes}
    return (
        ngram_baseline(
            "token unigram", [t[1:] for t in tokens], [t[1:] for t in held_out], order=1, **size
        ),
        ngram_baseline("token bigram", tokens, held_out, order=2, **size),
        ngram_baseline(
            "byte trigram",
            [_byte_sequence(text) for text in train_texts],
            [_byte_sequence(text) for text in validation_texts],
            order=3,
            vocab_size=_BYTE_START + 1,
            validation_bytes=num_bytes,
        ),
    )
