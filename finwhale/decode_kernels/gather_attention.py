"""Decode attention over packed rows: window rows of a ring and selected entries, one softmax.

One query per sequence. A program takes a few heads of one query and a stretch of its slots, gathers
and unpacks the rows there and leaves an unnormalised sum; a second launch adds the stretches in
their order. Bits depend on the launch, so a batch-invariant engine passes `invariant=True`, which
takes the same one at every T. It refuses what does not fit (`gather_attention_unsupported`). The
easy mistake: reading a row behind an empty slot; it may hold anything, NaN included. Definition:
`attention_refs.gather_attention_ref`. Source: spec/backbone.md section 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.formats import (
    PLANE_GROW,
    bf16_bits,
    bf16_planes,
    bf16_rounded,
    e2m1_planes,
    e4m3_planes,
    e4m3_value,
    ue8m0_value,
)
from finwhale.decode_kernels.launch import (
    Overlap,
    is_interpreted,
    launch_for,
    let_next_start,
    overlap_options,
    wait_for_earlier,
)

_LOG2_E = tl.constexpr(1.4426950408889634)


class GatherAttentionUnsupportedError(ValueError):
    """The kernels cannot run these inputs; the message names the field and its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLaunch:
    """Heads and slots of a program, stretches of a query, and how the programs are compiled.

    With shares=2, two programs make the same scores and each sums half of the channels.
    """

    heads: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int = 2
    shares: int = 1


# From which T on a launch serves, and the one that serves every T alike.
# Measured on Hopper alone, and served to all.
_LAUNCHES = {
    "any": {
        256: AttentionLaunch(heads=64, keys=32, splits=1, num_warps=4, shares=2),
        64: AttentionLaunch(heads=64, keys=32, splits=2, num_warps=4, shares=2),
        8: AttentionLaunch(heads=64, keys=32, splits=10, num_warps=4, shares=2),
        1: AttentionLaunch(heads=16, keys=32, splits=20, num_warps=8),
    },
}
_INVARIANT = {"any": AttentionLaunch(heads=64, keys=32, splits=5, num_warps=4, shares=2)}

# What `bench/gpu_decode_attention.py` times, and the compiled tests run.
BENCHED = tuple(
    AttentionLaunch(
        heads=heads, keys=keys, splits=splits, num_warps=warps, num_stages=stages, shares=shares
    )
    for heads, keys, warps, stages, shares in (
        (16, 32, 8, 2, 1), (64, 32, 4, 2, 2), (64, 32, 4, 3, 2),
    )
    for splits in (1, 5)
)  # fmt: skip


@triton.jit
def _rows_at(index_ptr, slot, count, CACHE: tl.constexpr):
    """Return which slots [KEYS] hold a row, and row and mask of each, [KEYS, 1, 1]."""
    index = tl.load(index_ptr + slot, mask=slot < count, other=-1, cache_modifier=CACHE)
    seen = index >= 0
    return seen, tl.where(seen, index, 0).to(tl.int64)[:, None, None], seen[:, None, None]


