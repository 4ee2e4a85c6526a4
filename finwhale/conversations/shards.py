"""Encoded conversations on disk: ids, where each ends, and which tokens a model generates.

    OUT/SIDE.ids      uint16 little-endian, all conversations one after another
    OUT/SIDE.lengths  uint32 little-endian, tokens of each conversation
    OUT/SIDE.targets  one bit per token, first token in the highest bit: 1 where the loss counts
    OUT/meta.json     counts per kind and side, digests, seed, versions of what made the text

Each kind gets its share of the tokens, not of the conversations. Refused: files that are not what
meta.json says. The easy mistake: a target bit belongs to the token itself, the one to predict,
not to the position that predicts it. Source: own format; conversations of `tasks`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from finwhale.config.files import FileError, new_folder, read_bytes, read_object, shown, take
from finwhale.conversations.tasks import CHAT_TASKS, HELD_OUT_SEED, chat_example
from finwhale.data.build_corpus import read_record, read_side
from finwhale.data.fetch import Progress
from finwhale.data.shards import MAX_VOCAB_SIZE, ShardError, tokenizer_sha256
from finwhale.text.prompt import encode_conversation
from finwhale.text.tokenizer import Tokenizer

FORMAT = 1
SIDES = ("train", "validation")
# Running text; the code of the corpus makes poor sentences to hide a fact in.
PROSE_SOURCES = (
    "sotu", "moby-dick", "brown", "shakespeare", "jargon", "sqlite-doc", "python-doc",
    "postgresql-doc",
)  # fmt: skip
_META = "meta.json"
_FILES = ("ids", "lengths", "targets")
# Of each group of kinds, by tokens. Half of retrieval is long. Tools pay 300 to 600 tokens for
# their declarations, so they get more than their share of targets would say.
GROUP_SHARES = {"retrieval": 0.35, "reasoning": 0.25, "tools": 0.32, "small talk": 0.08}


def default_weights() -> dict[str, float]:
    """Return the share of the tokens of every kind: GROUP_SHARES, evenly within a group."""
    groups = list(CHAT_TASKS.values())
    return {kind: GROUP_SHARES[group] / groups.count(group) for kind, group in CHAT_TASKS.items()}


def corpus_passages(
    corpus: str | Path, side: str, *, sources: Sequence[str] = PROSE_SOURCES, max_chars: int = 1200
) -> list[str]:
    """Return paragraphs of 80 to `max_chars` characters of one side, neighbours in their order.

    A longer paragraph is cut after a sentence or a line.
    """
    if side not in SIDES:
        raise ShardError(f"side: got {side!r}, expected one of {', '.join(SIDES)}")
    return [
        piece
        for document in read_side(corpus, side)
        if document.package in sources
        for paragraph in document.text.split("\n\n")
        for piece in _pieces(paragraph, max_chars)
        if len(piece) >= 80
    ]


def _pieces(paragraph: str, max_chars: int) -> Iterator[str]:
    """Yield the paragraph in pieces of at most `max_chars`, cut after a sentence or a line."""
    rest = paragraph.strip()
    while len(rest) > max_chars:
        ends = (rest.rfind(mark, 1, max_chars - 1) + 1 for mark in (". ", "? ", "! ", "\n"))
        end = max(ends) or max_chars
        yield rest[:end].strip()
        rest = rest[end:].strip()
    yield rest


class _Side:
    """One side while it is written: the files' bytes and the counts per kind."""

    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.counts: dict[str, dict[str, int]] = {}
        self.seen: set[bytes] = set()
        self.repeats = 0

    def add(self, kind: str, ids: Sequence[int], is_target: Sequence[bool]) -> None:
        array = np.array(ids, dtype="<u2")
        digest = hashlib.sha256(array.tobytes()).digest()
        self.repeats += digest in self.seen
        self.seen.add(digest)
        self.ids.append(array)
        self.targets.append(np.array(is_target, dtype=bool))
        row = self.counts.setdefault(kind, {"conversations": 0, "tokens": 0, "targets": 0})
        row["conversations"] += 1
        row["tokens"] += len(ids)
        row["targets"] += int(sum(is_target))

    def write(self, folder: Path, side: str) -> dict[str, Any]:
        """Write the three files and return the side's entry of meta.json."""
        lengths = np.array([len(ids) for ids in self.ids], dtype="<u4")
        bits = np.concatenate([np.empty(0, bool), *self.targets])
        parts = {
            "ids": b"".join(ids.tobytes() for ids in self.ids),
            "lengths": lengths.tobytes(),
            "targets": np.packbits(bits).tobytes(),
        }
        for name, data in parts.items():
            (folder / f"{side}.{name}").write_bytes(data)
        return {
            "conversations": len(lengths),
            "tokens": int(lengths.sum()),
            "targets": int(bits.sum()),
            "repeats": self.repeats,
            "kinds": dict(sorted(self.counts.items())),
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()},
        }


