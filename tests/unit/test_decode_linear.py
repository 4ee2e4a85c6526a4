"""Products of the decode step in Triton's interpreter, or compiled where there is a GPU."""

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.config.inventory import Storage
from finwhale.decode_kernels.linear_fp8 import (
    BENCHED,
    LinearLaunch,
    LinearUnsupportedError,
    _shape,
    linear_fp8,
    linear_fp8_ref,
    linear_launch,
)
from finwhale.decode_kernels.tiles import pack_fp8_tiles, unpack_fp8_tiles
from finwhale.ops.rope import apply_rope, rope_frequencies, rope_rotation
from finwhale.ops.rounding import round_fp8
from finwhale.ops.weight_formats import quantize_weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(tokens, outputs, width, groups=1):
    g = torch.Generator().manual_seed(tokens + outputs)
    x = torch.randn(tokens, groups * width, generator=g).bfloat16()
    w = torch.randn(outputs, width, generator=g) * torch.logspace(-3, 2, outputs)[:, None]
    codes, scales = pack_fp8_tiles(*quantize_weight(w, Storage.FP8_BLOCK))
    return round_fp8(x).to(DEVICE), codes.to(DEVICE), scales.to(DEVICE)


def agree(got, want, tolerance=1e-5):
    """Row by row: the sums differ in order, an output may fall on the other side of a rounding."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    error = (got.float() - want.float()).norm(dim=0) / want.float().norm(dim=0).clamp_min(1e-30)
    assert not error.numel() or float(error.max()) < tolerance


SMALL = LinearLaunch(rows=64, columns=64, programs=8, warps=4, stages=2)


@pytest.mark.parametrize(
    ("tokens", "outputs", "width"),
    [(1, 33, 96), (1, 64, 512), (2, 100, 160), (5, 63, 64), (17, 65, 320), (65, 32, 256)],
)
@pytest.mark.parametrize("launch", [None, SMALL], ids=["table", "split"])
def test_fp8_product_equals_the_reference(tokens, outputs, width, launch):
    x, codes, scales = inputs(tokens, outputs, width)
    want = linear_fp8_ref(x, codes, scales, outputs=outputs, out_dtype=torch.float32)
    got = linear_fp8(x, codes, scales, outputs=outputs, out_dtype=torch.float32, launch=launch)
    agree(got, want)
    half = linear_fp8(x, codes, scales, outputs=outputs, launch=launch)
    agree(half, want.bfloat16(), 8e-3)
    again = linear_fp8(x, codes, scales, outputs=outputs, launch=launch)
    assert torch.equal(half, again)


@pytest.mark.parametrize("tokens", [1, 3])
def test_grouped_product_reads_its_own_slice_of_x(tokens):
    x, codes, scales = inputs(tokens, 4 * 32, 64, groups=4)
    want = linear_fp8_ref(x, codes, scales, groups=4, out_dtype=torch.float32)
    plain = unpack_fp8_tiles(codes).double()
    by_hand = torch.cat(
        [
            x[:, 64 * g : 64 * g + 64].double()
            @ (
                plain[32 * g : 32 * g + 32]
                * 2.0 ** (scales[g].double() - 127).repeat_interleave(32)
            ).T
            for g in range(4)
        ],
        dim=1,
    )
    agree(want, by_hand.float())
    agree(linear_fp8(x, codes, scales, groups=4, out_dtype=torch.float32), want)
    wrong = linear_fp8(x.roll(64, 1), codes, scales, groups=4, out_dtype=torch.float32)
    assert (wrong - want).norm() > 0.1 * want.norm()


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_bf16_product_equals_the_reference(tokens):
    x, codes, _ = inputs(tokens, 64, 96)
    w = unpack_fp8_tiles(codes)[:37].bfloat16()
    want = linear_fp8_ref(x, w, None, out_dtype=torch.float32)
    agree(linear_fp8(x, w, None, out_dtype=torch.float32), want)
    agree(linear_fp8(x, w, None, out_dtype=torch.float32, launch=SMALL), want)


@pytest.mark.parametrize("tokens", [1, 4])
def test_rounded_output_has_the_bits_of_the_rounded_sum(tokens):
    """Where the sums agree in bf16, codes and scales agree bit for bit."""
    x, codes, scales = inputs(tokens, 96, 64)
    x[0, 5] = 3e5  # another bracket
    plain = linear_fp8(x, codes, scales)
    rounded = linear_fp8(x, codes, scales, round_output=True)
    assert torch.equal(rounded, round_fp8(plain))
    assert not torch.equal(rounded, plain)


@pytest.mark.parametrize("tokens", [1, 3])
def test_turned_output_is_that_of_the_product_turned(tokens):
    x, codes, scales = inputs(tokens, 3 * 64, 64)
    rotation = rope_rotation(torch.arange(tokens) + 5, rope_frequencies(1e4, 16, None)).to(DEVICE)
    got = linear_fp8(x, codes, scales, turn=rotation, head_dim=64)
    plain = linear_fp8(x, codes, scales)
    want = apply_rope(plain.unflatten(-1, (3, 64)), rotation).flatten(-2)
    agree(got, want, 4e-3)
    assert torch.equal(got.view(-1, 3, 64)[..., :48], plain.view(-1, 3, 64)[..., :48])
    agree(got, linear_fp8_ref(x, codes, scales, turn=rotation, head_dim=64), 8e-3)
    assert (got - plain).norm() > 0.1 * (want - plain).norm() > 0


def test_rounding_passes_damage_on_to_its_whole_group():
    x, codes, scales = inputs(2, 64, 64)
    x[1, 3] = torch.inf
    got = linear_fp8(x, codes, scales, round_output=True)
    assert got[1].isnan().all()
    assert got[0].isfinite().all()


@pytest.mark.parametrize("columns", [128, 256])
def test_scales_read_as_words_are_those_of_their_groups(columns):
    """Four scales of a row come in one word where a step has a multiple of 128 columns."""
    x, codes, scales = inputs(3, 64, 512)
    scales = (scales.view(torch.uint8) - torch.arange(16, device=DEVICE).byte() % 5).contiguous()
    launch = replace(SMALL, columns=columns)
    want = linear_fp8_ref(x, codes, scales, out_dtype=torch.float32)
    agree(linear_fp8(x, codes, scales, out_dtype=torch.float32, launch=launch), want)
    turned = scales.unflatten(-1, (-1, 4)).flip(-1).flatten(-2).contiguous()
    wrong = linear_fp8(x, codes, turned, out_dtype=torch.float32, launch=launch)
    assert float((wrong - want).norm() / want.norm()) > 0.1


@pytest.mark.parametrize(
    ("rows", "outputs", "width", "groups", "want"),
    [
        # Of one row, 924 programs aimed at, five steps of 128 columns at least: 40 steps allow
        # eight splits; 32 steps six, of which four is the most that divides them.
        (1, 2048, 5120, 1, (64, 8, 640)),
        (1, 8192, 4096, 8, (64, 4, 1024)),
        (1, 32768, 1280, 1, (64, 1, 1280)),
        # Of many, ten steps at least; 32768 rows are 256 wide tiles, 32736 are too few.
        (64, 2048, 5120, 1, (64, 4, 1280)),
        (64, 32768, 1280, 1, (128, 1, 1280)),
        (64, 32736, 1280, 1, (64, 1, 1280)),
    ],
)
def test_the_cut_of_a_released_matrix_by_hand(rows, outputs, width, groups, want):
    assert _shape(linear_launch(rows, torch.device("cpu")), outputs, width, groups) == want


def test_wide_tiles_serve_matrices_that_have_enough_of_them():
    wide = replace(SMALL, rows=32, wide=64, programs=2)
    for outputs in (96, 128, 160):
        x, codes, scales = inputs(5, outputs, 256)
        want = linear_fp8_ref(x, codes, scales, out_dtype=torch.float32)
        agree(linear_fp8(x, codes, scales, out_dtype=torch.float32, launch=wide), want)
        assert _shape(wide, outputs, 256, 1)[0] == (32 if outputs < 128 else 64)


def test_scales_matter():
    x, codes, scales = inputs(2, 64, 64)
    wrong = scales.view(torch.uint8).clone()
    wrong[1, 1] += 1
    want = linear_fp8_ref(x, codes, scales)
    got = linear_fp8(x, codes, wrong)
    assert torch.equal(got[:, :32], linear_fp8(x, codes, scales)[:, :32])
    assert (got - want)[:, 32:].norm() > 0.1 * want[:, 32:].norm()


def test_rows_do_not_meet_their_neighbours():
    x, codes, scales = inputs(9, 64, 128)
    whole = linear_fp8(x, codes, scales)
    x[:4] = torch.nan
    assert torch.equal(linear_fp8(x, codes, scales)[4:], whole[4:])


def test_invariant_rows_do_not_know_how_many_they_are():
    x, codes, scales = inputs(19, 64, 256)
    launch = replace(linear_launch(19, x.device, invariant=True), programs=8)
    whole = linear_fp8(x, codes, scales, out_dtype=torch.float32, launch=launch)
    # At the same places of a block of 16: a CPU's matrix product may sum other rows otherwise.
    for part in (slice(0, 1), slice(16, 19), slice(0, 8), slice(0, 17)):
        alone = linear_fp8(x[part], codes, scales, out_dtype=torch.float32, launch=launch)
        assert torch.equal(alone, whole[part])
    assert linear_launch(1, x.device, invariant=True) == linear_launch(64, x.device, invariant=True)


@pytest.mark.parametrize(
    "launch",
    [pytest.param(x, marks=() if n < 2 else pytest.mark.slow) for n, x in enumerate(BENCHED)],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_measured_launches_serve_each_product_of_a_layer(tokens, launch):
    """Plain, and in groups with rounded outputs; the other group's scales must show."""
    for outputs, groups in ((160, 1), (192, 2)):
        x, codes, scales = inputs(tokens, outputs, 256, groups)
        how = {"groups": groups, "round_output": groups > 1}
        want = linear_fp8_ref(x, codes, scales, **how)
        agree(linear_fp8(x, codes, scales, launch=launch, **how), want, 4e-2)  # one FP8 step
        wrong = linear_fp8(x, codes, scales.roll(1, 0), launch=launch, **how).float()
        assert (wrong - want.float()).norm() > 0.1 * want.float().norm()


