"""Packed cache rows, and what is read through them: attention and index scores, in plain torch.

Owns the bytes of one row (window KV, entry, index key) and the slow definition of the two reads
that the engine's kernels must equal. The rule here: a row's bits depend on that row alone, never
on T, on padding or on a neighbour. So products run row by row in shapes that the row fixes; one
batched product over T may change its order of arithmetic with T, which is the easy mistake.
Source: spec/backbone.md sections 4.5, 5.3 and 9.2 to 9.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finwhale.ops import rounding

# Bytes of decoded keys that one slice of rows may hold.
_SLICE_BYTES = 1 << 26
# Columns per index product; a short tail is padded, so every product has the same shape.
_COLUMNS = 256
_STORAGES = ("fp4", "bf16", "fp32")
_PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32}


class PackedRowError(ValueError):
    """A storage name or a row width that no packed row has; the message gives the remedy."""


def _row_bytes(dim: int, storage: str, coded: int, group: int) -> int:
    if storage not in _STORAGES:
        raise PackedRowError(f"storage: got {storage!r}, expected one of {_STORAGES}")
    if dim % 32:
        raise PackedRowError(f"dim: got {dim}, expected a multiple of 32, the largest group")
    return _PLAIN[storage].itemsize * dim if storage in _PLAIN else coded + dim // group


def window_row_bytes(dim: int, storage: str) -> int:
    """Return the bytes of one window row: D E4M3 codes and D/32 UE8M0 scales, or plain values."""
    return _row_bytes(dim, storage, dim, 32)


def entry_row_bytes(dim: int, storage: str) -> int:
    """Return the bytes of one entry: D/2 of E2M1 pairs and D/16 E4M3 scales, or plain values."""
    return _row_bytes(dim, storage, dim // 2, 16)


def index_row_bytes(dim: int, storage: str) -> int:
    """Return the bytes of one index key: DI/2 of E2M1 pairs and DI/32 UE8M0 scales."""
    return _row_bytes(dim, storage, dim // 2, 32)


def _pack(x: Tensor, storage: str, row_bytes: int, quantize) -> Tensor:
    if storage in _PLAIN:
        rows = x.to(_PLAIN[storage]).contiguous().view(torch.uint8)
    else:
        codes, scales = quantize(x)
        parts = codes.contiguous().view(torch.uint8), scales.contiguous().view(torch.uint8)
        rows = torch.cat(parts, dim=-1)
    assert rows.shape[-1] == row_bytes
    return rows


def _codes_and_scales(rows: Tensor, storage: str, row_bytes: int, num_codes: int):
    """Return the two parts of `rows`, contiguous; None as scales where they are plain values."""
    if rows.shape[-1] != row_bytes:
        raise PackedRowError(
            f"rows: got {rows.shape[-1]} bytes each, expected {row_bytes} for storage {storage!r}; "
            "unpack with the dim and the storage they were packed with"
        )
    if storage in _PLAIN:
        return rows.contiguous().view(_PLAIN[storage]).float(), None
    return rows[..., :num_codes].contiguous(), rows[..., num_codes:].contiguous()


def pack_window(x: Tensor, storage: str) -> Tensor:
    """Return window rows [..., wb] uint8 of x [..., D]; `unpack_window` gives `round_fp8(x)`.

    A NaN or an infinity has no code: check `all_finite_rows` first, nothing is raised here.
    Section 9.2.
    """
    return _pack(x, storage, window_row_bytes(x.shape[-1], storage), rounding.quantize_fp8)


def pack_entry(x: Tensor, storage: str) -> Tensor:
    """Return entries [..., eb] uint8 of x [..., D]; `unpack_entry` gives `round_main_kv(x)`.

    As `pack_window` for values that are not finite. Section 9.3.
    """
    return _pack(x, storage, entry_row_bytes(x.shape[-1], storage), rounding.quantize_main_kv)


def pack_index(x: Tensor, storage: str) -> Tensor:
    """Return index keys [..., kb] uint8 of x [..., DI]; `unpack_index` gives `round_index(x)`.

    As `pack_window` for values that are not finite. Section 9.4.
    """
    return _pack(x, storage, index_row_bytes(x.shape[-1], storage), rounding.quantize_index)


def unpack_window(rows: Tensor, storage: str, dim: int) -> Tensor:
    """Return the fp32 values [..., D] of window rows [..., wb] uint8."""
    codes, scales = _codes_and_scales(rows, storage, window_row_bytes(dim, storage), dim)
    if scales is None:
        return codes
    return rounding.dequantize_fp8(codes.view(torch.float8_e4m3fn), scales)


def unpack_entry(rows: Tensor, storage: str, dim: int) -> Tensor:
    """Return the fp32 values [..., D] of entries [..., eb] uint8."""
    codes, scales = _codes_and_scales(rows, storage, entry_row_bytes(dim, storage), dim // 2)
    if scales is None:
        return codes
    return rounding.dequantize_main_kv(codes, scales.view(torch.float8_e4m3fn))


def unpack_index(rows: Tensor, storage: str, dim: int) -> Tensor:
    """Return the fp32 values [..., DI] of index keys [..., kb] uint8."""
    codes, scales = _codes_and_scales(rows, storage, index_row_bytes(dim, storage), dim // 2)
    return codes if scales is None else rounding.dequantize_index(codes, scales)


def all_finite_rows(x: Tensor) -> Tensor:
    """Return [...] bool: the rows of x [..., D] that a code can hold, without NaN or infinity."""
    return torch.isfinite(x).all(-1)


def _attend_row(q: Tensor, keys: Tensor, sink: Tensor) -> Tensor:
    """Return [H, D]: one query's heads over what it sees. q [H, D], keys [S, D] with S > 0."""
    scores = q @ keys.T * q.shape[-1] ** -0.5  # [H, S]
    top = scores.amax(-1, keepdim=True)
    p = (scores - top).exp()
    return p @ keys / (p.sum(-1, keepdim=True) + (sink.unsqueeze(-1) - top).exp())


