"""Our operations against DeepSeek's own plain-torch references, from stored inputs and outputs."""

from __future__ import annotations

import pytest
import torch

from finwhale.config.inventory import Storage
from finwhale.ops import engram, hyper_connection, moe, norm, rope, rounding
from finwhale.ops.codecs import pack_nibbles, ue8m0_decode, unpack_nibbles
from finwhale.ops.weight_formats import dequantize_weight, quantize_weight
from tests.oracles.golden_file import read_golden
from tests.parity.compare import assert_bf16_neighbours, assert_close, worst
from tests.parity.tolerances import FP32_OP


@pytest.fixture(scope="module")
def golden():
    return read_golden("tilekernels")


def _mix(golden, **changes):
    arguments = {"iterations": 20, "norm_eps": 1e-20, "eps": 1e-6, **changes}
    names = ("streams", "fn", "base", "scale")
    return hyper_connection.hyper_mix(*(golden[f"mhc.{n}"] for n in names), **arguments)


def test_hyper_connection_coefficients_are_those_of_tilekernels(golden):
    mix = _mix(golden)
    for name in ("pre", "post", "comb"):
        assert_close(name, getattr(mix, name), golden[f"mhc.{name}"], FP32_OP)


def test_sinkhorn_is_not_made_doubly_stochastic(golden):
    comb = _mix(golden).comb
    assert float((comb.sum(-2) - 1).abs().max()) < 1e-5
    repaired = comb / comb.sum(-1, keepdim=True)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close("comb", repaired, golden["mhc.comb"], FP32_OP)


@pytest.mark.parametrize("change", [{"iterations": 19}, {"eps": 1e-4}, {"norm_eps": 1e-1}])
def test_hyper_connection_constants_matter(golden, change):
    mix = _mix(golden, **change)
    worst_error = max(
        float((getattr(mix, n) - golden[f"mhc.{n}"]).abs().max()) for n in ("pre", "post", "comb")
    )
    assert worst_error > 1e-6, f"{change} changed nothing: the inputs do not test it"


def test_collapse_and_expand_are_those_of_tilekernels(golden):
    streams, mix = golden["mhc.streams"], _mix(golden)
    collapsed = hyper_connection.hyper_collapse(streams, mix.pre).bfloat16()
    assert_bf16_neighbours("collapse", collapsed, golden["mhc.collapsed"])
    output, post, comb = golden["mhc.output"], mix.post, mix.comb
    expanded = hyper_connection.hyper_expand(output, streams, post, comb).bfloat16()
    assert_bf16_neighbours("expand", expanded, golden["mhc.expanded"])
    wrong_axis = hyper_connection.hyper_expand(output, streams, post, comb.transpose(-1, -2))
    assert float((wrong_axis - golden["mhc.expanded"]).abs().max()) > 0.1


def test_engram_rows_are_those_of_tilekernels(golden):
    # The reference takes n-grams; a document of four tokens ending in the gram gives the same.
    ids = golden["engram.grams"].long().flip(-1)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    rows = engram.engram_rows(
        ids,
        positions,
        None,
        golden["engram.multipliers"],
        golden["engram.primes"].long(),
        golden["engram.offsets"].long(),
        pad_id=2,
    )
    assert torch.equal(rows[:, -1], golden["engram.rows"].long())


def test_engram_rows_need_64_bits(golden):
    grams, multipliers = golden["engram.grams"].long(), golden["engram.multipliers"]
    exact = (grams * multipliers).abs().max()
    assert int(exact) > 2**53, "the inputs would pass through a double unharmed"


def test_engram_gate_is_that_of_tilekernels(golden):
    hidden, kv = golden["engram.hidden"], golden["engram.kv"]
    n = hidden.shape[1]
    gated = engram.engram_gate(
        hidden, kv[:, :n], kv[:, n], golden["engram.q_weight"], golden["engram.k_weight"], 1e-20
    )
    # Token 3 has a zero dot product, where TileKernels takes sign(0) = 0 and the release does not.
    rest = torch.arange(len(hidden)) != 3
    assert_bf16_neighbours("gate", gated[rest], golden["engram.gated"][rest])
    half = hidden[3].float() + 0.5 * kv[3, n].float()
    assert torch.equal(golden["engram.gated"][3], half.bfloat16())
    root = 1 / (1 + torch.exp(torch.tensor(-(1e-6**0.5), dtype=torch.float64)))
    assert_bf16_neighbours(
        "gate at zero", gated[3], (hidden[3].double() + root * kv[3, n].double()).bfloat16()
    )


def test_router_is_that_of_tilekernels(golden):
    is_image = golden["gate.is_image"].bool().unsqueeze(-1)
    bias = torch.where(is_image, golden["gate.bias_vl"], golden["gate.bias"])
    ids, weights = moe.route_experts(golden["gate.logits"], bias, 6, 1.5)
    assert torch.equal(ids, golden["gate.ids"].long())
    assert_close("weights", weights, golden["gate.weights"], FP32_OP, token_dims=1)
    assert bool((golden["gate.scores"][0] > 0).all()), "softplus underflowed"
    plain, _ = moe.route_experts(golden["gate.logits"], golden["gate.bias"], 6, 1.5)
    assert not torch.equal(plain[is_image[:, 0]], golden["gate.ids"][is_image[:, 0]].long())


