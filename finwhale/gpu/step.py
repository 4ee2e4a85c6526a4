"""One decode step of a batch: every launch, on two streams, as a CUDA graph can hold it.

One token per sequence; T counts rows. The step reads weights (`weights.py`), pools, and where each
row stands (`places.py`), writes the rows of this token into the pools, and returns hidden rows. No
value is read on the host. Above 64 rows the experts go in portions, as their router serves no more.
The easy mistake: a result of one step that the next one needs must lie in a buffer from outside:
what is allocated here belongs to the graph and is overwritten. Source: spec/backbone.md section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.config.layers import AttentionMode, PoolUse
from finwhale.decode_kernels.engram_gate import engram_gather, engram_update
from finwhale.decode_kernels.experts_w4 import ExpertLaunch, expert_launch, experts_w4
from finwhale.decode_kernels.gather_attention import gather_attention
from finwhale.decode_kernels.head import head_logits
from finwhale.decode_kernels.hyper_site import (
    STREAMS,
    Site,
    SiteLaunch,
    SiteOutput,
    hyper_site,
    site_launch,
    site_scratch,
)
from finwhale.decode_kernels.index_scores import index_scores
from finwhale.decode_kernels.launch import Overlap, launch_for
from finwhale.decode_kernels.linear_fp8 import LinearLaunch, linear_fp8, linear_launch
from finwhale.decode_kernels.route import (
    MAX_TOKENS,
    RouteLaunch,
    route,
    route_launch,
    route_scratch,
)
from finwhale.decode_kernels.select_topk import pool_rows, select_topk_rows
from finwhale.decode_kernels.store_rows import (
    close_groups,
    latent_and_window,
    rotate_queries,
    store_rows,
)
from finwhale.decode_kernels.tiles import counters
from finwhale.gpu.places import Places, StepPools
from finwhale.gpu.weights import LayerWeights, Matrix, StepWeights
from finwhale.ops.hyper_connection import HyperMix

# Scratch of a split product; the tables' largest takes some 2^23 numbers, at 256 rows.
MAX_ROWS = 256
_SCRATCH, _COUNTERS = 1 << 24, 1 << 15

# How each launch overlaps with the next; `rest` are those that not every layer has. Measured in
# whole steps, each by itself: a launch that leaves room, or whose follower is small (`down`: a
# site), lets it come up at once, to read weights while it runs; others when they have read their
# own, or the next one's programs gather where there is room by chance. Of one row, where most are
# resident as a whole, more of them leave room.
_OVERLAPPED = {
    "site": Overlap.AFTER_READING,
    "qkv": Overlap.AFTER_READING,
    "latent": Overlap.AT_ONCE,
    "wq_b": Overlap.AFTER_READING,
    "attention": Overlap.AFTER_READING,
    "combine": Overlap.AT_ONCE,
    "wo_a": Overlap.AFTER_READING,
    "wo_b": Overlap.AFTER_READING,
    "route": Overlap.AFTER_READING,
    "gate_up": Overlap.AFTER_READING,
    "down": Overlap.AT_ONCE,
    "rest": Overlap.AT_END,
}
_AT_ONCE = ("wq_b", "wo_a", "wo_b", "gate_up", "rest")
_OVERLAPPED_ONE = _OVERLAPPED | dict.fromkeys(_AT_ONCE, Overlap.AT_ONCE)
# Up to how many rows that pays, by device family.
_OVERLAPPED_ROWS = {"any": 0, "hopper": 16}


def step_overlaps(tokens: int, device: torch.device | str) -> Mapping[str, Overlap]:
    """Return how each launch of a step overlaps with the next; one without an entry does not."""
    if tokens > launch_for(_OVERLAPPED_ROWS, torch.device(device)):
        return {}
    return _OVERLAPPED_ONE if tokens == 1 else _OVERLAPPED


@dataclass(kw_only=True)
class Launches:
    """Launch parameters that a sweep replaces; None: the tables' own.

    overlaps  as `step_overlaps` returns
    """

    linear: LinearLaunch | None = None  # of FP8 matrices
    plain: LinearLaunch | None = None  # of BF16 ones
    experts: ExpertLaunch | None = None
    route: RouteLaunch | None = None
    site: SiteLaunch | None = None
    overlaps: Mapping[str, Overlap] | None = None
    invariant: bool = False

    @classmethod
    def chosen(
        cls,
        tokens: int,
        device: torch.device | str,
        *,
        overlap: bool = True,
        invariant: bool = False,
    ) -> Launches:
        """Return the tables' parameters for `tokens` tokens.

        overlap    let launches overlap
        invariant  those under which a sequence's step does not depend on its neighbours
        """
        of = tokens, torch.device(device), invariant
        return cls(
            linear=linear_launch(*of),
            plain=linear_launch(*of, is_fp8=False),
            experts=expert_launch(*of),
            route=route_launch(*of),
            site=site_launch(*of),
            overlaps=step_overlaps(tokens, device) if overlap else {},
            invariant=invariant,
        )


def _scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(_SCRATCH, device=device), counters(device, _COUNTERS)


def pre_of(mix: HyperMix | Tensor) -> Tensor | None:
    """Return what the next site collapses with; it makes its own of logits."""
    return mix.pre if isinstance(mix, HyperMix) else None


class DecodeStep:
    """The launches of a step over one set of weights and pools, with scratch of their own.

    active  experts that each layer's last step chose, one [min(X, T * k)] per portion of rows
    """

    def __init__(
        self,
        weights: StepWeights,
        pools: StepPools,
        max_rows: int,
        launches: Launches | None = None,
    ):
        """Allocate scratch for up to `max_rows` rows."""
        if not 1 <= max_rows <= MAX_ROWS:
            raise ValueError(f"max_rows: got {max_rows}, expected 1 to {MAX_ROWS}")
        self.weights, self.pools = weights, pools
        self.launches = Launches() if launches is None else launches
        c, device = weights.config, weights.device
        self.scratch = _scratch(device)
        # What stores and selects entries runs beside the products of its layer; launches that may
        # run at once share no scratch.
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.side_scratch = _scratch(device) if self.side else self.scratch
        self.site_scratch = site_scratch(max_rows, c.hidden_size, device)
        self.route_scratch = route_scratch(min(max_rows, MAX_TOKENS), c.n_routed_experts, device)
        self.first_mix = torch.zeros(max_rows, STREAMS, device=device)
        self.first_mix[:, 0] = 1.0
        self.active: list[Tensor] = []

    def begin(self, ids: Tensor, recent: Tensor, places: Places) -> None:
        """Take what the next `hidden` runs on.

        ids     [T] int64 token of each row
        recent  [T, n] int64 compressed ids, column k that of k tokens back (Engram)
        """
        self.ids, self.recent, self.places = ids, recent, places
        self.overlaps = self.launches.overlaps
        if self.overlaps is None:
            self.overlaps = step_overlaps(len(ids), self.weights.device)

    def overlap(self, name: str) -> int:
        return self.overlaps.get(name, Overlap.NONE)

    def hidden(self) -> Tensor:
        """Run all layers; return the normalised collapsed rows [T, C] bf16."""
        w, c = self.weights, self.weights.config
        self.active, self.topk, self.pool = [], {}, None
        streams = w.embed[self.ids].unsqueeze(1).repeat(1, c.hc_mult, 1)  # [T, N, C]
        # Ids alone decide them, so nothing of a layer waits for the table.
        gathered = {m.spec.layer_id: self.gather(m) for m in w.layers if m.engram}
        state = streams, None, None, self.first_mix[: len(self.ids)]
        for layer, after in zip(w.layers, (*w.layers[1:], None), strict=True):
            if layer.engram:
                streams, parts, before, incoming = state
                assert not isinstance(before, Tensor)  # not late, below
                e = layer.engram
                kv = self.linear(gathered[layer.spec.layer_id], (e["wkv"], e["wkv_scales"]))
                streams = engram_update(
                    streams, parts, before, kv, e["q_weight"], e["k_weight"], c.rms_norm_eps
                )
                state = streams, None, None, incoming
            # What comes next is a site, or Engram's gate, which makes no coefficients.
            state = self.block(layer, *state, after is None or not after.engram)
        return self.site(*state, w.final).x

    def head(self, x: Tensor) -> Tensor:
        """Return fp32 logits [T, V]."""
        return head_logits(x, self.weights.head, self.launches.plain, self.scratch)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch what follows after all launches so far, but beside those that come next.

        It takes scratch of its own; `together` ends it.
        """
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream(self.side.device))
        own, self.scratch = self.scratch, self.side_scratch
        try:
            with torch.cuda.stream(self.side):
                yield
        finally:
            self.scratch = own

    def together(self) -> None:
        """Let what is launched from now on wait for both."""
        if self.side is not None:
            torch.cuda.current_stream(self.side.device).wait_stream(self.side)

    def linear(self, x: Tensor, matrix: Matrix, name: str = "rest", **options) -> Tensor:
        launch = self.launches.plain if matrix[1] is None else self.launches.linear
        options |= {"launch": launch, "scratch": self.scratch, "overlap": self.overlap(name)}
        return linear_fp8(x, *matrix, **options)

    def site(
        self,
        streams: Tensor,
        parts: Tensor | None,
        before: HyperMix | Tensor | None,
        incoming: Tensor | None,
        site: Site,
        late: bool = True,
    ) -> SiteOutput:
        c = self.weights.config
        # Of one row alone: for many, all programs would make coefficients of their own.
        late = late and len(streams) == 1 and not self.launches.invariant
        return hyper_site(
            streams, parts, before, incoming, site,
            iterations=c.hc_sinkhorn_iters, norm_eps=c.rms_norm_eps, eps=c.hc_eps, late=late,
            launch=self.launches.site, scratch=self.site_scratch, overlap=self.overlap("site"),
        )  # fmt: skip

    def gather(self, layer: LayerWeights) -> Tensor:
        """Return the rounded Engram rows of every token."""
        e = layer.engram
        return engram_gather(
            self.recent, e["multipliers"], e["primes"], e["offsets"], e["table"], e["table_scales"]
        )

    def block(
        self,
        layer: LayerWeights,
        streams: Tensor,
        parts: Tensor | None,
        before: HyperMix | Tensor | None,
        incoming: Tensor | None,
        late: bool,
    ) -> tuple[Tensor, Tensor, HyperMix | Tensor, Tensor | None]:
        """Launch one layer; returns what the next one takes, logits if it may be `late`."""
        out = self.site(streams, parts, before, incoming, layer.attn_site)
        y = self.attention(layer, out.x, out.x_rounded)
        site = self.site(streams, y.unsqueeze(1), out.mix, pre_of(out.mix), layer.ffn_site, late)
        found = [
            self.experts(layer, x, rounded)
            for x, rounded in zip(
                site.x.split(MAX_TOKENS), site.x_rounded.split(MAX_TOKENS), strict=True
            )
        ]
        parts = found[0] if len(found) == 1 else torch.cat(found)
        return streams, parts, site.mix, pre_of(site.mix)

    def experts(self, layer: LayerWeights, x: Tensor, rounded: Tensor) -> Tensor:
        """Return the outputs [T, k + 1, C] of the experts of up to 64 rows, not yet added."""
        c = self.weights.config
        routing = route(
            x, layer.gate, layer.bias, c.num_experts_per_tok, c.routed_scaling_factor,
            self.launches.route, self.route_scratch, self.overlap("route"),
        )  # fmt: skip
        self.active.append(routing.active)
        return experts_w4(
            rounded, routing, layer.experts, c.swiglu_limit, self.launches.experts, self.scratch,
            (self.overlap("gate_up"), self.overlap("down")),
        )  # fmt: skip

    def attention(self, layer: LayerWeights, x: Tensor, rounded: Tensor) -> Tensor:
        """Return the attention output [T, C] and store this token's rows."""
        c, places, spec = self.weights.config, self.places, layer.spec
        rotation = places.rotation[spec.rope]
        eps, ring = c.rms_norm_eps, self.pools.window[spec.layer_id]
        if spec.owns_kv:
            with self.beside():
                self.publish(layer, x)
        qr = latent_and_window(
            self.linear(rounded, layer.qkv, "qkv"), layer.q_norm, layer.kv_norm, rotation,
            ring, places.ring_rows, eps, overlap=self.overlap("latent"),
        )  # fmt: skip
        if spec.owns_topk:
            with self.beside():
                self.select(layer, x, qr)
        q = self.linear(qr, layer.wq_b, "wq_b", turn=rotation, head_dim=c.head_dim)
        q = q.view(-1, c.num_attention_heads, c.head_dim)
        if spec.owns_kv or spec.owns_topk:
            self.together()
        main, chosen = None, places.window_index
        if spec.mode is not AttentionMode.WINDOW:
            main, chosen = self.pools.main[spec.kv_owner], self.topk[spec.topk_owner]
        out = gather_attention(
            q, ring, places.window_index, main, chosen, layer.sink, rotation,
            invariant=self.launches.invariant, settled=not (spec.owns_kv or spec.owns_topk),
            overlaps=(self.overlap("attention"), self.overlap("combine")),
        )  # fmt: skip
        z = self.linear(out.flatten(1), layer.wo_a, "wo_a", groups=c.o_groups, round_output=True)
        return self.linear(z, layer.wo_b, "wo_b")

    def publish(self, layer: LayerWeights, x: Tensor) -> None:
        """Store the entry and the index key of each row that completes a group."""
        c, spec = self.weights.config, layer.spec
        owner, eps, own = spec.layer_id, c.rms_norm_eps, self.places.entries[spec.layer_id]
        assert layer.compressor is not None  # an owner has all of these
        assert layer.compressor_norm is not None
        assert layer.index_wk is not None
        assert layer.index_k_norm is not None
        if spec.ratio > 1:
            found = self.linear(x, (layer.compressor, None), out_dtype=torch.float32)
            content, gate = found.chunk(2, dim=-1)
            pooled = close_groups(
                content, gate, self.pools.open[owner], self.places.slots, own.closes,
                overlap=self.overlap("rest"),
            )  # fmt: skip
        else:
            pooled = self.linear(x, (layer.compressor, None))
        latent = torch.empty_like(pooled)
        store_rows(
            "entry", pooled, layer.compressor_norm, own.rotation, self.pools.main[owner], own.rows,
            eps, latent, overlap=self.overlap("rest"),
        )  # fmt: skip
        # A row without an entry left its latent as it was; nothing reads what becomes of it.
        key = self.linear(latent, (layer.index_wk, None))
        store_rows(
            "index_key", key, layer.index_k_norm, own.rotation, self.pools.index_k[owner], own.rows,
            eps, overlap=self.overlap("rest"),
        )  # fmt: skip

    def select(self, layer: LayerWeights, x: Tensor, qr: Tensor) -> None:
        """Choose entries for this layer and those that reuse its choice."""
        c, places, spec = self.weights.config, self.places, layer.spec
        assert layer.index_wq_b is not None  # a layer that selects has both
        assert layer.index_weights is not None
        q = self.linear(qr, layer.index_wq_b).view(-1, c.index_n_heads, c.index_head_dim)
        rotate_queries(q, places.rotation[spec.rope], True, overlap=self.overlap("rest"))
        weights = self.linear(x, (layer.index_weights, None))
        if layer.index_factor != 1.0:
            weights.mul_(layer.index_factor)
        own = places.entries[spec.kv_owner]
        size, per_block = c.candidate_block_size, own.entries_per_block
        searches = spec.pool is PoolUse.SEARCHES
        pool = self.pool if searches else None
        columns = c.candidate_topk_blocks * size if searches else own.capacity
        scores, best = index_scores(
            q, weights, self.pools.index_k[spec.kv_owner], own.tables, own.visible, per_block,
            columns, pool, size,
            want_best=spec.pool is PoolUse.BUILDS, overlap=self.overlap("rest"),
        )  # fmt: skip
        lengths = own.pool_columns if searches else own.visible
        chosen = select_topk_rows(scores, lengths, c.index_topk, overlap=self.overlap("rest"))
        if spec.pool is PoolUse.BUILDS:
            self.pool = select_topk_rows(best, own.pool_lengths, c.candidate_topk_blocks)
        self.topk[spec.layer_id] = pool_rows(
            chosen, own.tables, per_block, pool, size, overlap=self.overlap("rest")
        )
