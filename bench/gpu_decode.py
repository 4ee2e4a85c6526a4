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
import json
import statistics
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import torch
from record import provenance

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decode_floors import decode_costs, floor_seconds
from decode_step import Cache, Launches, Model, RandomWeights, Step
from gpu_lines import GpuLines, launches_of, profile_of, times_of

from finwhale.config import preset
from finwhale.config.layers import AttentionMode
from finwhale.decode_kernels import experts_w4 as experts_file
from finwhale.decode_kernels import gather_attention as attention_file
from finwhale.decode_kernels import hyper_site as site_file
from finwhale.decode_kernels import index_scores as scores_file
from finwhale.decode_kernels import linear_fp8 as linear_fp8_file
from finwhale.decode_kernels import route as route_file
from finwhale.decode_kernels.experts_w4 import experts_w4
from finwhale.decode_kernels.head import draw_tokens
from finwhale.decode_kernels.launch import device_family, launch_for
from finwhale.decode_kernels.linear_fp8 import LinearLaunch, linear_fp8
from finwhale.decode_kernels.route import route
from finwhale.decode_kernels.store_rows import latent_and_window
from finwhale.gpu.step import pre_of
from finwhale.ops.rounding import round_fp8

DEVICE = "cuda"
ENGRAM_ROWS = 1 << 20
TUNED = ("experts", "linear", "site", "route", "scores", "attention")
_PROFILE_S = 10.0  # kept for the profile of a batch
CONTEXTS, BATCHES = (4096, 65536, 1 << 20), (1, 8, 64)


def best_form(options, tokens: int, name: str, forms) -> dict:
    """Return the form of the launch that `tuned` found for these tokens in this run, if it did."""
    launch = options.best.get(tokens, {}).get(name)
    return {} if launch is None else {"tuned": lambda: forms(launch)}


def read_launches(file: Path) -> dict[int, dict]:
    """Return {tokens: {name: launch}} of what `--tune-json` wrote; of several the last counts."""
    kinds = {
        "experts": experts_file.ExpertLaunch, "site": site_file.SiteLaunch,
        "route": route_file.RouteLaunch, "linear": LinearLaunch,
    }  # fmt: skip
    found: dict[int, dict] = {}
    for text in file.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["tuned"] in kinds:
            launch = kinds[line["tuned"]](**line["launch"])
            found.setdefault(line["T"], {})[line["tuned"]] = launch
    return found


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


def named(launches) -> dict[str, object]:
    """Return launches by what tells them apart."""
    words = {}
    for launch in launches:
        values = {k: v for k, v in asdict(launch).items() if v not in (0, False)}
        words[" ".join(f"{k} {v}" for k, v in values.items())] = launch
    return words


def linear_part(bench: GpuLines, model: Model, tokens: int, options) -> None:
    scratch = (
        torch.empty(1 << 24, device=DEVICE),
        torch.zeros(1 << 15, dtype=torch.int32, device=DEVICE),
    )
    for name, stack, groups, how in matrices(model, tokens):
        if not stack:
            continue
        width = stack[0][0].shape[1] * (32 if stack[0][1] is not None else 1)
        x = model.make.bf16(tokens, groups * width)

        def ours(launch=None, stack=stack, x=x, groups=groups, how=how):
            return [
                lambda m=m: linear_fp8(x, *m, groups=groups, launch=launch, scratch=scratch, **how)
                for m in stack
            ]

        forms = {"chosen": ours}
        if name != "head":
            forms |= best_form(options, tokens, "linear", ours)
        for form, launch in (
            named(linear_fp8_file.BENCHED).items()
            if name != "head" and not options.chosen_only
            else ()
        ):
            forms[form] = lambda launch=launch, ours=ours: ours(launch)
        outputs = len(stack[0][0]) * (32 if stack[0][1] is not None else 1)
        if groups == 1:
            wide = [torch.randn(outputs, width, device=DEVICE).bfloat16() for _ in range(3)]
            forms["peer torch bf16 product (bytes of bf16)"] = lambda x=x, wide=wide: [
                lambda w=w: torch.nn.functional.linear(x, w) for w in wide * 4
            ]
        size = sum(t.nbytes for t in stack[0] if t is not None)
        traffic = size + x.nbytes + tokens * outputs * (4 if name == "head" else 2)
        bench.compare(name, {"T": tokens}, forms, traffic, 2.0 * tokens * outputs * width)
        forms.clear()


