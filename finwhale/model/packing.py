"""Where documents begin in a batch of rows, and what follows from it.

Positions, windows, compression groups, visible entries and n-grams restart at every document,
so a packed row gives each document what it would get alone. Entries of all documents of a row
lie one after the other in one array; an odd document leaves an unfinished group that no query
sees. Source: spec/backbone.md section 4.4; training.md section 1 (sample-level masking).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
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
    lengths       document lengths per row, padding included
    known_groups  groups per ratio where `prepared` made them
    """

    positions: Tensor
    is_single: bool
    lengths: tuple[tuple[int, ...], ...]
    known_groups: dict[int, Groups] | None = None

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
        positions = np.zeros((len(full), tokens), dtype=np.int64)
        for b, row in enumerate(full):
            positions[b] = _counted(np.array(row, dtype=np.int64))
        positions = torch.from_numpy(positions).to(device)
        is_single = all(len(row) == 1 for row in full)
        return cls(positions=positions, is_single=is_single, lengths=tuple(full))

    def groups(self, ratio: int) -> Groups:
        """Return the compression groups at `ratio`."""
        if self.known_groups is not None:
            return self.known_groups[ratio]
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
        width = tokens // ratio  # documents together never complete more groups
        group_tokens = np.zeros((batch, width, ratio), dtype=np.int64)
        group_positions = np.zeros((batch, width), dtype=np.int64)
        first = np.zeros((batch, tokens), dtype=np.int64)
        for b, row in enumerate(self.lengths):
            lengths = np.array(row, dtype=np.int64)
            counts = lengths // ratio
            starts, entries = (np.cumsum(x) - x for x in (lengths, counts))
            own = _counted(counts) * ratio  # position of each group's first token
            rows = np.repeat(starts, counts) + own
            group_tokens[b, : len(own)] = rows[:, None] + np.arange(ratio)
            group_positions[b, : len(own)] = own
            first[b] = np.repeat(entries, lengths)
        return Groups(
            tokens=torch.from_numpy(group_tokens).to(device),
            positions=torch.from_numpy(group_positions).to(device),
            first=torch.from_numpy(first).to(device),
            visible=visible,
        )

    def prepared(self, ratios: Iterable[int], device: torch.device | str) -> Packing:
        """Return this layout on `device` with its groups made: asking for them copies nothing.

        Every array has a shape that depends on [B, T] alone.
        """
        groups = {r: _moved(self.groups(r), device) for r in ratios}
        positions = self.positions.contiguous().to(device)
        return replace(self, is_single=False, positions=positions, known_groups=groups)


def _counted(lengths: np.ndarray) -> np.ndarray:
    """Return 0 .. n-1 for every n in `lengths`, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _moved(groups: Groups, device: torch.device | str) -> Groups:
    named = {f.name: getattr(groups, f.name) for f in fields(groups)}
    # Own memory: where nothing has to be copied, two arrays of a layout could share theirs.
    return Groups(
        **{
            name: value.clone(memory_format=torch.contiguous_format).to(device)
            for name, value in named.items()
        }
    )
