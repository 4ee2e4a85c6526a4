"""The grammar of a forced tool call: invoke lines, parameters in the schema's order, closing lines.

`call_grammar` writes it in the library's language for tools and their schemas, and `CallConstraint`
walks it. A string without a bound of its own is raw text up to the next `</` and marker; all other
values are JSON of their sub-schema; an enum is its literal texts. A tool whose schema has no plain
object at its top keeps the first line alone, and the reason is told. A newcomer's mistake: reading
the marker in ids only; the output parser reads text, so the marker spelled in plain tokens would
end a value too, and the walker forbids it. Source: spec/multimodal-serving.md section B.5.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from finwhale.text.grammar import COMPACT_STYLE, GrammarConstraint, GrammarError, constraint_of
from finwhale.text.schema_limits import (
    SchemaError,
    as_json,
    check_schema,
    closed,
    small_enough,
    without_texts,
)
from finwhale.text.special_tokens import DSML
from finwhale.text.tokenizer import Tokenizer

_NOTES = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly"}
    | {"writeOnly", "nullable", "strict", "$comment", "$schema", "$id"}
)
_OBJECT_KEYS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"} | _NOTES
)
_OTHER_TYPES = ("object", "array", "number", "integer", "boolean", "null")
_MOST_RESOLVED = 16
# A literal with other controls is written as JSON, where they are escaped.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_MARKER = DSML.encode()
# Tools that are compiled one by one to find the one that the library refuses.
_MOST_ALONE = 32


class CalledTool(NamedTuple):
    """A tool that may be called, and the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


class CallGrammar(NamedTuple):
    """A grammar as text, whether it is plainly small, and the tools that it leaves loose.

    loose  (name, reason) of each tool whose arguments follow no grammar
    """

    text: str
    is_plain: bool
    loose: tuple[tuple[str, str], ...]


class _LooseError(ValueError):
    """A schema of arguments that no sequence of parameters expresses."""


def call_grammar(
    tools: Sequence[CalledTool],
    marker_id: int,
    *,
    parallel: bool,
    loose: Mapping[str, str] | None = None,
) -> CallGrammar:
    """Return the grammar of a calls block behind its opener, with one call or, parallel, more.

    marker_id  of the DSML marker
    loose      tools to leave loose, with the reason
    """
    left_out = dict(loose or {})
    rules = _Rules(marker_id)
    calls, loose_calls = [], []
    for number, tool in enumerate(tools):
        if tool.name not in left_out:
            try:
                calls.append(rules.call(f"t{number}", tool))
                continue
            except (_LooseError, SchemaError) as error:
                left_out[tool.name] = str(error)
        loose_calls.append(rules.loose(f"t{number}", tool.name))
    ways = []
    if calls:
        rules.add("call", " | ".join(calls))
        ways.append("call+ fin" if parallel else "call fin")
    if loose_calls:
        rules.add("loose", " | ".join(loose_calls))
        ways.append("call* loose" if calls and parallel else "loose")
    rules.add("fin", f'"</" d {_quoted(" calls>")}')
    text = "\n".join([f"start: {' | '.join(ways)}", *rules.lines, ""])
    return CallGrammar(text, rules.is_plain and small_enough(text), tuple(left_out.items()))


class _Rules:
    """The lines of a grammar as they are written."""

    def __init__(self, marker_id: int) -> None:
        self.lines = [
            f"d: <[{marker_id}]>",
            # The text takes its own closing bracket along, so that a longest match ends there.
            r"TEXT: /(?s:.*)<\//",
            "FREE: /(?s:.+)/",
        ]
        self.is_plain = True

    def add(self, name: str, body: str) -> str:
        self.lines.append(f"{name}: {body}")
        return name

    def loose(self, name: str, tool: str) -> str:
        """Add a call whose first line is fixed; what follows it is free to the end."""
        return self.add(name, f"{_invoke(tool)} (FREE | d)*")

    def call(self, name: str, tool: CalledTool) -> str:
        """Add a call whose parameters follow the schema."""
        kept = len(self.lines), self.is_plain
        try:
            return self._call(name, tool)
        except (_LooseError, SchemaError):
            del self.lines[kept[0] :]
            self.is_plain = kept[1]
            raise

    def _call(self, name: str, tool: CalledTool) -> str:
        text = as_json(tool.parameters)
        is_plain = check_schema(tool.parameters, text)
        root = closed(without_texts(tool.parameters))
        self.is_plain = is_plain and self.is_plain
        if DSML in text:
            raise _LooseError("the schema holds the marker of calls")
        properties, required = _object_of(root)
        end = f'"</" d {_quoted(" invoke>" + chr(10))}'
        # From place i on: with nothing written so far (n), and with something (s).
        last = len(properties)
        # A call without arguments has an empty line.
        self.add(f"{name}_n{last}", f"{_quoted(chr(10))} {end}")
        self.add(f"{name}_s{last}", end)
        for i, (key, schema) in reversed([*enumerate(properties.items())]):
            value = self.add(f"{name}_p{i}", self._parameter(key, schema, root, f"{name}_p{i}"))
            follow = f"{value} {name}_s{i + 1}"
            for state in "ns":
                skip = "" if key in required else f" | {name}_{state}{i + 1}"
                self.add(f"{name}_{state}{i}", follow + skip)
        return self.add(name, f"{_invoke(tool.name)} {name}_n0")

    def _parameter(self, key: str, schema: Any, root: Mapping[str, Any], name: str) -> str:
        if '"' in key or "\n" in key or _CONTROL.search(key):
            raise _LooseError(f"the parameter {key[:40]!r} has a name that the format cannot hold")
        ways, documents = [], []
        for form in _forms(schema, root, 0):
            if form is _TEXT:
                ways.append(f"{_quoted(_TRUE)} TEXT")
            elif isinstance(form, str):
                ways.append(_quoted(f"{_TRUE}{form}</"))
            else:
                documents.append(as_json(_document(form, root)))
        for i, document in enumerate(dict.fromkeys(documents)):
            value = self.add(f"{name}_j{i}", f"%json {document}")
            ways.append(f'{_quoted(_FALSE)} {value} "</"')
        if not ways:
            raise _LooseError(f"the parameter {key[:40]!r} has no possible value")
        begin = f'"<" d {_quoted(f" parameter name={chr(34)}{key}{chr(34)} ")}'
        ways = list(dict.fromkeys(ways))
        return f"{begin} ({' | '.join(ways)}) d {_quoted(' parameter>' + chr(10))}"


