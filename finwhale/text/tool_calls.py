"""The calls block of a reply (DSML) to calls whose arguments are JSON, while it arrives.

A call is given out when its invoke has ended, never before: then its arguments are one JSON object.
What cannot be read as a call is kept as text without markup, with one reason. It is lenient only
where the meaning is certain (`CallsReader` lists where). A newcomer's mistake: looking for the
closing tag of a value; a value ends where the next markup begins, whatever that markup is.
Source: spec/multimodal-serving.md sections B.5 and B.6; RFC 8259 for values.
"""

from __future__ import annotations

import json
import math
import re
from typing import NamedTuple

from finwhale.text.special_tokens import DSML
from finwhale.text.text_search import TextSearch

# The released spelling has a blank after the marker; that of V4 has none and says `tool_calls`.
NAMES = ("calls", "tool_calls", "invoke", "parameter")
# Parsers of clients stop at 128 (serde) or 200 (jiter); the arguments themselves are one level.
MAX_JSON_DEPTH = 100
_MAX_NUMBER_CHARS = 1000
_MAX_SHOWN_NAME = 80

# Possessive, so that none of them tries a run of blanks twice.
_ATTRIBUTE = r"""\s++[A-Za-z_]++\s*+=\s*+(?:"[^"]*+"|'[^']*+')"""
_TAG = re.compile(rf"\s*+(/?)\s*+({'|'.join(NAMES)})((?:{_ATTRIBUTE})*+)\s*+")
_EACH_ATTRIBUTE = re.compile(r"""([A-Za-z_]+)\s*=\s*("[^"]*"|'[^']*')""")
# `<parameter name="p">value` without the marker.
_PLAIN_PARAMETER = re.compile(rf"\s*+<\s*+(parameter(?:{_ATTRIBUTE})*+)\s*+>(.*+)", re.DOTALL)
_PLAIN_MARKUP = re.compile(r"</?(?:parameter|invoke)\b")
# `</parameter>` and its misspellings: the marker half there or in ASCII, the name cut.
_MISSPELT_END = re.compile(r"</[ |\uff5c]*(?:DSML)?[ |\uff5c]*param\w*\s*>\Z")
_MAX_MISSPELT_CHARS = 40
# What of an unfinished tag is markup: its name and attributes, the last one perhaps half there.
_HALF_ATTRIBUTE = "|".join(
    word[:length] for word in ("name", "string") for length in range(len(word), 0, -1)
)
_UNFINISHED_TAG = re.compile(
    r"""\s*+/?\s*+(\w*+)(?:\s++\w++\s*+=\s*+(?:"[^"]*+"?+|'[^']*+'?+)?+)*+"""
    rf"""(?:\s++(?:{_HALF_ATTRIBUTE})?\s*+\Z)?"""
)


