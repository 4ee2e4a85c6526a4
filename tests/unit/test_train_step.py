"""One step: parts of a batch add up, a failed step changes nothing, phases follow the step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from finwhale.config import PoolUse
from finwhale.config.presets import unit, with_compressed_vocab
from finwhale.config.run import (
    IndexerConfig,
    OptimConfig,
    QuantizationConfig,
    RunConfig,
    ScheduleConfig,
)
from finwhale.data.packing import NO_TARGET, pack
from finwhale.train.loop import build_model, build_optimizers
from finwhale.train.loss import Batch
from finwhale.train.step import Phase, TrainStep, _clipped, _replay_starts

CONFIG = with_compressed_vocab(unit(), 512)
W = 8


def run_of(form="explored", *, scheme="adamw", **more) -> RunConfig:
    optim = more.pop("optim", OptimConfig(scheme=scheme))
    return RunConfig(
        model=CONFIG,
        **{
            "batch_rows": 4,
            "micro_batch_rows": 4,
            "sequence_length": 40,
            "cache_rounding": False,
            "optim": optim,
            "indexer": IndexerConfig(form=form),
            "schedule": ScheduleConfig(steps=10, warmup_steps=0),
            **more,
        },
    )


def batch_of(seed=0, rows=4) -> Batch:
    generator = np.random.default_rng(seed)
    lengths = (41, 30, 9, 25, 14, 38)
    documents = [generator.integers(3, 500, n).tolist() for n in lengths]
    packed = pack(documents, sequence_length=40, pad_id=2)
    assert packed.num_rows >= rows
    return Batch.of(packed, np.arange(rows))


def training_of(run: RunConfig) -> TrainStep:
    model = build_model(run, CONFIG, torch.arange(512))
    return TrainStep(run, model, build_optimizers(run, model))


def weights(training) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in training.model.state_dict().items()}


def gradients(training) -> dict[str, torch.Tensor]:
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in training.model.named_parameters()
    }


def optimizer_tensors(training) -> list[torch.Tensor]:
    found = []
    for optimizer in training.optimizers.state_dict()["optimizers"].values():
        for state in optimizer["state"].values():
            found += [v.clone() for v in state.values() if isinstance(v, torch.Tensor)]
    return found


@pytest.mark.parametrize("form", ["explored", "annealed", "frozen", "sampled_rows", "combined"])
def test_parts_of_a_batch_add_up_to_the_whole(form):
    """Also the balance losses of report and bias: they are sums over rows and tokens."""
    # Gradients are not clipped, so that their sizes are compared too.
    optim = OptimConfig(scheme="adamw", grad_clip=1e9, sequence_balance=0.01)
    found = []
    for rows in (4, 2, 1):
        training = training_of(run_of(form, optim=optim, micro_batch_rows=rows))
        measured = training.gradients(batch_of(), 0)
        found.append((measured, gradients(training), training.update(1e-3)))
        if form != "explored" and rows == 2:
            break
    whole, whole_gradients, whole_overuse = found[0]
    for measured, split, overuse in found[1:]:
        assert measured.loss == pytest.approx(whole.loss, rel=1e-5)
        assert measured.index_losses == pytest.approx(whole.index_losses, rel=1e-4)
        assert measured.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
        assert overuse == whole_overuse
        for name, gradient in whole_gradients.items():
            torch.testing.assert_close(split[name], gradient, rtol=2e-3, atol=2e-6, msg=name)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_step_leaves_the_callers_batch_alone_and_repeats(rows):
    training = training_of(run_of(micro_batch_rows=rows))
    batch = batch_of()
    kept = batch.ids.clone(), batch.targets.clone(), batch.packing.positions.clone()
    first = training.gradients(batch, 0)
    training.gradients(batch_of(1), 0)
    again = training.gradients(batch, 0)
    assert torch.equal(batch.ids, kept[0])
    assert torch.equal(batch.targets, kept[1])
    assert torch.equal(batch.packing.positions, kept[2])
    assert again == first


def test_measures_are_means_over_the_steps_targets():
    """A uniform model needs ln 512 nats per target, however many rows and padding there are."""
    training = training_of(run_of(micro_batch_rows=1))
    with torch.no_grad():
        training.model.head.weight.zero_()
    for rows in (1, 3):
        batch = batch_of(rows=rows)
        assert training.gradients(batch, 0).loss == pytest.approx(math.log(512), rel=1e-5)


def test_clipping_by_hand_and_apart_for_backbone_and_indexer():
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.tensor([3.0, 0.0])
    parameters[1].grad = torch.tensor([4.0])
    assert float(_clipped(parameters, 10.0)) == 5.0
    assert parameters[0].grad.tolist() == [3.0, 0.0]
    assert float(_clipped(parameters, 1.0)) == 5.0
    assert torch.cat([p.grad for p in parameters]).tolist() == pytest.approx([0.6, 0.0, 0.8])
    parameters[1].grad = None
    assert float(_clipped(parameters, 1.0)) == pytest.approx(0.6)
    assert parameters[1].grad.tolist() == [0.0]
    optim = OptimConfig(scheme="adamw", grad_clip=1e-3)
    training = training_of(run_of(optim=optim))
    measured = training.gradients(batch_of(), 0)
    for part, before in (("backbone", measured.grad_norm), ("indexer", measured.index_grad_norm)):
        grads = [p.grad.flatten() for p in training.optimizers.parameters_of(part)]
        assert before > 1e-3
        assert float(torch.cat(grads).norm()) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_step_whose_loss_is_no_number_changes_nothing(quantized):
    more = {"quantization": QuantizationConfig(start=0.0, replay=0.5)} if quantized else {}
    training = training_of(run_of(scheme="report", micro_batch_rows=2, **more))
    training.gradients(batch_of(), 0)
    training.update(1e-3)
    with torch.no_grad():
        training.model.layers[1].attn.wkv.weight[0, 0] = float("nan")
    before, memory = weights(training), optimizer_tensors(training)
    measured = training.gradients(batch_of(1), 1)
    assert math.isnan(measured.loss)
    after = weights(training)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value.nan_to_num(7.0), after[name].nan_to_num(7.0)), name
    assert len(memory) == len(optimizer_tensors(training)) > 0
    assert all(map(torch.equal, memory, optimizer_tensors(training)))


def test_the_first_layer_that_is_not_finite_is_named():
    from finwhale.train import diagnose

    training = training_of(run_of())
    batch = batch_of()

    def found_now() -> str:
        return diagnose.first_bad_layer(training.traces(batch, 0), len(training.model.specs))

    assert "all streams are finite; the largest, " in found_now()
    assert diagnose.bad_gradients(training.model) == "every gradient is finite"
    with torch.no_grad():
        training.model.layers[5].ffn.shared_experts.w2.weight[3, 0] = float("inf")
    found = found_now()
    assert found.startswith("layer 5 is the first that is not finite, in row 0 at position")
    with torch.no_grad():
        training.model.embed.weight[int(batch.ids[2, 5])] = float("nan")
    found = found_now()
    row, position = (batch.ids == batch.ids[2, 5]).nonzero()[0].tolist()
    want = f"the embedding is the first that is not finite, in row {row} at position {position}"
    assert found == want
    for n in (1, 2, 3, 4):
        training.model.layers[n].attn.wkv.weight.grad = torch.full((1,), torch.nan).expand(64, 64)
    assert diagnose.bad_gradients(training.model).endswith("layers.3.attn.wkv.weight and 1 more")


def test_phases_by_hand():
    run = run_of(
        "annealed",
        schedule=ScheduleConfig(steps=10, warmup_steps=0),
        indexer=IndexerConfig(form="annealed", phase=0.4),
        quantization=QuantizationConfig(start=0.75, replay=0.5),
    )
    phases = [Phase.at(run, step) for step in range(10)]
    # 40 entries at ratio 1, top-k 8; four steps of annealing; 0.75 * 10 is in step 7.
    assert [p.index.topk for p in phases[:5]] == [40, 27, 18, 12, 8]
    assert [p.quantized for p in phases] == [False] * 7 + [True] * 3
    assert [p.replay for p in phases] == [False] * 7 + [True] * 3
    never = Phase.at(replace(run, quantization=QuantizationConfig()), 9)
    assert not never.quantized
    assert not never.replay


def test_quantised_phase_rounds_caches_and_searches_the_pool():
    run = run_of(quantization=QuantizationConfig(start=0.5))
    training = training_of(run)
    training.gradients(batch_of(), 4)
    assert not training.model.numerics.cache_rounding
    assert not training._plan(Phase.at(run, 4), None).uses_pool
    training.gradients(batch_of(), 5)
    assert training.model.numerics.cache_rounding
    plan = training._plan(Phase.at(run, 5), None)
    assert plan.uses_pool
    assert plan.decoder_replay_start is None


def test_replay_starts_lie_one_window_before_an_end_inside_the_document():
    run = run_of(quantization=QuantizationConfig(start=0.0, replay=1.0))
    batch = batch_of()
    seen = set()
    for step in range(200):
        starts = _replay_starts(batch, run, step)
        assert np.array_equal(starts, _replay_starts(batch, run, step))
        for encoder, decoder, lengths in zip(*starts, batch.packing.lengths, strict=True):
            at = 0
            for length in lengths:
                whole = slice(at, at + length)
                (first,), (start,) = set(encoder[whole].tolist()), set(decoder[whole].tolist())
                if length <= W:
                    assert min(first, start) > 40
                else:
                    assert 0 <= first <= start < length - W
                    seen.add(start)
                at += length
    assert seen >= {0, 1, 31}
    assert len(seen) > 25
    none = replace(run, quantization=QuantizationConfig(start=0.0, replay=0.0))
    assert (_replay_starts(batch, none, 0) > 40).all()


@pytest.mark.parametrize(
    "form", ["selected", "explored", "dense_warmup", "dense_combined", "combined", "frozen"]
)
def test_every_form_takes_a_step_that_lowers_its_losses(form):
    """Many steps on one batch: the loss and, where it is taught, every indexer's loss fall."""
    run = run_of(form, optim=OptimConfig(scheme="adamw", lr=3e-3))
    training = training_of(run)
    before = weights(training)
    measured = []
    for _ in range(4):
        measured.append(training.gradients(batch_of(), 3))
        training.update(3e-3)
    assert measured[-1].loss < measured[0].loss
    after = weights(training)
    moved = {n for n in before if ".indexer." in n and not torch.equal(before[n], after[n])}
    if form == "frozen":
        assert not moved
        assert measured[0].index_losses == {}
        return
    assert moved == {n for n in before if ".indexer." in n}
    assert list(measured[0].index_losses) == training.owners
    total = [sum(m.index_losses.values()) for m in measured]
    assert all(map(math.isfinite, total))


