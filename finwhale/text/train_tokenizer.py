"""A small byte-level BPE in the released file format, with the released marker strings.

It splits text as the released file does (digits in threes, Chinese and kana runs, then words,
punctuation and blanks) and keeps the released names of the markers, so prompts, parsers and
the Engram id map need no second code path. Ids: 0, 1, 2 are begin, end and padding as
released; the other text markers follow from 3; the image placeholder is the last id, where
the presets expect it (`image_token_id = vocab_size - 1`). Same texts, same file, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from finwhale.config.files import replace_file
from finwhale.text.special_tokens import (
    CHAT_MARKERS,
    CORE_MARKERS,
    GROUNDING_MARKERS,
    HIDDEN_MARKERS,
    IMAGE,
)
from finwhale.text.tokenizer import TokenizerError

# The three splits of the released file, spec/multimodal-serving.md section B.1.
_DIGITS = r"\p{N}{1,3}"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FIRST_MARKERS = (*CORE_MARKERS, *CHAT_MARKERS, *GROUNDING_MARKERS)
# Every byte needs an id of its own, so that any text can be encoded.
NUM_FIRST_MARKERS = len(_FIRST_MARKERS)
MIN_VOCAB_SIZE = NUM_FIRST_MARKERS + 256 + 1


def train_tokenizer(texts: Iterable[str], vocab_size: int, out_file: str | Path) -> Path:
    """Learn a byte-level BPE from `texts`, write it as `tokenizer.json`, return the path.

    `vocab_size` counts everything: markers, 256 bytes, merges. Raises TokenizerError when it is
    too small for markers and bytes, or larger than the texts can fill.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        want = f"at least {MIN_VOCAB_SIZE} (markers and 256 bytes)"
        raise TokenizerError(f"vocab_size: got {vocab_size}, expected {want}")
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(pattern), behavior="isolated")
                for pattern in (_DIGITS, _CJK, _WORDS)
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=list(_FIRST_MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    if engine.get_vocab_size() < vocab_size - 1:
        found = engine.get_vocab_size() + 1
        want = f"at most {found}, all that these texts can fill; give more text or a smaller size"
        raise TokenizerError(f"vocab_size: got {vocab_size}, expected {want}")
    engine.add_special_tokens([IMAGE])
    return _write(engine, Path(out_file))


def _write(engine: tokenizers.Tokenizer, path: Path) -> Path:
    """Write the file at once or not at all, with the released `special` flag of each marker."""
    fields = json.loads(engine.to_str())
    for token in fields["added_tokens"]:
        token["special"] = token["content"] in HIDDEN_MARKERS
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(fields, ensure_ascii=False, indent=1))
    return path
