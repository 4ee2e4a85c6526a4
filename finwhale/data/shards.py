"""Token ids of a corpus on disk: one flat file per side, and where its documents end.

    OUT/SIDE.ids      uint16 little-endian, all documents one after another
    OUT/SIDE.lengths  uint32 little-endian, tokens of each document
    OUT/meta.json     digests of corpus and tokenizer, and per side documents, tokens, bytes of
                      text, SHA-256 of both files, and the runs of documents of each source

A document is [begin, its tokens, end], as everywhere in training. Refused: a vocabulary above
65,536 ids, and files that are not what meta.json says. The easy mistake: bits per byte divides
by the bytes of *text* kept here, not by the bytes of these files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from finwhale.config.files import (
    FileError,
    kind_of_file,
    new_folder,
    read_object,
    shown,
    take,
)
from finwhale.data.build_corpus import SIDES, CorpusDocument, read_record, read_side
from finwhale.data.fetch import sha256_of
from finwhale.data.packing import pack
from finwhale.text.tokenizer import Tokenizer

FORMAT = 1
MAX_VOCAB_SIZE = 65_536
_META = "meta.json"
_BATCH_CHARS = 4_000_000


class ShardError(ValueError):
    """A vocabulary that does not fit, or shard files that contradict their record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSource:
    """A run of documents of one source: `first` is the place of its first document."""

    name: str
    first: int
    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """One side read back.

    ids      [all tokens] uint16, a read-only view of the file
    lengths  [documents] int64
    num_bytes  bytes of UTF-8 text that the tokens stand for
    """

    ids: np.ndarray
    lengths: np.ndarray
    num_bytes: int
    sources: tuple[ShardSource, ...]
    tokenizer_sha256: str
    corpus_digest: str

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    def documents(self, source: str | None = None) -> list[np.ndarray]:
        """Return one uint16 view per document, of all sources or of one, for `packing.pack`."""
        first, last = 0, self.num_documents
        if source is not None:
            found = next((s for s in self.sources if s.name == source), None)
            if found is None:
                known = ", ".join(s.name for s in self.sources)
                raise ShardError(f"source: got {source!r}, expected one of {known}")
            first, last = found.first, found.first + found.documents
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        return [self.ids[ends[i] : ends[i + 1]] for i in range(first, last)]


def _batches(documents: Iterable[CorpusDocument]) -> Iterator[list[CorpusDocument]]:
    """Yield runs of documents of about 4 MB of text: what the tokenizer takes at a time."""
    held: list[CorpusDocument] = []
    size = 0
    for document in documents:
        held.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARS:
            yield held
            held, size = [], 0
    if held:
        yield held


