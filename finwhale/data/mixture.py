"""Rows for one whole run: text, generated long-context documents and conversations, in shares.

A share is a share of the tokens that the run reads. Text is repeated as often as its share asks
for, whole documents at a time; generated documents never come twice, since Engram's tables learn a
document by heart at its second coming. Every document says which of its tokens are targets: all of
a text, the answers of a generated one, the assistant's part of a conversation. The easy mistake:
a share counted in documents or in targets, when generated documents are long and answer little.
Source: spec/training.md II.4.4, II.4.5 (mixture).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from finwhale.data.long_tasks import TASKS, Alphabet, TaskError, alphabet

# Documents that one part of the work makes.
_DOCUMENTS_OF_ONE_PART = 64
# How often a document's filler is real text, where there is some, instead of single ids. Only of
# kinds whose facts begin with a marker: a bare pair would compete with its key in the text.
_TEXT_SHARE = 0.5
_MARKED_KINDS = ("needle", "needles", "long_copy", "variable_tracking")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """ids [n] of any integer dtype; is_target [n] bool, of which the first is never used."""

    ids: np.ndarray
    is_target: np.ndarray

    @classmethod
    def of_text(cls, ids: np.ndarray) -> Document:
        """Return a document whose every token is a target."""
        return cls(ids=ids, is_target=np.ones(len(ids), dtype=bool))


def shares(mixture: Sequence[str]) -> dict[str, float]:
    """Return NAME=SHARE strings as a dict. Raises TaskError for a share outside 0 to 1."""
    found: dict[str, float] = {}
    for item in mixture:
        name, _, text = item.rpartition("=")
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if not name or not 0 < share <= 1:
            raise TaskError(f"data.mixture: got {item!r}, expected NAME=SHARE, above 0, at most 1")
        if name in found:
            raise TaskError(f"data.mixture: {name} is named twice")
        found[name] = share
    if sum(found.values()) > 1 + 1e-9:
        raise TaskError(f"data.mixture: shares sum to {sum(found.values()):g}, expected at most 1")
    return found


def repeated(
    documents: Sequence[Document], *, tokens: int, seed: int, max_epochs: float
) -> list[Document]:
    """Return documents of about `tokens` tokens, in a new random order for every epoch.

    The last epoch is cut to the first documents that fill it. Packing sorts by length afterwards,
    so copies of a short document may meet in one row, where they do not see each other.

    Raises TaskError if that takes more than `max_epochs` epochs, or there is no document at all.
    """
    if tokens <= 0:
        return []
    size = sum(len(document.ids) for document in documents)
    if size == 0:
        raise TaskError("data.mixture: there is no text to fill its share with")
    if tokens > max_epochs * size:
        raise TaskError(
            f"data.mixture: text of {size:,} tokens would be read {tokens / size:.2f} times, "
            f"expected at most {max_epochs:g} (data.max_epochs); take fewer steps or more text"
        )
    found: list[Document] = []
    left = tokens
    for epoch in range(-(-tokens // size)):
        for place in np.random.default_rng((seed, epoch)).permutation(len(documents)).tolist():
            if left <= 0:
                return found
            found.append(documents[place])
            left -= len(documents[place].ids)
    return found


def generated(
    kind: str,
    *,
    tokens: int,
    seed: int,
    vocab: range,
    bos_id: int,
    lengths: tuple[int, int],
    text: np.ndarray | None = None,
    map_parts: Callable[..., Iterable] = map,
) -> list[Document]:
    """Return documents of one kind with at least `tokens` tokens in all.

    lengths    shortest and longest document; drawn evenly in the logarithm
    text       ids of real text: half of the documents of some kinds use pieces of it as filler
    map_parts  how parts are made: the built-in map, or that of a process pool

    Document n is a function of kind, seed and n. Raises TaskError for an unknown kind.
    """
    if kind not in MIXED_TASKS:
        raise TaskError(f"data.mixture: got {kind!r}, expected one of {', '.join(MIXED_TASKS)}")
    low, high = lengths
    # Mean of a length drawn evenly in its logarithm.
    mean = (high - low) / np.log(high / low) if high > low else low
    make = partial(
        _documents,
        kind=kind,
        seed=seed,
        roles=alphabet(vocab),
        bos_id=bos_id,
        lengths=lengths,
        text=text,
    )
    found: list[Document] = []
    made, left = 0, tokens
    while left > 0:
        parts = max(1, int(left / mean / _DOCUMENTS_OF_ONE_PART))
        starts = range(made, made + parts * _DOCUMENTS_OF_ONE_PART, _DOCUMENTS_OF_ONE_PART)
        ranges = [range(start, start + _DOCUMENTS_OF_ONE_PART) for start in starts]
        made = starts.stop
        for documents in map_parts(make, ranges):
            for document in documents:
                if left > 0:
                    found.append(document)
                    left -= len(document.ids)
    return found


def _documents(indices: range, **options: Any) -> list[Document]:
    return [mixed_document(index=index, **options) for index in indices]


def mixed_document(
    *,
    kind: str,
    seed: int,
    index: int,
    roles: Alphabet,
    bos_id: int,
    lengths: tuple[int, int],
    text: np.ndarray | None = None,
) -> Document:
    """Return document `index` of a kind: its length and options are drawn from seed and index.

    It begins with the begin marker and up to seven fillers, so that pairs fall on both halves of a
    compression group.
    """
    rng = np.random.default_rng((seed, index))
    low, high = lengths
    length = int(low * (high / low) ** rng.random())
    if text is not None and kind in _MARKED_KINDS and rng.random() < _TEXT_SHARE:
        roles = replace(roles, text=text)
    shift = int(rng.integers(8))
    head = [bos_id, *(roles.fillers[int(i)] for i in rng.integers(len(roles.fillers), size=shift))]
    options = MIXED_TASKS[kind](rng, length - len(head), roles)
    example = TASKS[kind](rng, length=length - len(head), vocab=roles, **options)
    return Document(
        ids=np.array([*head, *example.tokens], dtype=np.int32),
        is_target=np.array([*([False] * len(head)), *example.answer_mask], dtype=bool),
    )


def _count(rng: np.random.Generator, low: int, high: int) -> int:
    """Return a number from low to high, evenly in its logarithm."""
    high = max(low, high)
    return int(low * ((high + 1) / low) ** rng.random())


def _repeated_recall(rng: np.random.Generator, length: int, roles: Alphabet) -> dict[str, Any]:
    # Three rounds at least, so that every key is asked twice.
    most = min(length // 6, len(roles.keys), len(roles.values))
    return {"num_keys": _count(rng, 4, most), "window": 0}


def _associative_recall(rng: np.random.Generator, length: int, roles: Alphabet) -> dict[str, Any]:
    pairs = _count(rng, 2, min(length // 8, len(roles.keys), len(roles.values)))
    return {"num_pairs": pairs, "num_queries": pairs, "scattered": 1}


def _needle(rng: np.random.Generator, length: int, roles: Alphabet) -> dict[str, Any]:
    return {
        "depth": float(rng.random()),
        "num_values": _count(rng, 1, 8),
        "num_distractors": int(rng.integers(5)),
    }


def _needles(rng: np.random.Generator, length: int, roles: Alphabet) -> dict[str, Any]:
    num_values = _count(rng, 1, 4)
    # Facts and questions take half of the document at most.
    most = min(length // (4 * (2 + num_values)), len(roles.keys), len(roles.values) // num_values)
    return {"num_facts": _count(rng, 2, most), "num_values": num_values}


def _long_copy(rng: np.random.Generator, length: int, roles: Alphabet) -> dict[str, Any]:
    return {"span": _count(rng, 8, length // 3)}


def _variable_tracking(rng: np.random.Generator, length: int, roles: Alphabet) -> dict[str, Any]:
    return {"hops": int(rng.integers(1, 4)), "num_chains": int(rng.integers(2, 5))}


# How each kind draws its options from a length. Kinds that a small model cannot learn in passing
# (hidden pairs, two-step lookups) stay runs of their own.
MIXED_TASKS: dict[str, Callable[[np.random.Generator, int, Alphabet], dict[str, Any]]] = {
    "repeated_recall": _repeated_recall,
    "associative_recall": _associative_recall,
    "needle": _needle,
    "needles": _needles,
    "long_copy": _long_copy,
    "variable_tracking": _variable_tracking,
}
# The longest fixed part among the kinds: variable tracking of 4 chains over 3 hops.
MIN_MIXED_TOKENS = 96


def split_documents(
    documents: Iterable[Document], sequence_length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids, is_target) of documents that hold a target at all, as `packing.pack` wants them.

    A generated document must not be cut, as its question would lose its facts.
    """
    for document in documents:
        if not document.is_target[1:].any():
            continue
        is_text = bool(document.is_target[1:].all())
        if not is_text and len(document.ids) > sequence_length + 1:
            raise TaskError(
                f"data.mixture: a document of {len(document.ids)} tokens does not fit a row of "
                f"{sequence_length}"
            )
        yield document.ids, document.is_target
