"""The global KV of one block as bytes, and back: what leaves the pools and may come in again.

One group per stream, owner after owner: its main entries, then its index keys, as the pools pack
them. Windows and open groups are not among them; a start replays those. A newcomer's mistake:
writing into a block that somebody else holds. Source: spec/kv-cache.md sections 4.1 and 8;
docs/cache-format.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from finwhale.cache.paged_pools import PagedLayout, PagedPools


def group_bytes(layout: PagedLayout) -> tuple[int, ...]:
    """Return the bytes of every group; their sum is `layout.block_bytes`."""
    found: list[int] = []
    for spec in layout.owners:
        rows = layout.entries_per_block(spec)
        found += [rows * layout.entry_bytes, rows * layout.key_bytes]
    return tuple(found)


def _streams(pools: PagedPools, block: int) -> list[Tensor]:
    """Return views [rows, bytes] uint8 of a block's rows, in the order of the groups."""
    found: list[Tensor] = []
    for spec in pools.layout.owners:
        rows = pools.block_rows(spec, block)
        found += [pools.main[spec.layer_id][rows], pools.index_k[spec.layer_id][rows]]
    return found


def read_block(pools: PagedPools, block: int) -> tuple[bytes, ...]:
    """Return a copy of a block's groups."""
    return tuple(rows.numpy().tobytes() for rows in _streams(pools, block))


def write_block(pools: PagedPools, block: int, groups: Sequence[bytes]) -> None:
    """Write what `read_block` gave into a block that the caller alone holds.

    Raises ValueError, and writes nothing, if the groups are not those of these pools.
    """
    wanted = group_bytes(pools.layout)
    found = tuple(len(group) for group in groups)
    if found != wanted:
        raise ValueError(f"groups: got lengths {found}, expected {wanted} of this layout")
    for rows, group in zip(_streams(pools, block), groups, strict=True):
        # A copy first: bytes are read-only, and the pool must not alias what the caller keeps.
        rows.copy_(torch.frombuffer(bytearray(group), dtype=torch.uint8).view(rows.shape))
