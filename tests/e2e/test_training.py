"""Whole runs: repeatable, resumable after a kill at any time, stopped by a loss that is no number.

The text is made here, so the numbers do not depend on which Python is installed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from finwhale.config.run import QuantizationConfig, RunConfig
from finwhale.demo_train import run_training_demo
from finwhale.train import loop
from finwhale.train.loop import TrainingError, train
from finwhale.train.record import RunFolderError, curve, read_metrics
from finwhale.train.run_data import prepare_data
from recipes.pretrain import unit_smoke

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """Sixty documents of random sentences over a lexicon of 300 made-up words."""
    folder = tmp_path_factory.mktemp("library")
    generator = np.random.default_rng(5)
    letters = np.array(list("etaoinshrdlu"))
    lexicon = ["".join(generator.choice(letters, generator.integers(2, 8))) for _ in range(300)]
    for number in range(60):
        lines = [" ".join(generator.choice(lexicon, 9)) + ".\n" for _ in range(30)]
        (folder / f"text{number}.txt").write_text("".join(lines))
    return folder


def smoke(library: Path) -> RunConfig:
    data = replace(
        unit_smoke().data, corpus=str(library), train_bytes=60_000, validation_bytes=2_500
    )
    return replace(unit_smoke(), data=data)


def _quiet() -> Console:
    return Console(file=io.StringIO())


def _train(run: RunConfig, out: Path, **options):
    return train(run, out, console=_quiet(), **options)


def _same_weights(one, other) -> bool:
    pairs = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.fixture(scope="module")
def finished(library, tmp_path_factory):
    """One uninterrupted run that the others are compared with: (folder, result)."""
    out = tmp_path_factory.mktemp("finished")
    return out, _train(smoke(library), out, recipe="recipes.pretrain:unit_smoke")


def test_a_run_leaves_its_record(finished, library):
    out, result = finished
    facts = json.loads((out / "run.json").read_text(encoding="utf-8"))
    run = smoke(library)
    assert facts["finished"]
    assert facts["recipe"] == "recipes.pretrain:unit_smoke"
    assert facts["config"]["schedule"]["steps"] == run.schedule.steps
    assert facts["validation_bpb"] == result.validation_bpb
    assert facts["data_digest"] == result.data.digest
    assert facts["seed"] == 0
    assert {"torch", "python", "finwhale"} <= set(facts["versions"])
    owned = {o["optimizer"] for o in facts["optimizers"]}
    assert owned == {"muon", "sinkhorn", "adamw"}
    total = sum(p.numel() for p in result.model.parameters())
    assert sum(o["numbers"] for o in facts["optimizers"]) == total
    text = facts["config"]["model"]["text_config"]
    assert text["engram_compressed_vocab_size"] == len(set(result.data.token_map.tolist()))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    records = read_metrics(out)
    assert [r["step"] for r in records] == list(range(1, 9))
    assert [r["step"] for r in records if "validation_bpb" in r] == [4, 8]
    assert records[-1]["validation_bpb"] == result.validation_bpb
    assert sum(r["targets"] for r in records) <= 8 * run.batch_rows * run.sequence_length
    assert records[-1]["loss"] < records[0]["loss"]
    owners = {f"L{spec.layer_id}" for spec in result.model.specs if spec.owns_topk}
    assert all(set(r["index_loss"]) == owners for r in records)
    assert set(records[-1]["index_recall"]) == owners


def test_one_seed_gives_one_curve_bit_for_bit(finished, library, tmp_path):
    out, result = finished
    again = _train(smoke(library), tmp_path)
    assert curve(read_metrics(tmp_path)) == curve(read_metrics(out))
    assert _same_weights(result, again)


def test_another_seed_gives_another_curve(finished, library, tmp_path):
    """Control: the comparison above can fail."""
    short = replace(smoke(library).schedule, steps=3, warmup_steps=1)
    _train(replace(smoke(library), seed=1, schedule=short), tmp_path)
    assert curve(read_metrics(tmp_path))[0]["loss"] != read_metrics(finished[0])[0]["loss"]


class _StoppedError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop_after",
    [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)],
)
def test_resumed_equals_uninterrupted(finished, library, tmp_path, stop_after):
    """Stopped before the first save, on a save, and between two (they are 3 steps apart)."""
    out, result = finished

    def stop(values) -> None:
        if values["step"] == stop_after:
            raise _StoppedError

    with pytest.raises(_StoppedError):
        _train(smoke(library), tmp_path, on_step=stop)
    assert len(read_metrics(tmp_path)) == stop_after
    resumed = _train(smoke(library), tmp_path, resume=True)
    assert curve(read_metrics(tmp_path)) == curve(read_metrics(out))
    assert _same_weights(result, resumed)
    facts = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert facts["resumed_at_steps"] == ([] if stop_after < 3 else [3])


_CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import torch
torch.set_num_threads(1)
from tests.e2e.test_training import smoke, _quiet
from finwhale.train.loop import train
train(smoke(Path(sys.argv[1])), sys.argv[2], resume=True, console=_quiet())
"""


