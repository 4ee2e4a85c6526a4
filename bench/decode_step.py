"""A whole decode step out of `finwhale.decode_kernels`, over random weights in the stored formats.

What `gpu_decode.py` times: every launch of a step of a config, in order, as a CUDA graph can hold
it. Weights are random bytes in the release's formats with scales that keep values near one; caches
are random rows, full to the context; block tables are a random permutation, so indices scatter.
A step writes its rows to the same places each time, so replays do equal work. It is a step that
completes the groups of ratio 2: both of the two tokens would not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from finwhale.config.layers import AttentionMode, LayerSpec, PoolUse, RopeKind, build_layer_specs
from finwhale.config.model import TextConfig
from finwhale.decode_kernels.engram_gate import engram_gather, engram_update
from finwhale.decode_kernels.experts_w4 import (
    ExpertLaunch,
    ExpertWeights,
    expert_launch,
    experts_w4,
)
from finwhale.decode_kernels.gather_attention import gather_attention
from finwhale.decode_kernels.head import draw_tokens, head_logits
from finwhale.decode_kernels.hyper_site import (
    Site,
    SiteLaunch,
    hyper_site,
    site_launch,
    site_scratch,
    split_normed,
)
from finwhale.decode_kernels.index_scores import index_scores
from finwhale.decode_kernels.linear_fp8 import LinearLaunch, linear_fp8, linear_launch
from finwhale.decode_kernels.route import RouteLaunch, route, route_launch, route_scratch
from finwhale.decode_kernels.select_topk import pool_rows, select_topk_rows
from finwhale.decode_kernels.store_rows import close_groups, rotate_queries, store_rows
from finwhale.ops.engram import engram_multipliers
from finwhale.ops.hyper_connection import HyperMix
from finwhale.ops.rope import rope_frequencies, rope_rotation

ENTRIES_PER_BLOCK = 64
Matrix = tuple[Tensor, Tensor | None]


@dataclass(kw_only=True)
class Launches:
    """Launch parameters that a sweep replaces; None: the kernels' own tables."""

    linear: LinearLaunch | None = None
    experts: ExpertLaunch | None = None
    route: RouteLaunch | None = None
    site: SiteLaunch | None = None
    overlap: int = 0
    invariant: bool = False

    @classmethod
    def chosen(
        cls, tokens: int, device: str, *, overlap: int = 0, invariant: bool = False
    ) -> Launches:
        """Return the tables' parameters for `tokens` tokens, with that kind of overlap.

        invariant  those under which a sequence's step does not depend on its neighbours
        """
        of = tokens, torch.device(device), invariant
        return cls(
            linear=replace(linear_launch(*of), overlap=overlap),
            experts=replace(expert_launch(*of), overlap=overlap),
            route=replace(route_launch(*of), overlap=overlap),
            site=replace(site_launch(*of), overlap=overlap),
            overlap=overlap,
            invariant=invariant,
        )


