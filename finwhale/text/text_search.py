"""Which of several texts is complete first, in text that arrives in pieces.

It owns the search for stop texts and markers: one automaton for each text (Knuth, Morris, Pratt),
whose table grows only as far as the text has matched. Memory is linear in the texts' length and
belongs to the object; time is linear in what was fed, times the number of texts. A newcomer's
mistake: asking for the earliest begin; a longer text may never be completed, so the end decides.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable


class TextSearch:
    """Searches for several texts at once. After one is found, the search begins anew behind it."""

    def __init__(self, wanted: Iterable[str]) -> None:
        """Search for `wanted`, none empty; where two end together, the first listed counts."""
        self._wanted = [_Wanted(text) for text in wanted]
        # Most pieces of an answer hold no beginning of two characters, and end with none of one.
        begins = {re.escape(each.text[:2]) for each in self._wanted}
        begins |= {re.escape(each.text[0]) + r"\Z" for each in self._wanted}
        self._begin = re.compile("|".join(sorted(begins)) or r"\Z.")
        self._is_open = False

    @property
    def num_open(self) -> int:
        """Characters at the end of what was fed with which a wanted text may begin."""
        return max((each.matched for each in self._wanted), default=0)

    def feed(self, piece: str) -> tuple[int, str] | None:
        """Go on with `piece`; return where in it the first complete text ends, and that text."""
        if not self._is_open and self._begin.search(piece) is None:
            return None
        found: tuple[int, str] | None = None
        for each in self._wanted:
            # Only an earlier end can still win.
            end = each.advance(piece, len(piece) if found is None else found[0] - 1)
            if end is not None:
                found = end, each.text
        if found is not None:
            for each in self._wanted:
                each.matched = 0
        self._is_open = any(each.matched for each in self._wanted)
        return found


class _Wanted:
    """One text and how much of it the end of the input has matched."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # [i]: length of the longest text that both begins and ends text[:i + 1], itself left out.
        self._borders = array("I", [0])

    def advance(self, piece: str, limit: int) -> int | None:
        """Match piece[:limit]; return the end of the first occurrence."""
        text, matched, at = self.text, self.matched, 0
        while at < limit:
            if not matched:
                at = piece.find(text[0], at, limit)
                if at < 0:
                    break
            while matched and text[matched] != piece[at]:
                matched = self._border(matched)
            matched += text[matched] == piece[at]
            at += 1
            if matched == len(text):
                self.matched = 0
                return at
        self.matched = matched
        return None

    def _border(self, length: int) -> int:
        text, borders = self.text, self._borders
        while len(borders) < length:
            end = len(borders)
            border = borders[end - 1]
            while border and text[end] != text[border]:
                border = borders[border - 1]
            borders.append(border + (text[end] == text[border]))
        return borders[length - 1]