def test_explored_steps_differ_from_step_to_step_and_repeat_by_seed():
    training = training_of(run_of("explored"))
    one, two = (training.gradients(batch_of(), step).index_losses for step in (0, 1))
    assert one != two
    assert training.gradients(batch_of(), 0).index_losses == one
    selected = training_of(run_of("selected"))
    one, two = (selected.gradients(batch_of(), step).index_losses for step in (0, 1))
    assert one == two


def test_pool_teacher_works_in_the_deployed_formats():
    """Only the builder's loss depends on it, and it falls."""
    found = {}
    for teacher in ("own", "searchers"):
        indexer = IndexerConfig(form="combined", rows=20, pool_teacher=teacher, answer_rows=0.5)
        formats = QuantizationConfig(start=0.0, replay=0.5)
        training = training_of(run_of(indexer=indexer, quantization=formats))
        losses = []
        for _ in range(6):
            losses.append(training.gradients(batch_of(), 3).index_losses)
            training.update(3e-3)
        found[teacher] = losses
    builder = next(s.layer_id for s in training.model.specs if s.pool is PoolUse.BUILDS)
    first = {teacher: losses[0] for teacher, losses in found.items()}
    assert {o for o in first["own"] if first["own"][o] != first["searchers"][o]} == {builder}
    assert found["searchers"][-1][builder] < found["searchers"][0][builder]


def test_a_share_of_the_taught_rows_asks_for_something():
    """Of a text nothing does, and the rows are those that are drawn anyway."""
    text = batch_of()
    targets = text.targets.clone()
    targets[:, ::3] = NO_TARGET
    tasks = replace(text, targets=targets)
    found = {}
    for share in (0.0, 1.0):
        indexer = IndexerConfig(form="sampled_rows", rows=6, answer_rows=share)
        training = training_of(run_of(indexer=indexer))
        found[share] = [training.gradients(b, 3).index_losses for b in (text, tasks)]
    assert found[1.0][0] == found[0.0][0]
    assert all(found[1.0][1][o] != found[0.0][1][o] for o in training.owners)
