"""Rotary tables and rotation against section 4.7 and complex numbers."""

import cmath

import pytest
import torch

from finwhale.config import RopeScaling
from finwhale.ops.rope import apply_rope, rope_frequencies, rope_rotation

# Section 4.7, compressed table of the release.
RELEASED = {
    0: 1.0,
    1: 0.6876560,
    8: 0.05,
    15: 3.635539e-3,
    16: 2.265625e-3,
    20: 2.969778e-4,
    24: 1.953125e-5,
    25: 5.372313e-6,
    31: 5.680529e-7,
}


def test_compressed_frequencies_equal_released_values():
    f = rope_frequencies(160000, 64, RopeScaling())
    for pair, want in RELEASED.items():
        assert f[pair].item() == pytest.approx(want, rel=1e-6)
    # Control: without YaRN the slow pairs are 16 times faster.
    plain = rope_frequencies(160000, 64, None)
    assert plain[31].item() == pytest.approx(16 * RELEASED[31], rel=1e-6)
    assert plain[15].item() == pytest.approx(RELEASED[15], rel=1e-6)


def test_window_frequencies_have_their_own_base():
    f = rope_frequencies(10000, 64, None)
    assert [f[i].item() for i in (0, 8, 16)] == pytest.approx([1.0, 0.1, 0.01], rel=1e-6)


def test_rotation_turns_adjacent_pairs_of_the_last_channels():
    f = rope_frequencies(10000, 4, None)  # 1 and 0.01
    x = torch.tensor([[10.0, 11.0, 1.0, 2.0, 3.0, 4.0]])
    got = apply_rope(x, rope_rotation(torch.tensor([3]), f))[0].tolist()
    a = (1 + 2j) * cmath.exp(3j)
    b = (3 + 4j) * cmath.exp(0.03j)
    assert got == pytest.approx([10, 11, a.real, a.imag, b.real, b.imag], rel=1e-6)


def test_inverse_rotation_undoes_rotation_for_heads_and_rows():
    f = rope_frequencies(160000, 8, RopeScaling())
    rotation = rope_rotation(torch.tensor([[0, 1, 77, 4096]]), f)
    for shape in ((1, 4, 16), (1, 4, 3, 16)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        back = apply_rope(apply_rope(x, rotation), rotation, inverse=True)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-6)
        assert (apply_rope(x, rotation) - x).abs().max() > 0.1


def test_angle_is_the_fp32_product():
    # 1e6 * fl32(0.05): fp64 would give 50000 exactly; the reference's fp32 product is what counts.
    f = rope_frequencies(160000, 64, RopeScaling())
    cos = rope_rotation(torch.tensor([1000003]), f)[0]
    assert cos[0, 1].item() == torch.cos(torch.tensor(1000003.0) * f[1]).item()


def test_keeps_dtype():
    rotation = rope_rotation(torch.tensor([5]), rope_frequencies(10000, 4, None))
    assert apply_rope(torch.ones(1, 6, dtype=torch.bfloat16), rotation).dtype is torch.bfloat16
