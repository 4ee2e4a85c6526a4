"""Backward kernels of sparse attention: dq by query tile, key gradients by key block.

Probabilities are made again from the saved log-sum-exp. Every output element has one program
that owns it, so there are no atomics and two runs agree bit for bit. A key is also the value, so
its gradient is one accumulator: dS^T q * scale + P^T dout. The easy mistake: starting the key
kernels before the dq kernel, which writes the `delta` they read.
Source: spec/backbone.md section 4.5, differentiated by hand.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.kernels.sparse_attention_tiles import (
    Launch,
    entry_scores,
    listed,
    load_reach,
    load_rows,
    load_values,
    select,
    touched_blocks,
    window_scores,
)

# Programs that keep a large GPU busy; entry gradients are split until there are about as many.
_PROGRAMS = 264


@triton.jit
def _dq_step(scores, keys, dout, lse, delta, dq):
    p = tl.exp(scores - lse[:, None])  # [ROWS, KEYS]
    dp = tl.dot(dout, tl.trans(keys), input_precision="ieee")
    ds = p * (dp - delta[:, None])
    return dq + tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")


@triton.jit
def _bwd_query_kernel(
    q_ptr, window_ptr, entries_ptr, positions_ptr, picked_ptr, blocks_ptr, counts_ptr,
    out_ptr, lse_ptr, dout_ptr, delta_ptr, dq_ptr,
    T, P, M, window, picked_stride, num_blocks, scale,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
):  # fmt: skip
    BQ: tl.constexpr = ROWS // H
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    first = tile * BQ
    token = tl.arange(0, ROWS) // H
    rows_left = (T - first) * H
    start = (batch * T + first) * H
    q = load_rows(q_ptr + start * D, 0, rows_left, ROWS, D)
    dout = load_rows(dout_ptr + start * D, 0, rows_left, ROWS, D)
    row = tl.arange(0, ROWS)
    # A few columns at a time: two whole fp32 tiles would not stay in registers.
    delta = tl.zeros([ROWS], tl.float32)
    for column in range(0, D, 32):
        offsets = row[:, None] * D + (column + tl.arange(0, 32))[None, :]
        is_row = (row < rows_left)[:, None]
        some_out = tl.load(out_ptr + start * D + offsets, mask=is_row, other=0.0).to(tl.float32)
        some_dout = tl.load(dout_ptr + start * D + offsets, mask=is_row, other=0.0)
        delta += tl.sum(some_out * some_dout.to(tl.float32), 1)
    tl.store(delta_ptr + start + row, delta, mask=row < rows_left)
    lse = load_values(lse_ptr + start, rows_left, 0.0, ROWS)
    reach = load_reach(positions_ptr + batch * T, first + token, T, window)
    dq = tl.zeros([ROWS, D], tl.float32)
    keys_base = window_ptr + batch * (P + T) * D
    own = P + first + token
    for key in range(tl.maximum(P + first - window + 1, 0), P + tl.minimum(first + BQ, T), KEYS):
        keys = load_rows(keys_base, key, P + T, KEYS, D)
        scores = window_scores(q, keys, scale, own, reach, key, KEYS)
        dq = _dq_step(scores, keys, dout, lse, delta, dq)
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
            dq = _dq_step(scores, keys, dout, lse, delta, dq)
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(
        dq_ptr + start * D + offsets,
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=(row < rows_left)[:, None],
    )


@triton.jit
def _key_step(scores, q, keys, dout, lse, delta, scale, gradient):
    p = tl.exp(scores - lse[:, None])  # [ROWS, KEYS]
    dp = tl.dot(dout, tl.trans(keys), input_precision="ieee")
    ds = p * (dp - delta[:, None]) * scale
    gradient += tl.dot(tl.trans(p.to(q.dtype)), dout, input_precision="ieee")
    return gradient + tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")


@triton.jit
def _bwd_window_kernel(
    q_ptr, window_ptr, positions_ptr, lse_ptr, dout_ptr, delta_ptr, gradient_ptr,
    T, P, window, scale,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    key = tl.program_id(0) * KEYS
    batch = tl.program_id(1).to(tl.int64)
    keys = load_rows(window_ptr + batch * (P + T) * D, key, P + T, KEYS, D)
    gradient = tl.zeros([KEYS, D], tl.float32)
    # Row j is seen by the queries at rows j .. j + window - 1. A step may be less than a token.
    low = tl.maximum(key - P, 0) * H // ROWS
    high = (tl.minimum(key + KEYS - 1 - P + window, T) * H + ROWS - 1) // ROWS
    for step in range(low, high):
        rows_left = T * H - step * ROWS
        start = batch * T * H + step * ROWS
        token = (step * ROWS + tl.arange(0, ROWS)) // H
        q = load_rows(q_ptr + start * D, 0, rows_left, ROWS, D)
        dout = load_rows(dout_ptr + start * D, 0, rows_left, ROWS, D)
        lse = load_values(lse_ptr + start, rows_left, 0.0, ROWS)
        delta = load_values(delta_ptr + start, rows_left, 0.0, ROWS)
        reach = load_reach(positions_ptr + batch * T, token, T, window)
        scores = window_scores(q, keys, scale, P + token, reach, key, KEYS)
        gradient = _key_step(scores, q, keys, dout, lse, delta, scale, gradient)
    row = key + tl.arange(0, KEYS)
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(
        gradient_ptr + batch * (P + T) * D + offsets,
        gradient.to(gradient_ptr.dtype.element_ty),
        mask=(row < P + T)[:, None],
    )


@triton.jit
def _bwd_entries_kernel(
    q_ptr, entries_ptr, picked_ptr, tiles_ptr, counts_ptr,
    lse_ptr, dout_ptr, delta_ptr, gradient_ptr,
    T, M, picked_stride, num_tiles, scale,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # With more heads than rows, a token takes several steps.
    BQ: tl.constexpr = (ROWS + H - 1) // H
    STEPS: tl.constexpr = (H + ROWS - 1) // ROWS
    key = tl.program_id(0) * KEYS
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    keys = load_rows(entries_ptr + batch * M * D, key, M, KEYS, D)
    gradient = tl.zeros([KEYS, D], tl.float32)
    index = batch * tl.num_programs(0) + tl.program_id(0)
    for n in range(part, tl.load(counts_ptr + index) * STEPS, tl.num_programs(1)):
        first = tl.load(tiles_ptr + index * num_tiles + n // STEPS) * BQ
        skipped = (n - n // STEPS * STEPS) * ROWS
        token = (skipped + tl.arange(0, ROWS)) // H
        rows_left = (T - first) * H - skipped
        start = (batch * T + first) * H + skipped
        q = load_rows(q_ptr + start * D, 0, rows_left, ROWS, D)
        dout = load_rows(dout_ptr + start * D, 0, rows_left, ROWS, D)
        lse = load_values(lse_ptr + start, rows_left, 0.0, ROWS)
        delta = load_values(delta_ptr + start, rows_left, 0.0, ROWS)
        picked = picked_ptr + (batch * T + first) * picked_stride
        scores = entry_scores(q, keys, scale, picked, token, T - first, picked_stride, key, KEYS)
        gradient = _key_step(scores, q, keys, dout, lse, delta, scale, gradient)
    row = key + tl.arange(0, KEYS)
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    base = gradient_ptr + (part * tl.num_programs(2) + batch) * M * D
    tl.store(base + offsets, gradient, mask=(row < M)[:, None])


def sparse_attention_bwd(
    dout: Tensor,
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor,
    topk: Tensor | None,
    sink: Tensor,
    positions: Tensor,
    window: int,
    out: Tensor,
    lse: Tensor,
    launch: Launch,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, window_kv, entries and sink.

    dout, q, out [B, T, H, D], window_kv [B, P + T, D], entries [B, M, D] (M = 0 for a window
    layer), all contiguous and of one dtype; topk [B, T, K] int64 or None; sink [H] fp32;
    positions [B, T] int64; lse [B, T, H] fp32; B, T > 0.

    dS = P * (dout V^T - delta), delta = sum_d dout * out;  dsink_h = -sum exp(sink_h - lse) delta
    """
    batch, tokens, heads, dim = q.shape
    num_entries, key_block = entries.shape[1], launch.key_block
    earlier, scale = window_kv.shape[1] - tokens, dim**-0.5
    # Made again rather than saved: [B, T, M] bytes a layer would live until the backward.
    selection = select(topk, num_entries, heads, launch)
    blocks = -(-num_entries // key_block)
    stride = 0 if selection is None else selection.picked.shape[-1]
    sizes: dict[str, Any] = {"H": heads, "D": dim, "KEYS": key_block}
    sizes |= {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    by_query, by_key = sizes | {"ROWS": launch.rows}, sizes | {"ROWS": launch.key_rows}
    by_query["HAS_ENTRIES"] = selection is not None
    delta, dq, dwindow = torch.empty_like(lse), torch.empty_like(q), torch.empty_like(window_kv)
    # Unused pointers get q: the kernel drops the branch that would read them.
    _bwd_query_kernel[(-(-tokens // (launch.rows // heads)), batch)](
        q, window_kv, entries, positions,
        q if selection is None else selection.picked,
        q if selection is None else selection.blocks,
        q if selection is None else selection.counts,
        out, lse, dout, delta, dq,
        tokens, earlier, num_entries, window, stride, blocks, scale,
        **by_query,
    )  # fmt: skip
    _bwd_window_kernel[(-(-window_kv.shape[1] // key_block), batch)](
        q, window_kv, positions, lse, dout, delta, dwindow,
        tokens, earlier, window, scale, **by_key,
    )  # fmt: skip
    dsink = -((sink - lse).exp() * delta).sum((0, 1))
    if topk is None or selection is None:
        return dq, dwindow, torch.zeros_like(entries), dsink
    touched = touched_blocks(topk, num_entries, -(-launch.key_rows // heads), key_block)
    tiles = touched.shape[1]
    places, counts = listed(touched.transpose(1, 2))  # [B, blocks, tiles], [B, blocks]
    parts = max(1, min(tiles, _PROGRAMS // (blocks * batch)))
    partial = torch.empty(parts, *entries.shape, dtype=torch.float32, device=q.device)
    _bwd_entries_kernel[(blocks, parts, batch)](
        q, entries, selection.picked, places, counts, lse, dout, delta, partial,
        tokens, num_entries, stride, tiles, scale, **by_key,
    )  # fmt: skip
    return dq, dwindow, partial.sum(0).to(entries.dtype), dsink
