"""The indexer's arithmetic: scores, exact top-k with a stated tie rule, the candidate pool.

Entries are numbered from the start of a query's document. Ties go to the lowest position: ReLU
makes exact zeros common, so without a rule the selection would depend on the backend (D01). NaN
scores count as minus infinity. Source: spec/backbone.md sections 5.3 to 5.5.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return I[t, m] = sum_h w[t, h] * relu(q[t, h] . k[m]), without masking.

    q        [B, T, HI, DI]  index queries after RoPE and rounding
    weights  [B, T, HI]      head weights, already scaled; may be negative
    keys     [B, M, DI]      index keys of the KV owner
    returns  [B, T, M] fp32

    The dot products, their weighting and the head sum take the dtype of q, as in the reference
    (D03). Section 5.3.
    """
    batch, tokens, heads, dim = q.shape
    flat = q.reshape(batch, tokens * heads, dim).float()
    dots = (flat @ keys.float().transpose(1, 2)).to(q.dtype).view(batch, tokens, heads, -1)
    weighted = dots.relu_() * weights.to(q.dtype).unsqueeze(-1)
    return weighted.float().sum(dim=2).to(q.dtype).float()


def index_scores_matmul(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Same contract as `index_scores`; in fp32 the head sum is a matrix product.

    The bf16 form rounds between its steps, so it stays with the definition.
    """
    if q.dtype is not torch.float32:
        return index_scores(q, weights, keys)
    batch, tokens, heads, dim = q.shape
    dots = q.reshape(batch, tokens * heads, dim) @ keys.transpose(1, 2)
    dots = dots.relu_().view(batch, tokens, heads, -1)
    return (weights.unsqueeze(-2) @ dots).squeeze(-2)


def select_topk_ref(scores: Tensor, k: int) -> Tensor:
    """Return the positions of the k best scores per row, ascending; -1 pads unreachable slots.

    scores   [..., M] fp32; -inf (and NaN) marks entries that may not be selected
    returns  [..., min(k, M)] int64

    Equal scores: the lowest position wins. Section 5.4; D01.
    """
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    k = min(k, scores.shape[-1])
    chosen = torch.where(best[..., :k].isneginf(), scores.shape[-1], order[..., :k])
    chosen = chosen.sort(dim=-1).values
    return torch.where(chosen == scores.shape[-1], -1, chosen)


def select_topk(scores: Tensor, k: int) -> Tensor:
    """Same contract as `select_topk_ref`, from a threshold instead of a full stable sort."""
    total = scores.shape[-1]
    k = min(k, total)
    if k == 0:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.int64, device=scores.device)
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    threshold = scores.topk(k, dim=-1).values[..., -1:]
    above, level = scores > threshold, scores == threshold
    room = k - above.sum(-1, keepdim=True)
    keep = above | (level & (level.cumsum(-1) <= room))
    keep &= ~scores.isneginf()
    slot = torch.where(keep, keep.cumsum(-1) - 1, k)
    chosen = torch.full((*scores.shape[:-1], k + 1), -1, dtype=torch.int64, device=scores.device)
    chosen.scatter_(-1, slot, torch.arange(total, device=scores.device).expand(scores.shape))
    return chosen[..., :k]


def select_pool_blocks(
    scores: Tensor, visible: Tensor, num_blocks: int, block_size: int, select=select_topk
) -> Tensor:
    """Return the blocks of the candidate pool of each query, ascending; -1 pads.

    A block's score is the best of its `block_size` positions; the block of the newest visible
    entry is always in; nothing else is pinned.

    scores   [..., M] fp32, -inf where an entry is not visible
    visible  [...] int64 number of visible entries
    returns  [..., min(num_blocks, ceil(M / block_size))] int64

    Section 5.5; ties as in `select_topk`.
    """
    pad = -scores.shape[-1] % block_size
    padded = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf)
    best = padded.unflatten(-1, (-1, block_size))
    best = torch.where(best.isnan(), -torch.inf, best).amax(-1)
    newest = ((visible - 1) // block_size).unsqueeze(-1)
    is_newest = torch.arange(best.shape[-1], device=scores.device) == newest
    best = torch.where(is_newest, torch.inf, best)
    return select(best, num_blocks)


def pool_mask(blocks: Tensor, num_entries: int, block_size: int) -> Tensor:
    """Return [..., M] bool: the entries that lie in a query's pool blocks.

    blocks   [..., P] int64 from `select_pool_blocks`; -1 is no block
    """
    total = -(-num_entries // block_size)
    inside = torch.zeros(*blocks.shape[:-1], total + 1, dtype=torch.bool, device=blocks.device)
    inside.scatter_(-1, torch.where(blocks < 0, total, blocks), True)
    return inside[..., :total].repeat_interleave(block_size, dim=-1)[..., :num_entries]