class Call(NamedTuple):
    """A call that can be made: `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class CallsReader:
    """Reads one calls block: `read` until `is_ended`, or `finish` where the text ends before it.

    Taken as what they mean: attributes in another order or in single quotes, blanks inside a tag,
    the slash behind the marker, a block's or a closing tag without its `>`, a parameter without
    `string` (its value is JSON where it is JSON, otherwise text) or without the opening marker,
    a value whose closing tag is misspelt or missing, a plain JSON object as the whole body of an
    invoke.

    A typed value that is no JSON is a JSON string of its text. So is one that clients cannot read:
    NaN and infinities, numbers beyond a double or of more than 1,000 characters, half a surrogate
    pair, more than 100 levels. Names that repeat inside a value stay, since RFC 8259 allows them;
    as names of parameters they break the call.

    All else that is no call is text, and with it goes one reason, the first that was found.
    """

    def __init__(self, opener: str | None = None, *, is_stray: bool = False) -> None:
        """Begin behind an opener that the prompt wrote, or inside the tag that opens the block.

        opener    `<` or `</`, behind which a marker stood
        is_stray  the tag is a closing one and the whole block
        """
        self.is_ended = False
        self.is_stray = is_stray
        self._prefix, self._is_in_tag, self._quote = opener or "", opener is not None, ""
        # Text before the open tag, and what has come of the open tag or text.
        self._run = ""
        self._pieces: list[str] = []
        self._text_search = TextSearch((DSML,))
        self._tag_searches = {
            "": TextSearch((">", '"', "'", DSML)),
            '"': TextSearch(('"', DSML)),
            "'": TextSearch(("'", DSML)),
        }
        self._invoke: _Invoke | None = None
        self._parameter: dict[str, str] | None = None
        self._has_calls = False
        self._unread: list[str] = []
        self._reason: str | None = None

    def read(self, text: str) -> tuple[str, Call | None]:
        """Read up to the end of a call, of the block or of `text`.

        Return what is left of the text, and the call.
        """
        while text and not self.is_ended:
            search = self._tag_searches[self._quote] if self._is_in_tag else self._text_search
            found = search.feed(text)
            if found is None:
                self._pieces.append(text)
                return "", None
            end, what = found
            self._pieces.append(text[:end])
            text = text[end:]
            call = None
            if what == DSML:
                call = self._begin_tag(self._taken().removesuffix(DSML))
                if self.is_ended:
                    # The marker belongs to what follows the block.
                    return self._prefix + DSML + text, call
            elif what == ">":
                self._is_in_tag = False
                call = self._take(_tag_of(self._prefix, self._taken()[:-1]), "unknown markup")
            else:
                self._quote = "" if self._quote else what
            if call is not None:
                return text, call
        return text, None

    def finish(self, *, is_cut: bool) -> None:
        """End the block with the text; `is_cut`: a limit ended it and not the model."""
        rest = self._taken()
        opens_tag = self._is_in_tag and self._prefix != "</" and not self.is_stray
        self._note("a closing tag stands alone", self.is_stray)
        self._note("a call was cut off", is_cut and opens_tag and self._invoke is None)
        if self._is_in_tag:
            self._take_text(self._run, None)
        self._take_text(_without_tag(rest) if self._is_in_tag else _without_prefix(rest), None)
        if self._invoke is not None and is_cut:
            self._invoke.problem = f"the call of {_shown(self._invoke.name)} was cut off"
        if self._invoke is not None:
            self._break_invoke()
        elif opens_tag or not self._has_calls:
            self._note("a tag does not end", opens_tag)
            self._note("a call was cut off", is_cut)
        self._end_block()

    def unread(self) -> tuple[str, str] | None:
        """Return what could not be read as a call, without markup, and why; None if all was."""
        return None if self._reason is None else ("\n".join(self._unread), self._reason)

    def _taken(self) -> str:
        taken, self._pieces = "".join(self._pieces), []
        return taken

    def _begin_tag(self, before: str) -> Call | None:
        """Begin the tag of a marker; `before` is the text or the unfinished tag that it ends."""
        prefix = next((each for each in ("</", "<") if before.endswith(each)), "")
        before = before.removesuffix(prefix)
        call = None
        if self._is_in_tag:
            tag = _tag_of(self._prefix, before)
            # The meaning of these is certain without their `>`.
            if tag is None or not (tag.is_closing or tag.name == "calls"):
                tag, before = None, _without_tag(before)
            else:
                before = ""
            call = self._take(tag, "a tag does not end")
            if self.is_ended:
                self._keep(before)
        self._run, self._prefix, self._is_in_tag, self._quote = before, prefix, True, ""
        return call

    def _take(self, tag: _Tag | None, problem: str) -> Call | None:
        """Take the text before a tag, and the tag; None stands for one that says nothing."""
        self._take_text(self._run, tag)
        self._run = ""
        call = None
        if tag is None:
            self._blame(problem)
        elif tag.name == "calls":
            if self._invoke is not None:
                self._break_invoke()
            self.is_ended = tag.is_closing
        elif tag.name == "invoke":
            if tag.is_closing:
                call = self._end_invoke()
            else:
                self._begin_invoke(tag.attributes)
        elif not tag.is_closing:
            self._begin_parameter(tag.attributes)
        if self.is_stray:
            self._note("a closing tag stands alone")
        if self.is_ended or self.is_stray:
            self._end_block()
        return call

    def _take_text(self, text: str, tag: _Tag | None) -> None:
        """Take text up to `tag`: a value, or what stands between tags."""
        is_closed = tag is not None and tag.is_closing and tag.name == "parameter"
        invoke, parameter, self._parameter = self._invoke, self._parameter, None
        if invoke is None:
            self._keep(text)
            self._note("text stands outside an invoke", bool(text.strip()))
            self._note("a closing tag stands alone", is_closed)
            return
        if parameter is not None:
            invoke.add(parameter, text if is_closed else _without_misspelt_end(text))
            return
        plain = _PLAIN_PARAMETER.fullmatch(text) if is_closed else None
        if plain is not None and not _PLAIN_MARKUP.search(plain[2]):
            fields = _tag_of("<", plain[1])
            invoke.add(fields.attributes if fields else {}, plain[2])
        elif is_closed:
            self._blame("a closing tag stands alone")
            invoke.add_loose(text)
        else:
            invoke.add_loose(text)

    def _begin_invoke(self, attributes: dict[str, str]) -> None:
        if self._invoke is not None:
            self._break_invoke()
        self._invoke = _Invoke(attributes.get("name", ""))
        if not self._invoke.name:
            self._invoke.problem = 'the invoke has no name="..."'
        elif len(attributes) > 1:
            self._invoke.problem = "the invoke has attributes beside its name"

    def _end_invoke(self) -> Call | None:
        if self._invoke is None:
            self._note("a closing tag stands alone")
            return None
        arguments = self._invoke.arguments()
        if arguments is None:
            self._break_invoke()
            return None
        call, self._invoke, self._has_calls = Call(self._invoke.name, arguments), None, True
        return call

    def _begin_parameter(self, attributes: dict[str, str]) -> None:
        self._blame("a parameter stands outside an invoke", self._invoke is None)
        self._parameter = attributes

    def _break_invoke(self) -> None:
        """Keep the open invoke as text."""
        invoke, self._invoke, self._parameter = self._invoke, None, None
        if invoke is not None:
            self._note(invoke.problem or f"the invoke of {_shown(invoke.name)} does not end")
            for text in invoke.texts:
                self._keep(text)

    def _end_block(self) -> None:
        self._note("the block has no invoke", not self._has_calls)
        self.is_ended = True

    def _keep(self, text: str) -> None:
        if text.strip():
            self._unread.append(text.strip("\n"))

    def _blame(self, problem: str, is_one: bool = True) -> None:
        """Let `problem` break the open invoke, or note it where none is open."""
        if self._invoke is None:
            self._note(problem, is_one)
        elif is_one:
            self._invoke.problem = self._invoke.problem or problem

    def _note(self, reason: str, is_one: bool = True) -> None:
        if is_one and self._reason is None:
            self._reason = reason


class _Invoke:
    """A call that has begun. `texts` is what its body says without markup, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problem: str | None = None
        self.texts: list[str] = []
        # Names and JSON texts of the values; text outside parameters.
        self._values: dict[str, str] = {}
        self._loose: list[str] = []

    def add(self, attributes: dict[str, str], value: str) -> None:
        """Take a parameter."""
        self.texts.append(value)
        name, kind = attributes.get("name", ""), attributes.get("string")
        problem = None
        if not name or attributes.keys() - {"name", "string"}:
            problem = 'a parameter has other attributes than name="..." and string="..."'
        elif kind not in (None, "true", "false"):
            problem = 'string="..." is neither true nor false'
        elif name in self._values:
            problem = f"the parameter {_shown(name)} comes twice"
        self.problem = self.problem or problem
        is_json = kind != "true" and is_json_value(value)
        self._values[name] = value if is_json else json.dumps(value, ensure_ascii=False)

    def add_loose(self, text: str) -> None:
        """Take text outside parameters."""
        if text.strip():
            self._loose.append(text)
            self.texts.append(text)

    def arguments(self) -> str | None:
        """Return the JSON object of the whole body, or None, with `problem` set."""
        if self.problem is not None:
            return None
        if not self._loose:
            pairs = (
                f"{json.dumps(name, ensure_ascii=False)}: {value}"
                for name, value in self._values.items()
            )
            return f"{{{', '.join(pairs)}}}"
        if not self._values and len(self._loose) == 1 and is_json_object(self._loose[0]):
            return self._loose[0].strip()
        want = "neither parameters nor a JSON object"
        self.problem = f"the body of the invoke of {_shown(self.name)} is {want}"
        return None


