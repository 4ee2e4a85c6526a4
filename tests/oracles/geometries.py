"""Model shapes and runs for which stored goldens exist, shared by the oracles and the tests.

`tiny` has every mechanism in ten layers, `peer-noflip` has no selection that could flip (every
visible entry is selected, both experts fire), `sched40` is the released 40-layer schedule at toy
width, `mini` is the preset of that name. Lengths are chosen so that window, top-k and pool all
drop something, except in `peer-noflip`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from finwhale.config import ModelConfig, RopeScaling, TextConfig, engram_buckets, preset
from finwhale.config.presets import with_compressed_vocab

SEED = 7


def _text(*, yarn_base: int, **fields) -> TextConfig:
    """Build a TextConfig without draft stages; table heights follow from the bucket primes."""
    ids = fields.get("engram_layer_ids", (1, 14))
    buckets = engram_buckets(
        num_layers=len(ids),
        max_ngram_size=4,
        n_heads=fields["engram_n_heads"],
        vocab_size=fields["engram_vocab_size"],
    )
    vocab = fields["vocab_size"]
    return TextConfig(
        hc_mult=4,
        engram_max_ngram_size=4,
        engram_num_embeddings=tuple(b.num_rows for b in buckets),
        engram_compressed_vocab_size=paired_vocabulary(vocab),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        dspark_noise_token_id=vocab - 1,
        dspark_n_routed_experts=fields["n_routed_experts"],
        dspark_num_experts_per_tok=fields["num_experts_per_tok"],
        rope_scaling=RopeScaling(original_max_position_embeddings=yarn_base),
        **fields,
    )


def _model(text: TextConfig) -> ModelConfig:
    return ModelConfig(text_config=text, vision_config=None, image_token_id=text.vocab_size - 1)


def paired_vocabulary(vocab_size: int) -> int:
    """Return the Engram vocabulary of the toy tokenizer: 3 specials, words in two cases each."""
    return paired_map(vocab_size)[-1] + 1


def paired_map(vocab_size: int) -> list[int]:
    """Return the toy tokenizer's Engram id of every token id, known by construction."""
    return [n if n < 3 else 3 + (n - 3) // 2 for n in range(vocab_size)]


def tiny() -> ModelConfig:
    """Ten layers of width 64: every mechanism on both sides of the cut."""
    return _model(
        _text(
            yarn_base=256,
            vocab_size=512,
            hidden_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=10,
            num_attention_heads=4,
            head_dim=32,
            qk_rope_head_dim=8,
            q_lora_rank=32,
            o_lora_rank=16,
            o_groups=2,
            n_routed_experts=8,
            num_experts_per_tok=2,
            sliding_window=8,
            compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1),
            kv_source_layer_ids=(2, 4, 6),
            index_source_layer_ids=(2, 4, 6, 8),
            index_n_heads=24,
            index_head_dim=32,
            index_topk=8,
            candidate_source_layer_id=6,
            candidate_topk_blocks=4,
            candidate_block_size=4,
            engram_layer_ids=(1, 4),
            engram_vocab_size=97,
            engram_n_heads=2,
            engram_head_dim=32,
            max_position_embeddings=4096,
        )
    )


def peer_noflip() -> ModelConfig:
    """Shapes that every other CPU engine loads, with selection and routing made trivial."""
    return _model(
        _text(
            yarn_base=65536,
            vocab_size=512,
            hidden_size=128,
            moe_intermediate_size=128,
            num_hidden_layers=10,
            num_attention_heads=8,
            head_dim=128,
            qk_rope_head_dim=32,
            q_lora_rank=64,
            o_lora_rank=32,
            o_groups=4,
            n_routed_experts=2,
            num_experts_per_tok=2,
            sliding_window=16,
            compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 1, 1),
            kv_source_layer_ids=(2, 5),
            index_source_layer_ids=(2, 4, 5, 7),
            index_n_heads=24,
            index_head_dim=64,
            index_topk=64,
            candidate_source_layer_id=5,
            candidate_topk_blocks=32,
            candidate_block_size=4,
            engram_layer_ids=(1, 4),
            engram_vocab_size=97,
            engram_n_heads=2,
            engram_head_dim=32,
            max_position_embeddings=1048576,
        )
    )


def sched40() -> ModelConfig:
    """The released schedule of 40 layers, owners and pool included, at width 128."""
    return _model(
        _text(
            yarn_base=4096,
            vocab_size=1024,
            hidden_size=128,
            moe_intermediate_size=64,
            num_hidden_layers=40,
            compress_ratios=(0, 0) + (2,) * 18 + (1,) * 20,
            num_attention_heads=8,
            head_dim=64,
            qk_rope_head_dim=16,
            q_lora_rank=64,
            o_lora_rank=32,
            o_groups=4,
            n_routed_experts=16,
            num_experts_per_tok=6,
            sliding_window=16,
            index_n_heads=24,
            index_head_dim=32,
            index_topk=16,
            candidate_topk_blocks=8,
            candidate_block_size=8,
            engram_vocab_size=211,
            engram_n_heads=8,
            engram_head_dim=32,
            max_position_embeddings=65536,
        )
    )


