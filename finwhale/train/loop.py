"""The training loop: one for every run, on a CPU or a GPU, resumable and repeatable.

A step reads one batch, takes its gradients, steps the optimisers and writes one line (`step.py`).
Nothing in it reads a clock to decide anything. A loss or gradient that is not finite, or a loss far
above the last ones, stops the run before the step changes anything, names the layer, keeps the
batch, and leaves the last saved state in place.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console

from finwhale.baselines.dense_baseline import dense_baseline
from finwhale.config.files import FileError
from finwhale.config.model import ModelConfig
from finwhale.config.presets import window_only
from finwhale.config.run import RunConfig
from finwhale.data.baselines import Baseline
from finwhale.data.batches import BatchOrder
from finwhale.kernels.select import KernelError, training_ops, training_unsupported
from finwhale.model import Backbone, Numerics
from finwhale.ops import Ops
from finwhale.optim.optimizers import Optimizers, learning_rate
from finwhale.train import diagnose, record
from finwhale.train.evaluate import answer_accuracy, bits_per_byte, index_recall
from finwhale.train.events import Events
from finwhale.train.loss import Batch
from finwhale.train.progress import TrainingProgress
from finwhale.train.run_data import RunData, prepare_data
from finwhale.train.state import STATE_FILE, StateError, load_state, load_weights, save_state
from finwhale.train.step import StepMeasures, TrainStep

# Losses whose median a new one is compared with.
_SPIKE_WINDOW = 64
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
def _repeatable(run: RunConfig) -> Iterator[None]:
    """Fix the number of threads and forbid atomic accumulation, whose order varies.

    On a GPU the kernels here use none where it matters, and the switch would refuse operations
    whose order is fixed in the way they are used; there it stays off. bf16 runs multiply their
    remaining fp32 matrices in TF32 (D15).
    """
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    # A module whose attributes are properties, which a type checker does not see.
    deterministic: Any = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    torch.set_num_threads(run.threads)
    if run.device == "cpu":
        # The same switch as use_deterministic_algorithms, which imports a compiler for seconds.
        torch.set_deterministic_debug_mode("error")
        # Filling every new tensor with NaN costs a tenth of a step; the tests run with it on.
        deterministic.fill_uninitialized_memory = False
    elif run.precision == "bf16":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        deterministic.fill_uninitialized_memory = fills
        torch.set_float32_matmul_precision(precision)


def _checked_ops(run: RunConfig) -> Ops:
    """Return the operations of the run's device, or refuse it: before anything is read."""
    ops = training_ops(run.device)
    if run.device == "cuda":
        reason = training_unsupported(run.model.text_config, run.sequence_length)
        if reason is not None:
            raise KernelError(f"device=cuda: {reason}; use device=cpu")
    return ops


def build_model(run: RunConfig, model_config: ModelConfig, token_map: torch.Tensor) -> Backbone:
    """Return the run's freshly initialised model, or its baseline of `model_config`, on its device.

    Raises KernelError if the run's device or shapes are nothing for the kernels.
    """
    ops = _checked_ops(run)
    numerics = Numerics(
        cache_rounding=run.cache_rounding, dtype=_DTYPES[run.precision], weight_dtype=torch.float32
    )
    if run.baseline == "dense":
        # It offers what the loop uses of a Backbone, and is none.
        model = cast(Backbone, dense_baseline(model_config, numerics=numerics, ops=ops))
    else:
        config = window_only(model_config) if run.baseline == "window" else model_config
        model = Backbone(config, token_map=token_map, numerics=numerics, ops=ops)
    model.init_weights(run.seed)
    model.to_device(run.device)
    if run.device == "cuda":
        model.stack_experts()
    return model


def build_optimizers(run: RunConfig, model: Backbone) -> Optimizers:
    """Return the optimisers that the run names, on the model's parameters."""
    optim, indexer = run.optim, run.indexer
    return Optimizers(
        model,
        scheme=optim.scheme,
        indexer="frozen" if indexer.form == "frozen" else indexer.optimizer,
        router=optim.router,
        indexer_lr_scale=indexer.lr_scale,
        weight_decay=optim.weight_decay,
        eps=optim.eps,
        beta1=optim.beta1,
        beta2=optim.beta2,
    )


def validate(run: RunConfig, model: Backbone, data: RunData) -> float:
    """Return the model's bits per byte on the run's validation text."""
    return bits_per_byte(
        model,
        data.validation,
        data.validation_bytes,
        chunk_tokens=run.loss_chunk_tokens,
        batch_rows=_same_shape(run),
    )