@pytest.mark.parametrize("lines", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_killed_and_resumed_equals_uninterrupted(finished, library, tmp_path, lines):
    """SIGKILL once so many metrics lines are on disk, wherever the process then is."""
    command = [sys.executable, "-c", _CHILD, str(library), str(tmp_path), str(REPOSITORY)]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 50
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < lines:
        assert child.poll() is None, "the child ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    resumed = _train(smoke(library), tmp_path, resume=True)
    assert curve(read_metrics(tmp_path)) == curve(read_metrics(finished[0]))
    assert _same_weights(finished[1], resumed)


def test_a_run_that_starts_from_another_goes_on_where_that_one_was(finished, library, tmp_path):
    folder, before = finished
    run = replace(smoke(library), init_from=str(folder))
    run = replace(run, schedule=replace(run.schedule, steps=1, warmup_steps=1))
    # At a rate of next to nothing only routing biases move, so both score alike; a fresh start not.
    still = replace(run, optim=replace(run.optim, lr=1e-12))
    after = _train(still, tmp_path / "next")
    assert after.validation_bpb == pytest.approx(before.validation_bpb, abs=2e-3)
    fresh = _train(replace(still, init_from=None), tmp_path / "fresh")
    assert fresh.validation_bpb > before.validation_bpb + 0.05


def test_a_finished_run_resumes_to_itself(finished, library):
    out, result = finished
    before = curve(read_metrics(out))
    again = _train(smoke(library), out, resume=True)
    assert again.validation_bpb == pytest.approx(result.validation_bpb, rel=1e-12)
    assert curve(read_metrics(out)) == before


def test_a_folder_with_a_state_is_not_overwritten(finished, library):
    with pytest.raises(RunFolderError, match="holds a training state; resume it"):
        _train(smoke(library), finished[0])
    changed = replace(smoke(library), optim=replace(smoke(library).optim, lr=1e-5))
    with pytest.raises(RunFolderError, match=r"config\.optim\.lr: found"):
        _train(changed, finished[0], resume=True)


@pytest.mark.slow
def test_accumulated_steps_follow_whole_batches(finished, library, tmp_path):
    """Case 124 through the loop: 2 x 2 rows and 1 x 4 rows give the same curve to rounding."""
    run = replace(smoke(library), micro_batch_rows=4, cache_rounding=False)
    short = replace(run.schedule, steps=4, warmup_steps=1)
    for name, rows in (("whole", 4), ("parts", 1)):
        _train(replace(run, micro_batch_rows=rows, schedule=short), tmp_path / name)
    whole, parts = (read_metrics(tmp_path / name) for name in ("whole", "parts"))
    for a, b in zip(whole, parts, strict=True):
        assert a["targets"] == b["targets"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-2)


def _poisoned(monkeypatch, at_step: int, spoil) -> None:
    """Let `spoil(training)` happen before step `at_step` (from 1) of any run."""
    from finwhale.train.step import TrainStep

    real = TrainStep.gradients

    def gradients(self, batch, step):
        if step == at_step - 1:
            spoil(self)
        return real(self, batch, step)

    monkeypatch.setattr(loop, "validate", lambda *_: 1.0)
    monkeypatch.setattr(TrainStep, "gradients", gradients)


@torch.no_grad()
def _spoil_layer_2(training) -> None:
    training.model.layers[2].attn.wo_b.weight[0, 0] = float("nan")


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_its_batch(library, tmp_path, monkeypatch):
    _poisoned(monkeypatch, 5, _spoil_layer_2)
    message = (
        "step 5: loss is nan; .*lower optim.lr.*layer 2 is the first that is not finite, in row 0 "
        "at position 0; batch in .*; the state after step 3 is kept"
    )
    with pytest.raises(TrainingError, match=message):
        _train(smoke(library), tmp_path)
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert all(np.isfinite(r["loss"]) for r in read_metrics(tmp_path))
    kept = torch.load(tmp_path / "failed_step.pt", weights_only=True)
    assert kept["step"] == 5
    assert "loss is nan" in kept["why"]
    data = prepare_data(smoke(library), tmp_path)
    rows = kept["rows"].numpy()
    assert np.array_equal(kept["ids"].numpy(), data.train.inputs[rows])
    assert np.array_equal(kept["targets"].numpy(), data.train.targets[rows])
    wanted = [list(data.train.lengths[row]) for row in rows]
    assert [row[: len(w)] for row, w in zip(kept["lengths"], wanted, strict=True)] == wanted


def test_the_batch_of_a_first_step_that_fails_is_kept_whole(library, tmp_path, monkeypatch):
    """Its parts go through tensors that are reused: they must not be the batch's own."""
    _poisoned(monkeypatch, 1, _spoil_layer_2)
    with pytest.raises(TrainingError, match="step 1: loss is nan"):
        _train(smoke(library), tmp_path)
    kept = torch.load(tmp_path / "failed_step.pt", weights_only=True)
    data = prepare_data(smoke(library), tmp_path)
    assert np.array_equal(kept["ids"].numpy(), data.train.inputs[kept["rows"].numpy()])


def test_a_gradient_that_is_no_number_is_named(library, tmp_path, monkeypatch):
    def spoil(training) -> None:
        weight = training.model.layers[3].attn.wq_a.weight
        weight.register_hook(lambda grad: grad * float("nan"))

    _poisoned(monkeypatch, 2, spoil)
    message = "step 2: gradient norm is nan.*not finite: layers.3.attn.wq_a.weight; batch in"
    with pytest.raises(TrainingError, match=message):
        _train(smoke(library), tmp_path)


def test_a_loss_far_above_the_last_ones_stops_the_run(library, tmp_path, monkeypatch):
    def spoil(training) -> None:
        with torch.no_grad():
            training.model.head.weight.mul_(300)

    monkeypatch.setattr(loop, "_SPIKE_WINDOW", 3)
    _poisoned(monkeypatch, 5, spoil)
    message = "step 5: loss .* is more than 1.5 times .*, the median of the last 3 steps"
    run = replace(smoke(library), spike_factor=1.5)
    with pytest.raises(TrainingError, match=message):
        _train(run, tmp_path / "stopped")
    assert len(read_metrics(tmp_path / "stopped")) == 4
    # Control: with the check off the same run goes on.
    short = replace(run.schedule, steps=5)
    _train(replace(run, spike_factor=0, schedule=short), tmp_path / "on")
    assert len(read_metrics(tmp_path / "on")) == 5


def test_a_full_disk_is_refused_before_anything_is_written(library, tmp_path, monkeypatch):
    kept = []

    def fill(values) -> None:
        if values["step"] == 3:
            kept.append((tmp_path / "state.pt").read_bytes())
            nothing = shutil.disk_usage(tmp_path)._replace(free=1000)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: nothing)

    with pytest.raises(TrainingError, match=r"step 6: .* bytes and a tenth more, 1,000 are free"):
        _train(smoke(library), tmp_path, on_step=fill)
    assert (tmp_path / "state.pt").read_bytes() == kept[0]
    assert not (tmp_path / "state.pt.partial").exists()


