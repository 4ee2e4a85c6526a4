"""The Engram id map of a checkpoint folder: made from its tokenizer.json, checked, never guessed.

The hash constants of Engram are not stored; they follow from the config and the number of
distinct ids. A wrong map reads valid rows of other n-grams and raises no error of its own, so
its size must be the config's. The only place where this room meets `text`, and lazily: the
tokenizers package is an extra. Source: spec/backbone.md section 7.2; cases 8 and 115.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from finwhale.checkpoint.folder import CheckpointError
from finwhale.checkpoint.tokenizer_config import TOKENIZER_FILE
from finwhale.config.files import kind_of_file
from finwhale.config.model import ModelConfig


def token_map_for(
    path: Path, config: ModelConfig, given: Tensor | np.ndarray | None
) -> tuple[Tensor | None, str]:
    """Return the Engram id map [V] int64, or None for the identity, and where it came from.

    given   a map to check and use in place of the folder's tokenizer

    Raises CheckpointError if the tokenizer is needed and missing, or its map does not fit.
    """
    text = config.text_config
    if not text.engram_layer_ids:
        return None, "no Engram"
    file = path / TOKENIZER_FILE
    if given is not None:
        return _checked_map(torch.as_tensor(given), config, path, "token_map"), "argument"
    if not file.is_file():
        if text.engram_compressed_vocab_size == text.vocab_size:
            return None, "identity"
        raise CheckpointError(
            file,
            expected="the tokenizer, because the Engram id map is made from it "
            f"({text.engram_compressed_vocab_size} ids for {text.vocab_size} tokens)",
            found=kind_of_file(file),
            remedy="copy the model's tokenizer.json into the folder, or pass token_map",
        )
    return _checked_map(map_of_file(file), config, file, "its Engram id map"), TOKENIZER_FILE


def map_of_file(file: Path) -> Tensor:
    """Return the Engram id map [V] int64 of a tokenizer.json, unchecked."""
    try:
        from finwhale.text.engram_map import token_map_from_file
    except ImportError as error:
        raise CheckpointError(
            file,
            expected="the package 'tokenizers' to read it",
            found=str(error),
            remedy="pip install 'finwhale[text]', or pass token_map",
        ) from None
    return torch.as_tensor(token_map_from_file(file))


def _checked_map(mapped: Tensor, config: ModelConfig, where: Path, what: str) -> Tensor:
    text = config.text_config
    size, vocab = text.engram_compressed_vocab_size, text.vocab_size
    distinct = int(mapped.unique().numel())
    largest = int(mapped.max()) if mapped.numel() else -1
    if tuple(mapped.shape) != (vocab,) or distinct != size or largest != size - 1:
        raise CheckpointError(
            where,
            expected=f"{what} to give {vocab} tokens (vocab_size) exactly {size} distinct ids "
            "(engram_compressed_vocab_size)",
            found=f"shape {list(mapped.shape)} with {distinct} distinct ids up to {largest}",
            remedy="use the tokenizer.json this model was trained with; the hash depends on it",
        )
    return mapped.to(torch.int64)
