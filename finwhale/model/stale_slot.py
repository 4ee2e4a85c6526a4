"""The shipped reference's stale-slot rule for index keys in decode, for comparison only (D08).

The reference keeps one shared slot for index keys and refills it only when a layer completes a
group. On a decode step whose group stays open, the ratio-2 indexers therefore score against what
the previous step's last owner left there, the decoder owner's keys. Our default rule is the
owner's own keys, always; this driver reproduces the other rule token by token, so that vectors of
engines that copied it can be checked. Prefill is the same under both rules.
Source: spec/backbone.md section 5.6.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def stale_slot_logits(model, ids: Tensor, prefill_tokens: int) -> Tensor:
    """Return logits [1, T, V] of `prefill_tokens` of prompt, then single-token decode steps.

    ids  [1, T] int64; T - prefill_tokens full forward passes, each over one token more

    Raises ValueError for a batch or a prefill outside 1..T.
    """
    batch, tokens = ids.shape
    if batch != 1 or not 1 <= prefill_tokens <= tokens:
        raise ValueError(
            f"stale slot: got ids {tuple(ids.shape)} with prefill {prefill_tokens}, expected one "
            "row and a prefill between 1 and its length"
        )
    last_owner = [spec.layer_id for spec in model.specs if spec.owns_kv][-1]
    state = model.forward_state(ids[:, :prefill_tokens])
    rows = [model.logits(model.hidden(ids[:, :prefill_tokens], state=state))]
    for length in range(prefill_tokens + 1, tokens + 1):
        left_in_slot = state.index_keys[last_owner]
        prefix = ids[:, :length]
        state = model.forward_state(prefix)
        positions = torch.arange(length)
        # An even position opens a ratio-2 group and completes none; prompt rows saw fresh keys.
        state.stale_rows = ((positions >= prefill_tokens) & (positions % 2 == 0)).unsqueeze(0)
        state.stale_keys = left_in_slot
        rows.append(model.logits(model.hidden(prefix, state=state)[:, -1:]))
    return torch.cat(rows, dim=1)
