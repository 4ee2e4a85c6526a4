"""A loaded model's weights in the bytes that the kernels of a decode step read.

Takes the values of a `Backbone` in release numerics back to the stored formats they came from: FP8
with a scale per 32x32 block, FP4 per row and 32 columns, FP8 rows for Engram tables, and bf16. It
refuses a matrix whose values that format cannot hold, by name: nothing is rounded here. FP8 and FP4
matrices become tiles (`decode_kernels.tiles`). The easy mistake: joining two FP8 matrices whose
first one ends inside a block of 32 rows; then blocks of the joined matrix straddle both.
Source: spec/backbone.md sections 9 and 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass

import torch
from torch import Tensor

from finwhale.config import TextConfig
from finwhale.config.inventory import GROUP, Storage
from finwhale.config.layers import Half, LayerSpec, build_layer_specs
from finwhale.decode_kernels.experts_w4 import ExpertWeights
from finwhale.decode_kernels.hyper_site import STREAMS, Site
from finwhale.decode_kernels.launch import is_interpreted
from finwhale.decode_kernels.linear_fp8 import _linear_kernel
from finwhale.decode_kernels.tiles import pack_fp4_tiles, pack_fp8_tiles
from finwhale.model import Backbone, Numerics
from finwhale.ops.weight_formats import dequantize_weight, quantize_weight

Matrix = tuple[Tensor, Tensor | None]


class GpuUnsupportedError(ValueError):
    """A model, a device or a request that the GPU decoder cannot serve; the message says why."""


@dataclass(kw_only=True)
class LayerWeights:
    """The weights of one layer.

    qkv            rows of `wq_a`, then of `wkv`
    compressor     rows of `wkv`, then of `wgate` where there is one
    index_weights  `weights_proj`, times the scores' factor if that is a power of two
    index_factor   what is left of the factor
    engram         hash constants, table, projection; empty without Engram
    """

    spec: LayerSpec
    attn_site: Site
    ffn_site: Site
    qkv: Matrix
    q_norm: Tensor
    wq_b: Matrix
    kv_norm: Tensor
    wo_a: Matrix
    wo_b: Matrix
    sink: Tensor
    gate: Tensor
    bias: Tensor
    experts: ExpertWeights
    compressor: Tensor | None = None
    compressor_norm: Tensor | None = None
    index_wk: Tensor | None = None
    index_k_norm: Tensor | None = None
    index_wq_b: Matrix | None = None
    index_weights: Tensor | None = None
    index_factor: float = 1.0
    engram: dict[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True)
class StepWeights:
    """The weights of a whole step, on one device.

    final      the norm before the head, as a site whose coefficients nobody reads
    token_map  [V] int64 compressed Engram id of each token, or None without Engram
    pad_id     the compressed id that stands for a token before the first
    """

    config: TextConfig
    device: torch.device
    specs: tuple[LayerSpec, ...]
    layers: list[LayerWeights]
    final: Site
    embed: Tensor
    head: Tensor
    token_map: Tensor | None = None
    pad_id: int = 0

    def num_bytes(self) -> int:
        """Return the bytes of all weights as they lie on the device."""
        found = (self.layers, self.final, self.embed, self.head)
        return sum(tensor.nbytes for tensor in _tensors(found))


def decode_unsupported(config: TextConfig, device: torch.device | str) -> str | None:
    """Return why a decode step cannot serve this model on this device, or None."""
    c, device = config, torch.device(device)
    in_decoder = [s.layer_id for s in build_layer_specs(c) if s.owns_kv and s.half is Half.DECODER]
    owners = in_decoder[1:]
    checks = (
        (c.hc_mult == STREAMS, "hc_mult", f"{STREAMS}"),
        (_is_power(c.head_dim, 64, 512), "head_dim", "a power of two in 64..512"),
        (c.index_head_dim in (64, 128), "index_head_dim", "64 or 128"),
        (c.index_n_heads <= 64, "index_n_heads", "at most 64"),
        (c.index_topk <= 2048, "index_topk", "at most 2048"),
        (c.q_lora_rank % GROUP == 0, "q_lora_rank", "a multiple of 32"),
        (c.hidden_size in range(GROUP, 8193, GROUP), "hidden_size", "a multiple of 32 up to 8192"),
        (c.moe_intermediate_size % GROUP == 0, "moe_intermediate_size", "a multiple of 32"),
        (c.n_routed_experts <= 512, "n_routed_experts", "at most 512"),
        (_is_power(c.candidate_block_size, 1, 64), "candidate_block_size", "a power of two <= 64"),
        # A step gives each owner its own layer's input.
        (
            c.ced_kv_from == "layer_input" or not owners,
            "ced_kv_from",
            f"'layer_input', as layers {owners} make entries behind the cut",
        ),
        (all(r <= 2 for r in c.compress_ratios), "compress_ratios", "0, 1 or 2"),
    )
    for ok, name, want in checks:
        if not ok:
            return f"{name}: got {getattr(c, name)!r}, expected {want}"
    if device.type == "cuda" and not torch.cuda.is_available():
        return "device: 'cuda' was asked for, but torch sees no GPU"
    if device.type != "cuda" and not is_interpreted(_linear_kernel):
        return f"device: got {str(device)!r}, expected 'cuda'; a CPU decodes with device=cpu"
    return None


def pack_backbone(model: Backbone, device: torch.device | str) -> StepWeights:
    """Return the weights of a model in release numerics as a step reads them, on `device`.

    Raises GpuUnsupportedError for what no kernel serves, and for a value that its stored format
    cannot hold: the model was trained or changed after it was stored.
    """
    device = torch.device(device)
    reason = decode_unsupported(model.config.text_config, device)
    if reason is None and model.numerics != Numerics.release():
        reason = f"numerics: got {model.numerics}, expected {Numerics.release()}"
    if reason is not None:
        raise GpuUnsupportedError(reason)
    c, wide = model.config.text_config, model.config.text_config.hidden_size
    layers = [_layer(_Source(f"layers.{n}", c), block) for n, block in enumerate(model.layers)]
    nothing = (torch.zeros(24, STREAMS * wide), torch.zeros(24), torch.zeros(3))
    weights = StepWeights(
        config=c,
        device=device,
        specs=model.specs,
        layers=layers,
        final=Site(*nothing, model.norm.weight),
        embed=model.embed.weight,
        head=model.head.weight,
        token_map=model.token_map,
        pad_id=model.pad_id,
    )
    return _moved(weights, device)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a layer's tensors come from, for messages."""

    prefix: str
    config: TextConfig

    def stored(
        self, name: str, weight: Tensor, storage: Storage = Storage.FP8_BLOCK
    ) -> tuple[Tensor, Tensor]:
        """Return codes and scale bytes of a matrix; refuses one that they do not give back."""
        values = weight.detach().float().cpu()
        codes, scales = quantize_weight(values, storage)
        if not torch.equal(dequantize_weight(codes, scales), values):
            raise GpuUnsupportedError(
                f"{self.prefix}.{name}: its values are none of {storage.value}; load a checkpoint "
                "that stores it so (finwhale.checkpoint.save writes one)"
            )
        return codes, scales.view(torch.uint8)

    def tiles(self, **matrices: Tensor) -> tuple[Tensor, Tensor]:
        """Return FP8 matrices, one below the other, as tiles; names have `__` for a dot.

        Each has a multiple of 32 rows.
        """
        packed = []
        for key, weight in matrices.items():
            name = key.replace("__", ".")
            if len(weight) % GROUP:
                raise GpuUnsupportedError(
                    f"{self.prefix}.{name}: {len(weight)} rows, expected a multiple of {GROUP}"
                )
            try:
                packed.append(pack_fp8_tiles(*self.stored(name, weight)))
            except ValueError as error:
                raise GpuUnsupportedError(f"{self.prefix}.{name}: {error}") from None
        codes, scales = zip(*packed, strict=True)
        return torch.cat(codes), torch.cat(scales)


