"""Engram in a decode step: hash, gather and rounding in a launch; expand, gate and add in another.

The gather depends on token ids alone, so it may run long before its layer. A row is read from the
table as stored (FP8, one UE8M0 scale per 32 columns) and leaves rounded for the product with
`wkv`, which stands between the two launches. The second launch also does the expansion of the
sub-layer before, because the gate reads the expanded streams; it writes new streams, since the four
programs of a token read all four old ones. Image tokens are no business of a decode step and are
not served. The easy mistakes: row offsets beyond 2^31, and the hash in anything but 64-bit
integers. Source: spec/backbone.md sections 7.5 and 7.6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.formats import ue8m0_value
from finwhale.decode_kernels.launch import is_interpreted
from finwhale.decode_kernels.tiles import GROUP, round_groups, to_bf16
from finwhale.ops.engram import engram_gate, engram_rows
from finwhale.ops.hyper_connection import HyperMix, hyper_expand
from finwhale.ops.rounding import round_fp8
from finwhale.ops.weight_formats import dequantize_weight


class EngramUnsupportedError(ValueError):
    """These inputs cannot run in the kernels; the message names the field and its value."""


def engram_gather_ref(
    recent: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    table: Tensor,
    scales: Tensor,
) -> Tensor:
    """Return the rounded rows of every token, joined in column order.

    recent       [T, n] int64 compressed ids, column k that of k tokens back, the pad id where there
                 is none
    multipliers  [n] int64; primes, offsets [n - 1, heads] int64
    table        [rows, dim] float8_e4m3fn; scales [rows, dim/32] uint8
    returns      [T, (n - 1) * heads * dim] bf16

    Section 7.5; section 7.6, first two lines.
    """
    tokens, n = recent.shape
    positions = torch.arange(n, device=recent.device).expand(tokens, -1)
    rows = engram_rows(recent.flip(1), positions, None, multipliers, primes, offsets, 0)[:, -1]
    found = dequantize_weight(
        table.view(torch.uint8)[rows.flatten()].view(torch.float8_e4m3fn),
        scales.view(torch.uint8)[rows.flatten()],
    )
    return round_fp8(found.to(torch.bfloat16)).view(tokens, -1)


@triton.jit
def _gather_kernel(
    recent_ptr, multipliers_ptr, primes_ptr, offsets_ptr, table_ptr, scales_ptr, out_ptr,
    J, heads, N: tl.constexpr, DIM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    token, column = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    order = column // heads  # 0 for pairs of tokens
    hashed = tl.load(recent_ptr + token * N) * tl.load(multipliers_ptr)
    for back in tl.static_range(1, N):
        further = tl.load(recent_ptr + token * N + back) * tl.load(multipliers_ptr + back)
        hashed = tl.where(back <= order + 1, hashed ^ further, hashed)
    row = hashed % tl.load(primes_ptr + column) + tl.load(offsets_ptr + column)
    g = tl.arange(0, DIM // 32)
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    scale = ue8m0_value(tl.load(scales_ptr + row * (DIM // 32) + g))
    values = tl.load(table_ptr + row * DIM + at).to(tl.float32) * scale[:, None]
    values = tl.reshape(to_bf16(values, UPCAST), (1, DIM // 32, 32))
    values = tl.reshape(to_bf16(round_groups(values), UPCAST), (DIM // 32, 32))
    tl.store(out_ptr + (token * J + column) * DIM + at, values.to(out_ptr.dtype.element_ty))


def engram_gather(
    recent: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    table: Tensor,
    scales: Tensor,
) -> Tensor:
    """Same contract as `engram_gather_ref`, same bits. Rows are not checked against the table."""
    tokens, n = recent.shape
    dim, columns = table.shape[1], primes.numel()
    if dim % GROUP or dim & (dim - 1):
        raise EngramUnsupportedError(f"engram_gather: dim {dim}, expected a power of two from 32")
    if primes.shape[0] != n - 1:
        raise EngramUnsupportedError(
            f"engram_gather: primes of {primes.shape[0]} orders for {n} recent ids"
        )
    out = torch.empty(tokens, columns * dim, dtype=torch.bfloat16, device=recent.device)
    if tokens:
        _gather_kernel[(tokens, columns)](
            recent, multipliers, primes, offsets, table, scales.view(torch.uint8), out,
            columns, primes.shape[1], N=n, DIM=dim, UPCAST=is_interpreted(_gather_kernel),
            num_warps=1,
        )  # fmt: skip
    return out


def engram_update_ref(
    streams: Tensor,
    parts: Tensor | None,
    before: HyperMix | None,
    kv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
) -> Tensor:
    """Return the expanded streams plus the gated value.

    X <- expand(bf16(sum_p parts_p), X, before);  X_s <- X_s + gate_s * value

    streams   [T, N, C] bf16; parts, before as in `hyper_site_ref`
    kv        [T, (N + 1) * C] bf16: N keys, then the value
    q_weight, k_weight  [N, C] bf16
    returns   [T, N, C] bf16, a new tensor

    Section 7.6.
    """
    _, num, channels = streams.shape
    if parts is not None:
        y = torch.zeros_like(parts[:, 0], dtype=torch.float32)
        for part in parts.float().unbind(1):
            y = y + part
        streams = hyper_expand(y.to(streams.dtype), streams, before.post, before.comb)
    keys, value = kv.split((num * channels, channels), dim=-1)
    return engram_gate(streams, keys.unflatten(-1, (num, -1)), value, q_weight, k_weight, eps)


@triton.jit
def _update_kernel(
    streams_ptr, parts_ptr, post_ptr, comb_ptr, kv_ptr, q_ptr, k_ptr, out_ptr, C, num_parts, eps,
    N: tl.constexpr, CP: tl.constexpr, HAS_UPDATE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    token, s = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    c = tl.arange(0, CP)
    inside = c < C
    if HAS_UPDATE:
        y = tl.zeros([CP], tl.float32)
        for p in range(num_parts):
            at = parts_ptr + (token * num_parts + p) * C + c
            y += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(post_ptr + token * N + s) * to_bf16(y, UPCAST)
        for i in tl.static_range(N):
            old = tl.load(streams_ptr + (token * N + i) * C + c, mask=inside, other=0.0)
            x += tl.load(comb_ptr + (token * N + i) * N + s) * old.to(tl.float32)
        x = to_bf16(x, UPCAST)
    else:
        x = tl.load(streams_ptr + (token * N + s) * C + c, mask=inside, other=0.0).to(tl.float32)
    kv = kv_ptr + token * (N + 1) * C
    key = tl.load(kv + s * C + c, mask=inside, other=0.0).to(tl.float32)
    q_weight = tl.load(q_ptr + s * C + c, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_ptr + s * C + c, mask=inside, other=0.0).to(tl.float32)
    width = tl.cast(C, tl.float32)
    dot = tl.sum(x * (q_weight * k_weight) * key, axis=0)
    dot *= tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    dot *= tl.rsqrt(tl.sum(key * key, axis=0) / width + eps)
    dot *= tl.rsqrt(width)
    # D06: at zero the sign bit decides, as copysign has it.
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    root = tl.where(dot.to(tl.int32, bitcast=True) < 0, -root, root)
    root = tl.where(dot == dot, root, dot)
    gate = 1.0 / (1.0 + tl.exp(-root))
    value = tl.load(kv + N * C + c, mask=inside, other=0.0).to(tl.float32)
    x = to_bf16(x + gate * value, UPCAST)
    tl.store(out_ptr + (token * N + s) * C + c, x.to(out_ptr.dtype.element_ty), mask=inside)


def engram_update(
    streams: Tensor,
    parts: Tensor | None,
    before: HyperMix | None,
    kv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
) -> Tensor:
    """Same contract as `engram_update_ref`, up to the order of the fp32 sums."""
    tokens, num, channels = streams.shape
    if num not in (2, 4) or channels > 8192:
        raise EngramUnsupportedError(
            f"engram_update: {num} streams of {channels}, expected 2 or 4 of at most 8192"
        )
    out = torch.empty_like(streams)
    if tokens:
        old = (streams, streams) if before is None else (before.post, before.comb)
        _update_kernel[(tokens, num)](
            streams, streams if parts is None else parts, *old, kv, q_weight, k_weight, out,
            channels, 0 if parts is None else parts.shape[1], eps,
            N=num, CP=triton.next_power_of_2(channels), HAS_UPDATE=parts is not None,
            UPCAST=is_interpreted(_update_kernel), num_warps=16,
        )  # fmt: skip
    return out
