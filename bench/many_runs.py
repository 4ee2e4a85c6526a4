"""Many small runs on one GPU at once, each on a stream of its own.

    python bench/many_runs.py --recipe recipes.indexer:recall_gpu --name indexer_forms \\
        --grid indexer.form=frozen,selected,explored --grid seed=0,1,2,3
A small model leaves most of a GPU idle: its step is a chain of short kernels. The CUDA graphs of
several runs on several streams fill it. The steps are those of `finwhale.train.step`; only the
finite check is made every `--check` steps instead of at every one. One JSON line per run.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from record import write_result

from finwhale.config.run import RunConfig, with_overrides
from finwhale.data.batches import BatchOrder
from finwhale.data.packing import PackedRows
from finwhale.optim.optimizers import learning_rate
from finwhale.train.evaluate import answer_accuracy, bits_per_byte, index_recall
from finwhale.train.loop import _repeatable, build_model, build_optimizers
from finwhale.train.loss import Batch
from finwhale.train.run_data import RunData, prepare_data
from finwhale.train.step import TrainStep


@dataclass(kw_only=True)
class Lane:
    """One run: its model, its stream and what it measured."""

    run: RunConfig
    settings: list[str]
    data: RunData
    training: TrainStep
    order: BatchOrder
    stream: torch.cuda.Stream
    prepared: list[Batch] = field(default_factory=list)
    curve: list[dict] = field(default_factory=list)
    last: torch.Tensor | None = None
    failed: str | None = None

    def step(self, step: int) -> None:
        """Start step `step` on the lane's stream; nothing waits."""
        run, schedule = self.run, self.run.schedule
        rate = learning_rate(
            step,
            run.optim.lr,
            schedule,
            shape=schedule.shape,
            hold_until=schedule.hold_until,
            decay_until=schedule.decay_until,
        )
        batch = Batch.of(self.data.train, self.order.rows(step))
        with torch.cuda.stream(self.stream):
            self.last = self.training.launch_gradients(batch, step)
            self.training.launch_update(rate)

    def evaluate(self, step: int, *, num_rows: int | None) -> dict:
        """Return losses, and on the first validation rows bits per byte, accuracy and recall."""
        run, model, rows = self.run, self.training.model, self.run.micro_batch_rows
        packed = self.data.validation
        count = packed.num_rows if num_rows is None else min(num_rows, packed.num_rows)
        shown = PackedRows(
            inputs=packed.inputs[:count],
            targets=packed.targets[:count],
            lengths=packed.lengths[:count],
        )
        with torch.cuda.stream(self.stream):
            losses = self.last.tolist()
            found = {"step": step, "loss": losses[0], "index_losses": losses[1:-2]}
            if not all(math.isfinite(x) for x in losses):
                self.failed = f"not finite at step {step}"
                return found
            if self.data.is_task:
                found["accuracy"] = answer_accuracy(model, shown, batch_rows=rows)
            else:
                share = self.data.validation_bytes * shown.num_targets / packed.num_targets
                chunk = run.loss_chunk_tokens
                found["validation_bpb"] = bits_per_byte(
                    model, shown, share, chunk_tokens=chunk, batch_rows=rows
                )
            recalls = index_recall(
                model, shown, sampled=run.sequence_length, num_rows=rows, batch_rows=rows
            )
            found["recall"] = {f"L{k}": round(v, 4) for k, v in recalls.items()}
        return found


def _in_processes(function, parts) -> list:
    """Map over the parts in a fresh interpreter per core: a fork of a GPU's process is unsafe."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(len(parts), os.cpu_count() or 1)) as pool:
        return pool.map(function, parts, chunksize=-(-len(parts) // pool._processes))


def lanes(base: RunConfig, grids: list[str]) -> list[Lane]:
    """Build every combination of the grids, e.g. `indexer.form=a,b` and `seed=0,1`."""
    options = []
    for grid in grids:
        path, _, values = grid.partition("=")
        options.append([f"{path}={value}" for value in values.split(",")])
    known: dict[str, RunData] = {}
    found = []
    for settings in itertools.product(*options):
        run = with_overrides(base, settings)
        key = json.dumps(run.to_json()["data"])
        if key not in known:
            known[key] = prepare_data(run, Path("runs/many"), map_parts=_in_processes)
        data = known[key]
        run = replace(run, model=data.model)
        model = build_model(run, data.model, torch.from_numpy(data.token_map))
        found.append(
            Lane(
                run=run,
                settings=list(settings),
                data=data,
                training=TrainStep(run, model, build_optimizers(run, model)),
                order=BatchOrder(
                    num_rows=data.train.num_rows, batch_rows=run.batch_rows, seed=run.seed
                ),
                stream=torch.cuda.Stream(),
            )
        )
    return found


def train_all(
    found: list[Lane],
    *,
    check: int,
    check_rows: int | None,
    last_rows: int | None = None,
    limit_s: float,
    enough: Callable[[list[Lane]], bool] | None = None,
) -> None:
    """Run every lane to the end of its schedule, or to the limit of seconds.

    Every `check` steps the first `check_rows` validation rows are scored, at the end `last_rows`;
    `enough` then says whether to stop early.
    """
    # The models were made on the default stream and train on others.
    torch.cuda.synchronize()
    run = found[0].run
    tokens, steps, started = run.batch_rows * run.sequence_length, run.schedule.steps, time.time()
    for step in range(steps):
        live = [lane for lane in found if lane.failed is None]
        for lane in live:
            lane.step(step)
        if step % 20 == 19:
            torch.cuda.synchronize()
        is_last = step + 1 == steps or time.time() - started > limit_s
        if (step + 1) % check == 0 or is_last:
            torch.cuda.synchronize()
            rate = len(live) * (step + 1) * tokens / (time.time() - started)
            for lane in live:
                rows = last_rows if is_last else check_rows
                lane.curve.append(lane.evaluate(step + 1, num_rows=rows))
            shown = [
                round(x.curve[-1].get("accuracy", x.curve[-1].get("validation_bpb", 0)), 3)
                for x in live
            ]
            now = time.time() - started
            print(f"{now:.0f} s, step {step + 1}: {rate:,.0f} tokens/s in all; {shown}", flush=True)
            if enough is not None and enough(live):
                return
        if is_last:
            return


def record(found: list[Lane], name: str, recipe: str, settings: list[str]) -> None:
    """Write one line per lane and print its end."""
    for lane in found:
        result = {"settings": lane.settings, "recipe": recipe, "set": settings}
        result |= {"failed": lane.failed, "curve": lane.curve}
        write_result(name, result)
        print(lane.settings, lane.failed or lane.curve[-1], flush=True)


def recipe_run(path: str, settings: list[str]) -> RunConfig:
    """Return the run of `module:function` with its overrides."""
    module, _, function = path.partition(":")
    return with_overrides(getattr(importlib.import_module(module), function)(), settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--grid", action="append", default=[])
    parser.add_argument("--check", type=int, default=250)
    parser.add_argument("--check-rows", type=int)
    parser.add_argument("--limit-s", type=float, default=1e9)
    args = parser.parse_args()
    base = recipe_run(args.recipe, args.set)
    with _repeatable(base):
        found = lanes(base, args.grid)
        train_all(found, check=args.check, check_rows=args.check_rows, limit_s=args.limit_s)
    record(found, args.name, args.recipe, args.set)
    return 0


if __name__ == "__main__":
    sys.exit(main())
