"""Damaged states and records of a run: refused with the file, before anything of them is used."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch

from finwhale.config.presets import unit, with_compressed_vocab
from finwhale.config.run import DataConfig, RunConfig, ScheduleConfig
from finwhale.model import Backbone
from finwhale.ops import FAST
from finwhale.optim.optimizers import Optimizers
from finwhale.train.loop import train
from finwhale.train.record import (
    METRICS_FILE,
    RUN_FILE,
    Metrics,
    RunFolderError,
    claim_folder,
    read_metrics,
)
from finwhale.train.state import STATE_FILE, StateError, load_state, load_weights, save_state

COUNTERS = {"step": 7, "metrics_bytes": 123, "elapsed_s": 4.5}


def fresh() -> tuple[Backbone, Optimizers]:
    model = Backbone(with_compressed_vocab(unit(), 512), ops=FAST)
    model.init_weights(0)
    return model, Optimizers(model, scheme="adamw")


@pytest.fixture(scope="module")
def parts():
    model, optimizers = fresh()
    ids = torch.randint(3, 500, (1, 20), generator=torch.Generator().manual_seed(0))
    model(ids).square().mean().backward()
    optimizers.step(1e-3)
    return model, optimizers


@pytest.fixture(scope="module")
def saved(parts, tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("saved")
    save_state(folder, *parts, **COUNTERS)
    return (folder / STATE_FILE).read_bytes()


def refusal(folder: Path) -> str:
    model, optimizers = fresh()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StateError) as error:
        load_state(folder, model, optimizers)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    message = str(error.value)
    assert message.startswith(f"{folder / STATE_FILE}: ")
    # The library advises to run whatever the file holds.
    assert "weights_only" not in message
    assert "\n" not in message
    return message


def test_a_saved_state_is_still_what_the_library_reads(tmp_path, saved):
    (tmp_path / STATE_FILE).write_bytes(saved)
    state = torch.load(tmp_path / STATE_FILE, weights_only=True)
    assert state["step"] == 7
    assert load_state(tmp_path, *fresh()) == COUNTERS


def test_a_flipped_bit_anywhere_is_refused(tmp_path, saved):
    """Case [8]: 20 flipped bits inside the largest tensor were resumed without a word."""
    draw = random.Random(0)
    size = len(saved)
    places = [*range(64), *range(size - 140, size), *(draw.randrange(size) for _ in range(60))]
    for place in places:
        damaged = bytearray(saved)
        damaged[place] ^= 1 << draw.randrange(8)
        (tmp_path / STATE_FILE).write_bytes(damaged)
        assert refusal(tmp_path), place


@pytest.mark.parametrize("cut", [0, 1, 2, 79, 81, 200, 5000])
def test_a_state_of_another_length_is_refused(tmp_path, saved, cut):
    for damaged in (saved[: len(saved) - cut - 1], saved + bytes(cut + 1), saved[cut + 1 :]):
        (tmp_path / STATE_FILE).write_bytes(damaged)
        assert refusal(tmp_path)
    (tmp_path / STATE_FILE).write_bytes(saved[:cut])
    assert refusal(tmp_path)


def state_of(parts, **changes):
    model, optimizers = parts
    whole = {
        "format": 2,
        "model": model.state_dict(),
        "optimizer": optimizers.state_dict(),
        **COUNTERS,
        **changes,
    }
    return {name: value for name, value in whole.items() if value is not ...}


def test_a_state_without_a_digest_is_read_by_the_archives_checksums(tmp_path, parts):
    """States of format 2 have no digest; their archive has a checksum for every tensor."""
    file = tmp_path / STATE_FILE
    torch.save(state_of(parts), file)
    assert load_state(tmp_path, *fresh()) == COUNTERS
    raw = bytearray(file.read_bytes())
    tensor = parts[0].head.weight.detach().numpy().tobytes()
    raw[raw.index(tensor) + 777] ^= 1
    file.write_bytes(raw)
    assert "checksum" in refusal(tmp_path)
    # A new state that lost its digest does not count as an old one.
    torch.save(state_of(parts, format=3), file)
    assert "expected 3 with its SHA-256" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": ...}, "model: got None"),
        ({"optimizer": ...}, "optimizer: got None"),
        ({"step": ...}, "step: got None"),
        ({"step": "seven"}, "step: got 'seven'"),
        ({"step": -5}, "step: got -5"),
        ({"step": 1.5}, "step: got 1.5"),
        ({"metrics_bytes": -1}, "metrics_bytes: got -1"),
        ({"metrics_bytes": ...}, "metrics_bytes: got None"),
        ({"elapsed_s": float("nan")}, "elapsed_s: got nan"),
        ({"model": []}, "model: got []"),
        ({"model": {"embed.weight": 3}}, "model.embed.weight: got int"),
        ({"model": {}}, "embed.weight: found None"),
        ({"format": 1}, "format: got 1"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_state_of_another_shape_is_refused_by_field(tmp_path, parts, changes, field):
    torch.save(state_of(parts, **changes), tmp_path / STATE_FILE)
    assert field in refusal(tmp_path)


@pytest.mark.parametrize("value", [[], "text", 3, None, torch.zeros(3)], ids=str)
def test_a_state_that_is_no_record_is_refused(tmp_path, value):
    torch.save(value, tmp_path / STATE_FILE)
    assert "expected the parts of a training state" in refusal(tmp_path)
    with pytest.raises(StateError, match="name another run"):
        load_weights(tmp_path, fresh()[0])


@pytest.mark.parametrize("optimizer", [{}, {"owned": 3}, {"owned": {}, "optimizers": []}])
def test_an_optimizer_of_another_shape_is_refused(tmp_path, parts, optimizer):
    torch.save(state_of(parts, optimizer=optimizer), tmp_path / STATE_FILE)
    with pytest.raises(StateError, match=r"state\.pt: optimizer"):
        load_state(tmp_path, *fresh())
    torch.save(
        state_of(parts, optimizer={**parts[1].state_dict(), "optimizers": {}}),
        tmp_path / STATE_FILE,
    )
    with pytest.raises(StateError, match=r"state\.pt: optimizer: not the state of this run"):
        load_state(tmp_path, *fresh())


def test_a_state_that_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / STATE_FILE)
    assert "a pipe" in refusal(tmp_path)


def test_metrics_shorter_than_the_state_counts_are_refused(tmp_path):
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl: no such file, expected 10 bytes"):
        Metrics(tmp_path, 10)
    assert not (tmp_path / METRICS_FILE).exists()
    (tmp_path / METRICS_FILE).write_text("{}\n")
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl: 3 bytes, expected 10 bytes"):
        Metrics(tmp_path, 10)
    assert (tmp_path / METRICS_FILE).read_text() == "{}\n"
    os.unlink(tmp_path / METRICS_FILE)
    os.mkfifo(tmp_path / METRICS_FILE)
    with pytest.raises(RunFolderError, match="a pipe"):
        Metrics(tmp_path, 0)


@pytest.mark.parametrize("line", ["garbage", "[1]", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_damaged_line_of_metrics_is_named(tmp_path, line):
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl: line 2: "):
        read_metrics(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\xff"])
def test_a_damaged_record_of_a_run_is_refused(tmp_path, text):
    (tmp_path / RUN_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(RunFolderError, match=r"run\.json: .*choose another folder"):
        claim_folder(tmp_path, {}, "d")


def smoke(folder: Path) -> RunConfig:
    text = "".join(f"line {n}: the quick brown fox and {n * n} dogs\n" for n in range(1500))
    (folder / "book.txt").write_text(text)
    return RunConfig(
        model=unit(),
        data=DataConfig(corpus=str(folder / "book.txt"), train_bytes=40_000, validation_bytes=4000),
        schedule=ScheduleConfig(steps=2, warmup_steps=0),
        batch_rows=2,
        micro_batch_rows=2,
        sequence_length=32,
        save_every=1,
    )


def test_a_run_on_one_book_resumes_or_says_what_is_damaged(tmp_path):
    run, out = smoke(tmp_path), tmp_path / "run"
    done = train(run, out)
    assert done.data.facts["train_documents"] == 1
    whole = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    assert train(run, out, resume=True).validation_bpb == done.validation_bpb
    for name, data, why in (
        (METRICS_FILE, b"", "the training state counts"),
        (METRICS_FILE, b"x" * len(whole[METRICS_FILE]), "line 1"),
        (RUN_FILE, b"{", "not valid JSON"),
        (STATE_FILE, whole[STATE_FILE][:-1], "damaged|not a readable|format"),
    ):
        for file, content in whole.items():
            (out / file).write_bytes(content)
        (out / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name}: .*{why}|{name}: {why}"):
            train(run, out, resume=True)
    # More steps than the run has.
    for file, content in whole.items():
        (out / file).write_bytes(content)
    state = torch.load(out / STATE_FILE, weights_only=True)
    torch.save({**state, "format": 2, "step": 3}, out / STATE_FILE)
    with pytest.raises(StateError, match=r"state\.pt: step: got 3, expected at most 2"):
        train(run, out, resume=True)
    assert json.loads(whole[RUN_FILE])["finished"]
