"""Comparison of tensors that says where they differ most.

Infinities and NaNs are compared first, then the relative error per token; a failure names the
worst coordinate with both values.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relative_errors(ours: Tensor, theirs: Tensor, token_dims: int = 2) -> Tensor:
    """Return the relative error of each token, over all dims after the first `token_dims`.

    A token that is zero on both sides has error 0.
    """
    ours, theirs = ours.double(), theirs.double()
    dims = tuple(range(token_dims, theirs.dim())) or None
    if dims is None:
        ours, theirs, dims = ours.unsqueeze(-1), theirs.unsqueeze(-1), (theirs.dim(),)
    error = (ours - theirs).square().sum(dims).sqrt()
    scale = theirs.square().sum(dims).sqrt()
    return torch.where(error == 0, 0.0, error / scale)


def worst(ours: Tensor, theirs: Tensor) -> str:
    """Return the coordinate with the largest difference and both values, in words."""
    difference = (ours.double() - theirs.double()).abs().nan_to_num(nan=torch.inf)
    where = torch.unravel_index(difference.argmax(), difference.shape)
    at = tuple(int(i) for i in where)
    return f"worst at {list(at)}: ours {ours[at].item():.9g}, theirs {theirs[at].item():.9g}"


def assert_close(
    name: str, ours: Tensor, theirs: Tensor, tolerance: float, token_dims: int = 2
) -> float:
    """Assert shapes, non-finite places and relative errors; return the worst relative error."""
    assert ours.shape == theirs.shape, f"{name}: shape {ours.shape}, golden {theirs.shape}"
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(ours), kind(theirs)), f"{name}: {kind.__name__} differs"
    finite = torch.isfinite(theirs)
    errors = relative_errors(
        torch.where(finite, ours, 0), torch.where(finite, theirs, 0), token_dims
    )
    largest = float(errors.max()) if errors.numel() else 0.0
    assert largest <= tolerance, (
        f"{name}: relative error {largest:.3g} at token "
        f"{[int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)]}, allowed "
        f"{tolerance:.3g}; {worst(ours, theirs)}"
    )
    return largest


def assert_bf16_neighbours(name: str, ours: Tensor, theirs: Tensor, share: float = 0.01) -> None:
    """Assert that two bf16 tensors differ by one step at most, in at most `share` of places."""
    assert ours.dtype == theirs.dtype == torch.bfloat16
    # Reading the bits as integers orders the numbers of one sign.
    a, b = ours.view(torch.int16).int(), theirs.view(torch.int16).int()
    a, b = torch.where(a < 0, -(a & 0x7FFF), a), torch.where(b < 0, -(b & 0x7FFF), b)
    apart = (a - b).abs()
    assert int(apart.max()) <= 1, f"{name}: {int(apart.max())} bf16 steps; {worst(ours, theirs)}"
    found = float((apart > 0).float().mean())
    assert found <= share, f"{name}: {found:.2%} of values differ by one bf16 step"