def expert_part(bench: GpuLines, model: Model, tokens: int, options) -> None:
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

    forms = {"chosen": ours, **best_form(options, tokens, "experts", ours)}
    for form, launch in named(experts_file.BENCHED).items() if not options.chosen_only else ():
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
    flops = 6.0 * tokens * c.hidden_size * c.moe_intermediate_size * (c.num_experts_per_tok + 1)
    bench.compare("experts", {"T": tokens}, forms, traffic, flops)


def small_part(bench: GpuLines, model: Model, tokens: int, options) -> None:
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

    forms = {"chosen": routers, **best_form(options, tokens, "route", routers)}
    for form, launch in named(route_file.BENCHED).items() if not options.chosen_only else ():
        forms[form] = lambda launch=launch: routers(launch)
    bench.compare("route", {"T": tokens}, forms, model.layers[0].gate.nbytes + x.nbytes)

    streams = model.make.bf16(tokens, 4, wide)
    mixes = mixes_of(step, streams)
    for name, count in (("after attention", 1), ("after experts", c.num_experts_per_tok + 1)):
        parts = model.make.bf16(tokens, count, wide)

        def sites(launch=None, parts=parts):
            def call(m):
                step.launches.site = launch
                mix = mixes[launch is None or not launch.apart]
                step.site(streams, parts, mix, pre_of(mix), m.attn_site)

            return [lambda m=m: call(m) for m in model.layers]

        forms = {"chosen": sites, **best_form(options, tokens, "site", sites)}
        for form, launch in named(site_file.BENCHED).items() if not options.chosen_only else ():
            forms[form] = lambda launch=launch, s=sites: s(launch)
        traffic = model.layers[0].attn_site.fn.nbytes + tokens * wide * 2 * (8 + count + 2)
        if count == 1:
            forms["peer liger mHC, coefficients + pre + post"] = lambda: liger_site(model, tokens)
            forms["peer tile-kernels mHC, pre + post"] = lambda: tile_site(model, tokens)
        bench.compare(f"site {name}", {"T": tokens}, forms, traffic)
    step.launches.site = None
    engram = [m for m in model.layers if m.engram]
    if engram:
        bench.compare(
            "engram_gather", {"T": tokens},
            {"chosen": [lambda m=m: step.gather(m) for m in engram * 8]},
            tokens * c.engram_columns * (264 + 512),
        )  # fmt: skip
    joined = model.make.bf16(tokens, c.q_lora_rank + c.head_dim)
    rotation = torch.randn(2, tokens, c.qk_rope_head_dim // 2, device=DEVICE)
    shape = len(model.layers), tokens, c.head_dim + c.head_dim // 32
    rings = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
    rows = torch.arange(tokens, device=DEVICE)
    bench.compare(
        "latent_and_window", {"T": tokens},
        {
            "chosen": [
                lambda m=m, ring=ring: latent_and_window(
                    joined, m.q_norm, m.kv_norm, rotation, ring, rows, 1e-20
                )
                for m, ring in zip(model.layers, rings, strict=True)
            ]
        },
        joined.nbytes + tokens * (2 * c.q_lora_rank + rings.shape[-1]),
    )  # fmt: skip
    logits = torch.randn(tokens, c.vocab_size, device=DEVICE)
    draw = [
        lambda t=t: draw_tokens(logits, t, step.uniforms)
        for t in (step.temperatures, step.temperatures + 1)
    ]
    bench.compare(
        "draw_tokens", {"T": tokens},
        {
            "greedy": draw[:1] * 8,
            "sampled": draw[1:] * 8,
            "peer torch argmax": [lambda: logits.argmax(-1)] * 8,
        },
        logits.nbytes,
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


def tile_site(model: Model, tokens: int):
    """Return calls of tile-kernels' hyper-connection at the same shape, forward only."""
    from tile_kernels.modeling.mhc.ops import mhc_post_fwd, mhc_pre_big_fuse

    c = model.config
    x = torch.randn(1, tokens, 4, c.hidden_size, device=DEVICE).bfloat16()
    y = torch.randn(1, tokens, c.hidden_size, device=DEVICE).bfloat16()

    def call(site):
        post, comb, inner = mhc_pre_big_fuse(
            x, site.fn, site.scale, site.base, 1e-6, 1e-6, 1e-6, 2.0, c.hc_sinkhorn_iters
        )
        return inner, mhc_post_fwd(y, x, post, comb, None)

    call(model.layers[0].attn_site)
    return [lambda m=m: call(m.attn_site) for m in model.layers]


def mixes_of(step: Step, streams: torch.Tensor) -> list:
    """Return a site's coefficients, and what a step hands on instead where it may: their logits."""
    site = streams, None, None, step.first_mix, step.weights.final
    return [step.site(*site, late).mix for late in (False, True)]


def tuned(bench: GpuLines, model: Model, tokens: int, options) -> dict:
    """Return the best launches on this machine, timed now; a line for each says which."""
    c, found = model.config, {}
    step = Step(model, Cache(model, tokens, 4096))
    launches, layers = step.launches, model.layers
    x = round_fp8(model.make.bf16(tokens, c.hidden_size))
    streams = model.make.bf16(tokens, 4, c.hidden_size)
    one = model.make.bf16(tokens, 1, c.hidden_size)
    mixes = mixes_of(step, streams)

    def one_site(m):
        mix = mixes[not launches.site.apart]
        step.site(streams, one, mix, pre_of(mix), m.attn_site)

    routing = [
        route(x, m.gate, m.bias, c.num_experts_per_tok, c.routed_scaling_factor) for m in layers
    ]
    low = round_fp8(model.make.bf16(tokens, c.q_lora_rank))
    heads = model.make.bf16(tokens, c.num_attention_heads * c.head_dim)
    inner = model.make.bf16(tokens, c.o_groups * c.o_lora_rank)

    def products(m):
        step.linear(x, m.qkv)
        step.linear(low, m.wq_b)
        step.linear(heads, m.wo_a, groups=c.o_groups, round_output=True)
        step.linear(inner, m.wo_b)

    # name -> what one layer launches, and the launches to try beside the table's.
    table = Launches.chosen(tokens, DEVICE)
    parts = {
        "experts": (
            lambda m, r: experts_w4(x, r, m.experts, c.swiglu_limit, launches.experts),
            experts_file.BENCHED, 24,
        ),
        "site": (
            lambda m, r: one_site(m),
            site_file.BENCHED, 8,
        ),
        "route": (
            lambda m, r: route(
                x, m.gate, m.bias, c.num_experts_per_tok, c.routed_scaling_factor,
                launches.route, step.route_scratch,
            ),
            route_file.BENCHED, 8,
        ),
        "linear": (lambda m, r: products(m), linear_fp8_file.BENCHED, 12),
    }  # fmt: skip
    for name, (call, tried, seconds) in parts.items():
        if name not in options.tune:
            continue
        bench.deadline = time.monotonic() + seconds
        forms = {"table": getattr(table, name), **named(tried)}

        def calls(launch, name=name, call=call):
            def run(m, r):
                setattr(launches, name, launch)
                call(m, r)

            return [lambda m=m, r=r: run(m, r) for m, r in zip(layers, routing, strict=True)]

        try:
            found[name] = best_of(bench, name, tokens, forms, calls, options)
        except Exception:
            bench.say(tune=name, T=tokens, failed=traceback.format_exc()[-1200:])
        setattr(launches, name, None)
    # A step takes these from their tables: what is best here serves the rest of this process.
    for name, form, table in (
        ("scores", scores_tuned, scores_file._LAUNCHES),
        ("attention", attention_tuned, launch_for(attention_file._LAUNCHES, torch.device(DEVICE))),
    ):
        if name not in options.tune:
            continue
        bench.deadline = time.monotonic() + 8
        family = device_family(torch.device(DEVICE))
        key = tokens if name == "attention" else family if family in table else "any"
        try:
            table[key] = form(bench, c, tokens, options) or table[key]
        except Exception:
            bench.say(tune=name, T=tokens, failed=traceback.format_exc()[-1200:])
    bench.deadline = float("inf")
    return {n: x for n, x in found.items() if x is not None}


def best_of(bench: GpuLines, name: str, tokens: int, forms: dict, calls, options):
    """Time launches (form -> launch) of `calls`; write and return the best, None if none ran."""
    made = {form: lambda launch=launch: calls(launch) for form, launch in forms.items()}
    best = bench.compare(f"tune {name}", {"T": tokens}, made, 0.0)
    if best is None:
        return None
    launch = forms[best[0]]
    line = {
        "tuned": name, "T": tokens, "form": best[0], "us": round(best[1], 2),
        "launch": asdict(launch), "device": device_family(torch.device(DEVICE)),
    }  # fmt: skip
    bench.say(**line)
    if options.tune_json is not None:
        with options.tune_json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return launch


def scores_tuned(bench: GpuLines, c, tokens: int, options):
    """Return the best launch of a full scan: of 1M entries for one sequence, of 64K for more."""
    context = 1 << (20 if tokens == 1 else 16) if options.layers is None else 4096
    make = RandomWeights(DEVICE)
    keys = make.bytes(tokens * context, c.index_head_dim // 2 + c.index_head_dim // 32)
    keys[:, c.index_head_dim // 2 :] = 125
    q = make.bf16(tokens, c.index_n_heads, c.index_head_dim)
    weights = torch.randn(tokens, c.index_n_heads, device=DEVICE)
    tables = torch.randperm(tokens * context // 64, device=DEVICE).view(tokens, -1)
    visible = torch.full((tokens,), context, device=DEVICE)

    def calls(launch):
        one = (q, weights, keys, tables, visible, 64, context)
        return [lambda: scores_file.index_scores(*one, launch=launch)] * 4

    table = launch_for(scores_file._LAUNCHES, torch.device(DEVICE))
    forms = {"table": table, **named(scores_file.BENCHED)}
    return best_of(bench, "scores", tokens, forms, calls, options)


def attention_tuned(bench: GpuLines, c, tokens: int, options):
    """Return the best launch over a full window and a full selection, rows scattered."""
    make = RandomWeights(DEVICE)
    main, ring = (
        make.bytes(1 << 20, c.head_dim * 9 // 16),
        make.bytes(1 << 18, c.head_dim * 33 // 32),
    )
    main[:, c.head_dim // 2 :], ring[:, c.head_dim :] = 0x30, 127
    ring[:, : c.head_dim] &= 0xBF
    sink = torch.zeros(c.num_attention_heads, device=DEVICE)

    def rows(pool, count):
        return torch.randint(0, len(pool), (tokens, count), device=DEVICE)

    sets = [
        (
            make.bf16(tokens, c.num_attention_heads, c.head_dim), ring,
            rows(ring, c.sliding_window), main, rows(main, c.index_topk), sink,
        )
        for _ in range(8 if tokens > 16 else 32)
    ]  # fmt: skip

    def calls(launch):
        return [lambda s=s: attention_file.gather_attention(*s, launch=launch) for s in sets]

    table = attention_file.attention_launch(tokens, torch.device(DEVICE))
    tried = [
        replace(table, num_stages=stages, splits=splits)
        for stages in (2, 3)
        for splits in {table.splits, max(1, table.splits // 2), 5}
        if (stages, splits) != (table.num_stages, table.splits)
    ]
    return best_of(bench, "attention", tokens, {"table": table, **named(tried)}, calls, options)


def kernels_part(bench: GpuLines, options) -> None:
    c = flash(options.experts)
    # All layers: the sites of 16 would fit in the L2 cache.
    model = Model(c, DEVICE, ENGRAM_ROWS, layers=options.layers)
    bench.say(model_bytes=torch.cuda.memory_allocated(), layers=len(model.layers))
    limit_s = bench.limit_s
    end = limit_s - _PROFILE_S * len(options.profiled)
    share = (bench.left_s + end - limit_s) / len(options.batches)
    for number, tokens in enumerate(options.batches):
        bench.limit_s = end - share * (len(options.batches) - 1 - number)
        for part in (expert_part, linear_part, small_part):
            try:
                part(bench, model, tokens, options)
            except Exception:
                bench.say(part=part.__name__, T=tokens, failed=traceback.format_exc()[-1200:])
    bench.limit_s = limit_s


def flash(experts: int):
    return replace(preset("flash").text_config, n_routed_experts=experts)


# Kernels of a step by what they are for; what is not named here is torch's own.
CLASSES = {
    "products": ("_linear_kernel",),
    "experts": ("_gate_up_kernel", "_down_kernel"),
    "sites": ("_site_kernel", "_streams_kernel", "_site_end_kernel"),
    "attention": ("_split_kernel", "_combine_kernel"),
    "router": ("_route_kernel", "_choose_kernel"),
    "selection": ("_scores_kernel", "_bests_kernel", "_stretch_kernel", "_pool_rows_kernel"),
    "rows": ("_store_kernel", "_queries_kernel", "_close_kernel", "_latent_window_kernel"),
    "Engram": ("_gather_kernel", "_update_kernel"),
    "draw": ("_draw_kernel",),
}


def classes_of(by_kernel: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return [microseconds, launches] by class of the kernels of a profile."""
    of_kernel = {kernel: name for name, kernels in CLASSES.items() for kernel in kernels}
    found: dict[str, list[float]] = {}
    for kernel, (us, launches) in by_kernel.items():
        sums = found.setdefault(of_kernel.get(kernel, "other"), [0.0, 0])
        sums[0], sums[1] = round(sums[0] + us, 1), sums[1] + launches
    return found


def step_part(bench: GpuLines, options) -> None:
    c = flash(options.experts)
    model = Model(c, DEVICE, ENGRAM_ROWS, layers=options.layers)
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated()
    bench.say(model_bytes=weights, layers=len(model.layers), experts=options.experts)
    is_whole = options.layers is None
    for batch in options.batches:
        if options.tune:
            options.best[batch] = tuned(bench, model, batch, options)
        best_launches = options.best.get(batch, {})
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
                        batch, DEVICE, overlap=overlap > 0, invariant=options.invariant
                    )
                    for name, launch in best_launches.items():
                        setattr(launches, name, launch)
                    times[overlap] = one_step(bench, model, line, is_whole, launches)
                    is_first = context == options.contexts[0] and overlap == overlaps[0]
                    if is_first and not options.no_profile:
                        options.profiled.append((line, launches))
                except Exception:
                    bench.say(**line, overlap=overlap, failed=traceback.format_exc()[-1500:])
                gc.collect()
                torch.cuda.empty_cache()
            # Longer contexts are run with the overlap that was best at the first.
            overlaps = [min(times, key=times.__getitem__)] if times else overlaps


def one_step(bench: GpuLines, model: Model, line: dict, is_whole: bool, launches) -> float:
    """Time a step and print it; returns its microseconds."""
    c, batch, context = model.config, line["batch"], line["context"]
    step = Step(model, Cache(model, batch, context), launches)
    eager = step.run().clone()
    graph = step.graph()
    runs = [times_of(graph.replay, 20 if batch < 16 else 8) for _ in range(3)]
    medians = [statistics.median(run) for run in runs]
    same = torch.equal(step.tokens, eager)
    distinct = [int((a >= 0).sum()) for a in step.active]
    costs = decode_costs(c, context, batch, distinct if is_whole else None)
    floor = floor_seconds(costs, bench.read_gbs * 1e9, bench.bf16_tflops * 1e12) * 1e6
    anchor = floor_seconds(costs, 4.3e12, 790e12) * 1e6
    median = statistics.median(medians)
    result = dict(
        **line, overlap=bool(launches.overlaps), invariant=launches.invariant, us=round(median, 1),
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
    return median


def profile_part(bench: GpuLines, options) -> None:
    """Profile the first step of each batch; in the end, as a profiler may leave replays slower.

    In one process the same cell took 5.91 ms before the profiler had run and 6.03 after.
    """
    if not options.profiled:
        return
    model = Model(flash(options.experts), DEVICE, ENGRAM_ROWS, layers=options.layers)
    for line, launches in options.profiled:
        if bench.is_late:
            bench.say(**line, profile="time limit")
            continue
        try:
            profile_step(bench, model, line, launches)
        except Exception:
            bench.say(**line, profile="failed", failed=traceback.format_exc()[-1500:])


def profile_step(bench: GpuLines, model: Model, line: dict, launches) -> None:
    """Print the time of each kernel in a step, and the launches of a Reuse layer.

    Where launches overlap, a kernel's time holds its wait for the one before it.
    """
    c, batch = model.config, line["batch"]
    step = Step(model, Cache(model, batch, line["context"]), launches)
    by_kernel = profile_of(step.graph())
    bench.say(**line, profile=by_kernel, by_class=classes_of(by_kernel))
    reuse = (x for x in model.layers if x.spec.mode is AttentionMode.REUSE and not x.engram)
    layer = next(reuse, None)
    if layer is not None:
        streams = model.make.bf16(batch, 4, c.hidden_size)
        mix = mixes_of(step, streams)[True]
        parts = model.make.bf16(batch, c.num_experts_per_tok + 1, c.hidden_size)
        found = launches_of(lambda: step.block(layer, streams, parts, mix, pre_of(mix), True))
        bench.say(**line, reuse_layer_launches=sum(found.values()), by_kernel=found)


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
    parser.add_argument(
        "--overlaps", type=int, nargs="+", default=[1], choices=(0, 1),
        help="0: no launch begins before the one before has ended; 1: as the table of a step says",
    )  # fmt: skip
    parser.add_argument(
        "--tune", nargs="*", choices=TUNED, default=[], help="time launches first, take the best",
    )  # fmt: skip
    parser.add_argument("--tune-json", type=Path, help="a line for each launch that was best")
    parser.add_argument("--launches", type=Path, help="take the launches of such a file")
    parser.add_argument(
        "--invariant", action="store_true", help="launches that no neighbour changes"
    )
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--chosen-only", action="store_true", help="no other launches")
    options = parser.parse_args()
    options.best = {} if options.launches is None else read_launches(options.launches)
    options.profiled = []
    bench = GpuLines(options.out, options.limit_s)
    torch.manual_seed(0)
    bench.say(**provenance())
    # A source of less than a few GB gives a lower rate.
    has_room = torch.cuda.mem_get_info()[0] > 16 << 30
    bench.measure_ceilings(1 << (32 if has_room else 28))
    torch.cuda.empty_cache()
    for part in (*options.parts, "profile"):
        try:
            {"kernels": kernels_part, "step": step_part, "profile": profile_part}[part](
                bench, options
            )
        except Exception:
            bench.say(part=part, failed=traceback.format_exc()[-1500:])
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
