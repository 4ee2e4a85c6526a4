"""The shipped model on one GPU from prompt to tokens: batches, graph and eager, floor and a peer.

    python bench/gpu_mini.py --out FILE [--batches 1 32 256] [--prompts 512 4096]
Real weights, real prompts (sources of the standard library, a few distinct ones copied to the
batch), greedy. Prefill is the model's torch pass. A run is `--steps` steps and the copy of their
tokens to the host, by the wall clock; three runs. The floor is that of decode_floors.py at the
middle context, with measured experts, at 4.3 TB/s and 790 TFLOP/s. Peers, measured in the same run:
the model's own torch pass, one sequence after another, in release numerics and in bf16 without
activation rounding, and transformers' V4 of these widths in a batch, in a process of its own; each
ends after --peer-s. JSON lines, the first says command, commit and versions; each part stands
alone, and none begins after --limit-s.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gc
import importlib.metadata
import importlib.util
import inspect
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections import defaultdict
from pathlib import Path

import torch
from decode_floors import decode_costs, floor_seconds
from gpu_lines import GpuLines
from record import provenance

from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.shipped import shipped_model
from finwhale.engine.gpu_generation import prefilled
from finwhale.engine.step import forward_step
from finwhale.gpu.decoder import GpuDecoder
from finwhale.gpu.operations import decode_operations, table_lines
from finwhale.gpu.weights import pack_backbone
from finwhale.model import Numerics
from finwhale.ops import FAST

BANDWIDTH, RATE = 4.3e12, 790e12
RUNS = 3


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def prompt_ids(folder: Path, tokens: int, count: int) -> list[list[int]]:
    """Return `count` prompts of so many tokens, from sources that every Python has."""
    from finwhale.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(folder)
    text = "\n".join(inspect.getsource(module) for module in (argparse, textwrap, statistics, json))
    ids = tokenizer.encode(text * (1 + count * tokens // (len(text) // 5)))
    return [[tokenizer.bos_id, *ids[n * tokens : (n + 1) * tokens - 1]] for n in range(count)]


def states_of(bench: GpuLines, model, device: str, prompts: list[list[int]]):
    """Return states and first tokens, prefilled where the model is; falls back in plain words."""
    try:
        model.to_device(device)
        prefilled(model, prompts[0][:9])
        began = time.monotonic()
        found = [prefilled(model, ids) for ids in prompts]
    except Exception:
        bench.say(prefill=device, failed=traceback.format_exc()[-1500:])
        model.to_device("cpu")
        device, began = "cpu", time.monotonic()
        found = [prefilled(model, ids) for ids in prompts]
    took, tokens = time.monotonic() - began, sum(map(len, prompts))
    bench.say(
        part="prefill", device=device, prompts=len(prompts), tokens=tokens, s=round(took, 3),
        tokens_per_s=round(tokens / took, 1),
    )  # fmt: skip
    return [(state, int(logits.argmax())) for state, logits in found]


def one_batch(bench: GpuLines, decoder: GpuDecoder, states, batch: int, tokens: int, options):
    """Time a batch in a graph and eagerly, from equal states; print both beside the floor."""
    found = {}
    for mode, steps in (("graph", options.steps), ("eager", max(1, options.steps // 4))):
        if mode == "graph" and decoder.device.type != "cuda":
            continue
        decoder.mode = mode
        most = steps * (RUNS + 1)
        names = [decoder.admit(*states[n % len(states)], max_new_tokens=most) for n in range(batch)]
        began = time.monotonic()
        drawn = [decoder.decode(names, steps)]  # compiles and captures
        first_s, times = time.monotonic() - began, []
        for _ in range(RUNS):
            began = time.monotonic()
            drawn.append(decoder.decode(names, steps))
            times.append((time.monotonic() - began) / steps)
        for name in names:
            decoder.release(name)
        found[mode] = torch.cat(drawn, dim=1)
        c = decoder.weights.config
        middle = tokens + steps * (RUNS + 1) // 2
        # Portions of 64 rows read an expert again; the floor counts it once.
        active = [a for a in decoder.step.active if len(a)]
        each = len(active) // c.num_hidden_layers
        groups = [torch.cat(active[n : n + each]) for n in range(0, len(active), each)]
        distinct = [len({x for x in group.tolist() if x >= 0}) for group in groups]
        floor = floor_seconds(decode_costs(c, middle, batch, distinct), BANDWIDTH, RATE)
        median = statistics.median(times)
        bench.say(
            part="decode", mode=mode, batch=batch, prompt_tokens=tokens, steps=steps,
            step_us=round(median * 1e6, 1), runs_us=[round(t * 1e6, 1) for t in times],
            tokens_per_s=round(batch / median, 1),
            tokens_per_s_runs=[round(batch / t, 1) for t in times],
            floor_us=round(floor * 1e6, 2), ratio=round(median / floor, 1),
            distinct_experts=round(statistics.fmean(distinct), 2), first_s=round(first_s, 2),
        )  # fmt: skip
    if len(found) == 2:
        shared = min(x.shape[1] for x in found.values())
        same = found["graph"][:, :shared] == found["eager"][:, :shared]
        bench.say(
            part="graph against eager", batch=batch, prompt_tokens=tokens,
            tokens=same.numel(), equal=int(same.sum()),
        )  # fmt: skip


def device_times(bench: GpuLines, decoder: GpuDecoder, states, batch: int, tokens: int) -> None:
    """Print the device's time of replays alone, and where it goes by kernel."""
    decoder.mode = "graph"
    names = [decoder.admit(*states[n % len(states)], max_new_tokens=40) for n in range(batch)]
    decoder.decode(names, 4)
    bucket = next(size for size in decoder.buckets if size >= batch)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    decoder._arrange(tuple(names), bucket, 16)
    first.record()
    for _ in range(16):
        decoder._run(bucket)
    last.record()
    last.synchronize()
    line = {"part": "replay", "batch": batch, "prompt_tokens": tokens}
    bench.say(**line, us=round(first.elapsed_time(last) * 1e3 / 16, 1))
    decoder.rows.step.zero_()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA]) as profile:
        decoder._run(bucket)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profile.events():
        if str(event.device_type).endswith("CUDA"):
            found[event.name[:40]][0] += 1
            found[event.name[:40]][1] += event.device_time
    top = sorted(found.items(), key=lambda item: -item[1][1])[:16]
    bench.say(
        **line, launches=sum(n for n, _ in found.values()),
        kernels_us={name: [n, round(us, 1)] for name, (n, us) in top},
    )  # fmt: skip
    for name in names:
        decoder.release(name)


