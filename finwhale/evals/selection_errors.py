"""What the selections of a trained model lose, by owner, layer and length of the context.

Three measures on sampled queries of held-out rows: attention mass that the deployed top-k drops
(beside the least that any k entries drop), best-scored entries that lie outside the candidate
pool, and how far a Reuse layer's own best entries are from the selection it is given. The pass is
the deployed one; no [T, M] array is made. Refused: a selection that training widened or explored.
The easy mistake: a share of the entries' mass alone. A layer that looks at its window loses
little by any selection, so `lost` is a share of all attention, window and sink among it.
Source: spec/backbone.md sections 4.5 and 5; spec/training.md II.1.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from finwhale.config import LayerSpec, PoolUse
from finwhale.data.packing import NO_TARGET, PackedRows
from finwhale.model import Backbone
from finwhale.model.attention import Attention
from finwhale.model.layers import ForwardState, rounded
from finwhale.model.selection_plan import SelectionPlan
from finwhale.ops.index import pool_mask, select_topk
from finwhale.train.index_objective import full_row_mass
from finwhale.train.loss import Batch

# Upper ends of the buckets, in multiples of what the selection or the pool holds.
BUCKETS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
MASS_LOST, OUTSIDE_POOL, STALENESS = "mass_lost", "outside_pool", "staleness"
# Bytes of the products of one slice of sampled queries.
_SLICE_BYTES = 1 << 28
# Tokens of one forward pass on a CPU.
_PASS_TOKENS = 4096


class SelectionErrorsError(ValueError):
    """A measurement that cannot be made; the message names the field and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionRecord:
    """Means over the queries of one bucket: low < visible entries / capacity <= high.

    measure   `mass_lost` (one selection, all its layers), `outside_pool`, or `staleness` (a layer)
    owner     layer that selects; `layer` is the layer that reads, None for a whole group
    capacity  entries of the top-k, or of the pool for `outside_pool`
    queries   queries in the bucket; `values` is empty where there are none

    values of mass_lost: `lost` and `oracle_lost`, shares of all attention of the group that the
    selection, and the k entries of most mass, drop; `entries`, the share on all visible entries.
    values of outside_pool: `outside`, the share of the k best-scored entries that the pool lacks;
    `mass_outside`, the share of all attention on entries that it lacks.
    values of staleness: `overlap`, the share of the layer's k entries of most mass that are
    selected; `lost` and `best_lost`, shares of its attention that the selection and its own best
    k drop.
    """

    measure: str
    owner: int
    layer: int | None
    low: float
    high: float
    capacity: int
    queries: int
    values: dict[str, float]


def dropped_share(mass: Tensor, selection: Tensor, total: float) -> Tensor:
    """Return sum of `mass` outside the selection / total, [B, R]; exactly 0 if nothing is outside.

    mass       [B, R, M] fp32, 0 on entries that are not visible
    selection  [B, R, K] int64 rows of entries, -1 empty
    total      what all attention of the row sums to: heads times layers
    """
    return mass.masked_fill(membership(selection, mass.shape[-1]), 0.0).sum(-1) / total


def membership(selection: Tensor, num_entries: int) -> Tensor:
    """Return [B, R, M] bool: the entries that `selection` [B, R, K] int64 (-1 empty) names."""
    inside = torch.zeros(
        *selection.shape[:-1], num_entries + 1, dtype=torch.bool, device=selection.device
    )
    inside.scatter_(-1, torch.where(selection < 0, num_entries, selection), True)
    return inside[..., :num_entries]


def best_entries(mass: Tensor, visible: Tensor, k: int) -> Tensor:
    """Return the k visible entries of most mass, [B, R, min(k, M)] int64, -1 where none is left.

    mass [B, R, M] fp32; visible [B, R, M] bool. Ties go to the lowest row, as in the deployed rule.
    """
    return select_topk(mass.masked_fill(~visible, -torch.inf), k)


