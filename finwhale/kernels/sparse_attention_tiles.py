"""How the sparse attention kernels cut their work: launch sizes, selection lists, tile loads.

A query tile is BQ tokens times H heads, read as ROWS = BQ * H rows of the contiguous [T * H, D]
matrix: row = token * H + head. All heads share their keys, so one key block serves all rows.
Which (query tile, entry block) pairs hold a selected entry is found in torch, without reading a
value back to the host, and given to the kernels as lists. The easy mistake: an offset in int32;
T * M passes 2^31 at a 64K context, so batches and tiles move the pointers in int64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Sizes of the launches; `key_rows` is the query rows per step of the key gradients."""

    rows: int
    key_rows: int
    key_block: int
    num_warps: int
    num_stages: int


# By largest D: (bf16, fp32). Shared memory of an H100 or H200 holds 227 KiB per block. At D = 512
# the key gradients need q and dout in two layouts each: 288 KiB at 64 rows, 99 KiB at 32.
_LAUNCHES = (
    (
        128,
        Launch(rows=128, key_rows=128, key_block=64, num_warps=8, num_stages=2),
        Launch(rows=64, key_rows=64, key_block=32, num_warps=8, num_stages=1),
    ),
    (
        256,
        Launch(rows=64, key_rows=64, key_block=64, num_warps=8, num_stages=1),
        Launch(rows=64, key_rows=32, key_block=16, num_warps=8, num_stages=1),
    ),
    (
        512,
        Launch(rows=64, key_rows=32, key_block=32, num_warps=8, num_stages=2),
        Launch(rows=32, key_rows=32, key_block=16, num_warps=8, num_stages=1),
    ),
)


def launch_for(dim: int, dtype: torch.dtype) -> Launch:
    """Return the launch sizes for a head dim of at most 512."""
    row = next(row for row in _LAUNCHES if dim <= row[0])
    return row[2] if dtype == torch.float32 else row[1]


def backward_launch_for(dim: int, heads: int, dtype: torch.dtype) -> Launch:
    """Return the launch sizes of the backward kernels.

    At D = 512 in bf16 a tile of 64 rows spills 1.5 KB per thread; at 32 rows nothing spills and two
    programs share an SM (measured on an H200: 2.9 ms instead of 4.1 at the shape of `mini`).
    """
    launch = launch_for(dim, dtype)
    if dim > 256 and dtype is torch.bfloat16:
        return replace(launch, rows=max(32, heads), num_warps=4, num_stages=2)
    return launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """A top-k selection in the forms the query kernels read.

    picked  [B, T, S] uint8, 1 at a selected entry; S >= M, columns from M on are not read except
            for zeros that fill the last entry block
    blocks  [B, tiles, blocks] int32, the entry blocks a query tile needs, ascending, first
    counts  [B, tiles] int32, how many of them count
    """

    picked: Tensor
    blocks: Tensor
    counts: Tensor


def select(topk: Tensor | None, num_entries: int, heads: int, launch: Launch) -> Selection | None:
    """Return the selection of topk [B, T, K] int64 (-1 empty), or None with nothing to select.

    Sizes come from shapes alone, so the call can be captured in a CUDA graph.
    """
    if topk is None or not num_entries:
        return None
    batch, tokens, _ = topk.shape
    # Empty slots go to one column behind the last block, which no kernel reads; 16 columns keep
    # the row stride a multiple of 16 for wide loads.
    spare = -(-num_entries // launch.key_block) * launch.key_block
    picked = torch.zeros(batch, tokens, spare + 16, dtype=torch.uint8, device=topk.device)
    picked.scatter_(-1, torch.where(topk < 0, spare, topk), 1)
    touched = touched_blocks(topk, num_entries, launch.rows // heads, launch.key_block)
    blocks, counts = listed(touched)
    return Selection(picked=picked, blocks=blocks, counts=counts)


def touched_blocks(topk: Tensor, num_entries: int, tile_tokens: int, key_block: int) -> Tensor:
    """Return [B, tiles, blocks] uint8: 1 where a token of the tile selects in the entry block."""
    batch, tokens, width = topk.shape
    tiles, blocks = -(-tokens // tile_tokens), -(-num_entries // key_block)
    chosen = F.pad(topk, (0, 0, 0, tiles * tile_tokens - tokens), value=-1)
    chosen = chosen.reshape(batch, tiles, tile_tokens * width)
    touched = torch.zeros(batch, tiles, blocks + 1, dtype=torch.uint8, device=topk.device)
    touched.scatter_(-1, torch.where(chosen < 0, blocks, chosen // key_block), 1)
    return touched[..., :blocks]


def listed(touched: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of the ones of touched [..., n], and how many there are.

    The places [..., n] int32 stand first, ascending; what follows them is not to be read.
    """
    places = touched.argsort(dim=-1, descending=True, stable=True).to(torch.int32).contiguous()
    return places, touched.sum(-1, dtype=torch.int32)


@triton.jit
def load_rows(base, first, count, BLOCK: tl.constexpr, D: tl.constexpr):
    """Return rows first.. of the [count, D] matrix at `base`, [BLOCK, D]; zeros past its end."""
    rows = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, D)
    offsets = rows[:, None] * D + columns[None, :]
    return tl.load(base + offsets, mask=(rows < count)[:, None], other=0.0)


@triton.jit
def load_values(base, count, other, BLOCK: tl.constexpr):
    """Return the first BLOCK values at `base`, with `other` past `count`, [BLOCK]."""
    rows = tl.arange(0, BLOCK)
    return tl.load(base + rows, mask=rows < count, other=other)


@triton.jit
def load_reach(positions, token, tokens, window):
    """Return how far back each row's token sees, [ROWS]; -1 (nothing) past the last token."""
    reach = tl.load(positions + token, mask=token < tokens, other=-1)
    return tl.minimum(reach, window - 1).to(tl.int32)


@triton.jit
def window_scores(q, keys, scale, row, reach, first, BLOCK: tl.constexpr):
    """Return scaled scores [ROWS, BLOCK] fp32 of window rows first.., -inf outside the band.

    row [ROWS] is each query's own row in window_kv; it sees the rows row - reach .. row.
    """
    distance = row[:, None] - (first + tl.arange(0, BLOCK))[None, :]
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    return tl.where((distance >= 0) & (distance <= reach[:, None]), scores, float("-inf"))


@triton.jit
def entry_scores(q, keys, scale, picked, token, count, stride, first, BLOCK: tl.constexpr):
    """Return scaled scores [ROWS, BLOCK] fp32 of entries first.., -inf where not selected.

    picked points at the tile's first token; token [ROWS] counts from there, and `count` tokens
    are left in the sequence.
    """
    columns = first + tl.arange(0, BLOCK)
    offsets = token[:, None] * stride + columns[None, :]
    is_picked = tl.load(picked + offsets, mask=(token < count)[:, None], other=0)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    return tl.where(is_picked != 0, scores, float("-inf"))
