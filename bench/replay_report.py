"""Tables and plots of docs/replay.md from the lines that bench/replay_table.py left.

    python bench/replay_report.py [--results bench/results/replay] [--doc docs/replay.md]
Every figure of the document stands between two markers and comes from here; the words around them
are a person's. A file of the results folder is a model, its lines are units.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from finwhale.evals.figures import difference_figure
from finwhale.evals.recall_grid import wilson_interval

ROOT = Path(__file__).resolve().parent.parent
MODES = ("kept", "encoder", "decoder", "both", "none")
TITLES = {
    "kept": "windows kept",
    "exact": "exact replay",
    "encoder": "encoder bounded",
    "decoder": "decoder bounded",
    "both": "both",
    "none": "no replay",
    "twice": "both, two windows",
}
Cells = list[dict]


def read(folder: Path) -> dict[str, Cells]:
    """Return the cells of every model, mini first; no replay is a mode of its own."""
    found: dict[str, Cells] = {}
    for file in sorted(folder.glob("*.jsonl"), key=lambda f: (f.stem != "mini", f.stem)):
        cells: Cells = []
        for line in file.read_text(encoding="utf-8").splitlines():
            unit = json.loads(line)
            for cell in unit["cells"]:
                if cell.get("mode") == "both" and cell.get("rows") == 0:
                    cell["mode"] = "none"
                cells.append({**cell, "unit": unit["unit"]})
        found[file.stem] = cells
    return found


def chosen(cells: Cells, **wanted) -> Cells:
    return [c for c in cells if all(c.get(name) == value for name, value in wanted.items())]


def number(value: float) -> str:
    """Return a divergence for a table; below 1e-6 fp32 says no more."""
    if value == 0:
        return "0"
    if value >= 1:
        return f"{value:.1f}"
    return "<1e-6" if value < 1e-6 else f"{value:.1e}".replace("e-0", "e-")


def mean(values: Iterable[float]) -> float:
    held = list(values)
    if not held:
        raise ValueError("nothing was measured")
    return float(np.mean(held))


def median(values: Iterable[float]) -> float:
    held = list(values)
    if not held:
        raise ValueError("nothing was measured")
    return float(np.median(held))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        raise ValueError("nothing was measured")
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def share(right: int, total: int) -> str:
    low, high = wilson_interval(right, total)
    return f"{right} of {total} ({low:.2f}-{high:.2f})"


def floor(cells: Cells) -> str:
    rows = []
    for first in sorted({c["from"] for c in chosen(cells, part="floor")}):
        own = chosen(cells, part="floor", **{"from": first})
        rows.append(
            [
                f"from {first:,}",
                f"{sum(c['tokens'] for c in own):,}",
                number(mean(c["kl"] for c in own)),
                number(mean(c["median"] for c in own if "median" in c)),
                number(max(c["p99"] for c in own)),
                number(max(c["max"] for c in own)),
                f"{mean(c['same'] for c in own):.2%}",
            ]
        )
    head = ["positions", "tokens", "mean KL", "median", "worst p99", "worst token", "same choice"]
    return table(head, rows)


def boundary(cells: Cells) -> str:
    own = chosen(cells, part="boundary")
    modes = (*MODES[:4], "twice", "none")
    head = ["hit", *(TITLES[m] for m in modes), "same: both", "same: none", "worst: both"]
    rows = []
    for hit in sorted({c["hit"] for c in own}):
        by_mode = {mode: chosen(own, hit=hit, mode=mode) for mode in modes}
        row: list[object] = [f"{hit:,}"]
        for mode in modes:
            # Up to one window nothing is cut, so two were not run.
            found = by_mode[mode] or by_mode["both"]
            row.append(number(mean(c["kl"][1] for c in found)))
        row += [f"{mean(c['same'][1] for c in by_mode[mode]):.1%}" for mode in ("both", "none")]
        rows.append([*row, number(max(c["kl"][1] for c in by_mode["both"]))])
    return table(head, rows)


def groups(cells: Cells) -> str:
    """Return boundaries pooled by what they have in common."""
    own = chosen(cells, part="boundary")
    modes = (*MODES[:4], "twice", "none")
    kinds: dict[str, Callable[[int], bool]] = {
        "up to the window (0 to 128)": lambda h: h <= 128,
        "just behind it (129 to 257)": lambda h: 128 < h <= 257,
        "pool limit (1,023 to 1,025)": lambda h: 1000 < h < 1100,
        "4,095 to 4,097": lambda h: h > 4000,
        "odd, behind the window": lambda h: h > 128 and h % 2 == 1,
        "even, behind the window": lambda h: h > 128 and h % 2 == 0,
        "block multiples, behind the window": lambda h: h > 128 and h % 64 == 0,
    }
    rows = []
    for name, is_in in kinds.items():
        row: list[object] = [name]
        for mode in modes:
            found = [c for c in own if c["mode"] == mode and is_in(c["hit"])]
            row.append(number(mean(c["kl"][1] for c in found)) if found else "-")
        found = [c for c in own if c["mode"] == "both" and is_in(c["hit"])]
        row.append(number(median(c["kl"][1] for c in found)))
        row += [f"{mean(c['same'][i] for c in found):.1%}" for i in (0, 1)]
        rows.append(row)
    titles = [TITLES[mode] for mode in modes]
    head = ["hits", *titles, "median of both", "same, next token", "same, 16"]
    return table(head, rows)


def exact(cells: Cells) -> str:
    own = chosen(cells, part="boundary", mode="exact")
    rows = []
    for hit in sorted({c["hit"] for c in own}):
        found = chosen(own, hit=hit)
        kept = [
            chosen(cells, part="boundary", mode="kept", hit=hit, unit=c["unit"])[0] for c in found
        ]
        row = [f"{hit:,}", len(found)]
        row += [number(max(c["kl"][1] for c in group)) for group in (found, kept)]
        rows.append([*row, f"{mean(c['same'][1] for c in found):.1%}"])
    return table(
        ["hit", "documents", "exact replay, worst", "windows kept, worst", "same, 16"], rows
    )


def replies(cells: Cells) -> str:
    own = [c for c in chosen(cells, part="boundary") if len(c["kl"]) == 3]
    rows = []
    for hit in sorted({c["hit"] for c in own}):
        for mode in MODES:
            found = chosen(own, hit=hit, mode=mode)
            rows.append(
                [
                    f"{hit:,}",
                    TITLES[mode],
                    *(number(mean(c["kl"][n] for c in found)) for n in range(3)),
                    *(f"{mean(c['same'][n] for c in found):.1%}" for n in range(3)),
                    f"{sum(c['run'] >= 256 for c in found)} of {len(found)}",
                ]
            )
    head = [
        "hit",
        "recovery",
        "KL 1",
        "KL 16",
        "KL 256",
        "same 1",
        "same 16",
        "same 256",
        "equal replies of 256",
    ]
    return table(head, rows)


def suffixes(cells: Cells) -> str:
    rows = []
    own = chosen(cells, part="suffix")
    for n in sorted({c["suffix"] for c in own}):
        row: list[object] = [n]
        for hit in sorted({c["hit"] for c in own}):
            for mode in ("kept", "encoder"):
                behind = chosen(cells, part="behind", hit=hit, mode=mode)
                row.append(number(mean(c["kl"][str(n)] for c in behind)))
            for mode in ("decoder", "both"):
                found = chosen(own, hit=hit, suffix=n, mode=mode)
                row.append(number(mean(c["kl"][0] for c in found)))
        rows.append(row)
    hits = sorted({c["hit"] for c in own})
    head = [
        "suffix",
        *(f"{hit:,}: {m}" for hit in hits for m in ("kept", "encoder", "decoder", "both")),
    ]
    return table(head, rows)


def field(cells: Cells) -> str:
    own = chosen(cells, part="field")
    rows = []
    for n in sorted({c["rows"] for c in own}):
        row: list[object] = [f"{n:,}"]
        for mode in ("encoder", "decoder", "both"):
            # Without any row, both halves are the mode "none".
            found = [
                c
                for c in own
                if c["rows"] == n
                and c["mode"] in (mode, "none" if n == 0 and mode == "both" else mode)
            ]
            row.append(number(mean(c["kl"][1] for c in found)))
            row.append(f"{mean(c['same'][1] for c in found):.1%}")
        rows.append(row)
    head = ["rows", "encoder", "same", "decoder", "same", "both", "same"]
    return table(head, rows)


def facts(cells: Cells) -> str:
    own = chosen(cells, part="facts")
    rows = []
    for place in ("far", "before", "window start", "inside", "hit", "behind"):
        found = chosen(own, place=place)
        row: list[object] = [place, share(sum(c["right"]["cold"] for c in found), len(found))]
        row += [sum(c["right"][mode] for c in found) for mode in MODES]
        row += [number(mean(c["kl"][mode] for c in found)) for mode in ("kept", "both")]
        rows.append(row)
    head = ["place of the fact", "cold", *(TITLES[m] for m in MODES), "KL: kept", "KL: both"]
    return table(head, rows)


def crossings(cells: Cells) -> str:
    own = chosen(cells, part="crossings")
    rows = []
    for place in sorted({c["place"] for c in own}):
        found = chosen(own, place=place)
        total = sum(c["tokens"] for c in found)
        row: list[object] = [place, total, sum(c["right"]["cold"] for c in found)]
        row += [sum(c["right"][mode] for c in found) for mode in MODES]
        row += [number(mean(c["kl"][mode] for c in found)) for mode in ("kept", "both")]
        rows.append(row)
    head = ["what crosses", "tokens", "cold", *(TITLES[m] for m in MODES), "KL: kept", "KL: both"]
    return table(head, rows)


def chains(cells: Cells) -> str:
    own = chosen(cells, part="chain", prefill="bounded")
    once = chosen(cells, part="once")
    rows = []
    for low, high in ((0, 50), (50, 100), (100, 150), (150, 200)):
        kl = [value for c in own for value in c["kl"][low:high]]
        same = [value for c in own for value in c["same"][low:high]]
        lengths = own[0]["lengths"][low:high]
        # One resume is measured at every tenth turn.
        one = [
            value
            for c in once
            for length, value in zip(c["lengths"], c["kl"], strict=True)
            if lengths[0] <= length <= lengths[-1]
        ]
        rows.append(
            [
                f"{low + 1} to {high}",
                f"{lengths[0]:,} to {lengths[-1]:,}",
                number(mean(kl)),
                number(float(np.median(kl))),
                number(max(kl)),
                number(mean(one)),
                number(float(np.median(one))),
                f"{mean(same):.1%}",
            ]
        )
    head = [
        "turns",
        "tokens",
        "mean KL",
        "median",
        "worst",
        "one resume, mean KL",
        "median",
        "same next token",
    ]
    exact_turns = chosen(cells, part="chain", prefill="exact")
    turns = sum(len(c["lengths"]) for c in exact_turns)
    equal = sum(c["bit_equal"] for c in exact_turns)
    loaded = sum(n > 0 for c in exact_turns for n in c["loaded"])
    line = (
        f"Exact: {equal} of {turns} turns have the bits of the uninterrupted reading; {loaded} of "
        "them loaded blocks."
    )
    return f"{table(head, rows)}\n\n{line}"


def long(cells: Cells) -> str:
    own = chosen(cells, part="long")
    rows = []
    for hit in sorted({c["hit"] for c in own}):
        for mode in MODES:
            found = chosen(own, hit=hit, mode=mode)
            rows.append(
                [
                    f"{hit:,}",
                    TITLES[mode],
                    len(found),
                    *(number(mean(c["kl"][n] for c in found)) for n in range(2)),
                    f"{mean(c['same'][1] for c in found):.1%}",
                ]
            )
    return table(["hit", "recovery", "documents", "KL 1", "KL 16", "same 16"], rows)


def branches(models: dict[str, Cells]) -> str:
    """Return one column per model: what replay costs each of them, in a few figures."""
    rows: list[list[object]] = []

    def add(name: str, value: Callable[[Cells], str]) -> None:
        row: list[object] = [name]
        for cells in models.values():
            try:
                row.append(value(cells))
            except ValueError:
                row.append("-")
        rows.append(row)

    def behind(cells: Cells, mode: str) -> Cells:
        # One whole window and more of a hit is cut.
        own = chosen(cells, part="boundary", mode=mode)
        return [c for c in own if c["hit"] > 128]

    for mode in (*MODES[:4], "twice", "none"):
        add(
            f"KL over 16, hits behind the window: {TITLES[mode]}",
            lambda cells, m=mode: number(mean(c["kl"][1] for c in behind(cells, m))),
        )
    add(
        "median of both",
        lambda cells: number(median(c["kl"][1] for c in behind(cells, "both"))),
    )
    for mode in ("both", "none"):
        add(
            f"same first choice over 16: {TITLES[mode]}",
            lambda cells, m=mode: f"{mean(c['same'][1] for c in behind(cells, m)):.1%}",
        )
    for n in (64, 128, 256):
        add(
            f"KL over 16 at hit 4,096, both, {n} rows",
            lambda cells, n=n: number(
                mean(c["kl"][1] for c in chosen(cells, part="field", mode="both", rows=n))
            ),
        )
    for name in ("both", "none"):
        add(
            f"KL of answers about facts: {TITLES[name]}",
            lambda cells, m=name: number(mean(c["kl"][m] for c in chosen(cells, part="facts"))),
        )
    bounded = {"part": "chain", "prefill": "bounded"}
    add(
        "chain of 200 turns, mean KL (median)",
        lambda cells: "{} ({})".format(
            *(
                number(f(v for c in chosen(cells, **bounded) for v in c["kl"]))
                for f in (mean, median)
            )
        ),
    )
    add(
        "one resume, mean KL (median)",
        lambda cells: "{} ({})".format(
            *(
                number(f(v for c in chosen(cells, part="once") for v in c["kl"]))
                for f in (mean, median)
            )
        ),
    )
    add("sample", sample)
    return table(["", *models], rows)


def sample(cells: Cells) -> str:
    counts = {}
    for cell in cells:
        counts.setdefault(cell["unit"].split()[0], set()).add(cell["unit"])
    return ", ".join(f"{len(units)} {what}" for what, units in sorted(counts.items()))


TABLES: dict[str, Callable[[Cells], str]] = {
    "sample": sample,
    "floor": floor,
    "groups": groups,
    "boundary": boundary,
    "exact": exact,
    "replies": replies,
    "suffixes": suffixes,
    "field": field,
    "facts": facts,
    "crossings": crossings,
    "chain": chains,
    "long": long,
}
_MARKED = re.compile(r"(<!-- replay:(\w+):(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, models: dict[str, Cells]) -> str:
    """Return the document with every marked place filled; what was not measured says so."""

    def place(match: re.Match) -> str:
        head, what, model, tail = match.groups()
        try:
            body = branches(models) if model == "all" else TABLES[what](models[model])
        except (KeyError, ValueError, IndexError):
            body = "Not measured."
        return f"{head}{body}\n{tail}"

    return _MARKED.sub(place, text)


def spread(values: list[float]) -> tuple[float, float]:
    """Return mean and standard error."""
    return mean(values), float(np.std(values) / max(1, len(values) - 1) ** 0.5)


def field_points(cells: Cells, mode: str) -> list[tuple[float, float, float]]:
    own = [c for c in chosen(cells, part="field") if c["mode"] in (mode, "none")]
    own = [c for c in own if c["mode"] == mode or mode == "both"]
    return [
        (n, *spread([c["kl"][1] for c in own if c["rows"] == n]))
        for n in sorted({c["rows"] for c in own})
    ]


def behind_points(cells: Cells, mode: str) -> list[tuple[float, float, float]]:
    """Return KL by distance from the hit's end, in growing stretches."""
    own = chosen(cells, part="behind", mode=mode)
    return [(int(low), *spread([c["from"][low] for c in own])) for low in own[0]["from"]]


