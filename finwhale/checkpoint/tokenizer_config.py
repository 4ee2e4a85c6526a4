"""`tokenizer_config.json`: what other libraries ask for beside tokenizer.json.

Without it they load the tokenizer and know no marker by its part: no begin, end or padding. It is
made from the ids in config.json and the markers in tokenizer.json, so it cannot say anything else
than they do. No chat template is written: the released prompt format has rules that no template in
the release states (spec/multimodal-serving.md section B.2). This package reads none of it.
"""

from __future__ import annotations

import json
from pathlib import Path

from finwhale.checkpoint.folder import CheckpointError
from finwhale.config.files import FileError, parse_object, read_bytes
from finwhale.config.model import ModelConfig

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# The released tokenizer.json has 8 MB.
MAX_TOKENIZER_BYTES = 1 << 27
_EXPECTED = "a released tokenizer.json"


def read_tokenizer(file: Path) -> bytes:
    """Return the bytes of a tokenizer.json to be copied. Raises CheckpointError."""
    try:
        return read_bytes(file, max_bytes=MAX_TOKENIZER_BYTES, expected=_EXPECTED)
    except FileError as error:
        raise _refused(error) from None


def tokenizer_config_text(config: ModelConfig, tokenizer: bytes, file: str | Path) -> str:
    """Return the text of tokenizer_config.json for a model and the bytes of its tokenizer.json.

    file  where the bytes are from, for errors. Raises CheckpointError if they are no tokenizer's.
    """
    try:
        fields = parse_object(tokenizer, file, expected=_EXPECTED)
    except FileError as error:
        raise _refused(error) from None
    added = fields.get("added_tokens")
    markers = {
        token.get("id"): token.get("content")
        for token in (added if isinstance(added, list) else ())
        if isinstance(token, dict) and type(token.get("id")) is int
    }
    parts = {
        "bos_token": config.bos_token_id,
        "eos_token": config.eos_token_id,
        "pad_token": config.pad_token_id,
    }
    named = {part: markers[i] for part, i in parts.items() if isinstance(markers.get(i), str)}
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.text_config.max_position_embeddings,
    }
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _refused(error: FileError) -> CheckpointError:
    return CheckpointError(
        error.file,
        expected=error.expected,
        found=error.found,
        remedy="name the model's tokenizer.json",
    )