_TRUE, _FALSE = 'string="true">', 'string="false">'
_TEXT = object()


def _invoke(name: str) -> str:
    if not re.fullmatch(r"[\w.:-]+", name):
        raise GrammarError(f"tools: function name: got {name[:80]!r}, expected letters and digits")
    return f'"<" d {_quoted(f" invoke name={chr(34)}{name}{chr(34)}>{chr(10)}")}'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _object_of(root: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the properties of a schema of arguments in order, and the required names."""
    node = _resolved(root, root)
    odd = sorted(key for key in node.keys() - _OBJECT_KEYS if not key.startswith("x-"))
    if odd:
        raise _LooseError(f"the schema has {odd[0]} at its top")
    if node.get("type", "object") != "object":
        raise _LooseError(f"the schema has type {node.get('type')!r} at its top")
    properties, required = node.get("properties") or {}, node.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _LooseError("the schema has properties or required of another shape")
    undeclared = [name for name in required if isinstance(name, str) and name not in properties]
    if undeclared and node.get("additionalProperties") is False:
        raise _LooseError(f"{undeclared[0]!r} is required and not allowed")
    every = {**properties, **{name: {} for name in undeclared}}
    return every, {str(name) for name in required}


def _resolved(node: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a reference to a place of the same document leads to."""
    for _ in range(_MOST_RESOLVED):
        reference = node.get("$ref")
        siblings = node.keys() - _NOTES - {"$ref", "$defs", "definitions"}
        if not isinstance(reference, str) or siblings:
            return node
        found: Any = root
        for step in reference.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, dict) else None
        if not reference.startswith("#") or not isinstance(found, dict):
            raise _LooseError(f"the reference {reference[:80]!r} leads nowhere")
        node = found
    raise _LooseError("a reference leads to itself")


def _forms(schema: Any, root: Mapping[str, Any], level: int) -> list[Any]:
    """Return how a value may be written: _TEXT, a literal text, or a schema of JSON."""
    if schema is True or (isinstance(schema, dict) and not schema.keys() - _NOTES):
        return [_TEXT, {"type": list(_OTHER_TYPES)}]
    if not isinstance(schema, dict) or level > _MOST_RESOLVED:
        return [schema]
    node = _resolved(schema, root)
    keys = node.keys() - _NOTES
    kinds = node.get("type")
    if keys == {"anyOf"} and isinstance(node["anyOf"], list):
        return [form for each in node["anyOf"] for form in _forms(each, root, level + 1)]
    values = node.get("enum", [node["const"]] if "const" in node else None)
    if keys <= {"type", "enum"} or keys <= {"type", "const"}:
        if isinstance(values, list):
            return _literals(values, kinds)
        listed = kinds if isinstance(kinds, list) else [kinds]
        if "string" in listed:
            rest = [kind for kind in listed if kind != "string"]
            return [_TEXT, *([{"type": rest}] if rest else [])]
    return [node]


def _literals(values: Sequence[Any], kinds: Any) -> list[Any]:
    listed = kinds if isinstance(kinds, list) else [kinds]
    takes_text = kinds is None or "string" in listed
    texts = [v for v in values if isinstance(v, str) and takes_text]
    raw = [text for text in texts if not _CONTROL.search(text)]
    others = [v for v in values if not isinstance(v, str)] + [v for v in texts if v not in raw]
    kind = {} if kinds is None else {"type": kinds}
    return [*raw, *([{**kind, "enum": others}] if others else [])]