def mini() -> ModelConfig:
    """The preset with the Engram vocabulary of the toy tokenizer."""
    config = preset("mini")
    return with_compressed_vocab(config, paired_vocabulary(config.text_config.vocab_size))


GEOMETRIES: dict[str, Callable[[], ModelConfig]] = {
    "tiny": tiny,
    "peer-noflip": peer_noflip,
    "sched40": sched40,
    "mini": mini,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenRun:
    """One stored golden: a checkpoint, its input and what is kept of the computation.

    rounding    cache rounding of sections 9.2 to 9.4
    positions   tokens whose full-width tensors are kept; everything narrow is kept for all tokens
    keep        "streams" before each layer and after the last; "sublayers", their inputs and
                outputs; "selection", top-k, pool and router choices with what any right engine may
                choose; "rows", cache rows before and after rounding; "all_rows", the latter for
                all tokens
    images      half-open ranges of image tokens: they route with `bias_vl`, stop n-grams and
                pass Engram by
    margin      relative distance in which index scores count as equal
    greedy      tokens continued greedily, for engines that only decode
    """

    name: str
    geometry: str
    quantized: bool
    rounding: bool
    batch: int
    length: int
    positions: tuple[int, ...]
    keep: tuple[str, ...]
    images: tuple[tuple[int, int], ...] = ()
    margin: float = 1e-5
    greedy: int = 0

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint folder: runs of one geometry and storage share it."""
        return f"{self.geometry}-fp8" if self.quantized else self.geometry

    def config(self) -> ModelConfig:
        config = GEOMETRIES[self.geometry]()
        if not self.quantized:
            config = replace(config, quantization_config=None)
        return config


def _runs() -> tuple[GoldenRun, ...]:
    tiny = {"geometry": "tiny", "quantized": False, "batch": 2, "length": 96}
    tiny_fp8 = {"geometry": "tiny", "quantized": True, "batch": 1, "length": 96}
    peer = {"geometry": "peer-noflip", "batch": 1, "length": 56, "greedy": 6}
    sched40 = {"geometry": "sched40", "quantized": False, "batch": 1, "length": 96}
    mini = {"geometry": "mini", "quantized": True, "batch": 1, "length": 160, "greedy": 3}
    exact, rounded = {"rounding": False}, {"rounding": True}
    return (
        GoldenRun(
            name="tiny",
            keep=("streams", "sublayers", "selection"),
            positions=(0, 1, 7, 8, 9, 32, 63, 80, 94, 95),
            **tiny,
            **exact,
        ),
        GoldenRun(
            name="tiny-rounded",
            geometry="tiny",
            quantized=False,
            batch=1,
            length=64,
            keep=("streams", "selection", "rows", "all_rows"),
            positions=(0, 1, 8, 31, 62, 63),
            **rounded,
        ),
        GoldenRun(
            name="tiny-image",
            geometry="tiny",
            quantized=False,
            batch=1,
            length=64,
            keep=("streams", "selection"),
            positions=(0, 19, 20, 26, 27, 29, 40, 42, 63),
            # The single token at 40 lies inside later n-grams, with text on both sides.
            images=((20, 27), (40, 41)),
            **exact,
        ),
        GoldenRun(
            name="tiny-fp8",
            keep=("streams", "selection"),
            positions=(0, 8, 33, 64, 95),
            **tiny_fp8,
            **exact,
        ),
        GoldenRun(
            name="tiny-fp8-rounded",
            keep=("selection",),
            positions=(0, 33, 95),
            **tiny_fp8,
            **rounded,
        ),
        GoldenRun(
            name="peer-noflip",
            quantized=False,
            keep=("streams",),
            positions=(0, 15, 16, 33, 54, 55),
            **peer,
            **exact,
        ),
        GoldenRun(
            name="peer-noflip-rounded",
            quantized=False,
            keep=(),
            positions=(0, 55),
            **peer,
            **rounded,
        ),
        GoldenRun(
            name="peer-noflip-fp8", quantized=True, keep=(), positions=(0, 55), **peer, **exact
        ),
        GoldenRun(
            name="peer-noflip-fp8-rounded",
            quantized=True,
            keep=(),
            positions=(0, 55),
            **peer,
            **rounded,
        ),
        GoldenRun(
            name="sched40",
            keep=("streams", "selection"),
            positions=(0, 17, 64, 95),
            margin=2e-4,
            **sched40,
            **exact,
        ),
        GoldenRun(
            name="sched40-rounded", keep=("selection",), positions=(0, 17, 95), **sched40, **rounded
        ),
        GoldenRun(
            name="mini",
            keep=("streams", "selection"),
            positions=(0, 127, 128, 159),
            **mini,
            **exact,
        ),
        GoldenRun(name="mini-rounded", keep=("rows",), positions=(0, 159), **mini, **rounded),
    )


RUNS: dict[str, GoldenRun] = {run.name: run for run in _runs()}
