"""What the attention side of a decode step computes, in plain torch: the slow definitions.

One function per kernel of this room's attention side, with the kernel's arguments: gathered
attention, index scores, selection, and the rows that a step writes. Built on `finwhale.ops` and
`finwhale.cache.paged_reads`, row by row. Every tensor is bf16 where the release has bf16 between
modules; sums are fp32. The easy mistake: taking these for the engine's CPU path, which keeps fp32.
Source: spec/backbone.md sections 4, 5 and 9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finwhale.cache.paged_reads import (
    pack_entry,
    pack_index,
    pack_window,
    unpack_entry,
    unpack_index,
    unpack_window,
)
from finwhale.ops import rounding
from finwhale.ops.compress import pool_group
from finwhale.ops.index import select_topk_ref
from finwhale.ops.norm import rms_norm
from finwhale.ops.rope import apply_rope


def gather_attention_ref(
    q: Tensor,
    ring: Tensor,
    window_index: Tensor,
    main: Tensor | None,
    entry_index: Tensor,
    sink: Tensor,
    rotation: Tensor | None = None,
) -> Tensor:
    """Return, for each query and head, the value sum over its window rows and selected entries.

    e_s = (q_h . k_s) / sqrt(D);  m = max_s e_s
    out_h = sum_s exp(e_s - m) k_s / (sum_s exp(e_s - m) + exp(sink_h - m))

    q             [T, H, D] bf16
    ring          [R, D + D/32] uint8    FP8 window rows; this step's are among them
    window_index  [T, W] int64           rows of `ring`; -1 is not visible
    main          [E, D/2 + D/16] uint8  FP4 entries of every sequence, or None
    entry_index   [T, K] int64           rows of `main`; -1 is empty
    sink          [H] fp32
    rotation      [2, T, R/2] fp32       if given, out is turned back by it (section 4.6)
    returns       [T, H, D] bf16; a query that sees nothing gives 0

    Empty slots may stand anywhere and their rows are not read. Section 4.5.
    """
    dim = q.shape[-1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for t in range(q.shape[0]):
        window = window_index[t][window_index[t] >= 0]
        keys = unpack_window(ring[window], "fp4", dim)
        if main is not None:
            entries = entry_index[t][entry_index[t] >= 0]
            keys = torch.cat((keys, unpack_entry(main[entries], "fp4", dim)))  # [S, D]
        if keys.shape[0]:
            scores = q[t].float() @ keys.T * dim**-0.5  # [H, S]
            p = torch.cat((scores, sink[:, None]), dim=1).softmax(1)[:, :-1]
            out[t] = p @ keys
    out = out.to(q.dtype)
    return out if rotation is None else apply_rope(out, rotation, inverse=True)


def index_scores_ref(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    visible: Tensor,
    entries_per_block: int,
    num_columns: int,
    pool_blocks: Tensor | None = None,
    pool_block_size: int = 8,
) -> tuple[Tensor, Tensor]:
    """Return I[t, e] = sum_h w[t, h] * relu(q[t, h] . k_e) and the best score of each pool block.

    q            [T, HI, DI] bf16    rounded index queries
    weights      [T, HI] bf16, fp32  head weights, already scaled; may be negative
    keys         [E, DI/2 + DI/32] uint8  MXFP4 pool of index keys
    tables       [T, NB] int64       block ids of each row's sequence
    visible      [T] int64           entries that a row sees
    pool_blocks  [T, P] int64        if given, column c is entry pool_blocks[t, c // 8] * 8 + c % 8
                                     and -1 is no block; else column c is entry c
    returns      scores [T, M] fp32, best [T, ceil(M / 8)] fp32

    A column that is not visible is -inf. In `best` the block of the newest visible entry is +inf
    (section 5.5), which is meant for the form without `pool_blocks`. Sums are fp32 (D03). The
    kernel leaves columns beyond the last visible one as they are. Section 5.3.
    """
    dim = q.shape[-1]
    scores = torch.full((q.shape[0], num_columns), -torch.inf, device=q.device)
    column = torch.arange(num_columns, device=q.device)
    for t in range(q.shape[0]):
        entry = column
        if pool_blocks is not None:
            block = pool_blocks[t, column // pool_block_size]
            entry = torch.where(block < 0, -1, block * pool_block_size + column % pool_block_size)
        seen = (entry >= 0) & (entry < visible[t])
        entry = entry[seen]
        block = tables[t, entry // entries_per_block]
        rows = keys[block * entries_per_block + entry % entries_per_block]
        dots = (q[t].float() @ unpack_index(rows, "fp4", dim).T).relu()  # [HI, S]
        scores[t, seen] = (dots * weights[t].float().unsqueeze(-1)).sum(0)
    pad = -num_columns % pool_block_size
    padded = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf)
    best = padded.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    best = best.unflatten(1, (-1, pool_block_size)).amax(-1)
    newest = ((visible - 1) // pool_block_size).unsqueeze(-1)
    is_newest = torch.arange(best.shape[1], device=q.device) == newest
    return scores, torch.where(is_newest, torch.inf, best)


def select_topk_rows_ref(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Return the positions of the k best of the first lengths[t] scores, ascending; -1 pads.

    scores   [T, M] fp32; what lies behind a row's length is not looked at
    lengths  [T] int64
    returns  [T, k] int64

    Equal scores, 0 and -0 among them: the lowest position wins (D01). NaN counts as -inf, and
    -inf is never selected. Section 5.4.
    """
    hidden = torch.arange(scores.shape[1], device=scores.device) >= lengths.unsqueeze(-1)
    chosen = select_topk_ref(scores.masked_fill(hidden, -torch.inf), k)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1)


