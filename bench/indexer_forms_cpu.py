"""The table of `indexer_forms.py` at a size that one CPU core trains in minutes per run.

    python bench/indexer_forms_cpu.py --seeds 4
Runs one after the other, all forms of a seed before the next seed, a JSON line each. Solved: 99 %
of the answers with the deployed top-k.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from many_runs import recipe_run
from record import write_result

from finwhale.config.run import INDEXER_FORMS, with_overrides
from finwhale.data.batches import BatchOrder
from finwhale.optim.optimizers import learning_rate
from finwhale.train.evaluate import answer_accuracy, index_recall
from finwhale.train.loop import _repeatable, build_model, build_optimizers
from finwhale.train.loss import Batch
from finwhale.train.run_data import prepare_data
from finwhale.train.step import TrainStep


def train(run, data) -> dict:
    """Train one run and return its curve and what the deployed model then finds."""
    run = replace(run, model=data.model)
    model = build_model(run, data.model, torch.from_numpy(data.token_map))
    training = TrainStep(run, model, build_optimizers(run, model))
    rows, schedule = run.batch_rows, run.schedule
    order = BatchOrder(num_rows=data.train.num_rows, batch_rows=rows, seed=run.seed)
    losses, began = [], time.time()
    for step in range(schedule.steps):
        measured = training.gradients(Batch.of(data.train, order.rows(step)), step)
        training.update(
            learning_rate(
                step,
                run.optim.lr,
                schedule,
                shape=schedule.shape,
                hold_until=schedule.hold_until,
                decay_until=schedule.decay_until,
            )
        )
        losses.append(measured.loss)
    recalls = index_recall(
        model, data.validation, sampled=run.sequence_length, num_rows=rows, batch_rows=rows
    )
    accuracy = answer_accuracy(model, data.validation, batch_rows=rows)
    return {
        "accuracy": round(accuracy, 4),
        "solved": accuracy >= 0.99,
        "loss": round(sum(losses[-10:]) / 10, 4),
        "losses": [round(x, 3) for x in losses[::20]],
        "recall": {f"L{k}": round(v, 3) for k, v in recalls.items()},
        "seconds": round(time.time() - began),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="recipes.indexer:recall_cpu")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--forms", nargs="*", default=list(INDEXER_FORMS))
    parser.add_argument("--set", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = recipe_run(args.recipe, args.set)
    with _repeatable(base):
        data = prepare_data(base, Path("runs/forms"))
        for seed in range(args.seeds):
            for form in args.forms:
                settings = [f"seed={seed}", f"indexer.form={form}"]
                found = train(with_overrides(base, settings), data)
                line = {"recipe": args.recipe, "form": form, "seed": seed, "set": args.set, **found}
                print(line, flush=True)
                write_result("indexer_forms_cpu", line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