def _kinds_in_turn(weights: Mapping[str, float], counts: Mapping[str, Mapping]) -> Iterator[str]:
    """Yield again and again the kind that is farthest behind its share of the tokens."""
    while True:
        yield min(weights, key=lambda k: (counts.get(k, {}).get("tokens", 0) / weights[k], k))


def _fill_side(
    tokenizer: Tokenizer,
    weights: Mapping[str, float],
    *,
    num_tokens: int,
    seed: int,
    passages: Sequence[str],
    max_tokens: int,
    encode: Callable[..., tuple[list[int], list[bool]]],
    say: Progress,
) -> tuple[_Side, int]:
    """Return a side of about `num_tokens` tokens, and how many conversations were too long."""
    side, too_long, done, said = _Side(), 0, 0, 0
    next_index = dict.fromkeys(weights, 0)
    for kind in _kinds_in_turn(weights, side.counts):
        if done >= num_tokens:
            return side, too_long
        index = next_index[kind]
        next_index[kind] += 1
        example = chat_example(
            kind, seed=seed, index=index, max_tokens=max_tokens, passages=passages
        )
        ids, is_target = encode(
            tokenizer,
            list(example.messages),
            tools=list(example.tools) or None,
            thinking=example.thinking,
            effort=example.effort,
        )
        if len(ids) > max_tokens:
            too_long += 1
            if too_long > 1000 + sum(next_index.values()) // 2:
                raise ShardError(f"max_tokens: {max_tokens} is too few for {kind}; give more")
            continue
        side.add(kind, ids, is_target)
        done += len(ids)
        if done - said >= 500_000:
            said = done
            say(f"seed {seed}: {done} tokens")
    return side, too_long