def chain_points(cells: Cells, step: int = 25) -> list[tuple[float, float, float]]:
    """Return KL of the next token by stretches of turns, in the middle of each."""
    own = chosen(cells, part="chain", prefill="bounded")
    points = []
    for first in range(0, len(own[0]["lengths"]), step):
        values = [value for c in own for value in c["kl"][first : first + step]]
        points.append((first + step / 2, *spread(values)))
    return points


def once_points(cells: Cells, step: int = 50) -> list[tuple[float, float, float]]:
    """Return the same of one resume; one turn in ten was measured, so stretches are longer."""
    turns = chosen(cells, part="chain", prefill="bounded")[0]["lengths"]
    values: dict[int, list[float]] = {}
    for cell in chosen(cells, part="once"):
        for length, value in zip(cell["lengths"], cell["kl"], strict=True):
            values.setdefault(turns.index(length) // step, []).append(value)
    return [(step * (n + 0.5), *spread(values[n])) for n in sorted(values)]


def draw(models: dict[str, Cells], out: Path, window: int, layers: int) -> list[Path]:
    """Write the plots that there are measurements for."""
    out.mkdir(parents=True, exist_ok=True)
    marks = {"one window": window, "layers x window": window * layers}
    figures: dict[str, dict] = {}
    first = next(iter(models.values()))
    for name, cells in models.items():
        label = "" if len(models) == 1 else f"{name}: "
        if chosen(cells, part="field"):
            # The halves of the first model; of the others what is served.
            for mode in ("both", "encoder", "decoder")[: None if cells is first else 1]:
                figures.setdefault("field", {})[label + TITLES[mode]] = field_points(cells, mode)
        if chosen(cells, part="behind"):
            for mode in ("encoder", "none", "kept")[: None if cells is first else 2]:
                figures.setdefault("behind", {})[label + TITLES[mode]] = behind_points(cells, mode)
        if chosen(cells, part="chain"):
            figures.setdefault("chain", {})[label + "each turn from disk"] = chain_points(cells)
            figures["chain"][label + "one resume there"] = once_points(cells)
    words = {
        "field": ("rows replayed", "KL over 16 tokens, nats", marks),
        "behind": ("tokens behind the hit", "KL, nats", {}),
        "chain": ("turn", "KL of the next token, nats", {}),
    }
    written = []
    for what, series in figures.items():
        x, y, lines = words[what]
        figure = difference_figure(series, xlabel=x, ylabel=y, marks=lines, log_x=what != "chain")
        written.append(out / f"replay_{what}.png")
        figure.savefig(written[-1], dpi=80)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results" / "replay")
    parser.add_argument("--doc", type=Path, default=ROOT / "docs" / "replay.md")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    models = read(args.results)
    args.doc.write_text(filled(args.doc.read_text(encoding="utf-8"), models), encoding="utf-8")
    for file in (args.doc, *draw(models, args.images, args.window, args.layers)):
        print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
