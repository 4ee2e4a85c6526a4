"""A tokenizer of whole words for checkpoints with random weights, written as plain JSON.

Ids 0, 1, 2 are the released sentence and padding markers; then
pairs " wa", " Wa", " wb", ... " wz", " Wz", " waa", ...
up to the vocabulary. The two words of a pair differ only by case, so that the Engram id map
really compresses. Letters alone, because the byte-level splitter parts letters from digits.
It encodes its own words and drops everything else.
"""

from __future__ import annotations

import json

from finwhale.text.special_tokens import BOS, EOS, PAD

SPECIAL_TOKENS = (BOS, EOS, PAD)
_SPACE = "\u0120"  # how byte-level vocabularies spell a leading space


def toy_vocabulary(vocab_size: int) -> dict[str, int]:
    """Return token string to id. ValueError below 5 tokens."""
    if vocab_size < 5:
        raise ValueError(f"vocab_size: got {vocab_size}, expected at least 5 for a toy tokenizer")
    words = list(SPECIAL_TOKENS)
    for number in range((vocab_size - len(words) + 1) // 2):
        words += [f"{_SPACE}{start}{_letters(number)}" for start in "wW"]
    return {word: token_id for token_id, word in enumerate(words[:vocab_size])}


def _letters(number: int) -> str:
    """Return a, b, ... z, aa, ab, ... for 0, 1, ..."""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(ord("a") + digit) + text
    return text


def toy_tokenizer_json(vocab_size: int) -> str:
    """Return the text of a tokenizer.json that the `tokenizers` library reads."""
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": token_id,
                    "content": word,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for token_id, word in enumerate(SPECIAL_TOKENS)
            ],
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "add_prefix_space": False},
            "post_processor": None,
            "decoder": {**byte_level, "add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                # Words are whole vocabulary entries; there is nothing to merge.
                "ignore_merges": True,
                "vocab": toy_vocabulary(vocab_size),
                "merges": [],
            },
        },
        ensure_ascii=False,
        indent=1,
    )
