"""What is measured on held-out rows: bits per byte, right answers of a task, recall per indexer.

bits per byte = sum of -log2 p(target) / bytes of the documents' text. Every token of a document
and its end marker is a target, the begin marker is not: what the n-gram baselines are scored on.
Documents longer than the row are cut as in training, so later pieces start without context. For a
task the targets are the answers, and the figure is bits per answer token.

Recall of an indexer is the share of the teacher's mass on the k entries with its best scores,
averaged over sampled queries that have more than k to choose from. The teacher is the full row:
every visible entry in one softmax with window and sink, summed over heads and over the layers that
use the selection. Accuracy does not show it: one good index can carry a net whose others never
learned.
Source: spec/training.md II.4.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from finwhale.data.packing import NO_TARGET, PackedRows
from finwhale.model import Backbone
from finwhale.model.selection_plan import SelectionPlan
from finwhale.train.index_objective import IndexObjective, sampled_rows
from finwhale.train.loss import Batch, loss_sum

# Tokens of one forward pass.
_PASS_TOKENS = 4096


def _batches(
    model: Backbone, packed: PackedRows, batch_rows: int | None, num_rows: int | None = None
) -> Iterator[tuple[Batch, SelectionPlan | None]]:
    """Yield the first `num_rows` rows (None: all) in batches on the model's device, and the plan.

    On a GPU every batch has `batch_rows` rows, the shape of training, which is compiled already;
    the last is filled up with rows that have no target. There the deployed selection is asked for
    as a plan, whose passes ask the device nothing.
    """
    device = model.embed.weight.device.type
    total = packed.num_rows if num_rows is None else min(num_rows, packed.num_rows)
    size = batch_rows or max(1, _PASS_TOKENS // packed.inputs.shape[1])
    for start in range(0, total, size):
        rows = np.arange(start, min(start + size, total))
        if device == "cpu":
            yield Batch.of(packed, rows), None
            continue
        batch = Batch.of(packed, np.resize(rows, size))
        batch.targets[len(rows) :] = NO_TARGET
        yield batch.prepared(_ratios(model), device), SelectionPlan(uses_pool=True)


def _ratios(model: Backbone) -> tuple[int, ...]:
    return tuple(sorted({spec.ratio for spec in model.specs if spec.ratio}))


def bits_per_byte(
    model: Backbone,
    packed: PackedRows,
    num_bytes: int,
    *,
    chunk_tokens: int,
    batch_rows: int | None = None,
) -> float:
    """Return the bits the model needs for all targets of `packed`, per byte of its text."""
    nats = 0.0
    with torch.no_grad():
        for batch, plan in _batches(model, packed, batch_rows):
            nats += float(loss_sum(model, batch, chunk_tokens=chunk_tokens, plan=plan))
    return nats / math.log(2) / num_bytes


def answer_accuracy(model: Backbone, packed: PackedRows, *, batch_rows: int | None = None) -> float:
    """Return the share of targets that the model ranks first."""
    right = total = 0
    with torch.no_grad():
        for batch, plan in _batches(model, packed, batch_rows):
            hidden = model.hidden(batch.ids, packing=batch.packing, plan=plan)
            has_target = batch.targets != NO_TARGET
            best = model.logits(hidden[has_target]).argmax(-1)
            right += int((best == batch.targets[has_target]).sum())
            total += int(has_target.sum())
    return right / max(1, total)


def index_recall(
    model: Backbone,
    packed: PackedRows,
    *,
    sampled: int,
    num_rows: int,
    batch_rows: int | None = None,
) -> dict[int, float]:
    """Return the recall of every indexer by owner layer; NaN where no query had a choice.

    sampled   query rows of each packed row
    num_rows  packed rows that are read
    """
    owners = [spec.layer_id for spec in model.specs if spec.owns_topk]
    sums, counts = dict.fromkeys(owners, 0.0), dict.fromkeys(owners, 0)
    device = model.embed.weight.device
    for number, (batch, _) in enumerate(_batches(model, packed, batch_rows, num_rows)):
        batch = batch.prepared(_ratios(model), device.type)
        seed = torch.tensor(number, device=device)
        objective = IndexObjective(
            live=batch.targets != NO_TARGET,
            rows=sampled_rows(seed, batch.ids, sampled),
            learns_selected=False,
            learns_rows=True,
        )
        with torch.no_grad():
            plan = SelectionPlan(observer=objective)
            model.hidden(batch.ids, packing=batch.packing, plan=plan)
        found = objective.recalls(model.config.text_config.index_topk)
        for owner, (share, count) in found.items():
            sums[owner] += float(share)
            counts[owner] += int(count)
    return {o: sums[o] / counts[o] if counts[o] else float("nan") for o in owners}
