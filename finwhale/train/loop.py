"""The training loop: one for every run, fp32 on CPU, resumable and repeatable.

A step reads one batch, accumulates gradients over its parts, clips, steps AdamW and the expert
balance, and writes one line. Nothing in it reads a clock to decide anything. A loss or gradient
that is not finite stops the run at that step and leaves the last saved state in place.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from finwhale.config.run import RunConfig
from finwhale.data.baselines import Baseline
from finwhale.data.batches import BatchOrder
from finwhale.data.packing import NO_TARGET
from finwhale.model import Backbone, Numerics
from finwhale.ops import FAST
from finwhale.train import record
from finwhale.train.balance import ExpertBalance
from finwhale.train.evaluate import bits_per_byte
from finwhale.train.loss import Batch, loss_sum
from finwhale.train.optimizer import build_optimizer, is_frozen, learning_rate
from finwhale.train.progress import TrainingProgress
from finwhale.train.run_data import RunData, prepare_data
from finwhale.train.state import STATE_FILE, load_state, save_state


class TrainingError(RuntimeError):
    """A run that cannot go on; the message names the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """A finished run."""

    model: Backbone
    data: RunData
    baselines: tuple[Baseline, ...]
    validation_bpb: float
    elapsed_s: float


@contextmanager
def _repeatable(threads: int) -> Iterator[None]:
    """Fix the number of threads and forbid atomic accumulation, whose order varies."""
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    torch.set_num_threads(threads)
    # The same switch as use_deterministic_algorithms, which imports a compiler for seconds.
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])


def build_model(run: RunConfig, data: RunData) -> Backbone:
    """Return the run's freshly initialised model."""
    model = Backbone(
        data.model,
        token_map=torch.from_numpy(data.token_map),
        numerics=Numerics(cache_rounding=run.cache_rounding),
        ops=FAST,
    )
    model.init_weights(run.seed)
    return model


def validate(run: RunConfig, model: Backbone, data: RunData) -> float:
    """Return the model's bits per byte on the run's validation text."""
    return bits_per_byte(
        model,
        data.validation,
        data.corpus.validation_bytes,
        chunk_tokens=run.loss_chunk_tokens,
    )