def pool_rows_ref(
    chosen: Tensor,
    tables: Tensor,
    entries_per_block: int,
    pool_blocks: Tensor | None = None,
    pool_block_size: int = 8,
) -> Tensor:
    """Return the pool rows of selected columns; -1 stays.

    chosen       [T, K] int64   columns as in `index_scores_ref`
    tables       [T, NB] int64
    pool_blocks  [T, P] int64 or None, as there
    returns      [T, K] int64
    """
    safe = chosen.clamp_min(0)
    if pool_blocks is not None:
        first = pool_blocks.gather(1, safe // pool_block_size).clamp_min(0) * pool_block_size
        safe = first + safe % pool_block_size
    block = tables.gather(1, safe // entries_per_block)
    rows = block * entries_per_block + safe % entries_per_block
    return torch.where(chosen < 0, -1, rows)


_PACKERS = {"window": pack_window, "entry": pack_entry, "index_key": pack_index}


def store_rows_ref(
    kind: str,
    x: Tensor,
    weight: Tensor,
    rotation: Tensor,
    pool: Tensor,
    rows: Tensor,
    eps: float,
    latent: Tensor | None = None,
    queries: Tensor | None = None,
) -> None:
    """Write the packed row of each x: RMS norm, RoPE, rounding to the format of `kind`.

    kind      "window" (FP8), "entry" (FP4) or "index_key" (MXFP4)
    x         [T, D] bf16
    weight    [D] bf16
    rotation  [2, T, R/2] fp32
    pool      [E, bytes] uint8, written in place
    rows      [T] int64      rows of `pool`, no row twice; -1 writes nothing
    latent    [T, D] bf16    if given, gets the normalised x before RoPE, of the rows written
    queries   [T, H, D] bf16  if given, turned in place by the same rotation, all of them

    Sections 4.2, 4.3, 5.1 and 9.2 to 9.4.
    """
    normed = rms_norm(x, weight, eps)
    if latent is not None:
        latent[rows >= 0] = normed[rows >= 0]
    packed = _PACKERS[kind](apply_rope(normed, rotation), "fp4")
    pool[rows[rows >= 0]] = packed[rows >= 0]
    if queries is not None:
        rotate_queries_ref(queries, rotation, rounded=False)


def latent_and_window_ref(
    joined: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    rotation: Tensor,
    ring: Tensor,
    rows: Tensor,
    eps: float,
) -> Tensor:
    """Return the normalised and FP8-rounded query latent; write the rest of a row as window row.

    joined     [T, A + D] bf16: the products with `wq_a` and `wkv` in one matrix
    q_weight   [A] bf16
    kv_weight  [D] bf16
    rotation, ring, rows as `rotation`, `pool`, `rows` in `store_rows_ref`; -1 writes no row
    returns    [T, A] bf16, of every row

    Section 4.1, step 1; sections 4.2 and 9.1.
    """
    latent, kv = joined.split((len(q_weight), len(kv_weight)), dim=-1)
    store_rows_ref("window", kv, kv_weight, rotation, ring, rows, eps)
    return rounding.round_fp8(rms_norm(latent, q_weight, eps))


def rotate_queries_ref(q: Tensor, rotation: Tensor, rounded: bool) -> None:
    """Turn q [T, H, D] bf16 in place by `rotation` [2, T, R/2]; if `rounded`, through MXFP4 too.

    Sections 4.1 and 5.2.
    """
    turned = apply_rope(q, rotation)
    q.copy_(rounding.round_index(turned) if rounded else turned)


def close_groups_ref(
    content: Tensor, gate: Tensor, open_rows: Tensor, slots: Tensor, closes: Tensor
) -> Tensor:
    """Return the pooled pair of each token that closes its group, and keep the others' rows.

    content, gate  [T, D] fp32    this step's rows, one token per sequence, at ratio 2
    open_rows      [S, 2, D] fp32  content and gate of each sequence's first token; in place
    slots          [T] int64      row of `open_rows` of each token's sequence, no row twice
    closes         [T] bool       whether the token is the second of its group
    returns        [T, D] bf16    what the entry's norm reads; 0 where the group stays open

    The pooled value is rounded to bf16 before its norm (D07). Section 4.3.
    """
    own = torch.stack((content, gate), dim=1)  # [T, 2, D]
    pair = torch.stack((open_rows[slots], own), dim=2)  # [T, 2, r, D]
    pooled = pool_group(pair[:, 0], pair[:, 1])
    open_rows[slots[~closes]] = own[~closes]
    return torch.where(closes.unsqueeze(-1), pooled, 0.0).bfloat16()
