"""What a configuration costs: parameters, bytes and FLOPs, from the layer table and inventory.

Nothing here opens a checkpoint or builds a module, so every figure is known before a byte is
read. Integers are exact; a figure per token is a float only where ratio 2 halves an odd number.
The easy mistake: taking the stored length of a ratio-2 stream for one entry per token.
Source: spec/backbone.md section 11, spec/kv-cache.md sections 1.1 and 1.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from finwhale.config.inventory import Storage, TensorSpec, checkpoint_tensors
from finwhale.config.layers import AttentionMode, Half, LayerSpec, PoolUse, build_layer_specs
from finwhale.config.model import ModelConfig, TextConfig

# Cost of one multiply-add by the wider of its two operands, BF16 = 1. FP32 counts like BF16.
# FP4 weights meet FP8 activations, so experts cost FP8; only the index products are FP4 twice.
PRECISION_WEIGHTS = {"fp32": 1.0, "bf16": 1.0, "fp8": 0.5, "fp4": 0.25}
_CONTEXTS = (4096, 65536, 1048576)
_TOKEN_ID_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class KvOwner:
    """Global KV that one Full layer appends: main entries and their index keys."""

    layer_id: int
    ratio: int
    main_kv_bytes_per_entry: int
    index_k_bytes_per_entry: int

    @property
    def bytes_per_token(self) -> float:
        """Both streams, spread over the `ratio` tokens of an entry."""
        return _per_token(self.main_kv_bytes_per_entry + self.index_k_bytes_per_entry, self.ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedState:
    """Bytes that one sequence holds whatever its length (spec/kv-cache.md section 1.1)."""

    window_row_bytes: int
    window_bytes: int
    encoder_window_bytes: int
    open_group_bytes: int
    engram_history_tokens: int
    engram_history_bytes: int

    @property
    def total_bytes(self) -> int:
        """Rings of all layers, open groups and history; the encoder's rings are among them."""
        return self.window_bytes + self.open_group_bytes + self.engram_history_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOPs of one token that sees `context_tokens` tokens, itself included."""

    phase: str
    context_tokens: int
    index_keys_full: int
    index_keys_pool: int
    by_operation: dict[str, int]
    weighted_by_operation: dict[str, float]

    @property
    def raw(self) -> int:
        """All operations, one multiply-add as two."""
        return sum(self.by_operation.values())

    @property
    def weighted(self) -> float:
        """All operations, each at its precision weight."""
        return sum(self.weighted_by_operation.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """Every total of one configuration. `account` fills it, `to_json` prints it."""

    parameters: dict[str, int]
    activated_prefill: dict[str, int]
    activated_decode: dict[str, int]
    num_checkpoint_tensors: int
    checkpoint_bytes: int
    num_text_tensors: int
    text_bytes: int
    kv_owners: tuple[KvOwner, ...]
    fixed: FixedState
    exact_tail_after_layer: int
    exact_tail_rows: int
    flops: tuple[Flops, ...]
    derived: dict[str, float]

    @property
    def backbone_parameters(self) -> int:
        """The text backbone as the release counts it: neither Engram, draft nor vision."""
        aside = ("engram_tables", "engram", "dspark", "vision")
        return sum(n for part, n in self.parameters.items() if part not in aside)

    @property
    def engram_table_parameters(self) -> int:
        """The hash tables alone."""
        return self.parameters.get("engram_tables", 0)

    @property
    def total_parameters(self) -> int:
        """Every tensor of the checkpoint."""
        return sum(self.parameters.values())

    @property
    def kv_bytes_per_token(self) -> float:
        """Global KV of one token, all owners."""
        return _whole(sum(owner.bytes_per_token for owner in self.kv_owners))

    def kv_bytes(self, num_tokens: int) -> int:
        """Return the global KV of a sequence; an unfinished group has no entry yet."""
        return sum(
            (num_tokens // o.ratio) * (o.main_kv_bytes_per_entry + o.index_k_bytes_per_entry)
            for o in self.kv_owners
        )

    def to_json(self) -> dict[str, Any]:
        """Return every field and every total as plain JSON values."""
        raw = asdict(self)
        raw["backbone_parameters"] = self.backbone_parameters
        raw["engram_table_parameters"] = self.engram_table_parameters
        raw["total_parameters"] = self.total_parameters
        raw["activated_prefill_total"] = sum(self.activated_prefill.values())
        raw["activated_decode_total"] = sum(self.activated_decode.values())
        raw["kv_bytes_per_token"] = self.kv_bytes_per_token
        raw["fixed"]["total_bytes"] = self.fixed.total_bytes
        raw["precision_weights"] = dict(PRECISION_WEIGHTS)
        raw["kv_owners"] = [
            {**asdict(o), "bytes_per_token": o.bytes_per_token} for o in self.kv_owners
        ]
        raw["flops"] = [{**asdict(f), "raw": f.raw, "weighted": f.weighted} for f in self.flops]
        return raw


def _whole(value: float) -> float:
    """Return an int where the value is one, so that it prints and compares as one."""
    return int(value) if value == int(value) else value


def _per_token(num_bytes: int, ratio: int) -> float:
    return num_bytes // ratio if num_bytes % ratio == 0 else num_bytes / ratio


def kv_owners(config: TextConfig) -> tuple[KvOwner, ...]:
    """Return the layers that append global KV, with the bytes of one entry.

    main   D/2 E2M1 codes + D/16 E4M3 scales;  index  DI/2 E2M1 codes + DI/32 UE8M0 scales.
    spec/backbone.md sections 9.3, 9.4 and 11.2.
    """
    main = config.head_dim // 2 + config.head_dim // 16
    index = config.index_head_dim // 2 + config.index_head_dim // 32
    return tuple(
        KvOwner(
            layer_id=spec.layer_id,
            ratio=spec.ratio,
            main_kv_bytes_per_entry=main,
            index_k_bytes_per_entry=index,
        )
        for spec in build_layer_specs(config)
        if spec.owns_kv
    )


def kv_bytes_per_token(config: TextConfig) -> float:
    """Return the global KV bytes of one token: 890 for the released geometry.

    (288 + 68) * (3 * 1/2 + 1) = 890. An int wherever the sum is whole.
    """
    return _whole(sum(owner.bytes_per_token for owner in kv_owners(config)))


def fixed_state(config: TextConfig) -> FixedState:
    """Return the bytes per sequence that do not grow with its length.

    A window row is D E4M3 codes and D/32 UE8M0 scales. An open group of ratio r keeps r - 1
    rows of (C, Z) in fp32. spec/kv-cache.md section 1.1.
    """
    specs = build_layer_specs(config)
    row = config.head_dim + config.head_dim // 32
    ring = config.sliding_window * row
    history = config.engram_max_ngram_size - 1 if config.engram_layer_ids else 0
    return FixedState(
        window_row_bytes=row,
        window_bytes=len(specs) * ring,
        encoder_window_bytes=sum(s.half is Half.ENCODER for s in specs) * ring,
        open_group_bytes=sum((s.ratio - 1) * 2 * config.head_dim * 4 for s in specs if s.owns_kv),
        engram_history_tokens=history,
        engram_history_bytes=history * _TOKEN_ID_BYTES,
    )


def last_global_kv_layer(config: TextConfig) -> int:
    """Return the last layer whose input every prompt token must reach.

    Above it nothing is appended to global KV. With `ced_kv_from = encoder_output` that is the
    encoder-decoder cut, whatever Full layers the decoder has. A model of windows alone appends
    nothing: -1, below its first layer.
    """
    if not config.kv_source_layer_ids:
        return -1
    if config.ced_kv_from == "encoder_output":
        return config.candidate_source_layer_id
    return max(config.kv_source_layer_ids)


def exact_decoder_tail(config: TextConfig) -> int:
    """Return how many trailing output rows of the last global-KV layer give an exact last row.

    Each later layer reaches W - 1 rows further back: 1 + n * (W - 1), which for the released
    19 layers is 128 + 18 * 127 = 2414. spec/backbone.md section 3.
    """
    later = config.num_hidden_layers - 1 - last_global_kv_layer(config)
    return 1 + later * (config.sliding_window - 1)


def index_keys_scored(config: TextConfig, context_tokens: int) -> tuple[int, int]:
    """Return index keys scored for one query: (in the full range, inside the candidate pool)."""
    return _index_keys(config, build_layer_specs(config), context_tokens)


def _index_keys(c: TextConfig, layers: Iterable[LayerSpec], context: int) -> tuple[int, int]:
    full = pool = 0
    pool_entries = c.candidate_topk_blocks * c.candidate_block_size
    for spec in layers:
        if not spec.owns_topk:
            continue
        if spec.pool is PoolUse.SEARCHES:
            pool += min(context // spec.ratio, pool_entries)
        else:
            full += context // spec.ratio
    return full, pool


def _layer_of(name: str) -> int | None:
    return int(name.split(".", 2)[1]) if name.startswith("layers.") else None


def _one_expert_each(tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return `tensors` with one routed expert per layer: all are alike, a token meets k of them."""
    return tuple(t for t in tensors if t.part != "routed_experts" or ".experts.0." in t.name)


