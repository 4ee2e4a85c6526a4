"""Sparse attention in Triton for training: the contract of `ops.attention`, with gradients.

Dense flash attention over key blocks, masked: the window band first, then the blocks that hold
an entry selected by some query of the tile; nothing of size [T, K, D] is made. It refuses, with
a reason and never by falling back, what does not fit (see `sparse_attention_unsupported`).
Deterministic, and free of host reads, so forward and backward can be captured in a CUDA graph.
The easy mistake: a top-k row that is out of range or repeated; neither is checked here.
Source: spec/backbone.md section 4.5; the mass, spec/training.md (what teaches the indexer).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.kernels.sparse_attention_bwd import sparse_attention_bwd
from finwhale.kernels.sparse_attention_tiles import (
    backward_launch_for,
    entry_scores,
    launch_for,
    load_reach,
    load_rows,
    load_values,
    select,
    window_scores,
)


class SparseAttentionUnsupportedError(ValueError):
    """The kernels cannot run these inputs; the message names the field, its value and a remedy."""


@triton.jit
def _online_step(scores, keys, top, total, values):
    # A row that has seen nothing keeps top = -inf; 0 in its place keeps the exponents from NaN.
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp(scores - shift[:, None])  # [ROWS, KEYS]
    decay = tl.exp(top - shift)
    total = total * decay + tl.sum(p, 1)
    values = values * decay[:, None]
    values += tl.dot(p.to(keys.dtype), keys, input_precision="ieee")
    return new_top, total, values


@triton.jit
def _fwd_kernel(
    q_ptr, window_ptr, entries_ptr, sink_ptr, positions_ptr, picked_ptr, blocks_ptr, counts_ptr,
    out_ptr, lse_ptr,
    T, P, M, window, picked_stride, num_blocks, scale,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
):  # fmt: skip
    BQ: tl.constexpr = ROWS // H
    # Late tiles may see the most entries; starting with them shortens the tail.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    first = tile * BQ
    row = tl.arange(0, ROWS)
    token = row // H
    rows_left = (T - first) * H
    start = (batch * T + first) * H
    q = load_rows(q_ptr + start * D, 0, rows_left, ROWS, D)
    reach = load_reach(positions_ptr + batch * T, first + token, T, window)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, D], tl.float32)
    keys_base = window_ptr + batch * (P + T) * D
    own = P + first + token
    for key in range(tl.maximum(P + first - window + 1, 0), P + tl.minimum(first + BQ, T), KEYS):
        keys = load_rows(keys_base, key, P + T, KEYS, D)
        scores = window_scores(q, keys, scale, own, reach, key, KEYS)
        top, total, values = _online_step(scores, keys, top, total, values)
    if HAS_ENTRIES:
        entries_base = entries_ptr + batch * M * D
        picked = picked_ptr + (batch * T + first) * picked_stride
        index = batch * tl.num_programs(0) + tile
        for n in range(tl.load(counts_ptr + index)):
            key = tl.load(blocks_ptr + index * num_blocks + n) * KEYS
            keys = load_rows(entries_base, key, M, KEYS, D)
            scores = entry_scores(
                q, keys, scale, picked, token, T - first, picked_stride, key, KEYS
            )
            top, total, values = _online_step(scores, keys, top, total, values)
    # Relative to the larger of top and sink, so that neither exponent overflows.
    is_blind = top == float("-inf")
    sink = tl.load(sink_ptr + row % H)
    shift = tl.where(is_blind, 0.0, tl.maximum(top, sink))
    decay = tl.where(is_blind, 0.0, tl.exp(top - shift))
    total = tl.where(is_blind, 1.0, total * decay + tl.exp(sink - shift))
    out = values * (decay / total)[:, None]
    # exp(score - inf) = 0: the backward and the mass need no case for a row that sees nothing.
    lse = tl.where(is_blind, float("inf"), shift + tl.log(total))
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(
        out_ptr + start * D + offsets,
        out.to(out_ptr.dtype.element_ty),
        mask=(row < rows_left)[:, None],
    )
    tl.store(lse_ptr + start + row, lse, mask=row < rows_left)


@triton.jit
def _mass_kernel(
    q_ptr, entries_ptr, picked_ptr, blocks_ptr, counts_ptr, lse_ptr, mass_ptr,
    T, M, picked_stride, num_blocks, scale,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    BQ: tl.constexpr = ROWS // H
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    first = tile * BQ
    token = tl.arange(0, ROWS) // H
    rows_left = (T - first) * H
    start = (batch * T + first) * H
    q = load_rows(q_ptr + start * D, 0, rows_left, ROWS, D)
    lse = load_values(lse_ptr + start, rows_left, 0.0, ROWS)
    picked = picked_ptr + (batch * T + first) * picked_stride
    mass = mass_ptr + (batch * T + first) * M
    index = batch * tl.num_programs(0) + tile
    for n in range(tl.load(counts_ptr + index)):
        key = tl.load(blocks_ptr + index * num_blocks + n) * KEYS
        keys = load_rows(entries_ptr + batch * M * D, key, M, KEYS, D)
        scores = entry_scores(q, keys, scale, picked, token, T - first, picked_stride, key, KEYS)
        p = tl.exp(scores - lse[:, None])  # [ROWS, KEYS]
        by_token = tl.sum(tl.reshape(p, [BQ, H, KEYS]), 1)  # [BQ, KEYS]
        line = tl.arange(0, BQ)
        column = key + tl.arange(0, KEYS)
        tl.store(
            mass + line[:, None] * M + column[None, :],
            by_token,
            mask=(line < T - first)[:, None] & (column < M)[None, :],
        )


def _forward(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor,
    topk: Tensor | None,
    sink: Tensor,
    positions: Tensor,
    window: int,
    with_mass: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out [B, T, H, D], lse [B, T, H] fp32 and the mass [B, T, M] fp32 (or [B, T, 0])."""
    batch, tokens, heads, dim = q.shape
    num_entries = entries.shape[1]
    launch = launch_for(dim, q.dtype)
    selection = select(topk, num_entries, heads, launch)
    tiles = -(-tokens // (launch.rows // heads))
    blocks, scale = -(-num_entries // launch.key_block), dim**-0.5
    sizes: dict[str, Any] = {"H": heads, "D": dim, "ROWS": launch.rows}
    sizes |= {"KEYS": launch.key_block}
    sizes |= {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    with_entries = sizes | {"HAS_ENTRIES": selection is not None}
    out, lse = torch.empty_like(q), q.new_empty(batch, tokens, heads, dtype=torch.float32)
    stride = 0 if selection is None else selection.picked.shape[-1]
    # Unused pointers get q: the kernel drops the branch that would read them.
    _fwd_kernel[(tiles, batch)](
        q, window_kv, entries, sink, positions,
        q if selection is None else selection.picked,
        q if selection is None else selection.blocks,
        q if selection is None else selection.counts,
        out, lse,
        tokens, window_kv.shape[1] - tokens, num_entries, window, stride, blocks, scale,
        **with_entries,
    )  # fmt: skip
    mass = q.new_zeros(batch, tokens, num_entries if with_mass else 0, dtype=torch.float32)
    if with_mass and selection is not None:
        _mass_kernel[(tiles, batch)](
            q, entries, selection.picked, selection.blocks, selection.counts, lse, mass,
            tokens, num_entries, stride, blocks, scale, **sizes,
        )  # fmt: skip
    return out, lse, mass


class SparseAttentionFn(torch.autograd.Function):
    """Gradients for q, window_kv, entries and sink; the mass is a constant."""

    @staticmethod
    def forward(ctx, q, window_kv, entries, topk, sink, positions, window, with_mass):
        """Take contiguous inputs; entries [B, 0, D] and topk None stand for a window layer."""
        out, lse, mass = _forward(q, window_kv, entries, topk, sink, positions, window, with_mass)
        ctx.save_for_backward(q, window_kv, entries, topk, sink, positions, out, lse)
        ctx.window = window
        ctx.mark_non_differentiable(mass)
        ctx.set_materialize_grads(False)
        return out, mass

    @staticmethod
    def backward(ctx, dout, _):
        """Return one gradient per argument of `forward`."""
        q, window_kv, entries, topk, sink, positions, out, lse = ctx.saved_tensors
        if dout is None:
            return (None,) * 8
        dq, dwindow, dentries, dsink = sparse_attention_bwd(
            dout.contiguous(), q, window_kv, entries, topk, sink, positions, ctx.window,
            out, lse, backward_launch_for(q.shape[-1], q.shape[2], q.dtype),
        )  # fmt: skip
        return dq, dwindow, dentries, None, dsink, None, None, None


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def sparse_attention_unsupported(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    topk: Tensor | None,
    sink: Tensor,
    positions: Tensor,
    window: int,
) -> str | None:
    """Return why the kernels cannot run these inputs, or None if they can.

    Arguments as `ops.attention.sparse_attention_ref`; no value of a tensor is read.
    """
    heads, dim = q.shape[2:]
    if q.dtype not in (torch.bfloat16, torch.float32):
        return f"q.dtype {q.dtype}: use bfloat16 or float32"
    for name, tensor in (("window_kv", window_kv), ("entries", entries)):
        if tensor is not None and tensor.dtype != q.dtype:
            return f"{name}.dtype {tensor.dtype}: use the dtype of q, {q.dtype}"
    if sink.dtype != torch.float32:
        return f"sink.dtype {sink.dtype}: use float32"
    if not _power_of_two(dim) or not 32 <= dim <= 512:
        return f"head dim {dim}: use a power of two in 32..512"
    rows = launch_for(dim, q.dtype).rows
    if not _power_of_two(heads) or heads > min(64, rows):
        return f"heads {heads}: use a power of two, at most {min(64, rows)} for {q.dtype}"
    if (entries is None) != (topk is None):
        return "entries and topk: give both or neither"
    if window < 1:
        return f"window {window}: use at least 1"
    if not q.is_cuda and not _is_interpreted():
        return f"device {q.device}: use a CUDA device, or the reference on others"
    return None


def _is_interpreted() -> bool:
    """Return whether the kernels were made for Triton's interpreter, which runs on a CPU."""
    return not isinstance(_fwd_kernel, triton.runtime.JITFunction)


def sparse_attention_with_mass_triton(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    topk: Tensor | None,
    sink: Tensor,
    positions: Tensor,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Return out and mass as `ops.attention.sparse_attention_with_mass_ref` does.

    q [B, T, H, D] bf16 or fp32, window_kv [B, P + T, D] and entries [B, M, D] in the dtype of q,
    topk [B, T, K] int64 with -1 for an empty slot, sink [H] fp32, positions [B, T] int64.
    out [B, T, H, D] in the dtype of q; mass [B, T, M] fp32, without gradient.

    Section 4.5. Sums are fp32; probabilities are rounded to the dtype of q relative to the
    running maximum, where D04 takes the final one.
    """
    return _run(q, window_kv, entries, topk, sink, positions, window, with_mass=True)


def sparse_attention_triton(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    topk: Tensor | None,
    sink: Tensor,
    positions: Tensor,
    window: int,
) -> Tensor:
    """Return out [B, T, H, D] alone; arguments as `sparse_attention_with_mass_triton`."""
    return _run(q, window_kv, entries, topk, sink, positions, window, with_mass=False)[0]


def _run(q, window_kv, entries, topk, sink, positions, window, *, with_mass):
    reason = sparse_attention_unsupported(q, window_kv, entries, topk, sink, positions, window)
    if reason is not None:
        raise SparseAttentionUnsupportedError(f"sparse_attention_triton: {reason}")
    batch, tokens, _, dim = q.shape
    if entries is None:
        entries = q.new_empty(batch, 0, dim)
    if not batch or not tokens:
        # No query, no work: a product with zero rows keeps every input in the graph.
        reached = window_kv.sum() + entries.sum() + sink.sum().to(q.dtype)
        return q + 0.0 * reached, q.new_zeros(batch, tokens, entries.shape[1], dtype=torch.float32)
    return SparseAttentionFn.apply(
        q.contiguous(), window_kv.contiguous(), entries.contiguous(),
        None if topk is None else topk.contiguous(), sink.contiguous(),
        positions.contiguous(), window, with_mass,
    )  # fmt: skip
