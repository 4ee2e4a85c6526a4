"""The progress bar of a run: loss, tokens per second, time left.

On something that is no terminal it prints one plain line now and then instead.
"""

from __future__ import annotations

import time

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
