"""What `finwhale inspect` shows: the layer table and every total, as text or as one object.

It computes nothing: rows come from `build_layer_specs`, totals from `account`. A terminal gets
tables by rich, a pipe gets the same rows as plain columns. Refused: a source that is neither a
preset nor a config. The easy mistake: importing torch here, which costs two seconds.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from finwhale.cache.state_file import StateFacts, describe
from finwhale.config.accounting import PRECISION_WEIGHTS, Accounting, account
from finwhale.config.layers import LayerSpec, PoolUse, RopeKind, build_layer_specs
from finwhale.config.model import ConfigError, ModelConfig, TextConfig
from finwhale.config.presets import PRESETS, preset

LAYER_COLUMNS = ("L", "half", "mode", "ratio", "KV owner", "top-k owner", "pool", "RoPE", "Engram")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A titled table; cells are text, numbers already formatted."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_left: int = 1  # how many first columns align to the left


def resolve_config(source: str) -> tuple[str, ModelConfig]:
    """Return (what was resolved, config) of a preset name, a config.json, or its folder."""
    if source in PRESETS:
        return f"preset {source}", preset(source)
    path = Path(source)
    if not path.exists():
        near = difflib.get_close_matches(source, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{source}: no such preset, file or folder; expected one of {', '.join(PRESETS)}, a "
            f"config.json or a checkpoint folder{hint}"
        )
    file = path / "config.json" if path.is_dir() else path
    return f"file {file}", ModelConfig.from_json(file)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def layer_row(spec: LayerSpec, config: TextConfig) -> tuple[str, ...]:
    """Return the cells of one layer under LAYER_COLUMNS."""
    theta = config.rope_theta if spec.rope is RopeKind.WINDOW else config.compress_rope_theta
    yarn = "" if spec.rope is RopeKind.WINDOW else f" + YaRN x{config.rope_scaling.factor:g}"
    return (
        str(spec.layer_id),
        spec.half.value,
        spec.mode.value,
        str(spec.ratio),
        _or_dash(spec.kv_owner),
        _or_dash(spec.topk_owner),
        "-" if spec.pool is PoolUse.NONE else spec.pool.value,
        f"{theta:g}{yarn}",
        "before" if spec.has_engram else "-",
    )


def _numbers(rows: Iterable[Sequence[Any]]) -> tuple[tuple[str, ...], ...]:
    """Format numbers with thousands separated by commas."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return f"{value:,.2f}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    return tuple(tuple(cell(value) for value in row) for row in rows)


def _parameter_tables(a: Accounting) -> list[Table]:
    parameters = [*a.parameters.items(), ("text backbone", a.backbone_parameters)]
    parameters += [("total", a.total_parameters)]
    phases = sorted({*a.activated_prefill, *a.activated_decode})
    activated = [(p, a.activated_prefill.get(p, 0), a.activated_decode.get(p, 0)) for p in phases]
    sums = (sum(a.activated_prefill.values()), sum(a.activated_decode.values()))
    activated.append(("total", *sums))
    return [
        Table(title="parameters", columns=("part", "parameters"), rows=_numbers(parameters)),
        Table(
            title="activated per token (prefill: encoder and decoder KV path, bounded replay)",
            columns=("part", "prefill", "decode"),
            rows=_numbers(activated),
        ),
        Table(
            title="checkpoint",
            columns=("", "tensors", "bytes"),
            rows=_numbers(
                [
                    ("text", a.num_text_tensors, a.text_bytes),
                    ("all", a.num_checkpoint_tensors, a.checkpoint_bytes),
                ]
            ),
        ),
    ]


def _cache_tables(a: Accounting, config: TextConfig) -> list[Table]:
    owners: list[tuple[Any, ...]] = [
        (
            f"L{o.layer_id}",
            o.ratio,
            o.main_kv_bytes_per_entry,
            o.index_k_bytes_per_entry,
            o.bytes_per_token,
        )
        for o in a.kv_owners
    ]
    owners.append(("sum", "", "", "", a.kv_bytes_per_token))
    f = a.fixed
    longest = config.max_position_embeddings
    fixed = [
        (f"window KV, {config.num_hidden_layers} layers", f.window_bytes),
        ("window KV, encoder alone", f.encoder_window_bytes),
        ("open groups", f.open_group_bytes),
        (f"Engram history, {f.engram_history_tokens} token ids", f.engram_history_bytes),
        ("sum (encoder is part of all layers)", f.total_bytes),
    ]
    fixed = [(name, n, round(n / a.kv_bytes_per_token)) for name, n in fixed]
    more = [
        (f"global KV at {longest:,} tokens, bytes", a.kv_bytes(longest)),
        (f"exact decoder tail, rows out of L{a.exact_tail_after_layer}", a.exact_tail_rows),
    ]
    tables = [
        Table(
            title="global KV",
            columns=("owner", "ratio", "main_kv B/entry", "index_k B/entry", "bytes/token"),
            rows=_numbers(owners),
        ),
        Table(
            title="fixed bytes per sequence",
            columns=("state", "bytes", "in tokens of global KV"),
            rows=_numbers(fixed),
        ),
        Table(title="sequence", columns=("what", "value"), rows=_numbers(more)),
    ]
    if a.derived:
        d = a.derived
        rows = [
            ("V4-Flash, FP4 index", d["v4_flash_kv_bytes_per_token"], d["v4_flash_ratio"]),
            (
                "V4-Flash, FP8 index",
                d["v4_flash_fp8_index_kv_bytes_per_token"],
                d["v4_flash_fp8_index_ratio"],
            ),
            ("DeepSeek-67B", d["deepseek_67b_kv_bytes_per_token"], d["deepseek_67b_ratio"]),
        ]
        tables.append(
            Table(
                title="derived, not measured: earlier models beside this one",
                columns=("model", "KV bytes/token", "times ours"),
                rows=_numbers(rows),
            )
        )
    return tables


