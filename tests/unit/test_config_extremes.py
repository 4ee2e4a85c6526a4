"""Every number of a configuration at its extremes: a sound model or one sentence, and soon.

What is accepted must also be computable: tensors can be listed and rotary tables made.
"""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path

import pytest

from finwhale.config import ConfigError, ModelConfig, RopeScaling, TextConfig, VisionConfig
from finwhale.config.inventory import checkpoint_tensors
from finwhale.config.limits import MOST_COLUMNS, MOST_EXPERTS
from finwhale.config.presets import PRESETS, preset
from finwhale.ops.rope import rope_frequencies

PARTS = {
    "": ModelConfig,
    "text_config": TextConfig,
    "text_config.rope_scaling": RopeScaling,
    "vision_config": VisionConfig,
}
NUMBERS = [
    (where, field.name)
    for where, part in PARTS.items()
    for field in dataclasses.fields(part)
    if "int" in str(field.type) or "float" in str(field.type)
]
VALUES = [
    *(0, -1, 1, 2, 3, 64, 10**7, 2**20, 2**31, 10**9, 10**12, 2**40, 2**62, 2**63, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1e-45, 5e-324, 1e20, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), "1", None, True, [], {}),
    *([0] * 100_000, list(range(100_000)), [10**400], [-1], [0.5]),
]
MOST_BYTES = 500 << 20


def part_of(raw: dict, where: str) -> dict:
    for name in filter(None, where.split(".")):
        raw = raw[name]
    return raw


@pytest.mark.parametrize(("where", "field"), NUMBERS, ids=lambda v: str(v) or "top")
def test_an_extreme_value_gives_a_sound_model_or_a_sentence(tmp_path, where, field):
    """Cases [9] and [10]: endless loops, OverflowError, `math domain error` without a name."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    file = tmp_path / "config.json"
    for value in VALUES:
        raw = preset("unit").to_json()
        raw["vision_config"] = preset("flash").to_json()["vision_config"]
        part_of(raw, where)[field] = value
        file.write_text(json.dumps(raw))
        try:
            config = ModelConfig.from_json(file)
        except ConfigError as error:
            message = str(error)
            assert message.startswith(f"{file}: ")
            assert "\n" not in message
            assert len(message) < len(str(file)) + 400, message[:600]
            continue
        text = config.text_config
        assert checkpoint_tensors(config)
        for theta, scaling in (
            (text.rope_theta, None),
            (text.compress_rope_theta, text.rope_scaling),
        ):
            assert rope_frequencies(theta, text.qk_rope_head_dim, scaling).isfinite().all()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < MOST_BYTES


NAMED = [
    ("n_routed_experts", 10**9),
    ("engram_n_heads", 10**9),
    ("engram_max_ngram_size", 10**7),
    ("engram_vocab_size", 2**62),
    ("hc_sinkhorn_iters", 10**9),
    ("compress_rope_theta", 10**400),
    ("sliding_window", 10**12),
    ("sliding_window", 10**7),
    ("swiglu_limit", float("inf")),
    ("vocab_size", 2**40),
    ("rms_norm_eps", 5e-324),
]


@pytest.mark.parametrize(("field", "value"), NAMED)
def test_values_that_no_file_can_hold_are_refused_by_field_and_range(field, value):
    raw = preset("flash").to_json()
    raw["text_config"][field] = value
    with pytest.raises(ConfigError, match=rf"text_config\.{field}: got .*, expected a number from"):
        ModelConfig.from_json(raw)


def test_slow_turns_of_yarn_are_refused_by_field():
    raw = preset("flash").to_json()
    raw["text_config"]["rope_scaling"]["beta_slow"] = 1e308
    with pytest.raises(ConfigError, match=r"rope_scaling\.beta_slow: got 1e\+308"):
        ModelConfig.from_json(raw)


def test_products_that_decide_a_loop_are_bounded():
    """Each factor is in its range; the product would be a loop of a hundred million."""
    raw = preset("unit").to_json()
    raw["text_config"]["n_routed_experts"] = MOST_EXPERTS // 8 + 1  # 8 layers
    with pytest.raises(ConfigError, match="experts in all layers, these have 131080"):
        ModelConfig.from_json(raw)
    raw = preset("unit").to_json()
    raw["text_config"] |= {"engram_n_heads": 256, "engram_max_ngram_size": 32}
    with pytest.raises(ConfigError, match=f"at most {MOST_COLUMNS} columns"):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_pass_with_room_to_grow(name):
    text = preset(name).text_config
    assert 4 * text.num_hidden_layers * text.n_routed_experts <= MOST_EXPERTS
    assert 4 * len(text.engram_layer_ids) * text.engram_columns <= MOST_COLUMNS
    assert ModelConfig.from_json(preset(name).to_json()) == preset(name)


def test_released_file_passes():
    file = Path(__file__).parents[1] / "golden" / "released_config.json"
    assert ModelConfig.from_json(file).text_config.num_hidden_layers == 40
