"""Random weights and full caches for `finwhale.gpu.step`, in the stored formats.

What `gpu_decode.py` times: every launch of a step of a config, in order, as a CUDA graph can hold
it. Weights are random bytes in the release's formats with scales that keep values near one; caches
are random rows, full to the context; block tables are a random permutation, so indices scatter.
A step writes its rows to the same places each time, so replays do equal work. It is a step that
completes the groups of ratio 2: both of the two tokens would not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from finwhale.config.layers import LayerSpec, RopeKind, build_layer_specs
from finwhale.config.model import TextConfig
from finwhale.decode_kernels.experts_w4 import ExpertWeights
from finwhale.decode_kernels.head import draw_tokens
from finwhale.decode_kernels.hyper_site import Site
from finwhale.gpu.places import EntryPlaces, Places
from finwhale.gpu.step import DecodeStep, Launches
from finwhale.gpu.weights import LayerWeights, Matrix, StepWeights
from finwhale.ops.engram import engram_multipliers
from finwhale.ops.rope import rope_frequencies, rope_rotation

ENTRIES_PER_BLOCK = 64


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
        codes = self.bytes(-(-rows // 32), columns // 32, 1024)
        # No code has the highest bit of its exponent, so magnitudes are below 2 and none is a NaN.
        codes.view(torch.int16).bitwise_and_(~0x4400)
        return codes, self.scales((-(-rows // 32), columns // 32), 0.6, columns)

    def fp4(self, experts: int, rows: int, columns: int) -> Matrix:
        tiles = experts, rows // 32, columns // 32
        return self.bytes(*tiles, 512), self.scales((*tiles, 32), 2.9, columns)

    def bf16(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device).mul_(std).bfloat16()

    def ones(self, count: int) -> Tensor:
        return torch.ones(count, dtype=torch.bfloat16, device=self.device)

    def site(self, channels: int) -> Site:
        fn = torch.randn(24, 4 * channels, device=self.device) * (4 * channels) ** -0.5
        base = torch.randn(24, device=self.device)
        return Site(fn, base, torch.ones(3, device=self.device), self.ones(channels))


class Model(StepWeights):
    """Random weights of a whole model; `layers` keeps only the first few, for sweeps."""

    def __init__(self, c: TextConfig, device: str, engram_rows: int, layers: int | None = None):
        self.config, self.device = c, torch.device(device)
        self.specs = build_layer_specs(c)[:layers]
        make = self.make = RandomWeights(device)
        self.embed = make.bf16(c.vocab_size, c.hidden_size)
        self.head = make.bf16(c.vocab_size, c.hidden_size, std=c.hidden_size**-0.5)
        self.final = make.site(c.hidden_size)
        self.engram_rows = engram_rows
        self.layers = [self._layer(spec) for spec in self.specs]

    def _layer(self, spec: LayerSpec) -> LayerWeights:
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
        layer = LayerWeights(
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
    """Caches of `batch` sequences that hold `context` tokens with the one that a step computes.

    Pools as `finwhale.cache.paged_pools.PagedPools`, and `places` of the rows in them.
    """

    def __init__(self, model: Model, batch: int, context: int):
        c, device = model.config, model.device
        rows = RandomWeights(device)
        width = batch * c.sliding_window
        self.window = {
            spec.layer_id: _packed_rows(rows, width, c.head_dim, 32, 127) for spec in model.specs
        }
        self.main, self.index_k, self.open = {}, {}, {}
        frequencies = {
            RopeKind.WINDOW: rope_frequencies(c.rope_theta, c.qk_rope_head_dim, None),
            RopeKind.COMPRESSED: rope_frequencies(
                c.compress_rope_theta, c.qk_rope_head_dim, c.rope_scaling
            ),
        }
        where = torch.full((batch,), context - 1, device=device)
        entries = {}
        for spec in model.specs:
            if not spec.owns_kv:
                continue
            owner, visible = spec.layer_id, context // spec.ratio
            blocks = -(-visible // ENTRIES_PER_BLOCK)
            count = batch * blocks * ENTRIES_PER_BLOCK
            half, narrow = c.head_dim // 2, c.index_head_dim // 2
            self.main[owner] = _packed_rows(rows, count, half, 8, 0x30)
            self.index_k[owner] = _packed_rows(rows, count, narrow, 16, 125)
            if spec.ratio > 1:
                self.open[owner] = torch.randn((batch, 2, c.head_dim), device=device)
            tables = torch.randperm(batch * blocks, device=device).view(batch, blocks)
            start, last = where // spec.ratio * spec.ratio, visible - 1
            candidates = -(-visible // c.candidate_block_size)
            columns = min(candidates, c.candidate_topk_blocks) * c.candidate_block_size
            newest = tables[:, last // ENTRIES_PER_BLOCK] * ENTRIES_PER_BLOCK
            entries[owner] = EntryPlaces(
                tables=tables,
                entries_per_block=ENTRIES_PER_BLOCK,
                capacity=visible,
                visible=torch.full((batch,), visible, device=device),
                closes=torch.full((batch,), context % spec.ratio == 0, device=device),
                rows=newest + last % ENTRIES_PER_BLOCK,
                rotation=rope_rotation(start, frequencies[spec.rope].to(device)),
                pool_lengths=torch.full((batch,), candidates, device=device),
                pool_columns=torch.full((batch,), columns, device=device),
            )
        slots = torch.arange(batch, device=device)
        first = slots * c.sliding_window
        slot = torch.arange(c.sliding_window, device=device)
        self.places = Places(
            slots=slots,
            window_index=torch.where(slot < context, first[:, None] + slot, -1),
            ring_rows=first + (context - 1) % c.sliding_window,
            rotation={k: rope_rotation(where, f.to(device)) for k, f in frequencies.items()},
            entries=entries,
        )


def _packed_rows(make: RandomWeights, count: int, codes: int, per_scale: int, scale: int) -> Tensor:
    """Return rows of `codes` code bytes and a scale byte per `per_scale` of them."""
    rows = make.bytes(count, codes + codes // per_scale)
    if per_scale == 32:
        rows[:, :codes] &= 0xBF  # E4M3 without NaN
    rows[:, codes:] = scale
    return rows


class Step(DecodeStep):
    """One decode step of a batch; `run` launches it, `graph` captures it."""

    def __init__(self, model: Model, cache: Cache, launches: Launches | None = None):
        c, device, batch = model.config, model.device, len(cache.places.slots)
        super().__init__(model, cache, batch, launches)
        ids = torch.randint(3, c.vocab_size, (batch,), device=device)
        recent = torch.randint(
            0, c.engram_compressed_vocab_size, (batch, c.engram_max_ngram_size), device=device
        )
        self.begin(ids, recent, cache.places)
        self.temperatures = torch.zeros(batch, device=device)
        self.uniforms = torch.rand(batch, dtype=torch.float64, device=device)
        self.tokens = ids

    def run(self) -> Tensor:
        """Launch the step; returns the next ids [T] and keeps the experts that were active."""
        self.logits = self.head(self.hidden())
        self.tokens = draw_tokens(self.logits, self.temperatures, self.uniforms)
        return self.tokens

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
