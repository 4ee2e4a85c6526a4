"""The rows that a decode step writes: RMS norm, RoPE, rounding and the scatter, in one launch each.

One program per row; window KV, main entries and index keys differ in format alone. A step writes
its window row from the joined product, beside the query latent: `latent_and_window`. Queries are
turned (and index queries rounded) in place by another kernel; a last one closes or keeps the groups
of ratio 2. Values are rounded to bf16 where the release has bf16 between its modules, so codes
equal those of the reference unless the sum of the norm, taken in another order, moves a value
across a boundary. The easy mistake: a value that is not finite has no code; `finite` remembers the
row, as nothing can be raised here.
Definition: `attention_refs.store_rows_ref`. Source: spec/backbone.md sections 4.1 to 4.3, 5.1, 9.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.formats import (
    bf16_bits,
    bf16_planes,
    bf16_rounded,
    ceil_power_of_two,
    e2m1_code,
    e2m1_value,
    e4m3_code,
    e4m3_value,
    ue8m0_value,
)
from finwhale.decode_kernels.launch import (
    Overlap,
    is_interpreted,
    overlap_options,
    wait_for_earlier,
)
from finwhale.decode_kernels.tiles import GROUP, round_groups, to_bf16

_FORMATS = {"window": 0, "entry": 1, "index_key": 2}
_GROUPS = {"window": 32, "entry": 16, "index_key": 32}
_TURNED_HEADS = 16


class StoreRowsUnsupportedError(ValueError):
    """The kernel cannot run these inputs; the message names the field and its value."""


@triton.jit
def _normed(even, odd, w_even, w_odd, eps, HALF: tl.constexpr):
    """Return a row's channels after RMS norm, bf16-valued."""
    mean = tl.sum(even * even + odd * odd, 0) / (2 * HALF)
    scale = tl.rsqrt(mean + eps)
    return bf16_rounded(w_even * (even * scale)), bf16_rounded(w_odd * (odd * scale))


@triton.jit
def _angles(rotation_ptr, t, T, turning, R2: tl.constexpr):
    """Return cos and sin of each channel pair; one with `turning` below 0 stays."""
    place = rotation_ptr + t * R2 + turning
    cos = tl.load(place, mask=turning >= 0, other=1.0)
    sin = tl.load(place + T * R2, mask=turning >= 0, other=0.0)
    return cos, sin


@triton.jit
def _turned(even, odd, cos, sin, turning):
    """Return bf16-valued channels after RoPE."""
    new_even = bf16_rounded(even * cos - odd * sin)
    new_odd = bf16_rounded(even * sin + odd * cos)
    is_turned = turning >= 0
    return tl.where(is_turned, new_even, even), tl.where(is_turned, new_odd, odd)


