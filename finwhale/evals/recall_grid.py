"""Recall over depth and length: is a fact found wherever it lies in a row of any length?

Owns grids of two generated tasks, `needle` and `associative_recall`, whose fact lies at a given
fraction of the filler and whose question ends the row. A cell says how many of its examples were
answered, the 95 % interval of that share, and how far the question was from the answer: beyond
window times layers no chain of windows carries it, so what is right there came through entries.
Refused: rows that do not hold the facts. The easy mistake: counting answer tokens; a model that
has the first can copy the others, so an example is right only when all its answer is.
Source: spec/training.md II.4.4, items 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from finwhale.config.layers import PoolUse
from finwhale.data import long_tasks
from finwhale.data.long_tasks import Alphabet, Example, TaskError
from finwhale.data.packing import NO_TARGET, PackedRows
from finwhale.evals.position_bits import EvaluationError, check_fits, forward_passes
from finwhale.model import Backbone

KINDS = ("needle", "associative_recall")
_OPTIONS = {
    "needle": ("num_values", "num_distractors"),
    "associative_recall": ("num_pairs", "num_keys", "spread"),
}
# Of the normal distribution, for 95 % in the middle.
_QUANTILE = 1.959964


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallCell:
    """One cell: examples of one row length with the fact at one depth.

    length        tokens read; the last of them asks for the answer's last token
    depth         fraction of the filler before the fact: 0 is first, 1 beside the question
    min_distance, max_distance
                  tokens from the answer in the fact to the key in the question, over the examples
    beyond_reach  min_distance is more than the tokens that windows reach through all layers
    """

    length: int
    depth: float
    num_examples: int
    num_right: int
    min_distance: int
    max_distance: int
    beyond_reach: bool

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_examples

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.num_right, self.num_examples)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallGrid:
    """All cells of one kind, lengths outside and depths inside.

    chance  share of right first answer tokens of a reader that cannot look anything up
    reach   tokens that windows reach through all layers, the limit of `beyond_reach`
    filler  "ids" or "text"
    """

    kind: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    chance: float
    reach: int
    filler: str
    cells: tuple[RecallCell, ...]

    def cell(self, length: int, depth: float) -> RecallCell:
        """Return one cell."""
        place = self.lengths.index(length) * len(self.depths) + self.depths.index(depth)
        return self.cells[place]


def wilson_interval(num_right: int, num_examples: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, good near 0 and 1 and for few examples (Wilson).

    (p + z^2 / 2n  +-  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    if not 0 <= num_right <= num_examples or num_examples < 1:
        got = f"{num_right} of {num_examples}"
        raise EvaluationError(f"num_right, num_examples: got {got}, expected 0 to n of n >= 1")
    n, z = num_examples, _QUANTILE
    share = num_right / n
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def selection_limits(model: Backbone) -> dict[str, int]:
    """Return the row lengths up to which a selection still takes every entry, by name.

    At ratio r a row of k * r tokens has k entries; the pool holds blocks * block size of them.
    """
    config = model.config.text_config
    found: dict[str, int] = {}
    for spec in model.specs:
        if spec.owns_topk:
            found[f"top-k, ratio {spec.ratio}"] = config.index_topk * spec.ratio
        if spec.pool is PoolUse.SEARCHES:
            entries = config.candidate_topk_blocks * config.candidate_block_size
            found[f"pool, ratio {spec.ratio}"] = entries * spec.ratio
    return found


def recall_example(
    kind: str,
    *,
    seed: int,
    index: int,
    length: int,
    depth: float,
    vocab: range,
    bos_id: int | None = None,
    haystack: np.ndarray | None = None,
    **options: float,
) -> tuple[Example, int]:
    """Return example `index` of a cell, length + 1 tokens, and the distance of its question.

    The draw depends on seed, index and length, not on depth: cells of one length differ in the
    place of the fact and nothing else. In `associative_recall` all pairs lie at the depth and one
    is asked for. Distance: from the (first) value in the fact to the key in the question.

    bos_id    begin marker in front, for models that read one before every document
    haystack  ids of real text that replace the filler, a contiguous stretch per example; ids that
              mean something in the example are left out of it
    """
    if kind not in KINDS:
        raise EvaluationError(f"kind: got {kind!r}, expected one of {', '.join(KINDS)}")
    unknown = sorted(set(options) - set(_OPTIONS[kind]))
    if unknown:
        known = ", ".join(_OPTIONS[kind])
        raise EvaluationError(f"options of {kind}: got {unknown[0]!r}, expected some of {known}")
    if not 0 <= depth <= 1:
        raise EvaluationError(f"depths: got {depth}, expected 0 to 1")
    make: Callable[..., Example] = {"needle": _needle, "associative_recall": _pairs_at}[kind]
    try:
        rng = np.random.default_rng((seed, index))
        head = [] if bos_id is None else [bos_id]
        example = make(rng, length=length + 1 - len(head), vocab=vocab, depth=depth, **options)
    except TaskError as error:
        raise EvaluationError(f"lengths: a row of {length} tokens: {error}") from None
    if haystack is not None:
        rng = np.random.default_rng((seed, index, 1))
        roles = long_tasks.alphabet(vocab)
        example = _with_text(rng, example, roles, np.asarray(haystack))
    example = replace(
        example,
        tokens=[*head, *example.tokens],
        answer_mask=[*([False] * len(head)), *example.answer_mask],
    )
    asking = example.answer_mask.index(True) - 1
    fact = example.tokens.index(example.tokens[asking])
    return example, asking - (fact + 1)


def _needle(rng: np.random.Generator, **options) -> Example:
    return long_tasks.needle(rng, **options)


def _pairs_at(
    rng: np.random.Generator,
    *,
    length: int,
    vocab: range,
    depth: float,
    num_pairs: int = 8,
    num_keys: int = 0,
    spread: float = 0.0,
) -> Example:
    """Return the trained task with its pairs moved to `depth`, and one question.

    spread  share of the filler among which the pairs are scattered, whole; 0: one block. That
            stretch lies at `depth` of the filler's rest: first at 0, beside the question at 1
    """
    if not 0 <= spread <= 1:
        raise TaskError(f"spread: got {spread}, expected 0 to 1")
    example = long_tasks.associative_recall(
        rng, length=length, vocab=vocab, num_pairs=num_pairs, num_queries=1, num_keys=num_keys
    )
    tokens, size = example.tokens, 2 * num_pairs
    pairs, filler, question = tokens[:size], tokens[size:-3], tokens[-3:]
    width = round(spread * len(filler))
    first = round(depth * (len(filler) - width))
    places = np.sort(first + rng.integers(0, width + 1, size=num_pairs))
    # At one place, what is named first is inserted first: pairs stay whole.
    body = np.insert(np.array(filler, dtype=np.int64), np.repeat(places, 2), pairs)
    return replace(example, tokens=[*body.tolist(), *question])


def _with_text(
    rng: np.random.Generator, example: Example, roles: Alphabet, haystack: np.ndarray
) -> Example:
    """Return the example with a stretch of the haystack instead of its filler ids."""
    tokens = np.array(example.tokens)
    is_filler = (tokens >= roles.fillers.start) & (tokens < roles.fillers.stop)
    room = int(is_filler.sum())
    start = int(rng.integers(max(1, len(haystack))))
    text = np.concatenate([haystack[start:], haystack[:start]])
    # A stretch twice as long has enough ids left nearly always; the whole text is slow to filter.
    for stretch in (text[: 2 * room + 1024], text):
        usable = stretch[~np.isin(stretch, tokens[~is_filler])]
        if len(usable) >= room:
            break
    else:
        raise EvaluationError(
            f"haystack: got {len(usable)} usable ids, expected at least {room}; give more text"
        )
    tokens[is_filler] = usable[:room]
    return replace(example, tokens=tokens.tolist())


def _one_row_each(examples: Sequence[Example], length: int) -> PackedRows:
    """Return rows [R, T] of one example each; only answers are targets."""
    tokens = np.array([example.tokens for example in examples], dtype=np.int32)  # [R, T + 1]
    is_answer = np.array([example.answer_mask for example in examples])
    return PackedRows(
        inputs=tokens[:, :-1],
        targets=np.where(is_answer[:, 1:], tokens[:, 1:], NO_TARGET).astype(np.int32),
        lengths=((length,),) * len(examples),
    )


def rows_answered(
    model: Backbone, packed: PackedRows, *, batch_rows: int | None = None
) -> np.ndarray:
    """Return [R] bool: every target of the row is what the model ranks first."""
    answered = np.ones(packed.num_rows, dtype=bool)
    for rows, batch, hidden in forward_passes(model, packed, batch_rows=batch_rows):
        has_target = batch.targets != NO_TARGET
        with torch.no_grad():
            best = model.logits(hidden[has_target]).argmax(-1)
        wrong = (best != batch.targets[has_target]).cpu().numpy()
        row_of = has_target.nonzero()[:, 0].cpu().numpy()
        answered[rows[row_of[wrong]]] = False
    return answered


def recall_grid(
    model: Backbone,
    *,
    kind: str,
    lengths: Sequence[int],
    depths: Sequence[float],
    num_examples: int,
    vocab: range | None = None,
    seed: int = 0,
    bos_id: int | None = None,
    haystack: np.ndarray | None = None,
    batch_tokens: int = 4096,
    reach: int | None = None,
    **options: float,
) -> RecallGrid:
    """Return the grid of one kind.

    model         a Backbone, or a baseline with `hidden`, `logits`, `embed`, `specs`, `config`
    num_examples  per cell, one question each, so they count as independent
    vocab         ids of the task's roles, as in training; None: all but the first and the last
    bos_id        begin marker in front of every example; None: none, as in runs of one task
    haystack      ids of text that replace the filler (`recall_example`)
    seed          draws the examples; not the training's own
    batch_tokens  tokens of a pass; all rows of a length are batched together, one shape each
    reach         tokens that the windows of all layers reach; None: window times layers
    options       of the kind: num_values, num_distractors; num_pairs, num_keys, spread
    """
    config = model.config.text_config
    for name, values in (("lengths", lengths), ("depths", depths)):
        if not len(values) or len(set(values)) != len(values):
            raise EvaluationError(f"{name}: got {list(values)}, expected different values")
    if num_examples < 1:
        raise EvaluationError(f"num_examples: got {num_examples}, expected at least 1")
    vocab = range(1, config.vocab_size - 1) if vocab is None else vocab
    reach = config.sliding_window * config.num_hidden_layers if reach is None else reach
    cells: list[RecallCell] = []
    chance = math.nan
    for length in lengths:
        made = [
            recall_example(
                kind,
                seed=seed,
                index=index,
                length=length,
                depth=depth,
                vocab=vocab,
                bos_id=bos_id,
                haystack=haystack,
                **options,
            )
            for depth in depths
            for index in range(num_examples)
        ]
        packed = _one_row_each([example for example, _ in made], length)
        check_fits(model, length, packed.inputs, "lengths, vocab, haystack")
        size = max(1, batch_tokens // length)
        answered = rows_answered(model, packed, batch_rows=size).reshape(len(depths), -1)
        distances = np.array([distance for _, distance in made]).reshape(len(depths), -1)
        chance = made[0][0].chance
        cells += [
            RecallCell(
                length=length,
                depth=depth,
                num_examples=num_examples,
                num_right=int(answered[place].sum()),
                min_distance=int(distances[place].min()),
                max_distance=int(distances[place].max()),
                beyond_reach=bool(distances[place].min() > reach),
            )
            for place, depth in enumerate(depths)
        ]
    return RecallGrid(
        kind=kind,
        lengths=tuple(lengths),
        depths=tuple(depths),
        chance=chance,
        reach=reach,
        filler="ids" if haystack is None else "text",
        cells=tuple(cells),
    )
