"""Hundreds of `kill -9` of what stores blocks on a disk, and a look at every block after each.

    python bench/kill_store.py [--store-kills 450] [--server-kills 55] [--work build/kill_store]

Two kinds: a process that drives the disk store alone, roomy and under eviction
(`tests/killed_store.py` has the laws), and `finwhale serve --cache-dir` with clients that wait for
answers (`tests/killed_server.py`). Kills come in cells of one directory each; a finished cell is
one line of bench/results/kill_store.jsonl, and a second run of the same commit goes on behind it.
Exits 1 if a law broke. A last cell is the control: a process that promises before it has flushed,
which must be found out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from record import RESULTS, provenance, write_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.killed_server import ServerKilling
from tests.killed_store import Killing

PER_CELL = 25
PER_SERVER_CELL = 11
NAME = "kill_store"


def cells(store_kills: int, server_kills: int) -> list[dict]:
    """Return what is to be done: kind, seed and kills of each directory."""
    found = []
    for n, left in enumerate(range(store_kills, 0, -PER_CELL)):
        kind = ("roomy", "tight")[n % 2]
        found.append({"kind": kind, "seed": n, "kills": min(left, PER_CELL)})
    for n, left in enumerate(range(server_kills, 0, -PER_SERVER_CELL)):
        found.append({"kind": "server", "seed": n, "kills": min(left, PER_SERVER_CELL)})
    return [*found, {"kind": "early", "seed": 0, "kills": PER_CELL}]


def done_before() -> set[str]:
    """Return the cells that this commit has finished."""
    file, commit = RESULTS / f"{NAME}.jsonl", provenance()["commit"]
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return {json.dumps(row["result"]["cell"]) for row in rows if row["commit"] == commit}


def run_cell(cell: dict, model: Path | None, work: Path, tell) -> dict:
    """Kill as often as the cell says; return what was seen."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    began, problems = time.perf_counter(), []
    if cell["kind"] == "server":
        killing = ServerKilling(model, work / "cache", work / "log", seed=cell["seed"])
    else:
        control = cell["kind"] if cell["kind"] == "early" else ""
        mode = "roomy" if control else cell["kind"]
        killing = Killing(work / "cache", mode, seed=cell["seed"], control=control)
    for n in range(cell["kills"]):
        problems += [f"kill {n + 1}: {told}" for told in killing.once()]
        tell(len(problems))
        if problems and cell["kind"] == "early":
            break
    row = {"cell": cell, "kills": killing.num_kills, "moments": killing.moments}
    if isinstance(killing, ServerKilling):
        same, wrong = killing.compare(work / "clean")
        problems += wrong
        row |= {"replies": killing.replies, "cached_tokens": killing.cached_tokens}
        row |= {"blocks": len(killing.held), "blocks_compared": same}
    else:
        row |= {"promises": killing.promises, "blocks_looked_at": killing.loads}
    seconds = round(time.perf_counter() - began, 1)
    return row | {"problems": problems[:20], "num_problems": len(problems), "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--store-kills", type=int, default=450)
    parser.add_argument("--server-kills", type=int, default=55)
    parser.add_argument("--model", type=Path, help="folder to serve; a tiny one if absent")
    parser.add_argument("--work", type=Path, default=Path("build/kill_store"))
    args = parser.parse_args()
    model = args.model
    if model is None:
        from tests.checkpoint_files import write_smallest

        model = args.work / "tiny"
        if not model.exists():
            model = write_smallest(model)
    plan, before, has_failed = cells(args.store_kills, args.server_kills), done_before(), False
    total, so_far = sum(cell["kills"] for cell in plan), 0
    for cell in plan:
        if json.dumps(cell) in before:
            so_far += cell["kills"]
            continue
        count = [so_far]

        def tell(num_problems: int, count=count, kind=cell["kind"]) -> None:
            count[0] += 1
            bar = "#" * (40 * count[0] // total)
            sys.stderr.write(f"\r[{bar:40}] {count[0]}/{total} {kind} problems {num_problems} ")
            sys.stderr.flush()

        row = run_cell(cell, model, args.work / "cell", tell)
        so_far += cell["kills"]
        # The control has to be found out, everything else has to hold.
        is_right = bool(row["num_problems"]) == (cell["kind"] == "early")
        has_failed |= not is_right
        write_result(NAME, row)
        print(f"\n{json.dumps(row)}")
    print("a law broke, or the control passed" if has_failed else "every law held")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
