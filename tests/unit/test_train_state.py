"""The stored state and the run folder: whole, atomic, refused when they do not fit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from finwhale.checkpoint.save import save_checkpoint
from finwhale.config.model import ConfigError
from finwhale.config.presets import unit, with_compressed_vocab
from finwhale.config.run import DataConfig, RunConfig
from finwhale.model import Backbone
from finwhale.ops import FAST
from finwhale.optim.optimizers import Optimizers
from finwhale.text.train_tokenizer import train_tokenizer
from finwhale.train import state
from finwhale.train.record import Metrics, RunFolderError, claim_folder, curve, read_metrics
from finwhale.train.run_data import prepare_data
from finwhale.train.state import StateError, load_state, load_weights, save_state

COUNTERS = {"step": 7, "metrics_bytes": 123, "elapsed_s": 4.5}


def _fresh(seed: int, scheme: str = "adamw") -> tuple[Backbone, Optimizers]:
    model = Backbone(with_compressed_vocab(unit(), 512), ops=FAST)
    model.init_weights(seed)
    return model, Optimizers(model, scheme=scheme)


def _step(model, optimizers, seed: int = 0) -> None:
    optimizers.zero_grad(set_to_none=True)
    ids = torch.randint(3, 500, (1, 20), generator=torch.Generator().manual_seed(seed))
    model(ids).square().mean().backward()
    optimizers.step(1e-3)


@pytest.mark.parametrize("scheme", ["adamw", "report"])
def test_state_restores_weights_and_optimisers(tmp_path, scheme):
    model, optimizers = _fresh(0, scheme)
    _step(model, optimizers, 1)
    save_state(tmp_path, model, optimizers, **COUNTERS)
    _step(model, optimizers, 2)
    other, other_optimizers = _fresh(1, scheme)
    assert load_state(tmp_path, other, other_optimizers) == COUNTERS
    _step(other, other_optimizers, 2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    # Control: the same step without the optimisers' memory goes elsewhere.
    bare, fresh_optimizers = _fresh(1, scheme)
    load_state(tmp_path, bare, other_optimizers)
    _step(bare, fresh_optimizers, 2)
    assert not torch.equal(bare.embed.weight, model.embed.weight)


def test_a_run_starts_from_the_weights_of_another_and_nothing_else(tmp_path):
    model, optimizers = _fresh(0, "report")
    _step(model, optimizers, 1)
    save_state(tmp_path, model, optimizers, **COUNTERS)
    # Another scheme: only weights are read.
    other, _ = _fresh(1, "adamw")
    assert load_weights(tmp_path, other) == COUNTERS["step"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    with pytest.raises(StateError, match=r"init_from: .* holds no state\.pt"):
        load_weights(tmp_path / "nowhere", other)


def test_a_run_starts_from_a_checkpoint_with_its_stored_weights(tmp_path):
    model, _ = _fresh(0, "report")
    save_checkpoint(model, tmp_path / "bf16", quantized=False)
    other, _ = _fresh(1, "report")
    assert load_weights(tmp_path / "bf16", other) == 0
    # Engram's rows are FP8 in every checkpoint, all else is bf16.
    for name, tensor in model.state_dict().items():
        found = other.state_dict()[name]
        limit = 2**-4 if "engram" in name else 2**-8
        assert (found - tensor).norm() <= limit * tensor.norm(), name


def test_state_of_other_optimisers_is_refused(tmp_path):
    save_state(tmp_path, *_fresh(0, "adamw"), **COUNTERS)
    with pytest.raises(StateError, match=r"state\.pt: optimizer state: other owners or rules"):
        load_state(tmp_path, *_fresh(0, "report"))


def test_a_disk_without_room_is_refused_before_writing(tmp_path, monkeypatch):
    model, optimizers = _fresh(0)
    save_state(tmp_path, model, optimizers, **COUNTERS)
    before = (tmp_path / state.STATE_FILE).read_bytes()
    tensors = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    usage = shutil.disk_usage(tmp_path)
    for free, is_enough in ((0, False), (tensors, False), (tensors + tensors // 10 + 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, n=free: usage._replace(free=n))
        if is_enough:
            save_state(tmp_path, model, optimizers, **COUNTERS)
            continue
        with pytest.raises(StateError, match=f"{free:,} are free; make room and resume"):
            save_state(tmp_path, model, optimizers, **COUNTERS)
        assert (tmp_path / state.STATE_FILE).read_bytes() == before
        assert sorted(p.name for p in tmp_path.iterdir()) == [state.STATE_FILE]


def test_no_state_is_no_error(tmp_path):
    assert load_state(tmp_path, *_fresh(0)) is None


def test_a_failed_save_keeps_the_state_before(tmp_path, monkeypatch):
    model, optimizer = _fresh(0)
    save_state(tmp_path, model, optimizer, **COUNTERS)
    before = (tmp_path / state.STATE_FILE).read_bytes()

    def torn(value, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(state.torch, "save", torn)
    with pytest.raises(StateError, match=r"state\.pt: not written \(disk full\)"):
        save_state(tmp_path, model, optimizer, **{**COUNTERS, "step": 8})
    assert (tmp_path / state.STATE_FILE).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [state.STATE_FILE]


def test_damaged_state_is_refused_by_name(tmp_path):
    (tmp_path / state.STATE_FILE).write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(StateError, match=r"state\.pt: not a readable training state"):
        load_state(tmp_path, *_fresh(0))


def test_state_of_another_model_is_refused_by_tensor(tmp_path):
    model, optimizer = _fresh(0)
    save_state(tmp_path, model, optimizer, **COUNTERS)
    model.embed.weight = torch.nn.Parameter(torch.zeros(512, 32))
    with pytest.raises(StateError, match=r"embed.weight: found \(512, 64\), expected \(512, 32\)"):
        load_state(tmp_path, model, optimizer)


def test_state_of_another_format_is_refused(tmp_path):
    torch.save({"format": 0}, tmp_path / state.STATE_FILE)
    with pytest.raises(StateError, match="format: got 0, expected 3"):
        load_state(tmp_path, *_fresh(0))


def test_tokenizer_of_another_size_is_refused_by_name(tmp_path):
    text = "the quick brown fox jumps over the lazy dog 0123456789\n" * 40
    for number in range(30):
        (tmp_path / f"text{number}.txt").write_text(text)
    file = train_tokenizer([text], 300, tmp_path / "tokenizer.json")
    data = DataConfig(
        corpus=str(tmp_path), train_bytes=20_000, validation_bytes=2_000, tokenizer=str(file)
    )
    run = RunConfig(model=unit(), data=data)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: 300 ids, expected vocab_size = 512"):
        prepare_data(run, tmp_path)


def test_metrics_are_cut_back_to_the_recorded_length(tmp_path):
    metrics = Metrics(tmp_path, 0)
    metrics.write({"step": 1, "loss": 2.5, "tokens_per_s": 9.0, "elapsed_s": 0.1})
    kept = metrics.length_bytes
    metrics.write({"step": 2, "loss": 2.0})
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "lo')
    again = Metrics(tmp_path, kept)
    again.write({"step": 2, "loss": 2.25})
    again.close()
    expected = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}]
    assert curve(read_metrics(tmp_path)) == expected


def test_folder_of_another_run_is_refused_by_field(tmp_path):
    earlier = {"config": {"optim": {"lr": 0.001}, "seed": 0}, "data_digest": "d", "extra": 1}
    (tmp_path / "run.json").write_text(json.dumps(earlier))
    same = {"optim": {"lr": 0.001}, "seed": 0}
    assert claim_folder(tmp_path, same, "d") == earlier
    other = {"optim": {"lr": 0.002}, "seed": 0}
    with pytest.raises(RunFolderError, match=r"config.optim.lr: found 0.001, expected 0.002"):
        claim_folder(tmp_path, other, "d")
    with pytest.raises(RunFolderError, match=r"data_digest: found 'd', expected 'e'"):
        claim_folder(tmp_path, same, "e")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunFolderError, match="not valid JSON"):
        claim_folder(tmp_path, same, "d")


def test_a_run_stopped_by_a_spike_resumes_with_the_check_off(tmp_path):
    """What the error tells the reader to do must work: `--resume --set spike_factor=0`."""
    earlier = {"config": {"spike_factor": 3.0, "seed": 0}, "data_digest": "d"}
    (tmp_path / "run.json").write_text(json.dumps(earlier))
    assert claim_folder(tmp_path, {"spike_factor": 0, "seed": 0}, "d") == earlier


def test_new_folder_has_no_earlier_run(tmp_path):
    assert claim_folder(tmp_path, {"seed": 0}, "d") == {}
