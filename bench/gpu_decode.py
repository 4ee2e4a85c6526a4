"""Decode of the flash shape on one GPU: a whole step against its floor, and kernel by kernel.

    python bench/gpu_decode.py --out FILE.jsonl [--parts kernels step] [--limit-s 420]
Needs a GPU with about 100 GB free (`--layers 8` for less). All layers at released widths; 96
experts a layer instead of 384, so that the weights fit: a token meets as many as in the release.
Engram tables have 1M rows. Weights and caches are random (decode_step.py); the distinct experts are
counted, not assumed. `kernels` times one call per layer in a CUDA graph, so weights come from
memory, with every launch it knows; `step` captures whole steps. A line of JSON per result, flushed;
what fails says why and the rest goes on; after --limit-s nothing new starts.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from record import provenance

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decode_floors import decode_costs, floor_seconds
from decode_step import Cache, Launches, Model, Step
from gpu_lines import GpuLines

from finwhale.config import preset
from finwhale.config.layers import AttentionMode
from finwhale.decode_kernels.experts_w4 import ExpertLaunch, experts_w4
from finwhale.decode_kernels.head import draw_tokens
from finwhale.decode_kernels.hyper_site import SiteLaunch, split_normed
from finwhale.decode_kernels.linear_fp8 import LinearLaunch, linear_fp8
from finwhale.decode_kernels.route import RouteLaunch, route

DEVICE = "cuda"
ENGRAM_ROWS = 1 << 20
CONTEXTS, BATCHES = (4096, 65536, 1 << 20), (1, 8, 64)


class Bench(GpuLines):
    def __init__(self, out: Path | None, limit_s: float):
        super().__init__(out, limit_s)
        self.deadline = float("inf")  # of the part that runs now

    @property
    def is_late(self) -> bool:
        return super().is_late or time.monotonic() > self.deadline

    def graph_times(self, graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
        """Return the microseconds of each replay, after two that do not count."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for n in range(replays + 2):
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            if n > 1:
                times.append(first.elapsed_time(last) * 1e3)
        return times

    def per_call(self, calls, replays: int = 7) -> tuple[float, float, float]:
        """Return median, least and largest microseconds of one of `calls` in a graph of all."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            calls[0]()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = [t / len(calls) for t in self.graph_times(graph, replays)]
        return statistics.median(times), min(times), max(times)

    def compare(self, name: str, tokens: int, num_bytes: float, forms: dict) -> str | None:
        """Time forms (name -> calls) of one operation; print each; return the best of ours."""
        best = None
        for form, calls in forms.items():
            line = {"kernel": name, "T": tokens, "form": form}
            if self.is_late:
                self.say(**line, skipped="time limit")
                break
            try:
                median, least, largest = self.per_call(calls() if callable(calls) else calls)
            except Exception as error:
                self.say(**line, failed=f"{type(error).__name__}: {error}"[:300])
                torch.cuda.synchronize()
                continue
            self.say(
                **line, us=round(median, 2), spread=[round(least, 2), round(largest, 2)],
                MB=round(num_bytes / 1e6, 2), gbs=round(num_bytes / median / 1e3, 1),
                percent_of_read=round(num_bytes / median / 1e1 / self.read_gbs, 1),
            )  # fmt: skip
            if not form.startswith("peer") and (best is None or median < best[1]):
                best = form, median
        if best is not None:
            percent = round(num_bytes / best[1] / 1e1 / self.read_gbs, 1)
            self.say(
                best=name, T=tokens, form=best[0], us=round(best[1], 2), percent_of_read=percent
            )
        return None if best is None else best[0]


def ceilings(bench: Bench, elements: int) -> None:
    source = torch.randn(elements, device=DEVICE)
    target = torch.empty_like(source)
    # Outside a graph: there a copy becomes a copy node, which is slower than torch's kernel.
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(7):
        first.record()
        target.copy_(source)
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1e3)
    median, spread = statistics.median(times[2:]), (min(times[2:]), max(times[2:]))
    bench.copy_gbs = 2 * source.nbytes / median / 1e3
    total, *_ = bench.per_call([lambda: source.amax()] * 4)
    bench.read_gbs = source.nbytes / total / 1e3
    a, b = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in range(2))
    product, *_ = bench.per_call([lambda: a @ b] * 4)
    bench.bf16_tflops = 2 * 8192**3 / product / 1e6
    small = torch.zeros(16, device=DEVICE)
    empty = bench.per_call([lambda: small.add_(1)] * 64)[0]
    bench.say(
        copy_gbs=round(bench.copy_gbs), copy_spread_us=[round(x) for x in spread],
        read_gbs=round(bench.read_gbs), bf16_tflops=round(bench.bf16_tflops),
        empty_launch_us=round(empty, 2),
    )  # fmt: skip


def matrices(model: Model, tokens: int):
    """Yield name, matrices (one per layer), groups and output dtype of each kind of product."""
    layers, c = model.layers, model.config
    yield "qkv", [x.qkv for x in layers], 1, {}
    yield "wq_b", [x.wq_b for x in layers], 1, {}
    yield "wo_a", [x.wo_a for x in layers], c.o_groups, {"round_output": True}
    yield "wo_b", [x.wo_b for x in layers], 1, {}
    engram = [(x.engram["wkv"], x.engram["wkv_scales"]) for x in layers if x.engram]
    yield "engram_wkv", engram * 3, 1, {}
    yield "head", [(model.head, None)] * 3, 1, {"out_dtype": torch.float32}


def linear_launches(tokens: int, is_head: bool) -> dict[str, LinearLaunch]:
    if tokens == 1:
        grid = [
            (r, k, p, w, 2)
            for r, k, w in (
                (16, 256, 4),
                (32, 256, 4),
                (64, 256, 4),
                (32, 512, 4),
                (32, 256, 8),
                (16, 512, 4),
            )
            for p in ((528,) if is_head else (264, 528, 1056))
        ]
    elif tokens <= 16:
        grid = [
            (r, k, p, w, s)
            for r, k, w, s in (
                (32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (64, 256, 8, 3),
                (128, 128, 4, 3),
            )
            for p in ((528,) if is_head else (264, 528))
        ]  # fmt: skip
    else:
        grid = [
            (r, k, p, w, s)
            for r, k, w, s in (
                (64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 8, 3), (128, 128, 4, 3),
                (128, 64, 4, 4),
            )
            for p in ((264,) if is_head else (132, 264, 528))
        ]  # fmt: skip
    return {
        f"r{r} k{k} p{p} w{w} s{s}": LinearLaunch(rows=r, columns=k, programs=p, warps=w, stages=s)
        for r, k, p, w, s in grid
    }


def linear_part(bench: Bench, model: Model, tokens: int, everything: bool) -> None:
    scratch = (
        torch.empty(1 << 24, device=DEVICE),
        torch.zeros(1 << 15, dtype=torch.int32, device=DEVICE),
    )
    for name, stack, groups, options in matrices(model, tokens):
        if not stack:
            continue
        x = model.make.bf16(tokens, groups * stack[0][0].shape[1])

        def ours(launch=None, stack=stack, x=x, groups=groups, options=options):
            return [
                lambda m=m: linear_fp8(
                    x, *m, groups=groups, launch=launch, scratch=scratch, **options
                )
                for m in stack
            ]

        forms = {"chosen": ours}
        if everything:
            for form, launch in linear_launches(tokens, name == "head").items():
                forms[form] = lambda launch=launch, ours=ours: ours(launch)
        outputs, width = stack[0][0].shape
        if groups == 1:
            wide = [torch.randn(outputs, width, device=DEVICE).bfloat16() for _ in range(3)]
            forms["peer torch bf16 product (bytes of bf16)"] = lambda x=x, wide=wide: [
                lambda w=w: torch.nn.functional.linear(x, w) for w in wide * 4
            ]
        size = sum(t.nbytes for t in stack[0] if t is not None)
        traffic = size + x.nbytes + tokens * outputs * (4 if name == "head" else 2)
        bench.compare(name, tokens, traffic, forms)
        forms.clear()


def expert_launches(tokens: int) -> dict[str, ExpertLaunch]:
    tiles = [
        (64, 128, 256, 128, 4, 3, False), (64, 128, 256, 128, 4, 4, False),
        (32, 64, 256, 128, 4, 4, False), (64, 128, 256, 128, 8, 4, False),
        (32, 64, 256, 256, 4, 2, False), (64, 64, 256, 128, 4, 3, False),
        (32, 128, 256, 128, 4, 3, False), (64, 128, 256, 256, 8, 3, False),
        (64, 128, 256, 64, 4, 5, False), (128, 128, 256, 64, 8, 4, False),
    ]  # fmt: skip
    rows = [
        (32, 32, 256, 128, 4, 3, True), (32, 64, 256, 128, 4, 3, True),
        (32, 16, 256, 128, 4, 3, True), (32, 32, 256, 128, 8, 3, True),
        (64, 64, 256, 128, 8, 3, True), (32, 32, 512, 128, 4, 3, True),
        (32, 32, 128, 128, 2, 3, True),
    ]  # fmt: skip
    return {
        f"g{g} d{d} k{k} t{t} w{w} s{s} {'rows' if r else 'tiles'}": ExpertLaunch(
            gate_rows=g, down_rows=d, columns=k, tile_columns=t, warps=w, stages=s, by_rows=r
        )
        for g, d, k, t, w, s, r in ([*rows, *tiles[:6]] if tokens == 1 else tiles)
    }


def expert_part(bench: Bench, model: Model, tokens: int, everything: bool) -> ExpertLaunch | None:
    c = model.config
    x = model.make.bf16(tokens, c.hidden_size)
    choices = [
        route(x, layer.gate, layer.bias, c.num_experts_per_tok, c.routed_scaling_factor)
        for layer in model.layers
    ]
    distinct = statistics.mean(float((r.active >= 0).sum()) for r in choices)

    def ours(launch=None):
        return [
            lambda layer=layer, r=r: experts_w4(x, r, layer.experts, c.swiglu_limit, launch)
            for layer, r in zip(model.layers, choices, strict=True)
        ]

    forms = {"chosen": ours}
    for form, launch in expert_launches(tokens).items() if everything else ():
        forms[form] = lambda launch=launch: ours(launch)
    w = model.layers[0].experts
    one = sum(t[0].nbytes for t in w[:4])
    shared = sum(t.nbytes for t in w[4:])

    def grouped():
        inner = c.moe_intermediate_size
        size = c.n_routed_experts
        gate_up = torch.randn(size, c.hidden_size, 2 * inner, device=DEVICE, dtype=torch.bfloat16)
        down = torch.randn(size, inner, c.hidden_size, device=DEVICE, dtype=torch.bfloat16)
        order = choices[0].order.long() // c.num_experts_per_tok
        ends = choices[0].starts[1:].clone()

        def call():
            hidden = torch._grouped_mm(x[order], gate_up, offs=ends)
            gate, up = hidden.chunk(2, dim=-1)
            return torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)

        return [call] * 4

    if len(model.layers) > 8:
        forms["peer torch._grouped_mm, bf16 weights, no shared expert"] = grouped
    traffic = distinct * one + shared
    bench.say(kernel="experts", T=tokens, distinct=round(distinct, 2))
    return expert_launches(tokens).get(bench.compare("experts", tokens, traffic, forms) or "")


def small_part(bench: Bench, model: Model, tokens: int, everything: bool) -> None:
    """Router, hyper-connection site, Engram, norm and draw."""
    c = model.config
    step = Step(model, Cache(model, tokens, 4096))
    x = model.make.bf16(tokens, c.hidden_size)
    wide = c.hidden_size

    def routers(launch=None):
        return [
            lambda m=m: route(
                x, m.gate, m.bias, c.num_experts_per_tok, c.routed_scaling_factor, launch,
                step.route_scratch,
            )
            for m in model.layers
        ]  # fmt: skip

    forms = {"chosen": routers}
    grid = (
        [
            (16, 256, 128, 4, 2),
            (16, 256, 64, 4, 2),
            (8, 512, 128, 4, 2),
            (8, 256, 256, 4, 2),
            (16, 512, 128, 8, 2),
        ]
        if tokens == 1
        else [
            (32, 128, 128, 8, 3),
            (32, 128, 64, 8, 3),
            (16, 256, 128, 4, 3),
            (32, 256, 128, 16, 2),
            (32, 128, 128, 4, 3),
        ]
    )
    for r, k, p, w, s in grid if everything else ():
        launch = RouteLaunch(rows=r, columns=k, programs=p, warps=w, stages=s)
        forms[f"r{r} k{k} p{p} w{w} s{s}"] = lambda launch=launch: routers(launch)
    bench.compare("route", tokens, model.layers[0].gate.nbytes + x.nbytes, forms)

    streams = model.make.bf16(tokens, 4, wide)
    incoming = step.first_mix
    for name, count in (("after attention", 1), ("after experts", c.num_experts_per_tok + 1)):
        parts = model.make.bf16(tokens, count, wide)
        mix = step.site(streams, None, None, incoming, model.final).mix

        def sites(launch=None, parts=parts, mix=mix):
            def call(m):
                step.launches.site = launch
                step.site(streams, parts, mix, incoming, m.attn_site)

            return [lambda m=m: call(m) for m in model.layers]

        forms = {"chosen": sites}
        for channels, block, warps in (
            (64, 1, 8), (64, 1, 4), (128, 1, 8), (32, 1, 4), (64, 2, 8), (64, 4, 8), (64, 8, 8),
            (128, 4, 8), (128, 8, 8),
        ) if everything else ():  # fmt: skip
            if block <= max(1, tokens // 2):
                launch = SiteLaunch(channels=channels, tokens=block, warps=warps)
                forms[f"c{channels} t{block} w{warps}"] = lambda launch=launch, s=sites: s(launch)
        traffic = model.layers[0].attn_site.fn.nbytes + tokens * wide * 2 * (8 + count + 2)
        if count == 1:
            forms["peer liger mHC, coefficients + pre + post"] = lambda: liger_site(model, tokens)
        bench.compare(f"site {name}", tokens, traffic, forms)
    step.launches.site = None
    engram = [m for m in model.layers if m.engram]
    if engram:
        bench.compare(
            "engram_gather", tokens, tokens * c.engram_columns * (264 + 512),
            {"chosen": [lambda m=m: step.gather(m) for m in engram * 8]},
        )  # fmt: skip
    joined = model.make.bf16(tokens, c.q_lora_rank + c.head_dim)
    bench.compare(
        "split_normed", tokens, 2 * joined.nbytes,
        {"chosen": [lambda m=m: split_normed(joined, m.q_norm, 1e-20) for m in model.layers]},
    )  # fmt: skip
    logits = torch.randn(tokens, c.vocab_size, device=DEVICE)
    draw = [
        lambda t=t: draw_tokens(logits, t, step.uniforms)
        for t in (step.temperatures, step.temperatures + 1)
    ]
    bench.compare(
        "draw_tokens", tokens, logits.nbytes,
        {
            "greedy": draw[:1] * 8,
            "sampled": draw[1:] * 8,
            "peer torch argmax": [lambda: logits.argmax(-1)] * 8,
        },
    )  # fmt: skip


def liger_site(model: Model, tokens: int):
    """Return calls of liger's hyper-connection at the same shape, forward only."""
    from liger_kernel.ops import mhc

    c = model.config
    x = torch.randn(tokens, 4, c.hidden_size, device=DEVICE).bfloat16()
    y = torch.randn(tokens, c.hidden_size, device=DEVICE).bfloat16()
    phis = [m.attn_site.fn.t().contiguous().bfloat16() for m in model.layers]
    base = model.layers[0].attn_site.base
    one = torch.ones((), device=DEVICE)
    apply_coefficients = mhc.LigerMHCCoeffsFunction.apply
    pre_function, post_function = mhc.LigerMHCPreFunction.apply, mhc.LigerMHCPostResFunction.apply

    def call(phi):
        pre, post, res = apply_coefficients(
            x, phi, base, one, one, one, True, c.hc_sinkhorn_iters, 1e-6, 1e-6, 1e-6, 2.0
        )
        return pre_function(x, pre), post_function(x, y, post, res)

    with torch.no_grad():
        call(phis[0])
    return [lambda phi=phi: call(phi) for phi in phis]


