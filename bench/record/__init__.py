"""Where a measurement comes from, and the line it leaves in bench/results/."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent.parent / "results"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu() -> str:
    return f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""


def provenance() -> dict[str, Any]:
    """Return command, commit, machine, versions, threads and load average."""
    root = RESULTS.parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": git("rev-parse", "HEAD") or None,
        "dirty": bool(git("status", "--porcelain", "finwhale")),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{_gpu()}{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Append one JSON line to bench/results/NAME.jsonl and return the file."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.jsonl"
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"result": result, **provenance()}) + "\n")
    return file


def copy_bandwidth_gbps() -> float:
    """Return GB/s of a 256 MB copy by torch, bytes read plus written, best of five."""
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() * 4 / best / 1e9
