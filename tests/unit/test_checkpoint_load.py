"""Loading: exact values, the Engram id map, the memory check, damage that only data shows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from finwhale.checkpoint import budget, load, load_model, save_tensors
from finwhale.checkpoint.budget import available_memory_bytes, load_budget
from finwhale.checkpoint.folder import StoredEntry
from finwhale.checkpoint.hashed_weights import hashed_source
from finwhale.checkpoint.toy_tokenizer import toy_tokenizer_json
from finwhale.config import preset
from finwhale.config.inventory import checkpoint_tensors
from finwhale.config.presets import with_compressed_vocab
from finwhale.model import Backbone, Numerics
from finwhale.ops import FAST, REFERENCE, weight_formats
from tests.checkpoint_files import (
    ONE_SHARD,
    decoded,
    edit_config,
    edit_tensors,
    read_tensors,
    refusal,
    smallest_config,
    write_smallest,
)

WQ_A = "layers.0.attn.wq_a"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_smallest(tmp_path_factory.mktemp("source") / "one")


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "copy")


@pytest.fixture
def _no_model_is_built(monkeypatch):
    def build(*arguments, **options):
        raise AssertionError("the model was built before the check")

    monkeypatch.setattr(load, "Backbone", build)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_the_exact_dequantised_value(source, dtype):
    loaded = load_model(source, numerics=Numerics(dtype=dtype))
    stored = read_tensors(source / ONE_SHARD)
    state = loaded.model.state_dict()
    assert state.keys() == {name for name in stored if not name.endswith(".scale")}
    for name, value in state.items():
        assert value.dtype is (torch.float32 if stored[name][0] == "F32" else dtype), name
        assert torch.equal(value.float(), decoded(stored, name)), name


def test_result_does_not_depend_on_the_slices(source, monkeypatch):
    whole = load_model(source).model.state_dict()
    monkeypatch.setattr(weight_formats, "SLICE_ELEMENTS", 32 * 32)
    for name, value in load_model(source).model.state_dict().items():
        assert torch.equal(value, whole[name]), name


def test_report_counts_what_was_read(source):
    loaded = load_model(source)
    report, stored = loaded.report, read_tensors(source / ONE_SHARD)
    assert loaded.config.text_config == smallest_config().text_config
    assert (report.num_files, report.num_tensors) == (1, len(stored))
    assert report.payload_bytes == sum(len(raw) for _, _, raw in stored.values())
    assert sum(report.storages.values()) == len(loaded.model.state_dict())
    assert report.storages["FP8_ROW"] == 1
    assert report.storages["FP4_ROW"] == 3 * 2 * 3
    assert report.token_map_from == "tokenizer.json"
    assert report.budget.model_bytes == sum(t.nbytes for t in loaded.model.state_dict().values())


def test_numerics_and_operations_reach_the_model(source):
    release = load_model(source, numerics=Numerics.release(), ops=FAST).model
    assert release.numerics == Numerics.release()
    assert release.parts.ops is FAST
    assert load_model(source).model.parts.ops is REFERENCE


def test_loaded_model_can_be_trained(source):
    model = load_model(source).model
    assert all(parameter.requires_grad for parameter in model.parameters())
    model(torch.tensor([[3, 4, 5, 6, 7]])).sum().backward()
    assert model.embed.weight.grad is not None


def test_hash_constants_come_from_config_and_tokenizer(folder):
    """Cases 7 and 115: no multiplier, prime or offset lies in the folder."""
    model = load_model(folder).model
    names = {name for name in read_tensors(folder / ONE_SHARD) if "engram" in name}
    leaves = ("embed.weight", "embed.scale", "wkv.weight", "wkv.scale", "q_weight", "k_weight")
    assert names == {f"layers.1.engram.{leaf}" for leaf in leaves}
    trace = {}
    ids = torch.tensor([[3, 4, 10, 11, 500]])
    model(ids, trace=trace)
    # Section 7.4 and 7.5 with Python integers, which cannot lose bits above 2^53.
    config = model.config.text_config
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    draws = np.random.default_rng(10007 * 1).integers(0, bound, size=4, dtype=np.int64)
    multipliers = [2 * int(v) + 1 for v in draws]
    compressed = [3, 3, 6, 7, 251]  # pairs differ by case: ids 3 + 2n and 4 + 2n share 3 + n
    buckets = config.engram_buckets()[0]
    expected = []
    for t in range(5):
        past = [compressed[t - k] if t >= k else 2 for k in range(4)]
        h, row = past[0] * multipliers[0], []
        for order in range(2, 5):
            h ^= past[order - 1] * multipliers[order - 1]
            for head in range(config.engram_n_heads):
                column = (order - 2) * config.engram_n_heads + head
                row.append(h % buckets.primes[column] + buckets.offsets[column])
        expected.append(row)
    assert max(multipliers) > 2**53
    assert trace["engram_rows.1"][0].tolist() == expected


@pytest.mark.usefixtures("_no_model_is_built")
def test_missing_tokenizer_is_named(folder):
    (folder / "tokenizer.json").unlink()
    error = refusal(load_model, folder)
    assert error.file.name == "tokenizer.json"
    assert "258 ids for 512 tokens" in error.expected
    assert "token_map" in error.remedy


@pytest.mark.usefixtures("_no_model_is_built")
@pytest.mark.parametrize("size", [257, 259])
def test_id_map_of_another_size_is_refused(folder, size):
    # Case 8: the hash depends on the number of distinct ids; one more or less is another model.
    edit_config(folder, engram_compressed_vocab_size=size)
    error = refusal(load_model, folder)
    assert error.file.name == "tokenizer.json"
    assert f"exactly {size} distinct ids" in error.expected
    assert "258 distinct ids" in error.found


@pytest.mark.usefixtures("_no_model_is_built")
def test_tokenizer_of_another_vocabulary_is_refused(folder):
    (folder / "tokenizer.json").write_text(toy_tokenizer_json(500))
    error = refusal(load_model, folder)
    assert "512 tokens" in error.expected
    assert "shape [500]" in error.found


@pytest.mark.usefixtures("_no_model_is_built")
def test_missing_tokenizers_package_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "finwhale.text.engram_map", None)
    error = refusal(load_model, folder)
    assert "'tokenizers'" in error.expected
    assert "finwhale[text]" in error.remedy


def test_given_id_map_replaces_the_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    token_map = np.arange(512) % 258
    loaded = load_model(folder, token_map=token_map)
    assert loaded.report.token_map_from == "argument"
    assert loaded.model.token_map.tolist() == token_map.tolist()


@pytest.mark.usefixtures("_no_model_is_built")
@pytest.mark.parametrize(
    "token_map",
    [np.arange(512), np.arange(511) % 258, np.arange(512) % 258 + 1, np.zeros(512, dtype=np.int64)],
    ids=["identity", "short", "gap", "constant"],
)
def test_given_id_map_is_checked(folder, token_map):
    error = refusal(load_model, folder, token_map=token_map)
    assert "exactly 258 distinct ids" in error.expected
    assert f"shape [{len(token_map)}]" in error.found


def test_identity_map_needs_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    edit_config(folder, engram_compressed_vocab_size=512)
    assert load_model(folder).report.token_map_from == "identity"


def test_model_without_engram_needs_no_map(tmp_path):
    text = replace(smallest_config().text_config, engram_layer_ids=(), engram_num_embeddings=())
    config = replace(smallest_config(), text_config=text)
    save_tensors(config, hashed_source(0), tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    assert loaded.report.token_map_from == "no Engram"
    assert loaded.model(torch.tensor([[3, 4, 5]])).shape == (1, 3, 512)


def test_model_and_inventory_must_name_the_same_tensors(folder, monkeypatch):
    def with_extra(*arguments, **options):
        model = Backbone(*arguments, **options)
        model.register_buffer("stray", torch.zeros(1))
        return model

    monkeypatch.setattr(load, "Backbone", with_extra)
    with pytest.raises(AssertionError, match=r"\['stray'\]"):
        load_model(folder)


def test_map_keeps_a_space_and_an_empty_token_apart(folder):
    # Case 8: one token normalises to a single space, one to nothing after stripping.
    raw = json.loads((folder / "tokenizer.json").read_text())
    by_id = {i: token for token, i in raw["model"]["vocab"].items()}
    by_id[510], by_id[511] = "\u0120", "\u010a\u0120"  # " " and "\n "
    raw["model"]["vocab"] = {token: i for i, token in sorted(by_id.items())}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    # Words 3..509 are 254 ids; both new tokens collapse to one space and share one id.
    edit_config(folder, engram_compressed_vocab_size=3 + 254 + 1)
    mapped = load_model(folder).model.token_map
    assert mapped[510] == mapped[511]
    assert (mapped[:510] != mapped[510]).all()


@pytest.mark.parametrize(
    ("name", "at", "byte"),
    [
        (f"{WQ_A}.weight", 5, 0x7F),
        (f"{WQ_A}.scale", 0, 0xFF),
        ("norm.weight", 1, 0x7F),
        ("layers.1.attn.attn_sink", 3, 0x7F),
        ("layers.1.ffn.experts.0.w1.scale", 7, 0xFF),
    ],
)
def test_damaged_values_are_refused_with_their_rows(folder, name, at, byte):
    def edit(tensors):
        dtype, shape, raw = tensors[name]
        raw = bytearray(raw)
        raw[at] = byte
        if dtype in ("BF16", "F32"):
            raw[at - 1] = 0x80 | raw[at - 1]
            raw[at - 1 : at + 1] = b"\x80\x7f"  # infinity
        tensors[name] = (dtype, shape, bytes(raw))

    edit_tensors(folder, edit)
    error = refusal(load_model, folder)
    assert error.file.name == ONE_SHARD
    assert error.tensor == name.replace(".scale", ".weight")
    assert error.expected == "finite values"
    assert "NaN or infinity in rows 0 to" in error.found


@pytest.mark.usefixtures("_no_model_is_built")
def test_memory_limit_is_checked_before_the_model_exists(folder, monkeypatch):
    # Case 110: state the need, refuse early; nothing has been read.
    monkeypatch.setattr(StoredEntry, "rows", None)
    error = refusal(load_model, folder, max_bytes=10_000)
    assert error.file == folder
    assert "bytes of memory (model" in error.expected
    assert error.found == "10000 bytes allowed by max_bytes"
    assert "bfloat16" in error.remedy


@pytest.mark.usefixtures("_no_model_is_built")
def test_memory_that_the_system_reports_is_the_default_limit(folder, monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable:       100 kB\n")
    monkeypatch.setattr(budget, "_MEMINFO", tmp_path / "meminfo")
    assert available_memory_bytes() == 102400
    assert refusal(load_model, folder).found == "102400 bytes available (MemAvailable)"


def test_system_without_a_word_on_memory_is_not_limited(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(budget, "_MEMINFO", tmp_path / "none")
    assert available_memory_bytes() is None
    assert load_model(folder).report.limit_bytes is None
    (tmp_path / "none").write_text("MemTotal: 5 kB\n")
    assert available_memory_bytes() is None


def test_reserve_for_a_long_context_counts(folder):
    # Case 113: 890 bytes per token of a million-token context must fit beside the weights.
    need = load_model(folder).report.budget.total_bytes
    assert load_model(folder, max_bytes=need).report.limit_bytes == need
    error = refusal(load_model, folder, max_bytes=need, reserve_bytes=890 * 1_048_576)
    assert f"+ reserve {890 * 1_048_576}" in error.expected


def test_budget_of_the_released_model_is_the_model_and_one_slice():
    specs = [spec for spec in checkpoint_tensors(preset("flash")) if spec.is_text]
    need = load_budget(specs, torch.bfloat16)
    parameters = 551_566_180_464 + 196_613_849_600 + 314_654_720
    fp32 = sum(spec.num_parameters for spec in specs if spec.storage.name == "F32")
    assert need.model_bytes == 2 * parameters + 2 * fp32
    # The largest table has 98 GB; no more than a slice of it is in work.
    assert need.working_bytes < 200e6


MEASURED = """
import sys
import torch
from finwhale.checkpoint import load_model
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")][0]
load_model(sys.argv[1])
before = peak()
print(load_model(sys.argv[2]).report.budget.total_bytes, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_stays_within_the_stated_budget(source, tmp_path):
    config = preset("mini")
    config = with_compressed_vocab(config, 2050)
    tokenizer = {"tokenizer.json": toy_tokenizer_json(4096).encode()}
    save_tensors(config, hashed_source(0), tmp_path / "mini", extra_files=tokenizer)
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "mini")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    budget_bytes, peak_bytes = map(int, run.stdout.split())
    # 16 MB for the interpreter: headers, module objects, the tokenizer.
    assert peak_bytes < budget_bytes + (16 << 20)
