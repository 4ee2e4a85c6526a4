"""Engram's compressed token ids: tokens that read alike share one id.

Every token is decoded alone and normalised; equal results share an id, in first-seen order.
The hash multipliers depend on the number of distinct ids, so one wrong rule changes every row
that the model reads. The Rust normalizers are part of the definition: accents stripped in
plain Python give another count. A newcomer's mistake: a token that is one space would strip to
nothing and meet the empty ones; it passes the strip as U+E000. Source: spec/backbone.md 7.2, U7.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Regex, normalizers

from finwhale.text.tokenizer import Tokenizer, TokenizerError

_SPACE_SENTINEL = "\ue000"
_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"\A \z"), _SPACE_SENTINEL),
        normalizers.Strip(left=True, right=True),
        normalizers.Replace(_SPACE_SENTINEL, " "),
    ]
)


def compression_key(text: str, token: str) -> str:
    """Return the string by which tokens are compared.

    text   the token decoded alone, markers kept
    token  its raw vocabulary string, the key of a token that is part of a character
    """
    if "\ufffd" in text:
        return token
    return _NORMALIZER.normalize_str(text) or text


def token_map(tokenizer: Tokenizer) -> np.ndarray:
    """Return the compressed id of every token id, int64 [V]; new ids in first-seen order.

    spec/backbone.md section 7.2. The number of distinct ids, `map.max() + 1`, must equal the
    config's `engram_compressed_vocab_size`.
    """
    ids = range(tokenizer.vocab_size)
    texts = tokenizer.raw.decode_batch([[i] for i in ids], skip_special_tokens=False)
    compressed: dict[str, int] = {}
    mapped = np.empty(len(ids), dtype=np.int64)
    for token_id, text in zip(ids, texts, strict=True):
        token = tokenizer.raw.id_to_token(token_id)
        if token is None:
            want = f"every id below {tokenizer.vocab_size} to name a token"
            raise TokenizerError(f"{tokenizer.where}: id {token_id} is unused; expected {want}")
        mapped[token_id] = compressed.setdefault(compression_key(text, token), len(compressed))
    return mapped


def token_map_from_file(path: str | Path) -> np.ndarray:
    """Return `token_map` of a `tokenizer.json` or of the one inside a checkpoint folder."""
    return token_map(Tokenizer.from_file(path))
