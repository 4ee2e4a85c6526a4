"""Saving: bytes equal the inventory, the round trip is exact, and a failure changes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from finwhale.checkpoint import budget, load_model, save_checkpoint, save_tensors, staging
from finwhale.checkpoint.hashed_weights import hashed_source, hashed_tensors
from finwhale.checkpoint.save import saved_config, state_source
from finwhale.checkpoint.shards import ShardWriter, plan_shards
from finwhale.checkpoint.toy_tokenizer import toy_tokenizer_json
from finwhale.config import ModelConfig, QuantizationConfig, build_layer_specs, preset
from finwhale.config.inventory import (
    Storage,
    StoredTensor,
    checkpoint_tensors,
    scale_name,
    stored_tensors,
)
from finwhale.config.presets import with_compressed_vocab
from finwhale.model import Backbone
from finwhale.ops.weight_formats import dequantize_weight, quantize_weight
from tests.checkpoint_files import (
    INDEX,
    ONE_SHARD,
    decoded,
    read_raw,
    read_tensors,
    refusal,
    smallest_config,
    write_smallest,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_smallest(tmp_path_factory.mktemp("source") / "one")


@pytest.fixture(scope="module")
def model(source):
    return load_model(source).model


@pytest.fixture
def tokenizer(source):
    return source / "tokenizer.json"


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def random_config(seed: int) -> ModelConfig:
    """Draw a config with other widths, depths and schedules than any preset."""
    draw = random.Random(seed)
    groups = draw.choice([1, 2, 4])
    layers = draw.randint(4, 7)
    full = sorted(draw.sample(range(1, layers), draw.randint(1, 3)))
    ratios = [0] * full[0]
    for layer in range(full[0], layers):
        ratios.append(draw.choice([1, 2]) if layer in full else ratios[-1])
    reindex = [layer for layer in range(full[0], layers) if draw.random() < 0.3]
    unit = preset("unit")
    text = replace(
        unit.text_config,
        vocab_size=draw.randrange(40, 90),
        hidden_size=32 * draw.randint(1, 3),
        moe_intermediate_size=32 * draw.randint(1, 3),
        num_attention_heads=groups * draw.randint(1, 2),
        head_dim=draw.choice([64, 128]),
        q_lora_rank=32 * draw.randint(1, 3),
        o_groups=groups,
        o_lora_rank=32 * draw.randint(1, 2),
        n_routed_experts=draw.randint(2, 5),
        index_head_dim=32 * draw.randint(1, 2),
        num_hidden_layers=layers,
        compress_ratios=tuple(ratios),
        kv_source_layer_ids=tuple(full),
        index_source_layer_ids=tuple(sorted({*full, *reindex})),
        candidate_source_layer_id=full[-1],
        engram_layer_ids=(1,),
        engram_num_embeddings=unit.text_config.engram_num_embeddings[:1],
        engram_compressed_vocab_size=20,
    )
    return replace(unit, text_config=text, image_token_id=39)


CONFIGS = {
    "smallest": smallest_config,
    "unit": lambda: preset("unit"),
    "nano": lambda: preset("nano"),
    **{f"random{seed}": lambda seed=seed: random_config(seed) for seed in (1, 2, 3)},
}


@pytest.mark.parametrize("quantized", [True, False], ids=["quantised", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_written_equal_the_inventory(name, quantized, tmp_path):
    config = CONFIGS[name]()
    report = save_tensors(
        config, hashed_source(3), tmp_path / "out", quantized=quantized, max_shard_bytes=400_000
    )
    expected = {entry.name: entry for entry in stored_tensors(config, quantized=quantized)}
    payload = sum(entry.num_bytes for entry in expected.values())
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert report.payload_bytes == index["metadata"]["total_size"] == payload
    assert report.num_tensors == len(index["weight_map"]) == len(expected)
    data_bytes = 0
    # The safetensors library is the independent reader of names, dtypes and shapes.
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        header, data = read_raw(file)
        data_bytes += len(data)
        with safe_open(file, "pt") as reader:
            for tensor in reader.keys():  # noqa: SIM118 - a reader is no dict
                assert index["weight_map"][tensor] == file.name
                assert header[tensor]["dtype"] == expected[tensor].dtype
                view = reader.get_slice(tensor)
                assert tuple(view.get_shape()) == expected.pop(tensor).shape
    assert (data_bytes, expected) == (payload, {})


def test_library_reads_the_same_bytes(source):
    stored = read_tensors(source / ONE_SHARD)
    with safe_open(source / ONE_SHARD, "pt") as reader:
        assert reader.metadata() == {"format": "pt"}
        for name, (_, shape, raw) in stored.items():
            tensor = reader.get_tensor(name)
            assert list(tensor.shape) == shape
            assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == raw, name


def test_offsets_are_multiples_of_the_element_size(source):
    header, _ = read_raw(source / ONE_SHARD)
    length = int.from_bytes((source / ONE_SHARD).read_bytes()[:8], "little")
    widths = {"F32": 4, "BF16": 2}
    assert length % 8 == 0
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % widths.get(entry["dtype"], 1) == 0


@pytest.mark.parametrize("quantized", [True, False], ids=["quantised", "bf16"])
def test_save_load_save_is_byte_identical(model, tokenizer, tmp_path, quantized):
    options = {"quantized": quantized, "tokenizer_file": tokenizer}
    save_checkpoint(model, tmp_path / "first", **options)
    again = load_model(tmp_path / "first").model
    save_checkpoint(again, tmp_path / "second", **options)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_round_trip_is_byte_identical_from_any_weights(source, tokenizer, tmp_path):
    model = load_model(source).model
    with torch.no_grad():
        for number, parameter in enumerate(model.state_dict().values()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    save_checkpoint(model, tmp_path / "first", tokenizer_file=tokenizer)
    save_checkpoint(
        load_model(tmp_path / "first").model, tmp_path / "second", tokenizer_file=tokenizer
    )
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_loaded_values_are_dequantise_of_quantise(source):
    state = load_model(source).model.state_dict()
    for spec, values in hashed_tensors(smallest_config(), 0):
        weight = torch.from_numpy(values)
        if spec.storage not in (Storage.BF16, Storage.F32):
            weight = dequantize_weight(*quantize_weight(weight, spec.storage))
        assert torch.equal(state[spec.name], weight), spec.name


def test_stored_values_agree_with_exact_tables(source):
    """The same through table look-up in the exact formats: no code of the package reads it."""
    stored = read_tensors(source / ONE_SHARD)
    for spec, values in hashed_tensors(smallest_config(), 0):
        error = (decoded(stored, spec.name) - torch.from_numpy(values)).abs().max()
        # Half the widest step: 1/6 of the group maximum in FP4, 1/28 of it in FP8.
        bound = {Storage.FP4_ROW: 1 / 6, Storage.FP8_BLOCK: 1 / 28}.get(spec.storage, 0.0)
        assert error <= bound * abs(values).max() * 1.001, spec.name


def test_bf16_variant_drops_the_quantisation_and_keeps_engram_rows(source, tokenizer, tmp_path):
    save_tensors(
        smallest_config(),
        hashed_source(0),
        tmp_path / "out",
        quantized=False,
        extra_files={"tokenizer.json": tokenizer},
    )
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in raw
    stored, released = read_tensors(tmp_path / "out" / ONE_SHARD), read_tensors(source / ONE_SHARD)
    for name in ("layers.1.engram.embed.weight", "layers.1.engram.embed.scale"):
        assert stored[name] == released[name]
    assert {dtype for name, (dtype, _, _) in stored.items() if "engram.embed" not in name} == {
        "BF16",
        "F32",
    }
    state = load_model(tmp_path / "out").model.state_dict()
    for spec, values in hashed_tensors(smallest_config(), 0):
        assert torch.equal(state[spec.name], torch.from_numpy(values)), spec.name


def test_quantised_layout_of_a_plain_config_gains_its_section():
    plain = replace(smallest_config(), quantization_config=None)
    assert saved_config(plain).quantization_config is None
    assert saved_config(plain, quantized=True).quantization_config == QuantizationConfig()


def test_saved_config_speaks_of_text_alone():
    flash = preset("flash")
    written = saved_config(flash)
    assert written.vision_config is None
    assert written.text_config.num_nextn_predict_layers == 0
    assert len(written.text_config.compress_ratios) == 40
    assert build_layer_specs(written.text_config) == build_layer_specs(flash.text_config)
    text = [spec for spec in checkpoint_tensors(flash) if spec.is_text]
    assert list(checkpoint_tensors(written)) == text
    assert ModelConfig.from_json(written.to_json()) == written


def test_round_trip_keeps_every_activation_flag(model, tokenizer, tmp_path):
    # Case 19: the clamp and its neighbours survive export and import.
    changes = {
        "swiglu_limit": 7.0,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-12,
        "hc_eps": 1e-5,
        "hc_sinkhorn_iters": 7,
        "rope_theta": 5000,
        "ced_kv_from": "encoder_output",
    }
    config = replace(
        smallest_config(), text_config=replace(smallest_config().text_config, **changes)
    )
    changed = Backbone(config, model.token_map)
    changed.load_state_dict(model.state_dict())
    save_checkpoint(changed, tmp_path / "out", tokenizer_file=tokenizer)
    loaded = load_model(tmp_path / "out")
    assert loaded.config == config
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    assert torch.equal(loaded.model(ids), changed(ids))
    assert not torch.equal(loaded.model(ids), model(ids))


def test_sink_and_every_other_tensor_is_defined_after_init(model, tokenizer, tmp_path):
    # Case 20: a model built from scratch has no undefined tensor to save.
    fresh = Backbone(smallest_config(), model.token_map)
    fresh.init_weights(0)
    save_checkpoint(fresh, tmp_path / "out", tokenizer_file=tokenizer)
    state = load_model(tmp_path / "out").model.state_dict()
    assert all(torch.isfinite(value).all() for value in state.values())
    assert not state["layers.0.attn.attn_sink"].any()


def test_extra_files_are_copied_and_listed(model, tokenizer, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("from a path")
    report = save_checkpoint(
        model,
        tmp_path / "out",
        tokenizer_file=tokenizer,
        extra_files={"run.json": b"{}", "note.txt": note},
    )
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert (tmp_path / "out" / "note.txt").read_text() == "from a path"
    assert set(report.files) == contents(tmp_path / "out").keys()


def test_absent_extra_file_is_refused_before_writing(model, tmp_path):
    error = refusal(save_checkpoint, model, tmp_path / "out", tokenizer_file=tmp_path / "none.json")
    assert (error.file.name, error.found) == ("none.json", "no such file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("edit", "expected", "found"),
    [
        (lambda s: s.pop("norm.weight"), "shape [64]", "nothing"),
        (lambda s: s.update({"norm.weight": torch.zeros(65)}), "shape [64]", "shape [65]"),
        (lambda s: s.update({"norm.weight": torch.zeros(64, device="meta")}), "values", "a meta"),
        (lambda s: s.update({"extra": torch.zeros(2)}), "no such tensor", "shape [2]"),
    ],
    ids=["missing", "shape", "meta", "extra"],
)
def test_state_that_is_no_model_is_refused(model, tmp_path, monkeypatch, edit, expected, found):
    state = dict(model.state_dict())
    edit(state)
    monkeypatch.setattr(model, "state_dict", lambda: state)
    error = refusal(save_checkpoint, model, tmp_path / "out")
    assert error.tensor in ("norm.weight", "extra")
    assert expected in error.expected
    assert found in error.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.attn.wq_a.weight"])
def test_broken_model_is_refused_and_leaves_nothing(model, tmp_path, name):
    state = dict(model.state_dict())
    state[name] = state[name].clone()
    state[name].view(-1)[3] = torch.nan
    error = refusal(save_tensors, smallest_config(), state_source(state), tmp_path / "out")
    assert error.file == tmp_path / "out" / ONE_SHARD
    assert (error.tensor, error.expected) == (name, "finite values")
    assert list(tmp_path.iterdir()) == []


def test_value_beyond_bf16_is_refused(model, tmp_path):
    state = dict(model.state_dict())
    state["norm.weight"] = torch.full((64,), 3.4e38)
    error = refusal(save_tensors, smallest_config(), state_source(state), tmp_path / "out")
    assert error.tensor == "norm.weight"


def test_full_disk_is_refused_before_writing(model, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(budget.shutil, "disk_usage", lambda path: usage(10, 10, 1000))
    error = refusal(save_checkpoint, model, tmp_path / "out")
    assert error.file == tmp_path / "out"
    assert "bytes free on its disk" in error.expected
    assert error.found == "1000"
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_not_empty_is_refused(model, source, tmp_path):
    old = shutil.copytree(source, tmp_path / "out")
    before = contents(old)
    error = refusal(save_checkpoint, model, old)
    assert error.file == old
    assert "files, such as config.json" in error.found
    assert "overwrite=True" in error.remedy
    assert contents(old) == before


def test_empty_folder_and_missing_parents_are_fine(model, tmp_path):
    (tmp_path / "empty").mkdir()
    save_checkpoint(model, tmp_path / "empty")
    save_checkpoint(model, tmp_path / "a" / "b" / "c")
    assert contents(tmp_path / "empty") == contents(tmp_path / "a" / "b" / "c")


@pytest.mark.parametrize("exchange", [True, False], ids=["one-step", "two-renames"])
def test_overwrite_replaces_a_checkpoint_whole(model, source, tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(staging, "_exchange", lambda first, second: False)
    old = shutil.copytree(source, tmp_path / "out")
    (old / "model-00009-of-00009.safetensors").write_bytes(b"left over")
    save_checkpoint(model, old, overwrite=True)
    assert sorted(contents(old)) == ["config.json", ONE_SHARD, INDEX]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["thesis.tex", "checkpoints"])
def test_overwrite_refuses_a_folder_with_foreign_files(model, source, tmp_path, name):
    old = shutil.copytree(source, tmp_path / "out")
    if name == "checkpoints":
        (old / name).mkdir()
    else:
        (old / name).write_text("years of work")
    error = refusal(save_checkpoint, model, old, overwrite=True)
    assert (error.file, error.found) == (old, f"{name}, which is no part of one")
    assert (old / name).exists()


def test_overwrite_refuses_what_is_no_checkpoint(model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.safetensors").write_bytes(b"?")
    assert (
        refusal(save_checkpoint, model, tmp_path / "out", overwrite=True).found == "no config.json"
    )
    (tmp_path / "file").write_text("?")
    assert refusal(save_checkpoint, model, tmp_path / "file", overwrite=True).found == "a file"
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert refusal(save_checkpoint, model, tmp_path / "link", overwrite=True).found == "a link"


@pytest.mark.parametrize("after", [0, 1, 17, 60])
def test_exception_in_the_middle_leaves_the_old_folder(model, source, tmp_path, after):
    old = shutil.copytree(source, tmp_path / "out")
    before, calls = contents(old), iter(range(1000))
    rows = state_source(model.state_dict())

    def failing(spec, part):
        if next(calls) == after:
            raise OSError("the disk is gone")
        return rows(spec, part)

    error = refusal(save_tensors, smallest_config(), failing, old, overwrite=True)
    assert (error.file, error.found) == (old, "the disk is gone")
    assert contents(old) == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    load_model(old)


KILLED = """
import os, signal, sys
from pathlib import Path
from finwhale.checkpoint import save_tensors, staging
from finwhale.checkpoint.hashed_weights import hashed_source
from tests.checkpoint_files import smallest_config
rows, count = hashed_source(9), 0
def source(spec, part):
    global count
    count += 1
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return rows(spec, part)
if sys.argv[2] == "0":
    staging._swap = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
