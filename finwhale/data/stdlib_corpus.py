"""Text that is on every machine: the Python installation's own library and documentation.

Documents are the library's source files, its text files and the language reference kept in
`pydoc_data/topics.py` (one document per topic). The split is by file: a hash of the path below
the library folder decides, so a file is on one side only and on the same side on every
machine. The topics quote one another and are therefore one file, kept on the training side.
Refused: a folder with too little text, as in installations that ship byte code only.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

# Test fixtures hold broken code on purpose; code tables (`encodings`) are lists of numbers.
_SKIPPED_FOLDERS = frozenset(
    "test tests idlelib lib2to3 encodings turtledemo site-packages dist-packages "
    "__pycache__ __phello__ _bundled node_modules".split()
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
_SUFFIXES = (".py", ".txt", ".rst", ".md")
_TOPICS = "pydoc_data/topics.py"
_MIN_TEXT_BYTES = 64_000


class CorpusError(ValueError):
    """A folder that does not hold enough readable text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text. `file` is its path below the corpus folder; topics share their file's path."""

    name: str
    file: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Documents split by file. `digest` covers names, sides and texts in order."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    num_unreadable: int
    digest: str

    @property
    def train_bytes(self) -> int:
        return sum(document.num_bytes for document in self.train)

    @property
    def validation_bytes(self) -> int:
        return sum(document.num_bytes for document in self.validation)


def is_validation(file: str) -> bool:
    """Return whether a file is held out: about one in ten, by SHA-256 of its relative path."""
    return file != _TOPICS and hashlib.sha256(file.encode()).digest()[0] < 26


def _files(root: Path) -> Iterator[str]:
    """Yield relative paths of readable kinds, in sorted order."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name
            for name in subfolders
            if name not in _SKIPPED_FOLDERS and not name.startswith((".", *_SKIPPED_PREFIXES))
        )
        for name in sorted(names):
            if name.endswith(_SUFFIXES) and not name.startswith((".", *_SKIPPED_PREFIXES)):
                yield Path(folder, name).relative_to(root).as_posix()


def _topics(source: str) -> Iterator[tuple[str, str]]:
    """Yield (topic, text) from the literal dictionary that `pydoc_data/topics.py` assigns."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            yield from sorted(ast.literal_eval(node.value).items())


def _documents(root: Path, file: str) -> Iterator[Document]:
    text = (root / file).read_text(encoding="utf-8").replace("\r\n", "\n")
    if file == _TOPICS:
        for topic, body in _topics(text):
            yield Document(name=f"{file}#{topic}", file=file, text=body)
    elif text.strip():
        yield Document(name=file, file=file, text=text)


def _cut(document: Document, max_bytes: int) -> Document:
    """Return the document, or its first whole lines within `max_bytes`."""
    data = document.text.encode("utf-8")
    if len(data) <= max_bytes:
        return document
    return replace(document, text=data[: data.rfind(b"\n", 0, max_bytes) + 1].decode("utf-8"))


def _within(documents: list[Document], max_bytes: int) -> tuple[Document, ...]:
    """Return a spread of documents of at most `max_bytes` in all, in hash order of their names.

    One document takes at most a tenth, its first lines; one that does not fit is left out.
    """
    chosen, used = [], 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        document = _cut(document, max_bytes // 10)
        size = document.num_bytes
        if size and used + size <= max_bytes:
            chosen.append(document)
            used += size
    return tuple(chosen)


def read_corpus(
    root: str | Path | None = None, *, max_train_bytes: int, max_validation_bytes: int
) -> Corpus:
    """Read and split the text below `root`, by default the Python library. No network.

    Files that are not UTF-8 are skipped and counted. Raises CorpusError when a side has less
    than the smaller of 64 kB and a quarter of its cap.
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise CorpusError(f"{root}: no such folder; expected one that holds text")
    sides: tuple[list[Document], list[Document]] = ([], [])
    num_unreadable = 0
    for file in _files(root):
        try:
            sides[is_validation(file)].extend(_documents(root, file))
        except (UnicodeDecodeError, OSError, SyntaxError):
            num_unreadable += 1
    train = _within(sides[0], max_train_bytes)
    validation = _within(sides[1], max_validation_bytes)
    for side, documents, cap in (
        ("training", train, max_train_bytes),
        ("validation", validation, max_validation_bytes),
    ):
        found, want = sum(d.num_bytes for d in documents), min(_MIN_TEXT_BYTES, cap // 4)
        if found < want:
            remedy = "name a folder of .py, .txt, .rst or .md files (--set data.corpus=FOLDER)"
            raise CorpusError(
                f"{root}: {side} text: found {found} bytes, expected {want}; {remedy}"
            )
    return Corpus(
        train=train,
        validation=validation,
        num_unreadable=num_unreadable,
        digest=_digest(train, validation),
    )


def _digest(*sides: tuple[Document, ...]) -> str:
    total = hashlib.sha256()
    for side, documents in enumerate(sides):
        for document in documents:
            for part in (str(side), document.name, document.text):
                data = part.encode("utf-8")
                total.update(len(data).to_bytes(8, "little"))
                total.update(data)
    return total.hexdigest()
