"""TensorBoard events beside `metrics.jsonl`, which stays the source of truth.

Off where TensorBoard is not installed; the run says which. A resumed run drops the events of the
steps it repeats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

EVENTS_FOLDER = "events"


class Events:
    """Writes every number of a record under its name; does nothing without TensorBoard."""

    def __init__(self, out: Path, step: int) -> None:
        self._writer = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(out / EVENTS_FOLDER), purge_step=step + 1)

    @property
    def is_on(self) -> bool:
        return self._writer is not None

    def write(self, record: dict[str, Any]) -> None:
        """Write one metrics record; nested numbers become NAME/KEY."""
        if self._writer is None:
            return
        for name, value in record.items():
            nested = value.items() if isinstance(value, dict) else [("", value)]
            for key, number in nested:
                if isinstance(number, (int, float)) and name != "step":
                    tag = f"{name}/{key}" if key else name
                    self._writer.add_scalar(tag, number, record["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
