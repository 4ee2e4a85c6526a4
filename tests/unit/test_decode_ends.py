"""Engram, head and draws of the decode step, in Triton's interpreter or compiled on a GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.config.inventory import Storage
from finwhale.decode_kernels.engram_gate import (
    EngramUnsupportedError,
    engram_gather,
    engram_gather_ref,
    engram_update,
    engram_update_ref,
)
from finwhale.decode_kernels.head import draw_tokens, draw_tokens_ref, head_logits
from finwhale.ops.engram import engram_multipliers
from finwhale.ops.hyper_connection import HyperMix
from finwhale.ops.weight_formats import quantize_weight

SLOW = pytest.mark.slow  # in the interpreter; compiled they are fast
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table_of(primes, dim):
    rows = int(primes.sum())
    values = normal(rows, dim) * torch.logspace(-2, 2, rows)[:, None]
    codes, scales = quantize_weight(values, Storage.FP8_ROW)
    offsets = (primes.flatten().cumsum(0) - primes.flatten()).view_as(primes)
    return codes.to(DEVICE), scales.view(torch.uint8).to(DEVICE), offsets.to(DEVICE)


@pytest.mark.parametrize("tokens", [1, 3, pytest.param(65, marks=SLOW)])
def test_gathered_rows_have_the_bits_of_the_reference(tokens):
    primes = torch.tensor([[11, 13], [17, 19], [23, 29]])
    table, scales, offsets = table_of(primes, 64)
    multipliers = engram_multipliers(1, 4, 99092).to(DEVICE)
    recent = torch.randint(0, 99092, (tokens, 4), generator=torch.Generator().manual_seed(tokens))
    args = recent.to(DEVICE), multipliers, primes.to(DEVICE), offsets, table, scales
    got = engram_gather(*args)
    assert torch.equal(got, engram_gather_ref(*args))
    # Only look-backs up to an order reach its columns.
    older = recent.clone()
    older[:, 3] += 1
    moved = (engram_gather(older.to(DEVICE), *args[1:]) != got).view(tokens, 3, -1).any(-1).any(0)
    assert moved.tolist() == [False, False, True]


def test_released_hash_vectors():
    """Section 7.5: ids 0, 17, 4242, 99091, 5, layer 1, last token; a table that says its row."""
    multipliers = engram_multipliers(1, 4, 99092).to(DEVICE)
    recent = torch.tensor([[5, 99091, 4242, 17]], device=DEVICE)
    primes = torch.tensor([[16000057], [16000189], [16000339]], device=DEVICE)
    base = torch.tensor([[0], [128000880], [256002934]], device=DEVICE)
    wanted = torch.tensor([[12391924], [132657239], [264715540]], device=DEVICE)
    # Every row but the wanted ones is out of the three-row table.
    table = torch.zeros(3, 32).to(torch.float8_e4m3fn).to(DEVICE)
    table[0], table[1], table[2] = 1.0, 2.0, 3.0
    scales = torch.full((3, 1), 127, dtype=torch.uint8, device=DEVICE)
    offsets = base - wanted + torch.arange(3, device=DEVICE)[:, None]
    got = engram_gather(recent, multipliers, primes, offsets, table, scales)
    assert got.view(3, 32)[:, 0].tolist() == [1.0, 2.0, 3.0]


def update_inputs(tokens, channels, parts):
    before = HyperMix(*(normal(tokens, *s, seed=9).to(DEVICE) for s in ((4,), (4,), (4, 4))))
    return (
        normal(tokens, 4, channels).bfloat16().to(DEVICE),
        normal(tokens, parts, channels, seed=1).bfloat16().to(DEVICE) if parts else None,
        before if parts else None,
        normal(tokens, 5 * channels, seed=2).bfloat16().to(DEVICE),
        normal(4, channels, seed=3).bfloat16().to(DEVICE),
        normal(4, channels, seed=4).bfloat16().to(DEVICE),
    )


@pytest.mark.parametrize(
    ("tokens", "channels", "parts"), [(1, 33, 0), (1, 96, 7), pytest.param(5, 63, 1, marks=SLOW)]
)
def test_update_equals_the_reference(tokens, channels, parts):
    args = update_inputs(tokens, channels, parts)
    got, want = engram_update(*args, 1e-20), engram_update_ref(*args, 1e-20)
    assert float((got.float() - want.float()).norm() / want.float().norm()) < 2e-3
    # Without the gate's inputs the streams differ.
    streams, rows, before, kv, q, k = args
    for wrong in ((kv.roll(channels, 1), q, k), (kv, -q, k), (kv, q, k.flip(1))):
        other = engram_update(streams, rows, before, *wrong, 1e-20)
        assert float((other.float() - want.float()).norm() / want.float().norm()) > 0.02


def test_gate_at_zero_follows_the_sign_of_zero():
    streams, _, _, kv, q, k = update_inputs(1, 32, 0)
    for sign in (1.0, -1.0):
        zeros = torch.full_like(streams, 0.0) * sign
        args = (zeros, None, None, kv.abs(), q.abs(), k.abs())
        torch.testing.assert_close(engram_update(*args, 1e-20), engram_update_ref(*args, 1e-20))


def test_engram_refuses_what_it_cannot_hold():
    primes = torch.tensor([[3]])
    table, scales, offsets = table_of(primes, 96)
    recent = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    args = engram_multipliers(1, 2, 99).to(DEVICE), primes.to(DEVICE), offsets, table, scales
    with pytest.raises(EngramUnsupportedError, match="dim"):
        engram_gather(recent, *args)


@pytest.mark.parametrize("tokens", [1, 3])
def test_head_is_an_exact_product_with_fp32_sums(tokens):
    x, w = normal(tokens, 64).bfloat16().to(DEVICE), normal(101, 64, seed=1).bfloat16().to(DEVICE)
    torch.testing.assert_close(
        head_logits(x, w).double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("vocab", [1, 1000, 1025, 4097])
def test_draws_equal_the_reference(vocab):
    rows = 12
    logits = (3 * normal(rows, vocab)).to(DEVICE)
    temperatures = torch.tensor([0.0, 0.7, 1.0, 2.0] * 3, device=DEVICE)
    uniforms = torch.rand(rows, dtype=torch.float64, device=DEVICE)
    uniforms[1], uniforms[2] = 0.0, 1.0 - 2.0**-53
    got = draw_tokens(logits, temperatures, uniforms)
    assert torch.equal(got, draw_tokens_ref(logits, temperatures, uniforms))


def test_greedy_takes_the_lowest_of_equal_logits_and_marks_damage():
    logits = torch.zeros(4, 3000, device=DEVICE)
    logits[0, [1500, 2900]] = 7.0
    logits[1, [2999, 1023]] = 7.0
    logits[2, 2000] = torch.nan
    logits[3, 5] = torch.inf
    zeros = torch.zeros(4, device=DEVICE)
    assert draw_tokens(logits, zeros, zeros.double()).tolist() == [1500, 1023, -1, -1]
    ones = torch.ones(4, device=DEVICE)
    assert draw_tokens(logits, ones, zeros.double()).tolist() == [0, 0, -1, -1]


def test_draws_have_the_frequencies_of_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).log_softmax(0)
    rows = 24
    uniforms = (torch.arange(rows, dtype=torch.float64, device=DEVICE) + 0.5) / rows
    ids = draw_tokens(
        logits.expand(rows, -1).contiguous().to(DEVICE), torch.ones(rows, device=DEVICE), uniforms
    )
    counts = torch.bincount(ids.cpu(), minlength=4) / rows
    assert float((counts - logits.exp()).abs().max()) <= 1 / rows
    assert torch.equal(ids, ids.sort().values)
