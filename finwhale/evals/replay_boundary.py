"""What a prefix hit of any length costs: the same prompt cold and recovered, token by token.

Owns the comparison and nothing of the recovery itself: a `ColdRun` reads a prompt once through all
layers and keeps what a cache could have kept at chosen lengths; `recover` starts again from there
as a `Recovery` says; `compare` holds the two distributions against each other. Hits may have any
length here, published ones are block multiples. Refused: lengths that the cold run did not keep.
The easy mistake: calling every difference a cost of replay. With rounded caches two cold runs in
other chunks differ as well, so the table needs the floor `KEPT` and a second `ColdRun` beside it.
Source: spec/kv-cache.md section 3.1, docs/deviations.md A01.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from finwhale.cache.rows import GrowingRows, RecentRows
from finwhale.cache.sequence_state import SequenceState, fresh_state
from finwhale.config.layers import Half
from finwhale.engine.prefill import Prefill
from finwhale.engine.step import forward_step
from finwhale.evals.position_bits import EvaluationError
from finwhale.model import Backbone


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """How the windows behind a hit come back.

    encoder      rows of the prefix that the encoder runs again, windows cut at the first of them;
                 None: the windows of the cold run. 0 runs none: what replay is there to prevent
    decoder      rows at the end of the prompt that the decoder runs on, windows cut likewise
    recomputes   nothing is kept: global KV alone, then `Prefill` in mode "exact" (both None) or
                 "bounded" (both the same number)

    With `recomputes` off one half is cut and the other is the cold run's, which no server does: it
    tells which half a difference comes from.
    """

    name: str
    encoder: int | None = None
    decoder: int | None = None
    recomputes: bool = False

    def __post_init__(self) -> None:
        for rows in (self.encoder, self.decoder):
            if rows is not None and rows < 0:
                raise EvaluationError(f"{self.name}: got {rows} rows, expected 0 or more")
        if self.recomputes and self.encoder != self.decoder:
            got = f"{self.encoder} and {self.decoder}"
            raise EvaluationError(f"{self.name}: got {got} rows, expected the same in both halves")


# The cold run's own windows: what is left is the noise of other chunks behind the hit.
KEPT = Recovery(name="kept")
EXACT = Recovery(name="exact", recomputes=True)


def encoder_bounded(rows: int) -> Recovery:
    """Return the recovery whose encoder windows come from `rows` replayed rows."""
    return Recovery(name="encoder", encoder=rows)


def decoder_bounded(rows: int) -> Recovery:
    """Return the recovery whose decoder reads the prompt's last `rows` rows."""
    return Recovery(name="decoder", decoder=rows)


def bounded(rows: int) -> Recovery:
    """Return what `--prefill bounded` does with `rows` instead of a window."""
    return Recovery(name="both", encoder=rows, decoder=rows, recomputes=True)


@dataclass(slots=True)
class _Snapshot:
    """Windows, open groups and ids of a sequence at one length; global KV is a prefix of all."""

    window: dict[int, RecentRows]
    open_groups: dict[int, RecentRows]
    recent_ids: RecentRows
    id_digest: bytes