def _halted(run: RunConfig, folder: Path, after: int) -> None:
    def stop(values) -> None:
        if values["step"] == after:
            raise _StoppedError

    with pytest.raises(_StoppedError):
        _train(run, folder, on_step=stop)


VARIANTS = {
    "explored-report": {"form": "explored"},
    "annealed": {"form": "annealed", "scheme": "adamw"},
    "sampled-quantised": {"form": "sampled_rows", "start": 0.5, "replay": 0.5},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("explored-report", marks=pytest.mark.slow),
        pytest.param("annealed", marks=pytest.mark.slow),
        pytest.param("sampled-quantised", marks=pytest.mark.slow),
    ],
)
def test_resumed_equals_uninterrupted_in_every_variant(library, tmp_path, name):
    """A phase that changes and masters that are set aside are nothing a resumed run forgets."""
    options = dict(VARIANTS[name])
    base = smoke(library)
    run = replace(
        base,
        schedule=replace(base.schedule, steps=4, warmup_steps=1),
        batch_rows=2,
        micro_batch_rows=1,
        sequence_length=32,
        save_every=1,
        eval_every=0,
        indexer=replace(base.indexer, form=options["form"]),
        optim=replace(base.optim, scheme=options.get("scheme", "report")),
        quantization=QuantizationConfig(
            start=options.get("start", 1.0), replay=options.get("replay", 0.0)
        ),
    )
    straight = _train(run, tmp_path / "straight")
    _halted(run, tmp_path / "halted", 3)
    resumed = _train(run, tmp_path / "halted", resume=True)
    one, other = (curve(read_metrics(tmp_path / n)) for n in ("straight", "halted"))
    assert one == other
    assert _same_weights(straight, resumed)


@pytest.mark.slow
def test_training_demo_goes_from_text_to_a_loaded_checkpoint(library, tmp_path):
    console = Console(file=io.StringIO(), width=1000)
    report = run_training_demo(
        tmp_path, run=smoke(library), prompt="the ", max_new_tokens=5, console=console
    )
    shown = console.file.getvalue()
    for part in ("token unigram", "token bigram", "byte trigram", "model, as trained"):
        assert part in shown
    # unit: two owners at ratio 2 and one at ratio 1; an entry has 64/2 + 64/16 = 36 bytes of main
    # KV and 32/2 + 32/32 = 17 of index key, so 53 * (1/2 + 1/2 + 1) = 106.
    assert report.kv_bytes_per_token == 106
    assert "one token of global KV costs 106 bytes" in shown
    assert report.continuation in shown
    assert re.search(r"wrote .*checkpoint: \d+ tensors", shown.replace("\n", " "))
    assert (tmp_path / "checkpoint" / "tokenizer.json").exists()
    assert report.reloaded_bpb == pytest.approx(report.result.validation_bpb, rel=0.05)


@pytest.mark.slow
def test_demo_recipe_beats_the_token_unigram_by_far(tmp_path):
    from recipes.pretrain import demo_cpu

    result = train(demo_cpu(), tmp_path)
    unigram = next(b for b in result.baselines if b.name == "token unigram")
    assert result.validation_bpb < unigram.bits_per_byte - 0.3