def site_launches(tokens: int) -> dict[str, SiteLaunch]:
    grid = ((32, 1, 4), (64, 1, 8), (64, 1, 4), (64, 2, 8), (64, 4, 8), (64, 8, 8))
    return {
        f"c{c} t{t} w{w}": SiteLaunch(channels=c, tokens=t, warps=w)
        for c, t, w in grid
        if t <= max(1, tokens // 4)
    }


def tuned(bench: Bench, model: Model, tokens: int, options) -> dict:
    """Return the best launches of experts and sites on this machine, timed now."""
    c, found = model.config, {}
    step = Step(model, Cache(model, tokens, 4096))
    try:
        if "experts" in options.tune:
            bench.deadline = time.monotonic() + 10
            found["experts"] = expert_part(bench, model, tokens, True)
        if "linear" in options.tune:
            bench.deadline = time.monotonic() + 8
            found["linear"] = linear_chain(bench, model, step, tokens)
        if "site" in options.tune:
            bench.deadline = time.monotonic() + 4
            streams = model.make.bf16(tokens, 4, c.hidden_size)
            parts = model.make.bf16(tokens, 1, c.hidden_size)
            mix = step.site(streams, None, None, step.first_mix, model.final).mix

            def sites(launch):
                def call(m):
                    step.launches.site = launch
                    step.site(streams, parts, mix, step.first_mix, m.attn_site)

                return [lambda m=m: call(m) for m in model.layers]

            forms = {n: lambda x=x: sites(x) for n, x in site_launches(tokens).items()}
            traffic = model.layers[0].attn_site.fn.nbytes + tokens * c.hidden_size * 2 * 11
            best = bench.compare("site after attention", tokens, traffic, forms)
            found["site"] = site_launches(tokens).get(best or "")
    except Exception:
        bench.say(tune=tokens, failed=traceback.format_exc()[-1200:])
    bench.deadline = float("inf")
    return {n: x for n, x in found.items() if x is not None}


def linear_chain(bench: Bench, model: Model, step: Step, tokens: int) -> LinearLaunch | None:
    """Time the four products of attention as one, for a launch that serves them all."""
    c = model.config
    if tokens == 1:
        grid = ((32, 256, 1056, 4, 2), (32, 256, 1056, 8, 2), (32, 256, 528, 4, 2))
    elif tokens <= 16:
        grid = ((64, 128, 396, 4, 4), (32, 256, 528, 4, 3), (64, 256, 264, 4, 3))
    else:
        grid = ((128, 128, 264, 8, 3), (64, 128, 264, 4, 3), (64, 128, 132, 4, 4))
    launches = {
        f"r{r} k{k} p{p} w{w} s{s}": LinearLaunch(rows=r, columns=k, programs=p, warps=w, stages=s)
        for r, k, p, w, s in grid
    }
    first = model.layers[0]
    wide = [model.make.bf16(tokens, n) for n in (c.hidden_size, c.q_lora_rank)]
    heads = model.make.bf16(tokens, c.num_attention_heads * c.head_dim)
    low = model.make.bf16(tokens, c.o_groups * c.o_lora_rank)

    def products(launch):
        def call(m):
            step.launches.linear = launch
            step.linear(wide[0], m.qkv)
            step.linear(wide[1], m.wq_b)
            step.linear(heads, m.wo_a, groups=c.o_groups, round_output=True)
            step.linear(low, m.wo_b)

        return [lambda m=m: call(m) for m in model.layers]

    forms = {n: lambda x=x: products(x) for n, x in launches.items()}
    traffic = sum(
        t.nbytes for pair in (first.qkv, first.wq_b, first.wo_a, first.wo_b) for t in pair
    )
    return launches.get(bench.compare("attention products", tokens, traffic, forms) or "")


def kernels_part(bench: Bench, options) -> None:
    c = flash(options.experts)
    model = Model(c, DEVICE, ENGRAM_ROWS, layers=options.layers or 16)
    bench.say(model_bytes=torch.cuda.memory_allocated(), layers=len(model.layers))
    share = (bench.limit_s - (time.monotonic() - bench.start)) / len(options.batches)
    end = bench.limit_s
    for number, tokens in enumerate(options.batches):
        bench.limit_s = end - share * (len(options.batches) - 1 - number)
        for part in (expert_part, linear_part, small_part):
            try:
                part(bench, model, tokens, not options.chosen_only)
            except Exception:
                bench.say(part=part.__name__, T=tokens, failed=traceback.format_exc()[-1200:])
    bench.limit_s = end


def flash(experts: int):
    return replace(preset("flash").text_config, n_routed_experts=experts)


def launches_of(function) -> dict[str, int]:
    """Return the names of the kernels that a function launches, counted by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if str(e.device_type).endswith("CUDA")]
    return dict(Counter(e.name.split("(")[0][:60] for e in events))


def profile_of(graph: torch.cuda.CUDAGraph, c) -> dict[str, list[float]]:
    """Return [microseconds, launches] by kernel of one replay."""
    from torch.profiler import ProfilerActivity, profile

    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    times, counts = Counter(), Counter()
    for e in profiler.events():
        if str(e.device_type).endswith("CUDA"):
            times[e.name.split("(")[0][:60]] += e.device_time_total
            counts[e.name.split("(")[0][:60]] += 1
    return {n: [round(t, 1), counts[n]] for n, t in times.most_common(24)}


def step_part(bench: Bench, options) -> None:
    c = flash(options.experts)
    model = Model(c, DEVICE, ENGRAM_ROWS, layers=options.layers)
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated()
    bench.say(model_bytes=weights, layers=len(model.layers), experts=options.experts)
    is_whole = options.layers is None
    for batch in options.batches:
        best_launches = tuned(bench, model, batch, options) if options.tune else {}
        overlaps = options.overlaps
        for context in options.contexts:
            line = {"step": True, "batch": batch, "context": context}
            if bench.is_late:
                bench.say(**line, skipped="time limit")
                continue
            cache_bytes = batch * (890 * context + 2.8e6)
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
            free -= torch.cuda.memory_allocated()
            if 1.05 * cache_bytes + 3e9 > free:
                bench.say(
                    **line, impossible=f"caches of {cache_bytes / 1e9:.1f} GB beside weights of "
                    f"{weights / 1e9:.1f} GB do not fit",
                )  # fmt: skip
                continue
            times = {}
            for overlap in overlaps:
                try:
                    launches = Launches.chosen(
                        batch, DEVICE, overlap=overlap, invariant=options.invariant
                    )
                    for name, launch in best_launches.items():
                        setattr(launches, name, replace(launch, overlap=overlap))
                    times[overlap] = one_step(bench, model, line, is_whole, options, launches)
                except Exception:
                    bench.say(**line, overlap=overlap, failed=traceback.format_exc()[-1500:])
                gc.collect()
                torch.cuda.empty_cache()
            # Longer contexts are run with the overlap that was best at the first.
            overlaps = [min(times, key=times.__getitem__)] if times else overlaps


def one_step(bench: Bench, model: Model, line: dict, is_whole: bool, options, launches) -> float:
    """Time a step and print it; returns its microseconds."""
    c, batch, context = model.config, line["batch"], line["context"]
    step = Step(model, Cache(model, batch, context), launches)
    eager = step.run().clone()
    graph = step.graph()
    runs = [bench.graph_times(graph, 20 if batch < 16 else 8) for _ in range(3)]
    medians = [statistics.median(run) for run in runs]
    same = torch.equal(step.tokens, eager)
    distinct = [int((a >= 0).sum()) for a in step.active]
    costs = decode_costs(c, context, batch, distinct if is_whole else None)
    floor = floor_seconds(costs, bench.read_gbs * 1e9, bench.bf16_tflops * 1e12) * 1e6
    anchor = floor_seconds(costs, 4.3e12, 790e12) * 1e6
    median = statistics.median(medians)
    result = dict(
        **line, overlap=launches.overlap, invariant=launches.invariant, us=round(median, 1),
        runs_us=[round(m, 1) for m in medians],
        spread_us=[round(min(map(min, runs)), 1), round(max(map(max, runs)), 1)],
        distinct_experts=[min(distinct), round(statistics.mean(distinct), 2), max(distinct)],
        graph_equals_eager=same, finite=bool((step.tokens >= 0).all()),
    )  # fmt: skip
    if not result["finite"]:
        result["void"] = "a logit is not finite: these times stand for nothing"
    elif is_whole:
        result |= {
            "floor_us": round(floor, 1), "ratio": round(median / floor, 3),
            "floor_at_4300_us": round(anchor, 1), "ratio_at_4300": round(median / anchor, 3),
            "tokens_per_s": round(batch / median * 1e6, 1),
        }  # fmt: skip
    bench.say(**result)
    if context == options.contexts[0] and not bench.is_late and not options.no_profile:
        bench.say(**line, profile=profile_of(graph, c))
        layer = next(
            (x for x in model.layers if x.spec.mode is AttentionMode.REUSE and not x.engram), None
        )
        if layer is not None:
            streams = model.make.bf16(batch, 4, c.hidden_size)
            mix = step.site(streams, None, None, step.first_mix, model.final).mix
            parts = model.make.bf16(batch, c.num_experts_per_tok + 1, c.hidden_size)
            found = launches_of(lambda: step.block(layer, streams, parts, mix, mix.pre))
            bench.say(**line, reuse_layer_launches=sum(found.values()), by_kernel=found)
    return median


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument(
        "--parts", nargs="+", choices=("kernels", "step"), default=["step", "kernels"]
    )
    parser.add_argument("--layers", type=int, help="the first few layers alone (no floor then)")
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--overlaps", type=int, nargs="+", default=[0], help="of launches: 0 1 2")
    parser.add_argument(
        "--tune", nargs="*", choices=("experts", "linear", "site"), default=[],
        help="time launches first, take the best",
    )  # fmt: skip
    parser.add_argument(
        "--invariant", action="store_true", help="launches that no neighbour changes"
    )
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--chosen-only", action="store_true", help="no other launches")
    options = parser.parse_args()
    bench = Bench(options.out, options.limit_s)
    torch.manual_seed(0)
    bench.say(**provenance())
    ceilings(bench, 1 << (30 if options.layers is None else 26))
    torch.cuda.empty_cache()
    for part in options.parts:
        try:
            {"kernels": kernels_part, "step": step_part}[part](bench, options)
        except Exception:
            bench.say(part=part, failed=traceback.format_exc()[-1500:])
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