@dataclass(slots=True)
class ColdRun:
    """A prompt read through all layers, with the parts that a cache could keep at some lengths.

    ids     [1, T] int64
    hidden  [T, C] of every token
    """

    model: Backbone
    ids: Tensor
    hidden: Tensor
    _state: SequenceState
    _snapshots: dict[int, _Snapshot] = field(default_factory=dict)

    @property
    def stops(self) -> list[int]:
        """Return the lengths that were kept."""
        return sorted(self._snapshots)

    def log_probabilities(self, rows: slice) -> Tensor:
        """Return log p [n, V] fp32 of the token behind each of these rows."""
        return _log_probabilities(self.model, self.hidden[rows])

    def kept(self, stop: int) -> SequenceState:
        """Return a state of its own at a kept length, as the cold run had it; it can go on."""
        state = self._with_global(stop)
        if not stop:
            return state
        snapshot = self._snapshots[stop]
        state.window = dict(snapshot.window)
        state.open_groups = dict(snapshot.open_groups)
        state.recent_ids = snapshot.recent_ids
        state.num_decoder_tokens = stop
        return state

    def global_only(self, stop: int) -> SequenceState:
        """Return a state of its own with the global KV of a kept length alone."""
        state = self._with_global(stop)
        state.needs_replay = stop > 0
        return state

    def _with_global(self, stop: int) -> SequenceState:
        if stop and stop not in self._snapshots:
            raise EvaluationError(f"stop: got {stop}, the cold run kept {self.stops}")
        state = fresh_state(self.model, max_rollback=0)
        if not stop:
            return state
        for spec in state.specs:
            if spec.owns_kv:
                for kind in ("entries", "index_keys"):
                    source = getattr(self._state, kind)[spec.layer_id]
                    getattr(state, kind)[spec.layer_id] = _first_rows(source, stop // spec.ratio)
        state.num_tokens = stop
        state.id_digests = [self._snapshots[stop].id_digest]
        return state

    def branch(self, stop: int, tokens: Sequence[int], *, stops: Iterable[int] = ()) -> ColdRun:
        """Return a cold run of the first `stop` ids and then `tokens`; kept lengths stay kept."""
        ids = torch.cat((self.ids[:, :stop], self.ids.new_tensor([list(tokens)])), dim=1)
        run = ColdRun(self.model, ids, self.hidden[:stop], self.kept(stop))
        run._snapshots = {at: s for at, s in self._snapshots.items() if at <= stop}
        run._read(stop, {*stops, ids.shape[1]}, chunk=512)
        return run

    def _read(self, start: int, stops: set[int], chunk: int) -> None:
        length = self.ids.shape[1]
        wrong = [stop for stop in stops if not 0 <= stop <= length]
        if wrong:
            raise EvaluationError(f"stops: got {wrong}, expected 0 to {length}")
        cuts = sorted(at for at in {*stops, *range(0, length, chunk), length} if at > start)
        found = [self.hidden[:start]]
        for stop in cuts:
            found.append(forward_step(self.model, self._state, self.ids[:, start:stop])[0])
            start = stop
            if stop in stops:
                state = self._state
                self._snapshots[stop] = _Snapshot(
                    dict(state.window),
                    dict(state.open_groups),
                    state.recent_ids,
                    state.id_digests[-1],
                )
        self.hidden = torch.cat(found)


def cold_run(model: Backbone, ids: Tensor, *, stops: Iterable[int], chunk: int = 512) -> ColdRun:
    """Read ids [1, T] in chunks that end at multiples of `chunk` and at `stops`, which are kept."""
    c = model.config.text_config
    run = ColdRun(
        model,
        ids,
        model.embed.weight.new_zeros(0, c.hidden_size),
        fresh_state(model, max_rollback=0),
    )
    run._read(0, set(stops), chunk)
    return run


def _first_rows(rows: GrowingRows, count: int) -> GrowingRows:
    own = GrowingRows()
    if count:
        own.stage(rows.view()[:count])
        own.commit()
    return own


def _log_probabilities(model: Backbone, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        return model.logits(hidden).float().log_softmax(-1)


def stops_for(hit: int, stop: int, recovery: Recovery) -> set[int]:
    """Return the lengths that a cold run must keep for `recover`."""
    if recovery.decoder is None or recovery.recomputes:
        return {hit}
    return {hit, max(0, stop - recovery.decoder)}


def recover(cold: ColdRun, hit: int, stop: int, recovery: Recovery) -> tuple[SequenceState, Tensor]:
    """Return the state behind the first `stop` ids of a cold run, and the last hidden row [1, C].

    The first `hit` of them come from what the cold run kept, as `recovery` says.
    """
    if not 0 <= hit < stop <= cold.ids.shape[1]:
        got, most = f"{hit} and {stop}", cold.ids.shape[1]
        raise EvaluationError(f"hit, stop: got {got}, expected 0 <= hit < stop <= {most}")
    suffix = cold.ids[:, hit:stop]
    if recovery.recomputes and hit and recovery.encoder != 0:
        rows = recovery.encoder
        state = cold.global_only(hit)
        mode = "exact" if rows is None else "bounded"
        prefill = Prefill(cold.model, state, mode=mode, bounded_rows=rows)
        prefill.replay(cold.ids[:, :hit], rows=rows)
        prefill.feed(suffix)
        return state, prefill.finish()
    if recovery.decoder is not None and recovery.encoder is None:
        # A hit changes nothing here: the decoder's last rows run again wherever it ended.
        start = max(0, stop - recovery.decoder) if recovery.decoder else hit
        state, suffix = cold.kept(start), cold.ids[:, start:stop]
        _cut(state, Half.DECODER, start)
    else:
        state = _with_replayed_encoder(cold, hit, recovery.encoder)
        if recovery.decoder is not None:
            _cut(state, Half.DECODER, hit)
    return state, forward_step(cold.model, state, suffix)[0, -1:]


def _cut(state: SequenceState, half: Half, start: int) -> None:
    """Take all window rows of a half away: windows begin at `start`, the state's length."""
    for spec in state.specs:
        if spec.half is half:
            state.window[spec.layer_id] = RecentRows(state.window[spec.layer_id].capacity)
    state.window_start[half] = start


def _with_replayed_encoder(cold: ColdRun, hit: int, rows: int | None) -> SequenceState:
    state = cold.kept(hit)
    if rows is None or not hit:
        return state
    if not rows:
        # Open groups stay: they are handed over with global KV where nothing is replayed.
        _cut(state, Half.ENCODER, hit)
        return state
    replayed = cold.global_only(hit)
    Prefill(cold.model, replayed, mode="bounded").replay(cold.ids[:, :hit], rows=rows)
    for spec in state.specs:
        if spec.half is Half.ENCODER:
            state.window[spec.layer_id] = replayed.window[spec.layer_id]
    state.open_groups = dict(replayed.open_groups)
    state.window_start[Half.ENCODER] = replayed.window_start[Half.ENCODER]
    return state


def hidden_behind(cold: ColdRun, hit: int, stop: int, recovery: Recovery) -> Tensor:
    """Return the hidden rows [stop - hit, C] behind a hit: a suffix of every length at once.

    For recoveries that do not depend on where the prompt ends: no `decoder`, no `recomputes`.
    """
    if recovery.decoder is not None or recovery.recomputes:
        raise EvaluationError(f"{recovery.name}: its decoder depends on where the prompt ends")
    state = _with_replayed_encoder(cold, hit, recovery.encoder)
    return forward_step(cold.model, state, cold.ids[:, hit:stop])[0]


def continued(model: Backbone, state: SequenceState, last: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return log p [1 + n, V] behind a prompt and behind each of the n `tokens` fed after it.

    last  [1, C] hidden row of the prompt's last token; the state goes on by n tokens
    """
    rows = [last]
    if len(tokens):
        ids = torch.tensor([list(tokens)], device=last.device)
        rows.append(forward_step(model, state, ids)[0])
    return _log_probabilities(model, torch.cat(rows))


def greedy(cold: ColdRun, stop: int, count: int) -> tuple[list[int], Tensor]:
    """Return the cold run's own greedy tokens behind a kept length, and log p [count, V].

    Row i is the distribution that token i is the best of.
    """
    state, hidden = cold.kept(stop), cold.hidden[stop - 1 : stop]
    tokens: list[int] = []
    rows: list[Tensor] = []
    for n in range(count):
        rows.append(_log_probabilities(cold.model, hidden))
        tokens.append(int(rows[-1].argmax()))
        if n + 1 < count:
            step = torch.tensor([tokens[-1:]], device=hidden.device)
            hidden = forward_step(cold.model, state, step)[0]
    return tokens, torch.cat(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far rows of a recovered run are from the cold run's.

    kl    KL(cold || recovered) of each row, nats
    same  whether both have the same best token; ties go to the lowest id
    """

    kl: tuple[float, ...]
    same: tuple[bool, ...]

    def mean_kl(self, count: int) -> float:
        """Return the mean over the first `count` rows."""
        return sum(self.kl[:count]) / len(self.kl[:count])

    def agreement(self, count: int) -> float:
        """Return the share of equal best tokens among the first `count` rows."""
        return sum(self.same[:count]) / len(self.same[:count])

    @property
    def run(self) -> int:
        """Rows before the first that differs: as many tokens a greedy reply would share."""
        return self.same.index(False) if False in self.same else len(self.same)


def compare(cold: Tensor, other: Tensor) -> Difference:
    """Return the difference of log-probabilities [n, V] each."""
    if cold.shape != other.shape or not len(cold):
        got = f"{tuple(cold.shape)} and {tuple(other.shape)}"
        raise EvaluationError(f"log-probabilities: got {got}, expected equal shapes of some rows")
    first, second = cold.double(), other.double()
    # Renormalised in float64: the sum of fp32 probabilities is off by about 1e-7, as much as a KL.
    first = first - first.logsumexp(-1, keepdim=True)
    second = second - second.logsumexp(-1, keepdim=True)
    kl = (first.exp() * (first - second)).sum(-1).clamp_min(0)
    same = cold.argmax(-1) == other.argmax(-1)
    return Difference(kl=tuple(kl.tolist()), same=tuple(same.tolist()))