def timed_runs(step, fresh, steps: int, device: str, deadline: float) -> list[float]:
    """Return seconds per step of up to RUNS runs behind one that does not count.

    fresh     returns what a run starts from; step runs one step on it
    deadline  no step begins after it; a run that it cuts counts if it is the only one
    """
    times: list[float] = []
    for run in range(RUNS + 1):
        own, done = fresh(), 0
        synchronize(device)
        began = time.monotonic()
        while done < steps and (not done or time.monotonic() < deadline):
            step(own)
            done += 1
        synchronize(device)
        took = (time.monotonic() - began) / done
        if (run and done == steps) or (not times and time.monotonic() >= deadline):
            times.append(took)
        if time.monotonic() >= deadline:
            break
    return times


def peers(
    bench: GpuLines, folder: Path, model, device: str, ids: list[int], options, peer_s: float
) -> None:
    """Time the torch pass on the same device, one sequence, for at most about `peer_s` seconds.

    It decodes one sequence at a time: rows of several are the engine's, which runs on a CPU.
    """
    numerics = {
        "release": lambda: model,
        "bf16 without activation rounding": lambda: (
            load_model(folder, numerics=Numerics(dtype=torch.bfloat16), ops=FAST).model
        ),
    }
    began = time.monotonic()
    for number, (name, make) in enumerate(numerics.items(), 1):
        if number > 1 and time.monotonic() - began > peer_s:
            bench.say(part="peer", peer=name, skipped="--peer-s")
            continue
        with torch.no_grad():
            peer = make().to_device(device)
            state, logits = prefilled(peer, ids)
            first = logits.argmax().view(1, 1).to(device)

            def step(own, peer=peer):
                hidden = forward_step(peer, own["state"], own["token"])[:, -1]
                own["token"] = peer.logits(hidden).argmax(-1, keepdim=True)

            def fresh(state=state, first=first):
                return {"state": copy.deepcopy(state), "token": first}

            deadline = began + peer_s * number / len(numerics)
            times = timed_runs(step, fresh, options.peer_steps, device, deadline)
        median = statistics.median(times)
        bench.say(
            part="peer", peer=f"finwhale's torch pass, {name}, one sequence after another",
            batch=1, prompt_tokens=len(ids), steps=options.peer_steps,
            step_us=round(median * 1e6, 1), runs_us=[round(t * 1e6, 1) for t in times],
            tokens_per_s=round(1 / median, 1),
        )  # fmt: skip


