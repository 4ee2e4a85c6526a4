"""What a run leaves behind for the reader: `run.json`, `metrics.jsonl`, the plots.

`run.json` is written before the first step and completed at the end. Of `metrics.jsonl` every
field but `tokens_per_s` and `elapsed_s` is a function of the run alone: two runs of one recipe
on one machine write the same numbers.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finwhale.config.files import (
    FileError,
    kind_of_file,
    not_written,
    parse_object,
    read_object,
    read_text,
    replace_file,
    take,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss.png"
INDEXER_FILE = "indexer.png"
TIMING_FIELDS = ("tokens_per_s", "elapsed_s")
_MAX_METRICS_BYTES = 1 << 30


class RunFolderError(ValueError):
    """A folder that already holds another run, or whose records are damaged."""


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
    import importlib.metadata

    import finwhale

    found = {"finwhale": finwhale.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "tokenizers", "triton", "liger-kernel"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return found


def device_name(device: str = "cpu") -> str:
    """Return the processor and how many threads compute, or the GPU's name."""
    if device == "cuda":
        return f"cuda {torch.cuda.get_device_name()}"
    return f"cpu {platform.machine()}, {torch.get_num_threads()} threads, {sys.platform}"


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file at once."""
    replace_file(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def claim_folder(out: Path, resolved: dict[str, Any], digest: str) -> dict[str, Any]:
    """Return the earlier `run.json` of `out`, or {} for a new run.

    Raises RunFolderError if it belongs to a run that differs, naming the first field.
    """
    path = out / RUN_FILE
    if kind_of_file(path) == "no such file":
        return {}
    try:
        earlier = read_object(path, expected="the record of a run")
        for name, kind in (("started", str), ("resumed_at_steps", list)):
            if name in earlier:
                take(earlier, name, kind, path)
    except FileError as error:
        raise RunFolderError(f"{error}; choose another folder") from None
    wanted = {"config": json.loads(json.dumps(resolved)), "data_digest": digest}
    for key, want in wanted.items():
        difference = _first_difference(_compared(earlier.get(key)), _compared(want), key)
        if difference:
            remedy = "resume with the same recipe, or choose another folder"
            raise RunFolderError(f"{path}: holds another run: {difference}; {remedy}")
    return earlier


def _compared(value: Any) -> Any:
    """Return a record without what may change: when to give up is no part of the mathematics."""
    return (
        {k: v for k, v in value.items() if k != "spike_factor"}
        if isinstance(value, dict)
        else value
    )


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
        """Open the file and cut it back to `keep_bytes`.

        Raises RunFolderError if it is shorter, so that lines of earlier steps are missing.
        """
        self._path = out / METRICS_FILE
        kind = kind_of_file(self._path)
        size = self._path.stat().st_size if kind == "a file" else 0
        if size < keep_bytes or kind not in ("a file", "no such file"):
            found = f"{size} bytes" if kind == "a file" else kind
            raise RunFolderError(
                f"{self._path}: {found}, expected {keep_bytes} bytes or more, which the training "
                "state counts; bring the file back, or choose another folder"
            )
        try:
            self._path.touch()
            os.truncate(self._path, keep_bytes)
            self._file = self._path.open("ab")
        except OSError as error:
            raise RunFolderError(str(not_written(self._path, error))) from None
        self.length_bytes = keep_bytes

    def write(self, record: dict[str, Any]) -> None:
        line = (json.dumps(record) + "\n").encode()
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise RunFolderError(str(not_written(self._path, error))) from None
        self.length_bytes += len(line)

    def close(self) -> None:
        # What could not be written is reported by `write`.
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """Return the records of `metrics.jsonl` in order. Raises RunFolderError for a damaged line."""
    path, want = out / METRICS_FILE, "the metrics of a run"
    try:
        text = read_text(path, max_bytes=_MAX_METRICS_BYTES, expected=want)
        lines = text.splitlines()
        return [
            parse_object(line, f"{path}: line {number}", expected=want)
            for number, line in enumerate(lines, start=1)
        ]
    except FileError as error:
        raise RunFolderError(f"{error}; bring the file back, or choose another folder") from None


def curve(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records without the fields that depend on the clock."""
    return [{k: v for k, v in r.items() if k not in TIMING_FIELDS} for r in records]


def draw_plots(
    out: Path, baselines: dict[str, float], bytes_per_token: float, is_task: bool
) -> tuple[Path, ...]:
    """Draw loss.png, and indexer.png if an indexer was trained or measured; return the files.

    Both show all of `metrics.jsonl`, so a resumed run shows its earlier steps as well.
    """
    curve_file = draw_curve(out, baselines, bytes_per_token, is_task=is_task)
    indexer_file = draw_indexer(out)
    return (curve_file, indexer_file) if indexer_file else (curve_file,)


