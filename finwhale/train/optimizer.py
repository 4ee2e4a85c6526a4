"""AdamW in two groups, and the learning-rate schedule.

Matrices and tables decay; norms, sinks, scales and the hyper-connections' static parts do not:
pulling those to zero would remove the mechanism they belong to. The indexer is frozen: its
hard selection passes no gradient, and decay alone would erase it. Routing biases are buffers,
moved by `balance.py`. Source: spec/training.md section 1.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from finwhale.config.run import OptimConfig, ScheduleConfig


def is_frozen(name: str) -> bool:
    """Return whether the language-model loss gives this parameter no gradient by design."""
    return ".attn.indexer." in name


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: matrices, but not norms, biases, sinks and scales."""
    leaf = name.rsplit(".", 1)[-1]
    return parameter.dim() >= 2 and leaf not in ("q_weight", "k_weight")


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; freezes the indexer as a side effect."""
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
        if parameter.requires_grad:
            groups[not decays(name, parameter)].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[0], "weight_decay": config.weight_decay},
            {"params": groups[1], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=True,
    )


def learning_rate(step: int, lr: float, schedule: ScheduleConfig) -> float:
    """Return the rate of step `step` (from 0): linear warm-up, then cosine to min_ratio * lr.

    The last step, `steps - 1`, runs at exactly min_ratio * lr.
    """
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    span = max(1, schedule.steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    ratio = schedule.min_ratio
    return lr * (ratio + (1 - ratio) * (1 + math.cos(math.pi * progress)) / 2)
