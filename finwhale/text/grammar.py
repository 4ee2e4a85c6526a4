"""Grammars that a generated text has to follow: JSON of a schema, any JSON object, a pattern.

Each function returns a `GrammarConstraint`, which the engine walks token by token (it has the shape
of `finwhale.engine.request.Constraint`). The parsing is llguidance's, the extra `grammar`; this
file owns the vocabulary around it, what is remembered, and the thread in which the next mask is
made while the model runs. It refuses markers, since a marker's id in a JSON string would begin a
tool call, and whatever takes too much (finwhale/text/schema_limits.py, grammar_trial.py).
A newcomer's mistake: blanks are those of Python's json.dumps and no others, but a string without
a length still needs `max_new_tokens`. Source: spec/multimodal-serving.md section D.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from finwhale.text.grammar_trial import Trial, TrialError, check, matcher_of, vocabulary_of
from finwhale.text.schema_limits import (
    SchemaError,
    as_json,
    check_pattern,
    check_schema,
    closed,
    without_texts,
)
from finwhale.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Fuel bounds a mask's work; this is for a machine that does not get to it.
MASK_SECONDS = 10.0
MAX_CACHE_BYTES = 64 << 20
# Measured: 130 bytes of parser for each character of a schema with 5,000 properties.
_BYTES_PER_CHARACTER = 160
_TEMPLATE_BYTES = 20_000
_PREFIX_STEP = 64
# How JSON is spaced, first as json.dumps does, which is how prompts show it. The others are for a
# prefix that somebody else wrote; a generation takes the first one that its prefix follows.
COMPACT_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_STYLES: tuple[dict[str, Any], ...] = (
    COMPACT_STYLE,
    {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{1,40}"},
)
_LABELS = {"schema": "schema", "pattern": "pattern", "lark": "calls"}


class GrammarError(ValueError):
    """A grammar that cannot be followed, or a token that does not follow it."""


class PrefixError(GrammarError):
    """A prefix that no text of the grammar begins with."""


def json_schema_constraint(
    tokenizer: Tokenizer,
    schema: dict | bool | str,
    *,
    vocab_size: int | None = None,
    prefix: Sequence[int] = (),
    owner: str = "",
    deadline_s: float | None = None,
) -> GrammarConstraint:
    """Return a constraint to JSON that is valid under `schema`, keys in the schema's order.

    Properties that are not declared come only where the schema says so, by
    `additionalProperties` or otherwise (`schema_limits.closed`).

    schema      a JSON schema as a value or as text; its key `x-guidance` has no effect
    vocab_size  rows of the model's head; default: the tokenizer's
    prefix      ids of the text's beginning, which is there already
    owner       compiled grammars are remembered for it alone (a tenant)
    deadline_s  of time.monotonic, for trials (`grammar_trial`); 0 tries nothing

    Raises GrammarError for a schema that is invalid, unsatisfiable, too large or uses a keyword
    that the library does not enforce; PrefixError; ModuleNotFoundError without the library;
    TrialLostError and TrialLateError, which say nothing about the schema and are not remembered.
    """
    try:
        fields = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"schema: not JSON ({error}); pass a JSON schema") from None
    if not isinstance(fields, (dict, bool)):
        raise GrammarError(f"schema: got {type(fields).__name__}, expected an object or boolean")
    try:
        # The text comes first: what is no JSON has no levels.
        is_plain = check_schema(fields, as_json(fields))
    except SchemaError as error:
        raise GrammarError(str(error)) from None
    fields = without_texts(fields)
    if isinstance(fields, bool):
        fields = {} if fields else {"type": []}
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "owner": owner,
        "is_plain": is_plain,
        "deadline_s": deadline_s,
    }
    shut = closed(fields)
    ways = [shut] if shut == fields else [shut, fields]
    *others, last = [as_json({**way, "x-guidance": style}) for way in ways for style in _STYLES]
    for text in others:
        # Another spacing, or properties that are not declared, where only they fit the prefix.
        with contextlib.suppress(PrefixError):
            return constraint_of(tokenizer, "schema", text, prefix=prefix, **settings)
    return constraint_of(tokenizer, "schema", last, prefix=prefix, **settings)


def json_object_constraint(
    tokenizer: Tokenizer,
    *,
    vocab_size: int | None = None,
    prefix: Sequence[int] = (),
    owner: str = "",
    deadline_s: float | None = None,
) -> GrammarConstraint:
    """Return a constraint to any JSON object (JSON mode)."""
    schema = {"type": "object"}
    return json_schema_constraint(
        tokenizer,
        schema,
        vocab_size=vocab_size,
        prefix=prefix,
        owner=owner,
        deadline_s=deadline_s,
    )


def regex_constraint(
    tokenizer: Tokenizer,
    pattern: str,
    *,
    vocab_size: int | None = None,
    prefix: Sequence[int] = (),
    owner: str = "",
    deadline_s: float | None = None,
) -> GrammarConstraint:
    """Return a constraint to texts that `pattern` matches from end to end.

    The dialect is that of Rust's regex crate: no look-around, no back-references.
    """
    try:
        check_pattern(pattern)
    except SchemaError as error:
        raise GrammarError(str(error)) from None
    return constraint_of(
        tokenizer,
        "pattern",
        pattern,
        vocab_size=vocab_size,
        prefix=prefix,
        owner=owner,
        deadline_s=deadline_s,
    )


def constraint_of(
    tokenizer: Tokenizer,
    kind: str,
    text: str,
    *,
    vocab_size: int | None = None,
    prefix: Sequence[int] = (),
    markers: Sequence[str] = (),
    owner: str = "",
    is_plain: bool = False,
    deadline_s: float | None = None,
) -> GrammarConstraint:
    """Return the constraint of a grammar in one of the library's languages.

    kind      "schema", "pattern" or "lark"
    markers   those that the grammar names by id, beside the end of sentence
    is_plain  the grammar is known to be small, so it is compiled without a trial
    """
    known = tokenizer.vocab_size
    vocab_size = known if vocab_size is None else vocab_size
    if vocab_size < known:
        want = f"at least the tokenizer's {known}"
        raise GrammarError(f"vocab_size: got {vocab_size}, expected {want}")
    template = _templates.get(
        tokenizer, kind, text, owner=owner, is_plain=is_plain, deadline_s=deadline_s
    )
    may_be_text = _may_be_text(tokenizer, tuple(markers))
    walker = GrammarConstraint(template.deep_copy(), tokenizer, vocab_size, may_be_text)
    walker.begin(prefix, _LABELS[kind])
    return walker


class GrammarConstraint:
    """A walk through a compiled grammar; ends with the tokenizer's end-of-sentence id.

    One thread may use it at a time. `advance` starts the next mask in another thread.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: Tokenizer, vocab_size: int, may_be_text: Tensor
    ) -> None:
        """Walk on with `matcher`, which belongs to this object from now on.

        may_be_text  [tokenizer.vocab_size] bool, the ids that are ever allowed
        """
        self._matcher, self._tokenizer = matcher, tokenizer
        self.vocab_size = vocab_size
        self._may_be_text = may_be_text
        self._mask: Tensor | None = None
        self._coming: Future[Tensor] | None = None

    def begin(self, prefix: Sequence[int], label: str) -> None:
        """Move past `prefix` and make the first mask; raise GrammarError where there is none."""
        for start in range(0, len(prefix), _PREFIX_STEP):
            # In steps, since the library keeps Python's lock meanwhile.
            piece = list(prefix[start : start + _PREFIX_STEP])
            if self._matcher.try_consume_tokens(piece) < len(piece):
                raise PrefixError(
                    f"prefix: no text of the {label} begins with it; send another, or none"
                )
        try:
            self._mask = self._computed()
        except GrammarError as error:
            raise GrammarError(str(error).replace("grammar", label, 1)) from None

    def mask(self) -> Tensor:
        """Return [V] bool: the ids that may come next, V of the model.

        The end-of-sentence id is among them where the text may end, and alone where it has to.
        Where only one text may follow, so does only the token that the tokenizer would write.
        Raises GrammarError where the library gives up, or is later than MASK_SECONDS.
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
            if not self._matcher.is_stopped():
                self._coming = _pool().submit(self._computed)

    @property
    def is_finished(self) -> bool:
        """Whether only the end-of-sentence id may follow, or has followed."""
        self._settle()
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def copy(self) -> GrammarConstraint:
        """Return an independent walker at the same place."""
        self._settle()
        twin = GrammarConstraint(
            self._matcher.deep_copy(), self._tokenizer, self.vocab_size, self._may_be_text
        )
        # A mask is never written to, so both may hold it.
        twin._mask = self._mask
        return twin

    def _allowed(self) -> Tensor:
        """Return the mask of this place, made once."""
        self._settle()
        if self._mask is None:
            self._mask = self._computed()
        return self._mask

    def _settle(self) -> None:
        """Wait for the other thread, which holds the matcher until its mask is made."""
        if self._coming is None:
            return
        try:
            self._mask = self._coming.result(MASK_SECONDS)
        except FutureTimeoutError:
            raise GrammarError(
                f"grammar: a mask took longer than {MASK_SECONDS:g} s; simplify the grammar"
            ) from None
        self._coming = None

    def _computed(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        known = len(self._may_be_text)
        follows = np.unpackbits(bits, count=known, bitorder="little").view(bool)
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        torch.logical_and(torch.from_numpy(follows), self._may_be_text, out=mask[:known])
        return mask

    def _check(self) -> None:
        try:
            check(self._matcher)
        except TrialError as error:
            raise GrammarError(f"grammar: {_in_words(error)}") from None


class _Templates:
    """Compiled grammars at their starts, within a bound of bytes; what was refused, too.

    The owner is part of the key: a tenant could tell by the time whether another one has compiled
    the same grammar.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._held: OrderedDict[tuple, tuple[LLMatcher | str, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self,
        tokenizer: Tokenizer,
        kind: str,
        text: str,
        *,
        owner: str,
        is_plain: bool,
        deadline_s: float | None,
    ) -> LLMatcher:
        """Return a matcher to copy and never to walk; raise GrammarError for a refused grammar."""
        # Texts come from clients, so a digest stands for them.
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        key = tokenizer, owner, kind, digest
        with self._lock:
            found, _ = self._held.get(key, (None, 0))
            if found is not None:
                self._held.move_to_end(key)
        if found is None:
            found, size = self._made(tokenizer, kind, text, is_plain, deadline_s)
            self._keep(key, found, size)
        if isinstance(found, str):
            raise GrammarError(found)
        return found

    def _made(
        self,
        tokenizer: Tokenizer,
        kind: str,
        text: str,
        is_plain: bool,
        deadline_s: float | None,
    ) -> tuple[LLMatcher | str, int]:
        """Return a matcher or the words of the refusal, and the bytes to count for it.

        What a trial says of the machine, TrialLostError or TrialLateError, passes through.
        """
        vocabulary = _vocabulary(tokenizer)
        size = _TEMPLATE_BYTES + _BYTES_PER_CHARACTER * len(text)
        try:
            if not is_plain:
                size = max(size, _trial(tokenizer).run(kind, text, deadline_s=deadline_s))
            matcher = matcher_of(vocabulary, kind, text)
        except TrialError as error:
            return f"{_LABELS[kind]}: {_in_words(error)}", _TEMPLATE_BYTES
        return matcher, size

    def _keep(self, key: tuple, found: LLMatcher | str, size: int) -> None:
        # One that takes much is compiled again, rather than pushing out all others.
        if size > self.max_bytes // 4:
            return
        with self._lock:
            _, old = self._held.pop(key, (None, 0))
            self._held[key] = found, size
            self.num_bytes += size - old
            while self.num_bytes > self.max_bytes:
                _, (_, gone) = self._held.popitem(last=False)
                self.num_bytes -= gone


_templates = _Templates(MAX_CACHE_BYTES)
_PLACE = re.compile(r"^at [0-9]+\([0-9]+\): (?:failed to compile JSON schema: )?")


def _in_words(error: TrialError) -> str:
    """Return the library's words; its names of reasons are put into a sentence."""
    # A place in a grammar of our own making says nothing to a client.
    text = _PLACE.sub("", str(error)).partition("\n")[0]
    if text.startswith("NoExtension"):
        return "no text satisfies it"
    for name in ("ParserTooComplex", "LexerTooComplex"):
        if text.startswith(name):
            return f"too complex for the parser's limits ({text}); simplify it"
    return text


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return the threads that make masks; the library lets go of Python's lock there."""
    workers = max(1, min(4, os.cpu_count() or 1))
    return ThreadPoolExecutor(workers, thread_name_prefix="finwhale-mask")


@functools.lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """Return the library's table of the tokenizer's bytes; a second's work at full size."""
    try:
        return vocabulary_of(
            tokenizer.raw.to_str(), vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id
        )
    except ImportError:
        want = "pip install 'finwhale[grammar]'"
        raise ModuleNotFoundError(
            f"a constraint needs llguidance, which is not installed; {want}", name="llguidance"
        ) from None


@functools.lru_cache(maxsize=4)
def _trial(tokenizer: Tokenizer) -> Trial:
    return Trial(tokenizer.raw.to_str(), vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)


def end_trials(tokenizer: Tokenizer) -> None:
    """End the process that tries this tokenizer's grammars; the next trial starts another."""
    _trial(tokenizer).close()


@functools.lru_cache(maxsize=8)
def _may_be_text(tokenizer: Tokenizer, markers: tuple[str, ...]) -> Tensor:
    """Return [tokenizer.vocab_size] bool: False for every marker but EOS and `markers`."""
    table = torch.ones(tokenizer.vocab_size, dtype=torch.bool)
    table[list(tokenizer.markers.values())] = False
    table[[tokenizer.eos_id, *map(tokenizer.marker_id, markers)]] = True
    return table
