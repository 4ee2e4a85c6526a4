"""Laws of the supervised conversations: purity, sides, answers against slow readers, grading."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from finwhale.conversations.problems import ChatTaskError, is_held_out
from finwhale.conversations.shards import (
    default_weights,
    read_chat_shards,
    write_chat_shards,
)
from finwhale.conversations.tasks import (
    CHAT_TASKS,
    HELD_OUT_SEED,
    ChatExample,
    assistant_places,
    calculate,
    chat_checks,
    chat_example,
    reply_checks,
    run_tool,
)
from finwhale.data.shards import ShardError
from finwhale.text.prompt import encode_conversation, encode_prompt
from finwhale.text.special_tokens import CHAT_MARKERS, DSML, END_THINK, EOS
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import train_tokenizer

# reasoning-gym brings a package that is compiled on installation, so `make test` leaves it out:
#     pip install -e ".[text,conversations,chat,test]"
#     pytest -m oracle_env tests/unit/test_chat_tasks.py
pytestmark = pytest.mark.oracle_env

PASSAGES = tuple(
    f"Sentence {i} of chapter {j} is about grain {i * 7 + j}. It ends with mark {j * 31 + i}."
    for j in range(20)
    for i in range(20)
)
KINDS = tuple(CHAT_TASKS)
SHORT = tuple(kind for kind in KINDS if not kind.startswith("long_"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    texts = ["the value of a key is a number and a text says so " * 3, " ".join(PASSAGES[:40])]
    return Tokenizer.from_file(train_tokenizer(texts, 400, path))


def _first_user(example: ChatExample) -> str:
    return next(m["content"] for m in example.messages if m["role"] == "user")


def _last_user(example: ChatExample) -> str:
    return [m["content"] for m in example.messages if m["role"] == "user"][-1]


def _examples(kind: str, count: int, seed: int = 0, **options) -> list[ChatExample]:
    return [chat_example(kind, seed=seed, index=index, **options) for index in range(count)]


# --- conversations ---


@pytest.mark.parametrize("kind", KINDS)
def test_example_is_a_function_of_its_arguments(kind):
    options = {"seed": 3, "index": 5, "passages": PASSAGES}
    assert chat_example(kind, **options) == chat_example(kind, **options)
    others = {json.dumps(e.messages) for e in _examples(kind, 6, passages=PASSAGES)}
    assert len(others) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_messages_follow_the_protocol(kind):
    for seed in (0, HELD_OUT_SEED):
        for example in _examples(kind, 12, seed=seed, passages=PASSAGES):
            assert 1 <= example.effort <= 100
            roles = [m["role"] for m in example.messages]
            assert roles[-1] == "assistant"
            assert roles[0] in ("system", "user")
            declared = {tool["function"]["name"] for tool in example.tools}
            assert bool(declared) == (CHAT_TASKS[kind] == "tools")
            open_calls: list[str] = []
            for message, after in pairwise((*example.messages, {"role": "end"})):
                if message["role"] == "assistant":
                    assert not open_calls
                    assert bool(message.get("reasoning_content")) == example.thinking
                    calls = message.get("tool_calls", [])
                    assert bool(calls) != bool(message["content"])
                    assert {c["function"]["name"] for c in calls} <= declared
                    open_calls = [c["id"] for c in calls]
                elif message["role"] == "tool":
                    assert message["tool_call_id"] == open_calls.pop(0)
                else:
                    assert not open_calls
                    assert after["role"] in ("user", "assistant")
            assert len(example.answers) == len(assistant_places(example))


def test_no_declared_calculator_is_left_unused_for_a_sum():
    for example in _examples("tool_unneeded", 60):
        names = {tool["function"]["name"] for tool in example.tools}
        for message in example.messages:
            if message["role"] == "user" and "calculate" in names:
                assert not re.search(r"\d [+*-] \d", message["content"])


def test_lower_effort_reasons_shorter():
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for kind in ("products", "word_reversal", "passage_fact"):
        for example in _examples(kind, 60):
            if example.thinking:
                thought = example.messages[-1]["reasoning_content"]
                lengths[example.effort <= 50].append(len(thought))
    assert np.mean(lengths[True]) < 0.6 * np.mean(lengths[False])


def test_thinking_and_effort_take_all_their_values():
    examples = _examples("greeting", 200)
    assert {50, 75, 100} < {e.effort for e in examples}
    assert len({e.effort for e in examples} - {50, 75, 100}) > 10
    assert 0.4 < np.mean([e.thinking for e in examples]) < 0.8


def test_unknown_kind_and_too_few_tokens_are_refused():
    with pytest.raises(ChatTaskError, match="kind: got 'poem'"):
        chat_example("poem", seed=0, index=0)
    for kind, least in (("greeting", 200), ("tool_files", 1_200)):
        chat_example(kind, seed=0, index=0, max_tokens=least)
        with pytest.raises(ChatTaskError, match=f"at least {least}"):
            chat_example(kind, seed=0, index=0, max_tokens=least - 1)


# --- answers, read again by slow readers that share nothing with the generators ---


def _fact(text: str, question: str) -> str:
    about = re.search(r"What is (the \w+ of the [\w ]+)\?", question)
    assert about
    found = re.findall(rf"{about[1]} is (\w+)\.", text, flags=re.IGNORECASE)
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("kind", ["passage_fact", "long_passage_fact"])
@pytest.mark.parametrize("passages", [(), PASSAGES], ids=["filler", "text"])
def test_fact_stands_once_in_the_text(kind, passages):
    for example in _examples(kind, 12, passages=passages):
        text = _first_user(example)
        asked = [m["content"] for m in example.messages if m["role"] == "user"]
        want = [_fact(text, question) for question in asked]
        assert list(example.answers) == want


@pytest.mark.parametrize("kind", ["key_value_list", "long_key_value_list"])
def test_listed_value_is_the_answer(kind):
    for example in _examples(kind, 12):
        rows = re.findall(
            r"^(?:- )?(\w+)(?:: | = | -> )(\w+)$", _first_user(example), flags=re.MULTILINE
        )
        table = dict(rows)
        assert len(table) == len(rows) >= 2
        asked = [
            re.search(r"(?:value of|value has|Look up) (\w+)[?.]", message["content"])
            for message in example.messages
            if message["role"] == "user"
        ]
        assert [table[found[1]] for found in asked if found] == list(example.answers)


def test_neighbour_in_a_list_is_the_answer():
    checked = 0
    for example in _examples("what_follows", 30):
        context = _first_user(example)
        for user, answer in zip(
            [m["content"] for m in example.messages if m["role"] == "user"],
            example.answers,
            strict=True,
        ):
            asked = re.search(r"What comes (after|before) (\w+)\?", user)
            assert asked
            words = re.findall(r"\w+", context.replace(f"What comes {asked[1]} {asked[2]}?", ""))
            step = 1 if asked[1] == "after" else -1
            if context != user:
                continue
            assert words[words.index(asked[2]) + step] == answer
            checked += 1
    assert checked > 20


def test_quotation_goes_on_as_answered():
    checked = 0
    for example in _examples("long_what_follows", 12, passages=PASSAGES):
        text = _first_user(example)
        for user, answer in zip(
            [m["content"] for m in example.messages if m["role"] == "user"],
            example.answers,
            strict=True,
        ):
            asked = re.search(r"Which words follow this\? (.+)$", user)
            if asked:
                assert text.split("\n\nWhich")[0].count(f"{asked[1]} {answer}") == 1
                checked += 1
    assert checked > 5


def _by_reader(kind: str, question: str) -> str:
    """Return the answer a plain reader gives to the last line of a question."""
    if kind in ("chain_sum", "products"):
        if found := re.fullmatch(r"Multiply (\d+) by (\d+)\.", question):
            return str(int(found[1]) * int(found[2]))
        expression = re.search(r"\d+(?: [+*-] \d+)+", question)
        assert expression
        return str(eval(expression[0]))
    if kind == "spell_backward":
        found = re.search(r"(?:Spell (\w+) backward\.|\"(\w+)\"|: (\w+)$)", question)
        assert found
        return "".join(list(next(g for g in found.groups() if g))[::-1])
    if kind == "letter_counting":
        found = re.search(r"(?:\"(\w)\"|letter (\w)) .*\"([^\"]+)\"", question)
        assert found
        letter = (found[1] or found[2]).lower()
        return str(sum(c.lower() == letter for c in found[3]))
    listed = question.rsplit(": ", 1)[1].split(", ")
    if kind == "number_sorting":
        down = "from largest" in question or "descending" in question
        return ", ".join(sorted(listed, key=lambda t: -int(t) if down else int(t)))
    if kind == "word_sorting":
        words = sorted(listed)
        return ", ".join(words[::-1] if "from z to a" in question else words)
    return ", ".join(listed[::-1])


@pytest.mark.parametrize("kind", [k for k in KINDS if CHAT_TASKS[k] == "reasoning"])
def test_answer_of_a_problem_is_what_a_plain_reader_finds(kind):
    for seed in (0, HELD_OUT_SEED):
        for example in _examples(kind, 25, seed=seed):
            question = _last_user(example)
            if kind == "number_sequence":
                numbers = [int(n) for n in re.findall(r"-?\d+", question)]
                a, b, c = numbers[-3:]
                # Equal steps, a double, or the sum of the two before.
                assert int(example.answers[-1]) in (2 * c - b, 2 * c, b + c)
                assert c in (2 * b - a, 2 * b, a + b)
            else:
                assert example.answers[-1] == _by_reader(kind, question)


def test_reasoning_equations_hold():
    checked = 0
    for kind in ("chain_sum", "products", "number_sequence"):
        for example in _examples(kind, 60):
            thought = example.messages[-1].get("reasoning_content", "")
            for left, right in re.findall(r"(-?\d+(?: [+*-] -?\d+)+) = (-?\d+)", thought):
                assert eval(left) == int(right)
                checked += 1
    assert checked > 80


# --- sides ---


def test_problems_and_names_belong_to_one_side():
    def names(seed: int, count: int) -> set[str]:
        found = set()
        for kind in (
            "passage_fact",
            "key_value_list",
            "chain_sum",
            "definition",
            "tool_calculator",
        ):
            for example in _examples(kind, count, seed=seed):
                for message in example.messages:
                    if message["role"] != "user":
                        continue
                    last = message["content"]
                    found |= {f"s {s}" for s in re.findall(r"What is the \w+ of the (.+)\?", last)}
                    found |= {f"k {k}" for k in re.findall(r"Which value has (\w+)", last)}
                    found |= {f"t {t}" for t in re.findall(r"^Define (.+)\.", last)}
                    if kind == "chain_sum":
                        found |= {f"e {e}" for e in re.findall(r"\d+(?: [+-] \d+)+", last)}
        return found

    train, held = names(0, 70), names(HELD_OUT_SEED, 70)
    assert len(train) > 150
    assert len(held) > 80
    assert not train & held
    # The control: two training seeds do share problems.
    assert train & names(1, 70)


def test_about_one_name_in_ten_is_held_out():
    share = np.mean([is_held_out(f"name {i}") for i in range(4_000)])
    assert share == pytest.approx(26 / 256, abs=0.02)


# --- tools ---


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3", 5), ("2 - 3 * 4", -10), ("(2 - 3) * 4", -4), ("-5", -5), (" 17*17 ", 289)],
)
def test_calculate_equals_hand_arithmetic(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "2 ** 9", "1 / 2", "1.5 + 1", "f(1)", "x", "True + 1", "(1", "'a' * 9"]
)
def test_calculate_refuses_all_but_integers_and_three_signs(expression):
    with pytest.raises(ChatTaskError, match="expression: got"):
        calculate(expression)


def test_tools_answer_from_their_state():
    store, files = {"a": 1}, {"d/x.txt": "hi", "d/y.txt": "", "e/z.txt": "z"}

    def run(name: str, **arguments) -> str:
        return run_tool(name, arguments, store=store, files=files)

    assert run("get_value", key="a") == "1"
    assert run("set_value", key="b", value=7) == "ok"
    assert (run("get_value", key="b"), store["b"]) == ("7", 7)
    assert run("list_files", folder="d") == run("list_files", folder="d/") == "x.txt\ny.txt"
    assert run("read_file", path="d/x.txt") == "hi"
    for failed in (
        run("get_value", key="c"),
        run("list_files", folder="q"),
        run("read_file", path="d/q.txt"),
        run("calculate", expression="1 /"),
        run("calculate"),
        run("set_value", key="b", value="many"),
        run("erase"),
    ):
        assert failed.startswith("error: ")


def test_recorded_results_are_those_of_the_calls():
    for example in _examples("tool_mixed", 25):
        store: dict[str, int] = {}
        results = {m["tool_call_id"]: m["content"] for m in example.messages if m["role"] == "tool"}
        for place in assistant_places(example):
            for call in example.messages[place].get("tool_calls", []):
                arguments = json.loads(call["function"]["arguments"])
                result, name = results[call["id"]], call["function"]["name"]
                if name == "calculate":
                    assert result == str(eval(arguments["expression"]))
                if name == "set_value":
                    store[arguments["key"]] = arguments["value"]
                if name == "get_value" and arguments["key"] in store:
                    assert result == str(store[arguments["key"]])
                if name == "get_value" and result.isdigit():
                    store[arguments["key"]] = int(result)


# --- grading ---


@pytest.mark.parametrize("kind", KINDS)
def test_written_turns_are_right_and_changed_ones_wrong(kind):
    for seed in (0, HELD_OUT_SEED):
        for example in _examples(kind, 8, seed=seed, passages=PASSAGES):
            for turn, place in enumerate(assistant_places(example)):
                message = example.messages[place]
                assert chat_checks(kind, example, message, turn=turn)
                wrong = {**message, "content": "nothing", "tool_calls": []}
                assert not chat_checks(kind, example, wrong, turn=turn)
                assert not chat_checks(kind, example, message, turn=turn, stopped=False)


@pytest.mark.parametrize("kind", SHORT)
def test_targets_decode_to_right_replies(tokenizer, kind):
    graded = 0
    for example in _examples(kind, 3, passages=PASSAGES, max_tokens=1_500):
        ids, is_target = encode_conversation(
            tokenizer,
            list(example.messages),
            tools=list(example.tools) or None,
            thinking=example.thinking,
            effort=example.effort,
        )
        for turn, place in enumerate(assistant_places(example)):
            prompt = encode_prompt(
                tokenizer,
                list(example.messages[:place]),
                tools=list(example.tools) or None,
                thinking=example.thinking,
                effort=example.effort,
            )
            if ids[: len(prompt)] != prompt or not is_target[len(prompt)]:
                continue
            end = next(i for i in range(len(prompt), len(ids)) if ids[i] == tokenizer.eos_id)
            assert all(is_target[len(prompt) : end + 1])
            reply = tokenizer.decode(ids[len(prompt) : end + 1])
            checks = reply_checks(kind, example, reply, turn=turn)
            assert checks.right, (reply, checks)
            graded += 1
    assert graded >= 3


def _tool_example(thinking: bool) -> ChatExample:
    call = {"name": "set_value", "arguments": '{"key": "abc", "value": 5}'}
    calls = [{"id": "call_00", "type": "function", "function": call}]
    return ChatExample(
        messages=(
            {"role": "user", "content": "Set abc to 5."},
            {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_00", "content": "ok"},
            {"role": "assistant", "content": "I set abc to 5.", "reasoning_content": "r"},
        ),
        tools=(),
        thinking=thinking,
        effort=75,
        kind="tool_key_value",
        answers=("", "5"),
    )


_BLOCK = (
    f'\n\n<{DSML} calls>\n<{DSML} invoke name="set_value">\n'
    f'<{DSML} parameter name="key" string="true">abc</{DSML} parameter>\n'
    f'<{DSML} parameter name="value" string="false">5</{DSML} parameter>\n'
    f"</{DSML} invoke>\n</{DSML} calls>"
)


def test_call_block_of_the_specification_is_read():
    example = _tool_example(True)
    assert chat_checks("tool_key_value", example, f"r{END_THINK}{_BLOCK}{EOS}", turn=0)
    assert chat_checks("tool_key_value", replace(example, thinking=False), _BLOCK, turn=0)


@pytest.mark.parametrize(
    ("reply", "broken"),
    [
        (f"r{_BLOCK}", "closed"),
        (f"r{END_THINK}{END_THINK}{_BLOCK}", "syntax"),
        (f"r{END_THINK}{_BLOCK} and more", "syntax"),
        (f"r{END_THINK}{_BLOCK[:-9]}", "syntax"),
        (f"r{END_THINK}{_BLOCK.replace(' calls', 'calls')}", "syntax"),
        (f"r{END_THINK}{_BLOCK.replace('>5<', '>five<')}", "syntax"),
        (f"r{END_THINK}{_BLOCK.replace('>5<', '>6<')}", "calls"),
        (f"r{END_THINK}{_BLOCK.replace('set_value', 'get_value')}", "calls"),
        (f"r{END_THINK}I set abc to 5.", "calls"),
    ],
)
def test_broken_call_is_found_by_its_check(reply, broken):
    checks = reply_checks("tool_key_value", _tool_example(True), reply, turn=0)
    assert not checks.right
    assert not getattr(checks, broken)


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ("I set abc to 5.", True),
        ("5", True),
        ("The value of abc is 5.", True),
        ("I set abc to 55.", False),
        ("-5", False),
        ("5 or 6", False),
        ("I set abc to 6.", False),
        ("", False),
        ("5 " * 60, False),
    ],
)
def test_answer_counts_alone_and_whole(content, right):
    example = _tool_example(True)
    assert chat_checks("tool_key_value", example, f"r{END_THINK}{content}{EOS}") == right


def test_equal_expressions_are_one_call():
    example = next(e for e in _examples("tool_calculator", 30) if e.messages[-3].get("tool_calls"))
    turn = len(example.answers) - 2
    message = example.messages[-3]
    function = message["tool_calls"][0]["function"]
    expression = json.loads(function["arguments"])["expression"]
    for text, right in ((f"(({expression}))", True), (f"{expression} + 1", False), ("1 +", False)):
        arguments = json.dumps({"expression": text})
        call = {"function": {"name": "calculate", "arguments": arguments}}
        reply = {**message, "tool_calls": [call]}
        assert chat_checks("tool_calculator", example, reply, turn=turn) == right


def test_grading_under_another_kind_is_refused():
    with pytest.raises(ChatTaskError, match="kind: got 'greeting'"):
        chat_checks("greeting", _tool_example(True), "5")


# --- shards ---

WEIGHTS = {"chain_sum": 2.0, "greeting": 1.0, "passage_fact": 3.0}


def _plain_encode(tokenizer, messages, *, tools, thinking, effort):
    """Return bytes of the messages as ids, the assistant's as targets: any encoder will do."""
    ids, mask = [], []
    for message in messages:
        text = message["content"].encode() + b"\n"
        ids += list(text)
        mask += [message["role"] == "assistant"] * len(text)
    return ids, mask