def train(
    run: RunConfig,
    out: str | Path,
    *,
    recipe: str | None = None,
    resume: bool = False,
    console: Console | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> TrainResult:
    """Train `run` in the folder `out` and return the model and its scores.

    recipe   import path of the function that made `run`, for the record
    resume   go on from the state in `out`; without one, start from the beginning
    on_step  receives every metrics record

    Writes run.json, metrics.jsonl, loss.png, tokenizer.json and the training state. Raises
    RunFolderError if `out` holds another run, or a state and `resume` is off; TrainingError if a
    loss or gradient is not finite.
    """
    out, console = Path(out), console or Console()
    out.mkdir(parents=True, exist_ok=True)
    if (out / STATE_FILE).exists() and not resume:
        raise record.RunFolderError(
            f"{out}: holds a training state; resume it (--resume) or choose another folder"
        )
    with _repeatable(run.threads):
        return _Run(run, out, recipe, console, on_step).go()


class _Run:
    """The objects of one call of `train`."""

    def __init__(self, run: RunConfig, out: Path, recipe, console: Console, on_step) -> None:
        self.run, self.out, self.console, self.on_step = run, out, console, on_step
        self.data = prepare_data(run, out)
        resolved = replace(run, model=self.data.model).to_json()
        earlier = record.claim_folder(out, resolved, self.data.digest)
        self.baselines = self.data.baselines()
        self.model = build_model(run, self.data)
        self.optimizer = build_optimizer(self.model, run.optim)
        self.balance = ExpertBalance(self.model, run.optim.balance_rate)
        self.order = BatchOrder(
            num_rows=self.data.train.num_rows, batch_rows=run.batch_rows, seed=run.seed
        )
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        counters = load_state(out, self.model, self.optimizer)
        self.step = counters["step"] if counters else 0
        self.elapsed_before_s = counters["elapsed_s"] if counters else 0.0
        self.saved_step = self.step
        self.facts = self._facts(resolved, recipe, earlier)
        record.write_json(out / record.RUN_FILE, self.facts)
        self.metrics = record.Metrics(out, counters["metrics_bytes"] if counters else 0)
        self.started_s = time.perf_counter()

    def _facts(self, resolved, recipe, earlier) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        data = self.data
        return {
            "recipe": recipe,
            "config": resolved,
            "data_digest": data.digest,
            "source": record.source_commit(),
            "versions": record.versions(),
            "device": record.device_name(),
            "seed": self.run.seed,
            "started": earlier.get("started", now),
            "resumed_at_steps": earlier.get("resumed_at_steps", []) + [self.step] * (self.step > 0),
            "data": {
                "train_documents": len(data.corpus.train),
                "train_bytes": data.corpus.train_bytes,
                "train_targets": data.train.num_targets,
                "validation_documents": len(data.corpus.validation),
                "validation_bytes": data.corpus.validation_bytes,
                "unreadable_files": data.corpus.num_unreadable,
                "padding_rate": data.train.padding_rate,
            },
            "baselines": [
                {"name": b.name, "bits_per_byte": b.bits_per_byte, "masses": b.masses}
                for b in self.baselines
            ],
            # No gradient reaches what a hard selection reads.
            "frozen": [name for name, _ in self.model.named_parameters() if is_frozen(name)],
            "finished": False,
        }

    @property
    def elapsed_s(self) -> float:
        return self.elapsed_before_s + time.perf_counter() - self.started_s

    def _announce(self) -> None:
        run, data = self.run, self.data
        steps, positions = run.schedule.steps, run.batch_rows * run.sequence_length
        lines = [
            f"text: {data.corpus.train_bytes:,} bytes to train on, "
            f"{data.corpus.validation_bytes:,} held out ({run.data.corpus})",
            f"tokens: {data.train.num_targets:,}, vocabulary {data.tokenizer.vocab_size:,}, "
            f"padding {data.train.padding_rate:.2%}",
            f"model: {sum(p.numel() for p in self.model.parameters()):,} parameters, "
            f"{run.threads} threads",
            f"run: {steps:,} steps of {positions:,} positions, seed {run.seed}",
        ]
        if self.step:
            lines.append(f"resumed after step {self.step}")
        self.console.print("\n".join(lines), highlight=False)

    def go(self) -> TrainResult:
        self._announce()
        steps = self.run.schedule.steps
        tokens_per_step = self.run.batch_rows * self.run.sequence_length
        bar = TrainingProgress(self.console, total_steps=steps, done_steps=self.step)
        pace_s = None
        validation_bpb = None
        try:
            with bar:
                while self.step < steps:
                    began_s = time.perf_counter()
                    values = self._one_step()
                    took_s = time.perf_counter() - began_s
                    # A smoothed pace: single steps vary with the lengths of their documents.
                    pace_s = took_s if pace_s is None else 0.9 * pace_s + 0.1 * took_s
                    is_last = self.step == steps
                    every = self.run.eval_every
                    if is_last or (every and self.step % every == 0):
                        validation_bpb = validate(self.run, self.model, self.data)
                        values["validation_bpb"] = validation_bpb
                    values["tokens_per_s"] = round(tokens_per_step / took_s, 1)
                    values["elapsed_s"] = round(self.elapsed_s, 3)
                    self.metrics.write(values)
                    if is_last or self.step % self.run.save_every == 0:
                        self._save()
                    left_s = (steps - self.step) * pace_s
                    bar.show(self.step, values["loss"], tokens_per_step / pace_s, left_s)
                    if self.on_step is not None:
                        self.on_step(values)
        finally:
            self.metrics.close()
        if validation_bpb is None:
            validation_bpb = validate(self.run, self.model, self.data)
        return self._finish(validation_bpb)

    def _one_step(self) -> dict[str, Any]:
        run, step = self.run, self.step
        rate = learning_rate(step, run.optim.lr, run.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = Batch.of(self.data.train, self.order.rows(step))
        num_targets = batch.num_targets
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for part in batch.parts(run.micro_batch_rows):
            self.balance.watch(part.targets != NO_TARGET)
            part_loss = loss_sum(self.model, part, chunk_tokens=run.loss_chunk_tokens) / num_targets
            loss += float(part_loss.detach())
            self._require_finite("loss", loss)
            part_loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained, run.optim.grad_clip))
        self._require_finite("gradient norm", norm)
        self.optimizer.step()
        overuse = self.balance.update()
        self.step += 1
        return {
            "step": self.step,
            "loss": loss,
            "targets": num_targets,
            "lr": rate,
            "grad_norm": norm,
            "expert_overuse": overuse,
        }

    def _require_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            kept = f"the state after step {self.saved_step} is kept" if self.saved_step else ""
            remedy = "lower optim.lr or optim.grad_clip"
            raise TrainingError(
                f"step {self.step + 1}: {what} is {value}; {remedy}" + (f"; {kept}" if kept else "")
            )

    def _save(self) -> None:
        save_state(
            self.out,
            self.model,
            self.optimizer,
            step=self.step,
            metrics_bytes=self.metrics.length_bytes,
            elapsed_s=self.elapsed_s,
        )
        self.saved_step = self.step

    def _finish(self, validation_bpb: float) -> TrainResult:
        corpus, packed = self.data.corpus, self.data.train
        record.draw_curve(
            self.out,
            {b.name: b.bits_per_byte for b in self.baselines},
            corpus.train_bytes / packed.num_targets,
        )
        elapsed_s = self.elapsed_s
        self.facts |= {
            "finished": True,
            "validation_bpb": validation_bpb,
            "elapsed_s": round(elapsed_s, 3),
        }
        record.write_json(self.out / record.RUN_FILE, self.facts)
        return TrainResult(
            model=self.model,
            data=self.data,
            baselines=self.baselines,
            validation_bpb=validation_bpb,
            elapsed_s=elapsed_s,
        )
