"""The corpus: what is read, that no file is on both sides, caps, refusals."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from finwhale.data.stdlib_corpus import CorpusError, is_validation, read_corpus

SIZES = {"max_train_bytes": 400_000, "max_validation_bytes": 160_000}


def _held_out_name(folder: str, wanted: bool) -> str:
    """Return a file name in `folder` that the stated rule puts on the wanted side."""
    for number in range(10_000):
        name = f"{folder}/m{number}.py"
        if (hashlib.sha256(name.encode()).digest()[0] < 26) == wanted:
            return name
    raise AssertionError


@pytest.fixture
def library(tmp_path) -> Path:
    """A small library: 40 readable modules, and one of everything that must be left out."""
    texts = {
        _held_out_name(f"p{n}", wanted=n % 4 == 0): f"# module {n}\n" + "x = 1\n" * 700
        for n in range(40)
    }
    for skipped in (
        "test/t.py",
        "a/tests/t.py",
        "idlelib/i.py",
        "lib2to3/l.py",
        "encodings/cp037.py",
    ):
        texts[skipped] = "LEFT OUT\n"
    for skipped in ("site-packages/s.py", "__pycache__/c.py", "_sysconfigdata_x.py", "binary.so"):
        texts[skipped] = "LEFT OUT\n"
    texts["notes.txt"] = "a note\r\nof two lines\r\n"
    texts["pydoc_data/topics.py"] = (
        "topics = {'with': 'The with statement.\\n', 'if': 'The if statement.\\n'}\n"
    )
    texts["empty.py"] = "\n"
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    return tmp_path


def test_reads_what_it_says(library):
    corpus = read_corpus(library, **SIZES)
    documents = {d.name: d.text for d in (*corpus.train, *corpus.validation)}
    assert len(documents) == 40 + 1 + 2
    assert not any("LEFT OUT" in text for text in documents.values())
    assert documents["notes.txt"] == "a note\nof two lines\n"
    assert documents["pydoc_data/topics.py#with"] == "The with statement.\n"
    assert corpus.num_unreadable == 1


def test_no_file_is_on_both_sides(library):
    corpus = read_corpus(library, **SIZES)
    train, held_out = {d.file for d in corpus.train}, {d.file for d in corpus.validation}
    assert not train & held_out
    assert len(held_out) >= 10
    assert {f for f in train | held_out if is_validation(f)} == held_out


def test_topics_stay_together_in_training(library):
    corpus = read_corpus(library, **SIZES)
    names = [d.name for d in corpus.train if d.file == "pydoc_data/topics.py"]
    assert sorted(names) == ["pydoc_data/topics.py#if", "pydoc_data/topics.py#with"]


def test_split_ignores_where_the_library_lies(library, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere") / "lib"
    other.symlink_to(library)
    assert read_corpus(other, **SIZES) == read_corpus(library, **SIZES)


def test_digest_follows_text_and_side(library):
    before = read_corpus(library, **SIZES).digest
    file = library / "notes.txt"
    file.write_text("a note\nof two line\n")
    changed = read_corpus(library, **SIZES).digest
    file.write_text("a note\nof two lines\n")
    assert changed != before == read_corpus(library, **SIZES).digest


@pytest.mark.parametrize("cap", [4000, 20_000, 100_000])
def test_caps_hold_and_no_document_takes_more_than_a_tenth(library, cap):
    corpus = read_corpus(library, max_train_bytes=cap, max_validation_bytes=cap // 2)
    for documents, size in ((corpus.train, cap), (corpus.validation, cap // 2)):
        total = sum(len(d.text.encode()) for d in documents)
        assert size // 4 <= total <= size
        assert max(len(d.text.encode()) for d in documents) <= size // 10
        assert all(d.text.endswith("\n") for d in documents)


def test_too_little_text_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(
        CorpusError, match=r"training text: found 4 bytes in 1 files, expected 1000 for data"
    ):
        read_corpus(tmp_path, max_train_bytes=4000, max_validation_bytes=400)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="no such file or folder"):
        read_corpus(tmp_path / "nowhere", **SIZES)


def test_installed_library_has_text_on_both_sides():
    corpus = read_corpus(max_train_bytes=400_000, max_validation_bytes=40_000)
    assert 200_000 < corpus.train_bytes <= 400_000
    assert 20_000 < corpus.validation_bytes <= 40_000
    assert not {d.file for d in corpus.train} & {d.file for d in corpus.validation}


BOOK = "".join(f"line {n} of the book, which tells of whales\n" for n in range(5000))  # 214 kB


@pytest.mark.parametrize("as_folder", [False, True], ids=["file", "folder"])
def test_one_book_is_enough_and_its_last_tenth_is_held_out(tmp_path, as_folder):
    """Case T1: the tenth of the cap that one document may take left 20 kB of any book."""
    (tmp_path / "book.txt").write_text(BOOK)
    root = tmp_path if as_folder else tmp_path / "book.txt"
    corpus = read_corpus(root, max_train_bytes=6_000_000, max_validation_bytes=60_000)
    (train,), (held_out,) = corpus.train, corpus.validation
    assert train.text + held_out.text == BOOK
    assert train.text.endswith("\n")
    assert 0.88 * len(BOOK) < len(train.text) <= 0.9 * len(BOOK)


@pytest.mark.parametrize("text", [BOOK, BOOK.replace("\n", " "), "鯨" * 60_000])
def test_caps_hold_for_one_file_of_any_lines(tmp_path, text):
    file = tmp_path / "book"  # a file that is named may have any suffix
    file.write_text(text)
    corpus = read_corpus(file, max_train_bytes=70_000, max_validation_bytes=10_000)
    assert 65_000 < corpus.train_bytes <= 70_000
    assert 9_900 < corpus.validation_bytes <= 10_000
    (train,), (held_out,) = corpus.train, corpus.validation
    assert text.startswith(train.text)
    assert held_out.text in text[len(text) * 8 // 10 :]


def test_message_names_the_side_and_the_cap_at_fault(tmp_path):
    (tmp_path / "book.txt").write_text(BOOK[:40_000])
    with pytest.raises(CorpusError, match=r"training text: found 3\d{4} bytes in 1 files") as error:
        read_corpus(tmp_path, max_train_bytes=6_000_000, max_validation_bytes=60_000)
    assert "data.train_bytes = 6000000" in str(error.value)
    # What the message advises works.
    read_corpus(tmp_path, max_train_bytes=100_000, max_validation_bytes=10_000)


def test_what_is_no_text_is_refused_or_counted(tmp_path):
    (tmp_path / "book.txt").write_text(BOOK)
    os.mkfifo(tmp_path / "pipe.txt")
    corpus = read_corpus(tmp_path, max_train_bytes=400_000, max_validation_bytes=40_000)
    assert corpus.num_unreadable == 1
    with pytest.raises(CorpusError, match=r"pipe\.txt: a pipe"):
        read_corpus(tmp_path / "pipe.txt", max_train_bytes=400_000, max_validation_bytes=40_000)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(CorpusError, match=r"latin\.txt: not UTF-8 \(byte 3\)"):
        read_corpus(tmp_path / "latin.txt", max_train_bytes=400_000, max_validation_bytes=40_000)
