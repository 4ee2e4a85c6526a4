"""Whole runs: repeatable, resumable after a kill at any time, stopped by a loss that is no number.

The text is made here, so the numbers do not depend on which Python is installed.
"""

from __future__ import annotations

import io
import json
import os
import re
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

from finwhale.config.run import RunConfig
from finwhale.demo import run_demo
from finwhale.train.loop import TrainingError, train
from finwhale.train.record import RunFolderError, curve, read_metrics
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
        unit_smoke().data, corpus=str(library), train_bytes=60_000, validation_bytes=6_000
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
    assert facts["frozen"]
    assert all(".indexer." in name for name in facts["frozen"])
    text = facts["config"]["model"]["text_config"]
    assert text["engram_compressed_vocab_size"] == len(set(result.data.token_map.tolist()))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    records = read_metrics(out)
    assert [r["step"] for r in records] == list(range(1, 9))
    assert [r["step"] for r in records if "validation_bpb" in r] == [4, 8]
    assert records[-1]["validation_bpb"] == result.validation_bpb
    assert sum(r["targets"] for r in records) <= 8 * run.batch_rows * run.sequence_length
    assert records[-1]["loss"] < records[0]["loss"]


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


def test_a_loss_that_is_no_number_stops_the_run(library, tmp_path, monkeypatch):
    from finwhale.train import loop

    real = loop.loss_sum
    calls = iter(range(100))

    def poisoned(model, part, **options):
        # Two parts a step: call 8 is the first part of step 5.
        return real(model, part, **options) * (float("nan") if next(calls) == 8 else 1.0)

    monkeypatch.setattr(loop, "validate", lambda *_: 1.0)
    monkeypatch.setattr(loop, "loss_sum", poisoned)
    message = "step 5: loss is nan; lower optim.lr .*; the state after step 3 is kept"
    with pytest.raises(TrainingError, match=message):
        _train(smoke(library), tmp_path)
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert all(np.isfinite(r["loss"]) for r in read_metrics(tmp_path))


def test_demo_goes_from_text_to_a_loaded_checkpoint(library, tmp_path):
    console = Console(file=io.StringIO(), width=1000)
    report = run_demo(
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
