"""Pictures of docs/mini.md from the records of bench/mini_evals.py.

    python bench/mini_figures.py --records bench/results/mini_evals.jsonl --out docs/images
Bits per byte by position, one figure for each series of documents, and the recall grids of mini.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from finwhale.evals.figures import position_figure, recall_figure
from finwhale.evals.position_bits import BucketBits
from finwhale.evals.recall_grid import RecallCell, RecallGrid

_NAMES = {
    "mini": "mini, shipped",
    "window": "window only",
}


def positions(records: list[dict], models: list[str], series: str) -> dict[str, list[BucketBits]]:
    """Return the buckets of each model, by the name in the figure."""
    fields = [field.name for field in dataclasses.fields(BucketBits)]
    found: dict[str, list[BucketBits]] = {_NAMES.get(name, name): [] for name in models}
    for record in records:
        is_bucket = record["measure"] == "position_bits" and not record["whole"]
        if is_bucket and record["series"] == series and record["model"] in models:
            bucket = BucketBits(**{name: record[name] for name in fields})
            found[_NAMES.get(record["model"], record["model"])].append(bucket)
    return found


def grid(records: list[dict], model: str, kind: str) -> RecallGrid:
    """Return the grid of one kind; lengths with as many depths as the others."""
    own = [
        r for r in records if r["measure"] == "recall" and r["model"] == model and r["kind"] == kind
    ]
    fields = [f.name for f in dataclasses.fields(RecallCell)]
    lengths, depths = (sorted({r[name] for r in own}) for name in ("length", "depth"))
    at = {(r["length"], r["depth"]): RecallCell(**{n: r[n] for n in fields}) for r in own}
    return RecallGrid(
        kind=kind,
        lengths=tuple(lengths),
        depths=tuple(depths),
        chance=own[0]["chance"],
        reach=own[0]["reach"],
        filler=own[0]["filler"],
        cells=tuple(at[length, depth] for length in lengths for depth in depths),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=Path("bench/results/mini_evals.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--models", nargs="*", default=["mini", "window", "dense"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    records = [json.loads(line) for line in args.records.read_text().splitlines()]
    for series in ("held-out packages", "long documents"):
        found = positions(records, args.models, series)
        figure = position_figure(found)
        figure.axes[0].set_title(series)
        file = args.out / f"mini_positions_{series.split()[0]}.png"
        figure.savefig(file, dpi=110)
        print(f"wrote {file}")
        for name, buckets in found.items():
            shown = [f"{b.label}: {b.bits_per_byte:.4f}" for b in buckets if b.num_targets]
            print(f"  {name}: {', '.join(shown)}")
    first = next(r for r in records if r["measure"] == "recall" and r["model"] == "mini")
    for kind in ("associative_recall", "needle"):
        figure = recall_figure(
            grid(records, "mini", kind),
            trained_length=first["trained_length"],
            limits=first["limits"],
        )
        file = args.out / f"mini_{kind}.png"
        figure.savefig(file, dpi=90)
        print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
