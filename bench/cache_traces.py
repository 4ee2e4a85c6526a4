"""Public request traces through the engine's cache: hits by tier, replays, disk bytes, job time.

    python bench/cache_traces.py --agents FOLDER [--mooncake FILE] [--arms ...] [--limit N]
    python bench/cache_traces.py --generated 8        # without files: the same statistics
    python bench/cache_traces.py --figure             # tables and picture of the results so far

FOLDER has conversations of kv-cache-tester (`trace_*.json`), FILE is Mooncake's conversation trace.
Every line of bench/results/cache_traces.jsonl is one arm on one trace; docs/cache-traces.md says
what they mean. No model runs: finwhale/evals/cache_replay.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from record import RESULTS, write_result

from finwhale.evals.cache_replay import CachePlan, CostModel, replay, snapshot_ratio
from finwhale.evals.cache_traces import (
    AgentStatistics,
    Trace,
    generate_agents,
    read_agents,
    read_mooncake,
)

NAME = "cache_traces"
# Room for the longest prompt of the agents' traces, 12,811 blocks of 64, and in all tiers but the
# last for less than everything.
DEVICE_TOKENS, MEMORY_TOKENS = 13_056 * 64, 49_152 * 64
WINDOWS = 256


def plans(block_tokens: int, num_requests: int) -> dict[str, CachePlan]:
    device = DEVICE_TOKENS // block_tokens
    tiers = CachePlan(
        device_blocks=device,
        memory_blocks=MEMORY_TOKENS // block_tokens,
        disk_blocks=1 << 22,
        windows=WINDOWS,
    )
    return {
        "no cache": CachePlan(device_blocks=device, keeps=False),
        "device": replace(tiers, memory_blocks=0, disk_blocks=0),
        "tiers": tiers,
        "tiers, windows for an hour": replace(
            tiers, windows=min(2 * num_requests, 8_192), lifetime_s=3600.0
        ),
        "tiers, no windows": replace(tiers, windows=0),
        "tiers, bounded": replace(tiers, windows=0, prefill="bounded"),
        "snapshot a turn": replace(
            tiers, memory_blocks=0, windows=0, prefill="bounded", turn_snapshots=True
        ),
    }


def run(trace: Trace, arm: str, plan: CachePlan, scratch: Path | None) -> dict[str, object]:
    """Serve a trace in a new folder, print a line, and return what goes to the results."""
    folder = Path(tempfile.mkdtemp(prefix="cache-traces-", dir=scratch))
    began, count, last = time.time(), len(trace.requests), [0.0]

    def tell(number: int) -> None:
        if time.time() - last[0] > 2:
            last[0] = time.time()
            done = f"{trace.name}, {arm}: {number} of {count} requests"
            print(f"{done}, {time.time() - began:.0f} s", end="\r", flush=True)

    cost = CostModel()
    try:
        found = replay(trace, plan, folder / "cache", cost=cost, on_request=tell)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    new = trace.new_tokens()
    served, written = found["served"], found["disk_bytes"]
    result = {
        "trace": trace.name,
        "arm": arm,
        "plan": asdict(plan),
        "cost_model": asdict(cost),
        "block_tokens": trace.block_tokens,
        "new_tokens": sum(new),
        "new_tokens_a_turn": round(sum(new) / len(new), 1),
        "served": asdict(served),
        "tiers": {name: asdict(stats) for name, stats in found["tiers"].items()},
        "windows": asdict(found["windows"]),
        "disk_bytes": written,
        "job_seconds": round(found["job_seconds"], 1),
        "job_seconds_median": round(found["job_seconds_median"], 2),
        "wall_s": round(time.time() - began, 1),
    }
    share = {
        tier: getattr(served, f"{tier}_blocks") * trace.block_tokens / served.input_tokens
        for tier in ("device", "memory", "disk")
    }
    print(" " * 79, end="\r")
    print(
        f"{trace.name:12} {arm:28} hits "
        + " ".join(f"{tier} {value:6.1%}" for tier, value in share.items())
        + f"  replayed {served.replayed_tokens:11,}  modelled {result['job_seconds']:9,.0f} s"
    )
    if plan.whole_payload and found["tiers"]["disk"].stored_bytes != sum(written.values()):
        raise SystemExit("the disk tier wrote other bytes than were counted")
    if written["snapshots"]:
        ratio = 1 + written["snapshots"] / written["blocks"]
        want = snapshot_ratio(trace)
        result |= {"ratio": round(ratio, 4), "ratio_by_formula": round(want, 4)}
        print(f"{'':12} bytes {ratio:.4f} times, formula {want:.4f}, {ratio / want - 1:+.2%}")
    write_result(NAME, result)
    return result


def results() -> dict[tuple[str, str], dict]:
    """Return the last line of every trace and arm."""
    lines = (RESULTS / f"{NAME}.jsonl").read_text(encoding="utf-8").splitlines()
    return {(r["trace"], r["arm"]): r for r in (json.loads(line)["result"] for line in lines)}


def table() -> None:
    """Print what docs/cache-traces.md shows, from the results."""
    print("| trace | arm | pool | memory | disk | replayed | rows | prefill s | disk bytes |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (trace, arm), r in sorted(results().items()):
        if trace.startswith("new "):
            continue
        served, size = r["served"], r["block_tokens"]
        total = served["input_tokens"]
        shares = [served[f"{t}_blocks"] * size / total for t in ("device", "memory", "disk")]
        prefill_s = r["job_seconds"] - served["output_tokens"] / r["cost_model"]["decode_tps"]
        cells = [f"{share:.1%}" for share in shares]
        cells += [
            f"{served['replayed_tokens'] / total:.2%}",
            f"{served['encoder_rows'] / 1e6:.1f}M",
        ]
        cells += [f"{prefill_s:,.0f}", f"{sum(r['disk_bytes'].values()) / 1e9:.2f} GB"]
        print(f"| {trace} | {arm} | " + " | ".join(cells) + " |")
    print()
    print("| trace | new tokens a turn | measured | formula | difference |")
    print("|---|---|---|---|---|")
    for (trace, _), r in sorted(results().items(), key=lambda item: item[1]["new_tokens_a_turn"]):
        if "ratio" in r:
            off = r["ratio"] / r["ratio_by_formula"] - 1
            print(
                f"| {trace} | {r['new_tokens_a_turn']:,.0f} | {r['ratio']:.4f} | "
                f"{r['ratio_by_formula']:.4f} | {off:+.2%} |"
            )


def draw() -> Path:
    """Draw hits by tier and the ratio of bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = results()
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    shown = sorted(k for k in found if k[1] != "snapshot a turn" and not k[0].startswith("new "))
    for row, key in enumerate(reversed(shown)):
        served, start = found[key]["served"], 0.0
        for color, tier in enumerate(("device", "memory", "disk")):
            share = served[f"{tier}_blocks"] * found[key]["block_tokens"] / served["input_tokens"]
            label = tier if not row else None
            left.barh(row, share, left=start, color=f"C{color}", label=label)
            start += share
        replayed = served["replayed_tokens"] / served["input_tokens"]
        left.barh(row, replayed, height=0.25, color="black", label=None if row else "replayed")
    names = [f"{trace.partition('_')[0]}: {arm}" for trace, arm in reversed(shown)]
    left.set_yticks(range(len(shown)), names)
    left.set_xlim(0, 1)
    left.set_xlabel("share of prompt tokens")
    left.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
    ratios = [r for r in found.values() if "ratio" in r]
    news = [r["new_tokens_a_turn"] for r in ratios]
    low, high = 0.7 * min(news), 1.4 * max(news)
    curve = [low * (high / low) ** (n / 60) for n in range(61)]
    right.plot(curve, [1 + 1_518.74 / n for n in curve], color="0.6", label="1 + 1,519 / n")
    for r in ratios:
        name = "generated" if r["trace"].startswith(("new ", "generated")) else r["trace"]
        marker = {"generated": "o", "agents": "s"}.get(name, "^")
        right.plot(r["new_tokens_a_turn"], r["ratio"], marker, color="C3")
        if name != "generated":
            place = r["new_tokens_a_turn"], r["ratio"]
            short = name.partition("_")[0]
            right.annotate(short, place, (0, 9), textcoords="offset points", fontsize=8, ha="left")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_yticks((1, 1.5, 2, 4, 8), ("1", "1.5", "2", "4", "8"), minor=False)
    right.minorticks_off()
    right.set_xlabel("n, new tokens of a turn (mean)")
    right.set_ylabel("disk bytes with a window snapshot a turn,\nover global KV alone")
    right.legend(fontsize=8)
    path = Path(__file__).resolve().parent.parent / "docs" / "images" / f"{NAME}.png"
    figure.savefig(path, dpi=90)
    print(f"wrote {path}, {path.stat().st_size:,} bytes")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=Path, help="folder of trace_*.json")
    parser.add_argument("--mooncake", type=Path, help="conversation_trace.jsonl")
    parser.add_argument("--generated", type=int, metavar="CONVERSATIONS", default=0)
    parser.add_argument("--ratios", action="store_true", help="byte ratios over turn lengths")
    parser.add_argument("--arms", nargs="*", help="some of: " + "; ".join(plans(64, 1)))
    parser.add_argument("--limit", type=int, help="requests of Mooncake's trace at most")
    parser.add_argument(
        "--whole", action="store_true", help="write rows of the release's width to disk"
    )
    parser.add_argument("--scratch", type=Path, help="where the disk tier lives meanwhile")
    parser.add_argument("--figure", action="store_true")
    args = parser.parse_args()
    traces: list[Trace] = []
    if args.agents:
        traces.append(read_agents(args.agents))
    if args.mooncake:
        traces.append(read_mooncake(args.mooncake, limit=args.limit))
    if args.generated:
        traces.append(generate_agents(args.generated))
    for trace in traces:
        known = plans(trace.block_tokens, len(trace.requests))
        for arm in args.arms or known:
            plan = replace(known[arm], whole_payload=args.whole)
            run(trace, arm, plan, args.scratch)
    if args.ratios:
        for median in (128, 256, 742, 2_048, 8_192):
            own = AgentStatistics(
                turns=40, first_tokens=median, new_tokens=(median, 3 * median), max_tokens=400_000
            )
            trace = replace(generate_agents(2, statistics=own), name=f"new {median}")
            plan = replace(plans(64, 1)["snapshot a turn"], whole_payload=args.whole)
            run(trace, "snapshot a turn", plan, args.scratch)
    if args.figure:
        table()
        draw()
    if not (traces or args.ratios or args.figure):
        parser.error("name a trace: --agents, --mooncake or --generated; or --ratios, --figure")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