class _Tag(NamedTuple):
    is_closing: bool
    name: str
    attributes: dict[str, str]


def _tag_of(prefix: str, text: str) -> _Tag | None:
    """Return the tag behind `prefix` and a marker, or None for one that says nothing certain."""
    found = _TAG.fullmatch(text)
    if found is None or not prefix:
        return None
    pairs = [(name, value[1:-1]) for name, value in _EACH_ATTRIBUTE.findall(found[3])]
    is_closing = prefix == "</" or bool(found[1])
    name = "calls" if found[2] == "tool_calls" else found[2]
    has_attributes = bool(pairs) and (is_closing or name == "calls")
    if has_attributes or len({name for name, _ in pairs}) < len(pairs):
        return None
    return _Tag(is_closing, name, dict(pairs))


def _without_tag(text: str) -> str:
    """Return what of an unfinished tag is no markup."""
    before, bracket, behind = text.partition(">")
    if bracket:
        return behind
    found = _UNFINISHED_TAG.match(before)
    is_tag = found is not None and any(name.startswith(found[1]) for name in NAMES)
    return before[found.end() :] if found is not None and is_tag else before


def _without_misspelt_end(text: str) -> str:
    """Return a value that other markup has ended, without its own closing tag."""
    value = text.rstrip()
    found = _MISSPELT_END.search(value, max(0, len(value) - _MAX_MISSPELT_CHARS))
    return text.rstrip("\n") if found is None else value[: found.start()]