def test_rms_norm_is_that_of_tilekernels(golden):
    y = norm.rms_norm(golden["norm.x"], golden["norm.weight"], 1e-20)
    assert_close("norm", y, golden["norm.y"], FP32_OP, token_dims=1)


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_rotation_is_that_of_tilekernels(golden, inverse):
    angles = golden["rope.angles"]
    rotation = torch.stack((angles.cos(), angles.sin()))
    y = rope.apply_rope(golden["rope.x"], rotation, inverse=inverse)
    assert_close("rope", y, golden["rope.inverse" if inverse else "rope.y"], FP32_OP)


def test_clamped_swiglu_is_that_of_tilekernels(golden):
    gate, up = golden["swiglu.x"].chunk(2, dim=-1)
    weight = golden["swiglu.weight"].unsqueeze(-1)
    y = moe.clamped_swiglu(gate, up, weight, 10.0)
    assert_close("swiglu", y, golden["swiglu.y"], FP32_OP, token_dims=1)
    unclamped = moe.clamped_swiglu(gate, up, weight, 1e9)
    assert float((unclamped[0] - golden["swiglu.y"][0]).abs().max()) > 0.01


def test_fp8_row_cast_is_that_of_tilekernels(golden):
    codes, scales = rounding.quantize_fp8(golden["cast.fp8_row.x"])
    assert torch.equal(ue8m0_decode(scales), golden["cast.fp8_row.scales"])
    assert torch.equal(codes.view(torch.uint8), golden["cast.fp8_row.codes"])
    values = rounding.dequantize_fp8(codes, scales)
    assert torch.equal(values, golden["cast.fp8_row.values"])


def test_mxfp4_cast_is_that_of_tilekernels(golden):
    packed, scales = rounding.quantize_index(golden["cast.mxfp4.x"])
    assert torch.equal(packed, golden["cast.mxfp4.codes"])
    assert torch.equal(ue8m0_decode(scales), golden["cast.mxfp4.scales"])
    values = rounding.dequantize_index(packed, scales)
    assert torch.equal(values, golden["cast.mxfp4.values"])


def test_main_kv_cast_is_that_of_tilekernels(golden):
    x = golden["cast.nvfp4.x"]
    packed, scales = rounding.quantize_main_kv(x)
    assert torch.equal(scales.view(torch.uint8), golden["cast.nvfp4.scales"])
    ours, theirs = unpack_nibbles(packed), unpack_nibbles(golden["cast.nvfp4.codes"])
    apart = (ours.int() - theirs.int()).abs()
    assert int(apart.max()) <= 1, worst(ours, theirs)
    # TileKernels multiplies by the rounded reciprocal of the scale, the release divides: they may
    # part only where the quotient lies on a halfway point.
    unit = scales.float().repeat_interleave(16, -1)
    quotient = (x.double() / unit.double()).abs()
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    distance = (quotient.unsqueeze(-1) - midpoints).abs().amin(-1)
    assert bool((distance[apart > 0] < 1e-6).all())


@pytest.mark.parametrize(
    ("name", "storage"), [("fp8_block", Storage.FP8_BLOCK), ("mxfp4", Storage.FP4_ROW)]
)
def test_weight_values_are_those_of_tilekernels(golden, name, storage):
    # The scale may be spelled smaller where all codes allow it; the values are what counts.
    values = dequantize_weight(*quantize_weight(golden[f"cast.{name}.x"].float(), storage))
    assert torch.equal(values, golden[f"cast.{name}.values"]), worst(
        values, golden[f"cast.{name}.values"]
    )


def test_stored_codes_of_tilekernels_read_back_to_its_values(golden):
    for name, storage in (("fp8_block", "codes"), ("mxfp4", "packed")):
        exponents = (golden[f"cast.{name}.scales"].view(torch.int32) >> 23).to(torch.uint8)
        codes = golden[f"cast.{name}.codes"]
        codes = codes.view(torch.int8) if storage == "packed" else codes.view(torch.float8_e4m3fn)
        values = dequantize_weight(codes, exponents.view(torch.float8_e8m0fnu))
        assert torch.equal(values, golden[f"cast.{name}.values"]), name


def test_nibble_order_is_that_of_tilekernels(golden):
    packed = golden["cast.mxfp4.codes"]
    swapped = pack_nibbles(unpack_nibbles(packed).unflatten(-1, (-1, 2)).flip(-1).flatten(-2))
    codes = swapped.view(torch.int8)
    exponents = (golden["cast.mxfp4.scales"].view(torch.int32) >> 23).to(torch.uint8)
    values = dequantize_weight(codes, exponents.view(torch.float8_e8m0fnu))
    assert not torch.equal(values, golden["cast.mxfp4.values"])
