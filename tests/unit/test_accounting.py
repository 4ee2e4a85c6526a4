"""Every figure of spec/backbone.md section 11 and spec/kv-cache.md section 1, typed from there.

The FLOP figures are those of `floors.py`, an independent calculation shared with the project:
`python floors.py` prints GF per operation; its exact integers were written down here.
"""

import json
from dataclasses import replace

import pytest

from finwhale.config import PRESETS, preset
from finwhale.config.accounting import (
    PRECISION_WEIGHTS,
    account,
    exact_decoder_tail,
    fixed_state,
    flops_per_token,
    index_keys_scored,
    kv_bytes_per_token,
    kv_owners,
    last_global_kv_layer,
    v4_flash_kv_bytes_per_token,
)
from finwhale.config.layers import build_layer_specs


@pytest.fixture(scope="module")
def flash():
    return account(preset("flash"))


def flops_at(accounting, phase, context):
    return next(f for f in accounting.flops if (f.phase, f.context_tokens) == (phase, context))


def test_flash_parameters_by_part(flash):
    assert flash.parameters == {
        "routed_experts": 543_581_798_400,
        "attention": 5_064_696_320,
        "shared_experts": 1_415_577_600,
        "router": 78_673_920,
        "mhc": 39_323_760,
        "compressors": 18_352_128,
        "indexers": 43_516_416,
        "norms": 414_720,
        "embedding_and_head": 1_323_827_200,
        "engram_tables": 196_613_849_600,
        "engram": 314_654_720,
        "dspark": 14_225_362_530,
        "vision": 485_268_480,
    }


def test_flash_parameter_totals(flash):
    assert flash.backbone_parameters == 551_566_180_464
    assert flash.engram_table_parameters == 196_613_849_600
    assert flash.total_parameters == 763_205_315_794


def test_flash_checkpoint(flash):
    assert flash.num_checkpoint_tensors == 96_085
    assert flash.checkpoint_bytes == 510_286_023_000
    # 2401 DSpark tensors, 263 of vision and aligner, 3 delimiters.
    assert flash.num_text_tensors == 96_085 - 2401 - 263 - 3


def test_flash_activated_per_token(flash):
    # One layer: attention + (6 + 1) experts + router + mHC + two norms.
    layer = 126_617_408 + 7 * 35_389_440 + 1_966_080 + 983_094 + 2 * 5120
    assert round(layer / 1e6, 2) == 377.30
    prefill, decode = flash.activated_prefill, flash.activated_decode
    entries = 3 * (2 * 512 * 5120 + 512)
    index = 3 * (4096 * 1280 + 32 * 5120 + 128 * 512 + 128)
    builder = 512 * 5120 + 512 + 128 * 512 + 128 + 5120
    assert sum(prefill.values()) == 20 * layer + 314_654_720 + entries + index + builder
    assert sum(decode.values()) == (
        40 * layer + 314_654_720 + 18_352_128 + 43_516_416 + 129_280 * 5120 + 5120
    )
    assert round(sum(prefill.values()) / 1e9, 2) == 7.90
    assert round(sum(decode.values()) / 1e9, 2) == 16.13
    assert round((sum(decode.values()) - decode["head"]) / 1e9, 2) == 15.47


def test_looked_up_rows_and_router_biases_are_not_activated(flash):
    assert "engram_tables" not in flash.activated_decode
    assert flash.activated_decode["head"] == 129_280 * 5120
    assert flash.activated_decode["router"] == 40 * 384 * 5120


def test_flash_global_kv(flash):
    assert flash.kv_bytes_per_token == 890
    assert isinstance(flash.kv_bytes_per_token, int)
    assert [(o.layer_id, o.ratio, o.bytes_per_token) for o in flash.kv_owners] == [
        (2, 2, 178),
        (8, 2, 178),
        (14, 2, 178),
        (20, 1, 356),
    ]
    assert {o.main_kv_bytes_per_entry for o in flash.kv_owners} == {288}
    assert {o.index_k_bytes_per_entry for o in flash.kv_owners} == {68}


