"""Which documents repeat text that was seen before: exact copies and near copies.

Owns one rule. A document's shingles are the runs of 50 characters of its folded text (lower
case, blank runs as one blank). One run in 32 is sampled, by the value of its hash, so the same
run is sampled in every document. A document is a near copy when too large a share of its
sample was seen in the documents kept before it. The easy mistake: the share is of the *later*
document, so a chapter after its book is a copy and a book after one of its chapters is not;
`build_corpus` therefore feeds the training side first and is stricter on the other sides.
Refused: randomness; the same documents in the same order give the same answer everywhere.
"""

from __future__ import annotations

import hashlib
import re

import numpy as np

SHINGLE_CHARS = 50
SAMPLE_ONE_IN = 32
MIN_SAMPLE = 8

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_INVERSE = pow(_MULTIPLIER, -1, 2**64)
_BLOCK_BYTES = 2**20


def _byte_values() -> np.ndarray:
    """Return 256 spread-out uint64 values, the same on every machine."""
    digests = (hashlib.sha256(bytes([byte])).digest()[:8] for byte in range(256))
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def _powers(base: int, count: int) -> np.ndarray:
    """Return base**0 .. base**(count-1) modulo 2**64, uint64."""
    powers = np.full(count, base % 2**64, dtype=np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


_VALUES = _byte_values()
_UP = _powers(_MULTIPLIER, _BLOCK_BYTES + SHINGLE_CHARS)
_DOWN = _powers(_INVERSE, _BLOCK_BYTES + SHINGLE_CHARS)


def fold(text: str) -> bytes:
    """Return the text in lower case with every run of blanks as one blank, UTF-8."""
    return re.sub(r"\s+", " ", text.lower()).strip().encode("utf-8")


def _window_hashes(data: np.ndarray) -> np.ndarray:
    """Return one uint64 per run of SHINGLE_CHARS bytes of `data`.

    h[i] = sum_{j < 50} value[data[i + j]] * P**j  (mod 2**64), from a running sum S of
    value * P**position: h[i] = (S[i + 50] - S[i]) * P**-i. Then the bits are mixed, since the
    low bits of a sum modulo a power of two depend on few bits of its terms.
    """
    terms = _VALUES[data] * _UP[: len(data)]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    hashes = (sums[SHINGLE_CHARS:] - sums[:-SHINGLE_CHARS]) * _DOWN[: len(data) - SHINGLE_CHARS + 1]
    hashes ^= hashes >> np.uint64(31)
    hashes *= np.uint64(0xD6E8FEB86659FD93)
    return hashes ^ (hashes >> np.uint64(32))


def sampled_shingles(text: str, *, sample_one_in: int = SAMPLE_ONE_IN) -> np.ndarray:
    """Return the sorted distinct sampled shingle hashes of a text, uint64 [n], n may be 0."""
    data = np.frombuffer(fold(text), dtype=np.uint8)
    kept = [np.empty(0, dtype=np.uint64)]
    # Blocks overlap by one run less a byte, so every run lies in exactly one block.
    for start in range(0, len(data) - SHINGLE_CHARS + 1, _BLOCK_BYTES):
        hashes = _window_hashes(data[start : start + _BLOCK_BYTES + SHINGLE_CHARS - 1])
        kept.append(hashes[hashes % np.uint64(sample_one_in) == 0])
    return np.unique(np.concatenate(kept))


class SeenText:
    """What the documents kept so far contain."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._shingles: set[int] = set()

    def copy_reason(self, text: str, *, max_share: float) -> str | None:
        """Return "exact copy" or "near copy", or None for new text, which is then remembered.

        Near: more than `max_share` of the sampled shingles were seen. A document with fewer than
        MIN_SAMPLE sampled shingles (about 300 characters) is judged as an exact copy only.
        """
        digest = hashlib.sha256(fold(text)).digest()[:16]
        if digest in self._digests:
            return "exact copy"
        shingles = sampled_shingles(text).tolist()
        num_seen = sum(shingle in self._shingles for shingle in shingles)
        if len(shingles) >= MIN_SAMPLE and num_seen > max_share * len(shingles):
            return "near copy"
        self._digests.add(digest)
        self._shingles.update(shingles)
        return None
