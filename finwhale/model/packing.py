"""Where documents begin in a batch of rows, and what follows from it.

Positions, windows, compression groups, visible entries and n-grams restart at every document,
so a packed row gives each document what it would get alone. Entries of all documents of a row
lie one after the other in one array; an odd document leaves an unfinished group that no query
sees. Source: spec/backbone.md section 4.4; training.md section 1 (sample-level masking).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The compression groups of a batch at one ratio.

    tokens     [B, M, r] int64 rows of the tokens of each entry (0 where the slot is unused)
    positions  [B, M] int64 position of the group's first token in its document
    first      [B, T] int64 index of the first entry of a token's document
    visible    [B, T] int64 entries of its document that a token sees: floor((position + 1) / r)
    """

    tokens: Tensor
    positions: Tensor
    first: Tensor
    visible: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Document layout of a batch of token rows.

    positions     [B, T] int64 position of each token in its document
    is_single     every row is one document
    """

    positions: Tensor
    is_single: bool
    lengths: tuple[tuple[int, ...], ...]

    @classmethod
    def whole(cls, batch: int, tokens: int, device=None) -> Packing:
        """Return the layout of `batch` rows that are one document each."""
        positions = torch.arange(tokens, device=device).expand(batch, tokens)
        return cls(positions=positions, is_single=True, lengths=((tokens,),) * batch)

    @classmethod
    def from_lengths(cls, rows: list[list[int]], tokens: int | None = None, device=None) -> Packing:
        """Return the layout of rows of documents; padding at a row's end is one more document.

        rows    document lengths per row, in order
        tokens  row length T; defaults to the longest row

        Raises ValueError for a length below 1 or a row longer than T.
        """
        sums = [sum(row) for row in rows]
        tokens = max(sums, default=0) if tokens is None else tokens
        full = []
        for n, (row, total) in enumerate(zip(rows, sums, strict=True)):
            if any(length < 1 for length in row) or total > tokens:
                raise ValueError(
                    f"packing: row {n} has lengths {list(row)}, expected positive lengths whose "
                    f"sum is at most {tokens}"
                )
            full.append((*row, tokens - total) if total < tokens else tuple(row))
        positions = torch.tensor(
            [[p for length in row for p in range(length)] for row in full], device=device
        ).view(len(full), tokens)
        is_single = all(len(row) == 1 for row in full)
        return cls(positions=positions, is_single=is_single, lengths=tuple(full))

    def groups(self, ratio: int) -> Groups:
        """Return the compression groups at `ratio`."""
        batch, tokens = self.positions.shape
        device = self.positions.device
        visible = (self.positions + 1) // ratio
        if self.is_single:
            count = tokens // ratio
            rows = torch.arange(count * ratio, device=device).view(1, count, ratio)
            return Groups(
                tokens=rows.expand(batch, -1, -1),
                positions=rows[..., 0].expand(batch, -1),
                first=torch.zeros_like(visible),
                visible=visible,
            )
        counts = [[length // ratio for length in row] for row in self.lengths]
        width = max((sum(row) for row in counts), default=0)
        group_tokens = torch.zeros(batch, width, ratio, dtype=torch.int64)
        group_positions = torch.zeros(batch, width, dtype=torch.int64)
        first = torch.zeros(batch, tokens, dtype=torch.int64)
        for b, row in enumerate(self.lengths):
            start = entry = 0
            for length, count in zip(row, counts[b], strict=True):
                own = torch.arange(count * ratio).view(count, ratio)
                group_tokens[b, entry : entry + count] = start + own
                group_positions[b, entry : entry + count] = own[:, 0]
                first[b, start : start + length] = entry
                start, entry = start + length, entry + count
        return Groups(
            tokens=group_tokens.to(device),
            positions=group_positions.to(device),
            first=first.to(device),
            visible=visible,
        )
