"""A trace through the engine's own cache, without a model: what is found where, what runs again.

Scheduler, pools, prefix index, tiers and windows are those of the engine; only the forward pass is
left out. Lengths of windows and halves are the release's; rows are narrow unless `whole_payload`,
so that hours of traffic fit in minutes, and bytes are counted in records of the release. Requests
run one after the other, each at its time, and writes are committed between them. A newcomer's
mistake: reading the modelled seconds as a measurement; `CostModel` is an assumption.
Source: spec/kv-cache.md sections 1, 6 and 8; docs/cache-traces.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import cast

from finwhale.cache.block_allocator import BlockAllocator
from finwhale.cache.block_bytes import group_bytes
from finwhale.cache.paged_pools import PagedLayout, PagedPools
from finwhale.cache.prefix_index import PrefixIndex
from finwhale.cache.prefix_key import Namespace, tagged_digest
from finwhale.config import TextConfig
from finwhale.config.engine import EngineConfig
from finwhale.config.layers import Half
from finwhale.config.presets import preset
from finwhale.engine.request import SamplingParams
from finwhale.engine.scheduler import Scheduler
from finwhale.engine.sequence import Sequence as Job
from finwhale.evals.cache_traces import Trace, TraceRequest
from finwhale.tiers.chain import TierChain
from finwhale.tiers.disk_segments import ALIGNMENT, record_bytes
from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig
from finwhale.tiers.memory_store import OVERHEAD_BYTES, MemoryStore
from finwhale.tiers.tier import Groups, Retention, Tier, TierStats
from finwhale.tiers.window_pool import WindowPool


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlan:
    """What is kept, and how windows come back.

    prefill         as for the engine
    device_blocks   blocks of the pool; every prompt must fit
    keeps           False: no prefix cache at all
    memory_blocks   room of the memory tier; 0: none
    disk_blocks     room of the disk tier; 0: none
    windows         snapshots of all layers' windows in host memory at most; 0: none
    lifetime_s      of a snapshot without use
    turn_snapshots  also write the encoder's windows to disk at the end of every prompt, one
                    window of every encoder layer: what bounded replay and lifetimes save
    whole_payload   rows of the release's width, so that the disk holds the real bytes
    """

    prefill: str = "exact"
    device_blocks: int = 16_384
    keeps: bool = True
    memory_blocks: int = 0
    disk_blocks: int = 0
    windows: int = 0
    lifetime_s: float = 600.0
    turn_snapshots: bool = False
    whole_payload: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Assumed speeds; seconds of a request are sums of its parts, one after the other.

    encoder_tps, decoder_tps  rows through one half of the layers in a second
    memory_bps, disk_bps      bytes loaded in a second
    disk_load_s               of every block, before its first byte
    decode_tps                new tokens of one sequence in a second
    """

    encoder_tps: float = 16_000.0
    decoder_tps: float = 16_000.0
    memory_bps: float = 20e9
    disk_bps: float = 3e9
    disk_load_s: float = 50e-6
    decode_tps: float = 60.0

    def seconds(self, served: Served, block_bytes: int) -> float:
        """Return the modelled time from the request's start to its last token."""
        disk = served.disk_blocks * (self.disk_load_s + block_bytes / self.disk_bps)
        return (
            served.encoder_rows / self.encoder_tps
            + served.decoder_rows / self.decoder_tps
            + served.memory_blocks * block_bytes / self.memory_bps
            + disk
            + served.output_tokens / self.decode_tps
        )


@dataclass(kw_only=True, slots=True)
class Served:
    """What a request took, or sums of requests.

    cached_tokens    of the prompt that were found, in all tiers
    *_blocks         where they were found, in blocks
    replayed_tokens  of the cached, whose rows ran again
    *_rows           rows through each half, replays among them
    """

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    device_blocks: int = 0
    memory_blocks: int = 0
    disk_blocks: int = 0
    replayed_tokens: int = 0
    encoder_rows: int = 0
    decoder_rows: int = 0
    restored_windows: int = 0

    def __add__(self, other: Served) -> Served:
        names = [item.name for item in fields(self)]
        return Served(**{name: getattr(self, name) + getattr(other, name) for name in names})


class _KeyOnly:
    """A tier that keeps a block's key in place of its content."""

    def __init__(self, tier: Tier, sizes: Sequence[int]) -> None:
        self._tier, self._groups = tier, tuple(bytes(size) for size in sizes)
        for name in ("lookup", "touch", "pin", "unpin", "evict", "stats", "figures", "flush"):
            setattr(self, name, getattr(tier, name))
        self.close = tier.close

    def load(self, key: bytes, *, tenant: str = "", parent: bytes = b""):
        found = self._tier.load(key, tenant=tenant, parent=parent)
        return self._groups if found == (key,) else None

    def store(
        self,
        key: bytes,
        groups: Groups,
        *,
        tokens: tuple[int, int],
        tenant: str = "",
        retention: Retention = Retention.NORMAL,
        parent: bytes = b"",
    ) -> bool:
        del groups
        return self._tier.store(
            key, [key], tokens=tokens, tenant=tenant, retention=retention, parent=parent
        )


