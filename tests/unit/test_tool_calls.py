"""Whatever a model writes: arguments are a JSON object, and no answer is empty or has markup in it.

What is read and what is refused is written down by hand, from the rules of the spec (B.5, B.6) and
RFC 8259; the laws run over texts made of markup, whole, misspelt and broken.
"""

from __future__ import annotations

import json
import re

import jiter
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finwhale.text.output_parser import OutputParser, join_deltas, message_of
from finwhale.text.special_tokens import DSML, END_THINK
from finwhale.text.text_search import TextSearch

OPEN, CLOSE = f"<{DSML} calls>\n", f"</{DSML} calls>"
INVOKE, END_INVOKE = f'<{DSML} invoke name="f">\n', f"</{DSML} invoke>\n"
TEXT_P = f'<{DSML} parameter name="p" string="true">'
JSON_Q = f'<{DSML} parameter name="q" string="false">'
END_P = f"</{DSML} parameter>"


def reply(text, *, reason="stop", size=None, **fields):
    """Joined deltas without ids, and the finish reason; `size` letters at a time."""
    parser = OutputParser(**{"thinking": False, "tools_declared": True, **fields})
    step = size or len(text) or 1
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas = join_deltas([*deltas, *parser.finish(reason)])
    return [(d.kind, d.index, d.name or d.text) for d in deltas], parser.finish_reason


def arguments_of(body, name="f"):
    """The arguments text of the one call that an invoke with `body` makes."""
    deltas, finish = reply(f"{OPEN}{INVOKE}{body}{END_INVOKE}{CLOSE}")
    (call, (kind, index, arguments)) = deltas
    assert (call, kind, index, finish) == (("tool_call", 0, name), "arguments", 0, "tool_calls")
    return arguments


