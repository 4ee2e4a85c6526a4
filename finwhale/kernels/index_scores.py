"""Index scores of the visible entries as Triton kernels, forward and backward, and the selection.

Owns the kernels, their launch table and the autograd function; the meaning is that of
`ops.index.visible_index_scores_ref`. It refuses shapes and dtypes it cannot run and says why; it
never falls back. A newcomer expects one pass for the backward: it is two, one that owns query
rows and one that owns entries, so that no program adds to another's memory and the result is the
same bits each time. Nothing of size [T, HI, M] is ever stored.

`torch.topk` finds the value of the k-th best score; a kernel with a program per query then writes
the positions above it and, of those exactly at it, the lowest ones, in ascending order (D01). A
library top-k alone would break ties as its threads happen to run. Source: spec/backbone.md 5.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Programs that keep a large GPU busy: a few for each of its 100 to 150 processors.
_PROGRAMS_WANTED = 512
_MOST_SPLITS = 16
# Scores of a row that one program of the selection holds.
_MAX_ENTRIES = 65536


class IndexScoresUnsupportedError(ValueError):
    """These inputs cannot run in the kernels; the message names the cause and the remedy."""


@dataclass(frozen=True, kw_only=True)
class _Launch:
    tile: int  # query tokens of one program
    forward_block: int  # entries of one forward program
    backward_block: int  # entries of one backward step
    num_warps: int
    num_stages: int

    def options(self, block: int) -> dict[str, Any]:
        """Return what a kernel over blocks of `block` entries is compiled with."""
        stages = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {"BT": self.tile, "BM": block, **stages}


# fp32 has no tensor cores at full precision, so its tiles are what the registers hold.
_LAUNCH = {
    torch.bfloat16: _Launch(
        tile=64, forward_block=128, backward_block=64, num_warps=4, num_stages=3
    ),
    torch.float32: _Launch(tile=32, forward_block=32, backward_block=32, num_warps=4, num_stages=2),
}


def visible_index_scores_unsupported(
    q: Tensor, weights: Tensor, keys: Tensor, first: Tensor, visible: Tensor
) -> str | None:
    """Return why `visible_index_scores_triton` cannot take these inputs, or None if it can."""
    if q.ndim != 4:
        return f"q has shape {tuple(q.shape)}, not [B, T, HI, DI]: give all heads in one tensor"
    batch, tokens, heads, dim = q.shape
    shapes = {
        "weights": (weights, (batch, tokens, heads)),
        "keys": (keys, (batch, keys.shape[1] if keys.ndim == 3 else -1, dim)),
        "first": (first, (batch, tokens)),
        "visible": (visible, (batch, tokens)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            return f"{name} has shape {tuple(tensor.shape)}, not {shape}: match it to q"
        if tensor.device != q.device:
            return f"{name} is on {tensor.device} and q on {q.device}: move it"
    if q.dtype not in _LAUNCH:
        return f"q is {q.dtype}: cast to bfloat16 or float32"
    if keys.dtype != q.dtype:
        return f"keys are {keys.dtype} and q is {q.dtype}: cast them to one dtype"
    if weights.dtype not in _LAUNCH:
        return f"weights are {weights.dtype}: cast to bfloat16 or float32"
    for name, tensor in (("first", first), ("visible", visible)):
        if tensor.dtype not in (torch.int64, torch.int32):
            return f"{name} is {tensor.dtype}: cast to int64"
    if dim not in (32, 64, 128):
        return f"DI is {dim}, not 32, 64 or 128: use visible_index_scores_ref"
    if heads == 0:
        return "HI is 0: an indexer has at least one head"
    if not q.is_cuda and isinstance(_index_scores_fwd_kernel, triton.JITFunction):
        return f"q is on {q.device}: move it to a CUDA device, or set TRITON_INTERPRET=1"
    return None


def visible_index_scores_triton(
    q: Tensor, weights: Tensor, keys: Tensor, first: Tensor, visible: Tensor
) -> Tensor:
    """Return the index scores of the entries each token sees, -inf at all others.

    I[t, m] = sum_h w[t, h] * relu(q[t, h] . k[m])  for first[t] <= m < first[t] + visible[t]

    q        [B, T, HI, DI]  index queries, bf16 or fp32; DI 32, 64 or 128
    weights  [B, T, HI]      head weights, already scaled; bf16 or fp32
    keys     [B, M, DI]      index keys, dtype of q
    first    [B, T] int64    row of the first entry of the token's own document
    visible  [B, T] int64    entries of that document that the token sees
    returns  [B, T, M] fp32

    Gradients for q, weights and keys, bitwise repeatable; what comes in at a hidden entry is
    dropped, NaN too. Reads no value on the host, so a CUDA graph can hold it. Contract:
    `ops.index.visible_index_scores_ref`. Deviates: D03 in bf16, where the reference rounds dot
    products, products and sum to bf16 and the kernels keep fp32 throughout.
    """
    reason = visible_index_scores_unsupported(q, weights, keys, first, visible)
    if reason is not None:
        raise IndexScoresUnsupportedError(reason)
    return _IndexScoresFn.apply(q, weights, keys, first, visible)


class _IndexScoresFn(torch.autograd.Function):
    """With s[t, h, m] = dI[t, m] * w[t, h] * [dot > 0]: dq = s k, dk = s^T q."""

    @staticmethod
    def forward(ctx, q, weights, keys, first, visible):
        q, weights, keys = q.contiguous(), weights.contiguous(), keys.contiguous()
        first, visible = first.contiguous(), visible.contiguous()
        batch, tokens, heads, dim = q.shape
        num_entries = keys.shape[1]
        launch = _LAUNCH[q.dtype]
        out = torch.empty(batch, tokens, num_entries, dtype=torch.float32, device=q.device)
        bounds = None
        if out.numel():
            bounds = _tile_bounds(first, visible, num_entries, launch.tile)
            blocks = -(-num_entries // launch.forward_block)
            _index_scores_fwd_kernel[(blocks, bounds.shape[1], batch)](
                q, weights, keys, first, visible, bounds, out, tokens, num_entries,
                HI=heads, DI=dim, **launch.options(launch.forward_block),
            )  # fmt: skip
        ctx.save_for_backward(q, weights, keys, first, visible, bounds)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, weights, keys, first, visible, bounds = ctx.saved_tensors
        need_q, need_weights, need_keys = ctx.needs_input_grad[:3]
        if bounds is None:
            zeros = (torch.zeros_like(tensor) for tensor in (q, weights, keys))
            return *zeros, None, None
        inputs = q, weights, keys, first, visible, bounds, grad.contiguous()
        grad_q = grad_weights = grad_keys = None
        if need_q or need_weights:
            grad_q, grad_weights = _query_gradients(*inputs)
        if need_keys:
            grad_keys = _key_gradient(*inputs)
        return grad_q, grad_weights, grad_keys, None, None


def _query_gradients(q, weights, keys, first, visible, bounds, grad):
    batch, tokens, heads, dim = q.shape
    launch = _LAUNCH[q.dtype]
    grad_q, grad_weights = torch.empty_like(q), torch.empty_like(weights)
    # Heads run first in the grid: they all read the same tile of `grad`, one from memory.
    _index_scores_bwd_query_kernel[(heads, bounds.shape[1], batch)](
        q, weights, keys, first, visible, bounds, grad, grad_q, grad_weights,
        tokens, keys.shape[1],
        HI=heads, DI=dim, **launch.options(launch.backward_block),
    )  # fmt: skip
    return grad_q, grad_weights


def _key_gradient(q, weights, keys, first, visible, bounds, grad):
    batch, tokens, heads, dim = q.shape
    launch, num_entries = _LAUNCH[q.dtype], keys.shape[1]
    blocks = -(-num_entries // launch.backward_block)
    splits = min(-(-_PROGRAMS_WANTED // (blocks * batch)), bounds.shape[1], _MOST_SPLITS)
    # Each split sums its own token tiles; the last sum has a fixed order, unlike atomic adds.
    partial = torch.empty(splits, *keys.shape, dtype=torch.float32, device=q.device)
    _index_scores_bwd_keys_kernel[(blocks, splits, batch)](
        q, weights, keys, first, visible, bounds, grad, partial,
        tokens, num_entries, bounds.shape[1],
        HI=heads, DI=dim, **launch.options(launch.backward_block),
    )  # fmt: skip
    return partial.sum(0).to(keys.dtype)


def _tile_bounds(first: Tensor, visible: Tensor, num_entries: int, tile: int) -> Tensor:
    """Return [B, tiles, 2] int32: the first entry and the end of what any token of a tile sees.

    A tile that sees nothing gets (M, 0), which no block of entries meets.
    """
    sees = visible > 0
    low = torch.where(sees, first, num_entries).clamp(0, num_entries)
    high = torch.where(sees, first + visible, 0).clamp(0, num_entries)
    pad = -first.shape[1] % tile
    low = torch.nn.functional.pad(low, (0, pad), value=num_entries).unflatten(1, (-1, tile))
    high = torch.nn.functional.pad(high, (0, pad)).unflatten(1, (-1, tile))
    return torch.stack((low.amin(-1), high.amax(-1)), dim=-1).int()


@triton.jit
def _load_shown(first, visible, batch, rows, T):
    """Return the half-open range of entries that each row sees; rows past T see none."""
    start = tl.load(first + batch * T + rows, mask=rows < T, other=0)
    length = tl.load(visible + batch * T + rows, mask=rows < T, other=0)
    return start.to(tl.int32), (start + length).to(tl.int32)


@triton.jit
def _load_head(q, weights, batch, rows, head, T, HI: tl.constexpr, DI: tl.constexpr):
    """Return the queries [BT, DI] and the weights [BT] fp32 of one head; 0 past T."""
    place = (batch * T + rows) * HI + head  # int64: batch is
    q_tile = tl.load(
        q + place[:, None] * DI + tl.arange(0, DI)[None, :], mask=(rows < T)[:, None], other=0.0
    )
    return q_tile, tl.load(weights + place, mask=rows < T, other=0.0).to(tl.float32)


@triton.jit
def _load_keys(keys, batch, entries, M, DI: tl.constexpr):
    """Return keys [BM, DI]; 0 past M."""
    place = (batch * M + entries)[:, None] * DI + tl.arange(0, DI)[None, :]
    return tl.load(keys + place, mask=(entries < M)[:, None], other=0.0)


@triton.jit
def _relu(dots):
    # A NaN stays a NaN, as in torch: a diverged run must show.
    return tl.where(dots <= 0.0, 0.0, dots)


@triton.jit
def _index_scores_fwd_kernel(
    q, weights, keys, first, visible, bounds, out, T, M,
    HI: tl.constexpr, DI: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write one [BT, BM] part of the scores."""
    block, tile = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    rows, entries = tile * BT + tl.arange(0, BT), block * BM + tl.arange(0, BM)
    bound = bounds + (batch * tl.num_programs(1) + tile) * 2
    low, high = tl.load(bound), tl.load(bound + 1)
    scores = tl.zeros((BT, BM), dtype=tl.float32)
    if (low < block * BM + BM) & (high > block * BM):
        keys_tile = _load_keys(keys, batch, entries, M, DI)
        for head in range(HI):
            q_tile, head_weight = _load_head(q, weights, batch, rows, head, T, HI, DI)
            dots = tl.dot(q_tile, tl.trans(keys_tile), input_precision="ieee")
            scores += head_weight[:, None] * _relu(dots)
    start, stop = _load_shown(first, visible, batch, rows, T)
    shown = (entries[None, :] >= start[:, None]) & (entries[None, :] < stop[:, None])
    tl.store(
        out + (batch * T + rows)[:, None] * M + entries[None, :],
        tl.where(shown, scores, -float("inf")),
        mask=(rows < T)[:, None] & (entries < M)[None, :],
    )


