"""The global KV of a running sequence as bytes, for another process that goes on with it.

    blob = engine.export("a")                      # here: 890 bytes per token in the release
    other.add(tokens_so_far, params, hand_over=blob)   # there

Owns the bytes and their checks; any length, so an unfinished group goes along as one row per owner
of ratio 2 and the last block may be part full. Windows are not in it: the start replays them, by
the same rule as behind a prefix hit. Refused, before anything is touched: damage, other weights,
settings, tokenizer or tenant (the root of the block keys), other tokens. A newcomer's mistake: to
send no tokens along; the bytes hold their digest, not the ids. Source: spec/kv-cache.md sections
1.1 and 8; bytes in docs/cache-format.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.cache.paged_pools import PagedLayout, PagedPools
from finwhale.cache.prefix_key import tagged_digest, token_bytes

FORMAT_VERSION = 1
MAGIC = b"FWKVHAND"
# magic, version, reserved, tokens, root, digest of the ids
_HEADER = struct.Struct("<8sIIQ32s32s")
_DIGEST_BYTES = 32


class HandOverError(ValueError):
    """Bytes that this engine must not go on from; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandOver:
    """Global KV of the first `num_tokens` tokens of a sequence.

    streams    [rows, bytes] uint8 per owner: main entries, then index keys, as the pools pack them
    open_rows  owner: [n, 2, D] fp32 content and gate of its unfinished group's n tokens
    """

    num_tokens: int
    streams: tuple[Tensor, ...]
    open_rows: dict[int, Tensor]

    def write_block(self, pools: PagedPools, number: int, block: int) -> None:
        """Write the rows of the sequence's block `number` into `block`, which the caller holds."""
        for n, spec in enumerate(pools.layout.owners):
            size = pools.layout.entries_per_block(spec)
            target = (pools.main[spec.layer_id], pools.index_k[spec.layer_id])
            for pool, rows in zip(target, self.streams[2 * n : 2 * n + 2], strict=True):
                part = rows[number * size : (number + 1) * size]
                pool[block * size : block * size + part.shape[0]] = part

    def write_open(self, pools: PagedPools, slot: int) -> None:
        """Write the unfinished groups into `slot`."""
        for owner, rows in self.open_rows.items():
            first = slot * (pools.layout.specs[owner].ratio - 1)
            pools.open[owner][first : first + rows.shape[0]] = rows


def read_sequence(pools: PagedPools, blocks: Sequence[int], slot: int, num_tokens: int) -> HandOver:
    """Return a copy of a sequence's global KV; its last computed row is `num_tokens` - 1."""
    streams: list[Tensor] = []
    open_rows: dict[int, Tensor] = {}
    for spec in pools.layout.owners:
        owner, count = spec.layer_id, num_tokens // spec.ratio
        for pool in (pools.main[owner], pools.index_k[owner]):
            parts = [pool[pools.block_rows(spec, block)] for block in blocks]
            streams.append(torch.cat([pool[:0], *parts])[:count].clone())
        if num_tokens % spec.ratio:
            first = slot * (spec.ratio - 1)
            rows = pools.open[owner][first : first + num_tokens % spec.ratio]
            open_rows[owner] = rows.clone()
    return HandOver(num_tokens=num_tokens, streams=tuple(streams), open_rows=open_rows)


def encode(hand_over: HandOver, *, root: bytes, tokens: Sequence[int]) -> bytes:
    """Return the bytes.

    root    [32] of the block keys: namespace and tenant
    tokens  ids, `num_tokens` of them
    """
    header = _HEADER.pack(MAGIC, FORMAT_VERSION, 0, hand_over.num_tokens, root, _ids_digest(tokens))
    parts = [*hand_over.streams, *hand_over.open_rows.values()]
    body = b"".join((header, *(part.contiguous().numpy().tobytes() for part in parts)))
    return body + hashlib.sha256(body).digest()


def decode(blob: bytes, layout: PagedLayout, *, root: bytes, tokens: Sequence[int]) -> HandOver:
    """Return what `encode` was given; `tokens` are those of the receiver, as many or more.

    HandOverError: not such bytes, damaged, or of another model, setting, tenant or prompt.
    """
    if len(blob) < _HEADER.size + _DIGEST_BYTES or not blob.startswith(MAGIC):
        raise HandOverError(f"{len(blob)} bytes that are no hand-over")
    _, version, _, num_tokens, found_root, ids = _HEADER.unpack_from(blob)
    if version != FORMAT_VERSION:
        raise HandOverError(f"format version {version}, this engine has {FORMAT_VERSION}")
    view = memoryview(blob)
    if hashlib.sha256(view[:-_DIGEST_BYTES]).digest() != bytes(view[-_DIGEST_BYTES:]):
        raise HandOverError("damaged bytes")
    if found_root != root:
        raise HandOverError("bytes of another model, setting, tokenizer or tenant")
    if num_tokens > len(tokens) or ids != _ids_digest(tokens[:num_tokens]):
        raise HandOverError(f"{num_tokens} tokens that are not the first ones of this prompt")
    shapes = [
        (num_tokens // spec.ratio, width)
        for spec in layout.owners
        for width in (layout.entry_bytes, layout.key_bytes)
    ]
    row = (2, layout.config.head_dim)
    opened = {s.layer_id: (num_tokens % s.ratio, *row) for s in layout.owners}
    opened = {owner: shape for owner, shape in opened.items() if shape[0]}
    sizes = [rows * width for rows, width in shapes]
    sizes += [4 * rows * two * dim for rows, two, dim in opened.values()]
    if len(blob) != _HEADER.size + sum(sizes) + _DIGEST_BYTES:
        raise HandOverError(f"{len(blob)} bytes, another layout than this engine's")
    parts, at = [], _HEADER.size
    for size in sizes:
        # A copy: the sequence may wait long after the caller has reused its bytes.
        raw = bytearray(view[at : at + size])
        parts.append(torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.zeros(0).byte())
        at += size
    streams, rest = parts[: len(shapes)], parts[len(shapes) :]
    return HandOver(
        num_tokens=num_tokens,
        streams=tuple(s.view(shape) for s, shape in zip(streams, shapes, strict=True)),
        open_rows={
            owner: raw.view(torch.float32).view(shape)
            for (owner, shape), raw in zip(opened.items(), rest, strict=True)
        },
    )


def _ids_digest(tokens: Sequence[int]) -> bytes:
    return tagged_digest(b"finwhale.hand-over", token_bytes(tokens))