@triton.jit
def _window_planes(
    ring_ptr, ring_scale_ptr, row, keep, share,
    HALF: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr, FAST: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Return a share of the channel pairs of window rows as two planes [KEYS, OWN]."""
    WORD: tl.constexpr = HALF + HALF // 32  # int16 words of a row; 16 pairs have one scale
    group, pair = tl.arange(0, OWN // 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    first = share * OWN
    at = row * WORD + first + group * 16 + pair
    pairs = tl.load(ring_ptr + at, mask=keep, other=0, cache_modifier=CACHE)
    at = row * (2 * WORD) + 2 * HALF + first // 16
    if OWN % 64 == 0:
        # Four scales as one word: loads of single bytes are never pipelined.
        words = tl.arange(0, OWN // 64)[None, :, None] * 4
        words = (ring_scale_ptr + at + words).to(tl.pointer_type(tl.int32), bitcast=True)
        byte = tl.arange(0, 4)[None, None, :] * 8
        scale = (tl.load(words, mask=keep, other=0, cache_modifier=CACHE) >> byte) & 255
        scale = tl.reshape(scale, [KEYS, OWN // 16, 1])
    else:
        scale = tl.load(ring_scale_ptr + at + group, mask=keep, other=0, cache_modifier=CACHE)
    even, odd = e4m3_planes(pairs, ue8m0_value(scale), FAST)
    return tl.reshape(even, [KEYS, OWN]), tl.reshape(odd, [KEYS, OWN])


@triton.jit
def _entry_planes(
    main_ptr, row, keep, share,
    HALF: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr, FAST: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Return a share of the channel pairs of entries as two planes [KEYS, OWN]."""
    ENTRY: tl.constexpr = HALF + HALF // 8  # bytes of a row; 8 pairs have one scale
    group, pair = tl.arange(0, OWN // 8)[None, :, None], tl.arange(0, 8)[None, None, :]
    first = share * OWN
    # An empty slot's codes are some row's, which are finite whatever they are; its scale is 0.
    codes = tl.load(main_ptr + row * ENTRY + first + group * 8 + pair, cache_modifier=CACHE)
    at = row * ENTRY + HALF + first // 8 + group
    scale = tl.load(main_ptr + at, mask=keep, other=0, cache_modifier=CACHE)
    scale = tl.broadcast_to(e4m3_value(scale), [KEYS, OWN // 8, 8])
    even, odd = e2m1_planes(codes, scale, FAST)
    return tl.reshape(even, [KEYS, OWN]), tl.reshape(odd, [KEYS, OWN])


@triton.jit
def _query_planes(
    q_ptr, t, heads, share, H: tl.constexpr, HALF: tl.constexpr, OWN: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    channel = share * OWN + tl.arange(0, OWN)
    at = (t * H + heads[:, None]) * HALF + channel[None, :]
    return bf16_planes(tl.load(q_ptr + at, mask=(heads < H)[:, None], other=0), FAST)


@triton.jit
def _add_scores(scores, q_even, q_odd, even, odd):
    scores = tl.dot(q_even, tl.trans(even), acc=scores, input_precision="ieee")
    return tl.dot(q_odd, tl.trans(odd), acc=scores, input_precision="ieee")


@triton.jit
def _online_step(
    scores, even, odd, seen, factor, top, total, sum_even, sum_odd, FAST: tl.constexpr
):
    """Add a tile of keys to the running softmax; scores [HEADS, KEYS] are in powers of two."""
    scores = tl.where(seen[None, :], scores * (factor * PLANE_GROW), float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A head that has seen nothing keeps top = -inf; 0 in its place keeps the exponents from NaN.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores - shift[:, None])  # [HEADS, KEYS]
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(p, 1)
    p = p.to(tl.bfloat16) if FAST else p
    sum_even = tl.dot(p, even, acc=sum_even * decay[:, None], input_precision="ieee")
    sum_odd = tl.dot(p, odd, acc=sum_odd * decay[:, None], input_precision="ieee")
    return new_top, total, sum_even, sum_odd


@triton.jit
def _sinks_and_angles(
    sink_ptr, rotation_ptr, t, T, heads, channel,
    H: tl.constexpr, HALF: tl.constexpr, R2: tl.constexpr,
):  # fmt: skip
    """Return the sinks of some heads in powers of two, cos and sin of some channel pairs."""
    sink = tl.load(sink_ptr + heads, mask=heads < H, other=0.0) * _LOG2_E
    if R2 > 0:
        pair = channel - (HALF - R2)
        place = rotation_ptr + t * R2 + pair
        cos = tl.load(place, mask=pair >= 0, other=1.0, cache_modifier=".cg")[None, :]
        sin = tl.load(place + T * R2, mask=pair >= 0, other=0.0, cache_modifier=".cg")[None, :]
    else:
        cos, sin = 1.0, 0.0
    return sink, cos, sin


@triton.jit
def _finish(
    top, total, sum_even, sum_odd, sink, cos, sin, out_ptr, t, heads, channel,
    H: tl.constexpr, HALF: tl.constexpr, R2: tl.constexpr,
):  # fmt: skip
    """Divide by the denominator with its sink, turn the last channels back, store bf16 pairs."""
    is_blind = top == float("-inf")
    # Relative to the larger of top and sink, so that neither exponent overflows.
    shift = tl.where(is_blind, 0.0, tl.maximum(top, sink))
    decay = tl.where(is_blind, 0.0, tl.exp2(top - shift))
    total = tl.where(is_blind, 1.0, total * decay + tl.exp2(sink - shift))
    share = (decay / total * PLANE_GROW)[:, None]
    even, odd = sum_even * share, sum_odd * share
    if R2 > 0:
        even, odd = bf16_rounded(even), bf16_rounded(odd)
        even, odd = even * cos + odd * sin, odd * cos - even * sin
    words = bf16_bits(even) | (bf16_bits(odd) << 16)
    at = (t * H + heads[:, None]) * HALF + channel[None, :]
    tl.store(out_ptr + at, words, mask=(heads < H)[:, None])


@triton.jit
def _add_stretches(
    sums_ptr, stats_ptr, sink, cos, sin, out_ptr, t, heads, share,
    H: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr, SHARES: tl.constexpr,
    R2: tl.constexpr,
):  # fmt: skip
    """Add the stretches of some heads and one share of the channels in their order, and finish."""
    OWN: tl.constexpr = HALF // SHARES
    column = tl.arange(0, OWN)
    there = heads < H
    wide = tl.broadcast_to(there[:, None], (heads.shape[0], OWN))
    first = (t * SPLITS * SHARES + share) * H + heads
    # All loads before the barrier, or the compiler puts some behind what waits for others.
    tops, totals, evens, odds = (), (), (), ()
    for split in tl.static_range(SPLITS):
        at = (first + split * SHARES * H) * 2
        tops += (tl.load(stats_ptr + at, mask=there, other=float("-inf")),)
        totals += (tl.load(stats_ptr + at + 1, mask=there, other=0.0),)
        place = sums_ptr + at[:, None] * OWN + column[None, :]
        evens += (tl.load(place, mask=wide, other=0.0),)
        odds += (tl.load(place + OWN, mask=wide, other=0.0),)
    tl.debug_barrier()
    top = tops[0]
    for split in tl.static_range(1, SPLITS):
        top = tl.maximum(top, tops[split])
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros(heads.shape, tl.float32)
    even = tl.zeros([heads.shape[0], OWN], tl.float32)
    odd = tl.zeros([heads.shape[0], OWN], tl.float32)
    for split in tl.static_range(SPLITS):
        weight = tl.exp2(tops[split] - shift)
        total = tl.fma(weight, totals[split], total)
        weight = tl.broadcast_to(weight[:, None], even.shape)
        even, odd = tl.fma(weight, evens[split], even), tl.fma(weight, odds[split], odd)
    _finish(
        top, total, even, odd, sink, cos, sin, out_ptr, t, heads, share * OWN + column, H, HALF, R2
    )


@triton.jit
def _split_kernel(
    q_ptr, ring_ptr, ring_scale_ptr, window_ptr, main_ptr, entry_ptr, sink_ptr, rotation_ptr,
    out_ptr, sums_ptr, stats_ptr, T, W, K, factor,
    H: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, SHARES: tl.constexpr, R2: tl.constexpr, FAST: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum HEADS heads of a query over a stretch of slots, for all channels or every SHARES-th part.

    With two shares a program reads all channels for its scores and adds up half of them. AHEAD: a
    stretch is at most one tile, and its rows are read before the wait for the launch before.
    """
    OWN: tl.constexpr = HALF // SHARES
    split, t = tl.program_id(0), tl.program_id(2).to(tl.int64)
    share = tl.program_id(1) % SHARES
    heads = tl.program_id(1) // SHARES * HEADS + tl.arange(0, HEADS)
    key = tl.arange(0, KEYS)
    window_tiles = (W + KEYS - 1) // KEYS
    if AHEAD:
        # Past the first-level cache, which may hold what a row was before.
        if split < window_tiles:
            seen, row, keep = _rows_at(window_ptr + t * W, split * KEYS + key, W, ".cg")
            even, odd = _window_planes(
                ring_ptr, ring_scale_ptr, row, keep, 0, HALF, OWN, KEYS, FAST, ".cg"
            )
        else:
            slot = (split - window_tiles) * KEYS + key
            seen, row, keep = _rows_at(entry_ptr + t * K, slot, K, ".cg")
            even, odd = _entry_planes(main_ptr, row, keep, 0, HALF, OWN, KEYS, FAST, ".cg")
    wait_for_earlier(OVERLAP)
    q_even, q_odd = _query_planes(q_ptr, t, heads, share, H, HALF, OWN, FAST)
    if SHARES == 2:
        other_even, other_odd = _query_planes(q_ptr, t, heads, 1 - share, H, HALF, OWN, FAST)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sum_even = tl.zeros([HEADS, OWN], tl.float32)
    sum_odd = tl.zeros([HEADS, OWN], tl.float32)
    if AHEAD:
        scores = _add_scores(tl.zeros([HEADS, KEYS], tl.float32), q_even, q_odd, even, odd)
        top, total, sum_even, sum_odd = _online_step(
            scores, even, odd, seen, factor, top, total, sum_even, sum_odd, FAST
        )
    else:
        tiles = window_tiles + (K + KEYS - 1) // KEYS
        first, last = split * tiles // SPLITS, (split + 1) * tiles // SPLITS
        for tile in range(first, tl.minimum(last, window_tiles)):
            seen, row, keep = _rows_at(window_ptr + t * W, tile * KEYS + key, W, "")
            even, odd = _window_planes(
                ring_ptr, ring_scale_ptr, row, keep, share, HALF, OWN, KEYS, FAST, ""
            )
            if SHARES == 2:
                more_even, more_odd = _window_planes(
                    ring_ptr, ring_scale_ptr, row, keep, 1 - share, HALF, OWN, KEYS, FAST, ""
                )
            scores = _add_scores(tl.zeros([HEADS, KEYS], tl.float32), q_even, q_odd, even, odd)
            if SHARES == 2:
                scores = _add_scores(scores, other_even, other_odd, more_even, more_odd)
            top, total, sum_even, sum_odd = _online_step(
                scores, even, odd, seen, factor, top, total, sum_even, sum_odd, FAST
            )
        for tile in range(tl.maximum(first, window_tiles), last):
            slot = (tile - window_tiles) * KEYS + key
            seen, row, keep = _rows_at(entry_ptr + t * K, slot, K, "")
            even, odd = _entry_planes(main_ptr, row, keep, share, HALF, OWN, KEYS, FAST, "")
            if SHARES == 2:
                more_even, more_odd = _entry_planes(
                    main_ptr, row, keep, 1 - share, HALF, OWN, KEYS, FAST, ""
                )
            scores = _add_scores(tl.zeros([HEADS, KEYS], tl.float32), q_even, q_odd, even, odd)
            if SHARES == 2:
                scores = _add_scores(scores, other_even, other_odd, more_even, more_odd)
            top, total, sum_even, sum_odd = _online_step(
                scores, even, odd, seen, factor, top, total, sum_even, sum_odd, FAST
            )
    let_next_start(OVERLAP)
    column = tl.arange(0, OWN)
    if SPLITS == 1:
        channel = share * OWN + column
        sink, cos, sin = _sinks_and_angles(
            sink_ptr, rotation_ptr, t, T, heads, channel, H, HALF, R2
        )
        _finish(
            top, total, sum_even, sum_odd, sink, cos, sin, out_ptr, t, heads, channel, H, HALF, R2
        )
    else:
        # Each share has stats of its own: it added up its scores in another order.
        at = (((t * SPLITS + split) * SHARES + share) * H + heads) * 2
        tl.store(stats_ptr + at, top, mask=heads < H)
        tl.store(stats_ptr + at + 1, total, mask=heads < H)
        at = at[:, None] * OWN + column[None, :]
        tl.store(sums_ptr + at, sum_even, mask=(heads < H)[:, None])
        tl.store(sums_ptr + at + OWN, sum_odd, mask=(heads < H)[:, None])


@triton.jit
def _combine_kernel(
    sums_ptr, stats_ptr, sink_ptr, rotation_ptr, out_ptr, T,
    H: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr, SHARES: tl.constexpr,
    R2: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add the stretches of one head and one share of its channels."""
    t = tl.program_id(1).to(tl.int64)
    head, share = tl.program_id(0) // SHARES + tl.arange(0, 1), tl.program_id(0) % SHARES
    channel = share * (HALF // SHARES) + tl.arange(0, HALF // SHARES)
    # No launch nearby writes these.
    sink, cos, sin = _sinks_and_angles(sink_ptr, rotation_ptr, t, T, head, channel, H, HALF, R2)
    wait_for_earlier(OVERLAP)
    _add_stretches(
        sums_ptr, stats_ptr, sink, cos, sin, out_ptr, t, head, share, H, HALF, SPLITS, SHARES, R2
    )


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def gather_attention_unsupported(q: Tensor, ring: Tensor, main: Tensor | None) -> str | None:
    """Return why `gather_attention` cannot run, or None; no value of a tensor is read."""
    dim = q.shape[-1]
    if q.dtype is not torch.bfloat16:
        return f"q.dtype {q.dtype}: use bfloat16"
    if not _power_of_two(dim) or not 64 <= dim <= 512:
        return f"head dim {dim}: use a power of two in 64..512"
    if ring.shape[-1] != dim + dim // 32 or ring.dtype is not torch.uint8:
        return f"ring: rows of {ring.shape[-1]} {ring.dtype}, expected {dim + dim // 32} bytes"
    if main is not None and (main.shape[-1] != dim // 2 + dim // 16 or main.dtype != ring.dtype):
        return f"main: rows of {main.shape[-1]} {main.dtype}, expected {dim // 2 + dim // 16} bytes"
    if not q.is_cuda and not is_interpreted(_split_kernel):
        return f"device {q.device}: use a CUDA device, or the reference on others"
    return None


def attention_launch(tokens: int, device: torch.device, invariant: bool = False) -> AttentionLaunch:
    """Return the launch of T queries on a device; a function of the shape alone."""
    if invariant:
        return launch_for(_INVARIANT, device)
    table = launch_for(_LAUNCHES, device)
    return table[max(least for least in table if least <= max(1, tokens))]


def gather_attention(
    q: Tensor,
    ring: Tensor,
    window_index: Tensor,
    main: Tensor | None,
    entry_index: Tensor,
    sink: Tensor,
    rotation: Tensor | None = None,
    *,
    invariant: bool = False,
    settled: bool = False,
    overlaps: tuple[int, int] = (Overlap.NONE, Overlap.NONE),
    launch: AttentionLaunch | None = None,
) -> Tensor:
    """Return [T, H, D] bf16; the contract of `attention_refs.gather_attention_ref`.

    Sums are fp32; probabilities are rounded to bf16 relative to the running maximum of their
    stretch, where D04 takes the final one.

    settled   the launch before wrote no row or index, `q` alone: rows may be read before the wait
    overlaps  an `Overlap` for each of the two launches
    """
    reason = gather_attention_unsupported(q, ring, main)
    if reason is not None:
        raise GatherAttentionUnsupportedError(f"gather_attention: {reason}")
    tokens, heads, dim = q.shape
    out = torch.empty_like(q)
    if not out.numel():
        return out
    launch = launch or attention_launch(tokens, q.device, invariant)
    width, chosen = window_index.shape[1], 0 if main is None else entry_index.shape[1]
    splits, shares = launch.splits, launch.shares
    tile_heads = min(launch.heads, max(16, triton.next_power_of_2(heads)))
    grid = splits, -(-heads // tile_heads) * shares, tokens
    sums = stats = out
    if splits > 1:
        sums = torch.empty(tokens, splits, heads, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(tokens, splits, shares, heads, 2, dtype=torch.float32, device=q.device)
    half_turn = 0 if rotation is None else rotation.shape[-1]
    turn = sink if rotation is None else rotation
    words = out.view(torch.int32)
    sizes = {"H": heads, "HALF": dim // 2, "R2": half_turn, "SPLITS": splits, "SHARES": shares}
    tiles = -(-width // launch.keys) + -(-chosen // launch.keys)
    _split_kernel[grid](
        q.contiguous().view(torch.int32), ring.view(torch.int16), ring,
        window_index, ring if main is None else main, entry_index, sink, turn,
        words, sums, stats, tokens, width, chosen, dim**-0.5 * _LOG2_E.value,
        HEADS=tile_heads, KEYS=launch.keys, FAST=not is_interpreted(_split_kernel),
        AHEAD=settled and shares == 1 and tiles <= splits,
        num_warps=launch.num_warps, num_stages=launch.num_stages, **sizes,
        **overlap_options(overlaps[0], q.device),
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(heads * shares, tokens)](
            sums, stats, sink, turn, words, tokens, num_warps=8 // shares, **sizes,
            **overlap_options(overlaps[1], q.device),
        )  # fmt: skip
    return out
