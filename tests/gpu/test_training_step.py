"""The training step on a GPU equals the CPU's, a graph equals eager, a repeat equals the first."""

import dataclasses

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

from finwhale.config import preset  # noqa: E402
from finwhale.config.presets import with_compressed_vocab  # noqa: E402
from finwhale.config.run import IndexerConfig, OptimConfig, QuantizationConfig, RunConfig  # noqa: E402
from finwhale.data.packing import pack  # noqa: E402
from finwhale.train.loop import build_model, build_optimizers  # noqa: E402
from finwhale.train.loss import Batch  # noqa: E402
from finwhale.train.step import TrainStep  # noqa: E402


def run_of(device, precision="fp32", graph=True, form="explored", scheme="report", micro=2, **more):
    model = with_compressed_vocab(preset("unit"), 512)
    return RunConfig(
        model=model,
        device=device,
        precision=precision,
        cuda_graph=graph,
        batch_rows=4,
        micro_batch_rows=micro,
        sequence_length=64,
        cache_rounding=False,
        optim=OptimConfig(scheme=scheme, lr=1e-3),
        indexer=IndexerConfig(form=form, rows=8),
        **more,
    )


def batches(count=5):
    generator = torch.Generator().manual_seed(3)
    documents = [
        torch.randint(3, 500, (length,), generator=generator).tolist()
        for length in [65, 30, 17, 60, 9, 64, 40, 25, 33] * count
    ]
    packed = pack(documents, sequence_length=64, pad_id=2)
    rows = torch.arange(4 * count).view(count, 4) % packed.num_rows
    return [Batch.of(packed, row.numpy()) for row in rows]


def curve(run, steps=5):
    model = build_model(run, run.model, torch.arange(512))
    training = TrainStep(run, model, build_optimizers(run, model))
    found = []
    for step, batch in enumerate(batches(steps)):
        measured = training.gradients(batch, step)
        overuse = training.update(run.optim.lr)
        found.append((measured.loss, *measured.index_losses.values(), measured.grad_norm, overuse))
    return found, {k: v.detach().float().cpu() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("form", ["explored", "sampled_rows", "dense_warmup", "frozen"])
def test_gpu_step_equals_the_cpu_step_in_fp32(form):
    gpu, gpu_state = curve(run_of("cuda", form=form, scheme="adamw"), 3)
    cpu, cpu_state = curve(run_of("cpu", form=form, scheme="adamw"), 3)
    # Near-equal index scores may select another entry on another device: losses move a little.
    for on_gpu, on_cpu in zip(gpu, cpu, strict=True):
        assert on_gpu[0] == pytest.approx(on_cpu[0], rel=1e-3)
        assert on_gpu[1:] == pytest.approx(on_cpu[1:], rel=2e-2)
    assert gpu_state.keys() == cpu_state.keys()


def test_negative_control_another_indexer_form_is_another_curve():
    gpu, _ = curve(run_of("cuda", form="selected", scheme="adamw"), 3)
    cpu, _ = curve(run_of("cpu", form="explored", scheme="adamw"), 3)
    assert gpu[0][1:5] != pytest.approx(cpu[0][1:5], rel=2e-2)


@pytest.mark.parametrize("micro", [4, 2, 1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_steps_equal_eager_steps_bitwise(precision, micro):
    captured, first = curve(run_of("cuda", precision, micro=micro))
    eager, second = curve(run_of("cuda", precision, graph=False, micro=micro))
    assert captured == eager
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_repeated_run_gives_the_same_bits():
    once, first = curve(run_of("cuda", "bf16"))
    again, second = curve(run_of("cuda", "bf16"))
    assert once == again
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bf16_step_follows_the_fp32_step():
    wide, _ = curve(run_of("cuda", "fp32"), 3)
    narrow, _ = curve(run_of("cuda", "bf16"), 3)
    assert [x[0] for x in narrow] == pytest.approx([x[0] for x in wide], rel=5e-3)


def test_quantized_phase_is_captured_and_keeps_the_masters():
    quantization = QuantizationConfig(start=0.5, replay=0.5)
    run = run_of("cuda", "bf16", quantization=quantization)
    run = dataclasses.replace(
        run, schedule=dataclasses.replace(run.schedule, steps=8, warmup_steps=0)
    )
    captured, first = curve(run, 8)
    eager, second = curve(dataclasses.replace(run, cuda_graph=False), 8)
    assert captured == eager
    assert all(torch.equal(first[name], second[name]) for name in first)
