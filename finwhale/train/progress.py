"""What a person reads of a run: the progress bar while it goes, the closing table after it.

The bar shows loss, tokens per second, time left; on something that is no terminal it is one plain
line now and then. The table is made from `metrics.jsonl`, never from the clock of this process: a
resumed run closes with the figures of all its steps. It measures nothing and draws nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_EVERY_S = 15.0


class TrainingProgress:
    """Use as a context manager; call `show` after every step."""

    def __init__(self, console: Console, *, total_steps: int, done_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._bar = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[tokens_per_s]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "train", total=total_steps, completed=done_steps, loss=float("nan"), tokens_per_s=0.0
        )
        self._printed_s = time.monotonic()

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, step: int, loss: float, tokens_per_s: float, left_s: float) -> None:
        """Show the state after `step` finished steps."""
        self._bar.update(self._task, completed=step, loss=loss, tokens_per_s=tokens_per_s)
        now = time.monotonic()
        is_due = now - self._printed_s >= _PLAIN_EVERY_S or step == self._total
        if not self._console.is_terminal and is_due:
            self._printed_s = now
            self._console.print(
                f"step {step}/{self._total}  loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  "
                f"{left_s:.0f} s left",
                highlight=False,
            )


def closing_rows(
    records: Sequence[dict[str, Any]],
    *,
    validation_bpb: float,
    baselines: Iterable[tuple[str, float]],
    is_task: bool,
    plots: Iterable[Path],
) -> tuple[tuple[str, str], ...]:
    """Return (what, value) rows that close a run.

    records         all of metrics.jsonl; the last value of each measurement counts
    validation_bpb  bits per byte, for a task per answer token; NaN: nothing was held out
    tokens/s        the median step: the first one compiles, and validation is not in it
    """
    unit = "bits per answer token" if is_task else "bits per byte"
    measured = "nothing held out"
    if not math.isnan(validation_bpb):
        measured = f"{validation_bpb:.4f} {unit}"
    rows = [("validation", measured)]
    accuracy = _last(records, "answer_accuracy")
    if accuracy is not None:
        rows.append(("right answers", f"{accuracy:.2%}"))
    rows += [(name, f"{value:.4f} {unit}") for name, value in baselines]
    for layer, recall in (_last(records, "index_recall") or {}).items():
        shown = "no query had a choice" if recall is None else f"{recall:.3f}"
        rows.append((f"recall of indexer {layer}", shown))
    pace = [r["tokens_per_s"] for r in records if "tokens_per_s" in r]
    if pace:
        rows.append(("tokens/s", f"{statistics.median(pace):,.0f}"))
    rows += [("plot", str(file)) for file in plots]
    return tuple(rows)


def _last(records: Sequence[dict[str, Any]], name: str) -> Any:
    """Return the newest value of this name, None if no record has one."""
    return next((r[name] for r in reversed(records) if name in r), None)
