"""Which device family a GPU belongs to; each kernel file keys its launch parameters by it.

A family is a name such as "hopper". What no program of `bench/` has measured is served by the
entry "any", never by tuning at run time: two runs of one program must launch the same kernels.
The interpreter has no device and takes "any" too. Refuses nothing. The easy mistake: keying by the
device's name, which differs between cards that run the same code equally well.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

Launch = TypeVar("Launch")

_FAMILIES = {(8, 0): "ampere", (9, 0): "hopper", (10, 0): "blackwell", (10, 3): "blackwell"}


@cache
def device_family(device: torch.device) -> str:
    """Return the family of a CUDA device; "any" for one without a name here and for a CPU."""
    if device.type != "cuda":
        return "any"
    return _FAMILIES.get(torch.cuda.get_device_capability(device), "any")


def launch_for(table: Mapping[str, Launch], device: torch.device) -> Launch:
    """Return the entry of a kernel's table for a device."""
    return table.get(device_family(device), table["any"])


def is_interpreted(kernel) -> bool:
    """Return whether a kernel was made for Triton's interpreter, which runs on a CPU."""
    return not isinstance(kernel, triton.runtime.JITFunction)


@triton.jit
def wait_for_earlier(OVERLAP: tl.constexpr):
    """Let the next kernel come up, then wait until all earlier ones have written their results.

    With OVERLAP (and the launch option `launch_pdl`) a kernel's start hides behind the end of the
    one before. Each program calls this once, before it reads or writes what another kernel touches;
    what no kernel of a step writes, weights for instance, may be read earlier.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


def overlap_options(overlap: bool, device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that calls `wait_for_earlier`."""
    able = overlap and device_family(device) in ("hopper", "blackwell")
    return {"OVERLAP": able, "launch_pdl": able} if able else {"OVERLAP": False}
