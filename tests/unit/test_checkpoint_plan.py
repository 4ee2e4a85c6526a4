"""Headers against the inventory: what is missing, extra, unfit or skipped."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from finwhale.checkpoint import load_model, read_folder
from finwhale.checkpoint.folder import StoredEntry
from finwhale.checkpoint.plan import plan_load
from finwhale.config import ConfigError, ModelConfig
from finwhale.config.inventory import Storage
from tests.checkpoint_files import (
    ONE_SHARD,
    decoded,
    edit_config,
    edit_tensors,
    read_tensors,
    refusal,
    write_smallest,
)

WQ_A, EXPERT = "layers.0.attn.wq_a.weight", "layers.1.ffn.experts.1.w1.weight"
TABLE = "layers.1.engram.embed.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_smallest(tmp_path_factory.mktemp("source") / "one")


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "copy")


@pytest.fixture
def _no_data_is_read(monkeypatch):
    def read(self, part=None):
        raise AssertionError(f"data of {self.name} was read before the plan was checked")

    monkeypatch.setattr(StoredEntry, "rows", read)


pytestmark = pytest.mark.usefixtures("_no_data_is_read")


def plan_of(folder):
    return plan_load(ModelConfig.from_json(folder), read_folder(folder))


def test_plan_covers_every_text_parameter_with_its_released_format(folder):
    plan = plan_of(folder)
    assert [p.spec.name for p in plan.tensors if p.storage is not p.spec.storage] == []
    assert {p.storage for p in plan.tensors} == set(Storage)
    assert plan.skipped == ()


@pytest.mark.parametrize("name", [WQ_A, EXPERT, TABLE, "layers.2.attn.attn_sink", "norm.weight"])
def test_missing_tensor(folder, name):
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    error = refusal(load_model, folder)
    assert (error.file, error.tensor) == (folder, name)
    assert "BF16 or F32" in error.expected
    assert error.found == "no such tensor in any file"


def test_missing_tensors_are_counted(folder):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith("layers.2.ffn.experts.")]:
            del tensors[name]

    edit_tensors(folder, edit)
    assert "(5 more like this)" in str(refusal(load_model, folder))


def test_model_prefix_is_named_in_the_remedy(folder):
    def edit(tensors):
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    edit_tensors(folder, edit)
    assert "no 'model.' prefix" in refusal(load_model, folder).remedy


@pytest.mark.parametrize("name", [WQ_A, EXPERT, TABLE])
def test_missing_scale(folder, name):
    scale = name.replace(".weight", ".scale")
    edit_tensors(folder, lambda tensors: tensors.pop(scale))
    error = refusal(load_model, folder)
    assert (error.file.name, error.tensor) == (ONE_SHARD, scale)
    assert error.expected.startswith("F8_E8M0 [")
    assert error.found == "no such tensor in any file"


@pytest.mark.parametrize("name", ["layers.0.attn.wq_c.weight", "lm_head.weight", "embed.scale"])
def test_extra_unknown_tensor(folder, name):
    edit_tensors(folder, lambda tensors: tensors.update({name: ("BF16", [2], b"\0" * 4)}))
    error = refusal(load_model, folder)
    assert (error.file.name, error.tensor) == (ONE_SHARD, name)
    assert "config.json" in error.expected
    assert error.found == "an unknown tensor, BF16 [2]"


def test_extra_tensor_error_names_a_near_one(folder):
    name = "layers.0.attn.wq_aa.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: ("BF16", [1], b"\0\0")}))
    assert WQ_A in refusal(load_model, folder).expected


def test_scale_of_a_plain_weight_is_an_extra_tensor(folder):
    def edit(tensors):
        tensors[WQ_A] = ("BF16", tensors[WQ_A][1], tensors[WQ_A][2] * 2)

    edit_tensors(folder, edit)
    error = refusal(load_model, folder)
    assert error.tensor == WQ_A.replace(".weight", ".scale")
    assert "unknown tensor" in error.found


@pytest.mark.parametrize("name", [WQ_A, EXPERT.replace("w1", "w2"), TABLE, "embed.weight"])
def test_transposed_weight(folder, name):
    def edit(tensors):
        dtype, shape, raw = tensors[name]
        tensors[name] = (dtype, shape[::-1], raw)

    shape = read_tensors(folder / ONE_SHARD)[name][1]
    edit_tensors(folder, edit)
    error = refusal(load_model, folder)
    assert (error.file.name, error.tensor) == (ONE_SHARD, name)
    assert str(shape) in error.expected
    assert str(shape[::-1]) in error.found


def test_shape_of_another_config(folder):
    edit_config(folder, moe_intermediate_size=64)
    error = refusal(load_model, folder)
    assert "w1.weight" in error.tensor
    assert "[64, 64]" in error.expected
    assert "[32, 64]" in error.found


@pytest.mark.parametrize(
    ("name", "dtype", "factor"),
    [
        ("norm.weight", "F16", 1),
        ("norm.weight", "F8_E4M3", 0.5),
        ("layers.0.attn.attn_sink", "F64", 2),
        ("layers.0.hc_attn_fn", "F8_E4M3", 0.25),
        (WQ_A, "F8_E5M2", 1),
        (WQ_A, "U8", 1),
        (EXPERT, "U8", 1),
    ],
)
def test_wrong_dtype(folder, name, dtype, factor):
    def edit(tensors):
        _, shape, raw = tensors[name]
        tensors[name] = (dtype, shape, bytes(int(len(raw) * factor)))

    edit_tensors(folder, edit)
    error = refusal(load_model, folder)
    assert (error.file.name, error.tensor) == (ONE_SHARD, name)
    assert "BF16 or F32" in error.expected
    assert error.found.startswith(dtype)


def test_fp4_labelled_as_fp8(folder):
    # Case 116: without a check of shapes half of each expert's weights would be missing.
    def edit(tensors):
        tensors[EXPERT] = ("F8_E4M3", *tensors[EXPERT][1:])

    edit_tensors(folder, edit)
    error = refusal(load_model, folder)
    assert error.tensor == EXPERT
    assert "I8 [32, 32] with its scale" in error.expected
    assert error.found == "F8_E4M3 [32, 32]"


@pytest.mark.parametrize(
    ("name", "scale"),
    [(WQ_A, ["F8_E8M0", [1, 1]]), (EXPERT, ["F8_E8M0", [1, 2]]), (TABLE, ["F32", [304, 1]])],
    ids=["shape", "block-for-row", "dtype"],
)
def test_scale_that_does_not_fit(folder, name, scale):
    scale_name = name.replace(".weight", ".scale")
    dtype, shape = scale

    def edit(tensors):
        if dtype == "F32":
            shape[0] = tensors[name][1][0]
        width = 4 if dtype == "F32" else 1
        tensors[scale_name] = (dtype, shape, bytes(shape[0] * shape[1] * width))

    edit_tensors(folder, edit)
    error = refusal(load_model, folder)
    assert (error.file.name, error.tensor) == (ONE_SHARD, scale_name)
    assert error.expected.startswith("F8_E8M0")
    assert error.found == f"{dtype} {shape}"


def test_draft_and_vision_tensors_are_skipped_and_listed(folder):
    # Case 22: the same architecture string with parts that a text model does not have.
    extra = {
        "mtp.0.attn.wq_a.weight": ("F8_E4M3", [4, 4], bytes(16)),
        "mtp.0.attn.wq_a.scale": ("F8_E8M0", [1, 1], b"\x7f"),
        "mtp.2.norm.weight": ("BF16", [8], bytes(16)),
        "vision.norm.weight": ("BF16", [4], bytes(8)),
        "aligner.w1.bias": ("BF16", [2], bytes(4)),
        "image_start": ("BF16", [2], bytes(4)),
        "image_newline": ("BF16", [2], bytes(4)),
        "image_end": ("BF16", [2], bytes(4)),
    }
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    dspark, vision = plan_of(folder).skipped
    assert (dspark.part, len(dspark.names), dspark.num_bytes) == ("dspark", 3, 33)
    assert (vision.part, len(vision.names), vision.num_bytes) == ("vision", 5, 24)
    assert set(dspark.names) | set(vision.names) == extra.keys()
    assert str(dspark) == "dspark: 3 tensors, 33 bytes not loaded"


def test_skipped_names_do_not_hide_text_tensors(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"visions.w": ("BF16", [1], b"\0\0")}))
    assert refusal(load_model, folder).tensor == "visions.w"


def test_config_of_another_family_is_refused_by_exact_name(folder):
    # Cases 23 and 119: a prefix test would take V4 for V4.1.
    raw = json.loads((folder / "config.json").read_text())
    raw["model_type"] = "deepseek_v4"
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"config.json.*'deepseek_v4'.*'deepseek_v41'"):
        load_model(folder)


def test_plain_weights_of_either_width_are_accepted_for_any_tensor(folder, monkeypatch):
    """An fp32 oracle writes F32 matrices; a BF16 export writes BF16 ones. The dtype decides."""
    before = read_tensors(folder / ONE_SHARD)
    values = {name: decoded(before, name) for name in before if not name.endswith(".scale")}

    def edit(tensors):
        for number, name in enumerate(list(values)):
            kind = (torch.float32, torch.bfloat16)[number % 2]
            if tensors[name][0] == "F32":
                kind = torch.float32
            label = "F32" if kind is torch.float32 else "BF16"
            raw = values[name].to(kind).contiguous().view(torch.uint8).numpy().tobytes()
            tensors[name] = (label, list(values[name].shape), raw)
            if name.endswith(".weight"):
                tensors.pop(name.replace(".weight", ".scale"), None)

    edit_tensors(folder, edit)
    assert {p.storage for p in plan_of(folder).tensors} == {Storage.BF16, Storage.F32}
    monkeypatch.undo()
    state = load_model(folder).model.state_dict()
    for name, value in values.items():
        assert torch.equal(state[name], value), name


def test_dtype_decides_for_each_tensor_and_names_decide_nothing(folder, monkeypatch):
    """One expert in FP8, one FP4 attention matrix, a table with block scales: all are read."""
    swapped = read_tensors(folder / ONE_SHARD)

    def give(tensors, name, like):
        rows, columns = decoded(swapped, name).shape
        if like == "I8":
            codes, scales = ("I8", [rows, columns // 2]), [rows, -(-columns // 32)]
        else:
            codes, scales = ("F8_E4M3", [rows, columns]), [-(-rows // 32), -(-columns // 32)]
        raw = bytes(code % 127 for code in range(codes[1][0] * codes[1][1]))
        tensors[name] = (*codes, raw)
        scale_bytes = bytes(120 + n % 5 for n in range(scales[0] * scales[1]))
        tensors[name.replace(".weight", ".scale")] = ("F8_E8M0", scales, scale_bytes)

    def edit(tensors):
        give(tensors, EXPERT, "F8")
        give(tensors, WQ_A, "I8")
        give(tensors, TABLE, "F8")
        give(tensors, "embed.weight", "F8")

    edit_tensors(folder, edit)
    by_name = {p.spec.name: p.storage for p in plan_of(folder).tensors}
    assert by_name[EXPERT] is by_name[TABLE] is Storage.FP8_BLOCK
    assert by_name[WQ_A] is Storage.FP4_ROW
    monkeypatch.undo()
    state, stored = load_model(folder).model.state_dict(), read_tensors(folder / ONE_SHARD)
    for name in (EXPERT, WQ_A, TABLE, "embed.weight"):
        assert torch.equal(state[name], decoded(stored, name)), name