def plots_of(out: Path) -> tuple[Path, ...]:
    """Return the plots that lie in `out`."""
    files = (out / name for name in (CURVE_FILE, INDEXER_FILE))
    return tuple(file for file in files if file.exists())


def draw_curve(
    out: Path, baselines: dict[str, float], bytes_per_token: float, *, is_task: bool = False
) -> Path:
    """Write the picture of `loss_figure` and return the file."""
    figure = loss_figure(read_metrics(out), baselines, bytes_per_token, is_task=is_task)
    _save_figure(figure, out / CURVE_FILE)
    return out / CURVE_FILE


def draw_indexer(out: Path) -> Path | None:
    """Write the picture of `indexer_figure` and return the file, None if there is none."""
    figure = indexer_figure(read_metrics(out))
    if figure is None:
        return None
    _save_figure(figure, out / INDEXER_FILE)
    return out / INDEXER_FILE


def _save_figure(figure: Figure, path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    replace_file(path, drawn.getvalue())


def _figure() -> Figure:
    """Return an empty figure that draws into memory: no window, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def loss_figure(
    records: Sequence[dict[str, Any]],
    baselines: dict[str, float],
    bytes_per_token: float,
    *,
    is_task: bool,
) -> Figure:
    """Return training and validation bits over steps, baselines as lines.

    The loss is in nats per target: bits per byte = loss / ln 2 / `bytes_per_token` of the training
    text. A task has no text: its axis is bits per answer token, and a second axis shows the share
    of right answers. A series without a value is left out.
    """
    figure = _figure()
    axes = figure.add_subplot()
    nats_per_unit = math.log(2) * (1.0 if is_task else bytes_per_token)
    train = [(step, loss / nats_per_unit) for step, loss in _series(records, "loss")]
    held_out = _series(records, "validation_bpb")
    if train:
        axes.plot(*zip(*train, strict=True), linewidth=0.8, label="training batch")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", label="validation")
    for number, (name, value) in enumerate(baselines.items()):
        style = ("--", "-.", ":")[number % 3]
        axes.axhline(value, linestyle=style, color="0.3", label=f"{name}, validation: {value:.3f}")
    ylabel = "bits per answer token" if is_task else "bits per byte"
    axes.set(xlabel="step", ylabel=ylabel, title="Loss")
    handles, labels = axes.get_legend_handles_labels()
    accuracy = _series(records, "answer_accuracy")
    if accuracy:
        share = axes.twinx()
        share.plot(*zip(*accuracy, strict=True), "s--", color="C2", label="right answers")
        share.set(ylabel="share of right answers", ylim=(-0.02, 1.02))
        more = share.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    if handles:
        # Below the plot: with two axes no corner is surely free.
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def indexer_figure(records: Sequence[dict[str, Any]]) -> Figure | None:
    """Return recall (points) above index loss (lines), one colour per owner layer, over steps.

    Recall is missing where no query had a choice. None if no record has either.
    """
    recalls, losses = _by_layer(records, "index_recall"), _by_layer(records, "index_loss")
    layers = sorted({*recalls, *losses}, key=lambda name: int(name[1:]))
    if not layers:
        return None
    figure = _figure()
    upper, lower = figure.subplots(2, 1, sharex=True)
    for number, layer in enumerate(layers):
        # matplotlib's cycle has ten colours; "C10" is the first again.
        color = f"C{number}"
        if layer in recalls:
            steps, values = zip(*recalls[layer], strict=True)
            upper.plot(steps, values, "o", color=color, label=layer)
        if layer in losses:
            steps, values = zip(*losses[layer], strict=True)
            lower.plot(steps, values, linewidth=0.8, color=color, label=layer)
    upper.set(ylabel="recall", ylim=(-0.02, 1.02), title="Indexers")
    lower.set(xlabel="step", ylabel="index loss, nats")
    if losses and all(value > 0 for points in losses.values() for _, value in points):
        lower.set_yscale("log")
    for axes, series in ((upper, recalls), (lower, losses)):
        if series:
            axes.legend(ncols=2)
    return figure


def _series(records: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of the records that have a value of this name."""
    return [(r["step"], r[name]) for r in records if r.get(name) is not None]


def _by_layer(records: Sequence[dict[str, Any]], name: str) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each layer of a nested field; a layer without a value is absent."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for layer, value in record.get(name, {}).items():
            if value is not None:
                found.setdefault(layer, []).append((record["step"], value))
    return found
