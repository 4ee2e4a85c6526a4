"""The training state on disk: all that is needed to go on as if nothing had happened.

Weights, optimiser, step and the length of `metrics.jsonl` are one file, which replaces the one
before in a single rename. Killed at any instant, a run finds either the old state or the new one,
cuts the metrics file back to the recorded length, and repeats the steps since; the same numbers
come out. Data and random draws need no state: they are functions of the seed and the step. The file
ends with a SHA-256 of itself, which is compared before anything in it is used. Free space is
checked first; a disk that fills up all the same leaves the state before and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from finwhale.checkpoint.load import load_model
from finwhale.config.files import FileError, kind_of_file, not_written, take
from finwhale.model import Backbone, Numerics
from finwhale.optim.optimizers import OptimizerError, Optimizers

STATE_FILE = "state.pt"
_FORMAT = 3
# States of this format have no digest; the checksums of the archive stand in for it.
_UNSEALED_FORMAT = 2
# The comment at the end of the archive; a file with one is still what torch.load reads.
_SEAL = b"finwhale sha256 "
_SEAL_BYTES = len(_SEAL) + 64
_PIECE_BYTES = 1 << 22


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
    """Write the state after `step` finished steps, atomically.

    Raises StateError that names the file and the cause; the state before is then untouched.
    """
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
    sealed = None
    try:
        with partial.open("wb") as file:
            sealed = _Sealed(file)
            torch.save(state, cast("BinaryIO", sealed))
            sealed.seal()
            os.fsync(file.fileno())
        os.replace(partial, final)
    except (OSError, RuntimeError) as error:
        # The library hides the cause of a failed write behind one of its own.
        cause = sealed.error if sealed is not None and sealed.error is not None else error
        raise StateError(f"{not_written(final, cause)}; make room and resume") from None
    finally:
        partial.unlink(missing_ok=True)


class _Sealed:
    """An archive being written, its digest so far, and the first error of a write."""

    def __init__(self, file: BinaryIO):
        self._file, self._digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            count = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._digest.update(data)
        return count

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        """Append the digest as the archive's comment, whose length is its last two bytes."""
        self._file.seek(-2, os.SEEK_END)
        self._file.write(_SEAL_BYTES.to_bytes(2, "little"))
        self._file.write(_SEAL + self._digest.hexdigest().encode())
        self._file.flush()


def _check_seal(path: Path) -> bool:
    """Return whether the file ends with a digest; raise StateError if it is not the file's."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _SEAL_BYTES - 2))
        end = file.read()
        if not end[2:].startswith(_SEAL):
            return False
        digest, left = hashlib.sha256(), size - _SEAL_BYTES - 2
        file.seek(0)
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                break
            digest.update(piece)
            left -= len(piece)
    digest.update(bytes(2))  # no comment yet
    wanted = _SEAL_BYTES.to_bytes(2, "little") + _SEAL + digest.hexdigest().encode()
    if end != wanted:
        raise StateError(
            f"{path}: damaged, its SHA-256 differs from the one that it was saved with"
        )
    return True


def _check_archive(path: Path) -> None:
    """Raise StateError unless the checksums of all parts of an archive are right."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, ValueError) as error:
        raise StateError(f"{path}: not a readable training state ({error})") from None
    if bad is not None:
        raise StateError(f"{path}: damaged, the checksum of its part {bad!r} is wrong")


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
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise StateError(f"{path}: optimizer: not the state of this run's optimisers") from None
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
    """Return the checked state: its digest first, then its parts and their types."""
    kind = kind_of_file(path)
    if kind != "a file":
        raise StateError(f"{path}: {kind}, expected a training state; {remedy}")
    try:
        is_sealed = _check_seal(path)
        if not is_sealed:
            _check_archive(path)
    except StateError as error:
        raise StateError(f"{error}; {remedy}") from None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # The library's sentence ends with advice that would run whatever the file holds.
        what = f"not a readable training state ({type(error).__name__})"
        raise StateError(f"{path}: {what}; {remedy}") from None
    try:
        if not isinstance(state, dict):
            raise FileError(path, f"a {type(state).__name__}", "the parts of a training state")
        found = state.get("format")
        if found != (_FORMAT if is_sealed else _UNSEALED_FORMAT):
            lacks = "" if is_sealed or found != _FORMAT else " with its SHA-256"
            raise StateError(f"{path}: format: got {found!r}, expected {_FORMAT}{lacks}; {remedy}")
        for name, part in (("model", dict), ("optimizer", dict), ("step", int)):
            take(state, name, part, path)
        take(state, "metrics_bytes", int, path)
        take(state, "elapsed_s", float, path)
        for name, tensor in state["model"].items():
            if not isinstance(tensor, Tensor):
                raise FileError(path, f"model.{name}: got {type(tensor).__name__}", "a tensor")
    except FileError as error:
        raise StateError(f"{error}; {remedy}") from None
    return state


def _load_weights(path: Path, state: dict[str, Any], model: Backbone) -> None:
    found, wanted = state["model"], model.state_dict()
    for name in sorted({*found, *wanted}):
        shapes = [tuple(s[name].shape) if name in s else None for s in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise StateError(f"{path}: {name}: found {shapes[0]}, expected {shapes[1]}")
    model.load_state_dict(found)
