"""The training state on disk: all that is needed to go on as if nothing had happened.

Weights, optimiser, step and the length of `metrics.jsonl` are one file, which replaces the one
before in a single rename. Killed at any instant, a run finds either the old state or the new one,
cuts the metrics file back to the recorded length, and repeats the steps since; the same numbers
come out. Data and random draws need no state: they are functions of the seed and the step. Free
space is checked first: a disk that fills up in the middle of a write has cost people their runs.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finwhale.checkpoint.load import load_model
from finwhale.model import Backbone, Numerics
from finwhale.optim.optimizers import OptimizerError, Optimizers

STATE_FILE = "state.pt"
_FORMAT = 2


class StateError(ValueError):
    """A training state that is damaged, belongs to another model or does not fit on the disk."""


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_tensor_bytes(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_tensor_bytes(v) for v in value)
    return 0


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise StateError unless `folder`'s disk has room for `needed_bytes` and a tenth more."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + needed_bytes // 10:
        raise StateError(
            f"{folder}: {what} needs {needed_bytes:,} bytes and a tenth more, {free:,} are free; "
            "make room and resume: what was saved before is untouched"
        )


def save_state(
    folder: Path,
    model: Backbone,
    optimizers: Optimizers,
    *,
    step: int,
    metrics_bytes: int,
    elapsed_s: float,
) -> None:
    """Write the state after `step` finished steps, atomically."""
    partial, final = folder / (STATE_FILE + ".partial"), folder / STATE_FILE
    state = {
        "format": _FORMAT,
        "model": model.state_dict(),
        "optimizer": optimizers.state_dict(),
        "step": step,
        "metrics_bytes": metrics_bytes,
        "elapsed_s": elapsed_s,
    }
    require_space(folder, _tensor_bytes(state), "the training state")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, final)


def load_state(folder: Path, model: Backbone, optimizers: Optimizers) -> dict[str, Any] | None:
    """Restore model and optimisers; return the counters, or None if there is no state."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    state = _read_state(path, "delete the folder to start again")
    _load_weights(path, state, model)
    try:
        optimizers.load_state_dict(state["optimizer"])
    except OptimizerError as error:
        raise StateError(f"{path}: {error}") from None
    return {key: state[key] for key in ("step", "metrics_bytes", "elapsed_s")}


def load_weights(folder: Path, model: Backbone) -> int:
    """Give `model` the weights of the run in `folder`; return how many steps made them.

    A folder of a checkpoint gives its weights dequantised, and 0 steps: what its formats do not
    hold is lost, so a run's own state is the better start where there is one.

    Raises StateError if there is neither, or it is of a model of other shapes, and what
    `load_model` raises for a damaged checkpoint.
    """
    path = folder / STATE_FILE
    if not path.exists():
        if not (folder / "config.json").exists():
            want = "name the folder of a run or of a checkpoint"
            raise StateError(
                f"init_from: {folder} holds no {STATE_FILE} and no config.json; {want}"
            )
        loaded = load_model(folder, numerics=Numerics(cache_rounding=False)).model
        _load_weights(folder, {"model": loaded.state_dict()}, model)
        return 0
    state = _read_state(path, "name another run")
    _load_weights(path, state, model)
    return state["step"]


def _read_state(path: Path, remedy: str) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(f"{path}: not a readable training state ({error}); {remedy}") from None
    if state.get("format") != _FORMAT:
        raise StateError(f"{path}: format: got {state.get('format')!r}, expected {_FORMAT}")
    return state


def _load_weights(path: Path, state: dict[str, Any], model: Backbone) -> None:
    found, wanted = state["model"], model.state_dict()
    for name in sorted({*found, *wanted}):
        shapes = [tuple(s[name].shape) if name in s else None for s in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise StateError(f"{path}: {name}: found {shapes[0]}, expected {shapes[1]}")
    model.load_state_dict(found)
