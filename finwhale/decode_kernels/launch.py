"""Which device family a GPU belongs to; each kernel file keys its launch parameters by it.

A family is a name such as "hopper". What no program of `bench/` has measured is served by the
entry "any", never by tuning at run time: two runs of one program must launch the same kernels.
The interpreter has no device and takes "any" too. Refuses nothing. The easy mistake: keying by the
device's name, which differs between cards that run the same code equally well.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
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


class Overlap(IntEnum):
    """When a launch lets the next one come up (programmatic dependent launch); all but NONE wait.

    NONE           the launch begins when the one before has ended, and so does the next one
    AT_END         the next one comes up as the programs of this one end
    AFTER_READING  when each program has read its weights, and only sums are left; as AT_END in a
                   kernel that reads none
    AT_ONCE        when each program has begun: where there is room for the next one's

    Programs that come up early take the places that are free then, on few processors, and stay
    there: a large launch that starts under another large one is badly shared out.
    """

    NONE = 0
    AT_END = 1
    AFTER_READING = 2
    AT_ONCE = 3


_AFTER_READING = tl.constexpr(int(Overlap.AFTER_READING))
_AT_ONCE = tl.constexpr(int(Overlap.AT_ONCE))


@triton.jit
def wait_for_earlier(OVERLAP: tl.constexpr):
    """Wait until the launch before has written its results.

    A program calls this before it writes anything, or reads what that launch writes. The next one
    comes up after this wait, never before: so at the start of a launch all have ended but the one
    before it. What that one does not write may be read earlier: weights, and results of still
    earlier launches; these past the first-level cache (".cg"), which may hold what they were.
    """
    if OVERLAP > 0:
        cuda.gdc_wait()
    if OVERLAP == _AT_ONCE:
        cuda.gdc_launch_dependents()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Let the next launch come up once all programs have come here or ended."""
    if OVERLAP == _AFTER_READING:
        cuda.gdc_launch_dependents()


def overlap_options(overlap: int, device: torch.device) -> dict[str, int]:
    """Return the launch options of a kernel that calls `wait_for_earlier`.

    A device that cannot do it, and the interpreter, launch one after the other.
    """
    is_able = device.type == "cuda" and device_family(device) in ("hopper", "blackwell")
    if overlap and is_able:
        return {"OVERLAP": int(overlap), "launch_pdl": True}
    return {"OVERLAP": 0}
