"""Named model sizes. Each is a function of nothing that returns a whole ModelConfig.

`flash` is the released configuration. The others keep its structure at a smaller size: untied
embedding and head, four residual streams, at least 24 index heads (fewer tie at zero), every
quantised width a multiple of 32. `mini` keeps the released kernel geometry (heads of 512 with
64 rotary channels, index heads of 128, window, top-k and blocks of the same alignment), so
that engines written for the release can load it; its geometry is fixed. `window_only` and
`dense_shape` make what a model is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from finwhale.config.engram import engram_buckets
from finwhale.config.model import ConfigError, ModelConfig, RopeScaling, TextConfig


def _small_model(*, schedule: str, image_token_id: int, yarn_base: int, **text: Any) -> ModelConfig:
    """Build a text-only config; `schedule` is the layer table in letters.

    S window only, F1/F2 Full at that ratio, I Reindex, R Reuse; `|` is the encoder-decoder cut
    and stands directly before the layer that builds the candidate pool.
    """
    ratios: list[int] = []
    kv_ids: list[int] = []
    index_ids: list[int] = []
    cut = -1
    for letter in schedule.split():
        layer_id = len(ratios)
        if letter == "|":
            cut = layer_id
            continue
        if letter == "S":
            ratios.append(0)
            continue
        if letter in ("F1", "F2"):
            kv_ids.append(layer_id)
            index_ids.append(layer_id)
            ratios.append(int(letter[1]))
            continue
        if letter == "I":
            index_ids.append(layer_id)
        ratios.append(ratios[-1])
    text = {"engram_max_ngram_size": 4, **text}
    buckets = engram_buckets(
        num_layers=len(text["engram_layer_ids"]),
        max_ngram_size=text["engram_max_ngram_size"],
        n_heads=text["engram_n_heads"],
        vocab_size=text["engram_vocab_size"],
    )
    return ModelConfig(
        vision_config=None,
        image_token_id=image_token_id,
        text_config=TextConfig(
            num_hidden_layers=len(ratios),
            compress_ratios=tuple(ratios),
            kv_source_layer_ids=tuple(kv_ids),
            index_source_layer_ids=tuple(index_ids),
            candidate_source_layer_id=cut,
            num_nextn_predict_layers=0,
            dspark_target_layer_ids=(),
            dspark_noise_token_id=image_token_id,
            dspark_n_routed_experts=text["n_routed_experts"],
            dspark_num_experts_per_tok=text["num_experts_per_tok"],
            engram_num_embeddings=tuple(b.num_rows for b in buckets),
            rope_scaling=RopeScaling(original_max_position_embeddings=yarn_base),
            **text,
        ),
    )


def unit() -> ModelConfig:
    """All mechanisms in the fewest numbers: unit tests and the first look at a tensor."""
    return _small_model(
        schedule="S F2 R F2 | F1 R I R",
        image_token_id=511,
        yarn_base=256,
        vocab_size=512,
        hidden_size=64,
        moe_intermediate_size=32,
        num_attention_heads=2,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        index_n_heads=24,
        index_head_dim=32,
        index_topk=8,
        candidate_topk_blocks=4,
        candidate_block_size=4,
        engram_layer_ids=(1, 3),
        engram_vocab_size=97,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_compressed_vocab_size=258,
        max_position_embeddings=4096,
    )


def demo() -> ModelConfig:
    """About 1M parameters: learns something readable on two CPU cores in minutes.

    At its training length of 128 tokens top-k (16 of up to 128 entries) and the pool
    (8 blocks of 4) both drop entries.
    """
    return _small_model(
        schedule="S F2 R F2 | F1 I R",
        image_token_id=1023,
        yarn_base=4096,
        vocab_size=1024,
        hidden_size=96,
        moe_intermediate_size=32,
        num_attention_heads=2,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=32,
        index_n_heads=24,
        index_head_dim=32,
        index_topk=16,
        candidate_topk_blocks=8,
        candidate_block_size=4,
        # Narrow matrices need a wider draw than the released 0.02 to learn in few steps.
        initializer_range=0.04,
        engram_layer_ids=(1,),
        engram_vocab_size=499,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_compressed_vocab_size=1024,
        max_position_embeddings=65536,
    )


def nano() -> ModelConfig:
    """For ablations on one CPU or a slice of a GPU: deep enough for every mode in both halves."""
    return _small_model(
        schedule="S F2 R F2 R F2 | F1 R I R I R",
        image_token_id=4095,
        yarn_base=4096,
        vocab_size=4096,
        hidden_size=128,
        moe_intermediate_size=128,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        sliding_window=32,
        index_n_heads=24,
        index_head_dim=32,
        index_topk=32,
        candidate_topk_blocks=16,
        candidate_block_size=8,
        engram_layer_ids=(1, 3),
        engram_vocab_size=1301,
        engram_n_heads=4,
        engram_head_dim=32,
        engram_compressed_vocab_size=4096,
        max_position_embeddings=65536,
    )


def mini() -> ModelConfig:
    """The released kernel geometry at about 29 MB: what other engines can load. Fixed."""
    return _small_model(
        schedule="S F2 R F2 R F2 | F1 R I R I R",
        image_token_id=4095,
        yarn_base=65536,
        vocab_size=4096,
        hidden_size=256,
        moe_intermediate_size=128,
        num_attention_heads=4,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        sliding_window=128,
        index_n_heads=24,
        index_head_dim=128,
        index_topk=128,
        candidate_topk_blocks=128,
        candidate_block_size=8,
        engram_layer_ids=(1, 3),
        engram_vocab_size=1301,
        engram_n_heads=8,
        engram_head_dim=32,
        engram_compressed_vocab_size=4096,
        max_position_embeddings=1048576,
    )


def small() -> ModelConfig:
    """A research size for one GPU: 16 layers, heads of 128."""
    return _small_model(
        schedule="S S F2 R F2 R F2 R | F1 R I R I R I R",
        image_token_id=16383,
        yarn_base=65536,
        vocab_size=16384,
        hidden_size=512,
        moe_intermediate_size=256,
        num_attention_heads=8,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=256,
        o_groups=4,
        o_lora_rank=128,
        n_routed_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        index_n_heads=24,
        index_head_dim=64,
        index_topk=128,
        candidate_topk_blocks=128,
        candidate_block_size=8,
        engram_layer_ids=(1, 4),
        engram_vocab_size=20011,
        engram_n_heads=8,
        engram_head_dim=64,
        engram_compressed_vocab_size=16384,
        max_position_embeddings=1048576,
    )


def flash() -> ModelConfig:
    """The released DeepSeek-V4.1-Flash."""
    return ModelConfig()


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "unit": unit,
    "demo": demo,
    "nano": nano,
    "mini": mini,
    "small": small,
    "flash": flash,
}


def preset(name: str) -> ModelConfig:
    """Return the named preset. Raises ValueError that lists the names."""
    if name not in PRESETS:
        raise ValueError(f"preset: got {name!r}, expected one of {', '.join(PRESETS)}")
    return PRESETS[name]()


def with_compressed_vocab(config: ModelConfig, size: int) -> ModelConfig:
    """Return `config` for a tokenizer whose Engram id map has `size` distinct ids."""
    return replace(
        config, text_config=replace(config.text_config, engram_compressed_vocab_size=size)
    )


def window_only(config: ModelConfig) -> ModelConfig:
    """Return `config` with a window in every layer and nothing global: the first baseline.

    Engram, experts, residual streams and all widths stay; compressors and indexers are gone. Every
    layer has window rotary positions (`rope_theta`, no YaRN), as the window layers of the release.
    A token then reaches back at most num_hidden_layers * (sliding_window - 1) tokens.
    """
    text = config.text_config
    return replace(
        config,
        text_config=replace(
            text,
            compress_ratios=(0,) * len(text.compress_ratios),
            kv_source_layer_ids=(),
            index_source_layer_ids=(),
        ),
    )


# Channels of one head of the dense baseline.
DENSE_HEAD_DIM = 64
# Feed-forward widths of the dense baseline are multiples of it, for the matrix units of a GPU.
_DENSE_STEP = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseShape:
    """The sizes of a plain dense transformer: pre-norm, full attention, SwiGLU, untied head."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int

    @property
    def num_attention_heads(self) -> int:
        return self.hidden_size // DENSE_HEAD_DIM

    @property
    def activated_parameters(self) -> int:
        """Parameters one token meets, counted as `Accounting.activated_decode`: head, no embedding.

        V C + C + L (4 C^2 + 3 C F + 2 C)
        """
        c = self.hidden_size
        layer = 4 * c * c + 3 * c * self.intermediate_size + 2 * c
        return self.vocab_size * c + c + self.num_hidden_layers * layer


