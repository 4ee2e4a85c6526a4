"""What a run leaves behind for the reader: `run.json`, `metrics.jsonl`, the loss curve.

`run.json` is written before the first step and completed at the end. Of `metrics.jsonl` every
field but `tokens_per_s` and `elapsed_s` is a function of the run alone: two runs of one recipe
on one machine write the same numbers.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss.png"
TIMING_FIELDS = ("tokens_per_s", "elapsed_s")


class RunFolderError(ValueError):
    """A folder that already holds another run."""


def source_commit() -> dict[str, Any] | None:
    """Return the git commit of the package and whether the tree is dirty.

    None where git does not track this file: an installed package may lie inside a repository
    that is not its own.
    """
    file = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    import numpy
    import tokenizers

    import finwhale

    return {
        "finwhale": finwhale.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "tokenizers": tokenizers.__version__,
    }


def device_name() -> str:
    """Return the processor and how many threads compute."""
    return f"cpu {platform.machine()}, {torch.get_num_threads()} threads, {sys.platform}"


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file at once."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def claim_folder(out: Path, resolved: dict[str, Any], digest: str) -> dict[str, Any]:
    """Return the earlier `run.json` of `out`, or {} for a new run.

    Raises RunFolderError if it belongs to a run that differs, naming the first field.
    """
    path = out / RUN_FILE
    if not path.exists():
        return {}
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{path}: not valid JSON ({error}); choose another folder") from None
    wanted = {"config": json.loads(json.dumps(resolved)), "data_digest": digest}
    for key, want in wanted.items():
        difference = _first_difference(earlier.get(key), want, key)
        if difference:
            remedy = "resume with the same recipe, or choose another folder"
            raise RunFolderError(f"{path}: holds another run: {difference}; {remedy}")
    return earlier


def _first_difference(found: Any, want: Any, path: str) -> str | None:
    if isinstance(found, dict) and isinstance(want, dict):
        for key in sorted({*found, *want}):
            difference = _first_difference(found.get(key), want.get(key), f"{path}.{key}")
            if difference:
                return difference
        return None
    return None if found == want else f"{path}: found {found!r}, expected {want!r}"


class Metrics:
    """Appends to `metrics.jsonl`. `length_bytes` is the length after the last whole line."""

    def __init__(self, out: Path, keep_bytes: int) -> None:
        self._path = out / METRICS_FILE
        self._path.touch()
        os.truncate(self._path, keep_bytes)
        self._file = self._path.open("ab")
        self.length_bytes = keep_bytes

    def write(self, record: dict[str, Any]) -> None:
        line = (json.dumps(record) + "\n").encode()
        self._file.write(line)
        self._file.flush()
        self.length_bytes += len(line)

    def close(self) -> None:
        self._file.close()


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """Return the records of `metrics.jsonl` in order."""
    text = (out / METRICS_FILE).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def curve(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records without the fields that depend on the clock."""
    return [{k: v for k, v in r.items() if k not in TIMING_FIELDS} for r in records]


def draw_curve(out: Path, baselines: dict[str, float], bytes_per_token: float) -> Path:
    """Draw training and validation bits per byte over steps, baselines as lines; return the file.

    The training loss is per token; `bytes_per_token` of the training text converts it.
    """
    import math

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(out)
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train = [(r["step"], r["loss"] / math.log(2) / bytes_per_token) for r in records if "loss" in r]
    held_out = [(r["step"], r["validation_bpb"]) for r in records if "validation_bpb" in r]
    axes.plot(*zip(*train, strict=True), linewidth=0.8, label="training batch")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", label="validation")
    for number, (name, value) in enumerate(baselines.items()):
        style = ("--", "-.", ":")[number % 3]
        axes.axhline(value, linestyle=style, color="0.3", label=f"{name}, validation: {value:.3f}")
    axes.set(xlabel="step", ylabel="bits per byte", title="Loss")
    axes.legend()
    path = out / CURVE_FILE
    figure.savefig(path, dpi=110)
    return path
