"""Counters, gauges and histograms of the server, written as Prometheus text.

Three kinds and one lock are all that is needed, so no library is (docs of the text format:
version 0.0.4). It owns the names, which begin with `finwhale_`; no name or label value comes from
a request, so a client cannot make the page grow. A newcomer's mistake: buckets of a histogram are
cumulative, each counts everything at or below its border. Source: spec/multimodal-serving.md D.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Mapping, Sequence

from finwhale.engine.request import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_COUNTERS = {
    "requests_total": "Requests that ended, by endpoint and outcome.",
    "refused_total": "Requests refused before the engine, by status.",
    "connections_ended_total": "Connections that the server ended, by reason.",
    "prompt_tokens_total": "Prompt tokens of requests that ended.",
    "cached_prompt_tokens_total": "Prompt tokens that came from the prefix cache.",
    "generated_tokens_total": "Tokens that the engine drew; the rate is tokens per second.",
    "steps_total": "Forward passes of the engine.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "time_per_token_seconds": "Time after the first token, per token, of requests that ended.",
    "request_seconds": "From the arrival of a request to its end.",
    "step_seconds": "Time of one forward pass with its drawing.",
}


# Help text, and a value or values by tier.
Gauges = Mapping[str, tuple[str, float | Mapping[str, float]]]


class Metrics:
    """All figures of one server; every method may be called from any thread.

    gauges  returns figures of this moment by name, with help text and value, or values by tier;
            a name that ends with _total is a counter that somebody else counts
    """

    _LABELLED = ("requests_total", "refused_total", "connections_ended_total")

    def __init__(self, gauges: Callable[[], Gauges] | None = None) -> None:
        """Begin at zero."""
        self._gauges = [] if gauges is None else [gauges]
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], float] = {
            (name, ""): 0.0 for name in _COUNTERS if name not in self._LABELLED
        }
        self._histograms = {name: _Histogram() for name in _HISTOGRAMS}

    def watch(self, gauges: Callable[[], Gauges]) -> None:
        """Tell what `gauges` returns too; its names must be new."""
        self._gauges.append(gauges)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter of this file's list."""
        if name not in _COUNTERS:
            raise ValueError(f"name: got {name!r}, expected one of {', '.join(_COUNTERS)}")
        key = name, _labels(labels)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0.0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration to a histogram of this file's list."""
        with self._lock:
            self._histograms[name].add(seconds)

    def step(self, seconds: float, outputs: Sequence[RequestOutput]) -> None:
        """Count a step of the engine; has the shape of a worker's `on_step`."""
        self.observe("step_seconds", seconds)
        self.count("steps_total")
        self.count("generated_tokens_total", sum(len(output.new) for output in outputs))

    def text(self) -> str:
        """Return the page of `/metrics`."""
        gauges: dict[str, tuple[str, float | Mapping[str, float]]] = {}
        for source in list(self._gauges):
            gauges |= source()
        with self._lock:
            counts = sorted(self._counts.items())
            histograms = {name: h.lines(f"finwhale_{name}") for name, h in self._histograms.items()}
        lines: list[str] = []
        for name, told in _COUNTERS.items():
            lines += _head(name, told, "counter")
            lines += [
                f"finwhale_{name}{labels} {_number(value)}"
                for (own, labels), value in counts
                if own == name
            ]
        for name, (told, value) in gauges.items():
            lines += _head(name, told, "counter" if name.endswith("_total") else "gauge")
            by_tier = value if isinstance(value, Mapping) else {"": value}
            lines += [
                f"finwhale_{name}{_labels({'tier': tier} if tier else {})} {_number(number)}"
                for tier, number in by_tier.items()
            ]
        for name, told in _HISTOGRAMS.items():
            lines += [*_head(name, told, "histogram"), *histograms[name]]
        return "\n".join(lines) + "\n"


class _Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        lines, total = [], 0
        for border, count in zip((*map(str, _SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{border}"}} {total}')
        return [*lines, f"{name}_sum {_number(self._sum)}", f"{name}_count {total}"]


def _head(name: str, told: str, kind: str) -> list[str]:
    return [f"# HELP finwhale_{name} {told}", f"# TYPE finwhale_{name} {kind}"]


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return f"{{{inside}}}" if inside else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
