"""Keys of cached blocks: what a block's bytes depend on, hashed without ambiguity.

Every part goes in behind its length and every kind of hash has a tag of its own, so no two
different lists of parts give the same bytes. A newcomer's mistake: to join fields with a separator
that a field may hold. Source: spec/kv-cache.md section 4.3.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

Images = Sequence[tuple[int, bytes]]

# A root key is longer than a block key, so `insert` knows a first block without being told.
ROOT_TAG = b"root"


class PrefixError(ValueError):
    """A namespace, key, block or token id that the index cannot take."""


def tagged_digest(domain: bytes, *parts: bytes) -> bytes:
    """Return the SHA-256 of the parts, each behind its length [8 bytes, little endian].

    With lengths, two different lists of parts never give the same bytes.
    """
    hasher = hashlib.sha256()
    for part in (domain, *parts):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def text_bytes(value: str) -> bytes:
    """Return UTF-8; a salt comes from outside, and a lone surrogate must not end the request."""
    return value.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """All that decides the bytes of a block besides its tokens; one index serves one namespace.

    weights_digest  SHA-256 of the weights' content: a name or a path may be reused
    layout          cache dtypes, record version, which layers own KV at which ratio
    numerics        kernels and rounding
    tokenizer       digest of tokenizer and chat template
    replay_mode     how windows are restored: a suffix behind a bounded replay has other bytes
    salt            of the server; a request's own salt goes to `PrefixIndex.root_key`
    """

    weights_digest: str
    layout: str
    numerics: str
    tokenizer: str
    replay_mode: str
    salt: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, str):
                raise PrefixError(f"{item.name}: got {value!r}, expected a string")

    def digest(self) -> bytes:
        """Return the SHA-256 [32 bytes] of all fields, every name and value behind its length."""
        parts = [text_bytes(t) for f in fields(self) for t in (f.name, getattr(self, f.name))]
        return tagged_digest(b"finwhale.namespace", *parts)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return the ids as 8 bytes each, little endian."""
    try:
        return struct.pack(f"<{len(tokens)}Q", *tokens)
    except struct.error as error:
        raise PrefixError(f"tokens: expected ids in 0 ... 2**64 - 1 ({error})") from None


def block_key(parent: bytes, tokens: Sequence[int], images: Images = ()) -> bytes:
    """Return the key [32 bytes] of the block behind `parent`.

    SHA-256(domain tag | parent | ids, 8 bytes each | position, 8 bytes | image digest | ...),
    each part behind its length.

    parent  key of the block before, or a root key
    tokens  ids of this block
    images  (position in `tokens`, content digest) of each image that begins in this block; its
            later blocks know it from their parent

    Source: spec/kv-cache.md section 4.3.
    """
    parts = [part for at, image in sorted(images) for part in (at.to_bytes(8, "little"), image)]
    return tagged_digest(b"finwhale.block", parent, token_bytes(tokens), *parts)
