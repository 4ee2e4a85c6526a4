"""Figures of the prefix cache by tier: their names in `/metrics`, and reading them back.

Tiers are `device` (the engine's pool), `windows` (their snapshots in host memory), and those
behind: `memory`, `disk`; `handed` is what another engine gave with a request. A name that ends with
`_total` counts since the start, seconds and bytes too. No torch here: `finwhale cache stat`
reads a page with it and answers at once. A newcomer's mistake: counting a token twice that was
found in memory; from then on it is on the device, but this hit is the memory's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finwhale.engine.engine import Engine

# Help text and value, or values by tier.
Figures = dict[str, tuple[str, "float | Mapping[str, float]"]]

# Name, help, and the field of `TierStats` of a tier behind the device.
_OF_TIERS = (
    ("cache_loads_total", "Blocks loaded, by tier.", "hits"),
    ("cache_load_misses_total", "Loads that found nothing after all, by tier.", "misses"),
    ("cache_load_bytes_total", "Bytes loaded, by tier.", "loaded_bytes"),
    ("cache_load_seconds_total", "Time in loads, by tier.", "load_s"),
    ("cache_stores_total", "Blocks or window snapshots stored, by tier.", "stored"),
    ("cache_store_bytes_total", "Bytes stored, by tier.", "stored_bytes"),
    ("cache_store_seconds_total", "Time of writing, by tier.", "store_s"),
    ("cache_refused_total", "Turned away: no room, quota, full queue, failed write.", "rejected"),
    ("cache_evictions_total", "Given up for room or quota, by tier.", "evicted"),
    ("cache_damaged_total", "Blocks with wrong bytes or a failed read; each a miss.", "damaged"),
    ("cache_errors_total", "Errors of the system that a tier survived.", "errors"),
    ("cache_held", "Blocks or window snapshots held now, by tier.", "num_blocks"),
    ("cache_held_bytes", "Bytes taken now, by tier.", "num_bytes"),
    ("cache_pending_bytes", "Bytes that wait for the writer, by tier.", "pending_bytes"),
)


def cache_figures(engine: Engine) -> Figures:
    """Return the figures of an engine's cache; from any thread."""
    scheduler, index, block_size = engine.scheduler, engine.index, engine.config.block_size
    counted, windows, tier = scheduler.stats, scheduler.windows.stats(), scheduler.tier
    behind = {} if tier is None else tier.figures()
    values: dict[str, dict[str, float]] = {
        name: {kind: getattr(stats, field) for kind, stats in behind.items()}
        for name, _, field in _OF_TIERS
    }
    values["cache_evictions_total"] |= {
        "device": index.stats.evictions,
        "windows": windows.evicted + windows.expired,
    }
    held_bytes = index.num_cached * engine.pools.layout.block_bytes
    values["cache_held"] |= {"device": index.num_cached, "windows": windows.num_snapshots}
    values["cache_held_bytes"] |= {"device": held_bytes, "windows": windows.num_bytes}
    values["cache_loads_total"]["windows"] = counted.restored_windows
    values["cache_stores_total"]["windows"] = windows.stored
    values["cache_refused_total"]["windows"] = windows.rejected
    hits = {kind: stats.hits * block_size for kind, stats in behind.items()}
    elsewhere = counted.loaded_tokens + counted.handed_tokens
    hits |= {
        "device": max(0, counted.cached_tokens - elsewhere),
        "handed": counted.handed_tokens,
    }
    return {
        "cache_hit_tokens_total": ("Tokens of prompts that were found, by tier.", hits),
        "cache_replayed_tokens_total": (
            "Found tokens whose rows ran again for their windows.",
            counted.replayed_tokens,
        ),
        "cache_tier_errors_total": (
            "Blocks that a tier did not take because it failed, or gave in another layout.",
            counted.tier_errors,
        ),
        "cache_unloaded_tokens_total": (
            "Found tokens that were not loaded, because computing them was cheaper.",
            counted.unloaded_tokens,
        ),
        **{name: (told, values[name]) for name, told, _ in _OF_TIERS},
    }


_LINE = re.compile(r'finwhale_(cache_[a-z_]+)(?:\{tier="([a-z]+)"\})? ([-+.0-9e]+)')


def read_figures(page: str) -> dict[str, dict[str, float]]:
    """Return {name: {tier: value}} of the cache's figures on a page; tier "" if there is none."""
    found: dict[str, dict[str, float]] = {}
    for line in page.splitlines():
        match = _LINE.fullmatch(line)
        if match:
            name, tier, value = match.groups(default="")
            found.setdefault(name, {})[tier] = float(value)
    return found


def figures_table(figures: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return a head and rows of text: a figure a row, a tier a column, `-` where it has none."""
    known = {tier for by_tier in figures.values() for tier in by_tier}
    tiers = [tier for tier in ("device", "windows", "memory", "disk", "handed") if tier in known]
    rows = [["", *tiers]]
    for name, by_tier in figures.items():
        told = name.removeprefix("cache_").removesuffix("_total").replace("_", " ")
        if "" in by_tier:
            rows.append([told, _text(by_tier[""]), *[""] * (len(tiers) - 1)])
        else:
            rows.append([told, *(_text(by_tier[t]) if t in by_tier else "-" for t in tiers)])
    return rows


def _text(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"