@pytest.mark.parametrize(
    ("tokens", "num_bytes"),
    [
        (0, 0),
        (1, 356),
        (2, 1780),
        (3, 1780 + 356),
        (64, 56_960),
        (128, 113_920),
        (256, 227_840),
        (512, 455_680),
        (1024, 911_360),
        (131_072, 116_654_080),
        (1_048_576, 933_232_640),
    ],
)
def test_flash_global_kv_of_a_sequence(flash, tokens, num_bytes):
    assert flash.kv_bytes(tokens) == num_bytes


def test_mxfp4_main_entries_would_give_850():
    # Negative control of the group size: one scale per 32 instead of 16 channels.
    owners = kv_owners(preset("flash").text_config)
    wrong = sum((512 // 2 + 512 // 32 + o.index_k_bytes_per_entry) / o.ratio for o in owners)
    assert wrong == 850


@pytest.mark.parametrize("name", ["flash", "mini"])
def test_released_geometry_costs_890_bytes(name):
    assert kv_bytes_per_token(preset(name).text_config) == 890


@pytest.mark.parametrize("name", ["unit", "demo"])
def test_small_geometry_by_hand(name):
    # Heads of 64: 32 + 4; index heads of 32: 16 + 1; two owners at ratio 2, one at ratio 1.
    assert kv_bytes_per_token(preset(name).text_config) == (36 + 17) * (2 / 2 + 1)


def test_odd_entry_at_ratio_2_keeps_its_half_byte():
    text = replace(preset("unit").text_config, head_dim=32, kv_source_layer_ids=(1, 4))
    # Heads of 32: 16 + 2; so an entry of 18 + 17 = 35 bytes, at one and a half per token.
    assert kv_bytes_per_token(text) == 52.5


def test_flash_fixed_state(flash):
    fixed = flash.fixed
    assert fixed.window_row_bytes == 528
    assert fixed.window_bytes == 2_703_360
    assert fixed.encoder_window_bytes == 1_351_680
    assert fixed.open_group_bytes == 12_288
    assert fixed.engram_history_tokens == 3
    assert fixed.total_bytes == 2_703_360 + 12_288 + 3 * 8
    in_tokens = [
        round(n / 890)
        for n in (fixed.window_bytes, fixed.encoder_window_bytes, fixed.open_group_bytes)
    ]
    assert in_tokens == [3037, 1519, 14]


def test_fixed_state_without_engram_has_no_history():
    text = replace(preset("unit").text_config, engram_layer_ids=(), engram_num_embeddings=())
    assert fixed_state(text).engram_history_tokens == 0


def test_flash_exact_decoder_tail(flash):
    assert flash.exact_tail_rows == 128 + 18 * 127 == 2414
    assert flash.exact_tail_after_layer == 20


def test_exact_decoder_tail_starts_after_the_last_global_kv():
    text = preset("unit").text_config
    # Three later layers, window 8: 1 + 3 * 7.
    assert exact_decoder_tail(text) == 22
    later = replace(text, kv_source_layer_ids=(1, 3, 4, 6), index_source_layer_ids=(1, 3, 4, 6))
    assert (last_global_kv_layer(later), exact_decoder_tail(later)) == (6, 8)
    # The general form projects every decoder owner's entries from the encoder's output.
    general = replace(later, ced_kv_from="encoder_output")
    assert (last_global_kv_layer(general), exact_decoder_tail(general)) == (4, 22)


def test_exact_decoder_tail_of_a_one_layer_decoder_is_one_row():
    text = replace(
        preset("unit").text_config,
        kv_source_layer_ids=(1, 3, 7),
        index_source_layer_ids=(1, 3, 7),
        compress_ratios=(0, 2, 2, 2, 2, 2, 2, 1),
        candidate_source_layer_id=7,
    )
    assert exact_decoder_tail(text) == 1


@pytest.mark.parametrize(
    ("context", "full", "pool"),
    [
        (1, 1, 4),
        (2, 3 + 2, 4 * 2),
        (4096, 10_240, 16_384),
        (16_384, 3 * 8192 + 16_384, 4 * 16_384),
        (16_385, 3 * 8192 + 16_385, 4 * 16_384),
        (65_536, 163_840, 65_536),
        (1_048_576, 2_621_440, 65_536),
    ],
)
def test_flash_index_keys_scored(context, full, pool):
    assert index_keys_scored(preset("flash").text_config, context) == (full, pool)


# GF of floors.py at batch 1, as exact integers: 2 FLOPs per multiply-add.
_ATTENTION = 5120 * 1280 + 1280 * 64 * 512 + 5120 * 512 + 4096 * 8 * 1024 + 8 * 1024 * 5120
_INDEX = 8 * (1280 * 32 * 128 + 5120 * 32)
_COMPRESS = 7 * 5120 * 512 + 4 * 512 * 128
FLOORS = {
    "attention projections": 2 * (40 * _ATTENTION + _INDEX + _COMPRESS),
    "routed experts": 2 * 40 * 6 * 3 * 5120 * 2304,
    "shared expert": 2 * 40 * 3 * 5120 * 2304,
    "router": 2 * 40 * 384 * 5120,
    "mHC": 2 * 40 * (2 * 4 * 6 * 4 * 5120 + 2 * 5120 * (16 + 8)),
    "Engram projections": 2 * 2 * 24 * 256 * 5120 * 5,
    "LM head": 2 * 129_280 * 5120,
    "attention core": 4 * 64 * 512 * (38 * 512 + 40 * 128),
}
_PER_KEY = 2 * 32 * 128 + 2 * 32


@pytest.mark.parametrize(
    ("context", "keys"), [(4096, 26_624), (65_536, 229_376), (1_048_576, 2_686_976)]
)
def test_flash_decode_flops_equal_the_independent_calculation(flash, context, keys):
    by_operation = dict(flops_at(flash, "decode", context).by_operation)
    assert by_operation.pop("index scores") == keys * _PER_KEY
    assert by_operation == FLOORS


def test_flash_decode_flops_grow_as_reported(flash):
    short, long = flops_at(flash, "decode", 4096), flops_at(flash, "decode", 1_048_576)
    # spec/training.md section 5: raw about 61 %, weighted "only by 1/4".
    assert round(100 * (long.raw / short.raw - 1)) == 61
    assert 0.245 < long.weighted / short.weighted - 1 < 0.26


def test_equal_weights_give_the_raw_count(flash):
    # Negative control of the weighting: only the index products are FP4.
    f = flops_at(flash, "decode", 1_048_576)
    assert PRECISION_WEIGHTS == {"fp32": 1.0, "bf16": 1.0, "fp8": 0.5, "fp4": 0.25}
    ratio = {k: f.weighted_by_operation[k] / f.by_operation[k] for k in f.by_operation}
    assert ratio["index scores"] == 0.25
    assert ratio["routed experts"] == ratio["shared expert"] == 0.5
    assert ratio["attention core"] == ratio["LM head"] == ratio["router"] == 1.0
    assert 0.5 < ratio["attention projections"] < 1.0


def test_bf16_checkpoint_weights_every_matrix_as_bf16():
    f = flops_per_token(replace(preset("mini"), quantization_config=None), "decode")(4096)
    assert f.weighted_by_operation["routed experts"] == f.by_operation["routed experts"]
    assert f.weighted_by_operation["index scores"] == f.by_operation["index scores"] / 4


def test_flash_prefill_runs_the_encoder_and_the_decoder_kv_path(flash):
    f = flops_at(flash, "prefill", 65_536)
    assert f.index_keys_full == 3 * 32_768
    assert f.index_keys_pool == 0
    encoder = 20 * _ATTENTION + 3 * (1280 * 32 * 128 + 5120 * 32) + _COMPRESS
    assert f.by_operation["attention projections"] == 2 * encoder
    assert f.by_operation["routed experts"] == FLOORS["routed experts"] // 2
    assert f.by_operation["attention core"] == 4 * 64 * 512 * (18 * 512 + 20 * 128)
    assert "LM head" not in f.by_operation


def test_flops_of_an_unknown_phase_are_refused():
    with pytest.raises(ValueError, match="phase: got 'train'"):
        flops_per_token(preset("unit"), "train")


def test_v4_flash_arithmetic_is_marked_as_derived(flash):
    assert v4_flash_kv_bytes_per_token() == 3514.25
    assert v4_flash_kv_bytes_per_token(132) == 3850.25
    assert round(flash.derived["v4_flash_ratio"], 2) == 3.95
    assert round(flash.derived["v4_flash_fp8_index_ratio"], 2) == 4.33
    assert round(flash.derived["deepseek_67b_ratio"], 1) == 437.2
    assert account(preset("mini")).derived == {}


@pytest.mark.parametrize("name", PRESETS)
def test_json_is_plain_and_complete(name):
    accounting = account(preset(name))
    raw = json.loads(json.dumps(accounting.to_json()))
    assert raw["total_parameters"] == accounting.total_parameters
    assert raw["kv_bytes_per_token"] == accounting.kv_bytes_per_token
    assert raw["fixed"]["total_bytes"] == accounting.fixed.total_bytes
    assert raw["flops"][0]["raw"] == accounting.flops[0].raw
    assert raw["precision_weights"]["fp4"] == 0.25


def test_mini_weighs_about_29_megabytes():
    assert 28.5e6 < account(preset("mini")).checkpoint_bytes < 29.5e6


def forty_layer_toy():
    """The released schedule at toy widths; index owners and ratios as in the release."""
    released, unit = preset("flash").text_config, preset("unit").text_config
    text = replace(
        unit,
        num_hidden_layers=40,
        compress_ratios=released.compress_ratios[:40],
        kv_source_layer_ids=released.kv_source_layer_ids,
        index_source_layer_ids=released.index_source_layer_ids,
        candidate_source_layer_id=20,
        engram_layer_ids=(1, 14),
    )
    return replace(preset("unit"), text_config=text)


def independent_parameters(config) -> int:
    """Sum the shapes of spec/backbone.md section 10 with no help from the inventory."""
    c = config.text_config
    d, hd, h, q, n, ff = (
        c.hidden_size,
        c.head_dim,
        c.num_attention_heads,
        c.q_lora_rank,
        c.hc_mult,
        c.moe_intermediate_size,
    )
    z = c.o_groups * c.o_lora_rank
    attention = q * d + q + h * hd * q + hd * d + hd + z * (h * hd // c.o_groups) + d * z + h
    mhc = 2 * ((2 + n) * n * n * d + (2 + n) * n + 3)
    moe = (c.n_routed_experts + 1) * 3 * d * ff + c.n_routed_experts * (d + 2)
    total = c.num_hidden_layers * (attention + mhc + moe + 2 * d) + d + 2 * c.vocab_size * d
    for layer in c.kv_source_layer_ids:
        gate = hd * d if c.compress_ratios[layer] == 2 else 0
        total += hd * d + gate + hd + c.index_head_dim * hd + c.index_head_dim
    total += len(c.index_source_layer_ids) * c.index_n_heads * (c.index_head_dim * q + d)
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
    for rows in c.engram_num_embeddings:
        total += rows * c.engram_head_dim
        total += (n + 1) * d * columns * c.engram_head_dim + 2 * n * d
    return total


CONFIGS = {
    "unit": preset("unit"),
    "demo": preset("demo"),
    "nano": preset("nano"),
    "mini": preset("mini"),
    "toy40": forty_layer_toy(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_equal_independent_arithmetic(name):
    assert account(CONFIGS[name]).total_parameters == independent_parameters(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_equal_the_modules_state(name):
    import torch

    from finwhale.model import Backbone

    config = CONFIGS[name]
    text = config.text_config
    token_map = torch.arange(text.vocab_size) % text.engram_compressed_vocab_size
    with torch.device("meta"):
        model = Backbone(config, token_map=token_map)
    counted = sum(value.numel() for value in model.state_dict().values())
    assert counted == account(config).total_parameters


def test_toy_with_the_released_schedule_has_its_owners_and_tail():
    toy = forty_layer_toy().text_config
    assert [s.layer_id for s in build_layer_specs(toy) if s.owns_kv] == [2, 8, 14, 20]
    assert exact_decoder_tail(toy) == 1 + 19 * 7
    assert kv_bytes_per_token(toy) == (36 + 17) * 2.5
