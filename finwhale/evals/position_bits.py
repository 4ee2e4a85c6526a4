"""Bits per byte and nats per token by position in the document: what distance is worth.

Owns the cut of one validation score into buckets of position: every document is read from its
first token, at most `sequence_length` pairs of it, and the nats of each target go to the bucket of
the position that predicts it. The buckets' sums add up to the whole, which is the score of
`finwhale.train.evaluate.bits_per_byte` on the same rows. Refused: buckets that leave a position
out. The easy mistake: later buckets hold long documents only, so two buckets of one model compare
other texts; compare two models in one bucket, or give documents of one least length.
Source: spec/training.md II.4.4, item 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from finwhale.data.packing import NO_TARGET, PackedRows, pack
from finwhale.model import Backbone
from finwhale.model.selection_plan import SelectionPlan
from finwhale.train.loss import Batch

if TYPE_CHECKING:
    from finwhale.text.tokenizer import Tokenizer

# Ends of the buckets behind the window, in tokens.
_LATER_EDGES = (1024, 4096, 16384)
# Tokens of one forward pass, where the caller does not say how many rows it has.
_PASS_TOKENS = 4096


class EvaluationError(ValueError):
    """A measurement that was asked for and cannot be made as asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketBits:
    """Sums over the targets whose predicting position is in [first, stop).

    stop           None: no end
    num_documents  documents with at least one target here
    num_bytes      bytes of text of the targets; an end marker has none
    nats           summed negative log-likelihood
    """

    first: int
    stop: int | None
    num_documents: int
    num_targets: int
    num_bytes: int
    nats: float

    @property
    def label(self) -> str:
        return f"{self.first:,}+" if self.stop is None else f"{self.first:,}-{self.stop:,}"

    @property
    def nats_per_token(self) -> float | None:
        """None where the bucket is empty."""
        return self.nats / self.num_targets if self.num_targets else None

    @property
    def bits_per_byte(self) -> float | None:
        """None where the bucket has no text."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None


def default_buckets(window: int) -> tuple[int, ...]:
    """Return the first positions of the buckets: 0, the window, 1K, 4K, 16K."""
    return (0, window, *(edge for edge in _LATER_EDGES if edge > window))


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Return the bytes of text that each id stands for, [V] int64; markers of a document have 0."""
    silent = {*tokenizer.hidden_ids, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    ids = range(tokenizer.vocab_size)
    return np.array([0 if i in silent else len(tokenizer.token_bytes(i)) for i in ids], np.int64)


def read_lengths(documents: Sequence[np.ndarray], sequence_length: int) -> list[np.ndarray]:
    """Return the documents cut to what one row reads: its pairs come from T + 1 tokens."""
    return [document[: sequence_length + 1] for document in documents]


def forward_passes(
    model: Backbone, packed: PackedRows, *, batch_rows: int | None = None
) -> Iterator[tuple[np.ndarray, Batch, Tensor]]:
    """Yield (row numbers, batch, hidden [B, T, C]) over all rows, without gradients, as deployed.

    batch_rows  rows of a pass; None: as many as make 4,096 tokens

    On a GPU every pass has one shape, which is compiled once: the last is filled up with rows that
    have no target, so B may exceed the row numbers. There the deployed selection is a plan, whose
    passes ask the device nothing.
    """
    device = model.embed.weight.device.type
    ratios = tuple(sorted({spec.ratio for spec in model.specs if spec.ratio}))
    size = batch_rows or max(1, _PASS_TOKENS // packed.inputs.shape[1])
    for start in range(0, packed.num_rows, size):
        rows = np.arange(start, min(start + size, packed.num_rows))
        plan = None
        if device == "cpu":
            batch = Batch.of(packed, rows)
        else:
            batch = Batch.of(packed, np.resize(rows, size))
            batch.targets[len(rows) :] = NO_TARGET
            batch = batch.prepared(ratios, device)
            plan = SelectionPlan(uses_pool=True)
        with torch.no_grad():
            hidden = model.hidden(batch.ids, packing=batch.packing, plan=plan)
        yield rows, batch, hidden


def check_fits(model: Backbone, tokens: int, ids: np.ndarray, what: str) -> None:
    """Raise EvaluationError unless rows of `tokens` positions and these ids are the model's.

    A pass with a plan does not look at its ids, and a GPU answers a wrong one with an assertion.
    """
    config = model.config.text_config
    if not 1 <= tokens <= config.max_position_embeddings:
        want = f"1 to max_position_embeddings = {config.max_position_embeddings}"
        raise EvaluationError(f"{what}: got {tokens} tokens, expected {want}; use shorter rows")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise EvaluationError(
            f"{what}: got ids {ids.min()} to {ids.max()}, expected 0 to {config.vocab_size - 1}; "
            "use the model's own tokenizer"
        )


def position_bits(
    model: Backbone,
    documents: Sequence[np.ndarray],
    *,
    num_bytes: np.ndarray,
    sequence_length: int,
    buckets: Sequence[int] | None = None,
    batch_rows: int | None = None,
    chunk_tokens: int = 1024,
    pad_id: int = 0,
) -> list[BucketBits]:
    """Return the score of every bucket of positions, in order.

    model            a Backbone, or a baseline with `hidden`, `logits`, `embed`, `specs`, `config`
    documents        token ids of each document, from its begin to its end marker
    num_bytes        [V] bytes of text per id (`token_bytes`)
    sequence_length  pairs read of each document at most; documents share rows of this length
    buckets          first position of each bucket, beginning with 0; None: `default_buckets`
    chunk_tokens     tokens whose logits exist at one time

    Position p has seen p + 1 tokens and predicts the next. In the first bucket, [0, W), a window
    sees the whole document.
    """
    config = model.config.text_config
    firsts = np.array(default_buckets(config.sliding_window) if buckets is None else buckets)
    if not len(firsts) or firsts[0] != 0 or (np.diff(firsts) <= 0).any():
        raise EvaluationError(
            f"buckets: got {firsts.tolist()}, expected 0 and then larger positions in order"
        )
    num_bytes = np.asarray(num_bytes)
    if num_bytes.shape != (config.vocab_size,):
        want = f"({config.vocab_size},), one number for each id of the model"
        raise EvaluationError(f"num_bytes: got {num_bytes.shape}, expected {want}")
    cut = read_lengths(documents, sequence_length)
    # An array is a sequence of ids; its type does not say so.
    packed = pack(cast("list[Sequence[int]]", cut), sequence_length=sequence_length, pad_id=pad_id)
    check_fits(model, sequence_length, packed.inputs, "sequence_length, documents")
    targets = packed.targets[packed.targets != NO_TARGET]
    check_fits(model, sequence_length, targets, "sequence_length, documents")
    nats, counts, sizes = (np.zeros(len(firsts)) for _ in range(3))
    for _, batch, hidden in forward_passes(model, packed, batch_rows=batch_rows):
        has_target = batch.targets != NO_TARGET
        wanted = batch.targets[has_target]  # [n]
        losses = _losses(model, hidden[has_target], wanted, chunk_tokens)
        positions = batch.packing.positions[has_target].cpu().numpy()
        places = np.searchsorted(firsts, positions, side="right") - 1
        for sums, weights in (
            (nats, losses),
            (counts, np.ones(len(losses))),
            (sizes, num_bytes[wanted.cpu().numpy()]),
        ):
            sums += np.bincount(places, weights=weights, minlength=len(firsts))
    pairs = np.array([len(document) - 1 for document in cut])
    stops = [*firsts[1:].tolist(), None]
    return [
        BucketBits(
            first=int(first),
            stop=stop,
            num_documents=int((pairs > first).sum()),
            num_targets=int(counts[place]),
            num_bytes=int(sizes[place]),
            nats=float(nats[place]),
        )
        for place, (first, stop) in enumerate(zip(firsts, stops, strict=True))
    ]


def _losses(model: Backbone, hidden: Tensor, wanted: Tensor, chunk_tokens: int) -> np.ndarray:
    """Return -log p of each target in nats, [n] fp64. hidden [n, C], wanted [n] int64."""
    found = [np.empty(0)]
    for start in range(0, len(wanted), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        with torch.no_grad():
            logits = model.logits(hidden[part])  # [n, V] fp32
            losses = torch.nn.functional.cross_entropy(logits, wanted[part], reduction="none")
        found.append(losses.double().cpu().numpy())
    return np.concatenate(found)


def whole(buckets: Sequence[BucketBits]) -> BucketBits:
    """Return the sum of all buckets: the score without a cut."""
    return BucketBits(
        first=0,
        stop=None,
        num_documents=max((bucket.num_documents for bucket in buckets), default=0),
        num_targets=sum(bucket.num_targets for bucket in buckets),
        num_bytes=sum(bucket.num_bytes for bucket in buckets),
        nats=math.fsum(bucket.nats for bucket in buckets),
    )


def added(cuts: Sequence[Sequence[BucketBits]]) -> list[BucketBits]:
    """Return the buckets of several sets of documents together; all must be cut alike."""
    if not cuts or len({tuple((b.first, b.stop) for b in cut) for cut in cuts}) != 1:
        raise EvaluationError(f"cuts: got {len(cuts)}, expected at least one, with equal buckets")
    return [
        replace(
            same[0],
            num_documents=sum(bucket.num_documents for bucket in same),
            num_targets=sum(bucket.num_targets for bucket in same),
            num_bytes=sum(bucket.num_bytes for bucket in same),
            nats=math.fsum(bucket.nats for bucket in same),
        )
        for same in zip(*cuts, strict=True)
    ]