@triton.jit
def _index_scores_bwd_query_kernel(
    q, weights, keys, first, visible, bounds, grad, grad_q, grad_weights, T, M,
    HI: tl.constexpr, DI: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write dq and dw of one head for BT tokens."""
    head, tile = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    rows = tile * BT + tl.arange(0, BT)
    bound = bounds + (batch * tl.num_programs(1) + tile) * 2
    low, high = tl.load(bound), tl.load(bound + 1)
    start, stop = _load_shown(first, visible, batch, rows, T)
    q_tile, head_weight = _load_head(q, weights, batch, rows, head, T, HI, DI)
    dq = tl.zeros((BT, DI), dtype=tl.float32)
    dw = tl.zeros((BT,), dtype=tl.float32)
    for base in range(low // BM * BM, high, BM):
        entries = base + tl.arange(0, BM)
        keys_tile = _load_keys(keys, batch, entries, M, DI)
        coming = tl.load(
            grad + (batch * T + rows)[:, None] * M + entries[None, :],
            mask=(rows < T)[:, None] & (entries < M)[None, :],
            other=0.0,
        )
        shown = (entries[None, :] >= start[:, None]) & (entries[None, :] < stop[:, None])
        coming = tl.where(shown, coming, 0.0)
        dots = tl.dot(q_tile, tl.trans(keys_tile), input_precision="ieee")
        dw += tl.sum(coming * _relu(dots), axis=1)
        slope = tl.where(dots > 0.0, coming * head_weight[:, None], 0.0)
        dq = tl.dot(slope.to(keys_tile.dtype), keys_tile, acc=dq, input_precision="ieee")
    place = (batch * T + rows) * HI + head
    tl.store(
        grad_q + place[:, None] * DI + tl.arange(0, DI)[None, :],
        dq.to(grad_q.dtype.element_ty),
        mask=(rows < T)[:, None],
    )
    tl.store(grad_weights + place, dw.to(grad_weights.dtype.element_ty), mask=rows < T)


@triton.jit
def _index_scores_bwd_keys_kernel(
    q, weights, keys, first, visible, bounds, grad, partial, T, M, num_tiles,
    HI: tl.constexpr, DI: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the part of dk of BM entries that every num_splits-th token tile makes."""
    block, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch = tl.program_id(2).to(tl.int64)
    entries = block * BM + tl.arange(0, BM)
    keys_tile = _load_keys(keys, batch, entries, M, DI)
    dk = tl.zeros((BM, DI), dtype=tl.float32)
    for tile in range(split, num_tiles, num_splits):
        bound = bounds + (batch * num_tiles + tile) * 2
        low, high = tl.load(bound), tl.load(bound + 1)
        if (low < block * BM + BM) & (high > block * BM):
            rows = tile * BT + tl.arange(0, BT)
            start, stop = _load_shown(first, visible, batch, rows, T)
            # Entries are the rows here: the second product then takes `slope` from registers.
            coming = tl.load(
                grad + (batch * T + rows)[None, :] * M + entries[:, None],
                mask=(rows < T)[None, :] & (entries < M)[:, None],
                other=0.0,
            )
            shown = (entries[:, None] >= start[None, :]) & (entries[:, None] < stop[None, :])
            coming = tl.where(shown, coming, 0.0)  # [BM, BT]
            for head in range(HI):
                q_tile, head_weight = _load_head(q, weights, batch, rows, head, T, HI, DI)
                dots = tl.dot(keys_tile, tl.trans(q_tile), input_precision="ieee")
                slope = tl.where(dots > 0.0, coming * head_weight[None, :], 0.0)
                dk = tl.dot(slope.to(q_tile.dtype), q_tile, acc=dk, input_precision="ieee")
    place = (split * tl.num_programs(2) + batch) * M + entries
    tl.store(
        partial + place[:, None] * DI + tl.arange(0, DI)[None, :],
        dk,
        mask=(entries < M)[:, None],
    )


class SelectTopkUnsupportedError(ValueError):
    """Scores that the kernel cannot take; the message names the cause."""


@triton.jit
def _select_kernel(SCORES, THRESHOLD, OUT, M, K, WIDTH: tl.constexpr, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, WIDTH)
    score = tl.load(SCORES + row * M + m, mask=m < M, other=float("-inf"))
    score = tl.where(score != score, float("-inf"), score)
    threshold = tl.load(THRESHOLD + row)
    possible = score > float("-inf")
    above = (score > threshold) & possible
    level = (score == threshold) & possible
    room = K - tl.sum(above.to(tl.int32), axis=0)
    keep = above | (level & (tl.cumsum(level.to(tl.int32), axis=0) <= room))
    slot = tl.cumsum(keep.to(tl.int32), axis=0) - 1
    tl.store(OUT + row * K + slot, m.to(tl.int64), mask=keep)
    filled = tl.sum(keep.to(tl.int32), axis=0)
    k = tl.arange(0, SLOTS)
    empty = (k >= filled) & (k < K)
    tl.store(OUT + row * K + k, tl.full([SLOTS], -1, tl.int64), mask=empty)


def select_topk_unsupported(scores: Tensor) -> str | None:
    """Return why `select_topk_triton` cannot take these scores, or None."""
    if scores.shape[-1] > _MAX_ENTRIES:
        return f"{scores.shape[-1]} entries: a program holds at most {_MAX_ENTRIES} of a row"
    return None


def select_topk_triton(scores: Tensor, k: int) -> Tensor:
    """Same contract as `finwhale.ops.index.select_topk_ref`: [..., M] fp32 -> [..., k] int64."""
    reason = select_topk_unsupported(scores)
    if reason is not None:
        raise SelectTopkUnsupportedError(f"select_topk_triton: {reason}")
    total = scores.shape[-1]
    k = min(k, total)
    out = torch.empty(*scores.shape[:-1], k, dtype=torch.int64, device=scores.device)
    if not out.numel():
        return out
    scores = scores.contiguous()
    if k == total:
        # Everything possible is selected; a top-k of whole rows would be a sort.
        threshold = scores.new_full(scores.shape[:-1], -torch.inf)
    else:
        wanted = torch.where(scores.isnan(), -torch.inf, scores)
        threshold = wanted.topk(k, dim=-1, sorted=False).values.amin(-1)
    _select_kernel[(out.numel() // k,)](
        scores,
        threshold,
        out,
        total,
        k,
        WIDTH=triton.next_power_of_2(total),
        SLOTS=triton.next_power_of_2(k),
        num_warps=4 if total <= 4096 else 8,
    )
    return out
