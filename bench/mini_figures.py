"""Pictures of docs/mini.md from the reports of bench/mini_evals.py.

    python bench/mini_figures.py --evals runs/evals --out docs/images
One figure of bits per byte by position for all models of a report, and the recall grids of mini.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from finwhale.evals.figures import position_figure, read_positions

_NAMES = {"mini": "mini", "long": "mini before its last phases", "window": "window only"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evals", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=["long", "window", "dense"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    read = {name: read_positions(args.evals / name) for name in args.models}
    for series in ("held-out packages", "long documents"):
        found = {_NAMES.get(name, name): own[series] for name, own in read.items()}
        figure = position_figure(found)
        figure.axes[0].set_title(series)
        file = args.out / f"mini_positions_{series.split()[0]}.png"
        figure.savefig(file, dpi=110)
        print(f"wrote {file}")
        for name, buckets in found.items():
            shown = [f"{b.label}: {b.bits_per_byte:.4f}" for b in buckets if b.num_targets]
            print(f"  {name}: {', '.join(shown)}")
    for kind in ("associative_recall", "needle"):
        source = args.evals / "mini" / f"recall_{kind}_ids.png"
        (args.out / f"mini_{kind}.png").write_bytes(source.read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