def _write(folder, tokenizer, **options):
    sides = {"train": ("Training grain lies here, and more.",) * 3, "validation": PASSAGES}
    base = {"train_tokens": 6_000, "validation_tokens": 1_500, "weights": WEIGHTS}
    base |= {"passages": sides, "encode": _plain_encode, "max_tokens": 4_000}
    return write_chat_shards(folder, tokenizer, **{**base, **options})


def test_shards_give_back_ids_and_targets(tokenizer, tmp_path):
    written = []

    def encode(*args, **options):
        written.append(_plain_encode(*args, **options))
        return written[-1]

    meta = _write(tmp_path / "s", tokenizer, encode=encode, max_tokens=1_000_000)
    read = [
        pair
        for side in ("train", "validation")
        for pair in read_chat_shards(tmp_path / "s", side, tokenizer=tokenizer, verify=True)
    ]
    assert len(read) == len(written) == sum(s["conversations"] for s in meta["sides"].values())
    for (ids, mask), (want_ids, want_mask) in zip(read, written, strict=True):
        assert ids.dtype == np.uint16
        assert mask.dtype == bool
        assert ids.tolist() == want_ids
        assert mask.tolist() == want_mask
    assert sum(mask.sum() for _, mask in read) == sum(s["targets"] for s in meta["sides"].values())


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17])
def test_target_bits_survive_every_length(tokenizer, tmp_path, length):
    ids, mask = list(range(length)), [i % 3 == 1 for i in range(length)]
    one = {"train_tokens": 1, "validation_tokens": 0, "encode": lambda *_, **__: (ids, mask)}
    _write(tmp_path / "s", tokenizer, **one)
    ((read_ids, read_mask),) = read_chat_shards(tmp_path / "s", "train", verify=True)
    assert read_ids.tolist() == ids
    assert read_mask.tolist() == mask


