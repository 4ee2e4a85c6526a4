"""Which operations an engine computes with, and whether they keep its promise on this machine.

The promise: a row's bits do not depend on how many rows stand beside it. A library's matrix product
keeps it from four rows on and breaks it below (it takes another path), so fewer rows are padded
with zeros. Everything else works row by row. `broken_promises` checks this on the CPU at hand with
the model's own matrices; an engine that finds one says so. A newcomer's mistake: believing that a
masked softmax has the bits of a shorter one.
Source: shared bit rules are in docs/engine.md.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from finwhale.cache.paged_reads import (
    pack_entry,
    pack_index,
    pack_window,
    paged_attention_ref,
    paged_index_scores_ref,
)
from finwhale.ops import FAST, Ops
from finwhale.ops.engram import engram_gate
from finwhale.ops.hyper_connection import hyper_mix, sinkhorn_planes
from finwhale.ops.index import select_pool_blocks
from finwhale.ops.linear import grouped_linear, linear
from finwhale.ops.moe import route_experts

# Below this many rows the library's products take another path.
MIN_ROWS = 4
# More than any CPU handles in one turn of its loop.
VECTOR_ELEMENTS = 64
_TRIED_ROWS = (4, 5, 6, 7, 8, 9, 13, 16, 17, 31, 32, 33, 48, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """Writing and reading packed rows, as `finwhale.cache.paged_reads` defines it.

    listed_scores  index scores of listed pool rows alone; None: score all, hide the others
    """

    attention: Callable
    index_scores: Callable
    listed_scores: Callable | None
    pack_window: Callable
    pack_entry: Callable
    pack_index: Callable
    name: str


def padded_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T as `finwhale.ops.linear.linear`, never multiplying fewer than four rows."""
    rows = x.numel() // max(1, x.shape[-1])
    if rows >= MIN_ROWS or not rows:
        return linear(x, weight)
    flat = x.reshape(rows, x.shape[-1])
    wide = torch.cat((flat, flat.new_zeros(MIN_ROWS - rows, flat.shape[-1])))
    return linear(wide, weight)[:rows].view(*x.shape[:-1], weight.shape[0])


def padded_grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `finwhale.ops.linear.grouped_linear` of x [..., G, K], padded the same way."""
    rows = x.shape[:-2].numel()
    if rows >= MIN_ROWS or not rows:
        return grouped_linear(x, weight)
    flat = x.reshape(rows, *x.shape[-2:])
    wide = torch.cat((flat, flat.new_zeros(MIN_ROWS - rows, *flat.shape[-2:])))
    return grouped_linear(wide, weight)[:rows].view(*x.shape[:-2], weight.shape[0])


def whole_vectors(function: Callable, x: Tensor) -> Tensor:
    """Return function(x), elementwise, always in full vector registers.

    The last elements of an array go through scalar code, whose exponential has other bits.
    """
    flat = x.reshape(-1)
    wide = torch.nn.functional.pad(flat, (0, -flat.numel() % VECTOR_ELEMENTS))
    return function(wide)[: flat.numel()].view(x.shape)


_softplus = partial(whole_vectors, torch.nn.functional.softplus)
_sigmoid = partial(whole_vectors, torch.sigmoid)


def _expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return `hyper_expand` as sums of whole rows in a stated order.

    Small products of a batch take another path than one alone.
    """
    mixed = comb[..., 0, :].unsqueeze(-1) * streams[..., 0, :].unsqueeze(-2)
    for i in range(1, streams.shape[-2]):
        mixed = mixed + comb[..., i, :].unsqueeze(-1) * streams[..., i, :].unsqueeze(-2)
    return post.unsqueeze(-1) * y.unsqueeze(-2) + mixed


def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Return `hyper_collapse` as sums of whole rows in a stated order."""
    total = pre[..., 0, None] * streams[..., 0, :]
    for i in range(1, streams.shape[-2]):
        total = total + pre[..., i, None] * streams[..., i, :]
    return total


def numba_missing() -> str | None:
    """Return why the compiled kernels cannot be used, or None."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed; pip install 'finwhale[engine]'"
    return None