def paged_attention_ref(
    q: Tensor,
    fresh: Tensor,
    ring: Tensor,
    window_index: Tensor,
    main: Tensor | None,
    entry_index: Tensor,
    sink: Tensor,
    storage: str = "fp4",
) -> Tensor:
    """Return, for each query and head, the value sum over its window rows and selected entries.

    e_s = (q_h . k_s) / sqrt(D);  m = max_s e_s
    out_h = sum_s exp(e_s - m) k_s / (sum_s exp(e_s - m) + exp(sink_h - m))

    q             [T, H, D] fp32
    fresh         [T, wb] uint8   window rows of this call
    ring          [R, wb] uint8   window rows of earlier calls
    window_index  [T, W] int64    slot j is position p - W + 1 + j: -1 not visible, 0 .. R-1 a row
                                  of `ring`, R + t row t of `fresh`
    main          [E, eb] uint8   entries of every sequence, or None
    entry_index   [T, K] int64    rows of `main`; -1 is empty
    sink          [H] fp32
    returns       [T, H, D] fp32; a query that sees nothing gives 0

    Only visible rows are read, in slot order. A row's bits depend on what it sees alone: not on T,
    nor on W or K beyond its last visible slot. Section 4.5.
    """
    tokens, heads, dim = q.shape
    width = window_index.shape[1] + entry_index.shape[1]
    out = torch.zeros(tokens, heads, dim, device=q.device)
    chunk = max(1, _SLICE_BYTES // (4 * dim * max(1, width)))
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        seen_window = window_index[start:stop] >= 0
        # Neighbours see mostly the same rows, and each is decoded once.
        rows, inverse = window_index[start:stop][seen_window].unique(return_inverse=True)
        is_ring = rows < ring.shape[0]
        packed = fresh.new_empty(rows.numel(), fresh.shape[-1])
        packed[is_ring] = ring[rows[is_ring]]
        packed[~is_ring] = fresh[rows[~is_ring] - ring.shape[0]]
        window_keys = unpack_window(packed, storage, dim)[inverse]
        window_keys = window_keys.split(seen_window.sum(-1).tolist())
        entry_keys = (q.new_empty(0, dim),) * (stop - start)
        if main is not None:
            seen = entry_index[start:stop] >= 0
            rows, inverse = entry_index[start:stop][seen].unique(return_inverse=True)
            decoded = unpack_entry(main[rows], storage, dim)[inverse]
            entry_keys = decoded.split(seen.sum(-1).tolist())
        for t in range(start, stop):
            keys = torch.cat((window_keys[t - start], entry_keys[t - start]))  # [S, D]
            if keys.shape[0]:
                out[t] = _attend_row(q[t], keys, sink)
    return out


def paged_index_scores_ref(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    sequence: Tensor,
    visible: Tensor,
    entries_per_block: int,
    storage: str = "fp4",
    num_columns: int | None = None,
) -> Tensor:
    """Return I[t, e] = sum_h w[t, h] * relu(q[t, h] . k_e) for e < visible[t], -inf elsewhere.

    q            [T, HI, DI] fp32
    weights      [T, HI] fp32      head weights, already scaled; may be negative
    keys         [E, kb] uint8     pool of index keys; a block is `entries_per_block` rows
    tables       [S, NB] int64     block ids of every sequence, -1 unused
    sequence     [T] int64         row of `tables`
    visible      [T] int64         entries the token sees
    num_columns  M; None: the largest of `visible`
    returns      [T, M] fp32

    Entry e of sequence s is pool row tables[s, e // entries_per_block] * entries_per_block +
    e % entries_per_block. Rows at and beyond `visible` are not read for any token of a sequence
    that does not see them. Section 5.3.
    """
    tokens, _, dim = q.shape
    if num_columns is None:
        num_columns = int(visible.max()) if tokens else 0
    out = torch.full((tokens, num_columns), -torch.inf, device=q.device)
    seen = visible.clamp_max(num_columns)
    for s in sequence.unique().tolist():
        members = (sequence == s).nonzero().squeeze(-1).tolist()
        counts = {t: int(seen[t]) for t in members}
        longest = max(counts.values())
        for start in range(0, longest, _COLUMNS):
            entry = torch.arange(start, min(start + _COLUMNS, longest), device=q.device)
            block = tables[s, entry // entries_per_block]
            rows = keys[block * entries_per_block + entry % entries_per_block]
            decoded = q.new_zeros(_COLUMNS, dim)
            decoded[: rows.shape[0]] = unpack_index(rows, storage, dim)
            for t in members:
                size = min(_COLUMNS, counts[t] - start)
                if size > 0:
                    dots = (q[t] @ decoded.T).relu_()  # [HI, _COLUMNS]
                    scores = (dots * weights[t].unsqueeze(-1)).sum(0)
                    out[t, start : start + size] = scores[:size]
    return out
