"""Which form of the indexer's objective finds what left the window: forms by seeds, at nano size.

    python bench/indexer_forms.py --limit-s 480
Needs a GPU. Every form runs with several seeds on associative recall, a few on the two-step task. A
run is solved at 99 % of the answers with the deployed top-k. The table says for every form how many
seeds were solved, the accuracies, and the recall of each indexer.
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
        solved = sum(end["accuracy"] >= 0.99 for end in ends)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--check", type=int, default=250)
    parser.add_argument("--limit-s", type=float, default=480)
    parser.add_argument("--forms", nargs="*", default=list(INDEXER_FORMS))
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--recall-share", type=float, default=0.65)
    parser.add_argument(
        "--decoder-forms", nargs="*", default=["frozen", "selected", "explored", "dense_warmup"]
    )
    args = parser.parse_args()
    began = time.time()
    seeds = "seed=" + ",".join(str(n) for n in range(args.seeds))
    settings = [f"schedule.steps={args.steps}", *args.set]
    with _repeatable(recipe_run(_RECALL, settings)):
        for recipe, forms, share in (
            (_RECALL, args.forms, args.recall_share),
            (_DECODER, args.decoder_forms, 1.0),
        ):
            gc.collect()
            torch.cuda.empty_cache()
            found = lanes(recipe_run(recipe, settings), ["indexer.form=" + ",".join(forms), seeds])
            left = share * args.limit_s - (time.time() - began)
            train_all(found, check=args.check, check_rows=64, last_rows=512, limit_s=left)
            record(found, "indexer_forms", recipe, settings)
            table(found, recipe.rpartition(":")[2])
            del found
    return 0


if __name__ == "__main__":
    sys.exit(main())
