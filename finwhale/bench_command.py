"""`finwhale bench gpu`: decode kernels and whole steps on a CUDA GPU, beside floors and peers.

The programs that measure lie in `bench/` of a checkout and print a line of JSON per result; this
file starts them and makes two tables of what they say. It measures nothing itself and refuses a
machine without a CUDA device. The easy mistake: a form that failed is a result too; its reason
stands below the table, or a peer that is not installed would look like one that was beaten.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

Line = Mapping[str, Any]
_TUNED = ("experts", "linear", "site", "route", "scores", "attention")
_ATTENTION_SHARE = 0.35  # of the time limit, where all parts run


class BenchUnsupportedError(ValueError):
    """The benchmark cannot run here; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time a decode step of the flash shape and its kernels on a CUDA GPU.

    Prints time, floor (bytes and products at the rates of the same run) and ratio of every step
    and operation, and the named peers that are installed. Weights and caches are random; all 40
    layers need about 100 GB, --layers fewer. Runs from a checkout, whose bench/ folder it starts.

    Example: finwhale bench gpu --batches 1 8 --contexts 4096
    """

    device: tyro.conf.Positional[Literal["gpu"]]
    """What to measure."""
    parts: tuple[Literal["step", "kernels", "attention"], ...] = ("step", "kernels", "attention")
    """Whole steps; the weights' kernels; the attention side's kernels."""
    batches: tuple[int, ...] = (1, 8, 64)
    """Sequences of a step, and tokens of the weights' kernels."""
    contexts: tuple[int, ...] = (4096, 65536, 1 << 20)
    """Tokens that each sequence of a step has behind it."""
    layers: int | None = None
    """Only the first so many layers; a step has no floor then."""
    tune: bool = False
    """Time several launches of each kernel first, and run the steps with the best."""
    limit_s: float = 400.0
    """Start nothing new after so many seconds."""
    out: Path | None = None
    """Also append the lines of JSON to this file."""
    json: bool = False
    """Print the lines of JSON as they come, and no table."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Run the programs and print what they found; return 1 if one of them failed."""
        folder = Path(__file__).resolve().parent.parent / "bench"
        _require(folder)
        lines, codes = [], []
        for command in self.commands(folder):
            print("running:", " ".join(command[1:]), file=sys.stderr, flush=True)
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                for text in process.stdout or ():
                    if self.json:
                        print(text, end="", flush=True)
                    lines.extend(parse_lines([text]))
            codes.append(process.returncode)
        if not self.json:
            _print_tables(lines)
        return 1 if any(codes) else 0

    def commands(self, folder: Path) -> Iterator[list[str]]:
        """Yield the programs to start, with their share of the time."""
        weights = [part for part in self.parts if part != "attention"]
        attention = "attention" in self.parts
        if not weights and not attention:
            raise ValueError("--parts: got none, expected step, kernels or attention")
        out = [] if self.out is None else ["--out", str(self.out)]
        share = _ATTENTION_SHARE if weights and attention else float(attention)
        if weights:
            yield [
                sys.executable, str(folder / "gpu_decode.py"), "--chosen-only", "--parts", *weights,
                "--batches", *map(str, self.batches), "--contexts", *map(str, self.contexts),
                *([] if self.layers is None else ["--layers", str(self.layers)]),
                *(["--tune", *_TUNED] if self.tune else []),
                "--limit-s", str(self.limit_s * (1 - share)), *out,
            ]  # fmt: skip
        if attention:
            yield [
                sys.executable, str(folder / "gpu_decode_attention.py"), "--chosen-only",
                "--limit-s", str(self.limit_s * share), *out,
            ]  # fmt: skip


def _require(folder: Path) -> None:
    """Raise if the programs or a CUDA device are not there."""
    if not (folder / "gpu_decode.py").is_file():
        raise BenchUnsupportedError(
            f"{folder} has no benchmarks: they come with a checkout, not with the installed package"
        )
    import torch

    if not torch.cuda.is_available():
        raise BenchUnsupportedError(
            f"torch {torch.__version__} sees no CUDA device; these are kernels for one"
        )


