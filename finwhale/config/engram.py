"""Sizes of the Engram hash tables: one prime bucket count per (layer, n-gram order, head).

The primes are handed out in increasing order and never twice; the rows of one layer's
table are the sum of its primes. The release's search starts anew at every order and skips the
primes already used, which finds the next unused one: one search through all layers gives the same.
A newcomer's mistake: starting anew without that set. Source: spec/backbone.md section 7.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramBuckets:
    """Hash columns of one Engram layer; column = (order - 2) * n_heads + head."""

    primes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.primes)


def _is_prime(n: int) -> bool:
    if n < 2 or n % 2 == 0:
        return n == 2
    divisor = 3
    while divisor * divisor <= n:
        if n % divisor == 0:
            return False
        divisor += 2
    return True


def engram_buckets(
    *, num_layers: int, max_ngram_size: int, n_heads: int, vocab_size: int
) -> tuple[EngramBuckets, ...]:
    """Return the bucket primes and row offsets of each Engram layer, in layer order.

    `vocab_size` is the released `engram_vocab_size`; the first prime is above
    `vocab_size - 1`. spec/backbone.md section 7.3.
    """
    layers = []
    candidate = vocab_size - 1
    for _ in range(num_layers):
        primes: list[int] = []
        for _ in range((max_ngram_size - 1) * n_heads):
            candidate += 1
            while not _is_prime(candidate):
                candidate += 1
            primes.append(candidate)
        offsets = (0, *accumulate(primes))[:-1]
        layers.append(EngramBuckets(primes=tuple(primes), offsets=offsets))
    return tuple(layers)
