"""Token-by-token generation by whole forward passes: no state is kept between steps.

Each new token costs a forward pass over everything before it. That makes this the definition
that cached decoding will be compared with, and slow on long texts. A seed fixes the sampled text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def next_token_probabilities(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the sampling distribution [V] fp32 of one row of logits.

    Temperature 0 puts all mass on the best token, ties to the lowest id. `top_p` keeps the
    smallest set of best tokens whose mass reaches it, always at least one.
    """
    logits = logits.float()
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), logits.numel()).float()
    p = (logits / temperature).softmax(-1)
    if top_p < 1:
        ordered, order = p.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        p = torch.zeros_like(p).scatter(-1, order, torch.where(before < top_p, ordered, 0.0))
    return p / p.sum()


@torch.no_grad()
def generate(
    model,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
) -> Iterator[int]:
    """Yield new token ids one by one; a stop id is yielded and ends the stream.

    Raises ValueError for an empty prompt, a negative temperature, a top_p outside (0, 1], or
    logits that are not finite.
    """
    if not ids:
        raise ValueError("prompt: got no tokens, expected at least one (begin with the bos id)")
    if temperature < 0:
        raise ValueError(f"temperature: got {temperature}, expected 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}, expected a share in (0, 1]")
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.tensor([list(ids)], dtype=torch.int64)
    for _ in range(max_new_tokens):
        logits = model.logits(model.hidden(sequence)[:, -1])[0]
        if not torch.isfinite(logits).all():
            raise ValueError(f"logits: not finite at position {sequence.shape[1] - 1}")
        p = next_token_probabilities(logits, temperature, top_p)
        token = (
            int(torch.multinomial(p, 1, generator=generator)) if temperature else int(p.argmax())
        )
        yield token
        if token in stop_ids:
            return
        sequence = torch.cat((sequence, torch.tensor([[token]])), dim=1)
