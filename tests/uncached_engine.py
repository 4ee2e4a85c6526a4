"""The reference that the engine is judged by: one whole pass from nothing, same arithmetic.

Owns a `Backbone` whose attention and index scores go through the paged reads, on rows that were
rounded by the model itself and lie here in fp32. There are no pools, blocks, slots, chunks,
schedulers and no packed bytes, so whatever these break shows up as different bits. Below it are
two ways to drive what is judged: `drain` an engine, `scheduler_of` without a model. Refused: more
than one sequence in a pass. A newcomer's mistake: to compare with the plain `Backbone`, whose
products have another order of arithmetic; it agrees to rounding only.
Source: spec/backbone.md sections 3 to 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch import Tensor

from finwhale.cache.block_allocator import BlockAllocator
from finwhale.cache.paged_pools import PagedLayout, PagedPools
from finwhale.cache.paged_reads import pack_entry, pack_index, pack_window
from finwhale.cache.prefix_index import Namespace, PrefixIndex
from finwhale.config import preset
from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine
from finwhale.engine.invariance import Reads, engine_ops
from finwhale.engine.request import SamplingParams, TokenResult
from finwhale.engine.runner import with_ops
from finwhale.engine.sampler import draw, token_logprobs
from finwhale.engine.scheduler import Scheduler
from finwhale.engine.sequence import Sequence as Job
from finwhale.model import Backbone


def _attention(reads: Reads, q, window_kv, entries, topk, sink, positions, window: int) -> Tensor:
    """`sparse_attention_ref` of one whole sequence: arguments and result as there, B = 1."""
    assert q.shape[0] == 1
    assert torch.equal(positions[0], torch.arange(q.shape[1]))
    fresh = pack_window(window_kv[0], "fp32")
    # Slot j of a window is position p - W + 1 + j; without a ring, row t of the call is index t.
    index = positions[0][:, None] + torch.arange(1 - window, 1)
    chosen = torch.zeros(q.shape[1], 0, dtype=torch.int64) if topk is None else topk[0]
    rows = None if entries is None else pack_entry(entries[0], "fp32")
    ring = fresh.new_empty(0, fresh.shape[1])
    visible = torch.where(index < 0, -1, index)
    return reads.attention(q[0], fresh, ring, visible, rows, chosen, sink, "fp32")[None]


def _index_scores(reads: Reads, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`index_scores` of one whole sequence whose M keys are one block, all of them visible."""
    tokens, num_keys = q.shape[1], keys.shape[1]
    if not num_keys:
        return q.new_empty(1, tokens, 0)
    return reads.index_scores(
        q[0],
        weights[0],
        pack_index(keys[0], "fp32"),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(tokens, dtype=torch.int64),
        torch.full((tokens,), num_keys),
        num_keys,
        "fp32",
        num_keys,
    )[None]


@cache
def reference(model: Backbone, kernels: str) -> Backbone:
    """Return a twin of `model` that shares its weights and computes as an engine does."""
    ops, reads = engine_ops(kernels, batch_invariant=True)
    own = replace(
        ops,
        sparse_attention=partial(_attention, reads),
        index_scores=partial(_index_scores, reads),
    )
    return with_ops(model, own)


@cache
def _logits(model: Backbone, kernels: str, ids: tuple[int, ...]) -> Tensor:
    twin = reference(model, kernels)
    with torch.inference_mode():
        return twin.logits(twin.hidden(torch.tensor([ids])))[0]


def uncached(model: Backbone, ids: Sequence[int], kernels: str = "numba") -> Tensor:
    """Return logits [T, V] fp32 of `ids` [T], all layers on all tokens; results are kept."""
    return _logits(model, kernels, tuple(ids))


@dataclass(kw_only=True)
class Served:
    """All that one choice got: the increments joined."""

    results: list[TokenResult] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenResult, ...] | None = None
    num_cached_tokens: int = 0

    @property
    def tokens(self) -> list[int]:
        return [result.token for result in self.results]


def drain(engine: Engine, after_step=None) -> dict[tuple[str, int], Served]:
    """Step until nothing is left and join what came out; `after_step(n)` may do harm in between."""
    found: dict[tuple[str, int], Served] = {}
    steps = 0
    while engine.has_work:
        for output in engine.step():
            own = found.setdefault((output.request_id, output.index), Served())
            own.results += output.new
            own.reason, own.error = output.finish_reason, output.error
            own.num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                own.prompt_logprobs = output.prompt_logprobs
        steps += 1
        assert steps < 1000, "no end in sight"
        if after_step is not None:
            after_step(steps)
    return found


def expected(model: Backbone, prompt, tokens, params, *, seed=0, kernels="numba"):
    """Return the results that a choice must have had, given the tokens that it drew.

    Row P - 1 + n of one pass over prompt and tokens has the logits of new token n. If each token
    is the draw of its own row, the choice is right from its first token to its last.
    """
    logits = uncached(model, [*prompt, *tokens[:-1]], kernels)[len(prompt) - 1 :]
    drawn = [
        draw(row, params, seed=seed, index=n, drawn=Counter(tokens[:n]))
        for n, row in enumerate(logits)
    ]
    return token_logprobs(logits, drawn, params.top_logprobs)


def scheduler_of(config: EngineConfig) -> Scheduler:
    """Return a scheduler on pools of the unit preset, with nobody to compute what it plans."""
    layout = PagedLayout(
        config=preset("unit").text_config, block_size=config.block_size, storage="fp4"
    )
    pools = PagedPools(layout, num_blocks=config.num_blocks, num_slots=config.max_sequences)
    name = Namespace(
        weights_digest="w", layout="l", numerics="n", tokenizer="t", replay_mode="exact"
    )
    allocator = BlockAllocator(config.num_blocks)
    index = PrefixIndex(allocator, name, config.block_size)
    return Scheduler(config, pools, allocator, index)


def sequence_of(arrival: int, prompt: list[int], new: int) -> Job:
    """Return one choice of a request, not yet queued."""
    return Job(
        request_id=str(arrival),
        index=0,
        params=SamplingParams(max_new_tokens=new),
        tokens=list(prompt),
        num_prompt=len(prompt),
        arrival=arrival,
        seed=0,
    )
