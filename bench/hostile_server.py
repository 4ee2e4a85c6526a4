"""A server under attack: its process, its memory, its log, and how long it stood still.

Owns what `hostile_load.py` measures from outside: resident memory from /proc every half second, a
small request every 5 ms from a process of its own, the lines of the log, and the figures of
`/metrics`. It refuses to judge; the numbers are the caller's. Linux only.
"""

from __future__ import annotations

import array
import http.client
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

WATCHED = Path(__file__).resolve().parent / "watched_server.py"
PROBE_EVERY_S = 0.005
_ADDRESS = re.compile(rb"serving .* on http://127\.0\.0\.1:(\d+)")


class WatchedServer:
    """`finwhale serve` of the tree `tree` on a free loopback port; to be closed.

    tree        a checkout; its code runs, whatever is installed
    data_bytes  private memory that the process may have
    num_files   files and sockets that it may have open
    """

    def __init__(
        self, tree: Path, *arguments: str, data_bytes: int = 12 << 30, num_files: int = 1024
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        self.log = self.folder / "log"
        command = [
            *(sys.executable, str(WATCHED), str(self.folder / "late"), str(data_bytes)),
            *(str(num_files), "serve", "--port", "0", *arguments),
        ]
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": threads}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=tree, env=environment
            )
        self.started_s = time.monotonic()
        self.port = self._port(180)
        self._wait_until_ready(180)
        self.ready_after_s = time.monotonic() - self.started_s
        self.rss: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def _port(self, limit_s: float) -> int:
        while time.monotonic() < self.started_s + limit_s:
            if found := _ADDRESS.search(self.log.read_bytes()):
                return int(found.group(1))
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"server: did not start; its log: {self.log.read_text()[-2000:]}")

    def _wait_until_ready(self, limit_s: float) -> None:
        while time.monotonic() < self.started_s + limit_s:
            status, _ = self.get("/readyz")
            # A server without that path is ready when it is healthy.
            if status == 200 or (status == 404 and self.get("/health")[0] == 200):
                return
            time.sleep(0.1)
        raise RuntimeError("server: not ready in time")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def get(self, path: str, timeout_s: float = 60) -> tuple[int, bytes]:
        """Return status and content; (0, b"") without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def figure(self, name: str) -> float:
        """Return a value of /metrics, nan without one."""
        found = re.search(rf"^{name} (\S+)$".encode(), self.get("/metrics")[1], re.MULTILINE)
        return float(found.group(1)) if found else math.nan

    def _sample(self) -> None:
        status = Path(f"/proc/{self.process.pid}/status")
        while not self._stop.wait(0.5):
            try:
                found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
            except OSError:
                return
            if found:
                self.rss.append((time.monotonic(), int(found.group(1)) << 10))

    def memory(self) -> dict[str, Any]:
        """Return resident megabytes: at the start, at most, now, and at twenty even times."""
        values = [value for _, value in self.rss] or [0]
        series = [values[n * (len(values) - 1) // 19] // 10**6 for n in range(20)]
        return {
            "first_mb": values[0] // 10**6,
            "most_mb": max(values) // 10**6,
            "last_mb": values[-1] // 10**6,
            "series_mb": series,
        }

    def log_figures(self) -> dict[str, object]:
        """Return lines and bytes of the log, and the last lines of its tracebacks with counts."""
        lines, size, ends, inside = 0, 0, Counter[str](), False
        with self.log.open("rb") as log:
            for raw in log:
                lines, size = lines + 1, size + len(raw)
                if raw.startswith(b"Traceback"):
                    inside = True
                elif inside and not raw.startswith((b" ", b"\n", b"During", b"The above")):
                    ends[raw.decode("utf-8", "replace").strip()[:120]] += 1
                    inside = False
        return {"lines": lines, "bytes": size, "tracebacks": dict(ends.most_common(8))}

    def lateness(self, name: str, windows: list[tuple[float, float]]) -> dict[str, float]:
        """Return `gap_figures` of the clock "thread" or "loop" within windows of monotonic time."""
        return gap_figures(read_pairs(self.folder / f"late.{name}"), windows)

    def close(self) -> int:
        """End the server as an operator does; return its exit status."""
        self._stop.set()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def read_pairs(path: Path) -> list[tuple[float, float]]:
    """Return (time, seconds) pairs of a file of float64."""
    raw = path.read_bytes() if path.exists() else b""
    values = array.array("d", raw[: len(raw) // 16 * 16])
    return list(zip(values[::2], values[1::2], strict=True))


def gap_figures(
    pairs: list[tuple[float, float]], windows: list[tuple[float, float]]
) -> dict[str, float]:
    """Return the longest of the gaps that touch a window, the 99.9th percentile, in ms.

    pairs    (end, seconds); a gap lasts from `end - seconds` to `end`
    returns  longest_ms, p999_ms, over_50ms_s (seconds in gaps over 50 ms), count
    """
    inside = sorted(
        gap
        for end, gap in pairs
        if any(since <= end and end - gap <= until for since, until in windows)
    )
    if not inside:
        return {"longest_ms": math.nan, "p999_ms": math.nan, "over_50ms_s": math.nan, "count": 0}
    at = math.ceil(len(inside) * 0.999) - 1
    return {
        "longest_ms": round(1e3 * inside[-1], 1),
        "p999_ms": round(1e3 * inside[at], 1),
        "over_50ms_s": round(sum(gap for gap in inside if gap > 0.05), 2),
        "count": len(inside),
    }


class Probe:
    """Asks a small request every 5 ms on one connection, from a process of its own."""

    def __init__(self, server: WatchedServer) -> None:
        # The path that only says that the process lives, where there is one.
        path = "/livez" if server.get("/livez")[0] == 200 else "/health"
        self.path, self.file = path, server.folder / "probe"
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(server.port), path, str(self.file)]
        )

    def pairs(self) -> list[tuple[float, float]]:
        return read_pairs(self.file)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def probe(port: int, path: str, file: str) -> None:
    """Write (time of the answer, seconds it took) until ended; a lost connection is part of it."""
    with Path(file).open("wb", buffering=0) as out:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        while True:
            began_s = time.monotonic()
            while True:
                try:
                    connection.request("GET", path)
                    # A delayed acknowledgement would hold the second part of an answer for 40 ms.
                    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                    connection.getresponse().read()
                    break
                except (OSError, http.client.HTTPException):
                    connection.close()
                    time.sleep(0.005)
            ended_s = time.monotonic()
            out.write(array.array("d", (ended_s, ended_s - began_s)).tobytes())
            time.sleep(PROBE_EVERY_S)


if __name__ == "__main__":
    probe(int(sys.argv[1]), sys.argv[2], sys.argv[3])