@dataclass(kw_only=True)
class CacheReplay:
    """Serves the requests of one trace; see the module.

    folder  of the disk tier, made anew
    model   whose lengths count; the release's
    """

    plan: CachePlan
    block_tokens: int
    folder: Path
    model: TextConfig = field(default_factory=lambda: preset("flash").text_config)
    now_s: float = field(default=0.0, init=False)
    num_snapshots: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.release = PagedLayout(config=self.model, block_size=self.block_tokens, storage="fp4")
        config = self.model
        if not plan.whole_payload:
            # The narrowest rows that the formats have.
            config = replace(config, head_dim=32, index_head_dim=32, qk_rope_head_dim=16)
        layout = PagedLayout(config=config, block_size=self.block_tokens, storage="fp4")
        self.config = EngineConfig(
            block_size=self.block_tokens,
            num_blocks=plan.device_blocks,
            max_sequences=1,
            max_batch_tokens=1 << 30,
            prefill=plan.prefill,
            prefix_cache=plan.keeps,
        )
        self._sizes = group_bytes(layout)
        # A snapshot has W - 1 rows of every layer; the budget counts what the pool would hold.
        rows = (config.sliding_window - 1) * len(layout.specs)
        windows = WindowPool(
            plan.windows * rows * layout.window_bytes, plan.lifetime_s, clock=lambda: self.now_s
        )
        allocator = BlockAllocator(plan.device_blocks)
        name = Namespace(
            weights_digest="",
            layout="",
            numerics="",
            tokenizer="",
            replay_mode=plan.prefill,
        )
        index = PrefixIndex(
            allocator, name, self.block_tokens, max_blocks=None if plan.keeps else 0
        )
        pools = PagedPools(layout, num_blocks=plan.device_blocks, num_slots=1)
        self.tier = self._open_tiers(name)
        self.scheduler = Scheduler(self.config, pools, allocator, index, self.tier, windows)

    @property
    def block_bytes(self) -> int:
        """Global KV of a block in the release."""
        return self.release.block_bytes

    @property
    def snapshot_groups(self) -> list[int]:
        """Bytes of one window of every encoder layer in the release, a group a layer."""
        encoder = [spec for spec in self.release.specs if spec.half is Half.ENCODER]
        return [self.model.sliding_window * self.release.window_bytes] * len(encoder)

    def _open_tiers(self, name: Namespace) -> Tier | None:
        plan, size = self.plan, self._payload_bytes()
        memory = disk = None
        if plan.memory_blocks and plan.keeps:
            memory = MemoryStore(plan.memory_blocks * (size + OVERHEAD_BYTES))
        if plan.disk_blocks and plan.keeps:
            record = record_bytes(self._sizes if plan.whole_payload else (32,))
            longest = max(record, record_bytes(self.snapshot_groups) if plan.turn_snapshots else 0)
            segment = ALIGNMENT + max(longest, 256 * record)
            self.disk = DiskStore(
                DiskStoreConfig(
                    directory=self.folder,
                    namespace=name.digest(),
                    max_bytes=max(3 * segment, plan.disk_blocks * record),
                    segment_bytes=segment,
                    # A whole prompt comes at once.
                    max_pending_bytes=1 << 34,
                )
            )
            disk = self.disk
        tier = TierChain(memory, disk) if memory and disk else memory or disk
        if tier is None or plan.whole_payload:
            return tier
        return cast("Tier", _KeyOnly(tier, self._sizes))

    def _payload_bytes(self) -> int:
        return sum(self._sizes) if self.plan.whole_payload else 32

    def serve(self, request: TraceRequest) -> Served:
        """Return what one request takes, now that its time has come."""
        self.now_s = max(self.now_s, request.at_s)
        scheduler, tokens = self.scheduler, self._tokens(request)
        job = Job(
            request_id=f"{request.conversation} {request.at_s}",
            index=0,
            params=SamplingParams(max_new_tokens=1),
            tokens=tokens,
            num_prompt=len(tokens),
            arrival=0,
            seed=0,
            salt=request.conversation,
        )
        before, tiers = replace(scheduler.stats), self._hits()
        scheduler.queue(job)
        encoder_rows = decoder_rows = 0
        while job.num_left:
            work = scheduler.schedule()
            if not work:
                raise ValueError(
                    f"device_blocks: {self.plan.device_blocks} are too few for a prompt of "
                    f"{len(tokens)} tokens"
                )
            for own, piece in work:
                encoder_rows += piece.span.num_rows
                decoder_rows += piece.decoder_span().num_rows
                scheduler.computed(own, piece.span.stop)
        scheduler.save_windows(job)
        if self.plan.turn_snapshots and self.plan.disk_blocks:
            self._store_snapshot(job)
        scheduler.finish(job)
        if self.tier is not None:
            self.tier.flush()
        after, found = scheduler.stats, self._hits()
        cached = after.cached_tokens - before.cached_tokens
        memory, disk = (found[n] - tiers[n] for n in ("memory", "disk"))
        return Served(
            requests=1,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            cached_tokens=cached,
            device_blocks=cached // self.block_tokens - memory - disk,
            memory_blocks=memory,
            disk_blocks=disk,
            replayed_tokens=after.replayed_tokens - before.replayed_tokens,
            encoder_rows=encoder_rows,
            decoder_rows=decoder_rows,
            restored_windows=after.restored_windows - before.restored_windows,
        )

    def _tokens(self, request: TraceRequest) -> list[int]:
        size, tokens = self.block_tokens, []
        for block in request.blocks:
            tokens += [block] * size
        # What follows the last whole block is nobody else's.
        return tokens + [1 << 40] * (request.input_tokens - len(tokens))

    def _hits(self) -> dict[str, int]:
        figures: Mapping[str, TierStats] = {} if self.tier is None else self.tier.figures()
        return {n: figures[n].hits if n in figures else 0 for n in ("memory", "disk")}

    def _store_snapshot(self, job: Job) -> None:
        end = len(job.keys)
        key = tagged_digest(b"snapshot", job.keys[-1] if job.keys else job.root_key)
        # Content does not matter; without the real width one page stands for it.
        groups = [bytes(size) for size in self.snapshot_groups]
        if not self.plan.whole_payload:
            groups = [key]
        if not self.disk.lookup([key], tenant=job.salt):
            self.num_snapshots += 1
            self.disk.store(key, groups, tokens=(0, max(1, end)), tenant=job.salt)

    def disk_bytes(self) -> dict[str, int]:
        """Return the bytes written to disk, as records of the release: blocks, snapshots."""
        stored = (
            0
            if self.tier is None or "disk" not in self.tier.figures()
            else (self.tier.figures()["disk"].stored)
        )
        return {
            "blocks": (stored - self.num_snapshots) * record_bytes(group_bytes(self.release)),
            "snapshots": self.num_snapshots * record_bytes(self.snapshot_groups),
        }

    def close(self) -> None:
        """Let the tiers go."""
        if self.tier is not None:
            self.tier.close()


