"""Training in the stored formats: what a pass reads is what the checkpoint gives back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.save import save_checkpoint
from finwhale.config.inventory import Storage, checkpoint_tensors
from finwhale.config.presets import unit, with_compressed_vocab
from finwhale.config.run import (
    IndexerConfig,
    OptimConfig,
    QuantizationConfig,
    RunConfig,
    ScheduleConfig,
)
from finwhale.data.packing import pack
from finwhale.model import Backbone, Numerics
from finwhale.ops import FAST
from finwhale.ops.weight_formats import (
    QUANTIZED,
    dequantize_weight,
    quantize_weight,
    round_weight,
)
from finwhale.train.loop import build_model, build_optimizers
from finwhale.train.loss import Batch, loss_sum
from finwhale.train.step import TrainStep
from finwhale.train.stored_weights import StoredWeights, rounded_as_stored

CONFIG = with_compressed_vocab(unit(), 512)


def fresh(seed=0) -> Backbone:
    model = Backbone(CONFIG, numerics=Numerics(), ops=FAST)
    model.init_weights(seed)
    return model


def values(model) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def reloaded(model, folder) -> Backbone:
    save_checkpoint(model, folder, quantized=True)
    return load_model(
        folder,
        token_map=torch.arange(512),
        numerics=Numerics(dtype=torch.float32),
        ops=FAST,
    ).model


@pytest.mark.parametrize("storage", QUANTIZED, ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(1, 2), (31, 64), (32, 32), (33, 66), (64, 34), (95, 96)])
def test_round_weight_equals_storing_and_reading_back(storage, shape):
    g = torch.Generator().manual_seed(sum(shape))
    size = torch.exp2(torch.randint(-20, 10, shape, generator=g).float())
    weight = torch.randn(shape, generator=g) * size
    weight[0] = 0.0
    want = dequantize_weight(*quantize_weight(weight, storage), dtype=torch.float32)
    got = round_weight(weight, storage)
    assert torch.equal(got, want)
    assert torch.equal(round_weight(got, storage), got)
    assert not torch.equal(got, weight) or not weight.any()


@pytest.mark.parametrize("storage", [*QUANTIZED, Storage.BF16], ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(3, 32, 64), (3, 33, 64), (2, 64, 34), (1, 1, 32)])
def test_a_batch_of_weights_is_rounded_one_by_one(storage, shape):
    """Blocks of 32 x 32 must not straddle two matrices, whatever their heights."""
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weights *= torch.tensor([1.0, 300.0, 0.01][: shape[0]])[:, None, None]
    got = rounded_as_stored(weights, storage)
    for one, rounded in zip(weights, got, strict=True):
        if storage is Storage.BF16:
            assert torch.equal(rounded, one.bfloat16().float())
        else:
            assert torch.equal(rounded, round_weight(one, storage))


def test_taken_weights_equal_the_checkpoint_read_back(tmp_path):
    model = fresh()
    masters = values(model)
    loaded = values(reloaded(model, tmp_path / "saved"))
    stored = StoredWeights(model)
    stored.take()
    taken = values(model)
    assert taken.keys() == loaded.keys()
    for name, value in taken.items():
        assert torch.equal(value, loaded[name].float()), name
    stored.give_back()
    back = values(model)
    assert all(torch.equal(back[n], masters[n]) for n in masters)
    # Control: rounding moved every kind of storage that it should.
    kinds = {s.name: s.storage for s in checkpoint_tensors(CONFIG, quantized=True)}
    moved = {kinds[n] for n in masters if not torch.equal(taken[n], masters[n])}
    assert moved >= {Storage.FP8_BLOCK, Storage.FP4_ROW, Storage.BF16}
    assert all(torch.equal(taken[n], masters[n]) for n in masters if kinds[n] is Storage.F32)


def test_masters_return_after_a_block_that_fails_and_follow_updates():
    model = fresh()
    stored = StoredWeights(model)
    with torch.no_grad():
        model.embed.weight += 0.001  # an update behind the object's back
        model.layers[1].attn.wq_a.weight *= 1.01
    masters = values(model)

    def fail() -> None:
        with stored.in_place():
            assert not torch.equal(values(model)["embed.weight"], masters["embed.weight"])
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert all(torch.equal(value, masters[n]) for n, value in values(model).items())


def run_of(**more) -> RunConfig:
    return RunConfig(
        model=CONFIG,
        batch_rows=2,
        micro_batch_rows=1,
        sequence_length=40,
        schedule=ScheduleConfig(steps=4, warmup_steps=0),
        indexer=IndexerConfig(form="explored"),
        quantization=QuantizationConfig(start=0.5, replay=0.5),
        optim=OptimConfig(scheme="adamw"),
        **more,
    )


def batch_of(seed=0) -> Batch:
    generator = np.random.default_rng(seed)
    documents = [generator.integers(3, 500, n).tolist() for n in (41, 25, 14)]
    packed = pack(documents, sequence_length=40, pad_id=2)
    return Batch.of(packed, np.arange(2))


def test_trained_in_stored_formats_then_saved_and_loaded_gives_the_same_loss(tmp_path):
    run = run_of()
    model = build_model(run, CONFIG, torch.arange(512))
    training = TrainStep(run, model, build_optimizers(run, model))
    for step in (2, 3):
        training.gradients(batch_of(step), step)
        training.update(1e-3)
    assert model.numerics.cache_rounding
    loaded = reloaded(model, tmp_path / "saved")
    with torch.no_grad():
        with StoredWeights(model).in_place():
            trained = float(loss_sum(model, batch_of(9), chunk_tokens=4096))
        deployed = float(loss_sum(loaded, batch_of(9), chunk_tokens=4096))
        masters = float(loss_sum(model, batch_of(9), chunk_tokens=4096))
    assert trained == deployed
    assert masters != deployed


def test_a_quantised_step_reads_stored_weights_and_moves_the_masters():
    """Its loss is the stored weights' loss, and small updates are not lost in a rounding bin."""
    run = run_of(cache_rounding=True)
    model = build_model(run, CONFIG, torch.arange(512))
    training = TrainStep(run, model, build_optimizers(run, model))
    masters = values(model)
    measured = training.gradients(batch_of(), 2)
    assert all(torch.equal(value, masters[n]) for n, value in values(model).items())
    first = training.gradients(batch_of(), 1)
    assert measured.loss != first.loss
    training.gradients(batch_of(), 2)
    training.update(1e-6)
    name = "layers.1.attn.wq_a.weight"
    assert not torch.equal(values(model)[name], masters[name])
    now, before = (round_weight(v[name], Storage.FP8_BLOCK) for v in (values(model), masters))
    assert float((now == before).float().mean()) > 0.99