def dense_shape(config: ModelConfig) -> DenseShape:
    """Return the dense transformer whose active parameters are within 2 % of those of `config`.

    Its width is that of `config`, up to a whole number of heads. Among the depths that meet the
    budget it has the one whose feed-forward width is nearest to 8/3 of the width, which makes a
    SwiGLU as large as the usual two matrices of four times the width.

    Raises ConfigError if no depth does.
    """
    from finwhale.config.accounting import account

    text = config.text_config
    budget = sum(account(config).activated_decode.values())
    width = -(-text.hidden_size // DENSE_HEAD_DIM) * DENSE_HEAD_DIM
    found: list[tuple[float, DenseShape]] = []
    for layers in range(1, 4 * text.num_hidden_layers):
        empty = DenseShape(
            vocab_size=text.vocab_size,
            hidden_size=width,
            num_hidden_layers=layers,
            intermediate_size=0,
        )
        per_column = 3 * width * layers
        columns = (budget - empty.activated_parameters) / per_column
        shape = replace(empty, intermediate_size=round(columns / _DENSE_STEP) * _DENSE_STEP)
        if shape.intermediate_size <= 0:
            break  # deeper ones have even less left
        if abs(shape.activated_parameters - budget) <= 0.02 * budget:
            found.append((abs(math.log(shape.intermediate_size * 3 / (8 * width))), shape))
    if not found:
        raise ConfigError(
            f"hidden_size: got {text.hidden_size}; no dense transformer of width {width} has about "
            f"{budget:,} active parameters; choose a narrower model or a smaller vocabulary"
        )
    return min(found, key=lambda pair: pair[0])[1]
