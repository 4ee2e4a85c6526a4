"""The attention side of a decode step, kernel by kernel, beside its floors and its peers.

    python bench/gpu_decode_attention.py --out FILE.jsonl [--limit-s 400] [--parts attention scores]
Needs a GPU. A time is that of one call among many in a CUDA graph, each on inputs of its own so
that together they are larger than the L2 cache: the median of replays, with least and largest.
Floors: the bytes that must move at the read bandwidth measured here, the products at the bf16 rate
measured here. Every part prints all launches it tried, then the best. What fails says why and the
rest goes on; after --limit-s nothing new starts.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from record import provenance

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_lines import GpuLines

from finwhale.decode_kernels import attention_refs as refs
from finwhale.decode_kernels import gather_attention as attention
from finwhale.decode_kernels import index_scores as scoring
from finwhale.decode_kernels import select_topk as selection
from finwhale.decode_kernels import store_rows as rows_kernels
from finwhale.decode_kernels.launch import Overlap
from finwhale.ops.rope import rope_frequencies, rope_rotation

HEADS, DIM, WINDOW, TOPK, INDEX_HEADS, INDEX_DIM = 64, 512, 128, 512, 32, 128
ROTATED_BYTES = 160 << 20  # inputs of one graph together; the L2 of an H200 is 60 MB
DEVICE = "cuda"


def random_rows(count: int, width: int, codes: int, scale: tuple[int, int]):
    """Return packed rows with sensible scales: no NaN, values near 1."""
    rows = torch.randint(0, 256, (count, width), dtype=torch.uint8, device=DEVICE)
    if codes == DIM:  # E4M3: keep clear of NaN
        rows[:, :codes] &= 0xBF
    rows[:, codes:] = torch.randint(
        *scale, (count, width - codes), dtype=torch.uint8, device=DEVICE
    )
    return rows


def attention_part(bench: GpuLines, everything: bool) -> None:
    main = random_rows(1 << 20, 288, 256, (40, 56))
    ring = random_rows(1 << 18, 528, 512, (118, 123))
    sink = torch.zeros(HEADS, device=DEVICE)
    for tokens in (1, 8, 64, 256):
        calls = min(64, max(4, ROTATED_BYTES // (tokens * 215_000)))
        sets = []
        for _ in range(calls):
            q = torch.randn(tokens, HEADS, DIM, device=DEVICE).bfloat16()
            window = torch.randint(0, len(ring), (tokens, WINDOW), device=DEVICE)
            entries = torch.randint(0, len(main), (tokens, TOPK), device=DEVICE).sort().values
            turn = rope_rotation(
                torch.arange(tokens, device=DEVICE), rope_frequencies(1e4, 64, None).to(DEVICE)
            )
            sets.append((q, ring, window, main, entries, sink, turn))

        def ours(launch=None, invariant=False, sets=sets):
            return [
                lambda s=s: attention.gather_attention(*s, launch=launch, invariant=invariant)
                for s in sets
            ]

        forms = {"chosen": ours, "invariant": lambda ours=ours: ours(invariant=True)}
        tried = {1: (5, 10, 20, 40), 8: (2, 5, 10, 20), 64: (1, 2, 4), 256: (1, 2)}[tokens]
        kinds = [x for x in attention.BENCHED if x.splits > 1] if everything else []
        for one in kinds:
            for splits in tried:
                launch = replace(one, splits=splits)
                form = f"h{one.heads} k{one.keys} w{one.num_warps} s{one.num_stages} "
                form += f"shares{one.shares} splits{splits}"
                forms[form] = lambda launch=launch, ours=ours: ours(launch)
        forms["peer flash_mla legacy, 584-byte FP8 rows"] = lambda t=tokens, n=calls: flash_mla(
            t, n
        )
        forms["peer torch: gather bf16 rows, two products"] = lambda t=tokens, n=calls: gathered(
            t, n
        )
        rows = TOPK * 288 + WINDOW * 528
        traffic = tokens * (rows + 4 * HEADS * DIM)
        flops = 4.0 * tokens * HEADS * DIM * (TOPK + WINDOW)
        first = [x[:1] if n in (0, 2, 4) else x for n, x in enumerate(sets[0])]
        want = refs.gather_attention_ref(*first[:6], sets[0][6][:, :1]).float()

        def error(out, want=want):
            """Return the relative error of the first query."""
            return round(float((out[:1].float() - want).norm() / want.norm()), 5)

        bench.compare("gather_attention", {"T": tokens}, forms, traffic, flops, error)


def flash_mla(tokens: int, calls: int):
    import flash_mla

    blocks = 1 << 13
    cache = torch.randint(0, 60, (blocks, 64, 1, 584), dtype=torch.uint8, device=DEVICE)
    sink = torch.zeros(HEADS, device=DEVICE)
    out = []
    for _ in range(calls):
        q = torch.randn(tokens, 1, HEADS, DIM, device=DEVICE).bfloat16()
        index = torch.randint(0, blocks * 64, (tokens, 1, TOPK + WINDOW), device=DEVICE).int()
        schedule, _ = flash_mla.get_mla_metadata()

        def call(q=q, index=index, schedule=schedule):
            return flash_mla.flash_mla_with_kvcache(
                q, cache, None, None, DIM, schedule, indices=index, attn_sink=sink, use_legacy=True
            )

        call()
        out.append(call)
    return out


def gathered(tokens: int, calls: int):
    rows = torch.randn(1 << 18, DIM, device=DEVICE).bfloat16()
    out = []
    for _ in range(calls):
        q = torch.randn(tokens, HEADS, DIM, device=DEVICE).bfloat16()
        index = torch.randint(0, len(rows), (tokens, TOPK + WINDOW), device=DEVICE)

        def call(q=q, index=index):
            keys = rows[index]  # [T, K, D]
            p = torch.softmax((q @ keys.transpose(1, 2)).float() * DIM**-0.5, -1)
            return p.bfloat16() @ keys

        out.append(call)
    return out


def scores_part(bench: GpuLines, everything: bool) -> None:
    for tokens, context in (
        (1, 4096),
        (1, 65536),
        (1, 1 << 20),
        (8, 65536),
        (64, 4096),
        (64, 65536),
        (8, 1 << 20),
    ):
        for is_pool in (False, True):
            if is_pool and context < 1 << 16:
                continue
            columns = 16384 if is_pool else context
            per_call = tokens * columns * 68
            calls = min(32, max(2, ROTATED_BYTES // per_call))
            sets = []
            for _ in range(calls):
                keys = random_rows(tokens * context, 68, 64, (120, 128))
                q = torch.randint(-2, 3, (tokens, INDEX_HEADS, INDEX_DIM), device=DEVICE).bfloat16()
                weights = torch.randn(tokens, INDEX_HEADS, device=DEVICE)
                blocks = tokens * context // 64
                tables = torch.randperm(blocks, device=DEVICE).view(tokens, -1)
                visible = torch.full((tokens,), context, device=DEVICE)
                pool = None
                if is_pool:
                    order = torch.rand(tokens, context // 8, device=DEVICE).argsort(1)[:, :2048]
                    pool = order.sort(1).values
                sets.append((q, weights, keys, tables, visible, 64, columns, pool))
                if torch.cuda.memory_allocated() > 100 << 30:
                    break

            def ours(launch=None, sets=sets, is_pool=is_pool):
                return [
                    lambda s=s: scoring.index_scores(*s, want_best=not is_pool, launch=launch)
                    for s in sets
                ]

            forms = {"chosen": ours}
            if everything:
                for x in scoring.BENCHED:
                    form = f"k{x.keys} p{x.programs} w{x.num_warps} s{x.num_stages}"
                    forms[form] = lambda launch=x, ours=ours: ours(launch)
            # The peer serves the queries of one key sequence, and these have one each.
            if not is_pool and tokens == 1:
                forms["peer deep_gemm fp8_mqa_logits, dense keys"] = lambda c=context, n=calls: (
                    mqa_logits(c, n)
                )
            shape = {"T": tokens, "context": context, "pool": is_pool}
            flops = 2.0 * tokens * columns * INDEX_HEADS * INDEX_DIM
            written = tokens * columns * (4 if is_pool else 4.5)
            bench.compare("index_scores", shape, forms, per_call + written, flops)
            del sets, forms, ours
            torch.cuda.empty_cache()


def mqa_logits(context: int, calls: int):
    """Return calls of the peer, one query each."""
    import deep_gemm

    tokens, out = 1, []
    for _ in range(calls):
        q = torch.randn(tokens, INDEX_HEADS, INDEX_DIM, device=DEVICE).to(torch.float8_e4m3fn)
        keys = torch.randn(context, INDEX_DIM, device=DEVICE).to(torch.float8_e4m3fn)
        scales = torch.ones(context, device=DEVICE)
        weights = torch.randn(tokens, INDEX_HEADS, device=DEVICE)
        first = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
        last = torch.full((tokens,), context, dtype=torch.int32, device=DEVICE)

        def call(q=q, keys=keys, scales=scales, weights=weights, first=first, last=last):
            return deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, first, last)

        call()
        out.append(call)
    return out


def select_part(bench: GpuLines, everything: bool) -> None:
    shapes = [(1, 4096, 512), (1, 16384, 512), (1, 65536, 512), (1, 1 << 20, 512)]
    shapes += [(8, 65536, 512), (64, 16384, 512), (64, 65536, 512), (64, 1 << 20, 512)]
    shapes += [(1, 8192, 2048), (1, 131072, 2048), (64, 8192, 2048), (64, 131072, 2048)]
    for tokens, num, k in shapes:
        calls = min(32, max(2, ROTATED_BYTES // (4 * tokens * num)))
        sets = [torch.randn(tokens, num, device=DEVICE).relu_() for _ in range(calls)]
        for x in sets:  # half of the scores are ties at 0, as ReLU makes them
            x += torch.randn(tokens, num, device=DEVICE) * (x > 0)
        lengths = torch.full((tokens,), num, device=DEVICE)

        def ours(launch=None, sets=sets, lengths=lengths, k=k):
            return [
                lambda x=x: selection.select_topk_rows(x, lengths, k, launch=launch) for x in sets
            ]

        forms = {"chosen": ours}
        for x in selection.BENCHED if everything else ():
            if x.stretch >= 2 * k:
                form = f"stretch{x.stretch} w{x.num_warps}"
                forms[form] = lambda launch=x, ours=ours: ours(launch)
        forms["peer torch.topk, sorted"] = lambda sets=sets, k=k: [
            lambda x=x: x.topk(k) for x in sets
        ]
        shape = {"T": tokens, "N": num, "k": k}
        want = refs.select_topk_rows_ref(sets[0][:1], lengths[:1], k)
        traffic = 4.0 * tokens * num + 8 * tokens * k
        bench.compare(
            "select_topk", shape, forms, traffic, check=lambda x, w=want: torch.equal(x[:1], w)
        )


def store_part(bench: GpuLines, everything: bool) -> None:
    for tokens in (1, 8, 64, 256):
        turn = rope_rotation(
            torch.arange(tokens, device=DEVICE), rope_frequencies(1e4, 64, None).to(DEVICE)
        )
        for kind, dim, width in (("window", 512, 528), ("entry", 512, 288), ("index_key", 128, 68)):
            pool = torch.zeros(1 << 16, width, dtype=torch.uint8, device=DEVICE)
            weight = torch.ones(dim, device=DEVICE).bfloat16()
            calls = []
            for _ in range(64):
                x = torch.randn(tokens, dim, device=DEVICE).bfloat16()
                rows = torch.randperm(len(pool), device=DEVICE)[:tokens]
                calls.append(
                    lambda x=x, rows=rows, kind=kind, weight=weight, pool=pool, turn=turn: (
                        rows_kernels.store_rows(kind, x, weight, turn, pool, rows, 1e-20)
                    )
                )
            traffic = tokens * (2 * dim + width)
            bench.compare(
                f"store_rows {kind}", {"T": tokens}, {"chosen": lambda c=calls: c}, traffic
            )
        for heads, dim, is_rounded in ((64, 512, False), (32, 128, True)):
            queries = [torch.randn(tokens, heads, dim, device=DEVICE).bfloat16() for _ in range(64)]
            calls = [
                lambda q=q, turn=turn, r=is_rounded: rows_kernels.rotate_queries(q, turn, r)
                for q in queries
            ]
            moved = 4 * tokens * heads * (dim if is_rounded else 64)
            shape = {"T": tokens, "rounded": is_rounded}
            bench.compare("rotate_queries", shape, {"chosen": lambda c=calls: c}, moved)


def chain_part(bench: GpuLines, everything: bool) -> None:
    """A layer's launches one after the other: of a Reuse layer, and of one that selects."""
    frequencies = rope_frequencies(1e4, 64, None).to(DEVICE)
    ones = torch.ones(DIM, device=DEVICE).bfloat16()
    sink = torch.zeros(HEADS, device=DEVICE)
    for tokens, context in (
        (1, 4096),
        (1, 65536),
        (1, 1 << 20),
        (8, 65536),
        (64, 4096),
        (64, 65536),
    ):
        turn = rope_rotation(torch.arange(tokens, device=DEVICE), frequencies)
        main = random_rows(1 << 20, 288, 256, (40, 56))
        ring = random_rows(1 << 16, 528, 512, (118, 123))
        keys = random_rows(tokens * context, 68, 64, (120, 128))
        tables = torch.randperm(tokens * context // 64, device=DEVICE).view(tokens, -1)
        visible = torch.full((tokens,), context, device=DEVICE)
        blocks = (visible + 7) // 8
        rows = torch.randperm(len(ring), device=DEVICE)[:tokens]
        weights = torch.randn(tokens, INDEX_HEADS, device=DEVICE)

        def random(*shape):
            return torch.randn(*shape, device=DEVICE).bfloat16()

        sets = []
        for _ in range(16):
            window = torch.randint(0, len(ring), (tokens, WINDOW), device=DEVICE)
            entries = torch.randint(0, len(main), (tokens, TOPK), device=DEVICE)
            inputs = random(tokens, DIM), random(tokens, HEADS, DIM)
            sets.append((*inputs, random(tokens, INDEX_HEADS, INDEX_DIM), window, entries))

        def attend(x, q, _, window, entries, overlap, turn=turn, ring=ring, main=main, rows=rows):
            more = {"overlap": overlap}
            rows_kernels.store_rows("window", x, ones, turn, ring, rows, 1e-20, None, q, **more)
            attention.gather_attention(
                q, ring, window, main, entries, sink, turn, overlaps=(overlap, overlap)
            )

        def full(x, q, index_q, window, entries, overlap, turn=turn, keys=keys, tables=tables,
                 visible=visible, blocks=blocks, weights=weights, context=context):  # fmt: skip
            more = {"overlap": overlap}
            rows_kernels.rotate_queries(index_q, turn, True, **more)
            scores, best = scoring.index_scores(
                index_q, weights, keys, tables, visible, 64, context, **more
            )
            selection.select_topk_rows(best, blocks, 2048, **more)
            chosen = selection.select_topk_rows(scores, visible, TOPK, **more)
            selection.pool_rows(chosen, tables, 64, **more)

        for name, layer in (("reuse layer", attend), ("selection of the pool's maker", full)):
            forms = {
                f"overlap={overlap}": lambda layer=layer, overlap=overlap, sets=sets: [
                    lambda s=s: layer(*s, overlap) for s in sets
                ]
                for overlap in (Overlap.NONE, Overlap.AT_END)
            }
            bench.compare(f"chain: {name}", {"T": tokens, "context": context}, forms, 0.0)
        del keys, sets, main, ring
        torch.cuda.empty_cache()


# What a part is, and its share of the time.
PARTS = {
    "chain": (chain_part, 15), "attention": (attention_part, 40), "scores": (scores_part, 20),
    "select": (select_part, 15), "store": (store_part, 10),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit-s", type=float, default=400.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--chosen-only", action="store_true", help="no other launches, only peers")
    options = parser.parse_args()
    bench = GpuLines(options.out, options.limit_s)
    torch.manual_seed(0)
    bench.say(**provenance())
    bench.measure_ceilings(1 << 31)
    total = sum(PARTS[part][1] for part in options.parts)
    spent = 0
    for part in options.parts:
        # A slow part must not take the time of those behind it.
        spent += PARTS[part][1]
        bench.limit_s = options.limit_s * spent / total
        try:
            PARTS[part][0](bench, not options.chosen_only)
        except Exception:
            bench.say(part=part, failed=traceback.format_exc()[-1500:])
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