def write_chat_shards(
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    train_tokens: int,
    validation_tokens: int,
    weights: Mapping[str, float] | None = None,
    passages: Mapping[str, Sequence[str]] | None = None,
    corpus_digest: str = "",
    seed: int = 0,
    max_tokens: int = 4096,
    encode: Callable[..., tuple[list[int], list[bool]]] = encode_conversation,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write conversations of the given kinds into the folder `out` and return its record.

    weights   kind to share of the tokens, in any unit; default: `default_weights`
    passages  side to real text, each side with its own
    encode    as `finwhale.text.prompt.encode_conversation`
    A conversation longer than `max_tokens` is left out. The folder appears when it is complete.
    Same arguments and versions: same bytes.
    """
    out, say = Path(out), progress or (lambda _: None)
    weights = {k: w for k, w in (weights or default_weights()).items() if w}
    for kind, weight in weights.items():
        if kind not in CHAT_TASKS or weight < 0:
            want = f"a positive share of one of {', '.join(CHAT_TASKS)}"
            raise ShardError(f"weights: got {kind!r}: {weight}, expected {want}")
    if not 0 <= seed < HELD_OUT_SEED:
        raise ShardError(f"seed: got {seed}, expected 0 to {HELD_OUT_SEED - 1}")
    if tokenizer.vocab_size > MAX_VOCAB_SIZE:
        raise ShardError(f"vocab_size: got {tokenizer.vocab_size}, at most {MAX_VOCAB_SIZE} fit")
    if out.exists():
        raise ShardError(f"{out}: is there already; delete it or choose another folder")
    meta: dict[str, Any] = {
        "format": FORMAT,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "corpus_digest": corpus_digest,
        "seed": seed,
        "max_tokens": max_tokens,
        "weights": weights,
        "versions": {name: _version(name) for name in ("reasoning-gym", "deepseek-recipe")},
        "sides": {},
    }
    with new_folder(out) as staging:
        for side, num_tokens in zip(SIDES, (train_tokens, validation_tokens), strict=True):
            filled, too_long = _fill_side(
                tokenizer,
                weights,
                num_tokens=num_tokens,
                seed=seed + (HELD_OUT_SEED if side == "validation" else 0),
                passages=(passages or {}).get(side, ()),
                max_tokens=max_tokens,
                encode=encode,
                say=say,
            )
            meta["sides"][side] = {**filled.write(staging, side), "too_long": too_long}
        (staging / _META).write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
    return meta


def build_chat_shards(
    corpus: str | Path,
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    train_tokens: int = 6_000_000,
    validation_tokens: int = 200_000,
    **options: Any,
) -> dict[str, Any]:
    """Write chat shards with the passages of a corpus folder; options as `write_chat_shards`.

    Contexts of the training side come from the corpus' training side, of the validation side from
    its validation side; the evaluation side is never read.
    """
    return write_chat_shards(
        out,
        tokenizer,
        train_tokens=train_tokens,
        validation_tokens=validation_tokens,
        passages={side: corpus_passages(corpus, side) for side in SIDES},
        corpus_digest=read_record(corpus)["digest"],
        **options,
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def read_chat_meta(folder: str | Path) -> dict[str, Any]:
    """Return meta.json of a chat shard folder; raise ShardError when there is none of ours."""
    file = Path(folder) / _META
    try:
        meta = read_object(file, expected="the record of chat shards")
        if meta.get("format") != FORMAT or "weights" not in meta:
            raise FileError(file, f"format: got {shown(meta.get('format'))}", f"{FORMAT}")
        take(meta, "tokenizer_sha256", str, file)
        for side in take(meta, "sides", dict, file):
            entry, at = take(meta["sides"], side, dict, file, at="sides."), f"sides.{side}."
            for name in ("tokens", "conversations"):
                take(entry, name, int, file, at=at)
            digests = take(entry, "sha256", dict, file, at=at)
            for name in _FILES:
                take(digests, name, str, file, at=f"{at}sha256.")
    except FileError as error:
        raise ShardError(f"{error}; write the chat shards first") from None
    return meta


def read_chat_shards(
    folder: str | Path, side: str, *, tokenizer: Tokenizer | None = None, verify: bool = False
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (ids [T] uint16, is_target [T] bool) of each conversation of one side.

    is_target[i] says that ids[i] is generated by the model and counts in a loss. Refuses shards
    of another tokenizer than the one given; with `verify` compares the files' SHA-256.
    """
    folder, meta = Path(folder), read_chat_meta(folder)
    if side not in meta["sides"]:
        raise ShardError(f"side: got {side!r}, expected one of {', '.join(meta['sides'])}")
    if tokenizer is not None and tokenizer_sha256(tokenizer) != meta["tokenizer_sha256"]:
        raise ShardError(f"{folder}: tokenizer: another one wrote it; write it with this one")
    entry = meta["sides"][side]
    num_tokens = entry["tokens"]
    sizes = (2 * num_tokens, 4 * entry["conversations"], -(-num_tokens // 8))
    parts: dict[str, bytes] = {}
    for name, want in zip(_FILES, sizes, strict=True):
        file = folder / f"{side}.{name}"
        try:
            data = read_bytes(file, max_bytes=want, expected=f"{want} bytes")
        except FileError as error:
            raise ShardError(f"{error}; write it again") from None
        if len(data) != want:
            raise ShardError(f"{file}: got {len(data)} bytes, expected {want}; write it again")
        if verify and hashlib.sha256(data).hexdigest() != entry["sha256"][name]:
            raise ShardError(f"{file}: SHA-256 differs from {_META}; write it again")
        parts[name] = data
    ids = np.frombuffer(parts["ids"], "<u2")
    lengths = np.frombuffer(parts["lengths"], "<u4").astype(np.int64)
    if int(lengths.sum()) != num_tokens:
        raise ShardError(f"{folder}: lengths add up to {lengths.sum()}, expected {num_tokens}")
    bits = np.unpackbits(np.frombuffer(parts["targets"], np.uint8), count=num_tokens).astype(bool)
    ends = np.cumsum(lengths)[:-1]
    return list(zip(np.split(ids, ends), np.split(bits, ends), strict=True)) if len(lengths) else []
