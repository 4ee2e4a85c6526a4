"""Hashed weights: pinned by Python integers, exact in bf16, the same in any slicing."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from finwhale.checkpoint import fill_hashed, hashed_tensor, hashed_tensors
from finwhale.checkpoint.hashed_weights import hashed_rows, hashed_source
from finwhale.config import preset
from finwhale.config.inventory import checkpoint_tensors
from finwhale.model import Backbone
from tests.checkpoint_files import smallest_config

MASK = 2**64 - 1
MATRIX = "layers.0.attn.wq_a.weight"


def splitmix_byte(seed: int, name: str, index: int) -> int:
    """Top byte of splitmix64 with Python integers, from its published constants."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) >> 56


# name, columns, value of a hash byte worked out from the ranges stated in the source
RANGES = [
    # 64 columns: sqrt(3 / 64) = 0.2165, the nearest power of two is 2^-2
    (MATRIX, 64, lambda b: (2 * b - 255) / 256 / 4),
    # 5120 columns: sqrt(3 / 5120) = 0.0242, between 2^-5 and 2^-6, nearer to 2^-5 = 0.03125
    ("layers.0.attn.wq_b.weight", 5120, lambda b: (2 * b - 255) / 256 / 32),
    ("norm.weight", None, lambda b: (48 + b % 32) / 64),
    ("layers.1.attn.indexer.k_norm.weight", None, lambda b: (48 + b % 32) / 64),
    ("layers.1.engram.q_weight", 8, lambda b: (48 + b % 32) / 64),
    ("layers.0.hc_attn_scale", None, lambda b: (88 + b % 56) / 128),
    ("layers.0.hc_ffn_base", None, lambda b: (2 * b - 255) / 512),
    ("layers.0.ffn.gate.bias", None, lambda b: (2 * b - 255) / 2048),
    ("layers.0.ffn.gate.bias_vl", None, lambda b: (2 * b - 255) / 2048),
    ("layers.0.attn.attn_sink", None, lambda b: (2 * b - 255) / 256),
    ("embed.weight", 64, lambda b: (2 * b - 255) / 1024),
    ("layers.1.engram.embed.weight", 64, lambda b: (2 * (b // 16) - 15) / 16),
]


@pytest.mark.parametrize(("name", "columns", "value"), RANGES, ids=[r[0] for r in RANGES])
@pytest.mark.parametrize("seed", [0, 12345])
def test_values_are_those_of_python_integers(name, columns, value, seed):
    shape = (7,) if columns is None else (3, columns)
    tensor = hashed_tensor(name, shape, seed)
    assert (tensor.dtype, tensor.shape) == (np.float32, shape)
    expected = [value(splitmix_byte(seed, name, i)) for i in range(tensor.size)]
    assert tensor.flatten().tolist() == expected


def test_a_few_values_are_pinned():
    # SHA-256 of "0:embed.weight" starts with 8f91d8bac53b8fd8; the bytes are [107, 254, 174, 163].
    values = hashed_tensor("embed.weight", (2, 2), 0).flatten() * 1024
    assert values.tolist() == [-41.0, 253.0, 93.0, 71.0]


def test_every_value_is_a_bf16_number_and_not_zero():
    for spec, values in hashed_tensors(smallest_config(), 7):
        tensor = torch.from_numpy(values)
        assert tuple(tensor.shape) == spec.shape
        assert torch.equal(tensor.bfloat16().float(), tensor), spec.name
        assert tensor.all(), spec.name


@pytest.mark.parametrize("fan_in", [32, 64, 128, 256, 1280, 5120, 20480])
def test_matrices_have_about_the_deviation_of_their_width(fan_in):
    std = hashed_tensor(MATRIX, (200, fan_in), 1).std() * fan_in**0.5
    assert 2**-0.5 * 0.97 < std < 2**0.5 * 1.03


def test_ranges_exercise_every_branch():
    tensors = {spec.name: values for spec, values in hashed_tensors(preset("unit"), 0)}
    for name, values in tensors.items():
        if name.endswith("_scale"):
            assert ((values >= 0.68) & (values <= 1.12)).all()
        elif "norm" in name or name.endswith(("q_weight", "k_weight")):
            assert ((values >= 0.75) & (values < 1.25)).all()
        elif values.size >= 24:
            assert (values > 0).any(), name
            assert (values < 0).any(), name
    assert (tensors["layers.0.ffn.gate.bias"] != tensors["layers.0.ffn.gate.bias_vl"]).any()


def test_rows_are_rows_of_the_whole():
    whole = hashed_tensor(MATRIX, (70, 64), 3)
    for part in (slice(0, 70), slice(5, 6), slice(32, 64), slice(69, 70)):
        assert np.array_equal(hashed_rows(MATRIX, (70, 64), 3, part), whole[part])


def test_chunks_do_not_change_the_values(monkeypatch):
    whole = hashed_tensor(MATRIX, (70, 64), 3)
    monkeypatch.setattr("finwhale.checkpoint.hashed_weights._CHUNK", 100)
    assert np.array_equal(hashed_tensor(MATRIX, (70, 64), 3), whole)


def test_rows_far_into_the_largest_table_need_no_table():
    shape, start = (384016682, 256), 384016680
    rows = hashed_rows("layers.14.engram.embed.weight", shape, 0, slice(start, start + 2))
    byte = splitmix_byte(0, "layers.14.engram.embed.weight", start * 256 + 300)
    assert rows[1, 44] == (2 * (byte // 16) - 15) / 16


def test_tensors_differ_by_name_and_seed():
    first = hashed_tensor(MATRIX, (4, 64), 0)
    assert not np.array_equal(first, hashed_tensor(MATRIX, (4, 64), 1))
    assert not np.array_equal(first, hashed_tensor(MATRIX.replace("0", "1"), (4, 64), 0))


def test_model_filled_in_place_holds_the_same_weights_as_the_source():
    config = smallest_config()
    model = Backbone(config, torch.arange(512) % 258)
    fill_hashed(model, 5)
    source = hashed_source(5)
    state = model.state_dict()
    for spec in checkpoint_tensors(config):
        whole = slice(0, spec.shape[0])
        assert torch.equal(state[spec.name], source(spec, whole)), spec.name


def test_draft_and_vision_parts_are_left_out():
    flash = preset("flash")
    small = replace(
        flash,
        text_config=replace(
            smallest_config().text_config,
            num_nextn_predict_layers=1,
            dspark_target_layer_ids=(2,),
            compress_ratios=(0, 2, 1, 0),
        ),
        image_token_id=511,
    )
    names = {spec.name for spec, _ in hashed_tensors(small, 0)}
    assert names == {spec.name for spec in checkpoint_tensors(small) if spec.is_text}
    assert not any(name.startswith(("mtp", "vision", "aligner", "image")) for name in names)
