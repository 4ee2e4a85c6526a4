"""Every tensor of a released checkpoint: name, shape, storage, part. Derived from the config.

The loader checks files against this list, the writer follows it, the accounting sums it. A
quantised `X.weight` brings its `X.scale`. The easy mistake: the Engram scale is per row and 32
columns, while every other FP8 scale covers a 32x32 block. Source: spec/backbone.md section 10.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod

from finwhale.config.layers import build_layer_specs
from finwhale.config.model import ModelConfig, TextConfig, VisionConfig

GROUP = 32


class Storage(Enum):
    """How a tensor lies in the file."""

    BF16 = "BF16"
    F32 = "F32"
    FP8_BLOCK = "F8_E4M3 with a UE8M0 scale per 32x32 block"
    FP8_ROW = "F8_E4M3 with a UE8M0 scale per row and 32 columns"
    FP4_ROW = "two E2M1 codes per I8 with a UE8M0 scale per row and 32 columns"


_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One entry of a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One parameter: logical shape, storage, and the part of the accounting it belongs to."""

    name: str
    shape: tuple[int, ...]
    storage: Storage
    part: str

    @property
    def num_parameters(self) -> int:
        return prod(self.shape)

    @property
    def is_text(self) -> bool:
        return self.part not in ("dspark", "vision")

    def stored(self) -> tuple[StoredTensor, ...]:
        """Return the header entries: the weight, and its scale if the storage has one."""
        if self.storage in (Storage.BF16, Storage.F32):
            return (StoredTensor(name=self.name, dtype=self.storage.value, shape=self.shape),)
        rows, columns = self.shape
        scale_rows = -(-rows // GROUP) if self.storage is Storage.FP8_BLOCK else rows
        packed = self.storage is Storage.FP4_ROW
        weight = StoredTensor(
            name=self.name,
            dtype="I8" if packed else "F8_E4M3",
            shape=(rows, columns // 2) if packed else self.shape,
        )
        scale = StoredTensor(
            name=scale_name(self.name), dtype="F8_E8M0", shape=(scale_rows, -(-columns // GROUP))
        )
        return (weight, scale)


def scale_name(weight_name: str) -> str:
    """Return the name of the scale that belongs to a quantised weight."""
    return weight_name.removesuffix(".weight") + ".scale"


class _Parts:
    """Collects specs; `quantized` decides between the released storages and BF16."""

    def __init__(self, quantized: bool):
        self.quantized, self.specs = quantized, []

    def add(self, part: str, name: str, *shape: int, storage: Storage = Storage.BF16) -> None:
        plain = (Storage.BF16, Storage.F32, Storage.FP8_ROW)  # Engram tables stay FP8 either way
        if not self.quantized and storage not in plain:
            storage = Storage.BF16
        self.specs.append(TensorSpec(name=name, shape=shape, storage=storage, part=part))

    def block(self, prefix: str, c: TextConfig, experts: int, part: str | None = None) -> None:
        """The tensors that every layer has, draft stages included."""
        fp8, heads = Storage.FP8_BLOCK, c.num_attention_heads
        d, q, hd, ff = c.hidden_size, c.q_lora_rank, c.head_dim, c.moe_intermediate_size
        attention, norms, hc = part or "attention", part or "norms", part or "mhc"
        a = f"{prefix}.attn"
        self.add(norms, f"{prefix}.attn_norm.weight", d)
        self.add(norms, f"{prefix}.ffn_norm.weight", d)
        self.add(attention, f"{a}.wq_a.weight", q, d, storage=fp8)
        self.add(attention, f"{a}.q_norm.weight", q)
        self.add(attention, f"{a}.wq_b.weight", heads * hd, q, storage=fp8)
        self.add(attention, f"{a}.wkv.weight", hd, d, storage=fp8)
        self.add(attention, f"{a}.kv_norm.weight", hd)
        group_width = heads * hd // c.o_groups
        self.add(
            attention, f"{a}.wo_a.weight", c.o_groups * c.o_lora_rank, group_width, storage=fp8
        )
        self.add(attention, f"{a}.wo_b.weight", d, c.o_groups * c.o_lora_rank, storage=fp8)
        self.add(attention, f"{a}.attn_sink", heads, storage=Storage.F32)
        mix, width = (2 + c.hc_mult) * c.hc_mult, c.hc_mult * d
        for site in ("attn", "ffn"):
            self.add(hc, f"{prefix}.hc_{site}_fn", mix, width, storage=Storage.F32)
            self.add(hc, f"{prefix}.hc_{site}_base", mix, storage=Storage.F32)
            self.add(hc, f"{prefix}.hc_{site}_scale", 3, storage=Storage.F32)
        f = f"{prefix}.ffn"
        self.add(part or "router", f"{f}.gate.weight", experts, d)
        self.add(part or "router", f"{f}.gate.bias", experts, storage=Storage.F32)
        self.add(part or "router", f"{f}.gate.bias_vl", experts, storage=Storage.F32)
        for name, rows, columns in (("w1", ff, d), ("w2", d, ff), ("w3", ff, d)):
            shared = f"{f}.shared_experts.{name}.weight"
            self.add(part or "shared_experts", shared, rows, columns, storage=fp8)
        for e in range(experts):
            for name, rows, columns in (("w1", ff, d), ("w2", d, ff), ("w3", ff, d)):
                expert = f"{f}.experts.{e}.{name}.weight"
                self.add(part or "routed_experts", expert, rows, columns, storage=Storage.FP4_ROW)

    def text(self, c: TextConfig) -> None:
        d, hd, di = c.hidden_size, c.head_dim, c.index_head_dim
        self.add("embedding_and_head", "embed.weight", c.vocab_size, d)
        for spec in build_layer_specs(c):
            layer = f"layers.{spec.layer_id}"
            if spec.engram_index is not None:
                rows, e = c.engram_num_embeddings[spec.engram_index], f"{layer}.engram"
                self.add(
                    "engram_tables",
                    f"{e}.embed.weight",
                    rows,
                    c.engram_head_dim,
                    storage=Storage.FP8_ROW,
                )
                out, inner = (c.hc_mult + 1) * d, c.engram_columns * c.engram_head_dim
                self.add("engram", f"{e}.wkv.weight", out, inner, storage=Storage.FP8_BLOCK)
                self.add("engram", f"{e}.q_weight", c.hc_mult, d)
                self.add("engram", f"{e}.k_weight", c.hc_mult, d)
            self.block(layer, c, c.n_routed_experts)
            compressor, indexer = f"{layer}.attn.compressor", f"{layer}.attn.indexer"
            if spec.owns_kv:
                self.add("compressors", f"{compressor}.wkv.weight", hd, d)
                if spec.ratio > 1:
                    self.add("compressors", f"{compressor}.wgate.weight", hd, d)
                self.add("compressors", f"{compressor}.norm.weight", hd)
            if spec.owns_topk:
                heads = c.index_n_heads
                wq_b = f"{indexer}.wq_b.weight"
                self.add("indexers", wq_b, heads * di, c.q_lora_rank, storage=Storage.FP8_BLOCK)
                self.add("indexers", f"{indexer}.weights_proj.weight", heads, d)
            if spec.owns_kv:
                self.add("indexers", f"{indexer}.wk.weight", di, hd)
                self.add("indexers", f"{indexer}.k_norm.weight", di)
        self.add("norms", "norm.weight", d)
        self.add("embedding_and_head", "head.weight", c.vocab_size, d)

    def dspark(self, c: TextConfig) -> None:
        stages, d = c.num_nextn_predict_layers, c.hidden_size
        for n in range(stages):
            self.block(f"mtp.{n}", c, c.dspark_n_routed_experts, part="dspark")
        if not stages:
            return
        width = len(c.dspark_target_layer_ids) * d
        self.add("dspark", "mtp.0.main_proj.weight", d, width, storage=Storage.FP8_BLOCK)
        self.add("dspark", "mtp.0.main_norm.weight", d)
        last, rank = f"mtp.{stages - 1}", c.dspark_markov_rank
        self.add("dspark", f"{last}.norm.weight", d)
        self.add("dspark", f"{last}.markov_head.embed.weight", c.vocab_size, rank)
        self.add("dspark", f"{last}.markov_head.head.weight", c.vocab_size, rank)
        self.add("dspark", f"{last}.confidence_head.proj.weight", 1, d + rank)

    def vision(self, v: VisionConfig, d: int) -> None:
        w, ff = v.hidden_size, v.intermediate_size
        patch = 3 * v.patch_size**2
        self.add("vision", "vision.patch_embed.proj.weight", w, patch)
        self.add("vision", "vision.patch_embed.proj.bias", w)
        for n in range(v.num_hidden_layers):
            b = f"vision.blocks.{n}"
            self.add("vision", f"{b}.norm1.weight", w)
            self.add("vision", f"{b}.attn.wqkv.weight", 3 * w, w)
            self.add("vision", f"{b}.attn.wqkv.bias", 3 * w)
            self.add("vision", f"{b}.attn.wo.weight", w, w)
            self.add("vision", f"{b}.attn.wo.bias", w)
            self.add("vision", f"{b}.norm2.weight", w)
            self.add("vision", f"{b}.mlp.w1.weight", 2 * ff, w)
            self.add("vision", f"{b}.mlp.w2.weight", w, ff)
        self.add("vision", "vision.norm.weight", w)
        self.add("vision", "aligner.w1.weight", d, w * v.downsample_ratio**2)
        self.add("vision", "aligner.w1.bias", d)
        self.add("vision", "aligner.w2.weight", d, d)
        self.add("vision", "aligner.w2.bias", d)
        for name in ("image_start", "image_newline", "image_end"):
            self.add("vision", name, d)


def checkpoint_tensors(
    config: ModelConfig, *, quantized: bool | None = None
) -> tuple[TensorSpec, ...]:
    """Return every tensor of a checkpoint of `config`, text first, then draft, then vision.

    `quantized` defaults to whether the config has a quantization_config; False gives the BF16
    variant (Engram tables keep their FP8 rows in both).
    """
    parts = _Parts(config.quantization_config is not None if quantized is None else quantized)
    parts.text(config.text_config)
    parts.dspark(config.text_config)
    if config.vision_config is not None and config.vision_config.num_hidden_layers:
        parts.vision(config.vision_config, config.text_config.hidden_size)
    return tuple(parts.specs)


def stored_tensors(config: ModelConfig, *, quantized: bool | None = None) -> Iterator[StoredTensor]:
    """Yield the safetensors header entries of a checkpoint of `config`."""
    for spec in checkpoint_tensors(config, quantized=quantized):
        yield from spec.stored()