def _experts(source: _Source, moe) -> ExpertWeights:
    def stack(*names: str) -> tuple[Tensor, Tensor]:
        packed = []
        for n, expert in enumerate(moe.experts):
            pairs = [
                source.stored(
                    f"ffn.experts.{n}.{x}.weight", getattr(expert, x).weight, Storage.FP4_ROW
                )
                for x in names
            ]
            codes, scales = (torch.cat(x) for x in zip(*pairs, strict=True))
            try:  # one by one: packing takes twenty times the bytes of what it packs
                packed.append(pack_fp4_tiles(codes, scales))
            except ValueError as error:
                raise GpuUnsupportedError(f"{source.prefix}.ffn.experts.{n}: {error}") from None
        codes, scales = (torch.stack(x) for x in zip(*packed, strict=True))
        return codes, scales

    own = moe.shared_experts
    shared_gate_up = source.tiles(
        ffn__shared_experts__w1=own.w1.weight, ffn__shared_experts__w3=own.w3.weight
    )
    shared_down = source.tiles(ffn__shared_experts__w2=own.w2.weight)
    gate_up, gate_up_scales = stack("w1", "w3")
    down, down_scales = stack("w2")
    return ExpertWeights(gate_up, gate_up_scales, down, down_scales, *shared_gate_up, *shared_down)


