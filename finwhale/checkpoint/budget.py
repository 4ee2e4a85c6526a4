"""What a load or a save needs in memory and on disk, stated and checked before it starts.

A model is filled through row slices, so the peak is the model itself plus one slice in work;
no tensor exists twice. The easy mistake: checking free memory after the constructor has run.
Cases 110 and 113 of the failure list are this file's reason.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from finwhale.checkpoint.folder import CheckpointError
from finwhale.config.inventory import Storage, TensorSpec
from finwhale.ops.weight_formats import row_slices

# Per element of a slice while FP4 is unpacked: codes, int32 indices, values, scales, products.
_WORKING_BYTES_PER_ELEMENT = 32
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """Bytes a load needs: the filled model, one slice in work, and what must stay free after."""

    model_bytes: int
    working_bytes: int
    reserve_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.model_bytes + self.working_bytes + self.reserve_bytes

    def __str__(self) -> str:
        parts = f"model {self.model_bytes} + slice in work {self.working_bytes}"
        reserve = f" + reserve {self.reserve_bytes}" if self.reserve_bytes else ""
        return f"{self.total_bytes} bytes of memory ({parts}{reserve})"


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape as (first dim, product of the others), the form that is sliced."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def load_budget(
    specs: Iterable[TensorSpec], dtype: torch.dtype, *, reserve_bytes: int = 0
) -> MemoryBudget:
    """Return the budget for parameters `specs` held in `dtype` (F32 storages stay fp32)."""
    model_bytes = largest = 0
    for spec in specs:
        width = 4 if spec.storage is Storage.F32 else dtype.itemsize
        model_bytes += spec.num_parameters * width
        rows, columns = rows_and_columns(spec.shape)
        first = next(row_slices(rows, columns), slice(0, 0))
        largest = max(largest, (first.stop - first.start) * columns)
    working = largest * _WORKING_BYTES_PER_ELEMENT
    return MemoryBudget(model_bytes=model_bytes, working_bytes=working, reserve_bytes=reserve_bytes)


def available_memory_bytes() -> int | None:
    """Return the memory that can be had without swapping, or None where the system has no word."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_memory(path: Path, budget: MemoryBudget, max_bytes: int | None) -> int | None:
    """Refuse a load that does not fit. Returns the limit that was checked, None if unknown.

    `max_bytes` replaces the limit that the system reports.
    """
    limit = available_memory_bytes() if max_bytes is None else max_bytes
    if limit is not None and budget.total_bytes > limit:
        name = "available (MemAvailable)" if max_bytes is None else "allowed by max_bytes"
        raise CheckpointError(
            path,
            expected=f"{budget}",
            found=f"{limit} bytes {name}",
            remedy="use Numerics(dtype=torch.bfloat16), a smaller model or a larger machine",
        )
    return limit


def check_disk(out: Path, num_bytes: int) -> None:
    """Refuse a save whose `num_bytes` do not fit on the disk that holds `out`'s parent."""
    free = shutil.disk_usage(Path(os.path.abspath(out)).parent).free
    if num_bytes > free:
        raise CheckpointError(
            out,
            expected=f"{num_bytes} bytes free on its disk",
            found=f"{free}",
            remedy="free some space or choose another disk; nothing was written",
        )
