"""A conversation of many turns, each resumed from the disk: what bounded replay adds up to.

Owns the chain: turn after turn an engine forgets its memory, opens the disk store again and reads
the text so far, whose blocks it or earlier turns wrote. With `bounded` a suffix behind a replay
writes global KV that later turns read, so a difference could grow; `exact` must give the bits of
one uninterrupted reading. Turns are pieces of one text (nothing is generated), so all runs read the
same tokens. The easy mistake: a chain served from memory; `loaded_tokens` says what the disk gave.
Source: spec/kv-cache.md section 3.1, item 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine
from finwhale.engine.request import SamplingParams
from finwhale.engine.runner import Runner
from finwhale.evals.position_bits import EvaluationError
from finwhale.model import Backbone
from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one turn did.

    number          from 0, which finds an empty disk
    tokens          of its prompt
    loaded_tokens   that came from the disk
    cached_tokens   of the prompt whose encoder rows did not run
    log_p           [V] of the next token
    """

    number: int
    tokens: int
    loaded_tokens: int
    cached_tokens: int
    log_p: Tensor


class _Listener(Runner):
    """An engine's runner that keeps the logits of its only sequence."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.model, runner.pools, runner.ops, runner.reads)
        self.rows: list[Tensor] = []

    def run(self, work):
        result = super().run(work)
        self.rows += [logits.clone() for logits in result.logits if len(logits)]
        return result


def _engine(model: Backbone, tokens: int, prefill: str, block_size: int, open_tier=None) -> Engine:
    return Engine(
        model,
        EngineConfig(
            prefill=prefill,
            block_size=block_size,
            num_blocks=-(-(tokens + 1) // block_size) + 2,
            max_sequences=1,
            # Windows in memory would spare an exact start its replay: here only the disk is left.
            snapshot_bytes=0,
        ),
        open_tier=open_tier,
    )


def uninterrupted(model: Backbone, ids: Sequence[int], *, block_size: int = 64) -> Tensor:
    """Return log p [T, V] behind every token, read by one engine from nothing."""
    engine = _engine(model, len(ids), "full", block_size)
    listener = engine.runner = _Listener(engine.runner)
    engine.generate([list(ids)], SamplingParams(max_new_tokens=0, prompt_logprobs=0))
    return torch.cat(listener.rows).float().log_softmax(-1)


def chain(
    model: Backbone,
    ids: Sequence[int],
    *,
    lengths: Sequence[int],
    prefill: str,
    folder: Path,
    block_size: int = 64,
    max_bytes: int = 256 << 20,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[Turn]:
    """Yield one turn for each of the growing prompt `lengths`, each resumed from `folder`.

    The store is closed and opened again between turns, and nothing is left in memory.
    """
    if sorted(set(lengths)) != list(lengths) or not lengths or not 0 < lengths[-1] <= len(ids):
        raise EvaluationError(f"lengths: expected growing ones up to {len(ids)} ids")

    def open_tier(namespace: bytes, sizes: tuple[int, ...]) -> DiskStore:
        return DiskStore(
            DiskStoreConfig(
                directory=folder,
                namespace=namespace,
                max_bytes=max_bytes,
                segment_bytes=max_bytes // 8 // 4096 * 4096,
                group_bytes=sizes,
            )
        )

    engine = _engine(model, lengths[-1], prefill, block_size, open_tier)
    listener = engine.runner = _Listener(engine.runner)
    try:
        for number, length in enumerate(lengths):
            if number:
                # Weights are as they were, so the namespace is too: this only empties the memory
                # and opens the store anew.
                engine.weights_changed()
            listener.rows.clear()
            before = engine.scheduler.stats.loaded_tokens
            engine.add(list(ids[:length]), SamplingParams(max_new_tokens=1, temperature=0))
            cached = 0
            while engine.has_work:
                for output in engine.step():
                    if output.error is not None:
                        raise EvaluationError(f"turn {number}: {output.error}")
                    cached = max(cached, output.num_cached_tokens)
            loaded = engine.scheduler.stats.loaded_tokens - before
            note(f"turn {number}: {length} tokens, {loaded} from the disk")
            yield Turn(
                number=number,
                tokens=length,
                loaded_tokens=loaded,
                cached_tokens=cached,
                log_p=listener.rows[-1][-1].float().log_softmax(-1),
            )
    finally:
        engine.close()