@triton.jit
def _group_scale(even, odd, FORMAT: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """Return per group of channels its scale's code (int32) and fp32 value: [GROUPS, 1] each."""
    size = tl.reshape(tl.maximum(tl.abs(even), tl.abs(odd)), [GROUPS, PAIRS])
    top = tl.max(size, 1)[:, None]
    if FORMAT == 0:
        code = ceil_power_of_two(tl.maximum(top, 1e-4) * 0.002232142857142857)
        value = ue8m0_value(code)
    elif FORMAT == 1:
        # 6 * 2^-9, the smallest scale times the largest code.
        code = e4m3_code(
            tl.div_rn(tl.maximum(top, 0.01171875), tl.full(top.shape, 6.0, tl.float32))
        )
        value = e4m3_value(code.to(tl.uint8))
    else:
        # 6 * 2^-126.
        code = ceil_power_of_two(tl.maximum(top, 7.052966104933725e-38) * 0.16666666666666666)
        value = ue8m0_value(code)
    return code, value


@triton.jit
def _turn_heads(
    q_ptr, rotation_ptr, t, T, first,
    H: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, R2: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """Turn HEADS heads of one query. Unrounded, only the channels that turn are touched."""
    head = first + tl.arange(0, HEADS)[:, None]
    WIDTH: tl.constexpr = HALF if ROUNDED else R2
    pair = (HALF - WIDTH) + tl.arange(0, WIDTH)[None, :]
    at = q_ptr + (t * H + head) * HALF + pair
    even, odd = bf16_planes(tl.load(at, mask=head < H, other=0), False)
    turning = pair - (HALF - R2)
    cos, sin = _angles(rotation_ptr, t, T, turning, R2)
    even, odd = _turned(even, odd, cos, sin, turning)
    if ROUNDED:
        GROUPS: tl.constexpr = HEADS * HALF // 16
        _, value = _group_scale(even, odd, 2, GROUPS, 16)
        fine = (tl.abs(even) < 3.4e38) & (tl.abs(odd) < 3.4e38)
        fine = tl.min(tl.reshape(fine.to(tl.int32), [GROUPS, 16]), 1)[:, None]
        # Damage must reach the check that names its layer: the whole group becomes NaN.
        value = tl.where(fine != 0, value, float("nan"))
        value = tl.broadcast_to(value, [GROUPS, 16])
        even = e2m1_value(e2m1_code(tl.div_rn(tl.reshape(even, [GROUPS, 16]), value))) * value
        odd = e2m1_value(e2m1_code(tl.div_rn(tl.reshape(odd, [GROUPS, 16]), value))) * value
        even = tl.reshape(even, [HEADS, HALF])
        odd = tl.reshape(odd, [HEADS, HALF])
    tl.store(at, bf16_bits(even) | (bf16_bits(odd) << 16), mask=head < H)


@triton.jit
def _write_packed(
    pool_ptr, row, even, odd, FORMAT: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr
):
    """Round a row's channels to the format and write codes and scales to its place in the pool."""
    GROUPS: tl.constexpr = HALF // PAIRS
    code, value = _group_scale(even, odd, FORMAT, GROUPS, PAIRS)
    value = tl.broadcast_to(value, [GROUPS, PAIRS])
    even = tl.div_rn(tl.reshape(even, [GROUPS, PAIRS]), value)
    odd = tl.div_rn(tl.reshape(odd, [GROUPS, PAIRS]), value)
    group, in_group = tl.arange(0, GROUPS)[:, None], tl.arange(0, PAIRS)[None, :]
    at = group * PAIRS + in_group
    if FORMAT == 0:
        base = pool_ptr + row * (2 * HALF + GROUPS)
        tl.store(base + 2 * at, e4m3_code(even).to(tl.uint8))
        tl.store(base + 2 * at + 1, e4m3_code(odd).to(tl.uint8))
        tl.store(base + 2 * HALF + group, code.to(tl.uint8))
    else:
        base = pool_ptr + row * (HALF + GROUPS)
        tl.store(base + at, (e2m1_code(even) | (e2m1_code(odd) << 4)).to(tl.uint8))
        tl.store(base + HALF + group, code.to(tl.uint8))


@triton.jit
def _store_kernel(
    x_ptr, weight_ptr, rotation_ptr, pool_ptr, rows_ptr, latent_ptr, finite_ptr, q_ptr, T, eps,
    HALF: tl.constexpr, R2: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr,
    HAS_LATENT: tl.constexpr, HAS_FINITE: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write one row; programs beyond the first of a token turn HEADS of its query's heads each."""
    wait_for_earlier(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + t)
    if tl.program_id(1) > 0:
        if H > 0:
            first = (tl.program_id(1) - 1) * HEADS
            _turn_heads(q_ptr, rotation_ptr, t, T, first, H, HEADS, HALF, R2, False)
    elif row >= 0:
        pair = tl.arange(0, HALF)
        even, odd = bf16_planes(tl.load(x_ptr + t * HALF + pair), False)
        w_even, w_odd = bf16_planes(tl.load(weight_ptr + pair), False)
        even, odd = _normed(even, odd, w_even, w_odd, eps, HALF)
        if HAS_LATENT:
            tl.store(latent_ptr + t * HALF + pair, bf16_bits(even) | (bf16_bits(odd) << 16))
        turning = pair - (HALF - R2)
        cos, sin = _angles(rotation_ptr, t, T, turning, R2)
        even, odd = _turned(even, odd, cos, sin, turning)
        if HAS_FINITE:
            # NaN and infinity fail the comparison.
            fine = (tl.abs(even) < 3.4e38) & (tl.abs(odd) < 3.4e38)
            if tl.min(fine.to(tl.int32), 0) == 0:
                tl.store(finite_ptr + t, 0)
        _write_packed(pool_ptr, row, even, odd, FORMAT, HALF, PAIRS)


@triton.jit
def _latent_window_kernel(
    joined_ptr, pairs_ptr, q_weight_ptr, kv_weight_ptr, rotation_ptr, ring_ptr, rows_ptr,
    latent_ptr, T, A, eps,
    AP: tl.constexpr, HALF: tl.constexpr, R2: tl.constexpr, PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Norm and round one query latent, or write one window row, by the second index of the program.

    `pairs_ptr` is `joined_ptr` as pairs of channels. Everything is loaded at once, before it is
    known whether the row has a place: what counts at one token is how often a load waits. Volatile
    loads stay in order; others the compiler moves behind the first use of the row.
    """
    t = tl.program_id(0).to(tl.int64)
    start = t * (A + 2 * HALF)
    if tl.program_id(1) == 0:
        a = tl.arange(0, AP)
        weight = tl.load(q_weight_ptr + a, mask=a < A, other=0.0, volatile=True).to(tl.float32)
        wait_for_earlier(OVERLAP)
        x = tl.load(joined_ptr + start + a, mask=a < A, other=0.0, volatile=True).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, axis=0) / tl.cast(A, tl.float32) + eps)
        y = to_bf16(weight * (x * r), UPCAST)
        y = tl.reshape(round_groups(tl.reshape(y, (1, AP // 32, 32))), (AP,))
        y = to_bf16(y, UPCAST).to(latent_ptr.dtype.element_ty)
        tl.store(latent_ptr + t * A + a, y, mask=a < A)
    else:
        pair = tl.arange(0, HALF)
        turning = pair - (HALF - R2)
        w_even, w_odd = bf16_planes(tl.load(kv_weight_ptr + pair, volatile=True), False)
        wait_for_earlier(OVERLAP)
        row = tl.load(rows_ptr + t, volatile=True)
        cos, sin = _angles(rotation_ptr, t, T, turning, R2)
        kv = tl.load(pairs_ptr + (start + A) // 2 + pair, volatile=True)
        even, odd = bf16_planes(kv, False)
        even, odd = _normed(even, odd, w_even, w_odd, eps, HALF)
        even, odd = _turned(even, odd, cos, sin, turning)
        if row >= 0:
            _write_packed(ring_ptr, row, even, odd, 0, HALF, PAIRS)


@triton.jit
def _queries_kernel(
    q_ptr, rotation_ptr, T,
    H: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, R2: tl.constexpr,
    ROUNDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(OVERLAP)
    t = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * HEADS
    _turn_heads(q_ptr, rotation_ptr, t, T, first, H, HEADS, HALF, R2, ROUNDED)


@triton.jit
def _close_kernel(
    content_ptr, gate_ptr, open_ptr, slots_ptr, closes_ptr, out_ptr, HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    own = t * 2 * HALF + 2 * pair
    kept = tl.load(slots_ptr + t) * 4 * HALF + 2 * pair
    even, odd = tl.load(content_ptr + own), tl.load(content_ptr + own + 1)
    gate_even, gate_odd = tl.load(gate_ptr + own), tl.load(gate_ptr + own + 1)
    words = tl.zeros([HALF], tl.int32)
    if tl.load(closes_ptr + t) != 0:
        # The softmax over two is a sigmoid of their difference.
        first_even = tl.load(open_ptr + kept + 2 * HALF) - gate_even
        first_odd = tl.load(open_ptr + kept + 2 * HALF + 1) - gate_odd
        first_even = 1.0 / (1.0 + tl.exp(-first_even))
        first_odd = 1.0 / (1.0 + tl.exp(-first_odd))
        even += first_even * (tl.load(open_ptr + kept) - even)
        odd += first_odd * (tl.load(open_ptr + kept + 1) - odd)
        words = bf16_bits(even) | (bf16_bits(odd) << 16)
    else:
        tl.store(open_ptr + kept, even)
        tl.store(open_ptr + kept + 1, odd)
        tl.store(open_ptr + kept + 2 * HALF, gate_even)
        tl.store(open_ptr + kept + 2 * HALF + 1, gate_odd)
    tl.store(out_ptr + t * HALF + pair, words)


def store_rows_unsupported(kind: str, x: Tensor, weight: Tensor, pool: Tensor) -> str | None:
    """Return why `store_rows` cannot run, or None; no value of a tensor is read."""
    if kind not in _FORMATS:
        return f"kind {kind!r}: use one of {tuple(_FORMATS)}"
    dim = x.shape[-1]
    if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        return f"x {x.dtype} and weight {weight.dtype}: use bfloat16"
    if dim & (dim - 1) or not 64 <= dim <= 512:
        return f"dim {dim}: use a power of two in 64..512"
    width = (dim if kind == "window" else dim // 2) + dim // _GROUPS[kind]
    if pool.shape[-1] != width or pool.dtype is not torch.uint8:
        return f"pool: rows of {pool.shape[-1]} {pool.dtype}, expected {width} bytes"
    if not x.is_cuda and not is_interpreted(_store_kernel):
        return f"device {x.device}: use a CUDA device, or the reference on others"
    return None


def store_rows(
    kind: str,
    x: Tensor,
    weight: Tensor,
    rotation: Tensor,
    pool: Tensor,
    rows: Tensor,
    eps: float,
    latent: Tensor | None = None,
    queries: Tensor | None = None,
    *,
    finite: Tensor | None = None,
    overlap: int = Overlap.NONE,
) -> None:
    """Write packed rows in place; the contract of `attention_refs.store_rows_ref`.

    finite  [T] bool   gets False where a value has no code; True is never written
    """
    reason = store_rows_unsupported(kind, x, weight, pool)
    if reason is None and queries is not None and queries.shape[-1] != x.shape[-1]:
        reason = f"queries: {queries.shape[-1]} channels, expected those of x, {x.shape[-1]}"
    if reason is not None:
        raise StoreRowsUnsupportedError(f"store_rows: {reason}")
    tokens, dim = x.shape
    if not tokens:
        return
    heads = 0 if queries is None else _turnable(queries).shape[1]
    _store_kernel[(tokens, 1 + -(-heads // _TURNED_HEADS))](
        x.contiguous().view(torch.int32), weight.view(torch.int32), rotation, pool, rows,
        x if latent is None else latent.view(torch.int32),
        rows if finite is None else finite.view(torch.int8),
        x if queries is None else queries.view(torch.int32), tokens, eps,
        HALF=dim // 2, R2=rotation.shape[-1], FORMAT=_FORMATS[kind], PAIRS=_GROUPS[kind] // 2,
        HAS_LATENT=latent is not None, HAS_FINITE=finite is not None, H=heads,
        HEADS=_TURNED_HEADS, num_warps=2, **overlap_options(overlap, x.device),
    )  # fmt: skip


def latent_and_window(
    joined: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    rotation: Tensor,
    ring: Tensor,
    rows: Tensor,
    eps: float,
    *,
    overlap: int = Overlap.NONE,
) -> Tensor:
    """Return the query latent and write the window row of each joined row, in one launch.

    The contract of `attention_refs.latent_and_window_ref`.
    """
    tokens, columns = len(joined), len(q_weight)
    reason = store_rows_unsupported("window", joined[:, columns:], kv_weight, ring)
    if q_weight.dtype is not torch.bfloat16:
        reason = f"q_weight {q_weight.dtype}: use bfloat16"
    elif columns % GROUP:
        reason = f"q_weight: {columns} columns, expected a multiple of {GROUP}"
    elif joined.shape[1] != columns + len(kv_weight):
        reason = f"joined: {joined.shape[1]} columns, expected {columns} + {len(kv_weight)}"
    if reason is not None:
        raise StoreRowsUnsupportedError(f"latent_and_window: {reason}")
    latent = joined.new_empty(tokens, columns)
    if tokens:
        joined = joined.contiguous()
        _latent_window_kernel[(tokens, 2)](
            joined, joined.view(torch.int32), q_weight, kv_weight.view(torch.int32), rotation,
            ring, rows, latent, tokens, columns, eps,
            AP=triton.next_power_of_2(columns), HALF=len(kv_weight) // 2, R2=rotation.shape[-1],
            PAIRS=_GROUPS["window"] // 2, UPCAST=is_interpreted(_latent_window_kernel),
            num_warps=4, **overlap_options(overlap, joined.device),
        )  # fmt: skip
    return latent


def _turnable(q: Tensor) -> Tensor:
    if q.dtype is not torch.bfloat16 or not q.is_contiguous():
        raise StoreRowsUnsupportedError(f"queries {q.dtype}: use contiguous bfloat16")
    return q


def rotate_queries(
    q: Tensor, rotation: Tensor, rounded: bool, *, overlap: int = Overlap.NONE
) -> None:
    """Turn (and round) queries in place; the contract of `attention_refs.rotate_queries_ref`."""
    tokens, heads, dim = _turnable(q).shape
    if not q.numel():
        return
    block = 4 if rounded else _TURNED_HEADS
    _queries_kernel[(-(-heads // block), tokens)](
        q.view(torch.int32), rotation, tokens,
        H=heads, HEADS=block, HALF=dim // 2, R2=rotation.shape[-1], ROUNDED=rounded, num_warps=2,
        **overlap_options(overlap, q.device),
    )  # fmt: skip


def close_groups(
    content: Tensor,
    gate: Tensor,
    open_rows: Tensor,
    slots: Tensor,
    closes: Tensor,
    *,
    overlap: int = Overlap.NONE,
) -> Tensor:
    """Return pooled pairs [T, D] bf16; the contract of `attention_refs.close_groups_ref`."""
    tokens, dim = content.shape
    if content.dtype is not torch.float32 or dim & (dim - 1):
        reason = f"content {content.dtype} of {dim}: use float32 and a power of two"
        raise StoreRowsUnsupportedError(f"close_groups: {reason}")
    out = torch.empty(tokens, dim, dtype=torch.bfloat16, device=content.device)
    if tokens:
        _close_kernel[(tokens,)](
            content.contiguous(), gate.contiguous(), open_rows, slots, closes.view(torch.int8),
            out.view(torch.int32), HALF=dim // 2, num_warps=2,
            **overlap_options(overlap, content.device),
        )  # fmt: skip
    return out