@pytest.mark.parametrize(
    ("body", "value"),
    [
        # cases2.md 148
        ("three", "three"),
        ("True", "True"),
        ("", ""),
        # RFC 8259 section 6 has no such numbers.
        ("NaN", "NaN"),
        ("[1, -Infinity]", "[1, -Infinity]"),
        ("01", "01"),
        # Section 6: beyond a double nobody promises anything, and section 8.2: half a pair.
        ("1e999", "1e999"),
        ("9" * 400, "9" * 400),
        ('"\\ud83d"', '"\\ud83d"'),
        ('{"\\udc00": 1}', '{"\\udc00": 1}'),
        ('"a\nb"', '"a\nb"'),
        ("{'a': 1}", "{'a': 1}"),
        ('"cut', '"cut'),
        ("1 2", "1 2"),
        ("[" * 101 + "]" * 101, "[" * 101 + "]" * 101),
        ("[" * 90_000, "[" * 90_000),
        # And these are JSON.
        ("3", 3),
        (" -2.5e3\n", -2500.0),
        ("null", None),
        ('{"a": {"b": [true]}}', {"a": {"b": [True]}}),
        ('"\\ud83d\\ude00 </parameter>"', "\U0001f600 </parameter>"),
        ("[" * 99 + '["x"]' + "]" * 99, json.loads("[" * 99 + '["x"]' + "]" * 99)),
        # Names may repeat inside a value; parsers take the last.
        ('{"a": 1, "a": 2}', {"a": 2}),
    ],
)
def test_a_typed_value_is_json_or_the_string_of_its_text(body, value):
    arguments = arguments_of(f"{JSON_Q}{body}{END_P}\n")
    assert json.loads(arguments) == {"q": value}
    # The parser inside both official clients.
    assert jiter.from_json(arguments.encode()) == {"q": value}
    if not isinstance(value, str):
        assert body in arguments


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n v\n",
        'a\x00\u2028"\\\t\U0001f600',
        "x </parameter> y",
        "<parameter>",
        "</\uff5cDSML",
        "</",
    ],
)
def test_a_closed_text_value_is_kept_as_it_is(text):
    assert json.loads(arguments_of(f"{TEXT_P}{text}{END_P}\n")) == {"p": text}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        # cases2.md 149: another order, single quotes, blanks, the slash behind the marker.
        (f'<{DSML} parameter string="false" name="q">3{END_P}', {"q": 3}),
        (f"<{DSML} parameter name='q' string='true'>3{END_P}", {"q": "3"}),
        (f'<{DSML}parameter  name = "q"\nstring="false" >3</{DSML} parameter >', {"q": 3}),
        (f"{JSON_Q}3<{DSML}/parameter>{TEXT_P}v</{DSML} /parameter>", {"q": 3, "p": "v"}),
        # No `string`: JSON where it is JSON. And the report's own shape, without a marker.
        (f'<{DSML} parameter name="q">true{END_P}', {"q": True}),
        (f'<{DSML} parameter name="q">yes{END_P}', {"q": "yes"}),
        (f'<parameter name="enabled">true{END_P}', {"enabled": True}),
        (f'<parameter name="p" string="true">true{END_P}\n{JSON_Q}1{END_P}', {"p": "true", "q": 1}),
        # A JSON object as the body.
        ('{"city": "Oslo", "n": [1]}\n', {"city": "Oslo", "n": [1]}),
        ("\n {} ", {}),
        ("\n\n", {}),
        # cases2.md 150: a value ends where markup begins.
        (f"{JSON_Q}true</parameter>\n{TEXT_P}v{END_P}", {"q": True, "p": "v"}),
        (f"{TEXT_P}v</param>\n{JSON_Q}3{END_P}", {"p": "v", "q": 3}),
        (f"{TEXT_P}v</|DSML| parameter>\n{JSON_Q}3{END_P}", {"p": "v", "q": 3}),
        (f"{TEXT_P}v\n{JSON_Q}3\n", {"p": "v", "q": 3}),
        (f"{TEXT_P}<b>v</b>\n", {"p": "<b>v</b>"}),
        (f"{JSON_Q}3</{DSML} parameter\n{TEXT_P}v{END_P}", {"q": 3, "p": "v"}),
        # Names hold anything but their quote.
        (f"""<{DSML} parameter name="a > 'b" string="false">1{END_P}""", {"a > 'b": 1}),
    ],
)
def test_what_can_only_mean_one_call_is_that_call(body, arguments):
    assert json.loads(arguments_of(body)) == arguments


@pytest.mark.parametrize(
    "opener",
    [
        f"<{DSML}tool_calls>\n{INVOKE}",
        f"<{DSML} calls\n{INVOKE}",
        f"{OPEN}<{DSML} invoke name='f'>",
        f'{OPEN}<{DSML} invoke name="f" >\n',
        INVOKE,
    ],
)
def test_openers_that_can_only_mean_a_call_begin_one(opener):
    answer = reply(f"{opener}{TEXT_P}v{END_P}\n{END_INVOKE}{CLOSE}")
    want = [("tool_call", 0, "f"), ("arguments", 0, '{"p": "v"}')]
    assert answer == (want, "tool_calls")


