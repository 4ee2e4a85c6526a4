"""The released `config.json` as frozen dataclasses, read and written unchanged.

Field names are the released keys. What the file may hold but this code does not implement is
refused by field name, with the value found and the value expected; an unknown key is an error.
The family is chosen by exact `model_type`, never by a prefix: `deepseek_v4` is another model.
Source: spec/backbone.md section 1.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from finwhale.config import limits
from finwhale.config.files import FileError, read_object, shown

MODEL_TYPE = "deepseek_v41"
ARCHITECTURE = "DeepseekV41ForCausalLM"
# Written by other libraries beside the released keys; they carry nothing the model reads.
_FOREIGN_KEYS = frozenset({"transformers_version", "_name_or_path", "use_cache", "auto_map"})
CED_KV_FROM = ("layer_input", "encoder_output")


class ConfigError(ValueError):
    """A configuration that is inconsistent, unknown or not implemented."""


def _refuse(where: str, name: str, got: object, want: str) -> None:
    raise ConfigError(f"{where}{name}: got {shown(got)}, expected {want}")


def _check_ranges(owner: object, ranges: dict[str, limits.Range], where: str) -> None:
    for name, (low, high) in ranges.items():
        value = getattr(owner, name)
        if value is not None and not low <= value <= high:
            _refuse(where, name, value, f"a number from {low:.10g} to {high:.10g}")


def _read_fields(cls: type, raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `raw` restricted to the fields of `cls`; refuse keys that `cls` does not name."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where or 'config.json'}: got {type(raw).__name__}, expected an object")
    known = {f.name for f in fields(cls)}
    unknown = sorted(set(raw) - known - _FOREIGN_KEYS - {"torch_dtype"})
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{where}{unknown[0][:80]}: unknown field{hint}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k in known}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """YaRN blending of the rotary frequencies of compressed layers (section 4.7)."""

    rope_type: str = "yarn"
    factor: float = 16
    beta_fast: float = 32
    beta_slow: float = 1
    original_max_position_embeddings: int = 65536

    def __post_init__(self) -> None:
        if self.rope_type != "yarn":
            _refuse("rope_scaling.", "rope_type", self.rope_type, "'yarn'")
        _check_ranges(self, limits.ROPE_SCALING, "rope_scaling.")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationConfig:
    """How the checkpoint stores its matrices: FP8 with 32x32 UE8M0 scales, FP4 experts."""

    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, int] = (32, 32)
    scale_fmt: str = "ue8m0"
    expert_dtype: str = "fp4"

    def __post_init__(self) -> None:
        for name, want in (
            ("quant_method", "fp8"),
            ("activation_scheme", "dynamic"),
            ("weight_block_size", (32, 32)),
            ("scale_fmt", "ue8m0"),
            ("expert_dtype", "fp4"),
        ):
            if getattr(self, name) != want:
                _refuse("quantization_config.", name, getattr(self, name), repr(want))


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """DeepSeek-ViT. Read for accounting and names; its tensors are listed as skipped here."""

    model_type: str = "deepseek_v41_vision"
    num_hidden_layers: int = 32
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.model_type != "deepseek_v41_vision":
            _refuse("vision_config.", "model_type", self.model_type, "'deepseek_v41_vision'")
        _check_ranges(self, limits.VISION, "vision_config.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """The text backbone. Defaults are the released Flash values."""

    model_type: str = "deepseek_v41_text"
    dtype: str = "bfloat16"
    vocab_size: int = 129280
    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    sliding_window: int = 128
    rope_theta: float = 10000
    compress_rope_theta: float = 160000
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    compress_ratios: tuple[int, ...] = (0, 0) + (2,) * 18 + (1,) * 20 + (0, 0, 0)
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-20
    attention_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-06
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    # Not a released key. "encoder_output" is the general form of the report's eq. 1: every decoder
    # Full layer projects its entries from the encoder's output. See docs/deviations.md D02.
    ced_kv_from: str = "layer_input"

    def __post_init__(self) -> None:
        self._check_implemented()
        self._check_sizes()
        self._check_engram()
        from finwhale.config.layers import build_layer_specs

        build_layer_specs(self)

    def _check_implemented(self) -> None:
        for name, want in (
            ("model_type", "deepseek_v41_text"),
            ("num_key_value_heads", 1),
            ("n_shared_experts", 1),
            ("scoring_func", "sqrtsoftplus"),
            ("topk_method", "noaux_tc"),
            ("norm_topk_prob", True),
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("attention_dropout", 0.0),
            ("tie_word_embeddings", False),
        ):
            if getattr(self, name) != want:
                _refuse(
                    "text_config.", name, getattr(self, name), f"{want!r} (nothing else exists)"
                )
        if self.dtype not in ("bfloat16", "float32"):
            _refuse("text_config.", "dtype", self.dtype, "'bfloat16' or 'float32'")
        if self.ced_kv_from not in CED_KV_FROM:
            _refuse("text_config.", "ced_kv_from", self.ced_kv_from, f"one of {CED_KV_FROM}")

    def _check_sizes(self) -> None:
        _check_ranges(self, limits.TEXT, "text_config.")
        drafts = self.num_nextn_predict_layers * self.dspark_n_routed_experts
        experts = self.num_hidden_layers * self.n_routed_experts + drafts
        if experts > limits.MOST_EXPERTS:
            want = f"at most {limits.MOST_EXPERTS} experts in all layers, these have {experts}"
            _refuse("text_config.", "n_routed_experts", self.n_routed_experts, want)
        if len(self.dspark_target_layer_ids) > self.num_hidden_layers:
            want = f"at most num_hidden_layers = {self.num_hidden_layers} ids"
            _refuse("text_config.", "dspark_target_layer_ids", self.dspark_target_layer_ids, want)
        if self.num_attention_heads % self.o_groups:
            _refuse("text_config.", "o_groups", self.o_groups, "a divisor of num_attention_heads")
        if self.num_experts_per_tok > self.n_routed_experts:
            want = f"at most n_routed_experts = {self.n_routed_experts}"
            _refuse("text_config.", "num_experts_per_tok", self.num_experts_per_tok, want)
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > min(
            self.head_dim, self.index_head_dim
        ):
            want = "even and at most head_dim and index_head_dim"
            _refuse("text_config.", "qk_rope_head_dim", self.qk_rope_head_dim, want)
        # Quantisation groups of 32 run along these widths; a partial group has no released meaning.
        for name, width in (
            ("hidden_size", self.hidden_size),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("head_dim", self.head_dim),
            ("index_head_dim", self.index_head_dim),
            ("q_lora_rank", self.q_lora_rank),
            ("o_groups * o_lora_rank", self.o_groups * self.o_lora_rank),
            ("engram_head_dim", self.engram_head_dim),
        ):
            if width % 32:
                _refuse("text_config.", name, width, "a multiple of 32 (the quantisation group)")

    def _check_engram(self) -> None:
        if not self.engram_layer_ids:
            if self.engram_num_embeddings:
                _refuse("text_config.", "engram_num_embeddings", self.engram_num_embeddings, "[]")
            return
        columns = len(self.engram_layer_ids) * self.engram_columns
        if columns > limits.MOST_COLUMNS:
            want = (
                f"at most {limits.MOST_COLUMNS} columns (n-gram sizes from 2 on times heads) in "
                f"all Engram layers, these have {columns}"
            )
            _refuse("text_config.", "engram_n_heads", self.engram_n_heads, want)
        if not 0 <= self.engram_pad_token_id < self.vocab_size:
            want = f"an id below vocab_size = {self.vocab_size}"
            _refuse("text_config.", "engram_pad_token_id", self.engram_pad_token_id, want)
        if not 0 < self.engram_compressed_vocab_size <= self.vocab_size:
            want = f"between 1 and vocab_size = {self.vocab_size}"
            got = self.engram_compressed_vocab_size
            _refuse("text_config.", "engram_compressed_vocab_size", got, want)
        rows = tuple(b.num_rows for b in self.engram_buckets())
        if rows != self.engram_num_embeddings:
            want = f"{list(rows)} (sums of the bucket primes of section 7.3)"
            got = list(self.engram_num_embeddings)
            _refuse("text_config.", "engram_num_embeddings", got, want)

    def engram_buckets(self):
        """Return the hash buckets per Engram layer (section 7.3)."""
        from finwhale.config.engram import engram_buckets

        return engram_buckets(
            num_layers=len(self.engram_layer_ids),
            max_ngram_size=self.engram_max_ngram_size,
            n_heads=self.engram_n_heads,
            vocab_size=self.engram_vocab_size,
        )

    @property
    def engram_columns(self) -> int:
        """Rows gathered per token and Engram layer, J = (max n-gram size - 1) * heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The whole released configuration file."""

    architectures: tuple[str, ...] = (ARCHITECTURE,)
    model_type: str = MODEL_TYPE
    dtype: str = "bfloat16"
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 129264
    quantization_config: QuantizationConfig | None = field(default_factory=QuantizationConfig)
    text_config: TextConfig = field(default_factory=TextConfig)
    vision_config: VisionConfig | None = field(default_factory=VisionConfig)

    def __post_init__(self) -> None:
        if self.model_type != MODEL_TYPE:
            _refuse("", "model_type", self.model_type, f"{MODEL_TYPE!r}, the only family here")
        if self.architectures != (ARCHITECTURE,):
            _refuse("", "architectures", list(self.architectures), f"[{ARCHITECTURE!r}]")
        if self.dtype not in ("bfloat16", "float32"):
            _refuse("", "dtype", self.dtype, "'bfloat16' or 'float32'")
        _check_ranges(self, limits.MODEL, "")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if not 0 <= getattr(self, name) < self.text_config.vocab_size:
                want = f"an id below vocab_size = {self.text_config.vocab_size}"
                _refuse("", name, getattr(self, name), want)

    @classmethod
    def from_json(cls, source: str | Path | dict[str, Any]) -> ModelConfig:
        """Read a released `config.json` (a path, a folder that holds one, or its parsed object).

        Raises ConfigError naming file, field, value and expectation.
        """
        where, raw = "", source
        if not isinstance(source, dict):
            path = Path(source)
            path = path / "config.json" if path.is_dir() else path
            where = f"{path}: "
            try:
                raw = read_object(path, expected="a released config.json")
            except FileError as error:
                raise ConfigError(str(error)) from None
        try:
            return cls._from_object(raw)
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from None

    @classmethod
    def _from_object(cls, raw: Any) -> ModelConfig:
        if not isinstance(raw, dict):
            raise ConfigError(f"got {type(raw).__name__}, expected a JSON object")
        if raw.get("model_type") != MODEL_TYPE:
            found = raw.get("model_type")
            raise ConfigError(
                f"model_type: got {shown(found)}; the nearest supported is {MODEL_TYPE!r}"
            )
        values = _read_fields(cls, raw, "")
        for name, part in (
            ("text_config", TextConfig),
            ("vision_config", VisionConfig),
            ("quantization_config", QuantizationConfig),
        ):
            inner = raw.get(name)
            if inner is None:
                values[name] = TextConfig() if name == "text_config" and name in raw else None
                if name == "text_config":
                    raise ConfigError("text_config: missing; expected the nested text part")
                continue
            inner_values = _read_fields(part, inner, f"{name}.")
            if isinstance(inner_values.get("rope_scaling"), dict):
                scaling = _read_fields(RopeScaling, inner["rope_scaling"], f"{name}.rope_scaling.")
                inner_values["rope_scaling"] = _construct(
                    RopeScaling, scaling, f"{name}.rope_scaling"
                )
            values[name] = _construct(part, inner_values, name)
        return _construct(cls, values, "config")

    def to_json(self) -> dict[str, Any]:
        """Return the object that `from_json` reads back to an equal value."""
        raw = dataclasses.asdict(self)
        for name in ("quantization_config", "vision_config"):
            if raw[name] is None:
                del raw[name]
        if self.text_config.ced_kv_from == "layer_input":
            del raw["text_config"]["ced_kv_from"]
        return json.loads(json.dumps(raw))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# What a JSON value must be for a field with this annotation; nested parts are read before.
_FITS: dict[str, Callable[[Any], bool]] = {
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "float": _is_number,
    "float | None": lambda v: v is None or _is_number(v),
    "bool": lambda v: isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "tuple[int, ...]": lambda v: isinstance(v, tuple) and all(type(i) is int for i in v),
    "tuple[int, int]": lambda v: isinstance(v, tuple) and all(type(i) is int for i in v),
    "tuple[str, ...]": lambda v: isinstance(v, tuple) and all(isinstance(i, str) for i in v),
    "RopeScaling": lambda v: isinstance(v, RopeScaling),
}


def _construct(cls: type, values: dict[str, Any], where: str):
    """Build `cls`, turning a wrong type in the file into a ConfigError that names the field."""
    for f in fields(cls):
        fits = _FITS.get(str(f.type))  # annotations are strings here
        if f.name in values and fits is not None and not fits(values[f.name]):
            _refuse(f"{where}.", f.name, values[f.name], str(f.type))
    return cls(**values)
