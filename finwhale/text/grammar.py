"""Grammars that a generated text has to follow: JSON of a schema, any JSON object, a pattern.

Each function returns a `GrammarConstraint`, which the engine walks token by token (it has the shape
of `finwhale.engine.request.Constraint`). The parsing is llguidance's, the extra `grammar`; this
file owns the vocabulary around it. It refuses markers: a marker's text could stand in a JSON
string, and its id would then begin a tool call. A newcomer's mistake: blanks between JSON tokens
are allowed without end, so a generation still needs `max_new_tokens`, and what "length" cut off
does not parse. Source: spec/multimodal-serving.md section D.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from finwhale.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_ANY_OBJECT = '{"type": "object"}'


class GrammarError(ValueError):
    """A grammar that cannot be followed, or a token that does not follow it."""


def json_schema_constraint(
    tokenizer: Tokenizer, schema: dict | str, *, vocab_size: int | None = None
) -> GrammarConstraint:
    """Return a constraint to JSON that is valid under `schema`, keys in the schema's order.

    schema      a JSON schema as a dict or as text
    vocab_size  rows of the model's head; default: the tokenizer's

    Raises GrammarError for a schema that is invalid, unsatisfiable or uses a keyword that the
    library does not enforce; ModuleNotFoundError without the library.
    """
    try:
        fields = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(fields, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"schema: not JSON ({error}); pass a JSON schema") from None
    return _constraint(tokenizer, "schema", text, vocab_size)


def json_object_constraint(
    tokenizer: Tokenizer, *, vocab_size: int | None = None
) -> GrammarConstraint:
    """Return a constraint to any JSON object (JSON mode)."""
    return _constraint(tokenizer, "schema", _ANY_OBJECT, vocab_size)


def regex_constraint(
    tokenizer: Tokenizer, pattern: str, *, vocab_size: int | None = None
) -> GrammarConstraint:
    """Return a constraint to texts that `pattern` matches from end to end.

    The dialect is that of Rust's regex crate: no look-around, no back-references.
    """
    return _constraint(tokenizer, "pattern", pattern, vocab_size)


class GrammarConstraint:
    """A walk through a compiled grammar; ends with the tokenizer's end-of-sentence id."""

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Walk on with `matcher`, which belongs to this object from now on."""
        self._matcher, self._tokenizer = matcher, tokenizer
        self.vocab_size = vocab_size
        self._may_be_text = _may_be_text(tokenizer)
        self._mask: Tensor | None = None

    def mask(self) -> Tensor:
        """Return [V] bool: the ids that may come next, V of the model.

        The end-of-sentence id is among them where the text may end, and alone where it has to.
        Where only one text may follow, so does only the token that the tokenizer would write.
        """
        return self._allowed().clone()

    def advance(self, token: int) -> None:
        """Move past `token`; raise GrammarError, and stay in place, if it may not come next."""
        if not 0 <= token < self.vocab_size or not self._allowed()[token]:
            raise GrammarError(f"token: got id {token}, expected one that the mask allows")
        # At its end the parser takes nothing more, so there the mask alone decides.
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()
            self._mask = None

    def _allowed(self) -> Tensor:
        """Return the mask of this place, computed once."""
        if self._mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._check()
            known = len(self._may_be_text)
            follows = np.unpackbits(bits, count=known, bitorder="little").view(bool)
            mask = torch.zeros(self.vocab_size, dtype=torch.bool)
            torch.logical_and(torch.from_numpy(follows), self._may_be_text, out=mask[:known])
            self._mask = mask
        return self._mask

    @property
    def is_finished(self) -> bool:
        """Whether only the end-of-sentence id may follow, or has followed."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def copy(self) -> GrammarConstraint:
        """Return an independent walker at the same place."""
        return GrammarConstraint(self._matcher.deep_copy(), self._tokenizer, self.vocab_size)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"grammar: {self._matcher.get_error()}")


def _constraint(
    tokenizer: Tokenizer, kind: str, text: str, vocab_size: int | None
) -> GrammarConstraint:
    known = tokenizer.vocab_size
    vocab_size = known if vocab_size is None else vocab_size
    if vocab_size < known:
        want = f"at least the tokenizer's {known}"
        raise GrammarError(f"vocab_size: got {vocab_size}, expected {want}")
    return GrammarConstraint(_compiled(tokenizer, kind, text).deep_copy(), tokenizer, vocab_size)


# Bounded, since texts come from outside; a template is copied and never walked.
@functools.lru_cache(maxsize=128)
def _compiled(tokenizer: Tokenizer, kind: str, text: str) -> LLMatcher:
    """Return the parser of a grammar at its start."""
    vocabulary = _vocabulary(tokenizer)
    from llguidance import LLMatcher, LLParserLimits

    # Verbose errors quote the parser's state, pages of it.
    limits = LLParserLimits(verbose_errors=False)
    try:
        make = {
            "schema": LLMatcher.grammar_from_json_schema,
            "pattern": LLMatcher.grammar_from_regex,
        }[kind]
        matcher = LLMatcher(vocabulary, make(text), log_level=0, limits=limits)
    except ValueError as error:
        raise GrammarError(f"{kind}: {error}") from None
    if matcher.is_error():
        raise GrammarError(f"{kind}: {matcher.get_error()}")
    return matcher


@functools.lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """Return the library's table of the tokenizer's bytes; a second's work at full size."""
    try:
        from llguidance import LLTokenizer
    except ImportError:
        want = "pip install 'finwhale[grammar]'"
        raise ModuleNotFoundError(
            f"a constraint needs llguidance, which is not installed; {want}", name="llguidance"
        ) from None
    # Without its markers, so that a marker's text in a grammar is spelled in plain tokens.
    fields = json.loads(tokenizer.raw.to_str())
    fields["added_tokens"] = []
    return LLTokenizer(
        json.dumps(fields, ensure_ascii=False),
        n_vocab=tokenizer.vocab_size,
        eos_token=tokenizer.eos_id,
    )


@functools.lru_cache(maxsize=4)
def _may_be_text(tokenizer: Tokenizer) -> Tensor:
    """Return [tokenizer.vocab_size] bool: False for every marker but the one that ends the text."""
    table = torch.ones(tokenizer.vocab_size, dtype=torch.bool)
    table[[i for i in tokenizer.markers.values() if i != tokenizer.eos_id]] = False
    return table
