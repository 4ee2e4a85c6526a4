"""How the indexer learns: its scores are pulled toward where the attention really looked.

A hard top-k passes no gradient, so the language-model loss never reaches the indexer. Its teacher
is the attention of the layers that use the selection:

    u_s = sum over heads of exp(z_hs - LSE_h),   p = u / sum of u over the set S
    loss = sum over tokens of  logsumexp_S(I) - sum over S of p_s I_s

LSE_h is over window, selected entries and sink together, as the layer computes it: a head that
looks at its window counts less here. u is summed over the layers of one selection group, detached,
and the indexer's inputs are detached too, so nothing else in the model feels this loss. S is the
selection of the pass, or all visible entries on sampled rows. The easy mistake: normalising each
head over entries alone. Deviates: D09 (the report is silent). Source: spec/training.md II.1.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from finwhale.config import LayerSpec, PoolUse
from finwhale.config.run import BY_ROWS, EXPLORING, IndexerConfig
from finwhale.data.packing import NO_TARGET
from finwhale.ops.index import drawn_fractions


def selected_divergence(scores: Tensor, mass: Tensor, topk: Tensor) -> Tensor:
    """Return the cross-entropy of the index distribution on the selection, [B, T] fp32.

    scores  [B, T, M] index scores, with a gradient
    mass    [B, T, M] attention mass, any positive scale
    topk    [B, T, K] int64, -1 empty; the set S
    returns 0 where nothing was selected or the teacher saw nothing

    It is KL(p || softmax(I)) plus the teacher's entropy, which has no gradient.
    """
    filled = topk >= 0
    at = topk.clamp_min(0)
    wanted = mass.gather(-1, at).masked_fill(~filled, 0.0)
    total = wanted.sum(-1)
    own = scores.gather(-1, at).masked_fill(~filled, -torch.inf)
    return _cross_entropy(own, wanted, total, filled)


def row_divergence(scores: Tensor, mass: Tensor) -> Tensor:
    """Same over all visible entries: scores [..., M] with -inf where an entry is not visible."""
    visible = ~scores.detach().isneginf()
    wanted = mass.masked_fill(~visible, 0.0)
    return _cross_entropy(scores, wanted, wanted.sum(-1), visible)


def _cross_entropy(scores: Tensor, wanted: Tensor, total: Tensor, keep: Tensor) -> Tensor:
    """Return logsumexp(scores) - sum(p * scores) over `keep`; 0 where the teacher is empty."""
    live = total > 0
    # An empty row would be -inf - (-inf): give it a finite row and drop the result.
    safe = torch.where(keep, scores, -torch.inf).masked_fill(~live.unsqueeze(-1), 0.0)
    p = wanted / torch.where(live, total, 1.0).unsqueeze(-1)
    expected = (p * torch.where(keep, scores, 0.0)).sum(-1)
    return torch.where(live, torch.logsumexp(safe, dim=-1) - expected, 0.0)


def full_row_mass(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor,
    sink: Tensor,
    reach: Tensor,
    window: int,
    rows: Tensor,
    visible: Tensor,
) -> Tensor:
    """Return the head-summed mass on every entry if these query rows attended all visible ones.

    q          [B, T, H, D]; window_kv [B, T, D]; entries [B, M, D]; sink [H]; reach [B, T]
    rows       [B, R] int64 query rows
    visible    [B, R, M] bool entries of the row's own document that it sees
    returns    [B, R, M] fp32, not differentiable

    One softmax over window, all visible entries and the sink.
    """
    with torch.no_grad():
        batch, tokens, heads, dim = q.shape
        pick = rows[..., None, None].expand(-1, -1, heads, dim)
        queries = q.gather(1, pick).float() * dim**-0.5  # [B, R, H, D]
        keys = torch.cat((window_kv, entries), dim=1).float()  # [B, T + M, D]
        scores = queries.flatten(1, 2) @ keys.transpose(1, 2)
        scores = scores.view(batch, rows.shape[1], heads, -1)  # [B, R, H, T + M]
        distance = rows.unsqueeze(-1) - torch.arange(tokens, device=q.device)
        far = reach.gather(1, rows).clamp_max(window - 1).unsqueeze(-1)
        keep = torch.cat(((distance >= 0) & (distance <= far), visible), dim=-1).unsqueeze(2)
        scores = scores.masked_fill(~keep, -torch.inf)
        everything = torch.cat(
            (scores, sink.view(1, 1, -1, 1).expand(batch, rows.shape[1], -1, 1)), dim=-1
        )
        return everything.softmax(-1)[..., tokens:-1].sum(2)


def sampled_rows(seed: Tensor, like: Tensor, count: int, first: Tensor | int = 0) -> Tensor:
    """Return `count` row numbers for each packed row of `like` [B, T], [B, count] int64.

    first  number of the first packed row in its batch: a part draws what the whole would

    One from each of `count` equal stretches of the row, so they spread over all lengths.
    """
    batch, tokens = like.shape
    count = min(count, tokens)
    if not count:
        return torch.empty(batch, 0, dtype=torch.int64, device=seed.device)
    places = torch.arange(batch, device=seed.device) + first
    drawn = drawn_fractions(seed, 1 << 20, places, count)  # [B, R]
    edges = torch.arange(count + 1, device=seed.device) * tokens // count
    return edges[:-1] + ((drawn * (edges[1:] - edges[:-1])) >> 24)


def answer_positions(targets: Tensor, is_token: Tensor, positions: Tensor) -> Tensor:
    """Return [B, T] bool: targets of documents that hold tokens which are no targets.

    targets    [B, T] int64, NO_TARGET where nothing is predicted; is_token [B, T] bool
    positions  [B, T] int64 of each token in its document

    Text is a target throughout and has none; a generated task and a conversation have some.
    """
    has_target = targets != NO_TARGET
    document = (positions == 0).cumsum(-1) - 1
    silent = torch.zeros_like(document).scatter_add_(-1, document, (is_token & ~has_target).long())
    return has_target & (silent.gather(-1, document) > 0)


def answer_rows(seed: Tensor, is_answer: Tensor, count: int, first: Tensor | int = 0) -> Tensor:
    """Return `count` answer positions of each packed row, [B, count] int64, spread evenly.

    is_answer  [B, T] bool; a row without any gives what `sampled_rows` would
    first      as in `sampled_rows`
    """
    plain = sampled_rows(seed, is_answer, count, first)
    batch, count = plain.shape
    if not count:
        return plain
    places = torch.arange(batch, device=seed.device) + first
    drawn = drawn_fractions(seed, 1 << 21, places, count)  # [B, R] of 2^24
    ranks = is_answer.long().cumsum(-1)
    total = ranks[:, -1:]
    steps = torch.arange(count, device=seed.device)
    wanted = ((steps << 24) + drawn) * total // (count << 24)  # of 0 .. total - 1
    found = torch.searchsorted(ranks, wanted + 1)
    return torch.where(total > 0, found, plain)


@dataclass(kw_only=True, slots=True)
class _Group:
    """What one selection has gathered in this pass."""

    spec: LayerSpec
    scores: Tensor
    topk: Tensor
    masses: list[Tensor] = field(default_factory=list)
    row_masses: list[Tensor] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class IndexObjective:
    """Watches one forward pass and gives the loss and the recall of every indexer in it.

    live         [B, T] bool positions that count
    rows         [B, R] int64 query rows for the full-row teacher; R = 0: none is made
    learns_selected  the loss is over the selection
    learns_rows      the loss is over all visible entries of `rows`; with both, their mean
    teaches_pool     on `rows` the layer that builds the candidate pool learns from the attention of
                     the layers that search it as well: what it leaves out they never see
    """

    live: Tensor
    rows: Tensor
    learns_selected: bool = True
    learns_rows: bool = False
    teaches_pool: bool = False
    _groups: dict[int, _Group] = field(default_factory=dict)

    def scored(self, spec: LayerSpec, scores: Tensor, topk: Tensor) -> None:
        self._groups[spec.layer_id] = _Group(spec=spec, scores=scores, topk=topk)

    def wants_mass(self, spec: LayerSpec) -> bool:
        return spec.topk_owner is not None and self.learns_selected

    def attended(self, spec: LayerSpec, mass: Tensor | None, attention_inputs: tuple) -> None:
        if spec.topk_owner is None:
            return
        group = self._groups[spec.topk_owner]
        if mass is not None:
            group.masses.append(mass)
        if not self.rows.shape[1]:
            return
        q, window_kv, entries, _, sink, reach, window = attention_inputs
        row_mass = full_row_mass(
            q, window_kv, entries, sink, reach, window, self.rows, self._row_visible(group)
        )
        group.row_masses.append(row_mass)

    def _row_scores(self, group: _Group) -> Tensor:
        pick = self.rows.unsqueeze(-1).expand(-1, -1, group.scores.shape[-1])
        return group.scores.gather(1, pick)

    def _row_visible(self, group: _Group) -> Tensor:
        return ~self._row_scores(group).detach().isneginf()

    def _row_teacher(self, group: _Group) -> Tensor:
        """Return the mass [B, R, M] that a group's indexer is taught on the sampled rows."""
        masses = list(group.row_masses)
        if self.teaches_pool and group.spec.pool is PoolUse.BUILDS:
            for other in self._groups.values():
                if other.spec.pool is PoolUse.SEARCHES:
                    masses += other.row_masses
        return _summed(masses)

    def losses(self) -> dict[int, Tensor]:
        """Return the summed loss of every indexer over the live positions, by owner layer.

        On sampled rows the sum is scaled to the number of all positions.
        """
        found = {}
        for owner, group in self._groups.items():
            if not group.scores.shape[-1]:
                continue
            sums = []
            if self.learns_rows:
                per_row = row_divergence(self._row_scores(group), self._row_teacher(group))
                live = self.live.gather(1, self.rows)
                scale = self.live.shape[1] / self.rows.shape[1]
                sums.append((per_row * live).sum() * scale)
            if self.learns_selected:
                mass = _summed(group.masses)
                per_token = selected_divergence(group.scores, mass, group.topk)
                sums.append((per_token * self.live).sum())
            found[owner] = _summed(sums) / len(sums)
        return found

    def recalls(self, k: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return (sum, count) of the teacher's mass that each indexer's k best entries hold.

        Over the live sampled rows with more than k visible entries: below that every selection is
        perfect. The mass is the full-row teacher's, over visible entries.
        """
        found = {}
        for owner, group in self._groups.items():
            scores, mass = self._row_scores(group).detach(), _summed(group.row_masses)
            visible = ~scores.isneginf()
            counts = visible.sum(-1)
            if scores.shape[-1] <= k:
                continue
            best = scores.topk(k, dim=-1).indices
            held = mass.masked_fill(~visible, 0.0).gather(-1, best).sum(-1)
            total = mass.masked_fill(~visible, 0.0).sum(-1)
            live = self.live.gather(1, self.rows) & (counts > k) & (total > 0)
            share = torch.where(live, held / torch.where(live, total, 1.0), 0.0)
            found[owner] = (share.sum(), live.sum())
        return found


def _summed(masses: list[Tensor]) -> Tensor:
    """Return the sum over the layers of a selection group, in their order."""
    total = masses[0]
    for mass in masses[1:]:
        total = total + mass
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSchedule:
    """What the indexer's form means at one step: how many entries, how many random ones."""

    topk: int
    explore: int
    learns: bool
    learns_rows: bool
    learns_selected: bool

    @classmethod
    def at(
        cls, config: IndexerConfig, step: int, steps: int, index_topk: int, max_entries: int
    ) -> IndexSchedule:
        """Return the selection of step `step` (from 0) of `steps`.

        max_entries  entries of the longest row at the finest ratio: the dense case
        """
        k = min(index_topk, max_entries)
        progress = step / max(1, config.phase * steps)
        is_dense = config.form in ("dense_warmup", "dense_combined") and progress < 1
        if is_dense:
            k = max_entries
        if config.form == "annealed" and progress < 1:
            k = annealed_topk(progress, k, max_entries)
        explores = config.form in EXPLORING and not is_dense
        explore = (config.explore or 2 * index_topk) if explores else 0
        # Over a row that is selected whole, both losses have one teacher; the sampled is cheaper.
        only_rows = config.form == "sampled_rows" or (config.form == "dense_combined" and is_dense)
        return cls(
            topk=k,
            explore=min(explore, max_entries),
            learns=config.form != "frozen",
            learns_rows=config.form in BY_ROWS,
            learns_selected=config.form != "frozen" and not only_rows,
        )


# Levels of the annealed selection: every level is a shape of its own and may be compiled anew.
_LEVELS = 8


def annealed_topk(progress: float, k: int, max_entries: int) -> int:
    """Return the geometric path from max_entries (progress 0) to k (1), in eight levels."""
    level = min(_LEVELS, int(progress * _LEVELS)) / _LEVELS
    return max(k, round(max_entries * (k / max(1, max_entries)) ** level))