def _without_prefix(text: str) -> str:
    """Return text without the beginning of a marker at its end."""
    for marker in (f"</{DSML}", f"<{DSML}"):
        for length in range(len(marker) - 1, 0, -1):
            if text.endswith(marker[:length]):
                return text[:-length]
    return text


def _shown(name: str) -> str:
    """Return a name of the model on one line and short."""
    return json.dumps(name[:_MAX_SHOWN_NAME], ensure_ascii=False)


class _Object(list):
    """Pairs of a JSON object in the order of the text."""


def is_json_value(text: str) -> bool:
    """Return whether `text` is JSON that any client reads: RFC 8259 and the limits above."""
    return _parsed(text) is not _NO_JSON


def is_json_object(text: str) -> bool:
    """Return whether `text` is such JSON, an object, and its names differ."""
    value = _parsed(text)
    return isinstance(value, _Object) and len({name for name, _ in value}) == len(value)


_NO_JSON = object()
_HALF = re.compile("[\ud800-\udfff]")


def _parsed(text: str) -> object:
    try:
        value = json.loads(
            text,
            parse_int=_number,
            parse_float=_number,
            parse_constant=_refused,
            object_pairs_hook=_Object,
        )
    except (ValueError, RecursionError):
        return _NO_JSON
    may_have_halves = "\\u" in text
    level, depth = [value], 0
    while level:
        if may_have_halves and any(isinstance(e, str) and _HALF.search(e) for e in level):
            return _NO_JSON
        containers = [each for each in level if isinstance(each, list)]
        depth += bool(containers)
        if depth > MAX_JSON_DEPTH:
            return _NO_JSON
        level = [
            part
            for each in containers
            for item in each
            for part in (item if isinstance(each, _Object) else (item,))
        ]
    return value


def _number(digits: str) -> float:
    is_finite = len(digits) <= _MAX_NUMBER_CHARS and math.isfinite(float(digits))
    return 0.0 if is_finite else _refused(digits)


def _refused(what: str) -> float:
    raise ValueError(what[:20])
