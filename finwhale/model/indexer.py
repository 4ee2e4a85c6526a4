"""The indexer of a top-k owner: index keys, scores, selection, candidate pool.

One selection per query serves all its heads, and all Reuse layers after it. Scores are made in
query slices under a memory budget, so a long context never needs a [T, M] score matrix times the
heads. No gradient flows through a hard selection: a training plan's observer may take the scores
and teach the indexer, the language-model loss never does (D09). Source: spec/backbone.md section 5.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from finwhale.config import LayerSpec, PoolUse
from finwhale.model.layers import ForwardState, Linear, Parts, RMSNorm, rounded
from finwhale.ops.index import pool_mask

# Bytes of one slice's [queries, heads, keys] products: small enough to stay in a CPU's cache.
_SLICE_BYTES = 1 << 22


class Indexer(nn.Module):
    """`wq_b` and `weights_proj` of a top-k owner; `wk` and `k_norm` too where it owns the keys."""

    def __init__(self, parts: Parts, spec: LayerSpec):
        super().__init__()
        c = parts.config
        self.parts, self.spec = parts, spec
        self.wq_b = Linear(parts, c.q_lora_rank, c.index_n_heads * c.index_head_dim, "quantized")
        self.weights_proj = Linear(parts, c.hidden_size, c.index_n_heads, "plain")
        self.wk = Linear(parts, c.head_dim, c.index_head_dim, "plain") if spec.owns_kv else None
        self.k_norm = RMSNorm(parts, c.index_head_dim) if spec.owns_kv else None

    def make_keys(self, latent: Tensor, state: ForwardState) -> Tensor:
        """Return the owner's index keys [B, M, DI] from its un-rotated latent [B, M, D]."""
        ops, layer = self.parts.ops, self.spec.layer_id
        keys = self.k_norm(self.wk(latent))
        keys = ops.apply_rope(keys, state.entry_rotation(self.spec))
        state.note(f"index_k_raw.{layer}", keys)
        return state.cached(self.parts, ops.round_index, keys)

    def forward(self, x: Tensor, qr: Tensor, state: ForwardState) -> Tensor:
        """Return the selected entry rows of every query.

        x        [B, T, C] attention input; qr [B, T, q_lora_rank] normalised query latent
        returns  [B, T, K] int64, ascending, -1 padded
        """
        if state.plan is not None:
            return self._planned(x, qr, state)
        with torch.no_grad():
            return self._deployed(x, qr, state)

    def _queries(self, x: Tensor, qr: Tensor, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Return index queries [B, T, HI, DI] and scaled head weights [B, T, HI]."""
        c, ops, spec = self.parts.config, self.parts.ops, self.spec
        q = self.wq_b(qr).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        q = ops.apply_rope(q, state.query_rotation(spec))
        state.note(f"index_q_raw.{spec.layer_id}", q)
        q = rounded(self.parts, ops.round_index, q)
        weights = self.weights_proj(x) * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        state.note(f"index_weights.{spec.layer_id}", weights)
        return q, weights

    def _planned(self, x: Tensor, qr: Tensor, state: ForwardState) -> Tensor:
        """Select as the training plan says; scores carry a gradient if somebody watches them.

        The inputs are detached: only the indexer's own parameters learn from its scores.
        """
        spec, plan, groups = self.spec, state.plan, state.groups(self.spec)
        with torch.set_grad_enabled(torch.is_grad_enabled() and plan.observer is not None):
            q, weights = self._queries(x.detach(), qr.detach(), state)
            scores = self.parts.ops.visible_index_scores(
                q, weights, state.index_keys[spec.kv_owner], groups.first, groups.visible
            )
        with torch.no_grad():
            topk = plan.select(spec, scores.detach(), self.parts.config, self.parts.ops, state)
        if plan.observer is not None:
            plan.observer.scored(spec, scores, topk)
        return topk

    def _deployed(self, x: Tensor, qr: Tensor, state: ForwardState) -> Tensor:
        c, spec = self.parts.config, self.spec
        q, weights = self._queries(x, qr, state)
        if state.paged is not None:
            return state.paged.select(spec, q, weights)
        keys = state.index_keys[spec.kv_owner]
        batch, tokens, num_keys = q.shape[0], q.shape[1], keys.shape[1]
        step = max(1, _SLICE_BYTES // (4 * max(1, num_keys) * c.index_n_heads * batch))
        topk, pools = [], []
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            scores = self._scores(q[:, rows], weights[:, rows], keys, rows, state)
            selected, pool = self._select(scores, rows, state)
            topk.append(selected)
            pools.append(pool)
        if spec.pool is PoolUse.BUILDS and tokens:
            state.pool_blocks = torch.cat(pools, dim=1)
            if state.trace is not None:
                visible = state.groups(spec).visible.unsqueeze(-1)
                inside = pool_mask(state.pool_blocks, num_keys, c.candidate_block_size)
                inside &= torch.arange(num_keys, device=q.device) < visible
                state.note(f"candidates.{spec.layer_id}", inside)
        width = min(c.index_topk, num_keys)
        return torch.cat(topk, dim=1) if topk else q.new_empty(batch, 0, width, dtype=torch.int64)

    def _scores(self, q, weights, keys, rows: slice, state: ForwardState) -> Tensor:
        """Return scores [B, C, M] with entries numbered from each document's start."""
        groups, ops = state.groups(self.spec), self.parts.ops
        visible = groups.visible[:, rows]
        last = int((groups.first[:, rows] + visible).max()) if visible.numel() else 0
        scores = ops.index_scores(q, weights, keys[:, :last])
        if state.stale_keys is not None and self.spec.ratio > 1:
            stale = ops.index_scores(q, weights, state.stale_keys[:, :last])
            rows_stale = state.stale_rows[:, rows, None]
            scores = torch.where(rows_stale, stale, scores)
        if not state.packing.is_single:
            longest = int(visible.max()) if visible.numel() else 0
            own = groups.first[:, rows, None] + torch.arange(longest, device=q.device)
            scores = scores.gather(-1, own.clamp_max(max(0, last - 1)))
        hidden = torch.arange(scores.shape[-1], device=q.device) >= visible.unsqueeze(-1)
        return scores.masked_fill(hidden, -torch.inf)

    def _select(self, scores: Tensor, rows: slice, state: ForwardState):
        c, ops, spec = self.parts.config, self.parts.ops, self.spec
        groups = state.groups(spec)
        num_keys = state.index_keys[spec.kv_owner].shape[1]
        blocks = None
        if spec.pool is PoolUse.BUILDS:
            blocks = ops.select_pool_blocks(
                scores, groups.visible[:, rows], c.candidate_topk_blocks, c.candidate_block_size
            )
            total = min(c.candidate_topk_blocks, -(-num_keys // c.candidate_block_size))
            blocks = _pad_slots(blocks, total)
        elif spec.pool is PoolUse.SEARCHES:
            inside = pool_mask(
                state.pool_blocks[:, rows],
                max(num_keys, scores.shape[-1]),
                c.candidate_block_size,
            )[..., : scores.shape[-1]]
            scores = scores.masked_fill(~inside, -torch.inf)
        if state.trace is not None:
            state.trace.setdefault(f"index_scores.{spec.layer_id}", []).append(scores.clone())
        chosen = ops.select_topk(scores, c.index_topk)
        if not state.packing.is_single:
            chosen = torch.where(chosen < 0, -1, chosen + groups.first[:, rows, None])
        return _pad_slots(chosen, min(c.index_topk, num_keys)), blocks


def _pad_slots(slots: Tensor, width: int) -> Tensor:
    """Return `slots` [..., n] widened with -1: a slice sees fewer keys than the whole."""
    return torch.nn.functional.pad(slots, (0, width - slots.shape[-1]), value=-1)