def parse_lines(texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among lines of output; what else a program prints is left out."""
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def step_rows(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """Return batch, context, milliseconds, floor, ratio, tokens/s and remark of each step."""
    rows: list[tuple[str, ...]] = []
    for line in lines:
        if not line.get("step") or not {"us", "impossible", "skipped", "failed"} & line.keys():
            continue
        found = [f"{line['us'] / 1e3:.2f}" if "us" in line else "-"]
        found.append(f"{line['floor_us'] / 1e3:.2f}" if "floor_us" in line else "-")
        found.append(f"{line['ratio']:.2f}" if "ratio" in line else "-")
        found.append(f"{line['tokens_per_s']:.0f}" if "tokens_per_s" in line else "-")
        rows.append((str(line["batch"]), str(line["context"]), *found, _remark(line)))
    return rows


def kernel_rows(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """Return name, shape, microseconds, floor, ratio, best peer and its time of each operation."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        # A tuning run has forms but no peer and no floor: it is no row.
        if "kernel" in line and "us" in line and not line["kernel"].startswith("tune "):
            groups.setdefault((line["kernel"], _shape(line)), []).append(line)
    rows: list[tuple[str, ...]] = []
    for (name, shape), forms in groups.items():
        ours = [x for x in forms if not x["form"].startswith("peer")]
        if not ours:
            continue
        order = {"tuned": 0, "chosen": 1}
        chosen = min(ours, key=lambda x: (order.get(x["form"], 2), x["us"]))
        peer = min((x for x in forms if x not in ours), key=lambda x: x["us"], default=None)
        floor, ratio = chosen.get("floor_us"), chosen.get("ratio")
        rows.append((
            name, shape, f"{chosen['us']:.1f}", "-" if not floor else f"{floor:.1f}",
            "-" if ratio is None else f"{ratio:.2f}",
            "-" if peer is None else f"{peer['us']:.1f}",
            "" if peer is None else peer["form"].removeprefix("peer "),
        ))  # fmt: skip
    return rows


def failures(lines: Sequence[Line]) -> list[str]:
    """Return a sentence for each thing that gave a reason instead of a time, without repeats."""
    said = {}
    for line in lines:
        reason = line.get("failed")
        if reason is not None and not line.get("step"):
            what = line.get("kernel") or line.get("part") or line.get("tune") or "a part"
            form = f", {line['form']}" if "form" in line else ""
            said.setdefault(f"{what}{form}: {str(reason).strip().splitlines()[-1]}")
    return list(said)


def _shape(line: Line) -> str:
    """Return what stands between name and form of a kernel's line: T, context and the like."""
    keys = list(line)
    between = keys[keys.index("kernel") + 1 : keys.index("form")]
    return " ".join(f"{key} {line[key]}" for key in between)


def _remark(line: Line) -> str:
    for key in ("void", "impossible", "skipped", "failed"):
        if key in line:
            return f"{key}: {str(line[key]).strip().splitlines()[-1]}"
    return "" if line.get("graph_equals_eager", True) else "graph and eager differ"


def _print_tables(lines: Sequence[Line]) -> None:
    from finwhale.inspection import Table, write_plain, write_rich

    ceiling = next((x for x in lines if "read_gbs" in x), None)
    if ceiling is not None:
        print(
            f"{ceiling.get('device', 'GPU')}: {ceiling['read_gbs']} GB/s read, "
            f"{ceiling['copy_gbs']} GB/s copy, {ceiling['bf16_tflops']} TFLOP/s bf16"
        )
    steps = Table(
        title="Decode steps",
        columns=("batch", "context", "ms", "floor", "ratio", "tokens/s", "remark"),
        rows=tuple(step_rows(lines)),
        num_left=0,
    )
    operations = Table(
        title="Operations, times of one call",
        columns=("operation", "shape", "us", "floor", "ratio", "peer us", "peer"),
        rows=tuple(kernel_rows(lines)),
        num_left=2,
    )
    tables = [table for table in (steps, operations) if table.rows]
    write_rich(tables) if sys.stdout.isatty() else write_plain(tables, sys.stdout)
    for sentence in failures(lines):
        print(sentence)
