"""The memory of an engine: pools of packed rows, and how many bytes each part takes.

One block id addresses `block_size` tokens in every global KV stream, so streams of ratio 1 and 2
cannot strand each other's memory. Rows are stored packed and nothing else is kept: there is no
float copy. What a sequence holds whatever its length (window rings, open groups) lies in slots.
A newcomer's mistake: taking `num_blocks * block_size` as the longest context; it is the sum over
all sequences. Source: spec/kv-cache.md sections 1.1 and 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from finwhale.config import ConfigError, LayerSpec, TextConfig, build_layer_specs

# 0xFF reads as NaN in every packed format: E4M3 code, E4M3 scale, UE8M0 scale, bf16 and fp32.
_POISON = 0xFF


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedLayout:
    """Bytes per row and rows per block, from the config alone."""

    config: TextConfig
    block_size: int
    storage: str
    specs: tuple[LayerSpec, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", build_layer_specs(self.config))
        if self.block_size % self.ratio_multiple:
            raise ConfigError(
                f"engine.block_size: got {self.block_size}, expected a multiple of "
                f"{self.ratio_multiple}, the entries' ratios"
            )

    @property
    def ratio_multiple(self) -> int:
        """Smallest number of tokens that leaves no group open."""
        return math.lcm(*(spec.ratio for spec in self.owners), 1)

    @property
    def owners(self) -> tuple[LayerSpec, ...]:
        """The layers that make entries and index keys."""
        return tuple(spec for spec in self.specs if spec.owns_kv)

    @property
    def entry_bytes(self) -> int:
        """288 in the release: 512 E2M1 codes and 32 E4M3 scales."""
        return self._row_bytes(self.config.head_dim, 2, 16)

    @property
    def key_bytes(self) -> int:
        """68 in the release: 128 E2M1 codes and 4 UE8M0 scales."""
        return self._row_bytes(self.config.index_head_dim, 2, 32)

    @property
    def window_bytes(self) -> int:
        """528 in the release: 512 E4M3 codes and 16 UE8M0 scales."""
        return self._row_bytes(self.config.head_dim, 1, 32)

    def _row_bytes(self, dim: int, codes_per_byte: int, group: int) -> int:
        if self.storage == "fp4":
            return dim // codes_per_byte + dim // group
        return {"bf16": 2, "fp32": 4}[self.storage] * dim

    def entries_per_block(self, spec: LayerSpec) -> int:
        """Return the entries that a block holds of one owner's streams."""
        return self.block_size // spec.ratio

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all streams: 56,960 in the release at 64 tokens."""
        rows = sum(self.entries_per_block(spec) for spec in self.owners)
        return rows * (self.entry_bytes + self.key_bytes)

    @property
    def bytes_per_token(self) -> float:
        """Global KV of a token in a full block: 890 in the release."""
        return self.block_bytes / self.block_size

    @property
    def ring_rows(self) -> int:
        """Rows of a window ring: a window, and back to the last block end."""
        return self.config.sliding_window - 1 + self.block_size

    @property
    def slot_bytes(self) -> int:
        """Fixed bytes of one sequence: rings of all layers and open groups."""
        groups = sum(spec.ratio - 1 for spec in self.owners) * 8 * self.config.head_dim
        return len(self.specs) * self.ring_rows * self.window_bytes + groups


class PagedPools:
    """The tensors. Keyed by layer id.

    main[L]    [num_blocks * entries, entry_bytes] uint8
    index_k[L] [num_blocks * entries, key_bytes] uint8
    window[L]  [num_slots * ring_rows, window_bytes] uint8
    open[L]    [num_slots * (ratio - 1), 2, D] fp32 content and gate of an unfinished group
    """

    def __init__(
        self, layout: PagedLayout, *, num_blocks: int, num_slots: int, poison: bool = False
    ):
        self.layout, self.num_blocks, self.num_slots = layout, num_blocks, num_slots
        self.poison = poison
        self.main: dict[int, Tensor] = {}
        self.index_k: dict[int, Tensor] = {}
        self.window: dict[int, Tensor] = {}
        self.open: dict[int, Tensor] = {}
        for spec in layout.specs:
            rows = num_slots * layout.ring_rows
            self.window[spec.layer_id] = _empty(rows, layout.window_bytes, poison)
            if not spec.owns_kv:
                continue
            rows = num_blocks * layout.entries_per_block(spec)
            self.main[spec.layer_id] = _empty(rows, layout.entry_bytes, poison)
            self.index_k[spec.layer_id] = _empty(rows, layout.key_bytes, poison)
            shape = num_slots * (spec.ratio - 1), 2, layout.config.head_dim
            self.open[spec.layer_id] = torch.full(shape, torch.nan)

    def block_rows(self, spec: LayerSpec, block: int) -> slice:
        """Return the pool rows of one block of an owner's streams."""
        size = self.layout.entries_per_block(spec)
        return slice(block * size, (block + 1) * size)

    def forget_block(self, block: int) -> None:
        """Poison a block, if this pool poisons: what nobody has written yet reads as NaN."""
        if self.poison:
            for spec in self.layout.owners:
                rows = self.block_rows(spec, block)
                self.main[spec.layer_id][rows] = _POISON
                self.index_k[spec.layer_id][rows] = _POISON

    def forget_slot(self, slot: int) -> None:
        """Poison the rings and open groups of a slot that was given back, if this pool poisons."""
        if self.poison:
            for pool in self.window.values():
                pool[self._ring(slot)] = _POISON
            for owner, pool in self.open.items():
                pool[self._open_rows(owner, slot)] = torch.nan

    def save_windows(self, slot: int, start: int, stop: int) -> Tensor:
        """Return the packed window rows of positions [start, stop), all layers: [L, n, bytes]."""
        rows = slot * self.layout.ring_rows + torch.arange(start, stop) % self.layout.ring_rows
        return torch.stack([pool[rows] for pool in self.window.values()])

    def restore_windows(self, slot: int, stop: int, saved: Tensor) -> None:
        """Write what `save_windows` gave, ending at position `stop`."""
        positions = torch.arange(stop - saved.shape[1], stop)
        rows = slot * self.layout.ring_rows + positions % self.layout.ring_rows
        for pool, own in zip(self.window.values(), saved, strict=True):
            pool[rows] = own

    def _ring(self, slot: int) -> slice:
        return slice(slot * self.layout.ring_rows, (slot + 1) * self.layout.ring_rows)

    def _open_rows(self, owner: int, slot: int) -> slice:
        size = self.open[owner].shape[0] // self.num_slots
        return slice(slot * size, (slot + 1) * size)

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of the tensors' storages by kind, as allocated."""
        return {
            kind: sum(pool.untyped_storage().nbytes() for pool in getattr(self, kind).values())
            for kind in ("main", "index_k", "window", "open")
        }


def _empty(rows: int, width: int, poison: bool) -> Tensor:
    pool = torch.empty(rows, width, dtype=torch.uint8)
    return pool.fill_(_POISON) if poison else pool
