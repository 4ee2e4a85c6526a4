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


def visible_index_scores_ref(
    q: Tensor, weights: Tensor, keys: Tensor, first: Tensor, visible: Tensor
) -> Tensor:
    """Return `index_scores` where a token sees the entry, -inf elsewhere; differentiable.

    I[t, m] = sum_h w[t, h] * relu(q[t, h] . k[m])  for first[t] <= m < first[t] + visible[t]

    q        [B, T, HI, DI]  index queries after RoPE and rounding
    weights  [B, T, HI]      head weights, already scaled; may be negative
    keys     [B, M, DI]      index keys of the KV owner
    first    [B, T] int64    row of the first entry of the token's own document
    visible  [B, T] int64    entries of that document that the token sees; 0 gives a row of -inf
    returns  [B, T, M] fp32, entries numbered by row

    The gradient is that of the formula: 0 where the dot product is not above 0, and whatever
    comes in at a hidden entry is dropped, NaN too. T = 0 and M = 0 give an empty result. The
    rounding of D03 is passed straight through. Section 5.3.
    """
    num_entries = keys.shape[1]
    if 0 in (*q.shape[:2], num_entries):
        # Empty, and still attached to all three: their gradients are zeros, not None.
        return ((q.sum((2, 3)) + weights.sum(2))[..., None] + keys.sum(2)[:, None]).float()
    place = torch.arange(num_entries, device=q.device) - first.unsqueeze(-1)  # [B, T, M]
    hidden = (place < 0) | (place >= visible.unsqueeze(-1))
    return index_scores(q, weights, keys).masked_fill(hidden, -torch.inf)


def visible_index_scores_matmul(
    q: Tensor, weights: Tensor, keys: Tensor, first: Tensor, visible: Tensor
) -> Tensor:
    """Same contract as `visible_index_scores_ref`; in fp32 with a backward pass of two products.

    The bf16 form rounds between its steps, so it stays with the definition.
    """
    if q.dtype is not torch.float32 or not keys.shape[1] or not q.numel():
        return visible_index_scores_ref(q, weights, keys, first, visible)
    place = torch.arange(keys.shape[1], device=q.device) - first.unsqueeze(-1)  # [B, T, M]
    hidden = (place < 0) | (place >= visible.unsqueeze(-1))
    return _VisibleScoresFn.apply(q, weights, keys, hidden)


class _VisibleScoresFn(torch.autograd.Function):
    """I = sum_h w_h r_h, r_h = relu(q_h . k); the products are kept, nothing else of their size."""

    @staticmethod
    def forward(ctx, q: Tensor, weights: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        batch, tokens, heads, dim = q.shape
        flat = q.reshape(batch, tokens * heads, dim)
        products = (flat @ keys.transpose(1, 2)).relu_().view(batch, tokens, heads, -1)
        ctx.save_for_backward(flat, weights, keys, hidden, products)
        scores = (weights.unsqueeze(-2) @ products).squeeze(-2)  # [B, T, M]
        return scores.masked_fill_(hidden, -torch.inf)

    @staticmethod
    def backward(ctx, grad: Tensor):
        flat, weights, keys, hidden, products = ctx.saved_tensors
        grad = grad.masked_fill(hidden, 0.0)
        d_weights = (products @ grad.unsqueeze(-1)).squeeze(-1)  # [B, T, HI]
        pulled = weights.unsqueeze(-1) * grad.unsqueeze(-2)  # [B, T, HI, M]
        # The backward of relu: one pass, where a mask would take three.
        pulled = torch.ops.aten.threshold_backward(pulled, products, 0.0).flatten(1, 2)
        d_q = (pulled @ keys).view(*weights.shape, -1)
        return d_q, d_weights, pulled.transpose(1, 2) @ flat, None


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


# Exploration: counter-based draws, functions of (seed, layer, position, slot). The same entries
# come out on every device, in any batch layout and after a restart (spec/training.md II.4.2).
_MASK = (1 << 63) - 1


def _constant(value: int) -> int:
    """Return a 64-bit pattern as the int64 that has it."""
    return value - (1 << 64) if value >> 63 else value


# Odd multipliers of a well-known 64-bit finaliser; products wrap around.
_MULTIPLIERS = (_constant(0xBF58476D1CE4E5B9), _constant(0x94D049BB133111EB))
_STEP = _constant(0x9E3779B97F4A7C15)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return x >> bits with zeros shifted in."""
    return (x >> bits) & (_MASK >> (bits - 1))


def mixed(x: Tensor) -> Tensor:
    """Return a 64-bit hash of every int64 of x."""
    x = (x ^ _shifted(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shifted(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shifted(x, 31)


def drawn_fractions(seed: Tensor, salt: int, positions: Tensor, count: int) -> Tensor:
    """Return 24-bit numbers [..., count] int64 for every position, each below 2^24.

    seed       [] int64
    positions  [...] int64
    """
    slots = torch.arange(1, count + 1, device=positions.device)
    stream = mixed(seed * _STEP + salt)
    return _shifted(mixed(mixed(positions.unsqueeze(-1) + stream) + slots * _STEP), 40)


def add_explored(
    topk: Tensor,
    first: Tensor,
    visible: Tensor,
    positions: Tensor,
    *,
    count: int,
    seed: Tensor,
    salt: int,
    num_entries: int,
) -> Tensor:
    """Return `topk` with up to `count` random visible entries of the token's document behind it.

    The visible entries are cut into `count` equal stretches and one entry of each is drawn, so no
    two draws meet; a stretch shorter than one entry may stay empty.

    topk       [B, T, K] int64 rows of entries, -1 empty
    first      [B, T] int64 first entry of the token's document
    visible    [B, T] int64 entries of its document that the token sees
    positions  [B, T] int64 position in the document
    returns    [B, T, K + count] int64, no row twice, -1 where a slot stayed empty
    """
    edges = torch.arange(count + 1, device=topk.device) * visible.unsqueeze(-1) // max(1, count)
    start, size = edges[..., :-1], edges.diff(dim=-1)  # [B, T, count]
    drawn = start + ((drawn_fractions(seed, salt, positions, count) * size) >> 24)
    drawn = torch.where(size > 0, first.unsqueeze(-1) + drawn, num_entries)
    # One column more than there are entries takes the empty slots.
    chosen = torch.zeros(*topk.shape[:-1], num_entries + 1, dtype=torch.bool, device=topk.device)
    chosen.scatter_(-1, torch.where(topk < 0, num_entries, topk), True)
    chosen[..., num_entries] = True
    again = chosen.gather(-1, drawn)
    return torch.cat((topk, torch.where(again, -1, drawn)), dim=-1)
