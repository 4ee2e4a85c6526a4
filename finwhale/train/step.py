"""One optimisation step: gradients over the parts of a batch, checked, clipped, applied.

The same code runs eagerly on a CPU and as a few CUDA graphs on a GPU: first pass, later passes,
norms, update. The host looks at the losses and norms between the passes and the update, so a step
that went wrong changes nothing. What a pass does differently at this step (entries selected,
formats, replay) is a `Phase`, a value: every phase has its own graph.
Source: spec/training.md sections 1, II.4.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finwhale.config.run import RunConfig
from finwhale.model import Backbone, Packing
from finwhale.model.packing import Groups
from finwhale.model.selection_plan import SelectionPlan
from finwhale.optim.optimizers import Optimizers
from finwhale.train.balance import ExpertBalance
from finwhale.train.captured import Captured
from finwhale.train.index_objective import (
    IndexObjective,
    IndexSchedule,
    answer_positions,
    answer_rows,
    sampled_rows,
)
from finwhale.train.loss import Batch, loss_sum
from finwhale.train.stored_weights import StoredWeights

# A replay that starts here never does.
_NO_REPLAY = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What the passes of one step do; equal phases share a graph."""

    index: IndexSchedule
    quantized: bool
    replay: bool

    @classmethod
    def at(cls, run: RunConfig, step: int) -> Phase:
        """Return the phase of step `step` (from 0)."""
        quantization, steps = run.quantization, run.schedule.steps
        quantized = quantization.start < 1 and step >= int(quantization.start * steps)
        ratios = [r for r in run.model.text_config.compress_ratios if r]
        entries = run.sequence_length // min(ratios) if ratios else 0
        topk = run.model.text_config.index_topk
        index = IndexSchedule.at(run.indexer, step, steps, topk, entries)
        if quantized:
            # The deployed selection: the pool would be pointless beside entries from everywhere.
            index = replace(index, topk=min(topk, entries), explore=0)
        return cls(
            index=index,
            quantized=quantized,
            replay=quantized and quantization.replay > 0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasures:
    """What a step's passes gave, read from the device once.

    loss              mean next-token loss over the step's targets, nats
    index_losses      mean loss of each indexer over the step's tokens, by owner layer
    grad_norm         of all parameters but the indexers'; index_grad_norm of theirs
    """

    loss: float
    index_losses: dict[int, float]
    grad_norm: float
    index_grad_norm: float


class TrainStep:
    """The step of one run: `gradients`, then `update`.

    `owners` are the layers whose indexers select; a model without any has none.
    """

    def __init__(self, run: RunConfig, model: Backbone, optimizers: Optimizers) -> None:
        self.run, self.model, self.optimizers = run, model, optimizers
        self.device = torch.device(run.device)
        self.owners = [s.layer_id for s in model.specs if s.owns_topk]
        self.ratios = tuple(sorted({s.ratio for s in model.specs if s.ratio}))
        self.balance = ExpertBalance(
            model, run.optim.balance_rate, loss_weight=run.optim.sequence_balance
        )
        self._captured = Captured(run.device == "cuda" and run.cuda_graph)
        # A dense baseline has no stored formats: it stays in full precision throughout.
        is_stored = run.quantization.start < 1 and run.baseline != "dense"
        self._stored = StoredWeights(model) if is_stored else None
        shape = (run.micro_batch_rows, run.sequence_length)
        self._inputs = _Inputs.empty(*shape, self.ratios, run.device)
        self._backbone = optimizers.parameters_of("backbone")
        self._indexer = optimizers.parameters_of("indexer")
        self._lr = torch.zeros((), device=self.device)
        self._inverse = torch.zeros((), device=self.device)
        self._inverse_tokens = torch.zeros((), device=self.device)
        self._phase: Phase | None = None

    def gradients(self, batch: Batch, step: int) -> StepMeasures:
        """Leave clipped gradients of `batch` in the parameters; return what was measured.

        Nothing else changes: after a loss or norm that is not finite the model is as before.
        """
        values = self.launch_gradients(batch, step).tolist()
        learned = self.owners if Phase.at(self.run, step).index.learns else []
        return StepMeasures(
            loss=values[0],
            index_losses=dict(zip(learned, values[1:], strict=False)),
            grad_norm=values[-2],
            index_grad_norm=values[-1],
        )

    def launch_gradients(self, batch: Batch, step: int) -> Tensor:
        """Start what `gradients` does; returns losses and the two norms, still on the device."""
        phase = self.enter(step)
        measured: list[Tensor] = []
        with self.deployed_weights():
            for number, _ in enumerate(self._loaded(batch, step, phase)):
                is_first = number == 0
                found = self._captured(
                    ("pass", is_first), lambda is_first=is_first: self._pass(phase, is_first)
                )
                # The next replay overwrites what this one gave.
                measured.append(found.clone())
        return torch.cat((torch.stack(measured).sum(0), self._captured("norms", self._clip)))

    def traces(self, batch: Batch, step: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (first row, trace of the streams) of every part: the passes, forward only."""
        phase = self.enter(step)
        with self.deployed_weights(), torch.no_grad():
            for first_row in self._loaded(batch, step, phase):
                trace: dict[str, Any] = {}
                packing, plan = self._inputs.batch.packing, self._plan(phase, None)
                self.model.hidden(self._inputs.batch.ids, packing=packing, plan=plan, trace=trace)
                yield first_row, trace

    def _loaded(self, batch: Batch, step: int, phase: Phase) -> Iterator[int]:
        """Load the parts of a batch one after the other; yield the first row of each."""
        self._inverse.fill_(1.0 / max(1, batch.num_targets))
        self._inverse_tokens.fill_(1.0 / max(1, int(batch.is_token.sum())))
        replay = _replay_starts(batch, self.run, step) if phase.replay else None
        row = 0
        for part in batch.parts(self.run.micro_batch_rows):
            rows = slice(row, row + len(part.ids))
            self._inputs.load(
                part.prepared(self.ratios, "cpu"),
                seed=(self.run.seed << 32) + step,
                first_row=row,
                replay_starts=None if replay is None else replay[:, rows],
            )
            yield row
            row = rows.stop

    def update(self, lr: float) -> float:
        """Step the optimisers and the expert balance; return the largest expert over-use."""
        return float(self.launch_update(lr))

    def enter(self, step: int) -> Phase:
        """Begin step `step`: its formats become the model's, a new phase drops the old graphs."""
        phase = Phase.at(self.run, step)
        self._captured.begin_step()
        if phase != self._phase:
            # Every graph reads the gradients that the graph of the first pass makes.
            self._captured.forget()
            self.model.round_cache(self.run.cache_rounding or phase.quantized)
            self._phase = phase
        return phase

    @contextmanager
    def deployed_weights(self) -> Iterator[None]:
        """Give the model its stored weights inside the block, if the present phase has them.

        An evaluation belongs in it too: it is what a saved checkpoint will score.
        """
        if self._stored is None or self._phase is None or not self._phase.quantized:
            yield
            return
        self._captured("take stored weights", self._stored.take)
        try:
            yield
        finally:
            self._captured("give masters back", self._stored.give_back)

    def launch_update(self, lr: float) -> Tensor:
        """Start the update; returns the largest expert over-use, []."""
        self._lr.fill_(lr)
        return self._captured("update", self._update)

    def _plan(self, phase: Phase, observer: IndexObjective | None) -> SelectionPlan:
        """Return the selection plan of a pass over the loaded inputs."""
        inputs = self._inputs
        return SelectionPlan(
            topk=phase.index.topk,
            explore=phase.index.explore,
            explore_seed=inputs.seed,
            uses_pool=phase.quantized,
            encoder_replay_start=inputs.replay_starts[0] if phase.replay else None,
            decoder_replay_start=inputs.replay_starts[1] if phase.replay else None,
            observer=observer,
            router_observer=self.balance,
        )

    def _pass(self, phase: Phase, is_first: bool) -> Tensor:
        """Run one part forward and backward; return [1 + owners] mean losses, detached."""
        if is_first:
            self.optimizers.zero_grad(set_to_none=True)
            self.balance.clear()
        inputs, run = self._inputs, self.run
        batch, index = inputs.batch, phase.index
        # Padding teaches nothing; a token without a target attends and is routed like any other.
        live = batch.is_token
        count = run.indexer.rows if index.learns_rows else 0
        asking = round(run.indexer.answer_rows * count)
        rows = sampled_rows(inputs.seed, batch.ids, count - asking, inputs.first_row)
        if asking:
            is_answer = answer_positions(batch.targets, live, batch.packing.positions)
            chosen = answer_rows(inputs.seed, is_answer, asking, inputs.first_row)
            rows = torch.cat((rows, chosen), dim=1)
        observer = None
        if index.learns:
            observer = IndexObjective(
                live=live,
                rows=rows,
                learns_selected=index.learns_selected,
                learns_rows=index.learns_rows,
                teaches_pool=run.indexer.pool_teacher == "searchers",
            )
        self.balance.watch(live)
        plan = self._plan(phase, observer)
        loss = loss_sum(self.model, batch, chunk_tokens=run.loss_chunk_tokens, plan=plan)
        learned = observer.losses() if observer else {}
        extra = run.indexer.weight * sum(learned.values())
        balance = self.balance.loss()
        if balance is not None:
            extra = extra + balance
        (loss * self._inverse + extra * self._inverse_tokens).backward()
        zero = torch.zeros_like(loss)
        # An owner without any entry in this batch has nothing to learn.
        own = [learned.get(owner, zero) for owner in self.owners] if index.learns else []
        return torch.stack(
            [loss.detach() * self._inverse, *(x.detach() * self._inverse_tokens for x in own)]
        )

    def _clip(self) -> Tensor:
        norms = [
            _clipped(parameters, self.run.optim.grad_clip) if parameters else self._lr.new_zeros(())
            for parameters in (self._backbone, self._indexer)
        ]
        return torch.stack(norms)

    def _update(self) -> Tensor:
        self.optimizers.step(self._lr)
        return self.balance.update()


def _clipped(parameters: list[Tensor], limit: float) -> Tensor:
    """Scale the gradients down to an L2 norm of `limit`; return the norm before."""
    grads = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grads.append(parameter.grad)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    # A norm that is no number must not hide which gradient made it so.
    torch._foreach_mul_(grads, (limit / norm.clamp_min(1e-12)).clamp_max(1.0).nan_to_num(nan=1.0))
    return norm


def _replay_starts(batch: Batch, run: RunConfig, step: int) -> np.ndarray:
    """Return [2, B, T] int64: where simulated replays of encoder and decoder start in a document.

    In a share `quantization.replay` of the rows every document longer than the window gets a prompt
    end drawn evenly behind its first window, where the decoder's replay ends, and a prefix end at
    or before it, where the encoder's does; each starts one window before its end.
    """
    window = run.model.text_config.sliding_window
    drawn = np.random.default_rng((run.seed, step, 7))
    starts = np.full((2, *batch.ids.shape), _NO_REPLAY, dtype=np.int64)
    for row, lengths in enumerate(batch.packing.lengths):
        cut = drawn.random() < run.quantization.replay
        at = 0
        for length in lengths:
            prompt_end = int(drawn.integers(window, max(window + 1, length)))
            prefix_end = int(drawn.integers(window, prompt_end + 1))
            if cut and length > window:
                starts[0, row, at : at + length] = prefix_end - window
                starts[1, row, at : at + length] = prompt_end - window
            at += length
    return starts


@dataclass(kw_only=True, slots=True)
class _Inputs:
    """Tensors that every pass reads; `load` overwrites them in place.

    batch         ids and targets [B, T] and the prepared packing, on the run's device
    ratios        of the packing's groups
    seed          [] int64 of the step
    first_row     [] int64, the part's first row in its batch
    replay_starts [2, B, T] int64, of the encoder's and of the decoder's replay
    """

    batch: Batch
    ratios: tuple[int, ...]
    seed: Tensor
    first_row: Tensor
    replay_starts: Tensor

    @classmethod
    def empty(cls, rows: int, tokens: int, ratios: tuple[int, ...], device: str) -> _Inputs:
        """Return the tensors of a part of `rows` rows of `tokens` positions."""
        ids = torch.zeros(rows, tokens, dtype=torch.int64)
        batch = Batch(
            ids=ids,
            targets=ids.clone(),
            is_token=torch.ones_like(ids, dtype=torch.bool),
            packing=Packing.whole(rows, tokens),
        )
        return cls(
            batch=batch.prepared(ratios, device),
            ratios=ratios,
            seed=torch.zeros((), dtype=torch.int64, device=device),
            first_row=torch.zeros((), dtype=torch.int64, device=device),
            replay_starts=torch.full((2, rows, tokens), _NO_REPLAY, device=device),
        )

    def load(
        self, batch: Batch, *, seed: int, first_row: int, replay_starts: np.ndarray | None
    ) -> None:
        self.seed.fill_(seed)
        self.first_row.fill_(first_row)
        pairs: list[tuple[Any, Any]] = [
            (self.batch.ids, batch.ids),
            (self.batch.targets, batch.targets),
            (self.batch.is_token, batch.is_token),
            (self.batch.packing.positions, batch.packing.positions),
        ]
        if replay_starts is not None:
            pairs.append((self.replay_starts, torch.from_numpy(replay_starts)))
        for ratio in self.ratios:
            kept, groups = self.batch.packing.groups(ratio), batch.packing.groups(ratio)
            pairs += [(getattr(kept, f.name), getattr(groups, f.name)) for f in fields(Groups)]
        for kept, new in pairs:
            kept.copy_(new)