def _document(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that stands alone: references lead into a copy of the whole."""
    if schema is False or not isinstance(schema, dict):
        raise _LooseError("a parameter has no schema")
    if '"$ref"' not in as_json(schema):
        return {**schema, "x-guidance": COMPACT_STYLE}
    return {
        "$ref": "#/$defs/value",
        "$defs": {"value": _moved(schema), "root": _moved(root)},
        "x-guidance": COMPACT_STYLE,
    }


def _moved(node: Any) -> Any:
    """Return a copy in which references to the document's root lead to its definition `root`."""
    if isinstance(node, dict):
        return {
            key: f"#/$defs/root{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value)
            for key, value in node.items()
        }
    return [_moved(each) for each in node] if isinstance(node, list) else node


class CallConstraint:
    """A walk through a call grammar in which no plain token spells the marker."""

    def __init__(self, inner: GrammarConstraint, tokenizer: Tokenizer) -> None:
        """Walk with `inner`, which belongs to this object from now on."""
        self._inner, self._tokenizer = inner, tokenizer
        self._marker_id = tokenizer.marker_id(DSML)
        self._tail = b""

    def mask(self) -> Tensor:
        """Return [V] bool: the ids that may come next."""
        mask = self._inner.mask()
        for length, ids in _completions(self._tokenizer).items():
            if self._tail.endswith(_MARKER[:length]):
                mask[ids] = False
        return mask

    def advance(self, token: int) -> None:
        """Move past `token`; raise GrammarError, and stay in place, if it may not come next."""
        if not 0 <= token < self._inner.vocab_size or not self.mask()[token]:
            raise GrammarError(f"token: got id {token}, expected one that the mask allows")
        self._inner.advance(token)
        if token == self._marker_id:
            self._tail = b""
        else:
            self._tail = (self._tail + self._tokenizer.token_bytes(token))[-len(_MARKER) :]

    @property
    def is_finished(self) -> bool:
        """Whether only the end-of-sentence id may follow, or has followed."""
        return self._inner.is_finished

    def copy(self) -> CallConstraint:
        """Return an independent walker at the same place."""
        twin = CallConstraint(self._inner.copy(), self._tokenizer)
        twin._tail = self._tail
        return twin


@functools.lru_cache(maxsize=4)
def _completions(tokenizer: Tokenizer) -> dict[int, Tensor]:
    """Return {beginning of the marker in bytes: ids of plain tokens that complete its text}."""
    found: dict[int, list[int]] = {length: [] for length in range(len(_MARKER))}
    markers = set(tokenizer.markers.values())
    for token in range(tokenizer.vocab_size):
        if token in markers:
            continue
        text = tokenizer.token_bytes(token)
        if _MARKER in text:
            found[0].append(token)
        for length in range(1, len(_MARKER)):
            if text.startswith(_MARKER[length:]):
                found[length].append(token)
    return {length: torch.tensor(ids, dtype=torch.long) for length, ids in found.items() if ids}


def calls_constraint(
    tokenizer: Tokenizer,
    tools: Sequence[CalledTool],
    *,
    parallel: bool = True,
    vocab_size: int | None = None,
    owner: str = "",
    deadline_s: float | None = None,
) -> tuple[CallConstraint, tuple[tuple[str, str], ...]]:
    """Return the constraint to calls of `tools`, and (name, reason) of each that is left loose.

    The prompt ends with the opener of the calls block. Other arguments, and errors of a trial, are
    those of `finwhale.text.grammar.json_schema_constraint`.
    """

    def walker(grammar: CallGrammar) -> CallConstraint:
        inner = constraint_of(
            tokenizer,
            "lark",
            grammar.text,
            vocab_size=vocab_size,
            markers=(DSML,),
            owner=owner,
            is_plain=grammar.is_plain,
            deadline_s=deadline_s,
        )
        return CallConstraint(inner, tokenizer)

    marker_id = tokenizer.marker_id(DSML)
    grammar = call_grammar(tools, marker_id, parallel=parallel)
    try:
        return walker(grammar), grammar.loose
    except GrammarError as error:
        loose = {tool.name: str(error) for tool in tools} | dict(grammar.loose)
    if 1 < len(tools) <= _MOST_ALONE:
        # One schema that the library refuses does not loosen the others.
        for tool in tools:
            alone = call_grammar([tool], marker_id, parallel=False)
            if alone.loose:
                continue
            try:
                walker(alone)
            except GrammarError as error:
                loose[tool.name] = str(error)
            else:
                del loose[tool.name]
        grammar = call_grammar(tools, marker_id, parallel=parallel, loose=loose)
        try:
            return walker(grammar), grammar.loose
        except GrammarError as error:
            loose = {tool.name: str(error) for tool in tools}
    grammar = call_grammar(tools, marker_id, parallel=parallel, loose=loose)
    return walker(grammar), grammar.loose
