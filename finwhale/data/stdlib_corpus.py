"""Text that is on every machine: the Python installation's own library and documentation.

Documents are the library's source files, its text files and the language reference kept in
`pydoc_data/topics.py` (one document per topic). The split is by file: a hash of the path below
the library folder decides, so a file is on one side only and on the same side on every
machine. The topics quote one another and are therefore one file, kept on the training side.
Where that leaves a side short, as with one book or a few large files, the split is inside each
file instead: its last tenth is held out. Refused: too little text for the caps.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from finwhale.config.files import FileError, kind_of_file, read_text

# Test fixtures hold broken code on purpose; code tables (`encodings`) are lists of numbers.
_SKIPPED_FOLDERS = frozenset(
    "test tests idlelib lib2to3 encodings turtledemo site-packages dist-packages "
    "__pycache__ __phello__ _bundled node_modules".split()
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
_SUFFIXES = (".py", ".txt", ".rst", ".md")
_TOPICS = "pydoc_data/topics.py"
_MIN_TEXT_BYTES = 64_000
_MAX_FILE_BYTES = 1 << 30


class CorpusError(ValueError):
    """A file or folder that does not hold enough readable text."""


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
    """Documents of both sides. `digest` covers names, sides and texts in order."""

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
    path = root / file
    text = read_text(path, max_bytes=_MAX_FILE_BYTES, expected="a text").replace("\r\n", "\n")
    if file == _TOPICS:
        for topic, body in _topics(text):
            yield Document(name=f"{file}#{topic}", file=file, text=body)
    elif text.strip():
        yield Document(name=file, file=file, text=text)


def _cut(document: Document, max_bytes: int, *, whole_lines: bool = True) -> Document:
    """Return the document, or its first lines within `max_bytes`; else its first characters."""
    data = document.text.encode("utf-8")
    if len(data) <= max_bytes:
        return document
    end = data.rfind(b"\n", 0, max_bytes) + 1
    if not end and not whole_lines:
        end = max_bytes
    return replace(document, text=data[:end].decode("utf-8", errors="ignore"))


def _within(documents: list[Document], max_bytes: int) -> tuple[Document, ...]:
    """Return a spread of documents of at most `max_bytes` in all, in hash order of their names.

    One document takes at most a tenth, its first lines; one that does not fit is left out.
    """
    chosen, used = [], 0
    for document in _by_hash(documents):
        document = _cut(document, max_bytes // 10)
        size = document.num_bytes
        if size and used + size <= max_bytes:
            chosen.append(document)
            used += size
    return tuple(chosen)


def _by_hash(documents: list[Document]) -> list[Document]:
    return sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest())


def _parts(document: Document) -> tuple[Document, Document]:
    """Return the first nine tenths and the rest, parted at a line or a word where there is one."""
    text, end = document.text, len(document.text) * 9 // 10
    for mark in ("\n", " "):
        at = text.rfind(mark, end // 2, end)
        if at >= 0:
            end = at + 1
            break
    held_out = replace(document, name=f"{document.name}#end", text=text[end:])
    return replace(document, text=text[:end]), held_out


def _all_within(documents: list[Document], max_bytes: int) -> tuple[Document, ...]:
    """Return the documents in hash order, as much of each as fits into what is left."""
    chosen, left = [], max_bytes
    for document in _by_hash(documents):
        document = _cut(document, left, whole_lines=False)
        if document.text:
            chosen.append(document)
            left -= document.num_bytes
    return tuple(chosen)


def read_corpus(
    root: str | Path | None = None, *, max_train_bytes: int, max_validation_bytes: int
) -> Corpus:
    """Read and split the text of a file or below a folder, by default the Python library.

    The split is by file, and no document takes more than a tenth of a cap. Where a side would then
    have less than it needs, the smaller of 64 kB and a quarter of its cap, the last tenth of every
    file is held out and a document may fill a cap. Files that are not UTF-8 are skipped and
    counted. No network. Raises CorpusError when a side is short all the same.
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    kind = kind_of_file(root)
    if kind not in ("a file", "a folder"):
        kind = "no such file or folder" if kind == "no such file" else kind
        raise CorpusError(f"{root}: {kind}; expected a text, or a folder that holds text")
    folder = root if kind == "a folder" else root.parent
    sides: tuple[list[Document], list[Document]] = ([], [])
    num_unreadable = num_files = 0
    for file in _files(root) if kind == "a folder" else [root.name]:
        try:
            sides[is_validation(file)].extend(_documents(folder, file))
            num_files += 1
        except FileError as error:
            num_unreadable += 1
            if kind == "a file":
                raise CorpusError(str(error)) from None
        except (OSError, SyntaxError, ValueError):
            num_unreadable += 1
    caps = {"training": max_train_bytes, "validation": max_validation_bytes}
    chosen = [_within(side, cap) for side, cap in zip(sides, caps.values(), strict=True)]
    if any(_lack(documents, cap) for documents, cap in zip(chosen, caps.values(), strict=True)):
        parts = [_parts(document) for side in sides for document in side]
        pairs = list(zip(*parts, strict=True)) or [(), ()]
        chosen = [
            _all_within(list(side), cap) for side, cap in zip(pairs, caps.values(), strict=True)
        ]
    for documents, (side, cap) in zip(chosen, caps.items(), strict=True):
        want = _lack(documents, cap)
        if want:
            found = sum(document.num_bytes for document in documents)
            field = "data.train_bytes" if side == "training" else "data.validation_bytes"
            kinds = "" if num_files else f"; a folder needs {', '.join(_SUFFIXES)} files"
            raise CorpusError(
                f"{root}: {side} text: found {found} bytes in {num_files} files, expected {want} "
                f"for {field} = {cap}; add text, or lower the cap (--set {field}=N needs a quarter "
                f"of N){kinds}"
            )
    train, validation = chosen
    return Corpus(
        train=train,
        validation=validation,
        num_unreadable=num_unreadable,
        digest=_digest(train, validation),
    )


def _lack(documents: tuple[Document, ...], cap: int) -> int | None:
    """Return the bytes that a side needs if it has fewer, else None."""
    want = min(_MIN_TEXT_BYTES, cap // 4)
    return want if sum(document.num_bytes for document in documents) < want else None


def _digest(*sides: tuple[Document, ...]) -> str:
    total = hashlib.sha256()
    for side, documents in enumerate(sides):
        for document in documents:
            for part in (str(side), document.name, document.text):
                data = part.encode("utf-8")
                total.update(len(data).to_bytes(8, "little"))
                total.update(data)
    return total.hexdigest()
