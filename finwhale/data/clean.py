"""Package text to plain text: markup removed, lines that are no language dropped and counted.

Owns the conversions (HTML, reStructuredText, tagged words, WordNet records) and `clean_text`,
which every document passes. Refused: guessing what a line means; a line is dropped by one of
two written rules or kept. The easy mistake: `a @ b.T` in code is not an e-mail address, so
an address must end in a known domain. Removing e-mail addresses is a matter of privacy, not of
quality: released weights must not recite them.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser

MAX_LINE_CHARS = 10_000
MIN_DOCUMENT_CHARS = 64
MINIFIED_LINE_CHARS = 400
SYNSETS_PER_DOCUMENT = 256

_ADDRESS = re.compile(
    r"[A-Za-z0-9][\w.+-]*\s?(?:@|\(at\)| at\s?\(?@)\s?[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*"
    r"\.(?:com|org|net|edu|gov|mil|info|name|io|dev|uk|de|fr|eu|ch|se|nl|ca|au|nz|jp|es|fi|no"
    r"|dk|us|cz|pl|ru|br|at|be|ie|il|za)\b"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060\ufeff\ufffd]")
_OVERSTRIKE = re.compile(r".\x08")  # how printed manuals make bold and underlined letters
_START = re.compile(r"^.*(?:\*\*\* ?START OF TH|\*END\*? ?THE SMALL PRINT).*$", re.MULTILINE)
_END = re.compile(r"^.*(?:\*\*\* ?END OF TH|End of (?:the )?Project Gutenberg).*$", re.M | re.I)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """Clean text, empty if nothing is worth keeping, and lines dropped by reason."""

    text: str
    dropped_lines: Counter[str] = field(default_factory=Counter)


def dropped_line_reason(line: str) -> str | None:
    """Return why a line is dropped, or None for a line that stays."""
    if ("@" in line or "(at)" in line) and _ADDRESS.search(line):
        return "e-mail address"
    # Language has a blank about every sixth character; minified code and encoded bytes do not.
    if len(line) > MINIFIED_LINE_CHARS and line.count(" ") * 25 < len(line):
        return "minified line"
    return None


def lines_of(line: str) -> list[str]:
    """Return the line, or for one above the cap its sentences in lines of about a tenth of it.

    A text without sentence ends is cut at the cap, so that no line is ever longer.
    """
    if len(line) <= MAX_LINE_CHARS:
        return [line]
    lines = [""]
    for sentence in re.split(r"(?<=[.!?]) +", line):
        if lines[-1] and len(lines[-1]) + len(sentence) >= MAX_LINE_CHARS // 10:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + sentence
    caps = range(0, max(map(len, lines)), MAX_LINE_CHARS)
    return [part[at : at + MAX_LINE_CHARS].strip() for part in lines for at in caps if part[at:]]


def without_gutenberg_frame(text: str) -> str:
    """Return the text between the start and end notes of an etext, or all of it."""
    starts = list(_START.finditer(text[: len(text) // 2]))
    if starts:
        text = text[starts[-1].end() :]
    end = _END.search(text, len(text) // 2)
    return text[: end.start()] if end else text


def clean_text(text: str) -> Cleaned:
    """Return the text in NFC with Unix line ends, no control characters and no dropped line.

    Blanks at line ends go, three or more empty lines become two. Indentation stays.
    Text without an etext's frame comes out of a second pass unchanged.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n")
    text = unicodedata.normalize("NFC", _CONTROL.sub("", _OVERSTRIKE.sub("", text)))
    text = without_gutenberg_frame(text)
    dropped: Counter[str] = Counter()
    kept: list[str] = []
    num_empty = 0
    for line in (part.rstrip() for raw in text.split("\n") for part in lines_of(raw) or [""]):
        reason = dropped_line_reason(line)
        if reason:
            dropped[reason] += 1
            continue
        num_empty = 0 if line else num_empty + 1
        if num_empty <= 2:
            kept.append(line)
    text = "\n".join(kept).strip("\n")
    return Cleaned(text=text + "\n" if text else "", dropped_lines=dropped)


def dropped_document_reason(text: str) -> str | None:
    """Return why a cleaned document is dropped, or None for one that stays."""
    if len(text) < MIN_DOCUMENT_CHARS:
        return "too short"
    visible = sum(not character.isspace() for character in text)
    letters = sum(character.isalpha() for character in text)
    # Tables of numbers and rulers teach nothing that text does.
    return "not language" if letters * 5 < visible * 2 else None


