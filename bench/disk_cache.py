"""What the disk tier saves and costs: time to the first token, MB/s, decoding beside storing.

    python bench/disk_cache.py first [--contexts 8192 32768] [--preset P] [--modes exact bounded]
    python bench/disk_cache.py device [--blocks 8192]
    python bench/disk_cache.py decode [--repeats 7]
    python bench/disk_cache.py hand_over [--contexts 1024 1025 8192 8193]

first   A prompt of random ids through an engine that stores its blocks; the engine goes, a new
        one opens the same directory, the files' pages are dropped from the system's memory (opening
        scans the open segment), and it gets the same prompt. Time from `add` to the first token of
        both. Weights are in memory and kernels compiled in both cases. In mode exact the two
        tokens must be equal.
device  The store alone: blocks of 64 tokens of the release (56,960 bytes) written until they are
        durable, and loaded with their pages in memory and without.
decode  Sequences decode with and without a store, in turn; the difference of medians, by the wall
        and by the processor time of this process, its writer thread included.
hand_over  An engine reads a prompt and exports it, another takes it and draws the next token.

Dropping pages: fsync, then posix_fadvise(DONTNEED), file by file; `pages_left` is what mincore
still finds, and `read_bytes` what the process then really fetched from the device.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import mmap
import os
import shutil
import statistics
import sys
from pathlib import Path

import torch
from engine import Clock, Prompts, decode_steps, greedy, random_model
from record import write_result

from finwhale.checkpoint.load import load_model
from finwhale.engine import Engine, EngineConfig
from finwhale.model import Backbone, Numerics
from finwhale.ops import FAST
from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig

MODEL = Path(__file__).resolve().parent.parent / "models" / "finwhale-mini"
SUFFIX = 33
BLOCK = 64
# 32 entries of three owners and 64 of one: 288 and 68 bytes each.
RELEASE_GROUPS = (32 * 288, 32 * 68) * 3 + (64 * 288, 64 * 68)


def open_tier_in(directory: Path):
    """Return what opens a store in `directory` for an engine."""

    def open_tier(namespace: bytes, sizes: tuple[int, ...]) -> DiskStore:
        return DiskStore(
            DiskStoreConfig(
                directory=directory, namespace=namespace, max_bytes=4 << 30, group_bytes=sizes
            )
        )

    return open_tier


def drop_pages(directory: Path) -> int:
    """Write the files of a directory out and drop their pages; return how many stayed."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return sum(_resident_pages(path) for path in directory.iterdir())


def _resident_pages(path: Path) -> int:
    size = path.stat().st_size
    if not size:
        return 0
    # A private mapping, so that its address may be taken; nothing is written to it.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        view = (ctypes.c_char * size).from_buffer(mapped)
        seen = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), seen)
        del view
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in seen)


