"""How a training pass selects entries, where it differs from the deployed model.

The deployed model takes the k best entries. Training may take more of them (k annealed from the
dense case), add random ones so that an entry nobody selected still gets a target, leave the
candidate pool out (the report brings it in after pre-training) or cut windows as a replay would.
Everything here has a static shape and asks the device nothing, so a pass can be captured in a CUDA
graph. Rows and entries are numbered in the packed row; blocks of the pool from the document's
start, as in the deployed model. Source: spec/training.md sections 1 and II.1.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from finwhale.config import LayerSpec, PoolUse
from finwhale.config.layers import Half
from finwhale.ops import Ops
from finwhale.ops.index import add_explored, pool_mask


class IndexObserver(Protocol):
    """Who watches the indexers of a pass: the indexer objective, or a measurement."""

    def scored(self, spec: LayerSpec, scores: Tensor, topk: Tensor) -> None:
        """Take the scores [B, T, M] (with a gradient) and the selection [B, T, K] of an owner."""

    def wants_mass(self, spec: LayerSpec) -> bool:
        """Return whether `attended` needs this layer's attention mass."""

    def attended(self, spec: LayerSpec, mass: Tensor | None, attention_inputs: tuple) -> None:
        """Take the head-summed attention mass [B, T, M] of one layer over its entries, if wanted.

        attention_inputs  the arguments that `Ops.sparse_attention` got
        """


# Entries of one slice of a selection: half a gigabyte of 8-byte places.
_SLICE_ENTRIES = 1 << 26


class RouterObserver(Protocol):
    """Who watches the routers of a pass: load balance."""

    def routed(self, spec: LayerSpec, ids: Tensor, logits: Tensor, is_image: Tensor | None) -> None:
        """Take the chosen experts [N, k] and the router logits [N, X] of one layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionPlan:
    """What one training pass does differently, and who watches it.

    topk           entries per query; None: `index_topk`
    explore        random visible entries added to every query's selection
    explore_seed   [] int64, another one for every step; None: nothing is explored
    uses_pool      whether Reindex layers search the candidate pool only
    encoder_replay_start, decoder_replay_start
                   [B, T] int64 position at which a simulated replay of the token's document starts,
                   or None: windows of that half see nothing before it once the token is at or
                   behind it
    observer       watches scores and attention mass; None: the indexer gets no gradient
    router_observer  watches the experts chosen; None: nobody counts
    """

    topk: int | None = None
    explore: int = 0
    explore_seed: Tensor | None = None
    uses_pool: bool = False
    encoder_replay_start: Tensor | None = None
    decoder_replay_start: Tensor | None = None
    observer: IndexObserver | None = None
    router_observer: RouterObserver | None = None

    def reach(self, spec: LayerSpec, positions: Tensor) -> Tensor:
        """Return [B, T] how many rows before each token its window may see at most."""
        is_decoder = spec.half is Half.DECODER
        start = self.decoder_replay_start if is_decoder else self.encoder_replay_start
        if start is None:
            return positions
        return torch.where(positions >= start, positions - start, positions)

    def select(self, spec: LayerSpec, scores: Tensor, config, ops: Ops, state) -> Tensor:
        """Return the selected rows of the owner's entries, [B, T, K + explore] int64, -1 empty.

        scores  [B, T, M] in row numbering, -inf outside the token's document and past
        """
        groups = state.groups(spec)
        if self.uses_pool and spec.pool is PoolUse.BUILDS:
            relative = _from_document_start(scores, groups.first)
            state.pool_blocks = ops.select_pool_blocks(
                relative, groups.visible, config.candidate_topk_blocks, config.candidate_block_size
            )
        elif self.uses_pool and spec.pool is PoolUse.SEARCHES:
            scores = _inside_pool(
                scores, groups.first, state.pool_blocks, config.candidate_block_size
            )
        topk = ops.select_topk(scores, self.topk or config.index_topk)
        if not self.explore or self.explore_seed is None:
            return topk
        return add_explored(
            topk, groups.first, groups.visible, state.packing.positions,
            count=self.explore, seed=self.explore_seed, salt=spec.layer_id,
            num_entries=scores.shape[-1],
        )  # fmt: skip


def _from_document_start(scores: Tensor, first: Tensor) -> Tensor:
    """Return scores [B, T, M] whose entry 0 is the first of the token's document."""
    total = scores.shape[-1]
    moved = []
    for rows in _row_slices(scores):
        own = first[:, rows].unsqueeze(-1) + torch.arange(total, device=scores.device)
        part = scores[:, rows].gather(-1, own.clamp_max(max(0, total - 1)))
        moved.append(part.masked_fill_(own >= total, -torch.inf))
    return moved[0] if len(moved) == 1 else torch.cat(moved, dim=1)


def _inside_pool(scores: Tensor, first: Tensor, pool_blocks: Tensor, block: int) -> Tensor:
    """Return scores [B, T, M] that are -inf outside each token's candidate pool."""
    total = scores.shape[-1]
    kept = []
    for rows in _row_slices(scores):
        inside = pool_mask(pool_blocks[:, rows], total, block)
        own = torch.arange(total, device=scores.device) - first[:, rows].unsqueeze(-1)
        outside = ~inside.gather(-1, own.clamp_min(0))
        kept.append(scores[:, rows].masked_fill(outside, -torch.inf))
    return kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)


def _row_slices(scores: Tensor) -> list[slice]:
    """Return slices of the tokens of [B, T, M] that bound what an index of 8 bytes each takes."""
    batch, tokens, entries = scores.shape
    size = max(1, _SLICE_ENTRIES // max(1, batch * entries))
    return [slice(start, start + size) for start in range(0, max(1, tokens), size)]
