"""One forward of an engine's step: all encoder layers, then the decoder where its rows are needed.

The rows of all sequences go through every layer together, so the number of matrix products does
not depend on how many sequences there are. The encoder makes all global KV, the decoder's too; the
decoder runs on the trailing rows of a prompt only (`finwhale.engine.prefill` has the rule) and on
every new token; rows that no later layer reads go on the way (`live_rows.py`). A row that is not
finite is reported with its layer and costs its own sequence alone. Source: spec/backbone.md
section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finwhale.cache.paged_pools import PagedPools
from finwhale.config import LayerSpec
from finwhale.config.layers import Half
from finwhale.engine.invariance import Reads
from finwhale.engine.live_rows import Work
from finwhale.engine.paged_pass import PagedPass, RowSpan, last_rows
from finwhale.engine.prefill import encoder_only_unsupported
from finwhale.engine.step import add_counts
from finwhale.model import Backbone
from finwhale.model.layers import ForwardState
from finwhale.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Logits [n, V] of each piece of work (n may be 0), and what went wrong, or None."""

    logits: tuple[Tensor, ...]
    errors: tuple[str | None, ...]


# A caller's inference mode must not turn the weights, which may be trained on, into its tensors.
@torch.inference_mode(mode=False)
def with_ops(model: Backbone, ops: Ops) -> Backbone:
    """Return a Backbone that shares every weight with `model` and computes with `ops`."""
    with torch.device("meta"):
        twin = Backbone(model.config, model.token_map, model.numerics, ops)
    twin.load_state_dict(model.state_dict(), assign=True)
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    if ops.grouped_experts is not None:
        twin.stack_experts()
        twin.requires_grad_(False)
        model.share_experts(twin)
    return twin.eval()


class Runner:
    """Runs `Work` on pools."""

    def __init__(self, model, pools: PagedPools, ops: Ops, reads: Reads):
        self.model, self.pools, self.ops, self.reads = model, pools, ops, reads
        config = model.config.text_config
        self.encoder = [spec for spec in model.specs if spec.half is Half.ENCODER]
        self.decoder = [spec for spec in model.specs if spec.half is Half.DECODER]
        self.makes_all_kv = encoder_only_unsupported(config) is None
        self._history = config.engram_max_ngram_size - 1 if config.engram_layer_ids else 0
        self.layer_tokens: dict[int, int] = {}
        # Whether the last run began to write windows; whoever calls `run` sets it back.
        self.has_committed = False

    @torch.inference_mode()
    def run(self, works: Sequence[Work]) -> StepResult:
        """Run all rows, write windows of the sequences that stayed finite, return their logits."""
        forward = self._forward(works)
        add_counts(self.layer_tokens, forward.layer_tokens)
        finite = forward.finite_rows()
        errors = [
            None if finite[n].all() else self._blame(work, finite[n])
            for n, work in enumerate(works)
        ]
        sound = [error is None for error in errors]
        logits = self._logits(works, forward, sound)
        for n, own in enumerate(logits):
            if not torch.isfinite(own).all():
                row = int((~torch.isfinite(own).all(-1)).nonzero()[0])
                position = works[n].span.stop - own.shape[0] + row
                errors[n] = f"head: logits are not finite at position {position}"
                sound[n] = False
        self.has_committed = True
        for rows in forward.passes:
            rows.commit(sound)
        return StepResult(logits=tuple(logits), errors=tuple(errors))

    def _forward(self, works: Sequence[Work], after_layer=None) -> _Forward:
        """Run both halves, each layer on the rows that are still read."""
        window = self.pools.layout.config.sliding_window
        forward = _Forward(self, works, after_layer)
        starts = [work.encoder_starts(len(self.encoder), window) for work in works]
        spans = [work.span for work in works]
        if not self.encoder:
            # The cut is the first layer: what leaves the encoder are the embedded rows.
            forward.embed(spans)
        state = forward.run_half(self.encoder, spans, _columns(starts, len(self.encoder)))
        if self.makes_all_kv:
            forward.publish(spans, state)
        starts = [work.decoder_starts(len(self.decoder), window) for work in works]
        spans = [work.decoder_span() for work in works]
        forward.run_half(self.decoder, spans, _columns(starts, len(self.decoder)))
        return forward

    def state(self, rows: PagedPass) -> tuple[ForwardState, Tensor]:
        """Return the shared state of a pass, and its own token ids [1, T]."""
        ids = rows.ids_with_history(self._history)
        token_map = self.model.token_map
        compressed = ids if token_map is None else token_map[ids]
        state = self.model.paged_state(rows, rows.positions, compressed)
        state.kept = rows.kept
        return state, ids[:, rows.own_ids]

    def _logits(self, works, forward: _Forward, sound) -> list[Tensor]:
        rows, counts, first = [], [], 0
        for n, (work, alive) in enumerate(zip(works, forward.counts.tolist(), strict=True)):
            count = min(alive, max(0, work.span.stop - work.first_logits)) if sound[n] else 0
            rows += range(first + alive - count, first + alive)
            counts.append(count)
            first += alive
        if not rows:
            return [torch.zeros(0, self.model.head.weight.shape[0]) for _ in works]
        hidden = self.model.collapsed(forward.streams[:, rows], forward.pre[:, rows])[0]
        return list(self.model.logits(hidden).split(counts))

    def _blame(self, work: Work, finite: Tensor) -> str:
        """Run one sequence again, layer by layer, and name where it left the finite numbers."""
        position = work.span.start + int((~finite).nonzero()[0])
        found: list[int] = []

        def look(layer: int, streams: Tensor, rows) -> None:
            is_sound = bool(torch.isfinite(streams).all()) and bool(rows.finite_rows.all())
            if not is_sound and not found:
                found.append(layer)

        self._forward([work], after_layer=look)
        layer = f"layer {found[0]}" if found else "the decoder's entries"
        return f"{layer}: not finite at position {position} or before; see the request's tokens"