def _layer(source: _Source, block) -> LayerWeights:
    c, spec, attn = source.config, block.spec, block.attn
    layer = LayerWeights(
        spec=spec,
        attn_site=Site(
            block.hc_attn_fn, block.hc_attn_base, block.hc_attn_scale, block.attn_norm.weight
        ),
        ffn_site=Site(
            block.hc_ffn_fn, block.hc_ffn_base, block.hc_ffn_scale, block.ffn_norm.weight
        ),
        qkv=source.tiles(attn__wq_a=attn.wq_a.weight, attn__wkv=attn.wkv.weight),
        q_norm=attn.q_norm.weight,
        wq_b=source.tiles(attn__wq_b=attn.wq_b.weight),
        kv_norm=attn.kv_norm.weight,
        wo_a=source.tiles(attn__wo_a=attn.wo_a.weight),
        wo_b=source.tiles(attn__wo_b=attn.wo_b.weight),
        sink=attn.attn_sink,
        gate=block.ffn.gate.weight,
        bias=block.ffn.gate.bias,
        experts=_experts(source, block.ffn),
    )
    if attn.compressor is not None and attn.indexer is not None:
        parts = [attn.compressor.wkv.weight]
        if attn.compressor.wgate is not None:
            parts.append(attn.compressor.wgate.weight)
        layer.compressor = torch.cat([part.detach() for part in parts])
        layer.compressor_norm = attn.compressor.norm.weight
        layer.index_wk, layer.index_k_norm = attn.indexer.wk.weight, attn.indexer.k_norm.weight
    if attn.indexer is not None:
        layer.index_wq_b = source.tiles(attn__indexer__wq_b=attn.indexer.wq_b.weight)
        factor, weight = index_factor(c), attn.indexer.weights_proj.weight
        factor = torch.tensor(factor).item()  # products with bf16 take it in fp32
        is_exact = math.frexp(factor)[0] == 0.5
        layer.index_weights = weight.detach() * factor if is_exact else weight
        layer.index_factor = 1.0 if is_exact else factor
    if block.engram is not None:
        engram = block.engram
        table = source.stored("engram.embed", engram.embed.weight, Storage.FP8_ROW)
        wkv = source.tiles(engram__wkv=engram.wkv.weight)
        layer.engram = {
            "multipliers": engram.multipliers,
            "primes": engram.primes,
            "offsets": engram.offsets,
            "table": table[0],
            "table_scales": table[1],
            "wkv": wkv[0],
            "wkv_scales": wkv[1],
            "q_weight": engram.q_weight,
            "k_weight": engram.k_weight,
        }
    return layer


def index_factor(config: TextConfig) -> float:
    """Return what head weights of the indexer are multiplied by: 1 / sqrt(dim * heads)."""
    return config.index_head_dim**-0.5 * config.index_n_heads**-0.5


def _is_power(value: int, least: int, most: int) -> bool:
    return least <= value <= most and value & (value - 1) == 0


def _tensors(value):
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _moved(value, device: torch.device):
    """Return a record with every tensor detached, contiguous and on `device`."""
    if isinstance(value, Tensor):
        return value.detach().to(device).contiguous()
    if isinstance(value, (StepWeights, LayerWeights)):
        for one in fields(value):
            setattr(value, one.name, _moved(getattr(value, one.name), device))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(one, device) for one in value))
    elif isinstance(value, (list, tuple)):
        return type(value)(_moved(one, device) for one in value)
    elif isinstance(value, dict):
        return {name: _moved(one, device) for name, one in value.items()}
    return value
