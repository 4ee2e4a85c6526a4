"""Muon: momentum whose direction is orthogonalised, many matrices of one shape at a time.

Owns the hybrid Newton-Schulz iteration (8 fast steps, then 2 that settle every singular value at
1), its obvious reference, and an optimiser that runs it once per shape. Refused: anything but
matrices, and rows that do not split evenly into heads. The mistake to avoid: to orthogonalise a
stack of independent matrices (query heads, output groups) as one; name their number in `heads`.
Source: spec/training.md sections 1 and II.1.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor

# One odd quintic per step, p(s) = a s + b s^3 + c s^5 on every singular value s. The fast one
# lifts small values and leaves them scattered around 1; the settling one has p(1) = 1, p'(1) = 0.
_FAST, _SETTLING = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
COEFFICIENTS = (_FAST,) * 8 + (_SETTLING,) * 2
# An orthogonal factor has RMS 1/sqrt(max(n, m)); this is the RMS of the update made of it, about
# that of AdamW, so that one learning rate serves both.
UPDATE_RMS = 0.18
# Added to the Frobenius norm: a matrix of zeros stays zero and never turns into NaN.
_NORM_EPS = 1e-20


class MuonError(ValueError):
    """A parameter or setting that Muon cannot serve."""


def newton_schulz_ref(
    matrix: Tensor, coefficients: Iterable[tuple[float, float, float]] = COEFFICIENTS
) -> Tensor:
    """Return the orthogonalised `matrix` [n, m], in its own floating dtype: one loop, no tricks.

    X = matrix / |matrix|_F, then per (a, b, c): X <- a X + b (X X^T) X + c (X X^T)^2 X. With the
    singular value decomposition U S V^T this is U p(S) V^T, close to U V^T.
    """
    X = matrix / (torch.linalg.vector_norm(matrix) + _NORM_EPS)
    for a, b, c in coefficients:
        gram = X @ X.T
        X = a * X + b * (gram @ X) + c * (gram @ (gram @ X))
    return X


def newton_schulz(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return every matrix of `matrices` [..., n, m] orthogonalised, in fp32; same shape.

    The iteration runs in `dtype`: by default bf16 on CUDA, as the report has it, and fp32
    elsewhere. The norm is taken in fp32 (float64 stays float64 if `dtype` asks for it).
    """
    if dtype is None:
        dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    shape = matrices.shape
    X = matrices.reshape(-1, *shape[-2:]).to(wide)  # [count, n, m]
    X = (X / (torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True) + _NORM_EPS)).to(dtype)
    # The transposed problem has the transposed answer and the smaller Gram matrix.
    is_tall = shape[-2] > shape[-1]
    if is_tall:
        X = X.mT
    for a, b, c in COEFFICIENTS:
        gram = X @ X.mT  # [count, min(n, m), min(n, m)]
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        X = torch.baddbmm(X, polynomial, X, beta=a)
    if is_tall:
        X = X.mT
    return X.to(wide).contiguous().view(shape)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay over 2-D parameters.

    M <- momentum M + G;  O = newton_schulz(momentum M + G) * sqrt(max(n, m)) * 0.18;
    W <- W (1 - lr weight_decay) - lr O.

    lr            float or 0-dim tensor on the parameters' device
    heads         group option: a parameter [heads * n, m] is a stack of `heads` matrices [n, m]
    dtype         of the iteration, see `newton_schulz`
    max_elements  of one batch; bounds the temporary memory and moves numbers by rounding only

    Momentum is fp32. A parameter without a gradient is left as it is.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        heads: int = 1,
        dtype: torch.dtype | None = None,
        max_elements: int = 2**28,
    ) -> None:
        if not 0 <= momentum < 1:
            raise MuonError(f"momentum: got {momentum!r}, expected at least 0 and below 1")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "heads": heads}
        super().__init__(params, defaults)
        self._dtype, self._max_elements = dtype, max_elements

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        heads = self.param_groups[-1]["heads"]
        for parameter in self.param_groups[-1]["params"]:
            shape = tuple(parameter.shape)
            if len(shape) != 2 or heads < 1 or shape[0] % heads:
                raise MuonError(
                    f"heads: got {heads} for a parameter of shape {shape}, expected a matrix whose "
                    "rows split evenly; give other parameters to AdamW"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        load_momentum(self, state_dict)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply one update from the gradients. Nothing here waits for the device."""
        updates = self._orthogonal_updates()
        for group in self.param_groups:
            owned = [p for p in group["params"] if p.grad is not None]
            if not owned:
                continue
            lr = group["lr"]
            if group["weight_decay"]:
                torch._foreach_mul_(owned, 1 - lr * group["weight_decay"])
            # Not `alpha=-lr`: a tensor rate would have to be read by the host.
            steps = [updates[p] for p in owned]
            torch._foreach_mul_(steps, -lr)
            torch._foreach_add_(owned, steps)

    def _orthogonal_updates(self) -> dict[Tensor, Tensor]:
        """Advance the momenta; return O per parameter, fp32, of the parameter's shape."""
        # Keyed by the shape of one matrix: [(parameter, its Nesterov gradients [heads, n, m])].
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for group in self.param_groups:
            owned = [p for p in group["params"] if p.grad is not None]
            if not owned:
                continue
            grads = [p.grad.float() for p in owned]
            momenta = [momentum_of(self, p) for p in owned]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, grads)
            nesterov = torch._foreach_mul(momenta, group["momentum"])
            torch._foreach_add_(nesterov, grads)
            for parameter, direction in zip(owned, nesterov, strict=True):
                stack = direction.unflatten(0, (group["heads"], -1))
                shape = (stack.shape[1], stack.shape[2])
                by_shape.setdefault(shape, []).append((parameter, stack))
        updates: dict[Tensor, Tensor] = {}
        for shape, stacks in by_shape.items():
            for batch in _batches(stacks, self._max_elements):
                matrices = torch.cat([stack for _, stack in batch])  # [count, n, m]
                factor = sqrt(max(shape)) * UPDATE_RMS
                outputs = newton_schulz(matrices, self._dtype).float().mul_(factor)
                counts = [len(stack) for _, stack in batch]
                for (parameter, _), output in zip(batch, outputs.split(counts), strict=True):
                    updates[parameter] = output.flatten(0, 1)
        return updates


def _batches(
    stacks: list[tuple[Tensor, Tensor]], max_elements: int
) -> Iterable[list[tuple[Tensor, Tensor]]]:
    """Cut `stacks` in order into lists of at most `max_elements`, one stack at the least."""
    batch: list[tuple[Tensor, Tensor]] = []
    elements = 0
    for parameter, stack in stacks:
        if batch and elements + stack.numel() > max_elements:
            yield batch
            batch, elements = [], 0
        batch.append((parameter, stack))
        elements += stack.numel()
    yield batch


def momentum_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """Return the fp32 momentum of `parameter`, zeros at its first use."""
    state = optimizer.state[parameter]
    if "momentum" not in state:
        state["momentum"] = torch.zeros_like(
            parameter, dtype=torch.float32, memory_format=torch.contiguous_format
        )
    return state["momentum"]


def load_momentum(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Copy the fp32 momenta of `state_dict` into `optimizer`, parameter by parameter.

    torch casts a loaded state to its parameter's dtype, which rounds the momentum of a bf16
    parameter; a resumed run would then differ.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in state_dict["state"].items():
        momentum = state["momentum"].detach()
        device = parameters[index].device
        optimizer.state[parameters[index]]["momentum"] = momentum.to(
            device, torch.float32, copy=True
        )
