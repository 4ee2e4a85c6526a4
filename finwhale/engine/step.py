"""One forward pass on top of a sequence's state: any number of tokens, all layers.

With one token this is decoding, with many it is a plain chunk of prefill; both equal the same
rows of one whole forward pass. Source: spec/backbone.md section 3 (decode).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from finwhale.cache.sequence_state import SequenceState, StateError, as_id_rows
from finwhale.config.layers import Half
from finwhale.model.continuation import Continuation


def check_fits(model, state: SequenceState) -> None:
    """Raise StateError unless `state` belongs to this model's geometry and numerics."""
    if state.config != model.config.text_config:
        raise StateError("state: made for another model configuration")
    if state.numerics != str(model.numerics):
        raise StateError(f"state: numerics {state.numerics}, this model's are {model.numerics}")


def with_history(state: SequenceState, ids: Tensor) -> Tensor:
    """Return ids [1, T] behind the earlier ids that an n-gram can reach, [1, h + T]."""
    reach = state.history_tokens
    earlier = state.recent_ids.last(state.num_tokens - reach)
    if earlier is None or not reach:
        return ids
    return torch.cat((earlier[-reach:].T.to(ids.device), ids), dim=1)


def commit_ids(state: SequenceState, ids: Tensor) -> None:
    """Add `ids` [1, T] to the token history and count them."""
    rows = as_id_rows(ids)
    if state.recent_ids.rows is not None:
        rows = torch.cat((state.recent_ids.rows.to(rows.device), rows))
    state.num_tokens += ids.shape[1]
    state.add_ids(ids[0].tolist())
    if state.recent_ids.capacity:
        state.recent_ids = state.recent_ids.replaced(rows, state.num_tokens)


@torch.no_grad()
def forward_step(
    model,
    state: SequenceState,
    ids: Tensor,
    *,
    trace: dict[str, Any] | None = None,
    layer_tokens: dict[int, int] | None = None,
) -> Tensor:
    """Run all layers on the next tokens of a sequence and return their hidden rows.

    ids           [1, T] int64, T >= 1
    layer_tokens  gets the rows that each layer ran on added
    returns       [1, T, C]; `model.logits` turns rows into logits

    The state advances when the pass has succeeded, not before.
    Raises StateError for an open prefill or a state of another model, ValueError for bad ids.
    """
    check_fits(model, state)
    model.check_ids(ids, state.num_tokens)
    if ids.shape[0] != 1 or not ids.shape[1]:
        raise ValueError(f"ids: got {tuple(ids.shape)}, expected one row of at least one token")
    state.check_ready("step")
    start = state.num_tokens
    # Both halves reach back the same way unless one of them was replayed with a cut window.
    shared = {
        "past": state,
        "start": start,
        "stop": start + ids.shape[1],
    }
    halves = [
        Continuation(**shared, window_start=state.window_start[half])
        for half in (Half.ENCODER, Half.DECODER)
    ]
    streams, pre = model.embed_streams(ids)
    forward = model.continued_state(halves[0], with_history(state, ids), trace)
    for half, continuation in zip((Half.ENCODER, Half.DECODER), halves, strict=True):
        forward.continuation = continuation
        specs = [spec for spec in model.specs if spec.half is half]
        streams, pre = model.run_layers(streams, pre, forward, specs)
    hidden = model.collapsed(streams, pre)
    for continuation in halves:
        continuation.commit_layers()
    commit_ids(state, ids)
    state.num_decoder_tokens = state.num_tokens
    add_counts(layer_tokens, forward.layer_tokens)
    return hidden


def add_counts(total: dict[int, int] | None, counts: dict[int, int]) -> None:
    """Add rows per layer to a running total, if there is one."""
    if total is not None:
        for layer, rows in counts.items():
            total[layer] = total.get(layer, 0) + rows