def replay(
    trace: Trace,
    plan: CachePlan,
    folder: Path,
    *,
    cost: CostModel | None = None,
    model: TextConfig | None = None,
    on_request: Callable[[int], None] | None = None,
) -> dict[str, object]:
    """Serve a whole trace and return sums, bytes and modelled times by conversation.

    on_request  called with the number of requests served so far
    """
    cost = cost or CostModel()
    options = {} if model is None else {"model": model}
    run = CacheReplay(plan=plan, block_tokens=trace.block_tokens, folder=folder, **options)
    total, jobs = Served(), dict.fromkeys((r.conversation for r in trace.requests), 0.0)
    longest_s = 0.0
    try:
        for number, request in enumerate(trace.requests, start=1):
            served = run.serve(request)
            seconds = cost.seconds(served, run.block_bytes)
            total, longest_s = total + served, max(longest_s, seconds)
            jobs[request.conversation] += seconds
            if on_request is not None:
                on_request(number)
        figures = {} if run.tier is None else dict(run.tier.figures())
        written = run.disk_bytes()
        windows = run.scheduler.windows.stats()
    finally:
        run.close()
    times = sorted(jobs.values())
    return {
        "served": total,
        "tiers": figures,
        "windows": windows,
        "disk_bytes": written,
        "job_seconds": sum(times),
        "job_seconds_median": times[len(times) // 2],
        "request_seconds_most": longest_s,
    }


def snapshot_ratio(trace: Trace, model: TextConfig | None = None) -> float:
    """Return 1 + s / n: bytes with a window snapshot a turn, over bytes of global KV alone.

    s  bytes of one window of every encoder layer, in tokens of global KV: 1,519 in the release
    n  new tokens of a turn, the mean
    """
    text = model or preset("flash").text_config
    layout = PagedLayout(config=text, block_size=64, storage="fp4")
    encoder = sum(spec.half is Half.ENCODER for spec in layout.specs)
    snapshot = encoder * text.sliding_window * layout.window_bytes
    new = trace.new_tokens()
    mean = sum(new) / len(new)
    return 1 + snapshot / layout.bytes_per_token / mean if mean else math.inf
