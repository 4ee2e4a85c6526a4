"""The released `tokenizer.json`: text to ids, ids to text, and ids to text piece by piece.

A thin layer over the Rust `tokenizers`. It owns two decisions. Text never turns into marker
ids unless the caller asks for it (`parse_markers`), since a user may type `<think>`. And
streamed text is cut at whole characters: one character often spans several tokens.
A newcomer's mistake: no begin-of-sentence id is added; the prompt text carries it.
Source: spec/multimodal-serving.md section B.1.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from finwhale.config.files import FileError, read_text
from finwhale.text.special_tokens import BOS, EOS, PAD

# The released file has 8 MB.
_MAX_FILE_BYTES = 1 << 27
# Characters that are encoded in about a millisecond, without the library's threads.
_SHORT_TEXT = 4096


class TokenizerError(ValueError):
    """A tokenizer file that is missing, unreadable or of another family."""


def _byte_of_character() -> dict[str, int]:
    """Return the byte each letter of the byte-level alphabet stands for.

    Printable Latin-1 bytes stand for themselves; the others follow from U+0100 in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(shifted)})
    assert set(table) == set(ByteLevel.alphabet())
    return table


class Tokenizer:
    """One released tokenizer file. `vocab_size` counts base entries and added markers."""

    def __init__(self, source: str, where: str = "tokenizer.json") -> None:
        """Read the file's JSON text; `where` names the file in errors."""
        try:
            self._raw = tokenizers.Tokenizer.from_str(source)
            decoder = (json.loads(source).get("decoder") or {}).get("type")
        except Exception as error:
            raise TokenizerError(f"{where}: not a readable tokenizer file ({error})") from None
        if decoder != "ByteLevel":
            want = "'ByteLevel', the released family"
            raise TokenizerError(f"{where}: decoder: got {decoder!r}, expected {want}")
        self._source = source
        self.where = where
        self.vocab_size = self._raw.get_vocab_size(with_added_tokens=True)
        added = self._raw.get_added_tokens_decoder()
        self.markers: dict[str, int] = {added[i].content: i for i in sorted(added)}
        self.hidden_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_of = _byte_of_character()

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between processes as the file's text."""
        return Tokenizer, (self._source, self.where)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json`, or the one inside a checkpoint folder."""
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        want = "a released tokenizer.json (finwhale train-tokenizer writes one)"
        try:
            source = read_text(path, max_bytes=_MAX_FILE_BYTES, expected=want)
        except FileError as error:
            raise TokenizerError(str(error)) from None
        return cls(source, str(path))

    @property
    def raw(self) -> tokenizers.Tokenizer:
        """The Rust object underneath."""
        return self._raw

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer without its markers: what a user types can only be plain text."""
        fields = json.loads(self._source)
        fields["added_tokens"] = []
        return tokenizers.Tokenizer.from_str(json.dumps(fields))

    def marker_id(self, marker: str) -> int:
        """Return the id of a marker string; raise TokenizerError if the file has none."""
        if marker not in self.markers:
            known = f"{len(self.markers)} markers, first {list(self.markers)[:3]}"
            raise TokenizerError(f"{self.where}: added_tokens: no {marker!r}; found {known}")
        return self.markers[marker]

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: N tokens hold at most N times as many."""
        return max(len(self.token_bytes(token)) for token in range(self.vocab_size))

    @property
    def bos_id(self) -> int:
        """Id of the released begin-of-sentence marker."""
        return self.marker_id(BOS)

    @property
    def eos_id(self) -> int:
        """Id of the released end-of-sentence marker."""
        return self.marker_id(EOS)

    @property
    def pad_id(self) -> int:
        """Id of the released padding marker."""
        return self.marker_id(PAD)

    def encode(self, text: str, *, parse_markers: bool = False) -> list[int]:
        """Return the ids of `text`; marker strings in it become marker ids only if asked."""
        engine = self._raw if parse_markers else self._plain
        if len(text) < _SHORT_TEXT:
            return engine.encode(text, add_special_tokens=False).ids
        # `encode` keeps Python's lock while it works, 3 s for 4 MB; the batch call lets it go.
        return engine.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, markers read as plain text."""
        found = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in found]

    def decode(self, ids: Iterable[int], *, skip_hidden: bool = False) -> str:
        """Return the text of `ids`; bytes that form no character become U+FFFD.

        `skip_hidden` leaves out the markers that the file flags special.
        """
        return self._raw.decode(list(ids), skip_special_tokens=skip_hidden)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes one token stands for, which may be part of a character."""
        token = self._raw.id_to_token(token_id)
        if token is None:
            raise IndexError(f"token id {token_id}: expected 0 to {self.vocab_size - 1}")
        # As the Rust decoder does: a token with any letter outside the alphabet is plain text.
        if all(letter in self._byte_of for letter in token):
            return bytes(self._byte_of[letter] for letter in token)
        return token.encode("utf-8")

    def stream(self, *, skip_hidden: bool = False) -> StreamDecoder:
        """Return a fresh incremental decoder for one sequence."""
        return StreamDecoder(self, skip_hidden=skip_hidden)


class StreamDecoder:
    """Turns ids into text as they arrive. Every `push` returns whole characters only.

    The pieces joined, `finish()` included, equal `Tokenizer.decode` of all the ids; an id beyond
    the vocabulary has no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_hidden: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.hidden_ids if skip_hidden else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, possibly none."""
        # A model's head may have more rows than the tokenizer has tokens.
        if token_id in self._skipped or token_id >= self._tokenizer.vocab_size:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Return what is still held back: U+FFFD for a character that never completed."""
        return self._decoder.decode(b"", final=True)
