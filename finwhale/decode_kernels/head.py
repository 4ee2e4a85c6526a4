"""The end of a decode step on the device: logits by the head matrix, and one token id per row.

The head is a BF16 product with fp32 sums (`linear_fp8` without scales). A draw follows the rule of
the engine's sampler without its cuts: the first id, in id order, whose running sum of
exp((x - max) / temperature) exceeds u times the whole sum; temperature 0 takes the best, ties to
the lowest id. The uniform numbers come from outside, so a draw depends on nothing but its row.
Exponentials are fp32 here and float64 there (D29), so a draw may differ where u falls within a
rounding of a boundary. The easy mistake: a row with a NaN has no best; it gets the id -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.linear_fp8 import LinearLaunch, linear_fp8
from finwhale.decode_kernels.tiles import counters, last_to_arrive

_TILE = 1024


def head_logits(
    x: Tensor,
    weight: Tensor,
    launch: LinearLaunch | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return fp32 logits [T, V] of normalised rows x [T, C] bf16. weight [V, C] bf16."""
    return linear_fp8(x, weight, None, out_dtype=torch.float32, launch=launch, scratch=scratch)


def draw_tokens_ref(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """Return one id per row, or -1 for a row that is not finite.

    logits        [T, V] fp32
    temperatures  [T] fp32, 0 for the best
    uniforms      [T] float64 in [0, 1)
    returns       [T] int64
    """
    x = logits.double()
    best = x.max(dim=-1, keepdim=True).values
    weights = ((x - best) / temperatures.double().clamp_min(1e-30).unsqueeze(-1)).exp()
    mass = weights.cumsum(-1)
    target = uniforms.unsqueeze(-1) * mass[:, -1:]
    drawn = torch.searchsorted(mass, target, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
    greedy = (x == best).to(torch.uint8).argmax(-1)
    ids = torch.where(temperatures > 0, drawn, greedy)
    return torch.where(torch.isfinite(logits).all(-1), ids, -1)


@triton.jit
def _draw_kernel(
    logits_ptr, temperature_ptr, uniform_ptr, best_ptr, place_ptr, mass_ptr, count_ptr, out_ptr, V,
    TILE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    row = tl.cast(tl.program_id(1), tl.int64)
    pieces = tl.num_programs(0)
    v = piece * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + row * V + v, mask=v < V, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    best = tl.max(x, axis=0)
    place = tl.min(tl.where(x == best, v, 2147483647), axis=0)
    weight = tl.exp((x - best) * inverse)
    # A NaN or an infinity anywhere in the row is told by its place.
    broken = tl.max(((v < V) & ((x - x) != 0.0)).to(tl.int32), axis=0)
    at = row * pieces + piece
    tl.store(best_ptr + at, best)
    tl.store(place_ptr + at, tl.where(broken > 0, -1, place))
    tl.store(mass_ptr + at, tl.sum(weight.to(tl.float64), axis=0))
    if last_to_arrive(count_ptr + row, pieces):
        p = tl.arange(0, PIECES)
        there = p < pieces
        at_p = row * pieces + p
        bests = tl.load(best_ptr + at_p, mask=there, other=float("-inf"), cache_modifier=".cg")
        places = tl.load(place_ptr + at_p, mask=there, other=2147483647, cache_modifier=".cg")
        masses = tl.load(mass_ptr + at_p, mask=there, other=0.0, cache_modifier=".cg")
        top = tl.max(bests, axis=0)
        token = tl.min(tl.where(bests == top, places, 2147483647), axis=0)
        is_broken = tl.min(places, axis=0) < 0
        if (temperature > 0) & (is_broken == 0):
            masses = masses * tl.exp((bests - top) * inverse).to(tl.float64)
            running = tl.cumsum(masses, axis=0)
            total = tl.sum(masses, axis=0)
            target = tl.load(uniform_ptr + row) * total
            # The piece in which the running sum first exceeds the target.
            chosen = tl.sum(((running <= target) & there).to(tl.int32), axis=0)
            chosen = tl.minimum(chosen, pieces - 1)
            below = tl.sum(tl.where(p < chosen, masses, 0.0), axis=0)
            w = chosen * TILE + tl.arange(0, TILE)
            y = tl.load(logits_ptr + row * V + w, mask=w < V, other=float("-inf"))
            inner = tl.cumsum(tl.exp((y - top) * inverse).to(tl.float64), axis=0)
            passed = tl.sum(((below + inner <= target) & (w < V)).to(tl.int32), axis=0)
            token = tl.minimum(chosen * TILE + passed, V - 1)
        token = tl.where(is_broken, -1, token)
        tl.store(out_ptr + row, token.to(tl.int64))


def draw_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """Same contract as `draw_tokens_ref`, with exponentials in fp32 (D29)."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    pieces = triton.cdiv(vocab, _TILE)
    _draw_kernel[(pieces, rows)](
        logits, temperatures, uniforms,
        torch.empty(rows, pieces, device=logits.device),
        torch.empty(rows, pieces, dtype=torch.int32, device=logits.device),
        torch.empty(rows, pieces, dtype=torch.float64, device=logits.device),
        counters(logits.device, rows), out, vocab,
        TILE=_TILE, PIECES=triton.next_power_of_2(pieces), num_warps=4,
    )  # fmt: skip
    return out
