"""Codes of E4M3, E2M1 and UE8M0, against tables made from the bit fields in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from finwhale.ops.codecs import (
    ceil_power_of_two,
    e2m1_decode,
    e2m1_encode,
    e4m3_encode,
    pack_nibbles,
    ue8m0_decode,
    unpack_nibbles,
)
from tests.exact_formats import E2M1, E4M3, ceil_log2, nearest_code


def next_up(x: float) -> float:
    return float(torch.nextafter(torch.tensor(x), torch.tensor(torch.inf)))


def next_down(x: float) -> float:
    return float(torch.nextafter(torch.tensor(x), torch.tensor(-torch.inf)))


# Section 9.4 of the spec, worked by hand: value, magnitude it becomes.
E2M1_TIES = [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4)]


@pytest.mark.parametrize(("tie", "expected"), E2M1_TIES)
@pytest.mark.parametrize("sign", [1, -1])
def test_e2m1_tie_goes_to_the_even_code(tie, expected, sign):
    code = e2m1_encode(torch.tensor([sign * tie]))
    assert e2m1_decode(code).item() == sign * expected
    assert code.item() & 1 == 0


@pytest.mark.parametrize("tie", [tie for tie, _ in E2M1_TIES])
def test_e2m1_neighbours_of_a_tie_go_to_their_own_side(tie):
    below, above = e2m1_encode(torch.tensor([next_down(tie), next_up(tie)])).tolist()
    assert E2M1[below] < tie < E2M1[above]
    assert above == below + 1


def test_e2m1_codes_decode_to_the_values_of_their_bit_fields():
    decoded = e2m1_decode(torch.arange(16, dtype=torch.uint8))
    assert decoded[:8].tolist() == [float(v) for v in E2M1]
    assert torch.equal(decoded[8:], -decoded[:8])
    assert torch.signbit(decoded[8]), "code 8 is minus zero"


def test_e2m1_encode_is_the_inverse_of_decode():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1_encode(e2m1_decode(codes)), codes)


def test_e2m1_saturates_at_six():
    assert e2m1_decode(e2m1_encode(torch.tensor([6.1, 1e30, -torch.inf]))).tolist() == [6, 6, -6]


def test_e2m1_negative_that_rounds_to_zero_keeps_its_sign():
    assert e2m1_encode(torch.tensor([-0.2, -0.0, 0.2])).tolist() == [8, 8, 0]


def test_e2m1_agrees_with_exact_nearest_on_a_fine_grid():
    x = torch.arange(0, 7 * 64, dtype=torch.float32) / 64
    expected = [nearest_code(Fraction(v), E2M1) for v in x.tolist()]
    assert e2m1_encode(x).tolist() == expected


def test_e2m1_wrong_tie_rule_is_noticed():
    x = torch.tensor([tie for tie, _ in E2M1_TIES])
    away = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert not torch.equal(e2m1_decode(e2m1_encode(x)), away)


def test_e4m3_all_codes_round_trip():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    assert values[:127].tolist() == [float(v) for v in E4M3]
    assert torch.equal(e4m3_encode(values).view(torch.uint8), codes)


def test_e4m3_every_tie_goes_to_the_even_code():
    ties = [float((a + b) / 2) for a, b in pairwise(E4M3)]
    got = e4m3_encode(torch.tensor(ties)).view(torch.uint8).tolist()
    assert got == [code + (code & 1) for code in range(126)]


def test_e4m3_neighbours_of_every_tie_go_to_their_own_side():
    ties = [float((a + b) / 2) for a, b in pairwise(E4M3)]
    below = e4m3_encode(torch.tensor([next_down(t) for t in ties])).view(torch.uint8)
    above = e4m3_encode(torch.tensor([next_up(t) for t in ties])).view(torch.uint8)
    assert below.tolist() == list(range(126))
    assert above.tolist() == list(range(1, 127))


@pytest.mark.parametrize("x", [448.0, 448.1, 464.0, 480.0, 1e30, float("inf")])
def test_e4m3_saturates_at_448_and_never_gives_nan(x):
    assert e4m3_encode(torch.tensor([x, -x])).float().tolist() == [448.0, -448.0]


def test_e4m3_smallest_step_is_two_to_minus_nine():
    step = 2.0**-9
    x = torch.tensor([step, step / 2, next_up(step / 2), 1.5 * step])
    # A half step is a tie between 0 and 1: code 0 is even. One and a half goes to code 2.
    assert e4m3_encode(x).float().tolist() == [step, 0.0, step, 2 * step]


@pytest.mark.parametrize("exponent", [-126, -125, -22, -9, -1, 0, 1, 8, 100, 126])
def test_ue8m0_exact_power_of_two_is_kept(exponent):
    code = ceil_power_of_two(torch.tensor([2.0**exponent]))
    assert code.item() == exponent + 127
    assert ue8m0_decode(code).item() == 2.0**exponent


@pytest.mark.parametrize("exponent", [-126, -22, -1, 0, 1, 100, 126])
def test_ue8m0_one_ulp_above_a_power_goes_to_the_next(exponent):
    assert ceil_power_of_two(torch.tensor([next_up(2.0**exponent)])).item() == exponent + 128


@pytest.mark.parametrize("exponent", [-125, -22, 0, 1, 100, 127])
def test_ue8m0_one_ulp_below_a_power_goes_to_it(exponent):
    assert ceil_power_of_two(torch.tensor([next_down(2.0**exponent)])).item() == exponent + 127


def test_ue8m0_ceil_equals_the_exact_ceil_log2():
    x = torch.randn(500).abs() * torch.exp2(torch.randint(-60, 60, (500,)).float())
    expected = [ceil_log2(Fraction(v)) + 127 for v in x.tolist()]
    assert ceil_power_of_two(x).tolist() == expected


def test_ue8m0_float_log2_would_miss_exact_powers():
    # The mistake the bit pattern avoids: fp32 log2 one ulp above a power is the power's own.
    x = torch.tensor([next_up(2.0**20)])
    by_float = torch.exp2(torch.ceil(torch.log2(x)))
    assert ue8m0_decode(ceil_power_of_two(x)).item() == 2.0**21
    assert by_float.item() == 2.0**20


def test_ue8m0_all_codes_decode_to_their_power():
    assert ue8m0_decode(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    codes = torch.arange(255, dtype=torch.uint8)
    assert ue8m0_decode(codes).tolist() == [2.0 ** (c - 127) for c in range(255)]


def test_ue8m0_decode_takes_the_float_type_of_the_file():
    codes = torch.tensor([0, 1, 127, 254], dtype=torch.uint8)
    assert torch.equal(ue8m0_decode(codes.view(torch.float8_e8m0fnu)), ue8m0_decode(codes))


def test_nibbles_low_is_the_even_column():
    packed = pack_nibbles(torch.tensor([[0x1, 0xA, 0xF, 0x0]], dtype=torch.uint8))
    assert packed.tolist() == [[0xA1, 0x0F]]


def test_nibbles_unpack_every_byte_signed_or_not():
    packed = torch.arange(256, dtype=torch.uint8)[None]
    codes = unpack_nibbles(packed)
    assert codes[0].tolist() == [n for byte in range(256) for n in (byte & 15, byte >> 4)]
    assert torch.equal(unpack_nibbles(packed.view(torch.int8)), codes)
    assert torch.equal(pack_nibbles(codes), packed)
