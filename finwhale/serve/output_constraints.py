"""The constraints of a chat, built of plain values: a response format, a call that is forced.

All have the shape of `finwhale.engine.request.Constraint` and are walked by the engine. They
refuse nothing that the prompt's own form allows. A newcomer's mistake: giving the engine a JSON
grammar for a thinking request; it would forbid the reasoning itself, so `AfterReasoning` holds
the grammar back until `</think>`. Source: spec/multimodal-serving.md section B.5; cases.md 109.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from finwhale.engine.request import Constraint
from finwhale.text.call_grammar import CalledTool, calls_constraint
from finwhale.text.grammar import (
    GrammarError,
    json_object_constraint,
    json_schema_constraint,
    regex_constraint,
)
from finwhale.text.prompt import Segment, encode_segment
from finwhale.text.special_tokens import DSML, END_THINK
from finwhale.text.tokenizer import Tokenizer

_END = END_THINK.encode()


def format_constraint(
    tokenizer: Tokenizer,
    response_format: Mapping[str, Any] | None,
    *,
    vocab_size: int,
    prefix: Sequence[int] = (),
    is_reasoning: bool = False,
    owner: str = "",
    deadline_s: float | None = None,
) -> Constraint | None:
    """Return the constraint of a response format; None for free text.

    prefix        ids of the answer's beginning that the prompt ends with
    is_reasoning  the prompt ends inside a reasoning; the answer begins behind it
    owner         the tenant, who shares no compiled grammar with others
    deadline_s    of time.monotonic, for trials of costly grammars; 0 tries nothing

    Raises GrammarError for a format that cannot be followed; TrialLostError and TrialLateError.
    """
    kind = (response_format or {}).get("type")
    if response_format is None or kind in (None, "text"):
        return None
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "prefix": prefix,
        "owner": owner,
        "deadline_s": deadline_s,
    }
    if kind == "json_object":
        constraint = json_object_constraint(tokenizer, **settings)
    elif kind == "json_schema":
        schema = (response_format.get("json_schema") or {}).get("schema")
        if not isinstance(schema, dict):
            want = "an object with a JSON schema"
            raise GrammarError(
                f"response_format.json_schema.schema: got {str(schema)[:80]!r}, expected {want}"
            )
        constraint = json_schema_constraint(tokenizer, schema, **settings)
    else:
        pattern = response_format.get("regex")
        if not isinstance(pattern, str):
            want = "a pattern, a string"
            raise GrammarError(f"response_format.regex: got {str(pattern)[:80]!r}, expected {want}")
        constraint = regex_constraint(tokenizer, pattern, **settings)
    if is_reasoning:
        return AfterReasoning(constraint, tokenizer, vocab_size=vocab_size)
    return constraint


def call_constraint(
    tokenizer: Tokenizer,
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    parallel: bool,
    vocab_size: int,
    owner: str = "",
    deadline_s: float | None = None,
) -> tuple[Constraint, tuple[str, ...]]:
    """Return the constraint to calls of `tools` behind the opener, and a sentence on what is loose.

    tools     (name, JSON schema of the arguments) of each that may be called
    parallel  more than one call may follow
    """
    called = [CalledTool(name, schema) for name, schema in tools]
    try:
        constraint, loose = calls_constraint(
            tokenizer,
            called,
            parallel=parallel,
            vocab_size=vocab_size,
            owner=owner,
            deadline_s=deadline_s,
        )
    except ModuleNotFoundError as error:
        names = [name for name, _ in tools]
        note = f"arguments that follow no grammar: those of all calls ({error})"
        return opens_call(tokenizer, names, vocab_size=vocab_size), (note,)
    # What stands before the colon is logged, so it has no words of the client.
    notes = [f"arguments that follow no grammar: {name} ({reason})" for name, reason in loose]
    return constraint, tuple(notes)


class AfterReasoning:
    """Free reasoning, then `inner`; the end of sentence is forbidden inside the reasoning."""

    def __init__(self, inner: Constraint, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        """Hold back `inner`, which belongs to this object from now on."""
        self._inner, self._tokenizer, self._vocab_size = inner, tokenizer, vocab_size
        self._is_reasoning = True
        # The parser reads text, so a tag spelled in plain tokens ends the reasoning as well.
        self._tail = b""

    def mask(self) -> Tensor:
        """Return [V] bool: the ids that may come next."""
        if not self._is_reasoning:
            return self._inner.mask()
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[: self._tokenizer.vocab_size] = True
        mask[self._tokenizer.eos_id] = False
        return mask

    def advance(self, token: int) -> None:
        """Move past `token`; raise ValueError if the mask forbids it."""
        if not self._is_reasoning:
            self._inner.advance(token)
            return
        if token == self._tokenizer.eos_id or not 0 <= token < self._tokenizer.vocab_size:
            raise ValueError(f"token: got id {token}, expected one that the mask allows")
        text = self._tail + self._tokenizer.token_bytes(token)
        self._is_reasoning = _END not in text
        self._tail = text[-len(_END) :]

    @property
    def is_finished(self) -> bool:
        """Whether only a stop id may follow, or has followed."""
        return not self._is_reasoning and self._inner.is_finished

    def copy(self) -> AfterReasoning:
        """Return an independent walker at the same place."""
        twin = AfterReasoning(self._inner.copy(), self._tokenizer, vocab_size=self._vocab_size)
        twin._is_reasoning, twin._tail = self._is_reasoning, self._tail
        return twin


class OpensCall:
    """One of the given beginnings, id by id, then anything."""

    def __init__(self, beginnings: Sequence[Sequence[int]], *, vocab_size: int) -> None:
        """Allow `beginnings`, of which none begins with another."""
        self._left = [tuple(ids) for ids in beginnings]
        self._vocab_size = vocab_size

    def mask(self) -> Tensor:
        """Return [V] bool: the ids that may come next."""
        if not self._left:
            return torch.ones(self._vocab_size, dtype=torch.bool)
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[[ids[0] for ids in self._left]] = True
        return mask

    def advance(self, token: int) -> None:
        """Move past `token`; raise ValueError if the mask forbids it."""
        if not self._left:
            return
        left = [ids[1:] for ids in self._left if ids[0] == token]
        if not left:
            raise ValueError(f"token: got id {token}, expected one that the mask allows")
        self._left = left if all(left) else []

    @property
    def is_finished(self) -> bool:
        """Never: what follows the beginning is free."""
        return False

    def copy(self) -> OpensCall:
        """Return an independent walker at the same place."""
        return OpensCall(self._left, vocab_size=self._vocab_size)


def opens_call(tokenizer: Tokenizer, names: Sequence[str], *, vocab_size: int) -> OpensCall:
    """Return the constraint to the first line of a call of one of `names`, behind the opener.

    The prompt of a required or named tool choice ends with the opener of the calls block
    (section B.5), so the line is `<`, the DSML marker and ` invoke name="F">`.
    """
    beginnings = []
    for name in names:
        line = [
            Segment("<", False),
            Segment(DSML, True),
            Segment(f' invoke name="{name}">\n', False),
        ]
        beginnings.append([i for segment in line for i in encode_segment(tokenizer, segment)])
    return OpensCall(beginnings, vocab_size=vocab_size)
