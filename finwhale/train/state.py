"""The training state on disk: all that is needed to go on as if nothing had happened.

Weights, optimiser, random generator, step and the length of `metrics.jsonl` are one file, which
replaces the one before in a single rename. Killed at any instant, a run finds either the old
state or the new one, cuts the metrics file back to the recorded length, and repeats the steps
since; the same numbers come out. Data need no state: batch n is a function of the seed and n.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from finwhale.model import Backbone

STATE_FILE = "state.pt"
_FORMAT = 1


class StateError(ValueError):
    """A training state that is damaged or belongs to another model."""


def save_state(
    folder: Path,
    model: Backbone,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    metrics_bytes: int,
    elapsed_s: float,
) -> None:
    """Write the state after `step` finished steps, atomically."""
    partial, final = folder / (STATE_FILE + ".partial"), folder / STATE_FILE
    with partial.open("wb") as file:
        torch.save(
            {
                "format": _FORMAT,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "generator": torch.get_rng_state(),
                "step": step,
                "metrics_bytes": metrics_bytes,
                "elapsed_s": elapsed_s,
            },
            file,
        )
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, final)


def load_state(
    folder: Path, model: Backbone, optimizer: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """Restore model, optimiser and generator; return the counters, or None if there is no state."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        remedy = "delete the folder to start again"
        raise StateError(f"{path}: not a readable training state ({error}); {remedy}") from None
    if state.get("format") != _FORMAT:
        raise StateError(f"{path}: format: got {state.get('format')!r}, expected {_FORMAT}")
    found, wanted = state["model"], model.state_dict()
    for name in sorted({*found, *wanted}):
        shapes = [tuple(s[name].shape) if name in s else None for s in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise StateError(f"{path}: {name}: found {shapes[0]}, expected {shapes[1]}")
    model.load_state_dict(found)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["generator"])
    return {key: state[key] for key in ("step", "metrics_bytes", "elapsed_s")}