def _same_shape(run: RunConfig) -> int | None:
    """Return the rows of a pass on a GPU, where another shape would be compiled anew."""
    return run.micro_batch_rows if run.device == "cuda" else None


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

    Writes run.json, metrics.jsonl, TensorBoard events if TensorBoard is installed, PNG plots,
    tokenizer.json and the training state. Raises RunFolderError if `out` holds another run, or a
    state and `resume` is off; TrainingError if a loss or gradient is not finite, a loss jumps, or
    the disk is full.
    """
    out, console = Path(out), console or Console()
    out.mkdir(parents=True, exist_ok=True)
    if (out / STATE_FILE).exists() and not resume:
        raise record.RunFolderError(
            f"{out}: holds a training state; resume it (--resume) or choose another folder"
        )
    with _repeatable(run):
        return _Run(run, out, recipe, console, on_step).go()


class _Run:
    """The objects of one call of `train`."""

    def __init__(self, run: RunConfig, out: Path, recipe, console: Console, on_step) -> None:
        self.run, self.out, self.console, self.on_step = run, out, console, on_step
        _checked_ops(run)
        self.data = prepare_data(run, out)
        resolved = replace(run, model=self.data.model).to_json()
        earlier = record.claim_folder(out, resolved, self.data.digest)
        self.baselines = self.data.baselines()
        self.model = build_model(run, self.data.model, torch.from_numpy(self.data.token_map))
        self.optimizers = build_optimizers(run, self.model)
        self.order = BatchOrder(
            num_rows=self.data.train.num_rows, batch_rows=run.batch_rows, seed=run.seed
        )
        counters = load_state(out, self.model, self.optimizers)
        if counters is None and run.init_from is not None:
            load_weights(Path(run.init_from), self.model)
        self.training = TrainStep(run, self.model, self.optimizers)
        self.step = counters["step"] if counters else 0
        if self.step > run.schedule.steps:
            raise StateError(
                f"{out / STATE_FILE}: step: got {self.step}, expected at most "
                f"{run.schedule.steps}, the steps of this run"
            )
        self.elapsed_before_s = counters["elapsed_s"] if counters else 0.0
        self.saved_step = self.step
        self.metrics = record.Metrics(out, counters["metrics_bytes"] if counters else 0)
        self.events = Events(out, self.step)
        losses = [r.get("loss") for r in record.read_metrics(out)]
        self.recent = [loss for loss in losses if isinstance(loss, float)][-_SPIKE_WINDOW:]
        self.facts = self._facts(resolved, recipe, earlier)
        record.write_json(out / record.RUN_FILE, self.facts)
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
            "device": record.device_name(self.run.device),
            "tensorboard": self.events.is_on,
            "seed": self.run.seed,
            "started": earlier.get("started", now),
            "resumed_at_steps": earlier.get("resumed_at_steps", []) + [self.step] * (self.step > 0),
            "data": {
                **data.facts,
                "train_targets": data.train.num_targets,
                "padding_rate": data.train.padding_rate,
            },
            "baselines": [
                {"name": b.name, "bits_per_byte": b.bits_per_byte, "masses": b.masses}
                for b in self.baselines
            ],
            "optimizers": [
                {**dataclasses.asdict(g.rule), "tensors": len(g.names), "numbers": g.num_parameters}
                for g in self.optimizers.groups
            ],
            "finished": False,
        }

    @property
    def elapsed_s(self) -> float:
        return self.elapsed_before_s + time.perf_counter() - self.started_s

    def _announce(self) -> None:
        run, data = self.run, self.data
        steps, positions = run.schedule.steps, run.batch_rows * run.sequence_length
        lines = [
            f"text: {data.train_bytes:,} bytes to train on, "
            f"{data.validation_bytes:,} held out ({run.data.corpus})",
            f"tokens: {data.train.num_targets:,}, vocabulary {data.vocab_size:,}, "
            f"padding {data.train.padding_rate:.2%}",
            f"model: {sum(p.numel() for p in self.model.parameters()):,} parameters, "
            f"{run.precision} on {record.device_name(run.device)}",
            f"optimisers: {run.optim.scheme}; indexer: {run.indexer.form}",
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
                    values |= self._evaluated(is_last)
                    validation_bpb = values.get("validation_bpb", validation_bpb)
                    values["tokens_per_s"] = round(tokens_per_step / took_s, 1)
                    values["elapsed_s"] = round(self.elapsed_s, 3)
                    self.metrics.write(values)
                    self.events.write(values)
                    if is_last or self.step % self.run.save_every == 0:
                        self._save()
                    left_s = (steps - self.step) * pace_s
                    bar.show(self.step, values["loss"], tokens_per_step / pace_s, left_s)
                    if self.on_step is not None:
                        self.on_step(values)
        finally:
            self.metrics.close()
            self.events.close()
        if validation_bpb is None:
            self.training.enter(steps - 1)
            with self.training.deployed_weights():
                validation_bpb = validate(self.run, self.model, self.data)
        return self._finish(validation_bpb)

    def _one_step(self) -> dict[str, Any]:
        run, step = self.run, self.step
        schedule = run.schedule
        rate = learning_rate(
            step,
            run.optim.lr,
            schedule,
            shape=schedule.shape,
            hold_until=schedule.hold_until,
            decay_until=schedule.decay_until,
        )
        rows = self.order.rows(step)
        batch = Batch.of(self.data.train, rows)
        measured = self.training.gradients(batch, step)
        why = self._refusal(measured)
        if why is not None:
            raise self._stopped(why, batch, rows)
        overuse = self.training.update(rate)
        self.step += 1
        self.recent = [*self.recent[1 - _SPIKE_WINDOW :], measured.loss]
        values: dict[str, Any] = {
            "step": self.step,
            "loss": measured.loss,
            "targets": batch.num_targets,
            "lr": rate,
            "grad_norm": measured.grad_norm,
            "expert_overuse": overuse,
        }
        if measured.index_losses:
            values["index_loss"] = {f"L{k}": v for k, v in measured.index_losses.items()}
            values["index_grad_norm"] = measured.index_grad_norm
        return values

    def _evaluated(self, is_last: bool) -> dict[str, Any]:
        """Return what is due after this step: bits per byte, accuracy of a task, index recall."""
        run, found = self.run, {}
        scores = is_last or (run.eval_every and self.step % run.eval_every == 0)
        every = run.indexer.recall_every
        recalls = self.training.owners and (is_last or (every and self.step % every == 0))
        if not scores and not recalls:
            return found
        with self.training.deployed_weights():
            if scores:
                found["validation_bpb"] = validate(run, self.model, self.data)
                if self.data.is_task:
                    found["answer_accuracy"] = answer_accuracy(
                        self.model, self.data.validation, batch_rows=_same_shape(run)
                    )
            if recalls:
                found["index_recall"] = self._recall()
        return found

    def _recall(self) -> dict[str, float | None]:
        """Return the recall of every indexer on the first validation rows; None: no choice."""
        run = self.run
        found = index_recall(
            self.model,
            self.data.validation,
            sampled=run.indexer.recall_rows,
            num_rows=max(1, 16_384 // run.sequence_length),
            batch_rows=_same_shape(run),
        )
        return {f"L{k}": None if math.isnan(v) else v for k, v in found.items()}

    def _refusal(self, measured: StepMeasures) -> str | None:
        """Return why this step must not be taken, or None."""
        checked = {"loss": measured.loss, "gradient norm": measured.grad_norm}
        checked |= {f"index loss of layer {k}": v for k, v in measured.index_losses.items()}
        checked["index gradient norm"] = measured.index_grad_norm
        for what, value in checked.items():
            if not math.isfinite(value):
                return f"{what} is {value}; start again in another folder with a lower optim.lr"
        factor = self.run.spike_factor
        if factor and len(self.recent) == _SPIKE_WINDOW:
            usual = statistics.median(self.recent)
            if measured.loss > factor * usual:
                return (
                    f"loss {measured.loss:.4g} is more than {factor:g} times {usual:.4g}, the "
                    f"median of the last {_SPIKE_WINDOW} steps; resume with --set spike_factor=0 "
                    "to go on, or start again in another folder with a lower optim.lr"
                )
        return None

    def _stopped(self, why: str, batch: Batch, rows: np.ndarray) -> TrainingError:
        """Return the error of a step that was not taken, its layer found and its batch kept."""
        step = self.step + 1
        try:
            path = diagnose.save_failed_batch(self.out, batch, step=step, rows=rows, why=why)
            batch_in = f"batch in {path}"
        except FileError as error:
            # The step's own message must survive, whatever keeping the batch meets.
            batch_in = f"the batch is lost ({error})"
        try:
            traces = self.training.traces(batch, self.step)
            found = diagnose.first_bad_layer(traces, len(self.model.specs))
        except (RuntimeError, MemoryError) as error:
            # The step's own message must survive, whatever looking for the layer meets.
            found = f"the layer was not found ({error})"
        if "all streams are finite" in found and "norm" in why:
            found = diagnose.bad_gradients(self.model)
        kept = f"; the state after step {self.saved_step} is kept" if self.saved_step else ""
        return TrainingError(f"step {step}: {why}. {found}; {batch_in}{kept}")

    def _save(self) -> None:
        for name, tensor in self.model.trained_tensors().items():
            if not bool(torch.isfinite(tensor).all()):
                kept = f"the state after step {self.saved_step} is kept" if self.saved_step else ""
                raise TrainingError(
                    f"step {self.step}: {name} is not finite after the update, nothing was saved; "
                    f"start again in another folder with a lower optim.lr {kept}".rstrip()
                )
        try:
            save_state(
                self.out,
                self.model,
                self.optimizers,
                step=self.step,
                metrics_bytes=self.metrics.length_bytes,
                elapsed_s=self.elapsed_s,
            )
        except StateError as error:
            raise TrainingError(f"step {self.step}: {error}") from None
        self.saved_step = self.step

    def _finish(self, validation_bpb: float) -> TrainResult:
        record.draw_plots(
            self.out,
            {b.name: b.bits_per_byte for b in self.baselines},
            self.data.train_bytes / self.data.train.num_targets,
            self.data.is_task,
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