def engine_ops(kernels: str, *, batch_invariant: bool) -> tuple[Ops, Reads]:
    """Return the operations and reads of an engine on a CPU in fp32.

    kernels          "torch": the slow definition. "numba": compiled, ValueError if missing.
                     "auto": compiled if it is there
    batch_invariant  pad products of fewer than four rows
    """
    product, grouped = padded_linear, padded_grouped_linear
    if not batch_invariant:
        product, grouped = linear, grouped_linear
    reason = numba_missing()
    if kernels == "numba" and reason is not None:
        raise ValueError(f"engine.kernels: {reason}")
    shared = replace(
        FAST,
        linear=product,
        grouped_linear=grouped,
        route_experts=partial(route_experts, softplus=_softplus),
    )
    if kernels == "torch" or reason is not None:
        ops = replace(
            shared,
            hyper_mix=partial(
                hyper_mix, sinkhorn=sinkhorn_planes, linear=product, sigmoid=_sigmoid
            ),
            engram_gate=partial(engram_gate, sigmoid=_sigmoid),
            hyper_collapse=_collapse,
            hyper_expand=_expand,
        )
        return ops, Reads(
            attention=paged_attention_ref,
            index_scores=paged_index_scores_ref,
            listed_scores=None,
            pack_window=pack_window,
            pack_entry=pack_entry,
            pack_index=pack_index,
            name="torch",
        )
    from finwhale.kernels import codecs_numba as codecs
    from finwhale.kernels import fused_numba as fused
    from finwhale.kernels import index_scores_numba as scores
    from finwhale.kernels import paged_numba as paged
    from finwhale.kernels import products_numba as products

    if batch_invariant:
        product, grouped = products.linear, products.grouped_linear
    ops = replace(
        shared,
        linear=product,
        grouped_linear=grouped,
        grouped_experts=products.grouped_experts,
        rms_norm=fused.rms_norm,
        apply_rope=fused.apply_rope,
        hyper_mix=partial(fused.hyper_mix, linear=product),
        hyper_collapse=fused.hyper_collapse,
        hyper_expand=fused.hyper_expand,
        clamped_swiglu=fused.clamped_swiglu,
        engram_gate=fused.engram_gate,
        round_index=codecs.round_index,
        route_experts=products.route_experts,
        select_topk=scores.select_topk,
        select_pool_blocks=partial(select_pool_blocks, select=scores.select_topk),
    )
    return ops, Reads(
        attention=paged.paged_attention,
        index_scores=scores.paged_index_scores,
        listed_scores=scores.paged_listed_scores,
        pack_window=codecs.pack_window,
        pack_entry=codecs.pack_entry,
        pack_index=codecs.pack_index,
        name="numba",
    )


@torch.no_grad()
def broken_promises(model, ops: Ops, *, most_rows: int = 64) -> list[str]:
    """Return the products whose rows depend on their number or place on this CPU; none is right.

    model      one matrix of every shape is tried, the grouped products and one layer's experts
    most_rows  rows of the largest step
    """
    broken = []
    tried: set[tuple] = set()
    for name, weight in model.named_parameters():
        shape = tuple(weight.shape)
        if weight.dim() == 2 and shape not in tried and ".ffn.experts." not in name:
            tried.add(shape)
            broken += _changed(name, partial(_product, ops, weight), shape[1:], most_rows)
    attention, moe = model.layers[0].attn, model.layers[0].ffn
    groups = model.config.text_config.o_groups
    wide = attention.wo_a.weight
    shape = groups, wide.shape[1]
    broken += _changed("wo_a", lambda x: ops.grouped_linear(x, wide), shape, most_rows)
    if moe.stacks:
        experts = len(moe.experts)
        stacks = [moe.stacks[name].unflatten(0, (experts, -1)) for name in ("w1_w3", "w2")]
        run = partial(_routed, ops, stacks, model.config.text_config.swiglu_limit)
        broken += _changed("experts", run, (stacks[0].shape[-1],), most_rows)
    return broken


def _product(ops: Ops, weight: Tensor, x: Tensor) -> Tensor:
    return ops.linear(x, weight)


def _routed(ops: Ops, stacks: list[Tensor], limit: float, x: Tensor) -> Tensor:
    """Return the experts' sum, where a row's experts are a function of the row, as in a model."""
    experts = stacks[0].shape[0]
    first = (x[:, :1] > 0).long() % experts
    ids = torch.cat((first, (first + 1) % experts), dim=1)[:, : min(2, experts)]
    shares = x[:, : ids.shape[1]].abs() + 0.1
    assert ops.grouped_experts is not None  # stacks are made for it alone
    return ops.grouped_experts(x, ids, shares, *stacks, limit, ops.clamped_swiglu)


def _changed(name: str, product: Callable, shape: tuple[int, ...], most_rows: int) -> list[str]:
    """Return what is wrong with one product of rows of `shape`, in a list, or nothing."""
    rows = max(most_rows, *_TRIED_ROWS)
    x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(0))
    whole = product(x)
    for first in (0, 1, 3):
        for count in (1, 2, 3, *_TRIED_ROWS):
            part = slice(first, min(first + count, rows))
            if not torch.equal(product(x[part].clone()), whole[part]):
                return [f"{name} {list(shape)} at rows {part.start} to {part.stop - 1} of {rows}"]
    return []