save_tensors(smallest_config(), source, Path(sys.argv[1]), overwrite=True)
"""


@pytest.mark.parametrize("moment", ["40", "0"], ids=["middle", "before-swap"])
def test_kill_leaves_the_old_folder_and_the_next_save_cleans_up(model, source, tmp_path, moment):
    old = shutil.copytree(source, tmp_path / "out")
    before = contents(old)
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(old), moment],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        check=False,
    )
    assert run.returncode == -signal.SIGKILL
    left = [file.name for file in tmp_path.iterdir() if file.name != "out"]
    assert len(left) == 1
    assert left[0].startswith(".out.partial-")
    assert contents(old) == before
    load_model(old)
    save_checkpoint(model, old, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_stale_folders_of_running_processes_are_kept(model, tmp_path):
    mine = tmp_path / f".out.partial-{os.getppid()}"
    mine.mkdir()
    dead = tmp_path / ".out.partial-999999999"
    dead.mkdir()
    save_checkpoint(model, tmp_path / "out")
    assert (mine.exists(), dead.exists()) == (True, False)


def test_leftover_of_an_earlier_process_with_this_number_is_replaced(model, tmp_path):
    left = tmp_path / f".out.partial-{os.getpid()}"
    left.mkdir()
    (left / "junk").write_text("?")
    save_checkpoint(model, tmp_path / "out")
    assert not left.exists()
    assert "junk" not in contents(tmp_path / "out")


def test_process_of_another_user_counts_as_running(model, tmp_path, monkeypatch):
    def refuse(pid, signal_number):
        raise PermissionError

    monkeypatch.setattr(staging.os, "kill", refuse)
    other = tmp_path / ".out.partial-4242"
    other.mkdir()
    save_checkpoint(model, tmp_path / "out")
    assert other.exists()


def test_system_without_an_exchange_of_names_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(staging.ctypes, "CDLL", lambda name: object())
    assert staging._exchange(tmp_path / "a", tmp_path / "b") is False


def test_folder_lost_between_two_renames_comes_back(model, source, tmp_path):
    shutil.copytree(source, tmp_path / ".out.replaced-999999999")
    error = refusal(save_checkpoint, model, tmp_path / "out")
    assert "such as config.json" in error.found
    assert contents(tmp_path / "out") == contents(source)


def test_compressed_vocabulary_follows_the_saved_tokenizer(tmp_path):
    config = with_compressed_vocab(smallest_config(), 258)
    save_tensors(
        config,
        hashed_source(1),
        tmp_path / "out",
        extra_files={"tokenizer.json": toy_tokenizer_json(512).encode()},
    )
    assert load_model(tmp_path / "out").report.token_map_from == "tokenizer.json"


def test_shards_keep_a_layer_and_its_scales_together():
    shards = plan_shards(checkpoint_tensors(preset("unit")), 200_000)
    assert len(shards) > 5
    home = {spec.name: number for number, shard in enumerate(shards) for spec in shard}
    for layer in range(preset("unit").text_config.num_hidden_layers):
        prefix = f"layers.{layer}."
        block = {n for name, n in home.items() if name.startswith(prefix) and "engram" not in name}
        assert len(block) == 1
    specs = [spec for shard in shards for spec in shard]
    assert specs == list(checkpoint_tensors(preset("unit")))


def test_shards_split_a_layer_that_fits_nowhere():
    shards = plan_shards(checkpoint_tensors(smallest_config()), 1)
    assert all(len(shard) == 1 for shard in shards)
    assert all(
        {scale_name(spec.name)} <= {entry.name for entry in spec.stored()}
        for shard in shards
        for spec in shard
        if len(spec.stored()) == 2
    )


@pytest.mark.parametrize("size", [0, -1])
def test_shard_size_must_be_positive(size):
    with pytest.raises(ValueError, match=f"max_shard_bytes: got {size}"):
        plan_shards(checkpoint_tensors(smallest_config()), size)


def test_shard_writer_refuses_rows_that_do_not_belong(tmp_path):
    entry = StoredTensor(name="x", dtype="F32", shape=(4, 2))
    file = tmp_path / "a.safetensors"

    def write(*parts):
        with ShardWriter(file, [entry]) as writer:
            for part in parts:
                writer.append("x", part)

    write(torch.ones(1, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="24 bytes written, expected 32"):
        write(torch.ones(3, 2))
    with pytest.raises(ValueError, match="more than 32 bytes"):
        write(torch.ones(5, 2))
    with pytest.raises(ValueError, match=r"got torch.bfloat16 \[4, 2\], expected rows of F32"):
        write(torch.ones(4, 2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"got torch.float32 \[4, 3\]"):
        write(torch.ones(4, 3))