def _activated(config: ModelConfig, tensors: Iterable[TensorSpec], phase: str) -> dict[str, int]:
    """Sum the parameters that one token meets; a looked-up row (embedding, Engram) is none.

    Prefill is the encoder and the KV path of the layer that makes the decoder's entries, which
    needs bounded replay. The two router biases choose but do not multiply. Section 11.1.
    """
    text, counts = config.text_config, Counter()
    builder = last_global_kv_layer(text)
    for spec in _one_expert_each(tensors):
        if not spec.is_text or spec.part == "engram_tables" or spec.name == "embed.weight":
            continue
        if ".gate.bias" in spec.name:
            continue
        layer = _layer_of(spec.name)
        if phase == "prefill" and (layer is None or layer >= builder):
            made_by_full_layer = ".attn.compressor." in spec.name or spec.name.endswith(
                (".indexer.wk.weight", ".indexer.k_norm.weight", ".attn_norm.weight")
            )
            if layer is None or layer not in _prefill_owners(text) or not made_by_full_layer:
                continue
            counts["decoder_kv_path"] += spec.num_parameters
        elif spec.part == "routed_experts":
            counts["routed_experts"] += spec.num_parameters * text.num_experts_per_tok
        else:
            part = "head" if spec.name == "head.weight" else spec.part
            counts[part] += spec.num_parameters
    return dict(counts)


