"""The accounting of any valid configuration equals what is built, counted and written."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finwhale.checkpoint.save import save_tensors
from finwhale.config import ModelConfig, PoolUse, build_layer_specs, preset
from finwhale.config.accounting import (
    account,
    exact_decoder_tail,
    flops_per_token,
    index_keys_scored,
    kv_bytes_per_token,
)
from finwhale.config.layers import Half
from finwhale.model import Backbone
from tests.strategies import model_configs

MANY = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(
    max_examples=3,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def meta_model(config: ModelConfig) -> Backbone:
    text = config.text_config
    token_map = torch.arange(text.vocab_size) % text.engram_compressed_vocab_size
    with torch.device("meta"):
        return Backbone(config, token_map=token_map)


def payload(folder: Path) -> tuple[int, int]:
    """Return (tensors, payload bytes) of the safetensors files, read with no code of ours."""
    tensors = num_bytes = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        tensors += sum(name != "__metadata__" for name in header)
        num_bytes += file.stat().st_size - 8 - length
    return tensors, num_bytes


def write_ones(config: ModelConfig, folder: Path) -> tuple[int, int]:
    def source(spec, rows):
        return torch.ones(spec.shape)[rows]

    save_tensors(config, source, folder, overwrite=True)
    return payload(folder)


@MANY
@given(model_configs())
def test_parameters_equal_the_state_of_the_module(config):
    counted = sum(value.numel() for value in meta_model(config).state_dict().values())
    assert account(config).total_parameters == counted


@FEW
@given(config=model_configs())
def test_bytes_of_random_configs_equal_what_is_written(config, tmp_path):
    a = account(config)
    written = write_ones(config, tmp_path / "checkpoint")
    assert written == (a.num_checkpoint_tensors, a.checkpoint_bytes)


@pytest.mark.parametrize("name", ["unit", "mini"])
def test_bytes_of_a_preset_equal_what_is_written(name, tmp_path):
    a = account(preset(name))
    written = write_ones(preset(name), tmp_path / "checkpoint")
    assert written == (a.num_checkpoint_tensors, a.checkpoint_bytes)


@MANY
@given(model_configs())
def test_config_survives_a_round_trip(config):
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@MANY
@given(model_configs())
def test_every_layer_reads_from_an_owner_at_or_below_it(config):
    specs = build_layer_specs(config.text_config)
    for spec in specs:
        if spec.kv_owner is None:
            assert spec.topk_owner is None
            assert spec.ratio == 0
            continue
        assert specs[spec.kv_owner].owns_kv
        assert specs[spec.topk_owner].owns_topk
        assert spec.kv_owner <= spec.topk_owner <= spec.layer_id
        assert specs[spec.kv_owner].ratio == spec.ratio
    builders = [s.layer_id for s in specs if s.pool is PoolUse.BUILDS]
    assert builders == [config.text_config.candidate_source_layer_id]
    decoder = [s.layer_id for s in specs if s.half is Half.DECODER]
    assert decoder == list(range(builders[0], len(specs)))


@MANY
@given(model_configs(), st.integers(0, 300))
def test_kv_bytes_count_whole_groups_only(config, tokens):
    a, text = account(config), config.text_config
    entry = text.head_dim * 9 // 16 + text.index_head_dim * 17 // 32
    ratios = [text.compress_ratios[i] for i in text.kv_source_layer_ids]
    assert a.kv_bytes(tokens) == sum(tokens // r * entry for r in ratios)
    assert a.kv_bytes(2 * tokens) == 2 * tokens * kv_bytes_per_token(text)


@MANY
@given(model_configs(), st.integers(1, 500))
def test_flops_never_fall_with_context_and_decode_costs_no_less(config, context):
    decode, prefill = (flops_per_token(config, phase) for phase in ("decode", "prefill"))
    assert decode(context).raw <= decode(context + 1).raw
    assert prefill(context).raw <= decode(context).raw
    assert decode(context).weighted <= decode(context).raw
    full, pool = index_keys_scored(config.text_config, context)
    assert (decode(context).index_keys_full, decode(context).index_keys_pool) == (full, pool)


@MANY
@given(model_configs())
def test_exact_tail_is_what_following_the_windows_back_gives(config):
    # Independent: walk from the last row of the last layer down, one window a layer.
    text = config.text_config
    rows = 1
    for layer in reversed(range(text.num_hidden_layers)):
        if layer == max(text.kv_source_layer_ids):
            break
        rows += text.sliding_window - 1
    assert exact_decoder_tail(text) == rows
