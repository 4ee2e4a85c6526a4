"""Which form of the indexer's objective finds what left the window: forms by seeds, at nano size.

    python bench/indexer_forms.py --probe 500 --limit-s 540
Needs a GPU. Every form runs with several seeds on a recall task, a few on the two-step task. A run
is solved at 99 % of the answers with the deployed top-k. The table says for every form how many
seeds were solved, the accuracies, and the recall of each indexer.

A task that no form solves tells nothing. `--probe N` first trains several tasks and rates for at
most N steps with every entry selected, and takes the one that is solved first; without any, the
probe is the result.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time

import torch
from many_runs import lanes, recipe_run, record, train_all
from record import write_result

from finwhale.config.run import INDEXER_FORMS
from finwhale.train.loop import _repeatable

# Tasks and rates of the probe: (recipe, overrides).
_PROBES: list[tuple[str, list[str]]] = [
    ("recall_gpu", []),
    ("recall_gpu", ["optim.lr=4e-3"]),
    ("recall_gpu", ["optim.lr=2e-3"]),
    ("recall_gpu", ["optim.scheme=report"]),
    ("recall_gpu", ["data.task_options=num_keys=40,window=32"]),
    ("fixed_keys_gpu", []),
    ("fixed_keys_gpu", ["optim.lr=4e-3"]),
    (
        "fixed_keys_gpu",
        ["data.task_options=num_pairs=2,num_queries=2,num_keys=2,scattered=1,window=32"],
    ),
]
_SOLVED = 0.99
_RECALL, _DECODER = "recipes.indexer:recall_gpu", "recipes.indexer:decoder_recall_gpu"


def table(found, name: str) -> None:
    """Print and write one line per form."""
    forms: dict[str, list] = {}
    for lane in found:
        forms.setdefault(lane.run.indexer.form, []).append(lane)
    for form, own in forms.items():
        ends = [lane.curve[-1] for lane in own if lane.failed is None]
        if not ends:
            print({"task": name, "form": form, "failed": [lane.failed for lane in own]}, flush=True)
            continue
        solved = sum(end["accuracy"] >= _SOLVED for end in ends)
        layers = ends[0]["recall"]
        recall = {k: round(statistics.mean(end["recall"][k] for end in ends), 3) for k in layers}
        line = {
            "task": name,
            "form": form,
            "solved": f"{solved}/{len(own)}",
            "accuracy": [round(end["accuracy"], 3) for end in ends],
            "loss": [round(end["loss"], 3) for end in ends],
            "mean_recall": recall,
            "steps": ends[0]["step"],
        }
        print(line, flush=True)
        write_result("indexer_table", line)


def probe(steps: int, settings: list[str], limit_s: float) -> tuple[str, list[str], int] | None:
    """Return recipe, overrides and steps of the probe that every entry's attention solves first."""
    dense = [
        *settings,
        f"schedule.steps={steps}",
        "indexer.form=dense_warmup",
        "indexer.phase=1",
        "indexer.recall_rows=8",
    ]
    found = []
    for name, own in _PROBES:
        found += lanes(recipe_run(f"recipes.indexer:{name}", [*dense, *own]), [])

    def is_solved(live) -> bool:
        return any(lane.curve[-1]["loss"] < 0.03 for lane in live)

    # The loss is with every entry; the accuracy with the deployed top-k, which comes later.
    train_all(found, check=50, check_rows=32, limit_s=limit_s, enough=is_solved)
    best = None
    for (name, own), lane in zip(_PROBES, found, strict=True):
        line = {"probe": name, "set": own, "failed": lane.failed}
        line["curve"] = [
            (end["step"], round(end["loss"], 3), round(end.get("accuracy", 0), 3))
            for end in lane.curve
        ]
        print(line, flush=True)
        write_result("indexer_probe", line)
        if lane.failed is None:
            end = lane.curve[-1]
            if best is None or end["loss"] < best[0]:
                best = end["loss"], name, own, end["step"]
    if best is None or best[0] > 0.5:
        return None
    return f"recipes.indexer:{best[1]}", best[2], best[3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--check", type=int, default=250)
    parser.add_argument("--limit-s", type=float, default=480)
    parser.add_argument("--forms", nargs="*", default=list(INDEXER_FORMS))
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--recall-share", type=float, default=0.65)
    parser.add_argument(
        "--decoder-forms", nargs="*", default=["frozen", "selected", "explored", "dense_warmup"]
    )
    parser.add_argument("--probe", type=int, default=0)
    args = parser.parse_args()
    began = time.time()
    recall, own = _RECALL, []
    if args.probe:
        with _repeatable(recipe_run(_RECALL, [])):
            chosen = probe(args.probe, args.set, 0.35 * args.limit_s)
        gc.collect()
        torch.cuda.empty_cache()
        if chosen is None:
            print("no probe was solved: no table", flush=True)
            return 1
        recall, own, solved_at = chosen
        args.steps = min(args.steps, 3 * solved_at)
        print({"recipe": recall, "set": own, "steps": args.steps}, flush=True)
    seeds = "seed=" + ",".join(str(n) for n in range(args.seeds))
    settings = [f"schedule.steps={args.steps}", *args.set]
    own_settings = [*settings, *own]
    with _repeatable(recipe_run(_RECALL, settings)):
        for recipe, forms, share, used in (
            (recall, args.forms, args.recall_share, own_settings),
            (_DECODER, args.decoder_forms, 1.0, settings),
        ):
            gc.collect()
            torch.cuda.empty_cache()
            found = lanes(recipe_run(recipe, used), ["indexer.form=" + ",".join(forms), seeds])
            left = share * args.limit_s - (time.time() - began)
            train_all(found, check=args.check, check_rows=64, last_rows=512, limit_s=left)
            record(found, "indexer_forms", recipe, used)
            table(found, recipe.rpartition(":")[2])
            del found
    return 0


if __name__ == "__main__":
    sys.exit(main())
