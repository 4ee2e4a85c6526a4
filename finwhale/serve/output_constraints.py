"""What must hold before free text or a grammar: an end of reasoning, a call of a known tool.

Both have the shape of `finwhale.engine.request.Constraint` and are walked by the engine. They
refuse nothing that the prompt's own form allows. A newcomer's mistake: giving the engine a JSON
grammar for a thinking request; it would forbid the reasoning itself, so `AfterReasoning` holds
the grammar back until `</think>`. Source: spec/multimodal-serving.md section B.5; cases.md 109.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from finwhale.engine.request import Constraint
from finwhale.text.prompt import Segment, encode_segment
from finwhale.text.special_tokens import DSML, END_THINK
from finwhale.text.tokenizer import Tokenizer

_END = END_THINK.encode()


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
