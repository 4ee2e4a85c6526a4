"""The packed loss: documents do not leak, and parts of a batch add up to the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from finwhale.config.presets import unit, with_compressed_vocab
from finwhale.data.packing import NO_TARGET, pack
from finwhale.model import Backbone, Numerics, Packing
from finwhale.ops import FAST
from finwhale.train.loss import Batch, loss_sum

LENGTHS = (3, 34, 2, 12, 18, 8, 21, 9)
CHUNK = 4096


@pytest.fixture(scope="module")
def model() -> Backbone:
    config = with_compressed_vocab(unit(), 512)
    # Cache rounding is a step function: equal up to rounding errors is not equal after it.
    model = Backbone(config, numerics=Numerics(cache_rounding=False), ops=FAST)
    model.init_weights(0)
    return model


def _documents() -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(3, 500, length).tolist() for length in LENGTHS]


def _batch(documents, width: int) -> Batch:
    packed = pack(documents, sequence_length=width, pad_id=2)
    return Batch.of(packed, np.arange(packed.num_rows))


def _gradients(model, losses) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    for loss in losses:
        loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _alone(model, documents) -> list[float]:
    return [float(loss_sum(model, _batch([d], len(d) - 1), chunk_tokens=CHUNK)) for d in documents]


@torch.no_grad()
@pytest.mark.parametrize("width", [33, 50, 99])
def test_packed_loss_equals_the_losses_alone(model, width):
    """Case 127: attention, entries, index and n-grams see one document only."""
    packed = float(loss_sum(model, _batch(_documents(), width), chunk_tokens=CHUNK))
    assert packed == pytest.approx(sum(_alone(model, _documents())), rel=1e-5)


@torch.no_grad()
def test_rows_without_borders_leak(model):
    """Control for case 127: the same rows read as one document each give another loss."""
    batch = _batch(_documents(), 99)
    whole = replace(batch, packing=Packing.whole(*batch.ids.shape))
    leaky = float(loss_sum(model, whole, chunk_tokens=CHUNK))
    assert leaky != pytest.approx(sum(_alone(model, _documents())), rel=1e-4)


def test_one_batch_of_eight_equals_two_of_four(model):
    """Case 124: 1 x 8 and 2 x 4 rows give equal gradients."""
    batch = _batch(_documents() * 3, 34)
    batch = next(batch.parts(8))
    total = batch.num_targets
    once = _gradients(model, [loss_sum(model, batch, chunk_tokens=CHUNK) / total])
    parts = [loss_sum(model, part, chunk_tokens=CHUNK) / total for part in batch.parts(4)]
    assert len(parts) == 2
    twice = _gradients(model, parts)
    assert once.keys() == twice.keys()
    for name, gradient in once.items():
        assert torch.allclose(gradient, twice[name], rtol=1e-3, atol=1e-6), name


def test_a_mean_per_part_would_weigh_parts_alike(model):
    """Control for case 124: parts of 33 and 1 targets must not count alike."""
    batch = _batch([_documents()[1], _documents()[2]], 33)
    parts = list(batch.parts(1))
    assert sorted(part.num_targets for part in parts) == [1, 33]
    sums = [loss_sum(model, part, chunk_tokens=CHUNK) for part in parts]
    right = _gradients(model, [loss_sum(model, batch, chunk_tokens=CHUNK) / batch.num_targets])
    means = [s / part.num_targets / 2 for s, part in zip(sums, parts, strict=True)]
    wrong = _gradients(model, means)
    name = "head.weight"
    difference = (right[name] - wrong[name]).norm() / right[name].norm()
    assert difference > 0.1


@pytest.mark.parametrize("chunk_tokens", [1, 7, 40])
def test_sliced_logits_change_nothing(model, chunk_tokens):
    batch = _batch(_documents()[:3], 40)
    whole = _gradients(model, [loss_sum(model, batch, chunk_tokens=CHUNK)])
    sliced = _gradients(model, [loss_sum(model, batch, chunk_tokens=chunk_tokens)])
    for name, gradient in whole.items():
        assert torch.allclose(gradient, sliced[name], rtol=1e-3, atol=1e-5), name


@torch.no_grad()
def test_loss_by_hand(model):
    """The sum of -log softmax at each target, padding left out."""
    batch = _batch(_documents()[:2], 40)
    logits = model(batch.ids, packing=batch.packing).double()
    log_probability = logits - logits.logsumexp(-1, keepdim=True)
    by_hand = 0.0
    for row, column in np.argwhere(batch.targets.numpy() != NO_TARGET):
        by_hand -= float(log_probability[row, column, batch.targets[row, column]])
    assert float(loss_sum(model, batch, chunk_tokens=CHUNK)) == pytest.approx(by_hand, rel=1e-6)
