"""What the GPU benchmarks share: JSON lines, one way of timing, ceilings, and a limit of time.

A time is that of one call among many in a CUDA graph, the median over replays; whoever makes the
calls gives each its own inputs, so that they come from memory and not from the cache. A form that
cannot run (a peer that is not installed, for one) says why, and the rest goes on. The easy mistake:
a copy inside a graph becomes a copy node, slower than torch's kernel; its ceiling is timed outside.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

Calls = Sequence[Callable[[], object]]


def graph_of(calls: Calls) -> torch.cuda.CUDAGraph:
    """Return a graph of calls one after the other; the first has run before, to compile it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def times_of(run: Callable[[], object], repeats: int) -> list[float]:
    """Return the microseconds of each of `repeats` runs, after two that do not count."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for n in range(repeats + 2):
        first.record()
        run()
        last.record()
        last.synchronize()
        if n > 1:
            times.append(first.elapsed_time(last) * 1e3)
    return times


def launches_of(function) -> dict[str, int]:
    """Return the names of the kernels that a function launches, counted by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if str(e.device_type).endswith("CUDA")]
    return dict(Counter(e.name.split("(")[0][:60] for e in events))


def profile_of(graph: torch.cuda.CUDAGraph) -> dict[str, list[float]]:
    """Return [microseconds, launches] by kernel of one replay."""
    from torch.profiler import ProfilerActivity, profile

    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    times, counts = Counter(), Counter()
    for e in profiler.events():
        if str(e.device_type).endswith("CUDA"):
            times[e.name.split("(")[0][:60]] += e.device_time_total
            counts[e.name.split("(")[0][:60]] += 1
    return {n: [round(t, 1), counts[n]] for n, t in times.most_common(40)}


class GpuLines:
    """Ceilings of this run and where its lines go.

    copy_gbs, read_gbs, bf16_tflops  measured in the same run; 0 before that
    deadline                         of the part that runs now; the limit is that of the program
    """

    def __init__(self, out: Path | None, limit_s: float):
        self.out, self.start, self.limit_s = out, time.monotonic(), limit_s
        self.deadline = float("inf")
        self.copy_gbs = self.read_gbs = self.bf16_tflops = 0.0

    def say(self, **line) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    @property
    def is_late(self) -> bool:
        now = time.monotonic()
        return now - self.start > self.limit_s or now > self.deadline

    @property
    def left_s(self) -> float:
        """Seconds that are left of the program's limit."""
        return self.limit_s - (time.monotonic() - self.start)

    def microseconds(self, calls: Calls, replays: int = 9) -> tuple[float, float, float]:
        """Return median, least and largest time of one of `calls`."""
        times = [t / len(calls) for t in times_of(graph_of(calls).replay, replays)]
        return statistics.median(times), min(times), max(times)

    def measure_ceilings(self, num_bytes: int) -> None:
        """Measure copy, read and product rates with a source of that many random bytes."""
        source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        copies = times_of(lambda: target.copy_(source), 5)
        self.copy_gbs = 2 * num_bytes / statistics.median(copies) / 1e3
        words = source.view(torch.int64)
        read, *reads = self.microseconds([lambda: words.amax()] * 4)
        self.read_gbs = num_bytes / read / 1e3
        a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
        product, *around = self.microseconds([lambda: a @ b] * 4)
        self.bf16_tflops = 2 * 8192**3 / product / 1e6
        small = torch.zeros(16, device="cuda")
        self.say(
            device=torch.cuda.get_device_name(), read_gbs=round(self.read_gbs),
            read_us=[round(x) for x in (read, *reads)], copy_gbs=round(self.copy_gbs),
            copy_us=[round(f(copies)) for f in (statistics.median, min, max)],
            bf16_tflops=round(self.bf16_tflops), matmul_us=[round(x) for x in (product, *around)],
            empty_launch_us=round(self.microseconds([lambda: small.add_(1)] * 64)[0], 2),
        )  # fmt: skip

    def compare(
        self,
        name: str,
        shape: Mapping[str, object],
        forms: Mapping[str, Callable[[], Calls] | Calls],
        num_bytes: float,
        flops: float = 0.0,
        check: Callable[[object], object] | None = None,
    ) -> tuple[str, float] | None:
        """Time the forms of one operation, print each beside its floor; return the best of ours.

        forms  name -> calls, or what makes them; a name that begins with "peer" is not ours
        check  turns the result of a form's first call into a figure, for ours
        """
        floor = max(num_bytes / self.read_gbs / 1e3, flops / self.bf16_tflops / 1e6)
        best = None
        for form, make in forms.items():
            line = {"kernel": name, **shape, "form": form}
            if self.is_late:
                self.say(**line, skipped="time limit")
                continue
            is_ours = not form.startswith("peer")
            try:
                calls = make() if callable(make) else make
                extra = {"check": check(calls[0]())} if check is not None and is_ours else {}
                median, least, largest = self.microseconds(calls)
            except Exception as error:
                self.say(**line, failed=f"{type(error).__name__}: {error}"[:300])
                torch.cuda.synchronize()
                continue
            self.say(
                **line, **extra, us=round(median, 2), spread=[round(least, 2), round(largest, 2)],
                floor_us=round(floor, 2), ratio=round(median / floor, 2) if floor else None,
                MB=round(num_bytes / 1e6, 2), gbs=round(num_bytes / median / 1e3, 1),
                percent_of_read=round(num_bytes / median / 1e1 / self.read_gbs, 1),
                tflops=round(flops / median / 1e6, 1),
            )  # fmt: skip
            if is_ours and (best is None or median < best[1]):
                best = form, median
        if best is not None:
            ratio = round(best[1] / floor, 2) if floor else None
            self.say(best=name, **shape, form=best[0], us=round(best[1], 2), ratio=ratio)
        return best