def _columns(starts: list[list[int]], layers: int) -> np.ndarray:
    """Return [layers + 1, S] of a list for each span."""
    return np.array(starts, dtype=np.int64).reshape(-1, layers + 1).T


class _Forward:
    """A forward under way: which rows are alive, their streams between two layers, the passes.

    counts        [S] rows alive, the last ones of each span
    streams, pre  [1, A, N, C] and [1, A, N] of these rows; None before any row was embedded
    """

    def __init__(self, runner: Runner, works: Sequence[Work], after_layer):
        self._runner, self._after_layer = runner, after_layer
        starts = np.array([work.span.start for work in works], dtype=np.int64)
        self._stops = np.array([work.span.stop for work in works], dtype=np.int64)
        self.counts = self._all_counts = self._stops - starts
        self.streams: Any = None
        self.pre: Any = None
        self.passes: list[PagedPass] = []
        self.layer_tokens: dict[int, int] = {}
        self._entries: dict[int, Tensor] = {}
        self._finite = torch.ones(int(self.counts.sum()), dtype=torch.bool)

    def run_half(
        self, specs: Sequence[LayerSpec], spans: Sequence[RowSpan], starts: np.ndarray
    ) -> ForwardState | None:
        """Run the layers of a half and return the state of its last pass.

        starts  [layers + 1, S] first row into each layer, and behind that out of the last
        """
        if not specs:
            return None
        state, bounds = None, starts[:0]
        for n, spec in enumerate(specs):
            self._narrow(self._stops - starts[n])
            if not self.counts.any():
                return state
            if state is None or not np.array_equal(bounds, starts[n : n + 2]):
                bounds = starts[n : n + 2]
                state = self._begin(spans, *bounds, below=state)
            self.streams, self.pre = self._runner.model.run_layers(
                self.streams, self.pre, state, [spec]
            )
            self.counts = self.passes[-1].kept_counts
            if self._after_layer is not None:
                self._after_layer(spec.layer_id, self.streams, self.passes[-1])
        self._note_finite(self.counts, torch.isfinite(self.streams).flatten(2).all(-1)[0])
        return state

    def embed(self, spans: Sequence[RowSpan]) -> None:
        """Begin with all rows; no layer runs."""
        starts = self._stops - self.counts
        self._begin(spans, starts, starts)

    def publish(self, spans: Sequence[RowSpan], state: ForwardState | None) -> None:
        """Make the decoder's entries of tokens that have none, from the encoder's output.

        state  of the encoder's last pass
        """
        model, decoder = self._runner.model, self._runner.decoder
        stored = np.array([min(span.stored, span.stop) for span in spans], dtype=np.int64)
        starts = np.maximum(self._stops - self.counts, stored)
        counts = self._stops - starts
        if not counts.any():
            return
        if state is None or not np.array_equal(counts, self.passes[-1].counts):
            state = self._begin(spans, starts, starts)
        rows = torch.from_numpy(last_rows(self.counts, counts))
        streams, pre = self.streams[:, rows], self.pre[:, rows]
        model.note_encoder_output(streams, pre, state)
        for spec in decoder:
            if spec.owns_kv:
                model.layers[spec.layer_id].publish(streams, pre, state)

    def finite_rows(self) -> tuple[Tensor, ...]:
        """Return for each span [T] whether its rows were finite as far as they were alive."""
        for rows in self.passes:
            self._note_finite(rows.counts, rows.finite_rows)
        return self._finite.split(self._all_counts.tolist())

    def _note_finite(self, counts: np.ndarray, finite: Tensor) -> None:
        if not finite.all():
            self._finite[last_rows(self._all_counts, counts)[~finite.numpy()]] = False

    def _narrow(self, counts: np.ndarray) -> None:
        """Let all but the last `counts` rows of each span go."""
        if self.streams is not None and not np.array_equal(counts, self.counts):
            rows = torch.from_numpy(last_rows(self.counts, counts))
            self.streams, self.pre = self.streams[:, rows], self.pre[:, rows]
        self.counts = counts

    def _begin(self, spans, low: np.ndarray, high: np.ndarray, *, below=None) -> ForwardState:
        """Begin a pass over the rows from `low` on, of which those from `high` on are kept.

        below  the state of the pass before in the same half
        """
        runner = self._runner
        rows = PagedPass(
            runner.pools,
            [replace(span, start=at) for span, at in zip(spans, low.tolist(), strict=True)],
            runner.ops,
            runner.reads,
            None if np.array_equal(low, high) else high.tolist(),
        )
        self.passes.append(rows)
        state, ids = runner.state(rows)
        state.entries, state.layer_tokens = self._entries, self.layer_tokens
        if self.streams is None:
            self.streams, self.pre = runner.model.embed_streams(ids)
        if below is not None:
            rows.take_selections(below.paged)
            if below.encoder_output is not None:
                state.encoder_output = below.of_kept(below.encoder_output)
        return state
