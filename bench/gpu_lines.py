"""What the GPU benchmarks share: JSON lines that are flushed one by one, and a limit of time."""

from __future__ import annotations

import json
import time
from pathlib import Path


class GpuLines:
    """Ceilings of this run and where its lines go.

    copy_gbs, read_gbs, bf16_tflops  measured in the same run; 0 before that
    """

    def __init__(self, out: Path | None, limit_s: float):
        self.out, self.start, self.limit_s = out, time.monotonic(), limit_s
        self.copy_gbs = self.read_gbs = self.bf16_tflops = 0.0

    def say(self, **line) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.start > self.limit_s
