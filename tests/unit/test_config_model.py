"""Reading and writing config.json. The fixture is typed from spec/backbone.md section 1."""

import copy
import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from finwhale.config import PRESETS, ConfigError, ModelConfig, TextConfig, preset

RELEASED = Path(__file__).parents[1] / "golden" / "released_config.json"


def released() -> dict:
    return json.loads(RELEASED.read_text(encoding="utf-8"))


def test_released_file_reads_as_preset_flash():
    assert ModelConfig.from_json(RELEASED) == preset("flash")


def test_released_file_reads_from_folder_and_from_object(tmp_path):
    (tmp_path / "config.json").write_text(RELEASED.read_text(encoding="utf-8"), encoding="utf-8")
    assert ModelConfig.from_json(tmp_path) == ModelConfig.from_json(released())


def test_released_values_survive_a_round_trip():
    raw, written = released(), ModelConfig.from_json(RELEASED).to_json()
    # A serving switch with no meaning for the weights is read and dropped; a dtype is added.
    del raw["text_config"]["use_cache"]
    assert written["text_config"].pop("dtype") == "bfloat16"
    assert written == raw


@pytest.mark.parametrize("name", PRESETS)
def test_preset_survives_a_round_trip_through_text(name):
    config = preset(name)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("swiglu_limit", 7.0),
        ("routed_scaling_factor", 2.5),
        ("rms_norm_eps", 1e-6),
        ("hc_eps", 1e-5),
        ("hc_sinkhorn_iters", 3),
        ("initializer_range", 0.006),
        ("ced_kv_from", "encoder_output"),
    ],
)
def test_flag_that_changes_the_mathematics_survives_export_and_import(field, value):
    # cases.md 19: a clamp flag lost on conversion.
    raw = released()
    raw["text_config"][field] = value
    again = ModelConfig.from_json(ModelConfig.from_json(raw).to_json())
    assert getattr(again.text_config, field) == value
    assert again != preset("flash")


def test_general_kv_source_is_written_only_when_it_is_not_the_released_one():
    assert "ced_kv_from" not in preset("flash").to_json()["text_config"]


def test_missing_field_takes_the_released_value():
    raw = released()
    del raw["text_config"]["hc_sinkhorn_iters"]
    assert ModelConfig.from_json(raw) == preset("flash")


def test_bf16_variant_has_no_quantization_config():
    raw = released()
    del raw["quantization_config"]
    config = ModelConfig.from_json(raw)
    assert config.quantization_config is None
    assert "quantization_config" not in config.to_json()


def test_text_only_variant_has_no_vision_config():
    raw = released()
    raw["vision_config"] = None
    assert ModelConfig.from_json(raw).vision_config is None


def test_keys_that_other_libraries_write_are_ignored():
    raw = released()
    raw["transformers_version"] = "5.23.0"
    raw["torch_dtype"] = "bfloat16"
    raw["text_config"]["_name_or_path"] = "anything"
    assert ModelConfig.from_json(raw) == preset("flash")


def test_config_is_a_frozen_value():
    config = preset("unit")
    with pytest.raises(FrozenInstanceError):
        config.bos_token_id = 5
    assert hash(config) == hash(copy.deepcopy(config))


def test_replace_validates_again():
    text = preset("unit").text_config
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        replace(text, num_experts_per_tok=text.n_routed_experts + 1)


def test_unknown_preset_lists_the_names():
    with pytest.raises(ValueError, match="unit, demo, nano, mini, small, flash"):
        preset("large")


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "flash"])
def test_small_presets_keep_the_structure_of_the_release(name):
    text = preset(name).text_config
    assert not text.tie_word_embeddings
    assert text.head_dim in (64, 128, 512)
    assert text.index_n_heads >= 24
    assert text.hc_mult == 4
    for width in (
        text.index_head_dim,
        text.engram_head_dim,
        text.hidden_size,
        text.moe_intermediate_size,
        text.q_lora_rank,
        text.o_groups * text.o_lora_rank,
        text.num_attention_heads * text.head_dim // text.o_groups,
        text.engram_columns * text.engram_head_dim,
    ):
        assert width % 32 == 0


def test_mini_geometry_is_fixed():
    # Typed from the issue: other engines load this geometry.
    text = preset("mini").text_config
    assert text.compress_ratios == (0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1)
    assert text.kv_source_layer_ids == (1, 3, 5, 6)
    assert text.index_source_layer_ids == (1, 3, 5, 6, 8, 10)
    assert text.candidate_source_layer_id == 6
    assert (text.hidden_size, text.num_attention_heads, text.head_dim) == (256, 4, 512)
    assert (text.qk_rope_head_dim, text.q_lora_rank) == (64, 128)
    assert (text.o_groups, text.o_lora_rank) == (2, 64)
    assert (text.n_routed_experts, text.num_experts_per_tok) == (8, 2)
    assert (text.moe_intermediate_size, text.n_shared_experts) == (128, 1)
    assert (text.index_n_heads, text.index_head_dim, text.index_topk) == (24, 128, 128)
    assert (text.sliding_window, text.candidate_topk_blocks, text.candidate_block_size) == (
        128,
        128,
        8,
    )
    assert text.vocab_size == 4096
    rows = sum(text.engram_num_embeddings)
    assert 1.5e6 < rows * text.engram_head_dim < 2.5e6


def test_defaults_are_the_release():
    assert TextConfig() == preset("flash").text_config
