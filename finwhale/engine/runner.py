"""One forward of an engine's step: all encoder layers, then the decoder where its rows are needed.

The rows of all sequences go through every layer together, so the number of matrix products does
not depend on how many sequences there are. The encoder makes all global KV, the decoder's too; the
decoder runs on the trailing rows of a prompt only (`finwhale.engine.prefill` has the rule) and on
every new token. A row that is not finite is reported with its layer and costs its own sequence
alone. Source: spec/backbone.md section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from finwhale.cache.paged_pools import PagedPools
from finwhale.config.layers import Half
from finwhale.engine.invariance import Reads
from finwhale.engine.paged_pass import PagedPass, RowSpan
from finwhale.engine.prefill import encoder_only_unsupported
from finwhale.engine.step import add_counts
from finwhale.model import Backbone
from finwhale.model.layers import ForwardState
from finwhale.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one sequence does in a step.

    span           its encoder rows
    decoder_start  first position that the decoder runs on
    decoder_floor  first position whose decoder window row exists
    first_logits   rows from this position on need logits
    """

    span: RowSpan
    decoder_start: int
    decoder_floor: int
    first_logits: int

    def decoder_span(self) -> RowSpan:
        """Return the rows that the decoder runs on, perhaps none."""
        start = min(max(self.span.start, self.decoder_start), self.span.stop)
        return replace(self.span, start=start, window_floor=self.decoder_floor)


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
        self._encoder = [spec for spec in model.specs if spec.half is Half.ENCODER]
        self._decoder = [spec for spec in model.specs if spec.half is Half.DECODER]
        self._makes_all_kv = encoder_only_unsupported(config) is None
        self._history = config.engram_max_ngram_size - 1 if config.engram_layer_ids else 0
        self.layer_tokens: dict[int, int] = {}
        # Whether the last run began to write windows; whoever calls `run` sets it back.
        self.has_committed = False

    @torch.inference_mode()
    def run(self, works: Sequence[Work]) -> StepResult:
        """Run all rows, write windows of the sequences that stayed finite, return their logits."""
        encoder, decoder, streams, pre, finite = self._forward(works)
        errors = [
            None if finite[n].all() else self._blame(work, finite[n])
            for n, work in enumerate(works)
        ]
        sound = [error is None for error in errors]
        logits = self._logits(works, decoder, streams, pre, sound)
        for n, own in enumerate(logits):
            if not torch.isfinite(own).all():
                row = int((~torch.isfinite(own).all(-1)).nonzero()[0])
                position = max(decoder.spans[n].start, works[n].first_logits) + row
                errors[n] = f"head: logits are not finite at position {position}"
                sound[n] = False
        self.has_committed = True
        encoder.commit(sound)
        decoder.commit(sound)
        return StepResult(logits=tuple(logits), errors=tuple(errors))

    def _forward(self, works: Sequence[Work], after_layer=None):
        """Return both passes, the decoder's streams and mixes, and [T] finite rows per work."""
        encoder = PagedPass(self.pools, [work.span for work in works], self.ops, self.reads)
        decoder = PagedPass(
            self.pools, [work.decoder_span() for work in works], self.ops, self.reads
        )
        state, ids = self._state(encoder)
        streams, pre = self.model.embed_streams(ids)
        streams, pre = self._layers(self._encoder, streams, pre, state, after_layer)
        self.model.note_encoder_output(streams, pre, state)
        if self._makes_all_kv:
            for spec in self._decoder:
                if spec.owns_kv:
                    self.model.layers[spec.layer_id].publish(streams, pre, state)
        finite = encoder.finite_rows & torch.isfinite(streams).flatten(2).all(-1)[0]
        below, _ = self._state(decoder)
        below.entries = dict(state.entries)
        # The decoder's rows are the last rows of every span.
        rows = torch.cat(
            [
                torch.arange(first + e.num_rows - d.num_rows, first + e.num_rows)
                for first, e, d in zip(
                    encoder.first_row.tolist(), encoder.spans, decoder.spans, strict=True
                )
            ]
            or [torch.zeros(0, dtype=torch.int64)]
        )
        if state.encoder_output is not None:
            below.encoder_output = state.encoder_output[:, rows]
        streams, pre = streams[:, rows], pre[:, rows]
        if decoder.num_rows:
            streams, pre = self._layers(self._decoder, streams, pre, below, after_layer)
            own = decoder.finite_rows & torch.isfinite(streams).flatten(2).all(-1)[0]
            finite = finite.index_put((rows,), finite[rows] & own)
        if after_layer is None:
            add_counts(self.layer_tokens, state.layer_tokens)
            add_counts(self.layer_tokens, below.layer_tokens)
        parts = finite.split([work.span.num_rows for work in works])
        return encoder, decoder, streams, pre, parts

    def _state(self, rows: PagedPass) -> tuple[ForwardState, Tensor]:
        """Return the shared state of a half, and its own token ids [1, T]."""
        ids = rows.ids_with_history(self._history)
        token_map = self.model.token_map
        compressed = ids if token_map is None else token_map[ids]
        state = self.model.paged_state(rows, rows.positions, compressed)
        return state, ids[:, rows.own_ids]

    def _layers(self, specs, streams, pre, state, after_layer):
        if after_layer is None:
            return self.model.run_layers(streams, pre, state, specs)
        for spec in specs:
            streams, pre = self.model.run_layers(streams, pre, state, [spec])
            after_layer(spec.layer_id, streams, state.paged)
        return streams, pre

    def _logits(self, works, decoder: PagedPass, streams, pre, sound) -> list[Tensor]:
        rows, counts = [], []
        for n, (work, span) in enumerate(zip(works, decoder.spans, strict=True)):
            first = max(span.start, work.first_logits)
            count = max(0, span.stop - first) if sound[n] else 0
            base = int(decoder.first_row[n]) + first - span.start
            rows += range(base, base + count)
            counts.append(count)
        if not rows:
            return [streams.new_empty(0, self.model.head.weight.shape[0]) for _ in works]
        hidden = self.model.collapsed(streams[:, rows], pre[:, rows])[0]
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