@pytest.mark.parametrize(
    ("columns", "ahead"), [(128, 0), (128, 4), (128, 8), (256, 4), (256, 8), (64, 4), (32, 4)]
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_what_is_read_ahead_is_added_too(tokens, columns, ahead):
    """Of two splits of 256 columns: nothing, a step, all there is; of one BF16 row, a step.

    Nothing of less than a step, nor of narrow steps: there a split of 320 columns begins inside a
    word of scales, which a GPU cannot read.
    """
    width = 512 if columns >= 128 else 640
    launch = LinearLaunch(rows=64, columns=columns, programs=2, warps=4, stages=2, ahead=ahead)
    x, codes, scales = inputs(tokens, 64, width)
    how = {"out_dtype": torch.float32}
    agree(
        linear_fp8(x, codes, scales, launch=launch, **how), linear_fp8_ref(x, codes, scales, **how)
    )
    for part in (0, 15):  # of the first and of the last column
        wrong = codes.clone()
        wrong[:, part] ^= 1
        assert not torch.equal(
            linear_fp8(x, wrong, scales, launch=launch, **how),
            linear_fp8(x, codes, scales, launch=launch, **how),
        )
    w = unpack_fp8_tiles(codes).bfloat16()
    agree(linear_fp8(x, w, None, launch=launch, **how), linear_fp8_ref(x, w, None, **how))


def test_fp8_tiles_hold_the_codes_where_a_lane_reads_them():
    codes = torch.arange(40 * 64, dtype=torch.int32).mul(37).remainder(256).byte().view(40, 64)
    codes[(codes & 127) == 127] = 5
    scales = torch.tensor([[120, 121], [122, 123]], dtype=torch.uint8)
    packed, same = pack_fp8_tiles(codes.view(torch.float8_e4m3fn), scales)
    assert packed.shape == (2, 2, 1024)
    assert torch.equal(same, scales)
    back = unpack_fp8_tiles(packed).view(torch.uint8)
    assert torch.equal(back[:40], codes)
    assert not back[40:].any()
    # Tile (0, 1), second half, lane 4 * 3 + 2: rows 3 and 11, columns 16 + {4, 5} and + {12, 13}.
    lane = packed[0, 1, 512:].view(torch.int32).view(32, 4)[4 * 3 + 2]
    for got, row, column in zip(lane.tolist(), (3, 3, 19, 19), (4, 12, 4, 12), strict=True):
        pair, below = (codes[r, 48 + column :][:2].tolist() for r in (row, row + 8))
        halves = [_half(a, b) for a, b in zip(pair, below, strict=True)]
        assert got & 0xFFFFFFFF == halves[0] | halves[1] << 16


def _half(first, second):
    """Two codes in 16 bits, bit by bit: `first` as a bf16 number, `second` in what is left."""
    places = (*range(4, 11), 15), (0, 1, 2, 3, 12, 13, 14, 11)
    return sum(
        (code >> bit & 1) << place
        for code, own in zip((first, second), places, strict=True)
        for bit, place in enumerate(own)
    )


def test_fp8_tiles_refuse_what_the_decoder_cannot_hold():
    codes, scales = torch.zeros(32, 32, dtype=torch.uint8), torch.full((1, 1), 120).byte()
    pack_fp8_tiles(codes.view(torch.float8_e4m3fn), scales)
    with pytest.raises(ValueError, match="at most 134"):
        pack_fp8_tiles(codes.view(torch.float8_e4m3fn), scales + 15)
    codes[3, 5] = 0xFF
    with pytest.raises(ValueError, match="NaN"):
        pack_fp8_tiles(codes.view(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("launch", [None, replace(SMALL, rows=32)], ids=["table", "narrow"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_every_fp8_code_and_scale_is_decoded_exactly(tokens, launch):
    """One column at a time: products of 1 with each code, at the smallest and largest scales."""
    codes = torch.arange(256).byte().view(8, 32).repeat_interleave(32, 0).view(8, 32, 32)
    codes[(codes & 127) == 127] = 0
    codes = codes.flatten(0, 1).view(torch.float8_e4m3fn)  # [256, 32]
    for code in (8, 118, 127, 134):
        scales = torch.full((8, 1), code, dtype=torch.uint8)
        packed = [t.to(DEVICE) for t in pack_fp8_tiles(codes, scales)]
        for column in (0, 13, 31):
            x = torch.zeros(tokens, 32, dtype=torch.bfloat16, device=DEVICE)
            x[:, column] = 1.0
            got = linear_fp8(x, *packed, out_dtype=torch.float32, launch=launch)
            want = codes[:, column].double() * 2.0 ** (code - 127)
            assert torch.equal(got.cpu().double(), want.expand(tokens, -1))


def test_empty_and_refused_inputs():
    x, codes, scales = inputs(2, 64, 64)
    with pytest.raises(LinearUnsupportedError, match="tiles of 16 rows"):
        linear_fp8(x, codes, scales, launch=replace(SMALL, rows=16))
    assert linear_fp8(x[:0], codes, scales).shape == (0, 64)
    x_wide, *wide = inputs(2, 64, 256)
    room = torch.empty(2 * 16 * 64), torch.zeros(1, dtype=torch.int32)  # two splits of one tile
    room = tuple(t.to(DEVICE) for t in room)
    got = linear_fp8(x_wide, *wide, launch=SMALL, scratch=room)
    agree(got, linear_fp8_ref(x_wide, *wide), 8e-3)
    for short in ((room[0][1:], room[1]), (room[0], room[1][1:])):
        with pytest.raises(ValueError, match="scratch"):
            linear_fp8(x_wide, *wide, launch=SMALL, scratch=short)
    w = unpack_fp8_tiles(codes).bfloat16()
    with pytest.raises(LinearUnsupportedError, match="expected a multiple of 32"):
        linear_fp8(x[:, :48].contiguous(), w[:, :48].contiguous(), None)
    with pytest.raises(LinearUnsupportedError, match="round_output"):
        linear_fp8(x, codes, scales, outputs=40, round_output=True)
    with pytest.raises(LinearUnsupportedError, match="strips"):
        linear_fp8(x, codes, scales, outputs=32)
    odd = torch.cat([scales.view(torch.uint8).flatten()[:1], scales.view(torch.uint8).flatten()])
    with pytest.raises(LinearUnsupportedError, match="multiple of 4"):
        linear_fp8(x, codes, odd[1:].view(scales.shape))
