"""Best-fit packing: documents of any length into rows of T positions, with their borders.

A document of n tokens gives n - 1 (input, target) pairs. It is cut into pieces of at most T
pairs; pieces share no pair, so every token but a document's first is a target exactly once and
no target belongs to another document. What follows the last piece of a row is padding, a piece
of its own without targets. A newcomer's mistake: shifting targets after packing, which makes
the last token of one document predict the first of the next.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finwhale.ops.head_loss import NO_TARGET


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """Packed pairs: `R` rows of `T` positions.

    inputs   [R, T] int32  token ids, the pad id after the last piece
    targets  [R, T] int32  id to predict at each position, NO_TARGET on padding
    lengths  one tuple per row: the lengths of its pieces, summing to at most T
    """

    inputs: np.ndarray
    targets: np.ndarray
    lengths: tuple[tuple[int, ...], ...]

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_targets(self) -> int:
        return int((self.targets != NO_TARGET).sum())

    @property
    def padding_rate(self) -> float:
        """Share of positions that carry no target."""
        return 1 - self.num_targets / max(1, self.targets.size)


def pack(
    documents: Sequence[Sequence[int]],
    *,
    sequence_length: int,
    pad_id: int,
    are_targets: Sequence[np.ndarray] | None = None,
) -> PackedRows:
    """Return the documents packed into rows of `sequence_length` positions.

    are_targets  per document [n] bool: which of its tokens are to be predicted; None: all

    Longest piece first, each into the fullest row that has room (best fit decreasing); equal
    choices go to the earliest, so the result depends on the documents alone. A document of
    fewer than two tokens has no pair and is left out.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length: got {sequence_length}, expected at least 1")
    pieces: list[tuple[int, int, int]] = []  # (length, document, start)
    for index, tokens in enumerate(documents):
        pairs = len(tokens) - 1
        for start in range(0, pairs, sequence_length):
            pieces.append((min(sequence_length, pairs - start), index, start))
    pieces.sort(key=lambda piece: (-piece[0], piece[1], piece[2]))
    rows: list[list[tuple[int, int, int]]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted; full rows leave the list
    for piece in pieces:
        length = piece[0]
        at = bisect.bisect_left(open_rows, (length, -1))
        if at == len(open_rows):
            room, row = sequence_length, len(rows)
            rows.append([])
        else:
            room, row = open_rows.pop(at)
        rows[row].append(piece)
        if room > length:
            bisect.insort(open_rows, (room - length, row))
    return _fill(documents, rows, sequence_length, pad_id, are_targets)


def _fill(
    documents: Sequence[Sequence[int]],
    rows: list[list[tuple[int, int, int]]],
    sequence_length: int,
    pad_id: int,
    are_targets: Sequence[np.ndarray] | None,
) -> PackedRows:
    inputs = np.full((len(rows), sequence_length), pad_id, dtype=np.int32)  # [R, T]
    targets = np.full((len(rows), sequence_length), NO_TARGET, dtype=np.int32)  # [R, T]
    arrays = [np.asarray(tokens, dtype=np.int32) for tokens in documents]
    for row, pieces in enumerate(rows):
        at = 0
        for length, index, start in pieces:
            inputs[row, at : at + length] = arrays[index][start : start + length]
            wanted = arrays[index][start + 1 : start + length + 1]
            if are_targets is not None:
                wanted = np.where(
                    are_targets[index][start + 1 : start + length + 1], wanted, NO_TARGET
                )
            targets[row, at : at + length] = wanted
            at += length
    lengths = tuple(tuple(piece[0] for piece in pieces) for pieces in rows)
    return PackedRows(inputs=inputs, targets=targets, lengths=lengths)
