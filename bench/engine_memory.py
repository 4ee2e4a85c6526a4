"""Resident memory while 64K tokens fill an engine, against the arithmetic of its layout.

    python bench/engine_memory.py [--engine unit] [--pools mini flash] [--tokens 65536]

Two ways, as the kernel counts pages (/proc/self/smaps_rollup; statm lags by up to 32 pages per
CPU and thread): a whole engine that serves long prompts with
nothing shared, and the pools of a geometry alone, written block by block, for models that are too
slow or too large to run here. Each has a process of its own: memory that an earlier one gave back
would be filled first and read as no growth. Storages are counted as well. The goal is within 2 %.
An engine also keeps its prefix index in Python objects (keys and packed ids per block); `index` is
that part, traced on an index alone, and `off` compares growth with arithmetic and index together.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
import tracemalloc
from pathlib import Path

import torch
from engine import Prompts, greedy, print_table, random_model
from record import write_result

from finwhale.cache.block_allocator import BlockAllocator
from finwhale.cache.paged_pools import PagedLayout, PagedPools
from finwhale.cache.prefix_index import Namespace, PrefixIndex
from finwhale.config import preset
from finwhale.config.accounting import account
from finwhale.engine import Engine, EngineConfig

STEPS_OF_GROWTH = 8
GOAL = 0.02


def resident_bytes() -> int:
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("smaps_rollup: no line Rss; needs Linux 4.14 or later")


def index_bytes(num_tokens: int, block_size: int) -> float:
    """Return the bytes per token of a full prefix index, traced in Python's allocator."""
    allocator = BlockAllocator(num_tokens // block_size)
    namespace = Namespace(
        weights_digest="", layout="", numerics="", tokenizer="", replay_mode="exact"
    )
    index = PrefixIndex(allocator, namespace, block_size)
    tracemalloc.start()
    key = index.root_key()
    for n in range(allocator.num_blocks):
        block = allocator.allocate()
        inserted = index.insert(key, range(n, n + block_size), block)
        allocator.release(block)
        assert inserted is not None
        key = inserted.key
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return traced / num_tokens


def judged(
    name: str,
    way: str,
    layout: PagedLayout,
    grown: list[tuple[int, int]],
    pools: PagedPools,
    index: float = 0.0,
) -> dict:
    """Return the row of one measurement.

    grown  (tokens, resident bytes), first to last
    index  bytes per token of the prefix index beside the pools
    """
    tokens, grew = grown[-1][0] - grown[0][0], grown[-1][1] - grown[0][1]
    size = pools.num_bytes()
    stored = (size["main"] + size["index_k"]) / (pools.num_blocks * layout.block_size)
    off = grew / tokens / (layout.bytes_per_token + index) - 1
    return {
        "model": name,
        "way": way,
        "tokens": tokens,
        "arithmetic": round(layout.bytes_per_token, 3),
        "storages": round(stored, 3),
        "index": round(index, 2),
        "resident": round(grew / tokens, 3),
        "off": round(off, 4),
        "is_within_goal": abs(off) <= GOAL,
    }


def through_pools(name: str, num_tokens: int, block_size: int) -> dict:
    """Fill the pools of a geometry alone, block by block."""
    torch.set_num_threads(1)
    config = preset(name)
    layout = PagedLayout(config=config.text_config, block_size=block_size, storage="fp4")
    blocks = num_tokens // block_size
    pools = PagedPools(layout, num_blocks=blocks, num_slots=1)
    grown = []
    for block in range(blocks):
        for spec in layout.owners:
            rows = pools.block_rows(spec, block)
            pools.main[spec.layer_id][rows] = block % 251
            pools.index_k[spec.layer_id][rows] = block % 251
        # The first part loads the code that fills, so growth is counted behind it.
        if (block + 1) % (blocks // STEPS_OF_GROWTH) == 0:
            grown.append(((block + 1) * block_size, resident_bytes()))
    row = judged(name, "pools", layout, grown, pools)
    row["accounted"] = account(config).kv_bytes_per_token
    return row


def through_engine(name: str, num_tokens: int, block_size: int, prompt_tokens: int) -> dict:
    """Serve prompts that share nothing until `num_tokens` tokens lie in the cache."""
    torch.set_num_threads(1)
    model = random_model(name)
    settings = EngineConfig(
        block_size=block_size,
        num_blocks=num_tokens // block_size + 1,
        max_sequences=1,
        # Windows saved at block ends are another pool, and would be counted in.
        snapshot_bytes=0,
    )
    engine = Engine(model, settings)
    prompts, began = Prompts(model), time.perf_counter()

    def fill(tokens: int) -> None:
        engine.add(prompts.draw(tokens), greedy(1))
        while engine.has_work:
            engine.step()

    # The first prompt brings what any pass needs: compiled code and buffers of one size.
    fill(prompt_tokens)
    engine.index.clear()
    cached = lambda: engine.index.num_cached * block_size  # noqa: E731
    # Freed blocks are taken again first, so growth is counted from where new ones begin.
    fill(prompt_tokens)
    grown = [(cached(), resident_bytes())]
    while cached() + prompt_tokens <= num_tokens:
        fill(prompt_tokens)
        grown.append((cached(), resident_bytes()))
    index = index_bytes(num_tokens, block_size)
    way = f"engine, {engine.kernels}"
    row = judged(name, way, engine.pools.layout, grown, engine.pools, index)
    row["accounted"] = account(model.config).kv_bytes_per_token
    print(f"{name}: {grown[-1][0]} tokens in {time.perf_counter() - began:.0f} s", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", nargs="*", default=["unit"])
    parser.add_argument("--pools", nargs="*", default=["nano", "mini", "flash"])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Arrays of 64 KiB and more get pages of their own, never memory that was touched before.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    sizes = args.tokens, args.block_size
    calls = [(through_pools, (name, *sizes)) for name in args.pools]
    calls += [(through_engine, (name, *sizes, args.prompt_tokens)) for name in args.engine]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        rows = [fresh.apply(function, sizes) for function, sizes in calls]
    print_table("bytes per token of context", rows)
    print("written to", write_result("engine_memory", {"rows": rows}).name)
    return 0 if all(row["is_within_goal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
