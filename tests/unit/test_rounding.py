"""The four activation and cache roundings, worked by hand from sections 9.2 to 9.4."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from finwhale.ops.codecs import e2m1_decode, unpack_nibbles
from finwhale.ops.rounding import (
    dequantize_fp8,
    dequantize_index,
    dequantize_main_kv,
    quantize_fp8,
    quantize_index,
    quantize_main_kv,
    round_fp8,
    round_index,
    round_main_kv,
)
from tests.exact_formats import E2M1, E4M3, nearest_code, round_to

ROUNDINGS = {"fp8": (round_fp8, 32), "main_kv": (round_main_kv, 16), "index": (round_index, 32)}


def group(*values: float, size: int = 32) -> torch.Tensor:
    """Return one group [1, size]: `values`, then zeros."""
    return torch.tensor([*values, *[0.0] * (size - len(values))])[None]


def scale_code(amax: float, inverse: float) -> int:
    """Return the UE8M0 code of fl32(amax * fl32(inverse)), through NumPy and the bit pattern."""
    product = np.float32(amax) * np.float32(inverse)
    bits = struct.unpack("<I", struct.pack("<f", product))[0]
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0)


def test_fp8_group_with_amax_448_has_scale_one():
    codes, scales = quantize_fp8(group(448.0, -3.0, 0.3))
    assert scales.tolist() == [[127]]
    # 0.3 lies between 0.28125 and 0.3125 (step 2^-5): the nearer is 0.3125.
    assert codes[0, :3].float().tolist() == [448.0, -3.0, 0.3125]


def test_fp8_one_ulp_above_448_doubles_the_scale():
    amax = float(np.nextafter(np.float32(448), np.float32(np.inf)))
    codes, scales = quantize_fp8(group(amax, 1.0))
    assert scales.tolist() == [[128]]
    assert codes[0, :2].float().tolist() == [224.0, 0.5]


@pytest.mark.parametrize("exponent", [-20, -3, 0, 5, 40])
def test_fp8_scale_follows_exact_powers_of_two(exponent):
    _, scales = quantize_fp8(group(448.0 * 2.0**exponent))
    assert scales.item() == max(127 + exponent, 105)


def test_fp8_zero_group_has_the_floor_scale_and_stays_zero():
    # floor 1e-4 / 448 = 2.23e-7, the next power of two is 2^-22 = 2.38e-7: code 105
    codes, scales = quantize_fp8(group(0.0))
    assert scales.tolist() == [[105]]
    assert not codes.view(torch.uint8).any()


def test_fp8_amax_below_the_floor_uses_the_floor():
    tiny = 0.75e-4
    _, scales = quantize_fp8(group(tiny))
    assert scales.item() == 105
    step = 2.0**-22  # tiny / step = 314.6; the step of E4M3 there is 32: 320
    assert round_fp8(group(tiny))[0, 0].item() == 320 * step


def test_fp8_scale_uses_the_rounded_reciprocal():
    x = torch.randn(200, 32) * torch.exp2(torch.randint(-10, 10, (200, 1)).float())
    _, scales = quantize_fp8(x)
    expected = [scale_code(max(row.abs().max().item(), 1e-4), 1 / 448) for row in x]
    assert scales[:, 0].tolist() == expected


def test_fp8_values_are_the_exact_nearest():
    x = torch.randn(20, 32) * 3
    codes, scales = quantize_fp8(x)
    for row, code_row, scale in zip(x, codes.float(), scales[:, 0].tolist(), strict=True):
        unit = Fraction(2) ** (scale - 127)
        for value, code in zip(row.tolist(), code_row.tolist(), strict=True):
            assert code * float(unit) == float(round_to(Fraction(value), unit, E4M3))


def test_main_kv_scale_is_amax_over_six_in_e4m3():
    # 6.0 / 6 = 1. 7.0 / 6 = 1.1667: between 1.125 and 1.25, nearer to 1.125.
    x = torch.cat((group(6.0, size=16), group(7.0, size=16)), -1)
    packed, scales = quantize_main_kv(x)
    assert scales.float().tolist() == [[1.0, 1.125]]
    assert packed.shape == (1, 16)
    # 7 / 1.125 = 6.22 saturates at 6: 6.75 comes back
    assert dequantize_main_kv(packed, scales)[0, 16].item() == 6.75


def test_main_kv_hand_worked_group():
    # scale 6 / 6 = 1, so the ties of section 9.4 show as they are
    x = group(6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, -0.25, size=16)
    expected = group(6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0, -0.0, size=16)
    assert torch.equal(round_main_kv(x), expected)


def test_main_kv_zero_group_has_the_floor_scale():
    # 6 * 2^-9 / 6 = 2^-9, the smallest E4M3 number: code 1
    packed, scales = quantize_main_kv(group(0.0, size=16))
    assert scales.view(torch.uint8).tolist() == [[1]]
    assert not packed.any()


def test_main_kv_large_group_saturates_the_scale():
    # 1e6 / 6 is beyond 448, so the scale is 448 and the value 6 * 448
    assert round_main_kv(group(1e6, size=16))[0, 0].item() == 2688.0


def test_main_kv_scale_tie_goes_to_even():
    # amax / 6 = 1.0625 lies halfway between 1.0 (code 56, even) and 1.125 (code 57)
    _, scales = quantize_main_kv(group(6.375, size=16))
    assert scales.float().item() == 1.0


def test_main_kv_is_not_idempotent_where_its_scale_is_subnormal():
    # 9 * 2^-9 / 6 = 1.5 * 2^-9, a tie that goes to 2^-8; 4.5 of those is a tie that goes to 4.
    once = round_main_kv(group(9 * 2.0**-9, size=16))
    assert once[0, 0].item() == 4 * 2.0**-8
    # 2^-6 / 6 = 1.33 * 2^-9 now goes to 2^-9, of which 8 are needed and 6 exist.
    assert round_main_kv(once)[0, 0].item() == 6 * 2.0**-9


def test_index_group_with_amax_six_has_scale_one():
    packed, scales = quantize_index(group(6.0, 0.25, -1.75))
    assert scales.tolist() == [[127]]
    assert e2m1_decode(unpack_nibbles(packed))[0, :3].tolist() == [6.0, 0.0, -2.0]


def test_index_one_ulp_above_six_doubles_the_scale():
    amax = float(np.nextafter(np.float32(6), np.float32(np.inf)))
    packed, scales = quantize_index(group(amax, 1.0))
    assert scales.tolist() == [[128]]
    assert dequantize_index(packed, scales)[0, :2].tolist() == [6.0, 1.0]


def test_index_zero_group_has_the_floor_scale():
    packed, scales = quantize_index(group(0.0))
    assert scales.tolist() == [[scale_code(6 * 2.0**-126, 1 / 6)]] == [[1]]
    assert not packed.any()


def test_index_values_are_the_exact_nearest():
    x = torch.randn(20, 32) * torch.exp2(torch.randint(-8, 8, (20, 1)).float())
    packed, scales = quantize_index(x)
    codes = unpack_nibbles(packed)
    for row, code_row, scale in zip(x, codes, scales[:, 0].tolist(), strict=True):
        assert scale == scale_code(row.abs().max().item(), 1 / 6)
        unit = Fraction(2) ** (scale - 127)
        for value, code in zip(row.tolist(), code_row.tolist(), strict=True):
            assert code & 7 == nearest_code(abs(Fraction(value)) / unit, E2M1)


@pytest.mark.parametrize(
    ("quantize", "record"), [(quantize_main_kv, 288), (quantize_fp8, 528)], ids=["main_kv", "fp8"]
)
def test_record_of_512_channels_has_the_stated_bytes(quantize, record):
    codes, scales = quantize(torch.randn(1, 512))
    assert codes.nbytes + scales.nbytes == record


def test_record_of_an_index_key_has_68_bytes():
    packed, scales = quantize_index(torch.randn(1, 128))
    assert packed.nbytes + scales.nbytes == 68


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounding_refuses_a_partial_group(name):
    rounding, size = ROUNDINGS[name]
    with pytest.raises(ValueError, match=f"{size + 1}.*multiple of {size}"):
        rounding(torch.zeros(2, size + 1))


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_keeps_shape_and_dtype_and_is_exact_in_bf16(name, dtype):
    x = torch.randn(3, 2, 64).to(dtype)
    rounded = ROUNDINGS[name][0](x)
    assert rounded.shape == x.shape
    assert rounded.dtype is dtype
    assert torch.equal(rounded.float(), ROUNDINGS[name][0](x.float()))


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounding_takes_an_empty_batch(name):
    assert ROUNDINGS[name][0](torch.zeros(0, 64)).shape == (0, 64)


def test_rounding_of_fp32_and_of_its_bf16_may_differ_in_the_whole_group():
    # Section 9.1: 448.5 rounds to 448 in bf16, which halves the scale of the group.
    # Only subnormal codes notice: 2^-9 is one step at scale 1, half a step at scale 2.
    x = group(448.5, 2.0**-9)
    assert dequantize_fp8(*quantize_fp8(x))[0, 0].item() == 448.0
    assert quantize_fp8(x)[1].item() == 128
    assert quantize_fp8(x.bfloat16())[1].item() == 127
    assert round_fp8(x)[0, 1].item() == 0.0
    assert round_fp8(x.bfloat16())[0, 1].item() == 2.0**-9


@pytest.mark.parametrize("form", [round_fp8, round_main_kv, round_index])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_damage_marks_its_group_and_no_other(form, bad):
    # Cases 50 and 134: a NaN that rounds to zero would pass every later check.
    x = torch.ones(2, 64)
    x[1, 40] = bad
    y = form(x)
    assert torch.isfinite(y[0]).all()
    assert torch.isfinite(y[1, :32]).all()
    assert y[1, 40].isnan()