def fetched_bytes() -> int:
    """Return what this process has made the devices read so far."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError("no read_bytes in this system's /proc")


def first_token(engine: Engine, prompt: list[int], told: str) -> tuple[Clock, list]:
    """Return the time to the first token, and the token."""
    began = Clock.now()
    engine.add(prompt, greedy(1), request_id="a")
    results = []
    while engine.has_work:
        results += [result for output in engine.step() for result in output.new]
        running = engine.scheduler.running
        if running and sys.stderr.isatty():
            sys.stderr.write(f"\r{told} {running[0].num_computed:,}/{len(prompt):,} ")
    return Clock.now().since(began), results


def first(model: Backbone, name: str, tokens: int, mode: str, work: Path, repeats: int) -> dict:
    """Time a cold start of `tokens` and the same through the disk."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    prompt = Prompts(model).draw(tokens + SUFFIX)
    settings = EngineConfig(num_blocks=len(prompt) // BLOCK + 4, max_sequences=1, prefill=mode)
    warm = Engine(model, settings)
    first_token(warm, prompt[:300], "warm")
    cold_engine = Engine(model, settings, open_tier=open_tier_in(work / "cache"))
    cold, reply = first_token(cold_engine, prompt, f"{name} {mode} cold")
    cold_engine.close()
    stored_bytes = sum(path.stat().st_size for path in (work / "cache").glob("segment-*"))
    del cold_engine
    hits, left, fetched = [], 0, 0
    for _ in range(repeats):
        engine = Engine(model, settings, open_tier=open_tier_in(work / "cache"))
        left = drop_pages(work / "cache")
        before = fetched_bytes()
        took, again = first_token(engine, prompt, f"{name} {mode} hit")
        fetched = fetched_bytes() - before
        stats = engine.scheduler.stats
        if mode == "exact" and again != reply:
            raise SystemExit(f"the hit gave {again}, the cold start {reply}")
        loaded, replayed = stats.loaded_tokens, stats.replayed_tokens
        engine.close()
        hits.append(took)
    best = min(hits, key=lambda took: took.wall)
    row = {
        "part": "first",
        "model": name,
        "prefill": mode,
        "prompt_tokens": len(prompt),
        "cold_s": round(cold.wall, 3),
        "cold_cpu_s": round(cold.cpu, 3),
        "hit_s": [round(took.wall, 3) for took in hits],
        "hit_cpu_s": [round(took.cpu, 3) for took in hits],
        "cold_over_hit": round(cold.wall / statistics.median(t.wall for t in hits), 1),
        "cold_over_best_hit": round(cold.wall / best.wall, 1),
        "cold_over_hit_cpu": round(cold.cpu / statistics.median(t.cpu for t in hits), 1),
        "loaded_tokens": loaded,
        "replayed_tokens": replayed,
        "segment_bytes": stored_bytes,
        "pages_left": left,
        "read_bytes": fetched,
    }
    shutil.rmtree(work)
    return row


def device(num_blocks: int, work: Path) -> dict:
    """Store and load blocks of the release's size; MB are 10^6 bytes of payload."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    payload = os.urandom(1 << 20)
    keys = [hashlib.sha256(f"{n}".encode()).digest() for n in range(num_blocks)]

    def groups(n: int) -> list[bytes]:
        return [payload[n % 977 : n % 977 + size] for size in RELEASE_GROUPS]

    total = num_blocks * sum(RELEASE_GROUPS) / 1e6
    open_tier = open_tier_in(work / "cache")
    store = open_tier(bytes(32), RELEASE_GROUPS)
    began = Clock.now()
    for n, key in enumerate(keys):
        while not store.store(key, groups(n), tokens=(64 * n, 64 * n + 64)):
            store.flush()
    store.flush()
    written = Clock.now().since(began)
    stats = store.stats()
    assert stats.stored == num_blocks

    def load_all() -> Clock:
        began = Clock.now()
        for key in keys:
            assert store.load(key) is not None
        return Clock.now().since(began)

    load_all()
    warm = load_all()
    store.close()
    drop_pages(work / "cache")
    began = Clock.now()
    store = open_tier(bytes(32), RELEASE_GROUPS)
    opened = Clock.now().since(began)
    left = drop_pages(work / "cache")
    before = fetched_bytes()
    cold = load_all()
    fetched = fetched_bytes() - before
    store.close()
    shutil.rmtree(work)
    return {
        "part": "device",
        "blocks": num_blocks,
        "payload_mb": round(total, 1),
        "store_mb_per_s": round(total / written.wall, 1),
        "store_cpu_ms_per_block": round(1e3 * written.cpu / num_blocks, 3),
        "load_in_memory_mb_per_s": round(total / warm.wall, 1),
        "load_from_device_mb_per_s": round(total / cold.wall, 1),
        "open_s": round(opened.wall, 2),
        "pages_left": left,
        "read_mb": round(fetched / 1e6, 1),
    }


def decode(
    model: Backbone, name: str, repeats: int, sequences: int, new_tokens: int, work: Path
) -> dict:
    """Decode with a store and without, in turn, on prompts that neither has seen."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    settings = EngineConfig(num_blocks=1024, max_sequences=sequences)
    engines = {
        "plain": Engine(model, settings),
        "storing": Engine(model, settings, open_tier=open_tier_in(work / "cache")),
    }
    prompts, told = Prompts(model), {kind: [] for kind in engines}
    for n in range(repeats + 1):
        batch = [prompts.draw(BLOCK) for _ in range(sequences)]
        order = list(engines.items())
        for kind, engine in order if n % 2 else reversed(order):
            began = Clock.now()
            steps = decode_steps(engine, batch, new_tokens)
            if engine.tier:
                engine.tier.flush()
            all_of_it = Clock.now().since(began)
            if n:  # the first round compiles and fills caches
                # Whole runs, so that work of the writer between steps counts.
                told[kind].append((all_of_it, statistics.median(s.wall for s in steps)))
    stored = engines["storing"].tier.stats()
    for engine in engines.values():
        engine.close()
    shutil.rmtree(work)

    def figures(kind: str) -> dict[str, float]:
        walls = [clock.wall for clock, _ in told[kind]]
        cpus = [clock.cpu for clock, _ in told[kind]]
        return {
            "wall_s": round(statistics.median(walls), 3),
            "best_wall_s": round(min(walls), 3),
            "cpu_s": round(statistics.median(cpus), 3),
            "best_cpu_s": round(min(cpus), 3),
            "step_ms": round(1e3 * statistics.median(step for _, step in told[kind]), 3),
        }

    plain, storing = figures("plain"), figures("storing")
    pairs = zip(told["plain"], told["storing"], strict=True)
    ratios = [with_it.cpu / without.cpu for (without, _), (with_it, _) in pairs]
    return {
        "part": "decode",
        "model": name,
        "sequences": sequences,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "plain": plain,
        "storing": storing,
        "stored_blocks": stored.stored,
        "loss_percent": {key: round(100 * (storing[key] / plain[key] - 1), 2) for key in plain},
        "cpu_ratio_of_pairs": [round(ratio, 4) for ratio in sorted(ratios)],
    }


def hand_over(model: Backbone, name: str, tokens: int, mode: str) -> dict:
    """Hand a prompt's global KV from one engine to another; return bytes and seconds."""
    prompt = Prompts(model).draw(tokens)
    settings = EngineConfig(num_blocks=tokens // BLOCK + 4, max_sequences=1, prefill=mode)
    one, other = Engine(model, settings), Engine(model, settings)
    for engine in (one, other):
        first_token(engine, prompt[-300:], "warm")
    one.add(prompt, greedy(3), request_id="a")
    began, new = Clock.now(), []
    while not new:
        new = [result for output in one.step() for result in output.new]
    cold = Clock.now().since(began)
    began = Clock.now()
    blob = one.export("a")
    exported = Clock.now().since(began)
    while one.has_work:
        new += [result for output in one.step() for result in output.new]
    began, found = Clock.now(), []
    other.add([*prompt, new[0].token], greedy(2), hand_over=blob)
    taken = Clock.now().since(began)
    while not found:
        found = [result for output in other.step() for result in output.new]
    went_on = Clock.now().since(began)
    if mode == "exact" and found[0] != new[1]:
        raise SystemExit(f"handed over {found[0]}, here {new[1]}")
    return {
        "part": "hand_over",
        "model": name,
        "prefill": mode,
        "tokens": tokens,
        "bytes": len(blob),
        "bytes_per_token": round(len(blob) / tokens, 2),
        "cold_cpu_s": round(cold.cpu, 3),
        "export_s": round(exported.wall, 4),
        "check_and_add_s": round(taken.wall, 4),
        "next_token_cpu_s": round(went_on.cpu, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("part", choices=("first", "device", "decode", "hand_over"))
    parser.add_argument("--contexts", type=int, nargs="+")
    parser.add_argument("--modes", nargs="+", default=["exact", "bounded"])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--preset", help="random weights of a preset instead of --model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--work", type=Path, default=Path(f"build/disk_cache-{os.getpid()}"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part == "device":
        report(device(args.blocks, args.work))
        return
    if args.preset:
        longest = max(args.contexts or [0]) + 2 * SUFFIX
        model, name = random_model(args.preset, longest), args.preset
    else:
        model = load_model(args.model, numerics=Numerics(), ops=FAST).model
        name = args.model.resolve().name
    if args.part == "decode":
        report(decode(model, name, args.repeats, args.sequences, args.new_tokens, args.work))
        return
    usual = {"first": [8192, 32768], "hand_over": [1024, 1025, 8192, 8193]}[args.part]
    for tokens in args.contexts or usual:
        for mode in args.modes:
            if args.part == "hand_over":
                report(hand_over(model, name, tokens, mode))
                continue
            report(first(model, name, tokens, mode, args.work, args.repeats))


def report(row: dict) -> None:
    write_result("disk_cache", row)
    print(row, flush=True)


if __name__ == "__main__":
    main()
