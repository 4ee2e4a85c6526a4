"""Every refusal names the field, what was found and what was expected."""

import dataclasses
import json
from pathlib import Path

import pytest

from finwhale.config import (
    ConfigError,
    ModelConfig,
    QuantizationConfig,
    RopeScaling,
    TextConfig,
    VisionConfig,
)

RELEASED = Path(__file__).parents[1] / "golden" / "released_config.json"


def released() -> dict:
    return json.loads(RELEASED.read_text(encoding="utf-8"))


def part_of(raw: dict, where: str) -> dict:
    for name in filter(None, where.split(".")):
        raw = raw[name]
    return raw


def wrong_type(kind: str) -> object:
    """A JSON value that no field of this kind takes."""
    return {"str": 7, "bool": "yes"}.get(kind, "a word")


def fields_of(cls: type, where: str) -> list[tuple[str, str, str]]:
    nested = {"text_config", "vision_config", "quantization_config", "rope_scaling"}
    return [(where, f.name, str(f.type)) for f in dataclasses.fields(cls) if f.name not in nested]


ALL_FIELDS = [
    *fields_of(ModelConfig, ""),
    *fields_of(TextConfig, "text_config"),
    *fields_of(VisionConfig, "vision_config"),
    *fields_of(QuantizationConfig, "quantization_config"),
    *fields_of(RopeScaling, "text_config.rope_scaling"),
]


@pytest.mark.parametrize(("where", "name", "kind"), ALL_FIELDS, ids=lambda v: str(v) or "top")
def test_wrong_type_is_refused_by_name(where, name, kind):
    raw = released()
    part_of(raw, where)[name] = wrong_type(kind)
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize(
    "name", [f.name for f in dataclasses.fields(TextConfig) if f.type in ("int", "float")]
)
def test_boolean_is_not_a_number(name):
    raw = released()
    raw["text_config"][name] = True
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize("where", ["", "text_config", "vision_config", "text_config.rope_scaling"])
def test_null_is_not_a_value(where):
    for name, value in part_of(released(), where).items():
        if value is None or isinstance(value, dict) or name in ("use_cache",):
            continue
        raw = released()
        part_of(raw, where)[name] = None
        with pytest.raises(ConfigError, match=name):
            ModelConfig.from_json(raw)


WRONG_VALUES = [
    ("", "architectures", ["DeepseekV4ForCausalLM"]),
    ("", "dtype", "float16"),
    ("", "bos_token_id", -1),
    ("", "eos_token_id", 129280),
    ("", "pad_token_id", 129280),
    ("quantization_config", "quant_method", "awq"),
    ("quantization_config", "activation_scheme", "static"),
    ("quantization_config", "weight_block_size", [128, 128]),
    ("quantization_config", "scale_fmt", "float"),
    ("quantization_config", "expert_dtype", "fp8"),
    ("vision_config", "model_type", "siglip_vision_model"),
    ("text_config", "model_type", "deepseek_v4_text"),
    ("text_config", "dtype", "float16"),
    ("text_config", "num_key_value_heads", 2),
    ("text_config", "n_shared_experts", 0),
    ("text_config", "scoring_func", "sigmoid"),
    ("text_config", "topk_method", "greedy"),
    ("text_config", "norm_topk_prob", False),
    ("text_config", "hidden_act", "gelu"),
    ("text_config", "attention_bias", True),
    ("text_config", "attention_dropout", 0.1),
    ("text_config", "tie_word_embeddings", True),
    ("text_config", "ced_kv_from", "embedding"),
    ("text_config", "o_groups", 7),
    ("text_config", "num_experts_per_tok", 385),
    ("text_config", "qk_rope_head_dim", 63),
    ("text_config", "qk_rope_head_dim", 130),
    ("text_config", "hidden_size", 5121),
    ("text_config", "moe_intermediate_size", 2300),
    ("text_config", "head_dim", 500),
    ("text_config", "index_head_dim", 100),
    ("text_config", "q_lora_rank", 1290),
    ("text_config", "o_lora_rank", 1025),
    ("text_config", "engram_head_dim", 250),
    ("text_config", "engram_num_embeddings", [384006168, 384006168]),
    ("text_config", "engram_num_embeddings", [384006168]),
    ("text_config", "engram_max_ngram_size", 1),
    ("text_config", "engram_pad_token_id", 129280),
    ("text_config", "engram_compressed_vocab_size", 129281),
    ("text_config", "engram_compressed_vocab_size", 0),
    ("text_config.rope_scaling", "rope_type", "linear"),
    ("text_config.rope_scaling", "factor", 0),
    ("text_config.rope_scaling", "beta_fast", -1),
    ("text_config.rope_scaling", "beta_slow", 0),
    ("text_config.rope_scaling", "original_max_position_embeddings", 0),
]
POSITIVE = (
    "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim "
    "qk_rope_head_dim q_lora_rank o_lora_rank o_groups sliding_window rope_theta "
    "compress_rope_theta index_n_heads index_head_dim index_topk candidate_topk_blocks "
    "candidate_block_size n_routed_experts num_experts_per_tok routed_scaling_factor swiglu_limit "
    "rms_norm_eps initializer_range max_position_embeddings hc_mult hc_sinkhorn_iters hc_eps"
).split()


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [*WRONG_VALUES, *(("text_config", n, v) for n in POSITIVE for v in (0, -1))],
    ids=lambda v: str(v) or "top",
)
def test_wrong_value_is_refused_by_name_and_value(where, name, value):
    raw = released()
    part_of(raw, where)[name] = value
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_json(raw)
    # A size may first break a rule of the field that it must fit; the message names one of them.
    assert name in str(error.value)
    assert "got" in str(error.value)
    assert "expected" in str(error.value)


