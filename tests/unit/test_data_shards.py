"""Shards: what is written is what the tokenizer gives, and damage is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from finwhale.data.build_corpus import CorpusDocument, read_side
from finwhale.data.packing import NO_TARGET, pack
from finwhale.data.shards import (
    ShardError,
    Shards,
    _batches,
    read_meta,
    read_shards,
    tokenizer_sha256,
    write_shards,
)
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer

TEXTS = {
    ("train", "one"): ["a\n", "some words of one", "na\u00efve caf\u00e9 " * 40],
    ("train", "two"): ["words of two, and some more of them"],
    ("validation", "one"): ["held out"],
}


def _corpus(folder, texts):
    """Write a corpus folder by hand, as build_corpus lays it out."""
    sources: dict[str, dict] = {}
    for (side, name), documents in texts.items():
        (folder / side).mkdir(parents=True, exist_ok=True)
        rows = [
            json.dumps({"name": str(i), "package": name, "text": text})
            for i, text in enumerate(documents)
        ]
        (folder / side / f"{name}.jsonl").write_text("".join(row + "\n" for row in rows))
        source = sources.setdefault(name, {"record": {"name": name}, "sides": {}})
        source["sides"][side] = {"documents": len(documents)}
    record = {"format": 1, "digest": "d" * 64, "sources": list(sources.values())}
    folder.mkdir(exist_ok=True)
    (folder / "corpus.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([t for texts in TEXTS.values() for t in texts], MIN_VOCAB_SIZE + 5, file)
    return Tokenizer.from_file(file)


@pytest.fixture
def shards(tmp_path, tokenizer):
    meta = write_shards(_corpus(tmp_path / "corpus", TEXTS), tokenizer, tmp_path / "out", 16)
    return tmp_path / "out", meta


def test_documents_come_back_between_their_markers(shards, tokenizer):
    folder, _ = shards
    for side in ("train", "validation", "evaluation"):
        texts = [text for (s, _), texts in TEXTS.items() if s == side for text in texts]
        documents = read_shards(folder, side, tokenizer=tokenizer, verify=True).documents()
        assert len(documents) == len(texts)
        for ids, text in zip(documents, texts, strict=True):
            assert ids.dtype == np.uint16
            assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
            assert tokenizer.decode(ids[1:-1].tolist()) == text


def test_files_are_flat_little_endian_numbers(shards, tokenizer):
    folder, _ = shards
    expected = []
    for document in read_side(folder.parent / "corpus", "train"):
        expected += [tokenizer.bos_id, *tokenizer.encode(document.text), tokenizer.eos_id]
    data = (folder / "train.ids").read_bytes()
    assert [int.from_bytes(data[i : i + 2], "little") for i in range(0, len(data), 2)] == expected


def test_record_counts_tokens_and_bytes_of_text(shards, tokenizer):
    folder, meta = shards
    assert read_meta(folder) == meta
    train = meta["sides"]["train"]
    assert train["documents"] == 4
    assert train["bytes"] == sum(
        len(text.encode())
        for (side, _), texts in TEXTS.items()
        if side == "train"
        for text in texts
    )
    assert train["tokens"] == (folder / "train.ids").stat().st_size // 2
    assert [(s["name"], s["first"], s["documents"]) for s in train["sources"]] == [
        ("one", 0, 3),
        ("two", 3, 1),
    ]
    assert meta["sides"]["evaluation"]["tokens"] == 0
    assert meta["corpus_digest"] == "d" * 64
    assert meta["tokenizer_sha256"] == tokenizer_sha256(tokenizer)


def test_documents_of_one_source(shards):
    train = read_shards(shards[0], "train")
    one, two = train.documents("one"), train.documents("two")
    every = train.documents()
    assert [d.tolist() for d in one + two] == [d.tolist() for d in every]
    assert (len(one), len(two)) == (3, 1)
    with pytest.raises(ShardError, match="source: got 'three', expected one of one, two"):
        train.documents("three")


def test_padding_rate_is_that_of_packing_the_documents(shards, tokenizer):
    folder, meta = shards
    lengths = [len(d) for d in read_shards(folder, "train").documents()]
    rows = meta["packing"]["rows"]
    num_targets = sum(length - 1 for length in lengths)
    assert meta["packing"]["sequence_length"] == 16
    assert meta["packing"]["padding_rate"] == pytest.approx(1 - num_targets / (16 * rows))
    packed = pack(
        [d.tolist() for d in read_shards(folder, "train").documents()],
        sequence_length=16,
        pad_id=tokenizer.pad_id,
    )
    assert packed.num_rows == rows
    # Views pack as lists do: the target of a position is the next token of its document.
    views = pack(
        read_shards(folder, "train").documents(), sequence_length=16, pad_id=tokenizer.pad_id
    )
    assert (views.inputs == packed.inputs).all()
    assert (views.targets == packed.targets).all()
    assert (views.targets != NO_TARGET).sum() == num_targets


def test_many_documents_of_real_sizes_leave_almost_no_padding(tmp_path):
    """The rate that the pipeline promises: at most one position in a thousand."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(7.5, 1.4, size=2_000)).astype(int) + 2
    documents = [np.zeros(length, np.uint16) for length in lengths]
    packed = pack(documents, sequence_length=2_048, pad_id=2)
    assert packed.padding_rate <= 1e-3
    # Negative control: one document per row pads far more.
    alone = sum(-(-(n - 1) // 2_048) for n in lengths.tolist())
    assert 1 - packed.num_targets / (alone * 2_048) > 0.05


def test_empty_side_has_no_document(shards):
    empty = read_shards(shards[0], "evaluation", verify=True)
    assert isinstance(empty, Shards)
    assert empty.documents() == []
    assert empty.num_bytes == 0


def test_corpus_without_training_text_is_written(tmp_path, tokenizer):
    corpus = _corpus(tmp_path / "corpus", {("evaluation", "b"): ["x" * 70]})
    meta = write_shards(corpus, tokenizer, tmp_path / "out", 16)
    assert meta["packing"]["rows"] == 0
    assert meta["sides"]["evaluation"]["documents"] == 1


@pytest.mark.parametrize("sizes", [[], [1], [3_999_999], [4_000_000], [4_000_001, 1], [5] * 7])
def test_batches_hold_every_document_once_in_order(sizes):
    documents = [
        CorpusDocument(name=str(i), package="p", text="x" * n) for i, n in enumerate(sizes)
    ]
    batches = list(_batches(documents))
    assert [d for batch in batches for d in batch] == documents
    assert all(batches)


def test_same_corpus_gives_the_same_files(shards, tokenizer):
    folder, meta = shards
    again = write_shards(folder.parent / "corpus", tokenizer, folder.parent / "again", 16)
    assert again == meta
    for file in folder.iterdir():
        assert (folder.parent / "again" / file.name).read_bytes() == file.read_bytes()


def test_damage_is_refused(shards, tokenizer):
    folder, _ = shards
    data = (folder / "train.ids").read_bytes()
    (folder / "train.ids").write_bytes(data[:-2])
    with pytest.raises(ShardError, match=r"train.ids: got .* bytes, expected"):
        read_shards(folder, "train")
    (folder / "train.ids").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    read_shards(folder, "train")  # the size alone does not show it
    with pytest.raises(ShardError, match="SHA-256 differs"):
        read_shards(folder, "train", verify=True)
    lengths = np.fromfile(folder / "validation.lengths", "<u4")
    (lengths + 1).tofile(folder / "validation.lengths")
    with pytest.raises(ShardError, match="lengths add up"):
        read_shards(folder, "validation")
    (folder / "train.lengths").unlink()
    with pytest.raises(ShardError, match="got no such file"):
        read_shards(folder, "train")


def test_refusals(shards, tokenizer, tmp_path):
    folder, _ = shards
    with pytest.raises(ShardError, match="is there already"):
        write_shards(folder.parent / "corpus", tokenizer, folder, 16)
    with pytest.raises(ShardError, match="side: got 'test'"):
        read_shards(folder, "test")
    with pytest.raises(ShardError, match="write the shards first"):
        read_shards(tmp_path / "nothing", "train")
    train_tokenizer(["other words entirely " * 3], MIN_VOCAB_SIZE + 2, tmp_path / "t.json")
    with pytest.raises(ShardError, match="tokenizer: got"):
        read_shards(folder, "train", tokenizer=Tokenizer.from_file(tmp_path / "t.json"))


def test_vocabulary_above_16_bits_is_refused_and_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "vocab_size", 65_537)
    with pytest.raises(ShardError, match="got 65537, expected at most 65536"):
        write_shards(_corpus(tmp_path / "corpus", TEXTS), tokenizer, tmp_path / "out", 16)
    monkeypatch.setattr(tokenizer, "vocab_size", 65_536)
    write_shards(tmp_path / "corpus", tokenizer, tmp_path / "out", 16)
    with pytest.raises(ValueError, match="sequence_length: got 0"):
        write_shards(tmp_path / "corpus", tokenizer, tmp_path / "bad", 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]
