"""Prefill that runs half the layers: the encoder on all tokens, the decoder on the last ones.

All global KV comes from the encoder's side of the cut, so the decoder only has to run where its
windows will still be seen. Three modes:

    full     all layers on all tokens; the definition
    exact    the decoder on the trailing rows that the layer table requires: equal to `full`
    bounded  the decoder on the last n_win tokens, its windows cut at that start: an
             approximation (docs/deviations.md A01), the one the report deploys

The decoder runs once, in `finish`, on rows kept from the encoder; so the result does not depend on
how the prompt was cut into chunks. A prefix of which only global KV is left is entered by `replay`:
its last rows run through the encoder again, rebuild windows and open groups, and write no global
KV. Source: spec/backbone.md section 3, spec/training.md section 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finwhale.cache.sequence_state import SequenceState, StateError, as_id_rows
from finwhale.config import LayerSpec, TextConfig, build_layer_specs
from finwhale.config.layers import Half
from finwhale.engine.step import add_counts, check_fits, commit_ids, with_history
from finwhale.model.continuation import Continuation

MODES = ("full", "exact", "bounded")


def encoder_only_unsupported(config: TextConfig) -> str | None:
    """Return why the decoder's entries cannot be made from the encoder's output, or None."""
    decoder = decoder_specs(build_layer_specs(config))
    owners = [spec.layer_id for spec in decoder if spec.owns_kv]
    later = owners[1:]
    if later and config.ced_kv_from == "layer_input":
        return f"decoder owners {later} compress their own hidden state (ced_kv_from: layer_input)"
    last = owners[-1] if owners else -1
    engrams = [s.layer_id for s in decoder if s.has_engram and s.layer_id <= last]
    if engrams:
        return f"Engram at layers {engrams} changes what the decoder's owners read"
    return None


def decoder_specs(specs: tuple[LayerSpec, ...]) -> list[LayerSpec]:
    """Return the layers from the encoder-decoder cut on."""
    return [spec for spec in specs if spec.half is Half.DECODER]


def exact_decoder_rows(config: TextConfig) -> int:
    """Return the trailing rows into the cut layer that make the decoder's last window exact.

    The last layer's window needs n_win exact rows, and every layer before it W - 1 more. One layer
    in, W - 1 of them have done their part: 2,541 rows into L20 leave 2,414 out of it.
    """
    window, layers = config.sliding_window, len(decoder_specs(build_layer_specs(config)))
    return window + (layers - 1) * (window - 1)


def exact_encoder_rows(config: TextConfig) -> int:
    """Return the rows of a prefix whose replay leaves exact windows in every encoder layer.

    W - 1 rows per layer, the receptive field of its windows.
    """
    layers = len(build_layer_specs(config)) - len(decoder_specs(build_layer_specs(config)))
    return layers * (config.sliding_window - 1)


class Prefill:
    """An open prefill of one sequence: `replay` at most once, `feed` any number of times, `finish`.

    rows_kept  trailing rows that the decoder will run on
    """

    def __init__(
        self, model, state: SequenceState, *, mode: str = "exact", bounded_rows: int | None = None
    ):
        """Open a prefill on top of `state`.

        bounded_rows  decoder rows of mode "bounded"; default: the window length

        Raises ValueError for a mode or a config that it cannot serve, StateError for a state.
        """
        check_fits(model, state)
        c = model.config.text_config
        if mode not in MODES:
            raise ValueError(f"mode: got {mode!r}, expected one of {MODES}")
        reason = encoder_only_unsupported(c)
        if mode != "full" and reason is not None:
            raise ValueError(f"mode: {mode!r} is not possible, {reason}; use 'full'")
        if state.is_open:
            raise StateError("prefill: another one is open on this state")
        if bounded_rows is not None and (mode != "bounded" or bounded_rows < 1):
            raise ValueError(f"bounded_rows: got {bounded_rows} in mode {mode!r}, expected >= 1")
        self.model, self.state, self.mode = model, state, mode
        bounded = c.sliding_window if bounded_rows is None else bounded_rows
        # Rollback may go back into the prompt, so that many more window rows have to be exact.
        exact = exact_decoder_rows(c) + state.max_rollback
        self.rows_kept = {"full": None, "exact": exact, "bounded": bounded}[mode]
        self.layer_tokens: dict[int, int] = {}
        self._has_decoder_windows = True
        # Streams and mixes at the cut, of the rows that the decoder will run on, and their ids.
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None
        self._is_finished = False
        self._encoder = [spec for spec in model.specs if spec.half is Half.ENCODER]
        self._decoder = decoder_specs(model.specs)

    @torch.no_grad()
    def replay(self, ids: Tensor, rows: int | None = None) -> None:
        """Rebuild the encoder's windows of a state that holds global KV alone.

        ids   [1, P] all token ids of the prefix
        rows  trailing rows to run, windows cut at their start; None means the window length in
              mode "bounded" and all that exactness needs in mode "exact", where fewer are refused

        Global KV is read and never written. Must come before any `feed`.
        """
        state = self.state
        self.model.check_ids(ids)
        if self.layer_tokens or state.num_tokens != ids.shape[1] or ids.shape[0] != 1:
            raise StateError(
                f"replay: got {tuple(ids.shape)} ids first, expected (1, {state.num_tokens}) "
                "before any feed"
            )
        c = self.model.config.text_config
        if self.mode == "full":
            raise ValueError("replay: mode 'full' needs no state; feed the whole prompt")
        if state.ids_digest(ids[0].tolist()) != state.id_digests[-1]:
            raise StateError("replay: the ids are not those that this global KV was made from")
        stop = state.num_tokens
        exact = exact_encoder_rows(c) + (self.rows_kept or 0)
        if rows is None:
            rows = c.sliding_window if self.mode == "bounded" else exact
        least = 1 if self.mode == "bounded" else min(exact, stop)
        if rows < least:
            raise ValueError(f"rows: got {rows}, expected at least {least} in mode {self.mode!r}")
        # A ratio-2 group that the prefix leaves open must be made again from its first token.
        floor = min(
            (stop - stop % spec.ratio for spec in self.model.specs if spec.ratio), default=0
        )
        start = max(0, min(stop - rows, floor))
        history = min(start, state.history_tokens)
        continuation = Continuation(
            past=state,
            start=start,
            stop=stop,
            window_start=start,
            keep_rows=self._exact_window_rows(start),
        )
        forward = self.model.continued_state(continuation, ids[:, start - history :])
        streams, pre = self._run_encoder(ids[:, start:], forward)
        continuation.commit_layers()
        self._keep(streams, pre, ids[:, start:])
        state.window_start[Half.ENCODER] = start if self.mode == "bounded" else 0
        state.recent_ids = state.recent_ids.replaced(as_id_rows(ids), stop)
        state.needs_replay, self._has_decoder_windows = False, False

    @torch.no_grad()
    def feed(self, ids: Tensor) -> None:
        """Run the encoder on the next tokens [1, T], T >= 1, and make all their global KV."""
        if self._is_finished:
            raise StateError("prefill: already finished")
        if self.state.needs_replay:
            raise StateError("feed: only global KV is here; replay the prefix first")
        self.model.check_ids(ids, self.state.num_tokens)
        if ids.shape[0] != 1 or not ids.shape[1]:
            raise ValueError(f"ids: got {tuple(ids.shape)}, expected one row of at least one token")
        state = self.state
        continuation = Continuation(
            past=state,
            start=state.num_tokens,
            stop=state.num_tokens + ids.shape[1],
            window_start=state.window_start[Half.ENCODER],
        )
        forward = self.model.continued_state(continuation, with_history(state, ids))
        streams, pre = self._run_encoder(ids, forward)
        continuation.commit_layers()
        commit_ids(state, ids)
        self._keep(streams, pre, ids)

    def _exact_window_rows(self, start: int) -> int | None:
        """Return how many window rows at the end are worth keeping if rows before `start` were cut.

        In mode "exact" the rows nearest to the cut are inexact. None means all.
        """
        if self.mode == "bounded" or not start:
            return None
        return self.model.config.text_config.sliding_window - 1 + self.state.max_rollback

    def _run_encoder(self, ids: Tensor, forward) -> tuple[Tensor, Tensor]:
        """Run the encoder, publish the decoder's entries, return the streams at the cut."""
        model = self.model
        streams, pre = model.run_layers(*model.embed_streams(ids), forward, self._encoder)
        model.note_encoder_output(streams, pre, forward)
        if self.mode != "full":
            for spec in self._decoder:
                if spec.owns_kv:
                    model.layers[spec.layer_id].publish(streams, pre, forward)
        add_counts(self.layer_tokens, forward.layer_tokens)
        return streams, pre

    def _keep(self, streams: Tensor, pre: Tensor, ids: Tensor) -> None:
        """Hold the last rows at the cut until the decoder runs on them."""
        if self._kept is not None:
            old_streams, old_pre, old_ids = self._kept
            streams = torch.cat((old_streams, streams), dim=1)
            pre = torch.cat((old_pre, pre), dim=1)
            ids = torch.cat((old_ids, ids), dim=1)
        if self.rows_kept is not None:
            streams, pre = streams[:, -self.rows_kept :], pre[:, -self.rows_kept :]
            ids = ids[:, -(self.rows_kept + self.state.history_tokens) :]
        self._kept = streams, pre, ids

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Run the decoder on the rows kept and return the last token's hidden row [1, C].

        Rows before it have no logits in modes "exact" and "bounded": who wants log-probabilities of
        the prompt feeds it through `forward_step`, which runs all layers on all tokens.
        """
        model, state = self.model, self.state
        if self._is_finished or self._kept is None:
            raise StateError("prefill: nothing to finish; feed tokens first")
        streams, pre, ids = self._kept
        stop = state.num_tokens
        start = stop - streams.shape[1]
        # Rows whose decoder windows the state still has need not run again.
        resumes = self._has_decoder_windows and start <= state.num_decoder_tokens
        if resumes:
            start = state.num_decoder_tokens
        cut = state.window_start[Half.DECODER] if resumes else start
        continuation = Continuation(
            past=state,
            start=start,
            stop=stop,
            window_start=cut,
            keep_rows=None if resumes else self._exact_window_rows(start),
        )
        rows = stop - start
        history = min(start, state.history_tokens, ids.shape[1] - rows)
        forward = model.continued_state(continuation, ids[:, ids.shape[1] - rows - history :])
        for spec in self._decoder:
            if spec.owns_kv and self.mode != "full":
                forward.entries[spec.layer_id] = state.entries[spec.layer_id].view()[None]
                forward.index_keys[spec.layer_id] = state.index_keys[spec.layer_id].view()[None]
        kept = slice(streams.shape[1] - rows, None)
        streams, pre = model.run_layers(streams[:, kept], pre[:, kept], forward, self._decoder)
        hidden = model.collapsed(streams[:, -1:], pre[:, -1:])[:, 0]
        continuation.commit_layers()
        state.num_decoder_tokens = stop
        state.window_start[Half.DECODER] = cut if self.mode == "bounded" or resumes else 0
        add_counts(self.layer_tokens, forward.layer_tokens)
        self._is_finished, self._kept = True, None
        return hidden