@pytest.mark.parametrize(
    ("where", "typo", "meant"),
    [
        ("", "model_typ", "model_type"),
        ("text_config", "hidden_sizes", "hidden_size"),
        ("text_config", "compress_ratio", "compress_ratios"),
        ("text_config.rope_scaling", "faktor", "factor"),
        ("vision_config", "patch_sise", "patch_size"),
        ("quantization_config", "scale_fmts", "scale_fmt"),
    ],
)
def test_unknown_nested_field_asks_did_you_mean(where, typo, meant):
    raw = released()
    part_of(raw, where)[typo] = 1
    with pytest.raises(ConfigError, match=f"{typo}.*did you mean '{meant}'"):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize(
    "name", ["n_group", "num_hash_layers", "first_k_dense_replace", "kv_lora_rank"]
)
def test_field_of_an_older_model_is_refused(name):
    raw = released()
    raw["text_config"][name] = 1
    with pytest.raises(ConfigError, match=f"text_config.{name}: unknown field"):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize(
    "found", ["deepseek_v4", "deepseek_v3", "deepseek_v41_text", "deepseek_v410", "llama", None, 4]
)
def test_other_model_type_is_refused_and_names_the_nearest(found):
    # cases.md 23 and 119: the family is chosen by the whole string, never by a prefix.
    raw = released()
    raw["model_type"] = found
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_json(raw)
    assert repr(found) in str(error.value)
    assert "'deepseek_v41'" in str(error.value)


def test_missing_model_type_is_refused():
    raw = released()
    del raw["model_type"]
    with pytest.raises(ConfigError, match="model_type"):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize("value", [[], "text", 3, True])
@pytest.mark.parametrize("name", ["text_config", "vision_config", "quantization_config"])
def test_part_that_is_no_object_is_refused(name, value):
    raw = released()
    raw[name] = value
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize("value", [None, [], "yarn", 16])
def test_rope_scaling_that_is_no_object_is_refused(value):
    raw = released()
    raw["text_config"]["rope_scaling"] = value
    with pytest.raises(ConfigError, match="rope_scaling"):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize("remove", [True, False], ids=["absent", "null"])
def test_missing_text_config_is_refused(remove):
    raw = released()
    raw["text_config"] = None
    if remove:
        del raw["text_config"]
    with pytest.raises(ConfigError, match="text_config: missing"):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '"deepseek_v41"', "\xff"])
def test_file_that_is_no_json_object_is_refused_by_path(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_json(file)
    assert str(file) in str(error.value)


def test_absent_file_is_refused_by_path(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        ModelConfig.from_json(tmp_path)


def test_refusal_inside_a_file_names_the_file(tmp_path):
    raw = released()
    raw["text_config"]["hc_mult"] = 0
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_json(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)
    assert "text_config.hc_mult" in str(error.value)


def test_engram_rows_without_engram_layers_are_refused():
    raw = released()
    raw["text_config"]["engram_layer_ids"] = []
    with pytest.raises(ConfigError, match="engram_num_embeddings"):
        ModelConfig.from_json(raw)


def test_no_engram_at_all_is_allowed():
    raw = released()
    raw["text_config"]["engram_layer_ids"] = []
    raw["text_config"]["engram_num_embeddings"] = []
    assert ModelConfig.from_json(raw).text_config.engram_layer_ids == ()