def test_shards_share_tokens_by_weight(tokenizer, tmp_path):
    side = _write(tmp_path / "s", tokenizer, train_tokens=60_000)["sides"]["train"]
    for kind, weight in WEIGHTS.items():
        assert side["kinds"][kind]["tokens"] / side["tokens"] == pytest.approx(weight / 6, abs=0.05)


def test_shards_keep_passages_and_seeds_of_sides_apart(tokenizer, tmp_path):
    _write(tmp_path / "s", tokenizer)
    texts = {
        side: b"".join(
            bytes(ids.astype(np.uint8)) for ids, _ in read_chat_shards(tmp_path / "s", side)
        )
        for side in ("train", "validation")
    }
    assert b"Training grain" in texts["train"]
    assert b"Training grain" not in texts["validation"]
    assert b"of chapter" in texts["validation"]
    assert b"of chapter" not in texts["train"]


def test_shards_are_the_same_bytes_again(tokenizer, tmp_path):
    first, second = _write(tmp_path / "a", tokenizer), _write(tmp_path / "b", tokenizer)
    third = _write(tmp_path / "c", tokenizer, seed=1)
    assert first == second
    assert first["sides"]["train"]["sha256"] != third["sides"]["train"]["sha256"]


def test_shards_leave_out_what_is_too_long(tokenizer, tmp_path):
    meta = _write(tmp_path / "s", tokenizer, max_tokens=600, weights={"greeting": 1, "products": 1})
    lengths = [len(ids) for ids, _ in read_chat_shards(tmp_path / "s", "train")]
    assert max(lengths) <= 600
    assert meta["sides"]["train"]["tokens"] == sum(lengths)


