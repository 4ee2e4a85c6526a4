"""The demonstration: its parts on scripted replies, its measures by hand, and all of it once."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from finwhale import demo
from finwhale.config import preset
from finwhale.conversations.tasks import TOOLS
from finwhale.engine.runner import with_ops
from finwhale.model import Numerics
from finwhale.ops import FAST
from finwhale.text.prompt import encode_prompt, encode_segment, render_reply
from finwhale.text.tokenizer import Tokenizer
from tests.models import build

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "finwhale-mini"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(SHIPPED)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(content: str = "", reasoning: str = "", **arguments):
    """Return an assistant message, with one call of set_value if there are arguments."""
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    if arguments:
        function = {"name": "set_value", "arguments": json.dumps(arguments)}
        message["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
    return message


class Script:
    """A model that says the given messages one after the other, and keeps its prompts."""

    def __init__(self, tokenizer, *replies):
        self.tokenizer, self.replies, self.prompts = tokenizer, list(replies), []

    def __call__(self, ids, **options):
        self.prompts.append(list(ids))
        for segment in render_reply(self.replies.pop(0), thinking=True):
            yield from encode_segment(self.tokenizer, segment)


def converse(script, tokenizer, store, console=None):
    return demo.converse(
        script,
        tokenizer,
        "Set lamo to 5.",
        thinking=True,
        tools=[TOOLS["set_value"]],
        store=store,
        console=console or quiet(),
    )


def test_a_call_is_run_and_its_result_reaches_the_next_prompt(tokenizer):
    script = Script(
        tokenizer, said(reasoning="I store it.", key="lamo", value=5), said("Done.", "It is.")
    )
    store, console = {"lamo": 1}, quiet()
    messages = converse(script, tokenizer, store, console)
    assert store == {"lamo": 5}
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["content"] == "ok"
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    assert messages[3]["content"] == "Done."
    tools = [TOOLS["set_value"]]
    for prompt, count in zip(script.prompts, (1, 3), strict=True):
        assert prompt == encode_prompt(tokenizer, messages[:count], tools=tools, thinking=True)
    shown = console.file.getvalue()
    order = (
        "thinks> I store it.",
        'calls> set_value {"key": "lamo"',
        "result> ok",
        "answers> Done.",
    )
    places = [shown.index(part) for part in order]
    assert places == sorted(places)


def test_an_answer_without_a_call_ends_the_conversation(tokenizer):
    script, store = Script(tokenizer, said("No.", "I will not."), said("never read")), {"lamo": 1}
    assert len(converse(script, tokenizer, store)) == 2
    assert store == {"lamo": 1}
    assert len(script.replies) == 1


def test_a_loop_of_calls_ends(tokenizer):
    script = Script(tokenizer, *[said(key="lamo", value=n) for n in range(9)])
    messages = converse(script, tokenizer, {})
    assert sum(message["role"] == "assistant" for message in messages) == 4
    assert len(script.prompts) == 4


@pytest.mark.parametrize("arguments", ["", "{", "[1]", '"lamo"'])
def test_arguments_that_are_no_object_are_told_to_the_model(arguments):
    store = {"lamo": 1}
    result = demo._result({"name": "set_value", "arguments": arguments}, store)
    assert result == "error: the arguments are not a JSON object"
    assert store == {"lamo": 1}


def test_dense_cache_bytes_by_hand():
    # mini: 12 layers, K and V, heads of 512, 2 bytes; four heads keep four times as much.
    config = preset("mini").text_config
    assert demo.dense_kv_bytes_per_token(config, 1) == 12 * 2 * 512 * 2 == 24_576
    assert demo.dense_kv_bytes_per_token(config, 4) == 98_304
    console = quiet()
    console.print(demo.memory_table(config, 1_000))
    shown = console.file.getvalue()
    for figure in ("890", "890,000", "933,232,640", "24,576", "24,576,000", "27.6", "110.5"):
        assert f" {figure} " in shown


class Table:
    """A model whose logits depend on the last token alone."""

    def __init__(self, rows):
        self.rows = torch.tensor(rows)

    def __call__(self, ids):
        return self.rows[ids]


def test_loss_is_the_mean_of_the_tokens_from_first_on():
    # After 0 comes 1 with probability 3/4, after 1 comes 0 with probability 1/3.
    model = Table([[0.0, math.log(3.0)], [0.0, math.log(2.0)]])
    loss = {first: demo.loss_per_token(model, [0, 1, 0], first) for first in (1, 2)}
    assert loss[1] == pytest.approx((math.log(4 / 3) + math.log(3)) / 2)
    assert loss[2] == pytest.approx(math.log(3))
    for first in (0, 3):
        with pytest.raises(ValueError, match=f"first: got {first}, expected 1 to 2"):
            demo.loss_per_token(model, [0, 1, 0], first)


@pytest.mark.parametrize("off", [demo.without_engram, demo.within_window])
def test_a_mechanism_that_is_off_changes_the_loss_and_a_twin_with_all_does_not(off):
    model = build(preset("unit"), Numerics())
    text = model.config.text_config
    draw = torch.Generator().manual_seed(1)
    size = (3 * text.sliding_window + 1,)
    ids = torch.randint(3, text.vocab_size, size, generator=draw).tolist()
    whole = demo.loss_per_token(model, ids, 1)
    assert demo.loss_per_token(with_ops(model, FAST), ids, 1) == whole
    assert abs(demo.loss_per_token(with_ops(model, off()), ids, 1) - whole) > 1e-3


@pytest.mark.parametrize("compiled", [True, False])
def test_a_voice_draws_until_told_and_measures_its_memory(compiled, tokenizer, monkeypatch):
    if not compiled:
        monkeypatch.setattr(demo, "numba_missing", lambda: "switched off by the test")
    voice = demo.Voice(build(preset("unit"), Numerics()), tokenizer)
    assert (voice.engine is not None) is compiled
    assert len(list(voice(range(3, 10), max_new_tokens=4))) == voice.num_drawn == 4
    assert voice.most_tokens == 11
    kv_bytes, kv_tokens, fixed_bytes = voice.measured()
    # 7 of the prompt and 3 new ones were read when the last was drawn; the engine's pools have
    # 64 blocks of 64. 53 bytes an entry, two owners at ratio 2 and one at ratio 1.
    assert kv_tokens == (64 * 64 if compiled else 10)
    assert kv_bytes == 53 * (kv_tokens // 2 + kv_tokens // 2 + kv_tokens)
    assert fixed_bytes > 0


@pytest.mark.slow
def test_the_demonstration_shows_what_it_says():
    console = quiet()
    report = demo.run_demo(console=console)
    shown = console.file.getvalue()
    greeting, needle, product, copied, unaided = report.conversations
    assert "finwhale-mini" in greeting[-1]["content"]
    assert "4817" in needle[-1]["content"]
    assert needle[-1]["reasoning_content"]
    assert product[1]["tool_calls"][0]["function"]["name"] == "calculate"
    assert product[2]["content"] == "10063"
    assert "10063" in product[-1]["content"]
    assert [m["content"] for m in copied if m["role"] == "tool"] == ["42", "ok"]
    assert len(unaided) == 2
    assert "the store now: {'lamo': 42, 'tiru': 42}" in shown
    assert report.kv_bytes_per_token == pytest.approx(890, rel=0.01)
    assert report.completion in shown
    whole, engram, window = report.losses.values()
    # Engram knows words, selection finds the fact: each is missed where it works.
    assert engram[0] > whole[0] + 0.2
    assert window[1] > whole[1] + 1
    assert whole[1] < 0.1