def _prefill_owners(config: TextConfig) -> set[int]:
    """Owners at or above the last global-KV layer: their KV path runs for every prompt token."""
    builder = last_global_kv_layer(config)
    return {i for i in config.kv_source_layer_ids if i >= builder}


def _matmul_precision(spec: TensorSpec) -> str:
    # wo_a is dequantised and its input is not rounded, so it stays a BF16 product (section 9.1).
    if spec.storage is Storage.F32:
        return "fp32"
    if spec.storage is Storage.BF16 or spec.name.endswith(".wo_a.weight"):
        return "bf16"
    return "fp8"


_OPERATIONS: dict[str, str] = {
    "attention": "attention projections",
    "indexers": "attention projections",
    "compressors": "attention projections",
    "routed_experts": "routed experts",
    "shared_experts": "shared expert",
    "router": "router",
    "mhc": "mHC",
    "engram": "Engram projections",
    "embedding_and_head": "LM head",
}


class _FlopTable:
    """FLOPs of one phase: what depends on weights once, what depends on context per call."""

    def __init__(self, config: ModelConfig, tensors: Iterable[TensorSpec], phase: str):
        self.text, self.phase = config.text_config, phase
        c = self.text
        self.builder, owners = last_global_kv_layer(c), _prefill_owners(c)
        specs = build_layer_specs(c)
        decode = phase == "decode"
        self.layers = specs if decode else tuple(s for s in specs if s.layer_id < self.builder)
        raw: Counter[tuple[str, str]] = Counter()
        for spec in _one_expert_each(tensors):
            if len(spec.shape) != 2 or spec.part not in _OPERATIONS or spec.name == "embed.weight":
                continue
            if spec.name.endswith((".q_weight", ".k_weight")):  # elementwise, [N, C]
                continue
            layer = _layer_of(spec.name)
            if not decode and (layer is None or layer >= self.builder):
                kv_path = ".attn.compressor." in spec.name or spec.name.endswith(
                    "indexer.wk.weight"
                )
                if layer not in owners or not kv_path:
                    continue
            times = c.num_experts_per_tok if spec.part == "routed_experts" else 1
            raw[_OPERATIONS[spec.part], _matmul_precision(spec)] += 2 * times * spec.num_parameters
        # Per site: collapse N rows, expand N x N mixed rows and N scaled outputs, all of width C.
        n = c.hc_mult
        raw["mHC", "fp32"] += len(self.layers) * 2 * 2 * c.hidden_size * (n * n + 2 * n)
        self.raw = raw

    def at(self, context: int) -> Flops:
        """Return the count for a token that sees `context` tokens."""
        c = self.text
        raw = Counter(self.raw)
        full, pool = _index_keys(c, self.layers, context)
        per_key = 2 * c.index_n_heads * c.index_head_dim + 2 * c.index_n_heads
        raw["index scores", "fp4"] += (full + pool) * per_key
        keys = sum(
            min(c.sliding_window, context)
            + (min(c.index_topk, context // s.ratio) if s.mode is not AttentionMode.WINDOW else 0)
            for s in self.layers
        )
        raw["attention core", "bf16"] += 4 * c.num_attention_heads * c.head_dim * keys
        by_operation: Counter[str] = Counter()
        weighted: dict[str, float] = {}
        for (operation, precision), flops in raw.items():
            by_operation[operation] += flops
            weight = PRECISION_WEIGHTS[precision]
            weighted[operation] = weighted.get(operation, 0.0) + flops * weight
        return Flops(
            phase=self.phase,
            context_tokens=context,
            index_keys_full=full,
            index_keys_pool=pool,
            by_operation=dict(by_operation),
            weighted_by_operation=weighted,
        )


def flops_per_token(config: ModelConfig, phase: str) -> Callable[[int], Flops]:
    """Return a function of the context in tokens; `phase` is "prefill" or "decode".

    Decode runs all layers. Prefill runs what every prompt token needs under bounded replay: the
    layers below the last global-KV layer, and that layer's KV path. spec/training.md section 5.
    """
    if phase not in ("prefill", "decode"):
        raise ValueError(f"phase: got {phase!r}, expected 'prefill' or 'decode'")
    return _FlopTable(config, checkpoint_tensors(config), phase).at


def v4_flash_kv_bytes_per_token(index_k_bytes: int = 68) -> float:
    """Return the global KV bytes of one token of V4-Flash. Derived, not measured.

    21 layers at ratio 4 and 20 at ratio 128, records of 584 bytes (448 FP8, 64 BF16, 7 scales,
    1 pad). The split of its layers is unsure. spec/kv-cache.md section 1.2.
    """
    return 21 * (584 + index_k_bytes) / 4 + 20 * 584 / 128


def _derived(config: ModelConfig) -> dict[str, float]:
    """Comparisons with earlier models; they mean something for the released geometry only."""
    if config.text_config != TextConfig():
        return {}
    ours = kv_bytes_per_token(config.text_config)
    fp4, fp8 = v4_flash_kv_bytes_per_token(68), v4_flash_kv_bytes_per_token(132)
    deepseek_67b = 95 * 8 * 128 * 2 * 2  # layers, KV heads, head dim, K and V, BF16
    return {
        "v4_flash_kv_bytes_per_token": fp4,
        "v4_flash_ratio": fp4 / ours,
        "v4_flash_fp8_index_kv_bytes_per_token": fp8,
        "v4_flash_fp8_index_ratio": fp8 / ours,
        "deepseek_67b_kv_bytes_per_token": deepseek_67b,
        "deepseek_67b_ratio": deepseek_67b / ours,
    }


def account(config: ModelConfig) -> Accounting:
    """Return every total of `config`. Opens no file and imports no torch."""
    tensors = checkpoint_tensors(config)
    text = config.text_config
    parameters, stored, text_stored = Counter(), [0, 0], [0, 0]
    sizes: dict[tuple[tuple[int, ...], Storage], tuple[int, int]] = {}
    for spec in tensors:
        parameters[spec.part] += spec.num_parameters
        kind = spec.shape, spec.storage
        if kind not in sizes:  # 46,080 experts of the release have two shapes between them
            entries = spec.stored()
            sizes[kind] = len(entries), sum(entry.num_bytes for entry in entries)
        for total in (stored, text_stored) if spec.is_text else (stored,):
            total[0] += sizes[kind][0]
            total[1] += sizes[kind][1]
    longest = text.max_position_embeddings
    contexts = sorted({n for n in _CONTEXTS if n <= longest} | {longest})
    tables = [_FlopTable(config, tensors, phase) for phase in ("prefill", "decode")]
    return Accounting(
        parameters=dict(parameters),
        activated_prefill=_activated(config, tensors, "prefill"),
        activated_decode=_activated(config, tensors, "decode"),
        num_checkpoint_tensors=stored[0],
        checkpoint_bytes=stored[1],
        num_text_tensors=text_stored[0],
        text_bytes=text_stored[1],
        kv_owners=kv_owners(text),
        fixed=fixed_state(text),
        exact_tail_after_layer=last_global_kv_layer(text),
        exact_tail_rows=exact_decoder_tail(text),
        flops=tuple(table.at(n) for table in tables for n in contexts),
        derived=_derived(config),
    )
