"""Stored weight matrices: FP8 with a UE8M0 scale per 32x32 block or per row, and packed FP4.

Each `quantize_weight` call gives what lies in the file, `dequantize_weight` the exact values back;
the dtype of the codes and the shape of the scales say which format it is, never a tensor name.
Work goes through row slices, so a table of 98 GB needs no more scratch than a small matrix.
The easy mistake: a block whose largest value rounds down to half the format's maximum has two
spellings of the same values; the one with the smaller scale is stored, because it is the one that
a second pass over the read-back values chooses. Source: spec/backbone.md sections 9 and 10.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from finwhale.config.inventory import GROUP, Storage
from finwhale.ops.codecs import (
    E2M1_MAX,
    E4M3_MAX,
    ceil_power_of_two,
    e2m1_decode,
    e2m1_encode,
    e4m3_encode,
    pack_nibbles,
    ue8m0_decode,
    unpack_nibbles,
)

QUANTIZED = (Storage.FP8_BLOCK, Storage.FP8_ROW, Storage.FP4_ROW)
# Elements of one row slice: 16 MB of fp32 scratch per temporary.
SLICE_ELEMENTS = 1 << 22
# Smallest scale whose smallest code (2^-9 in E4M3) is still a bf16 number (2^-133).
_E4M3_MIN_SCALE = 3  # 2^-124
_E2M1_MIN_SCALE = 1  # 2^-126, the smallest normal number
_SCALE_ONE = 127  # the scale of a block without a nonzero code


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices that cover `rows` in order, each a multiple of 32 rows except the last."""
    step = max(GROUP, SLICE_ELEMENTS // max(columns, 1) // GROUP * GROUP)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite. One pass without a temporary; NaN passes through."""
    if not values.numel():
        return True
    low, high = values.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def quantize_weight(weight: Tensor, storage: Storage) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) as the checkpoint stores them; scale = 2^ceil(log2(amax / max)).

    weight   [rows, columns], finite; edges that do not fill a block of 32 are allowed
    codes    FP8: [rows, columns] float8_e4m3fn; FP4: [rows, columns/2] int8, low nibble first
    scales   float8_e8m0fnu, [ceil(rows/32), ceil(columns/32)] for FP8_BLOCK, else
             [rows, ceil(columns/32)]

    Every value read back is a bf16 number, and quantising the values read back gives the same
    codes and scales. spec/backbone.md section 10.
    """
    if storage not in QUANTIZED:
        raise ValueError(f"quantize_weight: storage is {storage.name}, expected an FP8 or FP4 one")
    if weight.ndim != 2:
        raise ValueError(f"quantize_weight: got shape {tuple(weight.shape)}, expected two dims")
    rows, columns = weight.shape
    is_fp4 = storage is Storage.FP4_ROW
    if is_fp4 and columns % 2:
        raise ValueError(f"quantize_weight: {columns} columns, expected an even number for FP4")
    block_rows = GROUP if storage is Storage.FP8_BLOCK else 1
    codes = torch.empty(
        (rows, columns // 2 if is_fp4 else columns),
        dtype=torch.int8 if is_fp4 else torch.float8_e4m3fn,
        device=weight.device,
    )
    scales = torch.empty(
        (-(-rows // block_rows), -(-columns // GROUP)),
        dtype=torch.float8_e8m0fnu,
        device=weight.device,
    )
    for part in row_slices(rows, columns):
        groups = slice(part.start // block_rows, -(-part.stop // block_rows))
        if not all_finite(weight[part]):
            raise ValueError("quantize_weight: a value is NaN or infinite; expected finite weights")
        values, exponents = _quantize_slice(weight[part].float(), block_rows, is_fp4)
        codes[part] = (
            pack_nibbles(e2m1_encode(values)).view(torch.int8) if is_fp4 else e4m3_encode(values)
        )
        scales[groups] = exponents.view(torch.float8_e8m0fnu)
    return codes, scales


def _quantize_slice(weight: Tensor, block_rows: int, is_fp4: bool) -> tuple[Tensor, Tensor]:
    """Return code values [r, c] fp32, exactly representable, and scale codes [r/b, c/32] uint8."""
    rows, columns = weight.shape
    largest, min_scale = (E2M1_MAX, _E2M1_MIN_SCALE) if is_fp4 else (E4M3_MAX, _E4M3_MIN_SCALE)
    padded = pad(weight, (0, -columns % GROUP, 0, -rows % block_rows))
    blocks = padded.unflatten(1, (-1, GROUP)).unflatten(0, (-1, block_rows))  # [r/b, b, c/32, 32]
    # Division, not a product with the reciprocal: fl32 division cannot miss a value one ulp
    # above a power of two, and no kernel has to be matched here.
    quotient = blocks.abs().amax((1, 3)) / largest  # [r/b, c/32]
    scales = ceil_power_of_two(quotient.clamp_min(2.0 ** (min_scale - 127)))
    values = blocks / ue8m0_decode(scales)[:, None, :, None]
    values = e2m1_decode(e2m1_encode(values)) if is_fp4 else e4m3_encode(values).float()
    peak = values.abs().amax((1, 3))
    halve = (peak == largest / 2) & (scales > min_scale)
    values = torch.where(halve[:, None, :, None], values * 2, values)
    scales = torch.where(peak == 0, _SCALE_ONE, scales - halve.to(torch.uint8)).to(torch.uint8)
    return values.flatten(0, 1).flatten(1)[:rows, :columns], scales


def round_weight(weight: Tensor, storage: Storage) -> Tensor:
    """Return dequantize(quantize(weight)) [rows, columns] in its dtype, asking the device nothing.

    For training in the stored values; equal to `quantize_weight` and back for finite weights.
    """
    block_rows = GROUP if storage is Storage.FP8_BLOCK else 1
    values, scales = _quantize_slice(weight.float(), block_rows, storage is Storage.FP4_ROW)
    unit = ue8m0_decode(scales).repeat_interleave(block_rows, 0)[: weight.shape[0]]
    unit = unit.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    return (values * unit).to(weight.dtype)


def storage_of(codes: Tensor, scales: Tensor) -> Storage:
    """Return the format that dtype and shapes of a stored pair say. ValueError if they disagree."""
    return storage_from_header(codes.dtype, tuple(codes.shape), tuple(scales.shape))


def storage_from_header(
    dtype: torch.dtype, shape: tuple[int, ...], scale_shape: tuple[int, ...]
) -> Storage:
    """Return the format of a weight from its dtype, its shape as stored and its scale's shape."""
    if len(shape) != 2:
        raise ValueError(f"a quantised weight has shape {list(shape)}, expected two dims")
    rows, width = shape
    if dtype is torch.int8:
        wanted = {Storage.FP4_ROW: (rows, -(-width * 2 // GROUP))}
    elif dtype is torch.float8_e4m3fn:
        groups = -(-width // GROUP)
        wanted = {Storage.FP8_BLOCK: (-(-rows // GROUP), groups), Storage.FP8_ROW: (rows, groups)}
    else:
        raise ValueError(f"a quantised weight has dtype {dtype}, expected float8_e4m3fn or int8")
    for storage, expected in wanted.items():
        if scale_shape == expected:
            return storage
    choices = " or ".join(str(list(s)) for s in wanted.values())
    raise ValueError(f"its scale has shape {list(scale_shape)}, expected {choices}")


def dequantize_weight(
    codes: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the values [rows, columns] of a stored pair: code * 2^(scale - 127).

    codes    [rows, columns] float8_e4m3fn, or [rows, columns/2] int8 with two E2M1 codes
    scales   float8_e8m0fnu or uint8; per 32x32 block or per row and 32 columns (see the shapes
             in `quantize_weight`); the byte 255 is NaN
    dtype    float32 or bfloat16; both hold every value that `quantize_weight` can produce

    spec/backbone.md section 10.
    """
    storage = storage_of(codes, scales)
    rows, width = codes.shape
    columns = width * 2 if storage is Storage.FP4_ROW else width
    block_rows = GROUP if storage is Storage.FP8_BLOCK else 1
    out = torch.empty((rows, columns), dtype=dtype, device=codes.device)
    for part in row_slices(rows, columns):
        groups = slice(part.start // block_rows, -(-part.stop // block_rows))
        raw = codes[part]
        values = e2m1_decode(unpack_nibbles(raw)) if storage is Storage.FP4_ROW else raw.float()
        exponents = scales[groups].view(torch.uint8)
        unit = torch.where(exponents == 255, torch.nan, ue8m0_decode(exponents))
        unit = unit.repeat_interleave(block_rows, 0)[: values.shape[0]]
        unit = unit.repeat_interleave(GROUP, 1)[:, :columns]
        out[part] = (values * unit).to(dtype)
    return out
