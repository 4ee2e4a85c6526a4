"""Stored weight matrices against exact rational arithmetic, block by block."""

from __future__ import annotations

import pytest
import torch

from finwhale.config.inventory import Storage
from finwhale.ops import weight_formats
from finwhale.ops.weight_formats import (
    QUANTIZED,
    all_finite,
    dequantize_weight,
    quantize_weight,
    row_slices,
    storage_of,
)
from tests.exact_formats import E2M1, E4M3, rounded_block

BLOCK_ROWS = {Storage.FP8_BLOCK: 32, Storage.FP8_ROW: 1, Storage.FP4_ROW: 1}


def exact_values(weight: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Round every block of `weight` with Python fractions."""
    values = E2M1 if storage is Storage.FP4_ROW else E4M3
    step, out = BLOCK_ROWS[storage], torch.empty_like(weight)
    for row in range(0, weight.shape[0], step):
        for column in range(0, weight.shape[1], 32):
            block = weight[row : row + step, column : column + 32]
            rounded = torch.tensor(rounded_block(block.flatten().tolist(), values))
            out[row : row + step, column : column + 32] = rounded.view(block.shape)
    return out


def spread(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns) * torch.exp2(torch.randint(-12, 12, (rows, columns)).float())


@pytest.mark.parametrize("storage", QUANTIZED, ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(1, 32), (32, 64), (33, 66), (70, 34), (5, 2)], ids=str)
def test_read_back_values_are_the_exact_rounding(storage, shape):
    weight = spread(*shape)
    values = dequantize_weight(*quantize_weight(weight, storage))
    assert torch.equal(values, exact_values(weight, storage))


@pytest.mark.parametrize(
    ("storage", "codes", "scales", "dtype"),
    [
        (Storage.FP8_BLOCK, (70, 66), (3, 3), torch.float8_e4m3fn),
        (Storage.FP8_ROW, (70, 66), (70, 3), torch.float8_e4m3fn),
        (Storage.FP4_ROW, (70, 33), (70, 3), torch.int8),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_stored_shapes_and_dtypes(storage, codes, scales, dtype):
    stored = quantize_weight(torch.randn(70, 66), storage)
    assert [tuple(t.shape) for t in stored] == [codes, scales]
    assert [t.dtype for t in stored] == [dtype, torch.float8_e8m0fnu]
    assert storage_of(*stored) is storage


def test_fp8_block_worked_by_hand():
    weight = torch.zeros(64, 32)
    weight[0, 0], weight[1, 1], weight[31, 31] = 448.0, -1.0, 0.3125
    weight[32, 5] = 2.0  # the second block: 2 / 448 needs 2^-7, 2 / 2^-7 = 256
    codes, scales = quantize_weight(weight, Storage.FP8_BLOCK)
    assert scales.view(torch.uint8).tolist() == [[127], [120]]
    assert codes[[0, 1, 31, 32], [0, 1, 31, 5]].float().tolist() == [448.0, -1.0, 0.3125, 256.0]


def test_fp4_row_worked_by_hand():
    weight = torch.zeros(1, 32)
    weight[0, :6] = torch.tensor([6.0, -3.0, 0.25, 0.75, -5.0, 1.75])
    codes, scales = quantize_weight(weight, Storage.FP4_ROW)
    assert scales.view(torch.uint8).tolist() == [[127]]
    # codes 7, 8|5, 0, 2, 8|6, 4; the even column is the low nibble
    assert codes.view(torch.uint8)[0, :3].tolist() == [0xD7, 0x20, 0x4E]


def test_scale_is_shared_by_a_block_and_not_by_a_row():
    weight = torch.full((32, 32), 2.0**-10)
    weight[0, 0] = 448.0
    by_block = dequantize_weight(*quantize_weight(weight, Storage.FP8_BLOCK))
    by_row = dequantize_weight(*quantize_weight(weight, Storage.FP8_ROW))
    assert by_block[1, 0] == 0.0
    assert by_row[1, 0] == 2.0**-10


@pytest.mark.parametrize("storage", QUANTIZED, ids=lambda s: s.name)
def test_all_zero_block_is_zero_with_scale_one(storage):
    codes, scales = quantize_weight(torch.zeros(64, 64), storage)
    assert not codes.view(torch.uint8).any()
    assert (scales.view(torch.uint8) == 127).all()
    assert not dequantize_weight(codes, scales).any()


@pytest.mark.parametrize("storage", QUANTIZED, ids=lambda s: s.name)
def test_one_zero_block_beside_others(storage):
    weight = torch.randn(32, 96)
    weight[:, 32:64] = 0
    values = dequantize_weight(*quantize_weight(weight, storage))
    assert torch.equal(values == 0, exact_values(weight, storage) == 0)
    assert not values[:, 32:64].any()


@pytest.mark.parametrize(("storage", "largest"), [(Storage.FP8_ROW, 448.0), (Storage.FP4_ROW, 6.0)])
@pytest.mark.parametrize("exponent", [-100, -7, 0, 1, 30])
def test_scale_at_and_around_an_exact_power_of_two(storage, largest, exponent):
    amax = torch.tensor(largest * 2.0**exponent)
    up, down = (torch.nextafter(amax, torch.tensor(v)) for v in (torch.inf, 0.0))
    codes = [
        quantize_weight(torch.stack([v] + [torch.zeros(())] * 31)[None], storage)[1]
        for v in (down, amax, up)
    ]
    # One ulp above needs the next scale, but its only code is then half the maximum: the smaller
    # scale spells the same value and is the one that is stored.
    assert [s.view(torch.uint8).item() for s in codes] == [127 + exponent] * 3


def test_two_spellings_of_a_block_the_smaller_scale_is_stored():
    # 230 / 448 needs scale 1, where 230 rounds to 224: half of 448. So 448 at scale 1/2 it is.
    weight = torch.zeros(1, 32)
    weight[0, :2] = torch.tensor([230.0, 1.0])
    codes, scales = quantize_weight(weight, Storage.FP8_ROW)
    assert scales.view(torch.uint8).item() == 126
    assert codes[0, :2].float().tolist() == [448.0, 2.0]
    assert dequantize_weight(codes, scales)[0, :2].tolist() == [224.0, 1.0]


@pytest.mark.parametrize("storage", QUANTIZED, ids=lambda s: s.name)
def test_slices_do_not_change_the_bytes(storage, monkeypatch):
    weight = spread(100, 64)
    whole = quantize_weight(weight, storage)
    values = dequantize_weight(*whole)
    monkeypatch.setattr(weight_formats, "SLICE_ELEMENTS", 32 * 64)
    assert len(list(row_slices(100, 64))) == 4
    sliced = quantize_weight(weight, storage)
    for one, other in zip(whole, sliced, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(dequantize_weight(*whole), values)


@pytest.mark.parametrize(("rows", "columns"), [(0, 32), (1, 1), (31, 1 << 25), (100, 64), (97, 7)])
def test_row_slices_cover_every_row_once_at_block_borders(rows, columns):
    parts = list(row_slices(rows, columns))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
    assert all(part.start % 32 == 0 for part in parts)


def test_row_slices_of_the_largest_table_are_bounded():
    first = next(row_slices(384006168, 256))
    assert (first.stop - first.start) * 256 <= weight_formats.SLICE_ELEMENTS


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("storage", QUANTIZED, ids=lambda s: s.name)
def test_quantising_refuses_values_without_a_code(storage, bad):
    weight = torch.zeros(2, 32)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize_weight(weight, storage)


@pytest.mark.parametrize(
    ("weight", "storage", "message"),
    [
        (torch.zeros(2, 32), Storage.BF16, "storage is BF16"),
        (torch.zeros(32), Storage.FP8_ROW, r"shape \(32,\)"),
        (torch.zeros(2, 33), Storage.FP4_ROW, "33 columns"),
    ],
    ids=["plain", "one-dim", "odd"],
)
def test_quantising_refuses_what_no_format_holds(weight, storage, message):
    with pytest.raises(ValueError, match=message):
        quantize_weight(weight, storage)


def test_fp4_read_as_fp8_is_refused_by_its_shapes():
    # Case 116: the packed matrix has half the columns, so an FP8 reading needs another scale.
    codes, scales = quantize_weight(torch.randn(64, 64), Storage.FP4_ROW)
    with pytest.raises(ValueError, match=r"scale has shape \[64, 2\].*\[2, 1\] or \[64, 1\]"):
        dequantize_weight(codes.view(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e5m2])
def test_reading_refuses_a_dtype_that_no_format_has(dtype):
    with pytest.raises(ValueError, match="expected float8_e4m3fn or int8"):
        dequantize_weight(torch.zeros(32, 32).to(dtype), torch.zeros(1, 1, dtype=torch.uint8))


def test_reading_refuses_one_dim():
    with pytest.raises(ValueError, match="expected two dims"):
        dequantize_weight(torch.zeros(32, dtype=torch.int8), torch.zeros(1, dtype=torch.uint8))


def test_scale_byte_255_reads_as_nan():
    codes, scales = quantize_weight(torch.ones(1, 64), Storage.FP8_ROW)
    scales.view(torch.uint8)[0, 1] = 255
    values = dequantize_weight(codes, scales)
    assert torch.isfinite(values[:, :32]).all()
    assert torch.isnan(values[:, 32:]).all()


def test_negative_zero_survives():
    weight = torch.full((1, 32), -0.0)
    weight[0, 0] = 1.0
    for storage in QUANTIZED:
        values = dequantize_weight(*quantize_weight(weight, storage))
        assert torch.signbit(values[0, 1:]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_value_anywhere_is_found(dtype, bad):
    values = torch.randn(37, 41, dtype=dtype)
    assert all_finite(values)
    assert all_finite(values[:0])
    for at in (0, 700, 37 * 41 - 1):
        damaged = values.clone()
        damaged.view(-1)[at] = bad
        assert not all_finite(damaged)
