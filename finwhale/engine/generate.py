"""Token-by-token generation: prefill once, then one token per step on the sequence's state.

`generate_uncached` is the definition: a whole forward pass per token, nothing kept. The two give
the same tokens, greedy or sampled with a seed, wherever fp32 sums do not decide between two tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from finwhale.cache.sequence_state import SequenceState, fresh_state
from finwhale.engine.prefill import Prefill
from finwhale.engine.step import forward_step


@dataclass(kw_only=True, slots=True)
class GenerationStats:
    """What a generation ran and holds; filled while it runs.

    prefill_layer_tokens, decode_layer_tokens  rows per layer, counted where the layers run
    state_bytes                                bytes by kind in the deployed records
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_layer_tokens: dict[int, int] = field(default_factory=dict)
    decode_layer_tokens: dict[int, int] = field(default_factory=dict)
    state_bytes: dict[str, int] = field(default_factory=dict)
    state: SequenceState | None = None

    def held(self) -> SequenceState:
        """Return the state of the running generation."""
        if self.state is None:
            raise ValueError("stats: no generation has used them yet")
        return self.state

    def lines(self) -> list[str]:
        """Return what a person wants to know afterwards, a line each."""
        layers = len(self.prefill_layer_tokens)
        ran, all_of_it = sum(self.prefill_layer_tokens.values()), self.prompt_tokens * layers
        kinds = ", ".join(f"{kind} {size:,}" for kind, size in self.state_bytes.items())
        decoded = sum(self.decode_layer_tokens.values())
        return [
            f"prefill  {self.prompt_tokens} tokens, {ran:,} layer-tokens of {all_of_it:,}, "
            f"{self.prefill_s:.2f} s",
            f"decode   {self.new_tokens} tokens, {decoded:,} layer-tokens, "
            f"{self.decode_tps:.1f} tokens/s",
            f"state    {sum(self.state_bytes.values()):,} bytes: {kinds}",
        ]

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first, which the prefill pays for."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s else 0.0


def next_token_probabilities(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the sampling distribution [V] fp32 of one row of logits.

    Temperature 0 puts all mass on the best token, ties to the lowest id. `top_p` keeps the
    smallest set of best tokens whose mass reaches it, always at least one.
    """
    logits = logits.float()
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), logits.numel()).float()
    p = ((logits - logits.max()) / temperature).softmax(-1)
    if top_p < 1:
        ordered, order = p.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        p = torch.zeros_like(p).scatter(-1, order, torch.where(before < top_p, ordered, 0.0))
    return p / p.sum()


def check_sampling(
    num_prompt_tokens: int, max_new_tokens: int, temperature: float, top_p: float
) -> None:
    """Raise ValueError that names the option which no generation could follow."""
    if not num_prompt_tokens:
        raise ValueError("prompt: got no tokens, expected at least one (begin with the bos id)")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, expected 0 or more")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: got {temperature}, expected 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}, expected a share in (0, 1]")


class _Sampler:
    """Draws token ids from logits."""

    def __init__(self, temperature: float, top_p: float, seed: int):
        self.temperature, self.top_p = temperature, top_p
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, logits: Tensor, position: int) -> int:
        """Return a token id for logits [V] of the token at `position`."""
        if not torch.isfinite(logits).all():
            raise ValueError(f"logits: not finite at position {position}")
        p = next_token_probabilities(logits, self.temperature, self.top_p)
        if not self.temperature:
            return int(p.argmax())
        return int(torch.multinomial(p, 1, generator=self.generator))


def generate(
    model,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    prefill: str = "exact",
    stats: GenerationStats | None = None,
) -> Iterator[int]:
    """Yield new token ids one by one; a stop id is yielded and ends the stream.

    prefill  "exact" or "full" give the same tokens; "bounded" is the approximation A01
    stats    filled as the generation goes on

    Raises ValueError for an empty prompt, a negative temperature, a top_p outside (0, 1], or
    logits that are not finite.
    """
    check_sampling(len(ids), max_new_tokens, temperature, top_p)
    sampler = _Sampler(temperature, top_p, seed)
    stats = GenerationStats() if stats is None else stats
    state = fresh_state(model, max_rollback=0)
    stats.state, stats.prompt_tokens = state, len(ids)
    return _decode(model, list(ids), max_new_tokens, sampler, set(stop_ids), prefill, stats)


def _decode(model, ids, max_new_tokens, sampler, stop_ids, mode, stats) -> Iterator[int]:
    if max_new_tokens < 1:
        return
    state, started = stats.held(), time.perf_counter()
    session = Prefill(model, state, mode=mode)
    session.feed(torch.tensor([ids], dtype=torch.int64))
    hidden = session.finish()
    stats.prefill_layer_tokens = session.layer_tokens
    stats.prefill_s = time.perf_counter() - started
    for n in range(max_new_tokens):
        with torch.no_grad():
            logits = model.logits(hidden)[0]
        token = sampler.draw(logits, state.num_tokens - 1)
        stats.new_tokens, stats.state_bytes = n + 1, state.num_bytes()
        yield token
        if token in stop_ids or n + 1 == max_new_tokens:
            return
        started = time.perf_counter()
        step = torch.tensor([[token]], dtype=torch.int64)
        hidden = forward_step(model, state, step, layer_tokens=stats.decode_layer_tokens)[:, -1]
        stats.decode_s += time.perf_counter() - started


@torch.no_grad()
def generate_uncached(
    model,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
) -> Iterator[int]:
    """Yield what `generate` yields, by whole forward passes over everything before each token."""
    check_sampling(len(ids), max_new_tokens, temperature, top_p)
    sampler = _Sampler(temperature, top_p, seed)
    sequence = torch.tensor([list(ids)], dtype=torch.int64)
    for _ in range(max_new_tokens):
        logits = model.logits(model.hidden(sequence)[:, -1])[0]
        token = sampler.draw(logits, sequence.shape[1] - 1)
        yield token
        if token in stop_ids:
            return
        sequence = torch.cat((sequence, torch.tensor([[token]])), dim=1)