def test_shards_of_no_tokens_are_empty(tokenizer, tmp_path):
    _write(tmp_path / "s", tokenizer, train_tokens=0, validation_tokens=0)
    assert read_chat_shards(tmp_path / "s", "train", verify=True) == []


@pytest.mark.parametrize("name", ["ids", "lengths", "targets"])
def test_damaged_shards_are_refused(tokenizer, tmp_path, name):
    folder = tmp_path / "s"
    _write(folder, tokenizer)
    file = folder / f"train.{name}"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ShardError, match="bytes, expected"):
        read_chat_shards(folder, "train")
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ShardError, match=r"SHA-256 differs|lengths add up"):
        read_chat_shards(folder, "train", verify=True)


def test_wrong_requests_to_shards_are_refused(tokenizer, tmp_path):
    _write(tmp_path / "s", tokenizer)
    with pytest.raises(ShardError, match="is there already"):
        _write(tmp_path / "s", tokenizer)
    with pytest.raises(ShardError, match="weights: got 'poem'"):
        _write(tmp_path / "t", tokenizer, weights={"poem": 1})
    with pytest.raises(ShardError, match="seed: got"):
        _write(tmp_path / "t", tokenizer, seed=HELD_OUT_SEED)
    with pytest.raises(ShardError, match="side: got 'evaluation'"):
        read_chat_shards(tmp_path / "s", "evaluation")
    with pytest.raises(ShardError, match="no such file"):
        read_chat_shards(tmp_path / "missing", "train")
    assert not list(tmp_path.glob("*partial*"))


def test_default_weights_cover_every_kind_and_sum_to_one():
    weights = default_weights()
    assert set(weights) == set(KINDS)
    assert sum(weights.values()) == pytest.approx(1)


def test_tokenizer_of_the_tests_has_every_marker(tokenizer):
    assert set(CHAT_MARKERS) <= set(tokenizer.markers)
