"""A model's optimisers as one object, and the learning-rate schedules.

`Optimizers` gives every parameter to the optimiser its rule names (`ownership.py`), steps them
together and saves them together. Nothing in `step` waits for the device and no shape in it
depends on data, so it may be captured in a CUDA graph. Refused: a saved state of other owners.
The mistake to avoid: to set a learning rate on one optimiser alone. Routing biases are buffers,
moved by `balance.py`. Source: spec/training.md sections 1 and II.4.5.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from finwhale.config.run import ScheduleConfig
from finwhale.model import Backbone
from finwhale.optim.muon import Muon
from finwhale.optim.ownership import Rule, owners
from finwhale.optim.sinkhorn_momentum import SinkhornMomentum

SHAPES = ("cosine", "report")


class OptimizerError(ValueError):
    """A state, name or schedule that does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedGroup:
    """The parameters that share one rule, for display."""

    rule: Rule
    names: tuple[str, ...]
    num_parameters: int


class Optimizers:
    """Muon, Sinkhorn momentum and AdamW over one model, stepped as one.

    The keywords from `scheme` to `eps` are those of `ownership.owners`. momentum is Muon's and
    Sinkhorn's, beta1 and beta2 are AdamW's, gamma is Sinkhorn's step, muon_dtype the dtype of
    Newton-Schulz (None: bf16 on CUDA, else fp32). Frozen parameters lose requires_grad; all
    others get it. Build it when the model is on its device.
    """

    def __init__(
        self,
        model: Backbone,
        *,
        scheme: str = "report",
        indexer: str = "frozen",
        router: str = "muon",
        indexer_lr_scale: float = 1.0,
        engram_lr_scale: float = 5.0,
        weight_decay: float = 0.1,
        eps: float = 1e-8,
        momentum: float = 0.95,
        beta1: float = 0.9,
        beta2: float = 0.95,
        gamma: float = 0.18,
        muon_dtype: torch.dtype | None = None,
    ) -> None:
        self.rules = owners(
            model,
            scheme=scheme,
            indexer=indexer,
            router=router,
            indexer_lr_scale=indexer_lr_scale,
            engram_lr_scale=engram_lr_scale,
            weight_decay=weight_decay,
            eps=eps,
        )
        self._parameters = model.trained_tensors()
        by_rule: dict[Rule, list[str]] = {}
        for name, rule in self.rules.items():
            self._parameters[name].requires_grad_(rule.optimizer != "frozen")
            by_rule.setdefault(rule, []).append(name)
        self.groups = tuple(
            OwnedGroup(
                rule=rule,
                names=tuple(names),
                num_parameters=sum(self._parameters[name].numel() for name in names),
            )
            for rule, names in by_rule.items()
        )
        # capturable keeps AdamW's step count on the device, where a graph can advance it.
        on_cuda = next(iter(self._parameters.values())).is_cuda
        how = {"fused": True, "capturable": True} if on_cuda else {"foreach": True}
        makers = {
            "muon": lambda g: Muon(g, momentum=momentum, dtype=muon_dtype),
            "sinkhorn": lambda g: SinkhornMomentum(g, beta=momentum, gamma=gamma),
            "adamw": lambda g: torch.optim.AdamW(g, betas=(beta1, beta2), **how),
        }
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        for kind, make in makers.items():
            groups = [self._options(g) for g in self.groups if g.rule.optimizer == kind]
            if groups:
                self.optimizers[kind] = make(groups)

    def _options(self, group: OwnedGroup) -> dict[str, Any]:
        """Return the options of one torch parameter group."""
        rule = group.rule
        options: dict[str, Any] = {"params": [self._parameters[name] for name in group.names]}
        options["lr_scale"] = rule.lr_scale
        if rule.optimizer != "sinkhorn":
            options["weight_decay"] = rule.weight_decay
        if rule.optimizer == "muon":
            options["heads"] = rule.heads
        if rule.optimizer == "adamw":
            options["eps"] = rule.eps
        return options

    def parameters_of(self, part: str) -> list[Tensor]:
        """Return the parameters of `part`, in the model's order.

        "trained": all that have an optimiser; "indexer" and "backbone": the trained ones below
        `.attn.indexer.` and the others; "frozen", "muon", "sinkhorn", "adamw": by owner.
        """
        kinds = ("frozen", "muon", "sinkhorn", "adamw")
        if part not in (*kinds, "trained", "indexer", "backbone"):
            raise OptimizerError(
                f"part: got {part!r}, expected trained, indexer, backbone or one of {kinds}"
            )
        chosen = []
        for name, rule in self.rules.items():
            is_trained, is_indexer = rule.optimizer != "frozen", ".attn.indexer." in name
            wanted = {"trained": is_trained, "indexer": is_trained and is_indexer}
            wanted["backbone"] = is_trained and not is_indexer
            if wanted.get(part, rule.optimizer == part):
                chosen.append(self._parameters[name])
        return chosen

    def step(self, lr: float | Tensor) -> None:
        """Step every optimiser at `lr`, a float or a 0-dim tensor on the parameters' device.

        A missing gradient counts as zero, as it is in a captured step where the buffers stay: an
        expert that served no token still follows its momentum and decays.
        """
        if isinstance(lr, Tensor):
            # On CPU there is nothing to wait for; on CUDA the fused AdamW reads fp32.
            lr = float(lr) if lr.device.type == "cpu" else lr.float()
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
                for parameter in group["params"]:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
            optimizer.step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop all gradients, or fill them with zeros in place (for a captured step)."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return all state as plain objects and tensors, with the owners it belongs to."""
        return {
            "owned": self._owned(),
            "optimizers": {kind: o.state_dict() for kind, o in self.optimizers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state` exactly; steps after it equal those of a run that was not stopped.

        State tensors are replaced, so load before a step is captured. Raises OptimizerError if
        the state has other owners: numbers by position would land on other parameters.
        """
        found, wanted = state.get("owned", {}), self._owned()
        if found != wanted:
            kinds = sorted({*found, *wanted})
            differ = [kind for kind in kinds if found.get(kind) != wanted.get(kind)]
            raise OptimizerError(
                f"optimizer state: other owners or rules ({', '.join(differ)}); resume with the "
                "settings it was saved with, or start again"
            )
        for kind, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][kind])

    def _owned(self) -> dict[str, list[Any]]:
        """Return rule and parameter names of each torch parameter group, as plain objects."""
        return {
            kind: [[asdict(g.rule), list(g.names)] for g in self.groups if g.rule.optimizer == kind]
            for kind in self.optimizers
        }


def learning_rate(
    step: int,
    lr: float,
    schedule: ScheduleConfig,
    *,
    shape: str = "cosine",
    hold_until: float = 28 / 45,
    decay_until: float = 40 / 45,
) -> float:
    """Return the rate of step `step` (from 0): linear warm-up, then one of two shapes.

    cosine  down to min_ratio * lr; the last step, `steps - 1`, runs at exactly that
    report  flat at lr until step hold_until * steps, cosine to min_ratio * lr at step
            decay_until * steps, constant from there (the report: 28T, 40T and 45T tokens)

    Raises OptimizerError unless 0 <= hold_until <= decay_until <= 1.
    """
    if shape not in SHAPES:
        raise OptimizerError(f"shape: got {shape!r}, expected one of {', '.join(SHAPES)}")
    if not 0 <= hold_until <= decay_until <= 1:
        raise OptimizerError(
            f"hold_until, decay_until: got {hold_until!r} and {decay_until!r}, expected "
            "0 <= hold_until <= decay_until <= 1"
        )
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    if shape == "cosine":
        span = max(1, schedule.steps - 1 - schedule.warmup_steps)
        progress = min(1.0, (step - schedule.warmup_steps) / span)
    else:
        held, decayed = hold_until * schedule.steps, decay_until * schedule.steps
        if step < decayed:
            # Below `decayed`, so either still held or inside a span that is not empty.
            progress = 0.0 if step <= held else (step - held) / (decayed - held)
        else:
            progress = 1.0
    ratio = schedule.min_ratio
    return lr * (ratio + (1 - ratio) * (1 + math.cos(math.pi * progress)) / 2)