class RandomWeights:
    """Makes tensors in the stored formats on one device."""

    def __init__(self, device: str):
        self.device = device

    def bytes(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        words = torch.randint(
            -(2**31), 2**31 - 1, (-(-count // 4),), dtype=torch.int32, device=self.device
        )
        return words.view(torch.uint8)[:count].view(shape)

    def scales(self, shape: tuple[int, ...], rms: float, columns: int) -> Tensor:
        """Return UE8M0 codes: values of this rms come near 1/sqrt(columns)."""
        code = 127 + round(math.log2(columns**-0.5 / rms))
        return (self.bytes(*shape) & 1) + (code - 1)

    def fp8(self, rows: int, columns: int) -> Matrix:
        codes = self.bytes(rows, columns)
        codes &= 0xBF  # magnitudes below 2, so no NaN
        scales = self.scales((-(-rows // 32), columns // 32), 0.6, columns)
        return codes.view(torch.float8_e4m3fn), scales

    def fp4(self, experts: int, rows: int, columns: int) -> Matrix:
        scales = self.scales((experts, rows, columns // 32), 2.9, columns)
        return self.bytes(experts, rows, columns // 2), scales

    def bf16(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device).mul_(std).bfloat16()

    def ones(self, count: int) -> Tensor:
        return torch.ones(count, dtype=torch.bfloat16, device=self.device)

    def site(self, channels: int) -> Site:
        fn = torch.randn(24, 4 * channels, device=self.device) * (4 * channels) ** -0.5
        base = torch.randn(24, device=self.device)
        return Site(fn, base, torch.ones(3, device=self.device), self.ones(channels))


@dataclass(kw_only=True)
class Layer:
    """The weights of one layer."""

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
    engram: dict[str, Tensor] = field(default_factory=dict)


class Model:
    """Random weights of a whole model; `layers` keeps only the first few, for sweeps."""

    def __init__(self, c: TextConfig, device: str, engram_rows: int, layers: int | None = None):
        self.config, self.device = c, device
        self.specs = build_layer_specs(c)[:layers]
        make = self.make = RandomWeights(device)
        self.embed = make.bf16(c.vocab_size, c.hidden_size)
        self.head = make.bf16(c.vocab_size, c.hidden_size, std=c.hidden_size**-0.5)
        self.final = make.site(c.hidden_size)
        self.engram_rows = engram_rows
        self.layers = [self._layer(spec) for spec in self.specs]

    def _layer(self, spec: LayerSpec) -> Layer:
        c, make = self.config, self.make
        wide, joined, inner = (
            c.hidden_size,
            c.num_attention_heads * c.head_dim,
            c.moe_intermediate_size,
        )
        experts = ExpertWeights(
            *make.fp4(c.n_routed_experts, 2 * inner, wide),
            *make.fp4(c.n_routed_experts, wide, inner),
            *make.fp8(2 * inner, wide),
            *make.fp8(wide, inner),
        )
        layer = Layer(
            spec=spec,
            attn_site=make.site(wide),
            ffn_site=make.site(wide),
            qkv=make.fp8(c.q_lora_rank + c.head_dim, wide),
            q_norm=make.ones(c.q_lora_rank),
            wq_b=make.fp8(joined, c.q_lora_rank),
            kv_norm=make.ones(c.head_dim),
            wo_a=make.fp8(c.o_groups * c.o_lora_rank, joined // c.o_groups),
            wo_b=make.fp8(wide, c.o_groups * c.o_lora_rank),
            sink=torch.zeros(c.num_attention_heads, device=self.device),
            gate=make.bf16(c.n_routed_experts, wide, std=wide**-0.5),
            bias=torch.zeros(c.n_routed_experts, device=self.device),
            experts=experts,
        )
        if spec.owns_kv:
            layer.compressor = make.bf16(
                c.head_dim * (2 if spec.ratio > 1 else 1), wide, std=wide**-0.5
            )
            layer.compressor_norm = make.ones(c.head_dim)
            layer.index_wk = make.bf16(c.index_head_dim, c.head_dim, std=c.head_dim**-0.5)
            layer.index_k_norm = make.ones(c.index_head_dim)
        if spec.owns_topk:
            layer.index_wq_b = make.fp8(c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            # The factor 1 / sqrt(heads * dim) is a power of two and lies in the matrix.
            layer.index_weights = make.bf16(
                c.index_n_heads, wide, std=(wide * c.index_n_heads * c.index_head_dim) ** -0.5
            )
        if spec.engram_index is not None:
            layer.engram = self._engram(spec)
        return layer

    def _engram(self, spec: LayerSpec) -> dict[str, Tensor]:
        c, make = self.config, self.make
        orders, heads = c.engram_max_ngram_size - 1, c.engram_n_heads
        share = self.engram_rows // (orders * heads)
        primes = torch.tensor([share - n for n in range(orders * heads)]).view(orders, heads)
        flat = primes.flatten()
        codes = make.bytes(self.engram_rows, c.engram_head_dim)
        codes &= 0xBF
        weight, scales = make.fp8(
            (c.hc_mult + 1) * c.hidden_size, c.engram_columns * c.engram_head_dim
        )
        return {
            "multipliers": engram_multipliers(
                spec.layer_id, c.engram_max_ngram_size, c.engram_compressed_vocab_size
            ).to(self.device),
            "primes": primes.to(self.device),
            "offsets": (flat.cumsum(0) - flat).view(orders, heads).to(self.device),
            "table": codes.view(torch.float8_e4m3fn),
            "table_scales": make.scales((self.engram_rows, c.engram_head_dim // 32), 0.6, 1),
            "wkv": weight,
            "wkv_scales": scales,
            "q_weight": make.bf16(c.hc_mult, c.hidden_size),
            "k_weight": make.bf16(c.hc_mult, c.hidden_size),
        }


class Cache:
    """Caches of `batch` sequences with room for `context` tokens, all at the same position.

    is_random  rows are random bytes of sensible size, as if every token had been there; else zeros
    """

    def __init__(self, model: Model, batch: int, context: int, is_random: bool = True):
        self.config, self.specs, self.device = model.config, model.specs, model.device
        self.batch, self.context = batch, context
        c = self.config
        rows = RandomWeights(self.device) if is_random else None
        self.rings = [
            _packed_rows(rows, batch * c.sliding_window, c.head_dim, 32, 127, self.device)
            for _ in self.specs
        ]
        self.frequencies = {
            RopeKind.WINDOW: rope_frequencies(c.rope_theta, c.qk_rope_head_dim, None),
            RopeKind.COMPRESSED: rope_frequencies(
                c.compress_rope_theta, c.qk_rope_head_dim, c.rope_scaling
            ),
        }
        self.main, self.keys, self.tables, self.open_group = {}, {}, {}, {}
        for spec in self.specs:
            if not spec.owns_kv:
                continue
            blocks = -(-(context // spec.ratio) // ENTRIES_PER_BLOCK)
            count = batch * blocks * ENTRIES_PER_BLOCK
            half, narrow = c.head_dim // 2, c.index_head_dim // 2
            self.main[spec.layer_id] = _packed_rows(rows, count, half, 8, 0x30, self.device)
            self.keys[spec.layer_id] = _packed_rows(rows, count, narrow, 16, 125, self.device)
            order = torch.randperm(batch * blocks, device=self.device)
            self.tables[spec.layer_id] = order.view(batch, blocks)
            if spec.ratio > 1:
                shape = batch, 2, c.head_dim
                self.open_group[spec.layer_id] = torch.randn(shape, device=self.device)
        self.at(context - 1)

    def at(self, position: int) -> None:
        """Set what depends on the position of the token that the next step computes."""
        c, device, batch = self.config, self.device, self.batch
        self.position = position
        where = torch.full((batch,), position, device=device)
        first = (torch.arange(batch, device=device) * c.sliding_window)[:, None]
        slot = torch.arange(c.sliding_window, device=device)
        self.window_index = torch.where(slot <= position, first + slot, -1)
        self.ring_rows = first[:, 0] + position % c.sliding_window
        self.rotation, self.entry_rotation = {}, {}
        for kind, frequencies in self.frequencies.items():
            self.rotation[kind] = rope_rotation(where, frequencies.to(device))
        self.sequence = torch.arange(batch, device=device)
        self.visible, self.entry_rows, self.closes = {}, {}, {}
        self.pool_lengths, self.pool_columns = {}, {}
        for spec in self.specs:
            if not spec.owns_kv:
                continue
            layer, visible = spec.layer_id, (position + 1) // spec.ratio
            start = where // spec.ratio * spec.ratio
            frequencies = self.frequencies[spec.rope].to(device)
            self.entry_rotation[layer] = rope_rotation(start, frequencies)
            self.visible[layer] = torch.full((batch,), visible, device=device)
            # A group that this token leaves open has no entry: -1 stores nothing.
            last, rows = visible - 1, torch.full((batch,), -1, device=device)
            closes = (position + 1) % spec.ratio == 0
            self.closes[layer] = torch.full((batch,), closes, device=device)
            if closes:
                block = self.tables[layer][:, last // ENTRIES_PER_BLOCK]
                rows = block * ENTRIES_PER_BLOCK + last % ENTRIES_PER_BLOCK
            self.entry_rows[layer] = rows
            candidates = -(-visible // c.candidate_block_size)
            self.pool_lengths[layer] = torch.full((batch,), candidates, device=device)
            columns = min(candidates, c.candidate_topk_blocks) * c.candidate_block_size
            self.pool_columns[layer] = torch.full((batch,), columns, device=device)


def _packed_rows(
    make: RandomWeights | None, count: int, codes: int, per_scale: int, scale: int, device: str
) -> Tensor:
    """Return rows of `codes` code bytes and a scale byte per `per_scale` of them."""
    if make is None:
        shape = count, codes + codes // per_scale
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    rows = make.bytes(count, codes + codes // per_scale)
    if per_scale == 32:
        rows[:, :codes] &= 0xBF  # E4M3 without NaN
    rows[:, codes:] = scale
    return rows


class Step:
    """One decode step of a batch; `run` launches it, `graph` captures it."""

    def __init__(self, model: Model, cache: Cache, launches: Launches | None = None):
        self.model, self.cache = model, cache
        self.launches = Launches() if launches is None else launches
        self.overlap = self.launches.overlap > 0
        c, device, batch = model.config, model.device, cache.batch
        self.ids = torch.randint(3, c.vocab_size, (batch,), device=device)
        self.recent = torch.randint(
            0, c.engram_compressed_vocab_size, (batch, c.engram_max_ngram_size), device=device
        )
        self.temperatures = torch.zeros(batch, device=device)
        self.uniforms = torch.rand(batch, dtype=torch.float64, device=device)
        self.first_mix = torch.zeros(batch, 4, device=device)
        self.first_mix[:, 0] = 1.0
        self.scratch = (
            torch.empty(1 << 24, device=device),
            torch.zeros(1 << 15, dtype=torch.int32, device=device),
        )
        self.site_scratch = site_scratch(batch, c.hidden_size, device)
        self.route_scratch = route_scratch(batch, c.n_routed_experts, device)
        self.active: list[Tensor] = []
        self.tokens = self.ids

    def linear(self, x: Tensor, matrix: Matrix, **options) -> Tensor:
        return linear_fp8(x, *matrix, launch=self.launches.linear, scratch=self.scratch, **options)

    def site(self, streams, parts, before, incoming, site):
        c = self.model.config
        return hyper_site(
            streams, parts, before, incoming, site,
            iterations=c.hc_sinkhorn_iters, norm_eps=c.rms_norm_eps, eps=c.hc_eps,
            launch=self.launches.site, scratch=self.site_scratch,
        )  # fmt: skip

    def run(self) -> Tensor:
        """Launch the step; returns the next ids [T] and keeps the experts that were active."""
        c = self.model.config
        self.active = []
        self.topk, self.pool = {}, None
        streams = self.model.embed[self.ids].unsqueeze(1).repeat(1, c.hc_mult, 1)
        gathered = {
            layer.spec.layer_id: self.gather(layer) for layer in self.model.layers if layer.engram
        }
        parts, before, incoming = None, None, self.first_mix
        for layer in self.model.layers:
            if layer.engram:
                e = layer.engram
                kv = self.linear(gathered[layer.spec.layer_id], (e["wkv"], e["wkv_scales"]))
                streams = engram_update(
                    streams, parts, before, kv, e["q_weight"], e["k_weight"], c.rms_norm_eps
                )
                parts, before = None, None
            streams, parts, before, incoming = self.block(layer, streams, parts, before, incoming)
        x = self.site(streams, parts, before, incoming, self.model.final).x
        self.logits = head_logits(x, self.model.head, self.launches.linear, self.scratch)
        self.tokens = draw_tokens(self.logits, self.temperatures, self.uniforms)
        return self.tokens

    def gather(self, layer: Layer) -> Tensor:
        e = layer.engram
        return engram_gather(
            self.recent, e["multipliers"], e["primes"], e["offsets"], e["table"], e["table_scales"]
        )

    def block(
        self, layer: Layer, streams: Tensor, parts, before: HyperMix | None, incoming: Tensor
    ):
        """Launch one layer; returns what the next one takes."""
        c = self.model.config
        out = self.site(streams, parts, before, incoming, layer.attn_site)
        y = self.attention(layer, out.x, out.x_rounded)
        site = self.site(streams, y.unsqueeze(1), out.mix, out.mix.pre, layer.ffn_site)
        routing = route(
            site.x, layer.gate, layer.bias, c.num_experts_per_tok, c.routed_scaling_factor,
            self.launches.route, self.route_scratch,
        )  # fmt: skip
        self.active.append(routing.active)
        parts = experts_w4(
            site.x_rounded, routing, layer.experts, c.swiglu_limit, self.launches.experts
        )
        return streams, parts, site.mix, site.mix.pre

    def attention(self, layer: Layer, x: Tensor, rounded: Tensor) -> Tensor:
        c, cache, spec = self.model.config, self.cache, layer.spec
        rotation = cache.rotation[spec.rope]
        eps, ring = c.rms_norm_eps, cache.rings[spec.layer_id]
        qr, kv = split_normed(
            self.linear(rounded, layer.qkv), layer.q_norm, eps, self.launches.overlap
        )
        q = self.linear(qr, layer.wq_b, turn=rotation, head_dim=c.head_dim)
        q = q.view(-1, c.num_attention_heads, c.head_dim)
        store_rows(
            "window", kv, layer.kv_norm, rotation, ring, cache.ring_rows, eps, overlap=self.overlap
        )
        if spec.owns_kv:
            self.publish(layer, x)
        if spec.owns_topk:
            self.select(layer, x, qr)
        is_window = spec.mode is AttentionMode.WINDOW
        out = gather_attention(
            q,
            ring,
            cache.window_index,
            None if is_window else cache.main[spec.kv_owner],
            cache.window_index if is_window else self.topk[spec.topk_owner],
            layer.sink,
            rotation,
            invariant=self.launches.invariant,
            overlap=self.overlap,
        )
        z = self.linear(out.flatten(1), layer.wo_a, groups=c.o_groups, round_output=True)
        return self.linear(z, layer.wo_b)

    def publish(self, layer: Layer, x: Tensor) -> None:
        c, cache, spec = self.model.config, self.cache, layer.spec
        owner, eps = spec.layer_id, c.rms_norm_eps
        if spec.ratio > 1:
            found = self.linear(x, (layer.compressor, None), out_dtype=torch.float32)
            pooled = close_groups(
                *found.chunk(2, dim=-1), cache.open_group[owner], cache.sequence,
                cache.closes[owner], overlap=self.overlap,
            )  # fmt: skip
        else:
            pooled = self.linear(x, (layer.compressor, None))
        latent = torch.empty_like(pooled)
        rotation, rows = cache.entry_rotation[owner], cache.entry_rows[owner]
        store_rows(
            "entry", pooled, layer.compressor_norm, rotation, cache.main[owner], rows, eps, latent,
            overlap=self.overlap,
        )  # fmt: skip
        key = self.linear(latent, (layer.index_wk, None))
        store_rows(
            "index_key", key, layer.index_k_norm, rotation, cache.keys[owner], rows, eps,
            overlap=self.overlap,
        )  # fmt: skip

    def select(self, layer: Layer, x: Tensor, qr: Tensor) -> None:
        c, cache, spec = self.model.config, self.cache, layer.spec
        q = self.linear(qr, layer.index_wq_b).view(-1, c.index_n_heads, c.index_head_dim)
        rotate_queries(q, cache.rotation[spec.rope], True, overlap=self.overlap)
        weights = self.linear(x, (layer.index_weights, None), out_dtype=torch.float32)
        owner = spec.kv_owner
        tables, visible = cache.tables[owner], cache.visible[owner]
        entries = cache.context // spec.ratio
        size = c.candidate_block_size
        searches = spec.pool is PoolUse.SEARCHES
        columns = c.candidate_topk_blocks * size if searches else entries
        scores, best = index_scores(
            q, weights, cache.keys[owner], tables, visible, ENTRIES_PER_BLOCK, columns,
            self.pool if searches else None, size, want_best=spec.pool is PoolUse.BUILDS,
            overlap=self.overlap,
        )  # fmt: skip
        lengths = cache.pool_columns[owner] if searches else visible
        chosen = select_topk_rows(scores, lengths, c.index_topk, overlap=self.overlap)
        if spec.pool is PoolUse.BUILDS:
            self.pool = select_topk_rows(best, cache.pool_lengths[owner], c.candidate_topk_blocks)
        self.topk[spec.layer_id] = pool_rows(
            chosen, tables, ENTRIES_PER_BLOCK, self.pool if searches else None, size,
            overlap=self.overlap,
        )  # fmt: skip

    def graph(self) -> torch.cuda.CUDAGraph:
        """Return the captured step, warm."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph
