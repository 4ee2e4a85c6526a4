"""The output parser: every cut gives the same answer, calls survive a round trip, an oracle agrees.

The oracle is the stream parser of `deepseek-recipe`, an independent program; the places where
this parser is meant to differ have tests of their own with answers written by hand.
"""

from __future__ import annotations

import json
import re

import deepseek_recipe
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from finwhale.text.output_parser import (
    Delta,
    OutputParser,
    OutputParserError,
    TokenOutputParser,
    join_deltas,
    message_of,
)
from finwhale.text.prompt import encode_conversation, encode_prompt, render_reply
from finwhale.text.special_tokens import DSML, END_THINK, EOS
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import train_tokenizer

OPEN, CLOSE = f"<{DSML} calls>\n", f"</{DSML} calls>"
INVOKE, END_INVOKE = f'<{DSML} invoke name="f">\n', f"</{DSML} invoke>\n"
TEXT_P, JSON_Q = (
    f'<{DSML} parameter name="{name}" string="{is_text}">'
    for name, is_text in (("p", "true"), ("q", "false"))
)
END_PARAMETER = f"</{DSML} parameter>\n"
ONE_CALL = f"{OPEN}{INVOKE}{TEXT_P}v\n{END_PARAMETER}{END_INVOKE}{CLOSE}"
FRAGMENTS = [
    *(
        "\n",
        "\n\n",
        "a",
        "b c",
        "\u00e9",
        "\\",
        '"',
        "\x01",
        "{",
        "}",
        '{"a": 1}',
        "<",
        "</",
        "\uff5c",
    ),
    *(END_THINK, "<think>", "</thi", "STOP", "ST", "OP", "```json\n", "```", "\n```", "<\uff5cDS"),
    *(OPEN, CLOSE, INVOKE, END_INVOKE, TEXT_P, JSON_Q, END_PARAMETER, f"<{DSML}", ONE_CALL),
]
SETTINGS = st.fixed_dictionaries(
    {
        "thinking": st.booleans(),
        "tools_declared": st.booleans(),
        "stop": st.sampled_from([(), ("STOP",), ("OP", "a\n"), ("\nb", "</", "ST")]),
        "json_mode": st.booleans(),
        "starts_in_calls": st.sampled_from([False, False, False, True]),
    }
)


def parsed(pieces, *, reason: str = "stop", **fields) -> tuple[list[tuple], str | None]:
    """Return (kind, index, name or text) of the joined deltas, and the finish reason."""
    parser = OutputParser(**{"thinking": False, "tools_declared": True, **fields})
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.finish(reason)
    return summary(deltas), parser.finish_reason


def summary(deltas: list[Delta]) -> list[tuple]:
    """Return the joined deltas without the random ids of calls."""
    return [
        (delta.kind, delta.index, delta.name if delta.kind == "tool_call" else delta.text)
        for delta in join_deltas(deltas)
    ]


def oracle(text: str, *, thinking, tools_declared, stop, json_mode, starts_in_calls):
    """Return the same from the library's parser, one character at a time."""
    recipe = deepseek_recipe
    conversation = recipe.Conversation([recipe.UserMessage("x")], thinking_mode=thinking)
    request = recipe.ConversationRequest(conversation, recipe.ModelVersion.DeepseekV41Flash)
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "model")
    start = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    options = recipe.ParsingOptions(
        parse_tool_calls=tools_declared,
        starts_in_tool_calls=starts_in_calls,
        parse_json_output=json_mode,
        thinking_initial_stage=start,
        stop_sequences=list(stop),
    )
    processor = recipe.StreamProcessor(generator, options)
    events = processor.push(recipe.InferenceChunk.ready())
    for letter in text:
        if not processor.finished:
            events += processor.push(recipe.InferenceChunk.text(letter, 1))
    if not processor.finished:
        stop_reason = recipe.InferenceFinishReason.Stop
        events += processor.push(recipe.InferenceChunk.finish(stop_reason)) + processor.finish()
    deltas, reason = [], None
    for event in events:
        choice = json.loads(event.to_json())["choices"][0]
        reason = choice.get("finish_reason") or reason
        for kind, key in (("reasoning", "reasoning_content"), ("content", "content")):
            if choice["delta"].get(key):
                deltas.append(Delta(kind=kind, text=choice["delta"][key]))
        for call in choice["delta"].get("tool_calls") or ():
            if call.get("id"):
                name = call["function"]["name"]
                deltas.append(Delta(kind="tool_call", index=call["index"], name=name))
            if call["function"].get("arguments"):
                text = call["function"]["arguments"]
                deltas.append(Delta(kind="arguments", index=call["index"], text=text))
    return summary(deltas), reason


@st.composite
def cut_texts(draw) -> tuple[str, list[str]]:
    """A text of marker-like fragments and an arbitrary cut of it, empty pieces included."""
    text = "".join(draw(st.lists(st.sampled_from(FRAGMENTS), max_size=14)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    ends = [*cuts, len(text)]
    return text, [text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]


@given(case=cut_texts(), fields=SETTINGS, reason=st.sampled_from(["stop", "length"]))
def test_every_cut_gives_the_same_answer(case, fields, reason):
    text, pieces = case
    whole = parsed([text], reason=reason, **fields)
    assert parsed(pieces, reason=reason, **fields) == whole
    assert parsed(text, reason=reason, **fields) == whole


def test_a_parser_that_holds_nothing_back_would_fail_the_cut(monkeypatch):
    monkeypatch.setattr("finwhale.text.text_search.TextSearch.num_open", 0)
    text = f"r{END_THINK}a{ONE_CALL}"
    assert parsed(text, thinking=True) != parsed([text], thinking=True)


# The oracle forgets that newlines after a begun marker may be the end of the reasoning.
_NEWLINE_AFTER_BEGUN_MARKER = re.compile("(<|</|thi|DS)\n")


@settings(max_examples=80)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14), fields=SETTINGS)
@example(
    parts=["a", END_THINK, "b c", "\n\n", ONE_CALL, "a"],
    fields={
        "thinking": True,
        "tools_declared": True,
        "stop": (),
        "json_mode": False,
        "starts_in_calls": False,
    },
)
def test_answers_equal_the_oracles(parts, fields):
    # What is no call is content here, and dropped or half a call there.
    if fields["tools_declared"]:
        parts = [ONE_CALL if DSML in part else part for part in parts]
    if fields["starts_in_calls"]:
        parts = [ONE_CALL.removeprefix(OPEN), *parts]
    text = "".join(parts)
    assume(not _NEWLINE_AFTER_BEGUN_MARKER.search(text))
    # Inside JSON the oracle takes calls for JSON.
    assume(not (fields["tools_declared"] and fields["json_mode"] and DSML in text))
    assert parsed(text, **fields) == oracle(text, **fields)


ARGUMENT_NAMES = st.text(min_size=1, max_size=6).filter(lambda t: '"' not in t and DSML not in t)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.from_regex(r"[A-Za-z0-9_:-]{1,12}", fullmatch=True),
        st.dictionaries(ARGUMENT_NAMES, VALUES, max_size=4),
    ),
    max_size=3,
)
PROSE = st.text(max_size=12).map(lambda t: t.strip("\n")).filter(lambda t: "<" not in t)


@settings(max_examples=50)
@given(calls=CALLS, reasoning=PROSE, content=PROSE, size=st.integers(1, 9), thinking=st.booleans())
@example([("f", {"my key": " x\n", "n": -0.5, "e": {}})], "r", "c\n\nd", 1, True)
@example([("f", {}), ("f", {})], "", "", 3, True)
def test_parsing_a_rendered_reply_gives_it_back(calls, reasoning, content, size, thinking):
    assume(f"</{DSML}" not in json.dumps([c[1] for c in calls], ensure_ascii=False))
    turn = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    turn["tool_calls"] = [
        {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in calls
    ]
    segments = render_reply(turn, thinking=thinking)
    text = "".join(segment.text for segment in segments).removesuffix(EOS)
    parser = OutputParser(thinking=thinking, tools_declared=True)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    message = message_of(deltas)
    assert message["content"] == content
    assert message.get("reasoning_content", "") == (reasoning if thinking else "")
    found = message.get("tool_calls", [])
    names = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found]
    assert names == calls
    assert parser.finish_reason == ("tool_calls" if calls else "stop")
    for index, call in enumerate(found):
        assert re.fullmatch(rf"call_{index:02d}_[A-Za-z0-9]{{20,}}", call["id"])


REASONING_CASES = [
    # text, answer
    (f"\n\nr\n\n{END_THINK}\n\nans\n", [("reasoning", None, "r"), ("content", None, "ans\n")]),
    ("only", [("reasoning", None, "only")]),
    ("", []),
    ("\n\n", []),
    ("r\n", [("reasoning", None, "r\n")]),
    (f"r\na\n{END_THINK}", [("reasoning", None, "r\na")]),
    (f"{END_THINK}x{END_THINK}y", [("content", None, "xy")]),
    ("r</thi", [("reasoning", None, "r</thi")]),
    (f"<think>r{END_THINK}a", [("reasoning", None, "<think>r"), ("content", None, "a")]),
]


@pytest.mark.parametrize(("text", "answer"), REASONING_CASES)
def test_reasoning_ends_at_its_marker_and_sheds_newlines(text, answer):
    assert parsed(text, thinking=True) == (answer, "stop")


CALL = [("tool_call", 0, "f"), ("arguments", 0, '{"p": "v\\n"}')]


def test_calls_end_the_reasoning_and_the_newlines_before_them():
    calls = f"\n\n{ONE_CALL}"
    assert parsed(f"r{calls}", thinking=True) == ([("reasoning", None, "r"), *CALL], "tool_calls")
    assert parsed(f"c{calls} tail\n{ONE_CALL}") == ([("content", None, "c"), *CALL], "tool_calls")
    assert parsed(calls, tools_declared=False) == ([("content", None, ONE_CALL)], "stop")


def test_calls_without_the_released_blank_or_block_are_still_calls():
    older = ONE_CALL.replace(f"{DSML} ", DSML).replace("calls>", "tool_calls>")
    assert parsed(older) == (CALL, "tool_calls")
    bare = ONE_CALL.removeprefix(OPEN).removesuffix(CLOSE)
    assert parsed(f"\n{bare}") == (CALL, "tool_calls")
    assert parsed(bare, starts_in_calls=True) == (CALL, "tool_calls")


def test_a_quoted_marker_that_opens_no_block_is_content():
    # The oracle drops all text after it.
    text = f"write <{DSML} and\n\n<{DSML}> or `{DSML}`"
    assert parsed(text) == ([("content", None, text)], "stop")


def test_a_call_after_json_is_a_call():
    text = '{"a": 1}\n\n' + ONE_CALL
    assert parsed(text, json_mode=True) == ([("content", None, '{"a": 1}'), *CALL], "tool_calls")


@pytest.mark.parametrize(
    ("text", "said", "name"),
    [
        (f"<{DSML} cal", "", None),
        (OPEN, "", None),
        (f'{OPEN}<{DSML} invoke name="f', "", None),
        (f"{OPEN}{INVOKE}", "", "f"),
        (f"{OPEN}{INVOKE}<{DSML} parameter name=", "", "f"),
        (f"{OPEN}{INVOKE}{TEXT_P}Paris</{DSML[:4]}", "Paris\n", "f"),
        (f"{OPEN}{INVOKE}{TEXT_P}Paris</{DSML} parame", "Paris\n", "f"),
        (f"{OPEN}{INVOKE}{JSON_Q}[1, 2", "[1, 2\n", "f"),
        (f"{OPEN}{INVOKE}{JSON_Q}1{END_PARAMETER}</{DSML}", "1\n", "f"),
    ],
)
@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_a_call_cut_off_is_no_call_and_says_so(text, said, name, reason):
    what = "a call" if name is None else f'the call of "{name}"'
    line = f"[unreadable tool call: {what} was cut off]"
    assert parsed(f"c\n\n{text}", reason=reason) == (
        [("content", None, f"c\n{said}{line}")],
        reason,
    )
    # A call before it stays one; the reason is still the limit's.
    second = ONE_CALL.removesuffix(CLOSE) + text
    answer, finish = parsed(second, reason=reason)
    assert (answer[:2], finish) == (CALL, reason)
    # An opener once more, in a block that has a call, begins no other.
    assert answer[2:] == ([] if text == OPEN else [("content", None, f"{said}{line}")])


def test_a_call_comes_when_its_invoke_has_ended_and_not_before():
    parser = OutputParser(thinking=False, tools_declared=True)
    text = ONE_CALL.partition(f"</{DSML} invoke")[0] + f"</{DSML} invoke"
    assert [delta for letter in text for delta in parser.feed(letter)] == []
    call, arguments = parser.feed(">")
    assert (call.kind, call.name, call.text) == ("tool_call", "f", "")
    assert (arguments.kind, json.loads(arguments.text)) == ("arguments", {"p": "v\n"})


def test_the_last_allowed_call_completes_the_answer():
    invoke = ONE_CALL.removeprefix(OPEN).removesuffix(CLOSE)
    text = f"c{OPEN}{invoke}{invoke}{CLOSE}tail"
    for pieces in ([text], text):
        assert parsed(pieces, max_calls=1) == ([("content", None, "c"), *CALL], "tool_calls")
        both = [*CALL, *((kind, 1, what) for kind, _, what in CALL)]
        assert parsed(pieces)[0][1:] == both
        assert parsed(pieces, max_calls=2)[0][1:] == both
    parser = OutputParser(thinking=False, tools_declared=True, max_calls=1)
    parser.feed(text.partition(f"</{DSML} invoke")[0])
    assert not parser.is_complete
    parser.feed(f"</{DSML} invoke>")
    assert parser.is_complete
    assert not parser.is_stopped
    with pytest.raises(OutputParserError, match="max_calls: got 0"):
        OutputParser(thinking=False, tools_declared=True, max_calls=0)


@pytest.mark.parametrize(
    ("text", "stop", "content", "is_stopped"),
    [
        ("ab STOP cd", ("STOP",), "ab ", True),
        ("ab STO", ("STOP",), "ab STO", False),
        ("abcdX", ("abcde", "bc"), "a", True),
        ("aaab", ("aab",), "a", True),
        ("a\n\nb", ("\n\n",), "a", True),
        # Newlines that are no part of the answer stop nothing.
        ("\n\na", ("\n\n",), "a", False),
        (f"ST{END_THINK}OP", ("STOP",), "STOP", False),
    ],
)
def test_a_stop_text_ends_the_answer(text, stop, content, is_stopped):
    parser = OutputParser(thinking=False, tools_declared=True, stop=stop)
    deltas = [delta for letter in text for delta in parser.feed(letter)]
    assert parser.is_stopped == is_stopped == parser.is_complete
    deltas += parser.feed("") + parser.finish()
    assert message_of(deltas)["content"] == content
    assert parser.finish_reason == "stop"


def test_a_stop_text_matches_neither_reasoning_nor_calls():
    text = f"STOP{END_THINK}a{OPEN}{INVOKE}{TEXT_P}STOP{END_PARAMETER}{END_INVOKE}"
    answer, reason = parsed(text, thinking=True, stop=("STOP",))
    assert [piece[2] for piece in answer] == ["STOP", "a", "f", '{"p": "STOP"}']
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    ("stop", "got"),
    [
        ("STOP", "one text"),
        (("",), "a text of 0 characters"),
        (("a", ""), "a text of 0 characters"),
        (tuple("abcdefghijklmnopq"), "17 texts"),
        (("a", "b" * 4097), "a text of 4097 characters"),
        (("b" * 10**7,), "a text of 10000000 characters"),
    ],
)
def test_wrong_stop_texts_are_refused_in_a_few_words(stop, got):
    want = f"stop: got {got}, expected at most 16 texts of 1 to 4096 characters"
    with pytest.raises(OutputParserError) as caught:
        OutputParser(thinking=False, tools_declared=False, stop=stop)
    assert str(caught.value) == want
    OutputParser(thinking=False, tools_declared=False, stop=tuple("abcdefghijklmnop"))
    OutputParser(thinking=False, tools_declared=False, stop=("b" * 4096,))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1]}',
        'Here: {"a": [1]}',
        '```json\n{"a": [1]}\n``` done {',
        '\n\n```\n{"a": [1]}\n```',
    ],
)
def test_json_mode_leaves_the_value_alone(text):
    answer, _ = parsed(text, json_mode=True)
    assert json.loads(answer[0][2]) == {"a": [1]}
    if text[0] != "{":
        with pytest.raises(json.JSONDecodeError):
            json.loads(parsed(text)[0][0][2])


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    texts = ("the cat sat on the mat, and the other cat did not\n" * 3,)
    return Tokenizer.from_file(
        train_tokenizer(texts, 300, tmp_path_factory.mktemp("parser") / "tokenizer.json")
    )


@settings(max_examples=30)
@given(content=PROSE, size=st.integers(1, 5))
@example("\U0001f40b \u00e9\u4e2d", 1)
def test_ids_of_a_taught_turn_parse_to_the_turn(small, content, size):
    arguments = json.dumps({"p": content, "q": [content]})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": content, "reasoning_content": "so\nit is"}
    messages = [{"role": "user", "content": "x"}, {**turn, "tool_calls": [call]}]
    ids, is_target = encode_conversation(small, messages)
    said = [token for token, target in zip(ids, is_target, strict=True) if target]
    assert len(ids) - len(said) == len(encode_prompt(small, messages[:1]))
    parser = TokenOutputParser(small, OutputParser(thinking=True, tools_declared=True))
    # What a batch generates after EOS is no part of the turn.
    said += small.encode("after")
    pieces = [said[i : i + size] for i in range(0, len(said), size)]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    message = message_of(deltas)
    assert message["content"] == content
    assert message["reasoning_content"] == "so\nit is"
    function = message["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == json.loads(arguments)
    assert parser.num_reasoning_tokens == len(small.encode("so\nit is"))


def test_markers_typed_in_plain_tokens_are_read_as_the_markers(small):
    # The rule of the released parser, which sees text; the prompt side is the strict one.
    plain = small.encode(f"r{END_THINK}a")
    assert small.marker_id(END_THINK) not in plain
    parser = TokenOutputParser(small, OutputParser(thinking=True, tools_declared=False))
    message = message_of([*parser.feed(plain), *parser.finish()])
    assert (message["reasoning_content"], message["content"]) == ("r", "a")


@pytest.mark.parametrize(("reason", "end"), [("length", ""), ("stop", "\ufffd")])
def test_a_character_that_a_limit_cuts_is_left_out(small, reason, end):
    whale = small.encode("a<\U0001f40b")
    parser = TokenOutputParser(small, OutputParser(thinking=False, tools_declared=True))
    deltas = [*parser.feed(whale[:-1]), *parser.finish(reason)]
    # Bytes that the model itself ended are no character, as they are none inside a text.
    assert message_of(deltas)["content"] == f"a<{end}"
    assert parser.parser.finish_reason == reason


def test_typed_end_of_sentence_is_text_and_its_id_is_not(small):
    typed = small.encode(f"a{EOS}b")
    parser = TokenOutputParser(small, OutputParser(thinking=False, tools_declared=False))
    assert message_of([*parser.feed(typed), *parser.finish()])["content"] == f"a{EOS}b"
    parser = TokenOutputParser(small, OutputParser(thinking=False, tools_declared=False))
    ids = [*small.encode("a"), small.eos_id, *small.encode("b")]
    assert message_of([*parser.feed(ids), *parser.finish()])["content"] == "a"