def _write_side(
    corpus: Path, side: str, tokenizer: Tokenizer, ids_file: BinaryIO, lengths_file: BinaryIO
) -> dict:
    """Write one side and return its entry of the record; documents stay in corpus order."""
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    ids_hash, lengths_hash = hashlib.sha256(), hashlib.sha256()
    sources: list[dict] = []
    place = 0
    for batch in _batches(read_side(corpus, side)):
        encoded = tokenizer.encode_batch([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            row = np.array([bos, *ids, eos], dtype="<u2").tobytes()
            length = np.array([len(ids) + 2], dtype="<u4").tobytes()
            ids_file.write(row)
            lengths_file.write(length)
            ids_hash.update(row)
            lengths_hash.update(length)
            if not sources or sources[-1]["name"] != document.package:
                name = document.package
                empty = {"documents": 0, "tokens": 0, "bytes": 0}
                sources.append({"name": name, "first": place, **empty})
            sources[-1]["documents"] += 1
            sources[-1]["tokens"] += len(ids) + 2
            sources[-1]["bytes"] += len(document.text.encode("utf-8"))
            place += 1
    return {
        "documents": place,
        "tokens": sum(source["tokens"] for source in sources),
        "bytes": sum(source["bytes"] for source in sources),
        "ids_sha256": ids_hash.hexdigest(),
        "lengths_sha256": lengths_hash.hexdigest(),
        "sources": sources,
    }


def write_shards(
    corpus_dir: str | Path, tokenizer: Tokenizer, out: str | Path, sequence_length: int
) -> dict:
    """Tokenise every side of a corpus into the folder `out` and return its record.

    The training side is packed once into rows of `sequence_length` to record how many rows it
    gives and which share of their positions is padding. The folder appears when it is complete.
    """
    corpus, out = Path(corpus_dir), Path(out)
    if tokenizer.vocab_size > MAX_VOCAB_SIZE:
        want = f"at most {MAX_VOCAB_SIZE}, since ids are stored in 16 bits"
        raise ShardError(f"vocab_size: got {tokenizer.vocab_size}, expected {want}")
    if out.exists():
        raise ShardError(f"{out}: is there already; delete it or choose another folder")
    corpus_digest = read_record(corpus)["digest"]
    with new_folder(out) as staging:
        meta: dict[str, Any] = {
            "format": FORMAT,
            "corpus_digest": corpus_digest,
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "vocab_size": tokenizer.vocab_size,
            "sides": {},
        }
        for side in SIDES:
            with (
                (staging / f"{side}.ids").open("wb") as ids_file,
                (staging / f"{side}.lengths").open("wb") as lengths_file,
            ):
                meta["sides"][side] = _write_side(corpus, side, tokenizer, ids_file, lengths_file)
        (staging / _META).write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
        # An array is a sequence of ids; its type does not say so.
        documents = cast("list[Sequence[int]]", read_shards(staging, "train").documents())
        packed = pack(documents, sequence_length=sequence_length, pad_id=tokenizer.pad_id)
        meta["packing"] = {
            "sequence_length": sequence_length,
            "rows": packed.num_rows,
            "padding_rate": packed.padding_rate,
        }
        (staging / _META).write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
    return meta


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of what the tokenizer does: its file as the Rust library writes it."""
    return hashlib.sha256(tokenizer.raw.to_str().encode("utf-8")).hexdigest()


def read_meta(folder: str | Path) -> dict:
    """Return meta.json of a shard folder; raise ShardError when there is none of ours."""
    file = Path(folder) / _META
    try:
        meta = read_object(file, expected="the record of shards")
        if meta.get("format") != FORMAT:
            raise FileError(file, f"format: got {shown(meta.get('format'))}", f"{FORMAT}")
        for name in ("tokenizer_sha256", "corpus_digest"):
            take(meta, name, str, file)
        for side in take(meta, "sides", dict, file):
            entry = take(meta["sides"], side, dict, file, at="sides.")
            for name in ("documents", "tokens", "bytes"):
                take(entry, name, int, file, at=f"sides.{side}.")
            for name in ("ids_sha256", "lengths_sha256"):
                take(entry, name, str, file, at=f"sides.{side}.")
            for number, source in enumerate(take(entry, "sources", list, file, at=f"{side}.")):
                at = f"sides.{side}.sources[{number}]."
                take(source, "name", str, file, at=at)
                for name in ("first", "documents", "tokens", "bytes"):
                    take(source, name, int, file, at=at)
    except FileError as error:
        when = "first" if error.found == "no such file" else "again"
        raise ShardError(f"{error}; write the shards {when}") from None
    return meta


def read_shards(
    folder: str | Path, side: str, *, tokenizer: Tokenizer | None = None, verify: bool = False
) -> Shards:
    """Return one side of a shard folder as views of its files.

    With `tokenizer`, refuses shards that another tokenizer wrote. With `verify`, reads both
    files through and compares their SHA-256; sizes are always compared.
    """
    folder, meta = Path(folder), read_meta(folder)
    if side not in meta["sides"]:
        raise ShardError(f"side: got {side!r}, expected one of {', '.join(meta['sides'])}")
    entry = meta["sides"][side]
    if tokenizer is not None and tokenizer_sha256(tokenizer) != meta["tokenizer_sha256"]:
        found, want = tokenizer_sha256(tokenizer)[:12], meta["tokenizer_sha256"][:12]
        raise ShardError(
            f"{folder}: tokenizer: got {found}, expected {want}; write the shards with this one"
        )
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, count in (
        ("ids", "<u2", entry["tokens"]),
        ("lengths", "<u4", entry["documents"]),
    ):
        file = folder / f"{side}.{name}"
        kind, want = kind_of_file(file), count * np.dtype(dtype).itemsize
        found = f"{file.stat().st_size} bytes" if kind == "a file" else kind
        if found != f"{want} bytes":
            raise ShardError(f"{file}: got {found}, expected {want} bytes; write the shards again")
        # An empty file cannot be mapped.
        arrays[name] = np.memmap(file, dtype, "r") if count else np.empty(0, dtype)
        if verify and sha256_of(file) != entry[f"{name}_sha256"]:
            raise ShardError(f"{file}: SHA-256 differs from {_META}; write the shards again")
    lengths = arrays["lengths"].astype(np.int64)
    if int(lengths.sum()) != entry["tokens"]:
        want = f"{entry['tokens']} tokens"
        raise ShardError(f"{folder}: lengths add up to {lengths.sum()}, expected {want}")
    return Shards(
        ids=arrays["ids"],
        lengths=lengths,
        num_bytes=entry["bytes"],
        sources=tuple(
            ShardSource(**{field.name: source[field.name] for field in fields(ShardSource)})
            for source in entry["sources"]
        ),
        tokenizer_sha256=meta["tokenizer_sha256"],
        corpus_digest=meta["corpus_digest"],
    )
