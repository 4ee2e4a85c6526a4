"""The compiled CPU kernels: equal to the references, and every row has bits of its own."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from finwhale.cache.paged_reads import (
    pack_entry,
    pack_index,
    pack_window,
    paged_attention_ref,
    paged_index_scores_ref,
)
from finwhale.kernels import fused_numba, paged_numba
from finwhale.kernels.index_scores_numba import paged_index_scores
from finwhale.kernels.paged_numba import paged_attention
from finwhale.kernels.select import KernelError
from finwhale.ops import engram, moe, norm, rope
from finwhale.ops import hyper_connection as hyper
from tests.unit.test_paged_reads import attention_case, score_case

# Of the row's scale; sums of another order differ by rounding alone.
CLOSE = 2e-6


def assert_rows_close(got, expected):
    """Assert |got - expected| <= CLOSE times the largest finite value of each row, or both -inf."""
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    if got.numel():
        got, expected = got.flatten(1), expected.flatten(1)
        finite = expected.isfinite()
        assert torch.equal(finite, got.isfinite())
        assert torch.equal(got[~finite], expected[~finite])
        scale = expected.where(finite, 0.0).abs().amax(-1, keepdim=True)
        gap = (got - expected).where(finite, 0.0).abs()
        assert (gap <= CLOSE * scale).all(), (gap / scale).max()


def projected(x, weight):
    """Return x W^T, a sum per number: [T, K], [O, K] -> [T, O]."""
    return (x.unsqueeze(1) * weight).sum(-1)


def fused_case(name, tokens):
    """Return (kernel, reference, arguments with a row per token, arguments shared by all)."""
    num, width = 4, 40
    streams = torch.randn(tokens, num, width)
    mix = {"iterations": 20, "norm_eps": 1e-20, "eps": 1e-6}
    pre, post = torch.rand(tokens, num), torch.rand(tokens, num)
    comb = torch.rand(tokens, num, num)
    match name:
        case "rms_norm":
            args = [torch.randn(tokens, 37)], [torch.randn(37), 1e-6]
            return fused_numba.rms_norm, norm.rms_norm, *args
        case "hyper_mix":
            kernel = partial(fused_numba.hyper_mix, linear=projected, **mix)
            shared = [torch.randn(24, num * width) / 10, torch.randn(24), torch.randn(3)]
            return kernel, partial(hyper.hyper_mix, **mix), [streams], shared
        case "hyper_collapse":
            return fused_numba.hyper_collapse, hyper.hyper_collapse, [streams, pre], []
        case "hyper_expand":
            args = [torch.randn(tokens, width), streams, post, comb]
            return fused_numba.hyper_expand, hyper.hyper_expand, args, []
        case "apply_rope" | "apply_rope_inverse":
            positions = torch.arange(tokens) + 100
            rotation = rope.rope_rotation(positions, rope.rope_frequencies(1e4, 16, None))
            # The rotation's row dim is its second; hand it over row by row, as the others.
            inverse = name == "apply_rope_inverse"

            def turned(function):
                return lambda x, r: function(x, r.transpose(0, 1), inverse)

            args = [torch.randn(tokens, 3, 36), rotation.transpose(0, 1).contiguous()]
            return turned(fused_numba.apply_rope), turned(rope.apply_rope), args, []
        case "clamped_swiglu":
            gate, up = 5 * torch.randn(tokens, 37), 5 * torch.randn(tokens, 37)
            weight = torch.randn(tokens, 1)

            def limited(function):
                return lambda g, u, w: function(g, u, w, 7.0)

            kernel, reference = limited(fused_numba.clamped_swiglu), limited(moe.clamped_swiglu)
            return kernel, reference, [gate, up, weight], []
        case "engram_gate":
            args = [streams, torch.randn(tokens, num, width), torch.randn(tokens, width)]
            shared = [torch.randn(num, width), torch.randn(num, width), 1e-6]
            return fused_numba.engram_gate, engram.engram_gate, args, shared
    raise AssertionError(name)


FUSED = [
    "rms_norm",
    "hyper_mix",
    "hyper_collapse",
    "hyper_expand",
    "apply_rope",
    "apply_rope_inverse",
    "clamped_swiglu",
    "engram_gate",
]


def parts(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel_equals_its_reference(name, tokens):
    kernel, reference, rows, shared = fused_case(name, tokens)
    for got, expected in zip(
        parts(kernel(*rows, *shared)), parts(reference(*rows, *shared)), strict=True
    ):
        assert_rows_close(got, expected)


@pytest.mark.parametrize("name", FUSED)
def test_a_row_of_a_fused_kernel_has_its_own_bits(name):
    kernel, _, rows, shared = fused_case(name, 37)
    whole = parts(kernel(*rows, *shared))
    for t in range(37):
        alone = parts(kernel(*(x[t : t + 1] for x in rows), *shared))
        for one, all_rows in zip(alone, whole, strict=True):
            assert torch.equal(one[0], all_rows[t])


@pytest.mark.parametrize("name", FUSED)
def test_a_nan_stays_in_its_row_and_is_not_lost(name):
    kernel, _, rows, shared = fused_case(name, 3)
    clean = parts(kernel(*rows, *shared))
    rows[0][1] = math.nan
    for got, before in zip(parts(kernel(*rows, *shared)), clean, strict=True):
        assert got[1].isnan().any()
        assert torch.equal(got[::2], before[::2])


def test_the_leading_dims_may_be_several_none_or_broadcast():
    x, weight = torch.randn(2, 3, 24), torch.randn(24)
    assert torch.equal(
        fused_numba.rms_norm(x, weight, 1e-6).flatten(0, 1),
        fused_numba.rms_norm(x.flatten(0, 1), weight, 1e-6),
    )
    assert_rows_close(
        fused_numba.rms_norm(x[0, 0], weight, 1e-6)[None], norm.rms_norm(x[:1, 0], weight, 1e-6)
    )
    rotation = rope.rope_rotation(torch.arange(3)[None], rope.rope_frequencies(1e4, 8, None))
    for rotated in (x, x.unflatten(-1, (2, 12)), x.transpose(0, 1).contiguous().transpose(0, 1)):
        expected = rope.apply_rope(rotated, rotation)
        assert_rows_close(fused_numba.apply_rope(rotated, rotation), expected)
    gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    assert_rows_close(
        fused_numba.clamped_swiglu(gate, up, None, 0.5), moe.clamped_swiglu(gate, up, None, 0.5)
    )
    pre = torch.tensor([1.0, 0.0, 0.0, 0.0])  # the first mix of a model, one for all tokens
    streams = torch.randn(2, 3, 4, 8)
    assert torch.equal(fused_numba.hyper_collapse(streams, pre), streams[:, :, 0])


def test_a_dot_product_of_zero_opens_the_gate_a_little():
    streams, one = torch.zeros(1, 2, 8), torch.ones(2, 8)
    got = fused_numba.engram_gate(streams, one[None], torch.ones(1, 8), one, one, 1e-6)
    expected = 1 / (1 + math.exp(-(1e-6**0.5)))
    assert (got - expected).abs().max() < 1e-6
    assert expected > 0.5002


def test_a_missing_step_is_noticed():
    kernel, reference, rows, shared = fused_case("hyper_mix", 3)
    expected = reference(*rows, *shared).comb
    assert_rows_close(kernel(*rows, *shared).comb, expected)
    short = {"iterations": 1, "norm_eps": 1e-20, "eps": 1e-6, "linear": projected}
    with pytest.raises(AssertionError):
        assert_rows_close(fused_numba.hyper_mix(*rows, *shared, **short).comb, expected)


def test_another_dtype_or_a_gradient_is_refused():
    x, weight = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(KernelError, match=r"x: got torch\.bfloat16"):
        fused_numba.rms_norm(x.bfloat16(), weight, 1e-6)
    with pytest.raises(KernelError, match="weight: asks for a gradient"):
        fused_numba.rms_norm(x, weight.requires_grad_(), 1e-6)
    with torch.inference_mode():
        assert fused_numba.rms_norm(x, weight, 1e-6).shape == (2, 8)
    case = attention_case(1)
    with pytest.raises(KernelError, match=r"q: got torch\.float64"):
        paged_attention(case[0].double(), *case[1:])
    with pytest.raises(KernelError, match="ring: got rows of 9 bytes, expected 66"):
        paged_attention(*case[:2], torch.zeros(1, 9, dtype=torch.uint8), *case[3:])


@pytest.mark.parametrize("storage", ["fp4", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "width", "chosen"),
    [
        (0, 2, 64, 5, 4),
        (1, 1, 64, 5, 4),
        (3, 4, 64, 5, 0),
        (3, 7, 96, 33, 31),
        # One below, at and above the tile of 64 keys.
        (2, 5, 64, 128, 63),
        (3, 4, 512, 32, 40),
    ],
)
def test_attention_equals_the_reference(storage, tokens, heads, dim, width, chosen):
    case = attention_case(tokens, heads=heads, dim=dim, width=width, chosen=chosen, storage=storage)
    assert_rows_close(paged_attention(*case), paged_attention_ref(*case))


@pytest.mark.parametrize("count", [63, 64, 65])
def test_attention_at_a_full_tile_of_keys(count):
    case = attention_case(2, width=count, chosen=0)
    case[3] = torch.randint(1, 9, (2, count))
    assert_rows_close(paged_attention(*case), paged_attention_ref(*case))
    # The best key last, so that what came before is scaled down.
    case[2] = case[2].clone()
    case[2][1] = pack_window(4 * case[0][:1, 0], "fp4")[0]
    case[3] = torch.full((2, count), 2)
    case[3][:, -1] = 1
    assert_rows_close(paged_attention(*case), paged_attention_ref(*case))


def test_attention_of_a_query_that_sees_nothing_is_zero():
    case = attention_case(3)
    case[3] = torch.full_like(case[3], -1)
    case[5] = torch.full_like(case[5], -1)
    assert not paged_attention(*case).any()
    case[4] = None
    assert not paged_attention(*case).any()
    case = attention_case(3)
    without = paged_attention(*case[:4], None, case[5], case[6])
    assert torch.equal(without, paged_attention(*case[:5], case[5][:, :0], case[6]))


def test_a_row_of_attention_has_its_own_bits():
    case = attention_case(37, heads=5, width=70, chosen=66)
    q, fresh, ring, window_index, main, entry_index, sink, _ = case
    whole = paged_attention(*case)
    pool = torch.cat((ring, fresh))
    padded = torch.nn.functional.pad(entry_index, (0, 3), value=-1)
    for t in range(37):
        one = slice(t, t + 1)
        alone = paged_attention(
            q[one], fresh[one], pool, window_index[one], main, padded[one], sink
        )
        assert torch.equal(alone[0], whole[t])


def test_attention_reads_no_unseen_row_and_minds_sink_and_scale():
    case = attention_case(4)
    right = paged_attention(*case)
    assert right.isfinite().all()
    spoiled = [*case]
    spoiled[4] = torch.cat((case[4], torch.full_like(case[4], 255)))
    assert torch.equal(paged_attention(*spoiled), right)
    spoiled[2] = torch.full_like(case[2], 255)
    assert paged_attention(*spoiled).isnan().any()
    for place, changed in ((6, torch.full_like(case[6], -math.inf)), (4, case[4].clone())):
        if place == 4:
            changed[1:, 32:] += 8  # E4M3: twice the value
        other = [*case]
        other[place] = changed
        with pytest.raises(AssertionError):
            assert_rows_close(paged_attention(*other), right)


def test_a_nan_in_a_query_fills_its_head_and_no_other():
    case = attention_case(3, heads=4, width=80)
    case[3] = torch.randint(1, 10, (3, 80))
    clean = paged_attention(*case)
    case[0] = case[0].clone()
    case[0][1, 2, 5] = math.nan
    got = paged_attention(*case)
    assert got[1, 2].isnan().all()
    got[1, 2] = clean[1, 2]
    assert torch.equal(got, clean)


@pytest.mark.parametrize("storage", ["fp4", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "lengths"),
    [
        (0, 3, 32, (9, 0, 17)),
        (1, 1, 32, (9, 0, 17)),
        (3, 3, 32, (9, 0, 17)),
        (7, 24, 128, (9, 0, 17)),
    ],
)
def test_scores_equal_the_reference(storage, tokens, heads, dim, lengths):
    case = score_case(tokens, heads=heads, dim=dim, lengths=lengths, storage=storage)
    for num_columns in (None, 0, 1, 16, 40):
        got = paged_index_scores(*case, num_columns)
        assert_rows_close(got, paged_index_scores_ref(*case, num_columns))


@pytest.mark.parametrize("visible", [63, 64, 65, 257])
def test_scores_at_a_full_tile_of_entries(visible):
    keys = pack_index(torch.randn(300, 32), "fp4")
    tables = torch.randperm(100)[None]
    zero = torch.zeros(2, dtype=torch.int64)
    seen = torch.tensor([visible, visible - 1])
    case = torch.randn(2, 2, 32), torch.randn(2, 2), keys, tables, zero, seen, 3
    assert_rows_close(paged_index_scores(*case), paged_index_scores_ref(*case))


def test_a_row_of_scores_has_its_own_bits():
    case = score_case(37)
    whole = paged_index_scores(*case)
    q, weights, keys, tables, sequence, visible, per_block, _ = case
    for t in range(37):
        one = slice(t, t + 1)
        table, zero = tables[sequence[one]], torch.zeros_like(sequence[one])
        alone = paged_index_scores(q[one], weights[one], keys, table, zero, visible[one], per_block)
        assert torch.equal(alone[0], whole[t, : alone.shape[1]])
        assert torch.isneginf(whole[t, alone.shape[1] :]).all()


def test_poison_reaches_the_scores_only_where_it_is_seen():
    case = score_case(2, lengths=(9,))
    case[5] = torch.tensor([9, 3])
    right = paged_index_scores(*case)
    assert not right.isnan().any()
    spoiled = [*case]
    spoiled[2] = case[2].clone()
    unowned = (case[2] == 255).all(-1)
    spoiled[2][unowned] = 17
    assert torch.equal(paged_index_scores(*spoiled), right)
    case[5] = torch.tensor([10, 3])
    got = paged_index_scores(*case)
    assert got[0].isnan().tolist() == [False] * 9 + [True]
    assert torch.equal(got[:, :9], right)
    scaled = [*case]
    scaled[2] = case[2].clone()
    scaled[2][:, 16] += 1
    scaled[5] = torch.tensor([9, 3])
    with pytest.raises(AssertionError):
        assert_rows_close(paged_index_scores(*scaled), right)


def test_every_code_and_scale_is_decoded_as_the_references_do():
    """One key per query and no sink: attention gives the key back."""
    window = torch.arange(256).remainder(127).to(torch.uint8).view(8, 32).repeat(1, 2)
    window = torch.cat(
        (
            window | (torch.arange(8) % 2 * 128).to(torch.uint8)[:, None],
            torch.arange(100, 116).view(8, 2).to(torch.uint8),
        ),
        dim=1,
    )
    entry = torch.cat((torch.arange(256).view(8, 32), torch.arange(1, 33).view(8, 4)), dim=1)
    entry = entry.to(torch.uint8)
    assert window.shape[1] == pack_window(torch.zeros(1, 64), "fp4").shape[1]
    assert entry.shape[1] == pack_entry(torch.zeros(1, 64), "fp4").shape[1]
    q, silent = torch.zeros(8, 1, 64), torch.tensor([-math.inf])
    row, none = torch.arange(8)[:, None], torch.full((8, 1), -1)
    for window_index, entry_index in ((row, none), (none, row)):
        case = q, window[:0], window, window_index, entry, entry_index, silent
        case = (case[0], window, *case[2:])
        assert torch.equal(paged_attention(*case), paged_attention_ref(*case))


@pytest.mark.parametrize("storage", ["fp4", "bf16", "fp32"])
def test_rows_decoded_once_for_many_queries_give_the_same_bits(storage, monkeypatch):
    case = attention_case(23, heads=3, width=40, chosen=30, storage=storage)
    decoded = []
    plain = paged_numba._decode
    monkeypatch.setattr(paged_numba, "_decode", lambda *args: decoded.append(plain(*args)))
    once = paged_attention(*case)
    assert decoded
    for name, value in (("_MIN_DECODE_ONCE", 1 << 30), ("_DECODED_BYTES", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(paged_numba, name, value)
            assert torch.equal(paged_attention(*case), once)
    assert len(decoded) == 1
    assert_rows_close(once, paged_attention_ref(*case))