def _flop_table(a: Accounting) -> Table:
    weights = ", ".join(f"{name} {weight:g}" for name, weight in PRECISION_WEIGHTS.items())
    rows = [
        (
            f.phase,
            f.context_tokens,
            f.index_keys_full,
            f.index_keys_pool,
            f"{f.raw / 1e9:,.3f}",
            f"{f.weighted / 1e9:,.3f}",
        )
        for f in a.flops
    ]
    return Table(
        title=f"GFLOP per token by context (weighted: {weights})",
        columns=("phase", "context", "keys scored, full", "pool", "raw", "weighted"),
        rows=_numbers(rows),
    )


def tables_of(config: ModelConfig) -> list[Table]:
    """Return the tables in printing order, the layer table first."""
    text, a = config.text_config, account(config)
    layers = Table(
        title="layers",
        columns=LAYER_COLUMNS,
        rows=tuple(layer_row(spec, text) for spec in build_layer_specs(text)),
        num_left=len(LAYER_COLUMNS),
    )
    return [layers, *_parameter_tables(a), *_cache_tables(a, text), _flop_table(a)]


def to_json(resolved: str, config: ModelConfig) -> dict[str, Any]:
    """Return the configuration, the layer table and every total as one JSON object."""
    layers = [
        {
            "layer_id": s.layer_id,
            "half": s.half.value,
            "mode": s.mode.value,
            "ratio": s.ratio,
            "kv_owner": s.kv_owner,
            "topk_owner": s.topk_owner,
            "pool": s.pool.value,
            "rope": s.rope.value,
            "engram_index": s.engram_index,
        }
        for s in build_layer_specs(config.text_config)
    ]
    return {
        "resolved": resolved,
        "layers": layers,
        "accounting": account(config).to_json(),
        "config": config.to_json(),
    }


def write_plain(tables: Iterable[Table], out: TextIO) -> None:
    """Write columns aligned by blanks, for pipes and files."""
    for table in tables:
        widths = [
            max(len(row[i]) for row in (table.columns, *table.rows))
            for i in range(len(table.columns))
        ]
        out.write(f"\n{table.title}\n")
        for row in (table.columns, *table.rows):
            cells = (
                text.ljust(width) if i < table.num_left else text.rjust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            out.write("  ".join(cells).rstrip() + "\n")


def write_rich(tables: Iterable[Table]) -> None:
    """Write the same rows as terminal tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    for table in tables:
        shown = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_justify="left")
        for i, name in enumerate(table.columns):
            justify = "left" if i < table.num_left else "right"
            shown.add_column(name, justify=justify, no_wrap=True)
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)


def show(resolved: str, config: ModelConfig, out: TextIO | None = None) -> None:
    """Print everything about `config` to `out`, standard output by default."""
    out = out or sys.stdout
    out.write(f"resolved: {resolved}\n")
    out.flush()
    if out.isatty():
        write_rich(tables_of(config))
    else:
        write_plain(tables_of(config), out)


def state_table(facts: StateFacts) -> Table:
    """Return one row per stream of a stored state."""
    rows = tuple(
        (
            part.kind,
            "-" if part.layer is None else f"L{part.layer}",
            f"{part.rows:,}",
            f"{part.first:,} to {part.stop - 1:,}",
            f"{part.num_bytes:,}",
        )
        for part in facts.parts
    )
    title = f"state after {facts.num_tokens:,} tokens"
    return Table(
        title=title,
        columns=("part", "layer", "rows", "positions, or entries", "bytes in this file"),
        rows=rows,
        num_left=2,
    )


def show_state(path: Path, *, as_json: bool, out: TextIO | None = None) -> None:
    """Print what the state file of a generation holds."""
    out, facts = out or sys.stdout, describe(path)
    if as_json:
        out.write(json.dumps(asdict(facts), indent=1) + "\n")
        return
    starts = ", ".join(f"{half} {start:,}" for half, start in facts.window_start.items())
    out.write(
        f"resolved: state {path}\n"
        f"numerics: {facts.numerics}; max_rollback {facts.max_rollback}\n"
        f"first position a window may see: {starts}\n\n"
    )
    out.flush()
    table = [state_table(facts)]
    write_rich(table) if out.isatty() else write_plain(table, out)