def transformers_peer(bench: GpuLines, model, device: str, tokens: int, options) -> None:
    """Time transformers' V4 of mini's widths in a process of its own, which ends at --peer-s."""
    name = {"part": "peer", "peer": "transformers V4, its own model of these widths, eager"}
    if importlib.util.find_spec("transformers") is None:
        bench.say(**name, skipped="transformers is not installed")
        return
    with tempfile.TemporaryDirectory() as place:
        text = Path(place) / "text.json"
        fields = dataclasses.asdict(model.config.text_config)
        text.write_text(json.dumps(fields, default=str), encoding="utf-8")
        program = Path(__file__).parent / "peers" / "hf_v4_gpu.py"
        batches = json.dumps([b for b in options.batches if b <= options.peer_batch])
        command = [sys.executable, program, text, batches, tokens, options.peer_steps, device]
        child = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            out, errors = child.communicate(timeout=options.peer_s)
            end = child.returncode
        except subprocess.TimeoutExpired:
            child.kill()
            out, errors = child.communicate()
            end = f"cut after {options.peer_s} s"
    for line in out.splitlines():
        if line.startswith("{"):
            bench.say(**name, **json.loads(line))
    if end:
        bench.say(**name, end=end, errors=errors[-500:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--limit-s", type=float, default=90.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--distinct", type=int, default=4, help="prompts that are not copies")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--peer-s", type=float, default=20.0, help="of each peer; 0: none")
    parser.add_argument("--peer-steps", type=int, default=8)
    parser.add_argument("--peer-batch", type=int, default=32, help="largest batch of transformers")
    options = parser.parse_args()
    bench = GpuLines(options.out, options.limit_s)
    bench.say(**provenance(), triton=importlib.metadata.version("triton"))
    folder = options.model or shipped_model()
    model = load_model(folder, numerics=Numerics.release(), ops=FAST).model
    began = time.monotonic()
    weights = pack_backbone(model, options.device)
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    bench.say(
        device=name, torch=torch.__version__, model=folder.name, weights_bytes=weights.num_bytes(),
        pack_s=round(time.monotonic() - began, 2),
    )  # fmt: skip
    shown = False
    for tokens in options.prompts:
        batches = [] if bench.is_late else options.batches
        with reported(bench, part="prefill", prompt_tokens=tokens):
            prompts = prompt_ids(folder, tokens, min(options.distinct, max(options.batches)))
            states = states_of(bench, model, options.device, prompts)
        for batch in batches:
            if bench.is_late:
                bench.say(skipped="late", batch=batch, prompt_tokens=tokens)
                continue
            with reported(bench, part="decode", batch=batch, prompt_tokens=tokens):
                whole = tokens + options.steps * (RUNS + 1)
                decoder = GpuDecoder(
                    weights, max_sequences=batch, num_blocks=batch * -(-whole // 64),
                    capacity_tokens=whole, steps_at_once=options.steps,
                    mode="graph" if options.device == "cuda" else "eager",
                )  # fmt: skip
                bench.say(
                    part="memory", batch=batch, prompt_tokens=tokens, bytes=decoder.num_bytes()
                )
                if not shown:
                    print("\n".join(table_lines(decode_operations(decoder))), flush=True)
                    shown = True
                one_batch(bench, decoder, states, batch, tokens, options)
                if options.device == "cuda" and not options.no_profile and not bench.is_late:
                    with reported(bench, part="replay", batch=batch):
                        device_times(bench, decoder, states, batch, tokens)
            decoder = None
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
        left = min(options.peer_s, bench.left_s)
        if left > 0:
            with reported(bench, part="peer", prompt_tokens=tokens):
                peers(bench, folder, model, options.device, prompts[0], options, left)
        options.peer_s = min(options.peer_s, bench.left_s)
        if options.peer_s > 0:
            with reported(bench, part="peer", prompt_tokens=tokens):
                transformers_peer(bench, model, options.device, tokens, options)
    bench.say(whole_s=round(time.monotonic() - bench.start, 1))
    return 0


@contextlib.contextmanager
def reported(bench: GpuLines, **line):
    """Print what goes wrong in one part and go on with the next."""
    try:
        yield
    except Exception:
        bench.say(**line, failed=traceback.format_exc()[-2000:])


if __name__ == "__main__":
    raise SystemExit(main())
