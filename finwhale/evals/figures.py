"""What an evaluation leaves behind: `evaluation.jsonl`, a heat map per grid, bits by position.

Owns the two pictures and the report folder. Every record says which weights it is about, which
command made it and with which versions; the pictures show nothing that is not in the records.
Refused: a folder that holds a report, since two reports in one file cannot be told apart.
A newcomer's mistake: reading a cell without its interval; 8 of 8 right is anything above 0.68.
Source: spec/training.md II.4.4, items 2 and 5.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finwhale.config.files import FileError, parse_object, read_text
from finwhale.config.model import ModelConfig
from finwhale.config.presets import PRESETS, with_compressed_vocab
from finwhale.data.fetch import sha256_of
from finwhale.evals.position_bits import BucketBits, EvaluationError, whole
from finwhale.evals.recall_grid import RecallCell, RecallGrid
from finwhale.train.record import device_name, source_commit, versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORDS_FILE = "evaluation.jsonl"
POSITIONS_FILE = "position_bits.png"
_DPI = 110
_MAX_RECORDS_BYTES = 1 << 28
# Smaller divergences are the sum's own rounding.
_LEAST = 1e-9
# More lines than this cannot be told apart in one picture.
_MAX_LINES = 8


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure that draws into memory: no window, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def recall_figure(
    grid: RecallGrid, *, trained_length: int | None = None, limits: Mapping[str, int] | None = None
) -> Figure:
    """Return accuracy as colour and number, depth down and length across.

    trained_length  lengths up to it are left of the solid line
    limits          name -> length in tokens (`selection_limits`): a dashed line between the lengths
                    at most as long and the longer ones
    A star marks cells whose question no chain of windows reaches. Under each share is its interval.
    """
    figure = _figure(2.6 + 1.25 * len(grid.lengths), 2.4 + 0.62 * len(grid.depths))
    axes = figure.add_subplot()
    shares = [
        [grid.cell(length, depth).accuracy for length in grid.lengths] for depth in grid.depths
    ]
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    figure.colorbar(image, ax=axes, label="share of questions answered")
    for row, depth in enumerate(grid.depths):
        for column, length in enumerate(grid.lengths):
            cell = grid.cell(length, depth)
            low, high = cell.interval
            star = " *" if cell.beyond_reach else ""
            text = f"{cell.accuracy:.2f}{star}\n{low:.2f}-{high:.2f}"
            # viridis is dark below its middle.
            color = "white" if cell.accuracy < 0.6 else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    lines = dict(limits or {})
    if trained_length is not None:
        lines = {"trained length": trained_length, **lines}
    for number, (name, tokens) in enumerate(lines.items()):
        # Several limits may fall between the same two lengths: a little apart, all stay visible.
        place = line_place(grid.lengths, tokens) + 0.03 * number
        style = "-" if name == "trained length" else ("--", "-.", ":")[number % 3]
        label = f"{name}: {tokens:,}"
        axes.axvline(place, linestyle=style, linewidth=2, color=f"C{number + 1}", label=label)
    axes.set_xticks(range(len(grid.lengths)), [f"{length:,}" for length in grid.lengths])
    axes.set_yticks(range(len(grid.depths)), [f"{depth:.0%}" for depth in grid.depths])
    axes.set_xlim(-0.6, len(grid.lengths) - 0.4 + 0.03 * len(lines))
    counts = sorted({cell.num_examples for cell in grid.cells})
    examples = " to ".join(f"{count}" for count in dict.fromkeys((counts[0], counts[-1])))
    title = (
        f"{grid.kind}, filler: {grid.filler}\n{examples} examples a cell, 95 % interval, "
        f"chance {grid.chance:.2f}\n* farther than windows reach ({grid.reach:,} tokens)"
    )
    axes.set(xlabel="length, tokens", ylabel="depth of the fact")
    axes.set_title(title, fontsize=9)
    if lines:
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def line_place(lengths: Sequence[int], tokens: int) -> float:
    """Return where a line at `tokens` stands on the axis of columns: behind those within it.

    -0.5 is before the first column, `len(lengths)` - 0.5 behind the last.
    """
    within = [column for column, length in enumerate(lengths) if length <= tokens]
    return max(within, default=-1) + 0.5


def position_figure(series: Mapping[str, Sequence[BucketBits]]) -> Figure:
    """Return bits per byte by bucket, one line for each model (or source) of `series`.

    All must have the same buckets. A bucket without text leaves a gap. The number of targets is
    that of the first line; models are comparable only on the same documents.
    """
    if not series:
        raise EvaluationError("series: got nothing, expected at least one line")
    cuts = {tuple((b.first, b.stop) for b in buckets) for buckets in series.values()}
    if len(cuts) != 1:
        raise EvaluationError(f"series: got {len(cuts)} cuts, expected the same buckets in all")
    figure = _figure(8, 5)
    axes = figure.add_subplot()
    for name, buckets in series.items():
        bits = [b.bits_per_byte for b in buckets]
        heights = [float("nan") if value is None else value for value in bits]
        axes.plot(range(len(heights)), heights, "o-", label=name)
    first = next(iter(series.values()))
    labels = [f"{bucket.label}\n{bucket.num_targets:,} tokens" for bucket in first]
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel="position in the document", ylabel="bits per byte", title="Bits by position")
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.legend()
    return figure


def difference_figure(
    series: Mapping[str, Sequence[tuple[float, float, float]]],
    *,
    xlabel: str,
    ylabel: str,
    marks: Mapping[str, float] | None = None,
    log_x: bool = False,
) -> Figure:
    """Return differences over a length, one line each of points (x, mean, standard error).

    marks  name -> x of a dashed line
    log_x  a logarithmic axis, linear below 1, so that nothing has a place too

    The vertical axis is logarithmic. Below 1e-9 fp32 has nothing to say: what is smaller, zero
    too, stands there. An error bar ends at a tenth of its mean.
    """
    if not series or not any(series.values()):
        raise EvaluationError("series: got nothing, expected at least one line")
    figure = _figure(8, 5)
    axes = figure.add_subplot()
    for name, points in series.items():
        held = [(x, max(mean, _LEAST), error) for x, mean, error in points]
        x, means = [p[0] for p in held], [p[1] for p in held]
        below = [min(error, 0.9 * mean) for _, mean, error in held]
        bars = [below, [error for _, _, error in held]]
        axes.errorbar(x, means, yerr=bars, fmt="o-", capsize=2, markersize=4, label=name)
    for number, (name, place) in enumerate((marks or {}).items()):
        style = ("--", "-.", ":")[number % 3]
        axes.axvline(place, linestyle=style, color="gray", label=f"{name}: {place:,}")
    axes.set_yscale("log")
    least = min(mean for points in series.values() for _, mean, _ in points)
    axes.set_ylim(bottom=max(_LEAST, least) / 3)
    if log_x:
        axes.set_xscale("symlog", base=2, linthresh=1)
        places = sorted({x for points in series.values() for x, _, _ in points})
        axes.set_xticks(places, [f"{place:g}" for place in places], fontsize=8)
        axes.set_xlim(left=-0.3)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def matching_preset(config: ModelConfig) -> str | None:
    """Return the preset that this is, or None.

    Compared is the text model, but for the compressed vocabulary, which is its tokenizer's; a saved
    checkpoint also says how its weights are stored.
    """
    size = config.text_config.engram_compressed_vocab_size
    for name, make in PRESETS.items():
        made = make()
        if made.text_config.vocab_size != config.text_config.vocab_size:
            continue
        if with_compressed_vocab(made, size).text_config == config.text_config:
            return name
    return None


def folder_digest(folder: str | Path) -> str:
    """Return the SHA-256 over config.json and all weight files of a checkpoint folder."""
    folder = Path(folder)
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(f"{file.name} {sha256_of(file)}\n".encode())
    return digest.hexdigest()


def provenance(
    folder: str | Path, config: ModelConfig, *, command: str, device: str = "cpu"
) -> dict[str, Any]:
    """Return what every record of a report says about its model and its making."""
    return {
        "model": str(folder),
        "digest": folder_digest(folder),
        "preset": matching_preset(config),
        "command": command,
        "device": device_name(device),
        "source": source_commit(),
        "versions": versions(),
    }


def bucket_record(name: str, bucket: BucketBits, *, is_whole: bool = False) -> dict[str, Any]:
    """Return one bucket as a record; what an empty bucket does not have is null."""
    return {
        "measure": "position_bits",
        "series": name,
        "whole": is_whole,
        **dataclasses.asdict(bucket),
        "nats_per_token": bucket.nats_per_token,
        "bits_per_byte": bucket.bits_per_byte,
    }


def cell_record(grid: RecallGrid, cell: RecallCell) -> dict[str, Any]:
    """Return one cell as a record."""
    return {
        "measure": "recall",
        "kind": grid.kind,
        "filler": grid.filler,
        **dataclasses.asdict(cell),
        "accuracy": cell.accuracy,
        "interval": list(cell.interval),
        "chance": grid.chance,
        "reach": grid.reach,
    }


def write_report(
    folder: str | Path,
    *,
    about: Mapping[str, Any],
    positions: Mapping[str, Sequence[BucketBits]] | None = None,
    grids: Sequence[RecallGrid] = (),
    trained_length: int | None = None,
    limits: Mapping[str, int] | None = None,
) -> tuple[Path, ...]:
    """Write the records and one picture for each measure; return the files.

    about      fields of every record (`provenance`)
    positions  buckets by series name, of which the first eight are drawn; in the records a whole
               follows the buckets of each
    grids      one picture `recall_KIND_FILLER.png` each
    """
    folder = Path(folder)
    if (folder / RECORDS_FILE).exists():
        raise EvaluationError(f"{folder}: holds a report; delete it or choose another folder")
    records: list[dict[str, Any]] = []
    figures: dict[str, Figure] = {}
    for name, buckets in (positions or {}).items():
        records += [bucket_record(name, bucket) for bucket in buckets]
        records.append(bucket_record(name, whole(buckets), is_whole=True))
    if positions:
        drawn = dict(list(positions.items())[:_MAX_LINES])
        figures[POSITIONS_FILE] = position_figure(drawn)
    for grid in grids:
        marks = {"trained_length": trained_length, "limits": dict(limits or {})}
        records += [{**cell_record(grid, cell), **marks} for cell in grid.cells]
        figures[f"recall_{grid.kind}_{grid.filler}.png"] = recall_figure(
            grid, trained_length=trained_length, limits=limits
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, figure in figures.items():
        figure.savefig(folder / file_name, dpi=_DPI)
    lines = [json.dumps({**record, **about}, ensure_ascii=False) + "\n" for record in records]
    (folder / RECORDS_FILE).write_text("".join(lines), encoding="utf-8")
    return (folder / RECORDS_FILE, *(folder / file_name for file_name in figures))


def read_positions(folder: str | Path) -> dict[str, list[BucketBits]]:
    """Return the buckets of a report by series: to draw several models in one figure.

    Raises FileError for a file that is none of a report's.
    """
    fields = [field.name for field in dataclasses.fields(BucketBits)]
    found: dict[str, list[BucketBits]] = {}
    path, want = Path(folder) / RECORDS_FILE, "the records of a report"
    text = read_text(path, max_bytes=_MAX_RECORDS_BYTES, expected=want)
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}: line {number}"
        record = parse_object(line, where, expected=want)
        if record.get("measure") == "position_bits" and not record.get("whole"):
            missing = sorted({"series", *fields} - set(record))
            if missing:
                raise FileError(where, f"no field {missing[0]}", want)
            bucket = BucketBits(**{name: record[name] for name in fields})
            found.setdefault(record["series"], []).append(bucket)
    return found