@dataclass(kw_only=True, slots=True)
class _Group:
    """What one selection has gathered of the sampled queries.

    visible    [B, R, M] bool; counts [B, R] of them; topk [B, R, K]
    mass       [B, R, M] fp32, summed over the `layers` seen so far
    beyond     [B, R, M] bool visible entries that the pool lacks, and `outside` [B, R] the share of
               the best-scored that it lacks; None where no pool is searched
    """

    visible: Tensor
    counts: Tensor
    topk: Tensor
    mass: Tensor
    layers: int = 0
    beyond: Tensor | None = None
    outside: Tensor | None = None


@dataclass(kw_only=True, slots=True)
class MeasuredState(ForwardState):
    """The shared state of a pass that measures each layer as soon as the layer has its inputs.

    It listens to what the layers hand to `note` and `window` anyway; nothing of the pass changes.

    model   whose pass this is
    rows    [B, R] int64 sampled query rows
    found   (measure, owner, layer) -> (visible entries [B, R], values by name, each [B, R])
    """

    model: Backbone
    rows: Tensor
    found: dict[tuple[str, int, int | None], tuple[Tensor, dict[str, Tensor]]] = field(
        default_factory=dict
    )
    _noted: dict[str, Tensor] = field(default_factory=dict)
    _measured: dict[int, _Group] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Backbone, batch: Batch, rows: Tensor, sliced: bool) -> MeasuredState:
        """Return the empty state of a pass over `batch`; `sliced` as in `selection_errors`."""
        plain = model.forward_state(batch.ids, packing=batch.packing)
        plain.plan = None if sliced else SelectionPlan(uses_pool=True)
        shared = {f.name: getattr(plain, f.name) for f in fields(plain)}
        return cls(**shared, model=model, rows=rows)

    def note(self, name: str, value: Tensor) -> None:
        """Keep what `window` needs until the layer is measured: no copy is made."""
        kind, _, _ = name.rpartition(".")
        if kind == "attn_in":
            self._noted[kind] = value.detach()
        elif kind in ("index_q_raw", "index_weights"):
            self._noted[kind] = self._picked(value.detach())

    def window(self, layer: int, rows: Tensor) -> Tensor:
        """Return the window rows [B, T, D]; by now the layer's entries and selection exist."""
        spec = self.model.specs[layer]
        if spec.topk_owner is not None and spec.kv_owner is not None:
            with torch.no_grad():
                self._measure(spec, spec.topk_owner, spec.kv_owner, rows)
        return rows

    def _picked(self, x: Tensor) -> Tensor:
        """Return the sampled rows of x [B, T, ...], [B, R, ...]."""
        return x[torch.arange(len(x), device=x.device).unsqueeze(-1), self.rows]

    def _measure(self, spec: LayerSpec, owner: int, kv_owner: int, window_kv: Tensor) -> None:
        config = self.model.config.text_config
        if owner not in self._measured:
            self._measured[owner] = self._begun(spec, owner, kv_owner)
        group = self._measured[owner]
        mass = self._mass(spec, self.entries[kv_owner], window_kv, group.visible)
        heads = config.num_attention_heads
        # The owner's own layer is measured too: what a layer loses by its own indexer.
        best = best_entries(mass, group.visible, config.index_topk)
        shared = (membership(best, mass.shape[-1]) & membership(group.topk, mass.shape[-1])).sum(-1)
        self.found[STALENESS, owner, spec.layer_id] = (
            group.counts,
            {
                "overlap": shared / (best >= 0).sum(-1).clamp_min(1),
                "lost": dropped_share(mass, group.topk, heads),
                "best_lost": dropped_share(mass, best, heads),
            },
        )
        group.mass = group.mass + mass
        group.layers += 1

    def _begun(self, spec: LayerSpec, owner: int, kv_owner: int) -> _Group:
        """Return the group of `owner`, whose own layer `spec` is the first to read it."""
        entries = torch.arange(self.entries[kv_owner].shape[1], device=self.rows.device)
        groups = self.groups(spec)
        first, counts = self._picked(groups.first), self._picked(groups.visible)
        own = entries - first.unsqueeze(-1)  # [B, R, M]
        visible = (own >= 0) & (own < counts.unsqueeze(-1))
        group = _Group(
            visible=visible,
            counts=counts,
            topk=self._picked(self.topk[owner]),
            mass=torch.zeros(visible.shape, device=visible.device),
        )
        if spec.pool is PoolUse.SEARCHES and self.pool_blocks is not None:
            blocks = self._picked(self.pool_blocks)
            self._look_outside(group, self.index_keys[kv_owner], blocks, first, own)
        return group

    def _look_outside(
        self, group: _Group, keys: Tensor, blocks: Tensor, first: Tensor, own: Tensor
    ) -> None:
        """Compare the best of all visible entries with the pool's, for one Reindex owner."""
        config, parts = self.model.config.text_config, self.model.parts
        q = rounded(parts, parts.ops.round_index, self._noted["index_q_raw"])
        weights = self._noted["index_weights"]
        scores = [
            parts.ops.visible_index_scores(
                *(x[:, part].contiguous() for x in (q, weights)),
                keys,
                *(x[:, part].contiguous() for x in (first, group.counts)),
            )
            for part in self._parts(keys.shape[1] * config.index_n_heads)
        ]
        wanted = select_topk(torch.cat(scores, dim=1), config.index_topk)
        total = own.shape[-1]
        inside = pool_mask(blocks, total, config.candidate_block_size)
        # Blocks count from the document's start, entries from the row's.
        inside = inside.gather(-1, own.clamp(0, max(0, total - 1)))
        group.beyond = group.visible & ~inside
        missed = (membership(wanted, total) & group.beyond).sum(-1)
        group.outside = missed / (wanted >= 0).sum(-1).clamp_min(1)

    def _mass(self, spec: LayerSpec, entries: Tensor, window_kv: Tensor, visible: Tensor) -> Tensor:
        """Return this layer's full-row mass [B, R, M] on the visible entries, summed over heads."""
        config, ops = self.model.config.text_config, self.model.parts.ops
        attn = cast("Attention", self.model.layers[spec.layer_id].attn)
        # All rows again, in the shapes the layer has: compiled operations know them already.
        q = attn.wq_b(attn.q_norm(attn.wq_a(self._noted["attn_in"])))
        q = ops.apply_rope(
            q.unflatten(-1, (config.num_attention_heads, config.head_dim)),
            self.token_rotation(spec),
        )
        reach = self.reach(spec)
        width = (entries.shape[1] + window_kv.shape[1]) * config.num_attention_heads
        masses = [
            full_row_mass(
                q, window_kv, entries, attn.attn_sink, reach, config.sliding_window,
                self.rows[:, part], visible[:, part],
            )
            for part in self._parts(width)
        ]  # fmt: skip
        return torch.cat(masses, dim=1)

    def _parts(self, width: int) -> Iterator[slice]:
        """Yield slices of the sampled queries; each query makes `width` fp32 products."""
        batch, count = self.rows.shape
        step = max(1, _SLICE_BYTES // (4 * max(1, width) * batch))
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def finish(self) -> None:
        """Add what is known of whole groups, after the pass."""
        config = self.model.config.text_config
        for owner, group in self._measured.items():
            total = group.layers * config.num_attention_heads
            best = best_entries(group.mass, group.visible, config.index_topk)
            self.found[MASS_LOST, owner, None] = (
                group.counts,
                {
                    "lost": dropped_share(group.mass, group.topk, total),
                    "oracle_lost": dropped_share(group.mass, best, total),
                    "entries": group.mass.sum(-1) / total,
                },
            )
            if group.beyond is not None and group.outside is not None:
                mass_outside = group.mass.masked_fill(~group.beyond, 0.0).sum(-1) / total
                values = {"outside": group.outside, "mass_outside": mass_outside}
                self.found[OUTSIDE_POOL, owner, None] = (group.counts, values)


def selection_errors(
    model: Backbone,
    rows: PackedRows,
    *,
    buckets: Sequence[float] = BUCKETS,
    sampled: int = 64,
    num_rows: int | None = None,
    batch_rows: int | None = None,
    seed: int = 0,
    sliced: bool = True,
) -> list[SelectionRecord]:
    """Return the records of all measures, owners, layers and buckets, in that order.

    rows        held-out rows; queries are positions with a target
    buckets     rising upper ends, in multiples of `index_topk` (of the pool's entries for
                `outside_pool`); one more bucket takes what is beyond
    sampled     queries of each row, drawn without return: even up to `index_topk` tokens of
                context, from there even in its logarithm, so that every length is met
    num_rows    rows that are read; None: all
    batch_rows  rows of one pass, filled up by repeating rows; None: about 4,096 tokens
    sliced      select as deployed, in slices of queries; False: as a training pass, whose
                scores [T, M] are made at once, which a GPU does faster while they fit

    Raises SelectionErrorsError for buckets that do not rise or fewer than one query.
    """
    ends = _checked(buckets, sampled)
    config = model.config.text_config
    pool = config.candidate_topk_blocks * config.candidate_block_size
    device = model.embed.weight.device
    rng = np.random.default_rng(seed)
    sums: dict[tuple[str, int, int | None], dict[str, np.ndarray]] = {}
    for batch, is_new in _batches(model, rows, num_rows, batch_rows):
        picked, live = _drawn_queries(batch, is_new, sampled, config.index_topk, rng)
        if device.type != "cpu":
            batch = batch.prepared(_ratios(model), device.type)
        state = MeasuredState.of(model, batch, picked.to(device), sliced)
        with torch.no_grad():
            model.hidden(batch.ids, state=state)
            state.finish()
        for key, (counts, values) in state.found.items():
            capacity = pool if key[0] == OUTSIDE_POOL else config.index_topk
            _add(sums.setdefault(key, {}), ends, capacity, counts, values, live)
    return _records(sums, ends, config.index_topk, pool)


def _checked(buckets: Sequence[float], sampled: int) -> np.ndarray:
    ends = np.asarray(buckets, dtype=np.float64)
    if not len(ends) or ends[0] <= 0 or (np.diff(ends) <= 0).any():
        raise SelectionErrorsError(
            f"buckets: got {tuple(buckets)}, expected rising multiples above 0, like {BUCKETS}"
        )
    if sampled < 1:
        raise SelectionErrorsError(f"sampled: got {sampled}, expected at least 1 query of a row")
    return ends


def _ratios(model: Backbone) -> tuple[int, ...]:
    return tuple(sorted({spec.ratio for spec in model.specs if spec.ratio}))


def _batches(
    model: Backbone, packed: PackedRows, num_rows: int | None, batch_rows: int | None
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yield batches of one shape, on the CPU, and which of their rows were not read before."""
    total = packed.num_rows if num_rows is None else min(num_rows, packed.num_rows)
    size = batch_rows or max(1, _PASS_TOKENS // max(1, packed.inputs.shape[1]))
    size = max(1, min(size, total))
    for start in range(0, total, size):
        numbers = np.arange(start, min(start + size, total))
        yield Batch.of(packed, np.resize(numbers, size)), np.arange(size) < len(numbers)


def _drawn_queries(
    batch: Batch, is_new: np.ndarray, count: int, flat: int, rng: np.random.Generator
) -> tuple[Tensor, np.ndarray]:
    """Return query rows [B, R] int64 and [B, R] bool which of them count; R = min(count, T)."""
    positions = batch.packing.positions.numpy()
    has_target = (batch.targets != NO_TARGET).numpy()
    count = min(count, positions.shape[1])
    rows = np.zeros((len(positions), count), dtype=np.int64)
    live = np.zeros((len(positions), count), dtype=bool)
    for b in np.flatnonzero(is_new):
        choices = np.flatnonzero(has_target[b])
        weights = 1.0 / np.maximum(positions[b, choices] + 1, flat)
        drawn = min(count, len(choices))
        if drawn:
            rows[b, :drawn] = np.sort(
                rng.choice(choices, size=drawn, replace=False, p=weights / weights.sum())
            )
            live[b, :drawn] = True
    return torch.from_numpy(rows), live


def _add(
    sums: dict[str, np.ndarray],
    ends: np.ndarray,
    capacity: int,
    counts: Tensor,
    values: dict[str, Tensor],
    live: np.ndarray,
) -> None:
    """Add the live queries that see any entry to the sums by bucket."""
    seen = counts.cpu().numpy()
    keep = live & (seen > 0)
    bucket = np.searchsorted(ends * capacity, seen[keep], side="left")
    numbers = {name: value.double().cpu().numpy()[keep] for name, value in values.items()}
    numbers["queries"] = np.ones(len(bucket))
    for name, value in numbers.items():
        total = np.bincount(bucket, weights=value, minlength=len(ends) + 1)
        sums[name] = sums.get(name, 0.0) + total


def _records(sums: dict, ends: np.ndarray, topk: int, pool: int) -> list[SelectionRecord]:
    order = (MASS_LOST, OUTSIDE_POOL, STALENESS)
    edges = [0.0, *ends.tolist(), float("inf")]
    records = []
    for key in sorted(sums, key=lambda key: (order.index(key[0]), key[1], key[2] or 0)):
        totals = dict(sums[key])
        queries = totals.pop("queries")
        for i, count in enumerate(queries.astype(int).tolist()):
            values = {name: float(v[i] / count) for name, v in totals.items()} if count else {}
            records.append(
                SelectionRecord(
                    measure=key[0],
                    owner=key[1],
                    layer=key[2],
                    low=edges[i],
                    high=edges[i + 1],
                    capacity=pool if key[0] == OUTSIDE_POOL else topk,
                    queries=count,
                    values=values,
                )
            )
    return records


# (measure, upper panel, lower panel): each panel is (solid line, dashed line or None, label).
_PANELS = (
    (MASS_LOST, ("lost", "oracle_lost", "attention lost"), ("entries", None, "on entries")),
    (OUTSIDE_POOL, ("outside", None, "best k outside"), ("mass_outside", None, "attention lost")),
    (
        STALENESS,
        ("overlap", None, "overlap with own best"),
        ("lost", "best_lost", "attention lost"),
    ),
)
_TITLES = {
    MASS_LOST: "Attention that the top-k drops (dashed: the best k entries)",
    OUTSIDE_POOL: "What the candidate pool lacks",
    STALENESS: "Selection against each layer's own best k (dashed: own best)",
}


def plots(records: Sequence[SelectionRecord], folder: Path) -> tuple[Path, ...]:
    """Draw `mass_lost.png`, `outside_pool.png`, `staleness.png` in `folder`; return the files.

    A measure without a value has no file. Raises SelectionErrorsError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SelectionErrorsError(
            "plots: matplotlib is not installed; install finwhale with the extra `cli`"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for measure, *panels in _PANELS:
        own = [r for r in records if r.measure == measure and r.queries]
        if not own:
            continue
        figure = Figure(figsize=(8, 6), layout="constrained")
        FigureCanvasAgg(figure)
        ends = sorted({(r.low, r.high) for r in own})
        lines = sorted({(r.owner, r.layer) for r in own}, key=lambda key: (key[0], key[1] or 0))
        shared = figure.subplots(2, 1, sharex=True)
        for axes, (solid, dashed, label) in zip(shared, panels, strict=True):
            for number, key in enumerate(lines):
                line = [r for r in own if (r.owner, r.layer) == key]
                for name, style in ((solid, "o-"), (dashed, "x--")):
                    if name is not None:
                        x = [ends.index((r.low, r.high)) for r in line]
                        y = [r.values[name] for r in line]
                        text = _line_name(*key) if style == "o-" else None
                        axes.plot(x, y, style, color=f"C{number}", label=text, linewidth=1)
            axes.set(ylabel=label, ylim=(-0.02 if solid in ("outside", "overlap") else None, None))
        unit = "pool" if measure == OUTSIDE_POOL else "top-k"
        shared[0].set(title=_TITLES[measure])
        shared[1].set(xlabel=f"visible entries / {unit} ({own[0].capacity})")
        shared[1].set_xticks(range(len(ends)), [_bucket_name(*pair) for pair in ends])
        shared[0].legend(ncols=2, fontsize="small")
        files.append(folder / f"{measure}.png")
        figure.savefig(files[-1], dpi=110)
    return tuple(files)


def _line_name(owner: int, layer: int | None) -> str:
    if layer is None:
        return f"L{owner}"
    return f"L{layer}" if layer == owner else f"L{layer} reuses L{owner}"


def _bucket_name(low: float, high: float) -> str:
    return f"> {low:g}" if high == float("inf") else f"{low:g} to {high:g}"