_BLOCKS = frozenset(
    "address article blockquote br dd div dl dt fieldset figure form h1 h2 h3 h4 h5 h6 hr li ol p "
    "pre section table tbody tr ul".split()
)
_SKIPPED_TAGS = frozenset("head nav script style svg header footer template noscript".split())
# Navigation of the manuals that the corpus is made of.
_SKIPPED_CLASSES = frozenset(
    "navheader navfooter nosearch menu fancy_toc toc searchmenu sphinxsidebar".split()
)
_VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())


class _TextOfHtml(HTMLParser):
    """Collects text; blank runs are one blank outside `pre`, block elements start a line."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipped_tag: str | None = None
        self._skipped_depth = 0
        self._pre_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped_tag:
            self._skipped_depth += tag == self._skipped_tag
            return
        classes = (dict(attrs).get("class") or "").split()
        if tag not in _VOID and (tag in _SKIPPED_TAGS or not _SKIPPED_CLASSES.isdisjoint(classes)):
            self._skipped_tag, self._skipped_depth = tag, 1
        elif tag in _BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "h1", "h2", "h3", "h4", "pre") else "\n")
            self._pre_depth += tag == "pre"
        elif tag in ("td", "th"):
            self.parts.append("  ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # `<a/>` opens and closes at once: it must not open a skipped element.
        if not self._skipped_tag and tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self._skipped_tag:
            self._skipped_depth -= tag == self._skipped_tag
            if not self._skipped_depth:
                self._skipped_tag = None
        elif tag in _BLOCKS:
            self.parts.append("\n")
            self._pre_depth = max(0, self._pre_depth - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if not self._skipped_tag:
            self.parts.append(data if self._pre_depth else re.sub(r"\s+", " ", data))


def html_to_text(html: str) -> str:
    """Return the text of a page without scripts, menus and tables of contents."""
    parser = _TextOfHtml()
    parser.feed(html)
    parser.close()
    text = "".join(parser.parts)
    # A blank after a line break comes from the source's own layout unless it is an indentation.
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\n (?=\S)", "\n", text))


_RST_ANCHOR = re.compile(
    r"^\.\. (?:_[^\n]*:|index::[^\n]*|\|[^\n]*)\n(?:[ \t]+:?\w[^\n]*\n)*", re.M
)
_RST_ROLE = re.compile(r":[a-z][a-z0-9+:_-]*:`([^`<]*?)(?:\s*<[^`>]*>)?`")


def rst_to_text(text: str) -> str:
    """Return reStructuredText without anchors, index entries and role names; layout stays."""
    return _RST_ROLE.sub(lambda m: f"`{m[1].lstrip('!~')}`", _RST_ANCHOR.sub("", text))


_CLOSING = re.compile(r" +(?=[.,;:?!)\]](?:\s|$))")


def tagged_to_text(text: str) -> str:
    """Return `word/tag word/tag` text as sentences, one paragraph per tagged line."""
    lines = []
    for line in text.splitlines():
        words = [token.rpartition("/")[0] or token for token in line.split()]
        if words:
            joined = _CLOSING.sub("", " ".join(words)).replace("( ", "(").replace("[ ", "[")
            lines.append(joined.replace("`` ", '"').replace(" ''", '"'))
    return "\n".join(lines)


_KINDS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def _synset(line: str) -> tuple[str, str, list[str], list[str], str]:
    """Return (offset, kind, words, offsets of what it is a kind of, gloss) of one data line.

    Fields: offset file kind count(hex) {word id}* count {symbol offset kind numbers}* | gloss.
    """
    record, _, gloss = line.partition("|")
    fields = record.split()
    num_words = int(fields[3], 16)
    words = [
        re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in fields[4 : 4 + 2 * num_words : 2]
    ]
    at = 4 + 2 * num_words
    pointers = [fields[at + 1 + 4 * i : at + 5 + 4 * i] for i in range(int(fields[at]))]
    parents = [target for symbol, target, *_ in pointers if symbol in ("@", "@i")]
    return fields[0], fields[2], words, parents, gloss.strip()


def wordnet_to_texts(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) with one sentence per synset: words, kind, gloss, what it is a kind of.

    `files` maps a path to the text of a data file; lines that start with a blank are its licence.
    """
    for name, text in files.items():
        rows = [_synset(line) for line in text.splitlines() if line and line[0] != " "]
        first_word = {offset: words[0] for offset, _, words, _, _ in rows}
        for start in range(0, len(rows), SYNSETS_PER_DOCUMENT):
            lines = []
            for _, kind, words, parents, gloss in rows[start : start + SYNSETS_PER_DOCUMENT]:
                above = ", ".join(first_word[p] for p in parents if p in first_word)
                tail = f" (a kind of {above})" if above else ""
                lines.append(f"{', '.join(words)} ({_KINDS[kind]}): {gloss}{tail}")
            yield f"{name}#{start // SYNSETS_PER_DOCUMENT}", "\n".join(lines)