NO_BODY = 'the body of the invoke of "f" is neither parameters nor a JSON object'
NO_NAME = 'the invoke has no name="..."'
MORE = "the invoke has attributes beside its name"
OTHER = 'a parameter has other attributes than name="..." and string="..."'
KIND = 'string="..." is neither true nor false'
ALONE = "a closing tag stands alone"
TWICE = 'the parameter "p" comes twice'
PLAIN = '<parameter name="p">v</parameter>'
BROKEN = [
    # cases2.md 78: no invoke, nothing, prose, JSON, a name cut off, stray tags.
    (f"{OPEN}{CLOSE}", "", "the block has no invoke"),
    (f"{OPEN}I call f.\n{CLOSE}", "I call f.", "text stands outside an invoke"),
    (f'{OPEN}{{"name": "f"}}\n{CLOSE}', '{"name": "f"}', "text stands outside an invoke"),
    (f'{OPEN}<{DSML} invoke name="f\n{CLOSE}', "", "a tag does not end"),
    (f"{OPEN}{TEXT_P}v{END_P}{CLOSE}", "v", "a parameter stands outside an invoke"),
    (f"{OPEN}{END_INVOKE}{CLOSE}", "", ALONE),
    (f"{OPEN}{END_P}{CLOSE}", "", ALONE),
    (f"{END_P}\n{END_INVOKE}{CLOSE}", "", ALONE),
    (f"<{DSML} /invoke>", "", ALONE),
    # cases2.md 149.
    (f"{OPEN}<{DSML} invoke>{TEXT_P}v{END_P}{END_INVOKE}{CLOSE}", "v", NO_NAME),
    (f'{OPEN}<{DSML} invoke name="">{END_INVOKE}{CLOSE}', "", NO_NAME),
    (f'{OPEN}<{DSML} invoke name="f" x="y">{END_INVOKE}{CLOSE}', "", MORE),
    (f"{OPEN}{INVOKE}f(1)\n{END_INVOKE}{CLOSE}", "f(1)", NO_BODY),
    (f"{OPEN}{INVOKE}[1]\n{END_INVOKE}{CLOSE}", "[1]", NO_BODY),
    (f'{OPEN}{INVOKE}{{"a": 1, "a": 2}}{END_INVOKE}{CLOSE}', '{"a": 1, "a": 2}', NO_BODY),
    (f'{OPEN}{INVOKE}{{"a": NaN}}{END_INVOKE}{CLOSE}', '{"a": NaN}', NO_BODY),
    (f"{OPEN}{INVOKE}{{}}{TEXT_P}v{END_P}{END_INVOKE}{CLOSE}", "{}\nv", NO_BODY),
    (f"{OPEN}{INVOKE}{PLAIN}{END_INVOKE}{CLOSE}", PLAIN, NO_BODY),
    (f"{OPEN}{INVOKE}{TEXT_P}v{END_P}{TEXT_P}w{END_P}{END_INVOKE}{CLOSE}", "v\nw", TWICE),
    (f"{OPEN}{INVOKE}<{DSML} parameter>v{END_P}{END_INVOKE}{CLOSE}", "v", OTHER),
    (f'{OPEN}{INVOKE}<{DSML} parameter name="p" string="no">v{END_P}{END_INVOKE}', "v", KIND),
    (f"{OPEN}{INVOKE}{TEXT_P}v<{DSML} b>w{END_P}{END_INVOKE}{CLOSE}", "v\nw", "unknown markup"),
    (f"{OPEN}{INVOKE}{TEXT_P}a {DSML} b{END_P}{END_INVOKE}{CLOSE}", "a \n b", "a tag does not end"),
    (f"{OPEN}{INVOKE}{TEXT_P}v{END_P}{END_P}{END_INVOKE}{CLOSE}", "v", ALONE),
    (f"{OPEN}{INVOKE}{TEXT_P}v{END_P}{CLOSE}", "v", 'the invoke of "f" does not end'),
    (f"{OPEN}{INVOKE}{TEXT_P}v", "v", 'the invoke of "f" does not end'),
    (f'{OPEN}<{DSML} invoke name="f', "", "a tag does not end"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said", "reason"), BROKEN)
@pytest.mark.parametrize("thinking", [False, True])
def test_what_is_no_call_is_content_with_one_reason(text, said, reason, thinking):
    want = (f"{said}\n" if said else "") + f"[unreadable tool call: {reason}]"
    before = f"r{END_THINK}" if thinking else ""
    for content in ("", "c"):
        answer = reply(f"{before}{content}\n\n{text}", thinking=thinking)
        reasoning = [("reasoning", None, "r")] if thinking else []
        whole = f"{content}\n{want}" if content else want
        assert answer == ([*reasoning, ("content", None, whole)], "stop")


def test_a_broken_call_leaves_its_neighbours_whole():
    invoke = f"{INVOKE}{TEXT_P}v{END_P}\n{END_INVOKE}"
    broken = f"{INVOKE}nonsense\n{END_INVOKE}"
    answer, finish = reply(f"{OPEN}{invoke}{broken}{invoke}{CLOSE}")
    calls = [[("tool_call", i, "f"), ("arguments", i, '{"p": "v"}')] for i in (0, 1)]
    assert answer[:4] == [*calls[0], *calls[1]]
    assert answer[4][2].startswith("nonsense\n[unreadable tool call: the body of")
    assert (len(answer), finish) == (5, "tool_calls")
    # One that does not end, and the next.
    answer, finish = reply(f"{OPEN}{INVOKE}{TEXT_P}w{END_P}{invoke}{CLOSE}")
    line = '[unreadable tool call: the invoke of "f" does not end]'
    assert answer == ([*calls[0], ("content", None, f"w\n{line}")])


def test_text_behind_a_block_without_calls_is_content_and_may_hold_a_block_again():
    empty = f"{OPEN}{CLOSE}"
    line = "[unreadable tool call: the block has no invoke]"
    assert reply(f"a{empty}b\nc") == ([("content", None, f"a\n{line}\nb\nc")], "stop")
    assert reply(f"a{empty}STOPb", stop=("STOP",)) == ([("content", None, f"a\n{line}")], "stop")
    # The same reason is said once.
    assert reply(f"{empty}b{empty}c") == ([("content", None, f"{line}\nb\nc")], "stop")
    call = f"{OPEN}{INVOKE}{END_INVOKE}{CLOSE}"
    answer, finish = reply(f"{empty}b{call}dropped")
    assert answer[0] == ("content", None, f"{line}\nb")
    assert (answer[1:], finish) == ([("tool_call", 0, "f"), ("arguments", 0, "{}")], "tool_calls")


def test_text_in_a_stray_tag_that_does_not_end_is_kept():
    answer, _ = reply(f"</{DSML} invoke and so on\n</{DSML} invoke>")
    lines = [
        " and so on",
        "[unreadable tool call: a tag does not end]",
        "[unreadable tool call: a closing tag stands alone]",
    ]
    assert answer == [("content", None, "\n".join(lines))]


def test_a_stray_tag_inside_the_reasoning_does_not_end_it():
    answer, _ = reply(f"a{END_P}b{END_THINK}c", thinking=True)
    line = "[unreadable tool call: a closing tag stands alone]"
    assert answer == [("reasoning", None, f"a\n{line}\nb"), ("content", None, "c")]


FRAGMENTS = [
    *("\n", "a", "b c", '"', "'", ">", "<", "</", "/", "{", "}", '{"a": 1}', "NaN", "3", "STOP"),
    *(DSML, DSML[:3], f"<{DSML}", f"</{DSML}", f"<{DSML} ", " calls>", " invoke", "</parameter>"),
    *(OPEN, CLOSE, f"<{DSML} calls", f"<{DSML}tool_calls>", f"</{DSML} calls", END_THINK),
    *(INVOKE, END_INVOKE, f"<{DSML} invoke name='g' >", f"<{DSML} invoke>", f"</{DSML}invoke"),
    *(TEXT_P, JSON_Q, END_P, f'<{DSML} parameter name="r">', '<parameter name="s">'),
    f"<{DSML}/parameter>",
    f"{INVOKE}{JSON_Q}three{END_P}\n{END_INVOKE}",
    f"{OPEN}{INVOKE}{TEXT_P}v{END_P}\n{JSON_Q}[1]{END_P}\n{END_INVOKE}{CLOSE}",
]  # fmt: skip
SETTINGS = st.fixed_dictionaries(
    {
        "thinking": st.booleans(),
        "stop": st.sampled_from([(), ("STOP",), ("a\n", "3")]),
        "json_mode": st.sampled_from([False, False, True]),
        "starts_in_calls": st.sampled_from([False, False, True]),
        "max_calls": st.sampled_from([None, 1]),
    }
)
# Markup as the prompt has it; the marker with anything else behind it is a word like others.
MARKUP = re.compile(rf"</?{DSML}\s?/?(?:tool_calls|calls|invoke|parameter)")
TAGS = re.compile(rf"</?{DSML}[^<>]*>?|{END_THINK}|</?|\s")


@settings(max_examples=300)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    fields=SETTINGS,
    reason=st.sampled_from(["stop", "length", "cancelled"]),
    size=st.integers(1, 9),
)
@example([OPEN, INVOKE, JSON_Q, "3", END_P, f"</{DSML}invoke", CLOSE], {}, "stop", 1)
@example([f"</{DSML}invoke", "a", OPEN, "a"], {"thinking": True}, "length", 2)
def test_any_text_at_any_cut_is_calls_with_arguments_or_content(parts, fields, reason, size):
    text = "".join(parts)
    deltas, finish = reply(text, reason=reason, **fields)
    assert reply(text, reason=reason, size=size, **fields) == (deltas, finish)
    calls = [name for kind, _, name in deltas if kind == "tool_call"]
    bodies = [what for kind, _, what in deltas if kind == "arguments"]
    assert len(calls) == len(bodies) <= (fields.get("max_calls") or 99)
    assert all(calls)
    assert all(isinstance(jiter.from_json(body.encode()), dict) for body in bodies)
    assert finish == ("tool_calls" if calls and reason == "stop" else reason)
    said = [what for kind, _, what in deltas if kind in ("reasoning", "content")]
    assert not any(DSML in what for what in [*calls, *bodies])
    assert not any(MARKUP.search(what) for what in said)
    has_stop = any(stop in text for stop in fields.get("stop", ()))
    if TAGS.sub("", text) and not has_stop:
        assert calls or any(said)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_call_cut_anywhere_is_whole_or_none(reason):
    text = f"{OPEN}{INVOKE}{TEXT_P}v{END_P}\n{JSON_Q}[1]{END_P}\n{END_INVOKE}{CLOSE}"
    end = text.index(END_INVOKE) + len(END_INVOKE.strip())
    calls = [("tool_call", 0, "f"), ("arguments", 0, '{"p": "v", "q": [1]}')]
    for cut in range(len(f"<{DSML}") + 1, len(text) + 1):
        deltas, finish = reply(text[:cut], reason=reason)
        assert finish == ("tool_calls" if cut >= end and reason == "stop" else reason)
        if cut >= end:
            assert deltas == calls
            continue
        ((kind, _, said),) = deltas
        *texts, line = said.splitlines()
        assert (kind, set(texts) <= {"v", "[1]", "[1", "["}) == ("content", True)
        assert ("was cut off]" in line) == (reason == "length")


def test_work_is_linear_in_the_length_of_a_value(monkeypatch):
    num_read = 0
    feed = TextSearch.feed

    def counted(self, piece):
        nonlocal num_read
        num_read += len(piece)
        return feed(self, piece)

    monkeypatch.setattr(TextSearch, "feed", counted)

    def work(num):
        nonlocal num_read
        num_read = 0
        text = f"{OPEN}{INVOKE}{TEXT_P}{'ab<' * num}{END_P}\n{END_INVOKE}{CLOSE}"
        deltas, _ = reply(text, size=3)
        assert json.loads(deltas[1][2]) == {"p": "ab<" * num}
        return num_read

    small, large = work(1000), work(8000)
    # A value of n characters is looked at once; a re-scan for each piece would be 64 times more.
    assert large < 9 * small
    assert large < 2 * 3 * 8000


def test_the_message_of_many_pieces_is_their_text():
    parser = OutputParser(thinking=True, tools_declared=True)
    text = "r" * 5000 + END_THINK + "c" * 5000
    deltas = [delta for letter in text for delta in parser.feed(letter)]
    message = message_of([*deltas, *parser.finish()])
    assert (message["reasoning_content"], message["content"]) == ("r" * 5000, "c" * 5000)
