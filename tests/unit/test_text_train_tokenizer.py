"""The small BPE: where the markers are, the same file for the same texts, refusals."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from finwhale.text.special_tokens import (
    CHAT_MARKERS,
    CORE_MARKERS,
    GROUNDING_MARKERS,
    HIDDEN_MARKERS,
    IMAGE,
    NOISE,
    SYSTEM,
)
from finwhale.text.tokenizer import Tokenizer, TokenizerError
from finwhale.text.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer

TEXT = "def total(values):\n    return sum(value for value in values)  # 1234567\n" * 4


def test_markers_come_first_and_the_image_last(tmp_path):
    tokenizer = Tokenizer.from_file(train_tokenizer([TEXT], 320, tmp_path / "t.json"))
    first = (*CORE_MARKERS, *CHAT_MARKERS, *GROUNDING_MARKERS)
    assert [tokenizer.raw.id_to_token(i) for i in range(len(first))] == list(first)
    assert tokenizer.marker_id(IMAGE) == 319 == tokenizer.vocab_size - 1
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert NOISE == SYSTEM
    hidden = {tokenizer.marker_id(marker) for marker in HIDDEN_MARKERS}
    assert tokenizer.hidden_ids == hidden


def test_same_texts_give_the_same_bytes_in_every_process(tmp_path):
    here = train_tokenizer([TEXT, "other"], 310, tmp_path / "here.json").read_bytes()
    code = (
        "import sys; from finwhale.text.train_tokenizer import train_tokenizer; "
        "train_tokenizer([sys.argv[1], 'other'], 310, sys.argv[2])"
    )
    there = tmp_path / "there.json"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, TEXT, str(there)], check=True, env=environment)
    assert hashlib.sha256(here).digest() == hashlib.sha256(there.read_bytes()).digest()


def test_smallest_vocabulary_encodes_every_byte(tmp_path):
    tokenizer = Tokenizer.from_file(train_tokenizer([TEXT], MIN_VOCAB_SIZE, tmp_path / "t.json"))
    assert sorted(tokenizer.token_bytes(i) for i in range(27, MIN_VOCAB_SIZE - 1)) == [
        bytes([byte]) for byte in range(256)
    ]


def test_digits_split_in_threes(tmp_path):
    tokenizer = Tokenizer.from_file(train_tokenizer(["1234567 " * 9], 288, tmp_path / "t.json"))
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234567")] == ["123", "456", "7"]


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [(MIN_VOCAB_SIZE - 1, f"at least {MIN_VOCAB_SIZE}"), (5000, "at most 2[0-9]+, all that")],
)
def test_sizes_out_of_reach_are_refused_and_write_nothing(tmp_path, vocab_size, message):
    with pytest.raises(TokenizerError, match=f"vocab_size: got {vocab_size}, expected {message}"):
        train_tokenizer(["a b"], vocab_size, tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_file_is_the_released_layout(tmp_path):
    fields = json.loads(train_tokenizer([TEXT], 300, tmp_path / "t.json").read_text("utf-8"))
    assert fields["decoder"]["type"] == "ByteLevel"
    assert fields["model"]["type"] == "BPE"
    assert {
        token["content"] for token in fields["added_tokens"] if token["special"]
    } == HIDDEN_MARKERS
