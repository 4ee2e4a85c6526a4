"""Tokens to events of one choice: what is told is what was written, each token once.

Byte-level ids cut every marker, stop text and character in all places.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finwhale.engine.request import RequestOutput, TokenResult
from finwhale.serve.errors import EngineFailedError, TimeLimitError
from finwhale.serve.generation import ChatReader, Generation, TextReader, Usage, told
from finwhale.text.output_parser import OutputParser, OutputParserError
from finwhale.text.special_tokens import DSML, END_THINK
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from tests.scripted_engine import answer_ids


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    # Some merges, so that a stop text can end inside a token.
    return Tokenizer.from_file(train_tokenizer(["aab aab baab"] * 9, MIN_VOCAB_SIZE + 4, path))


def read(reader, ids, reason="stop"):
    """Content and told tokens, as a generation reads them."""
    text, tokens = "", []
    for number, token in enumerate(ids):
        deltas, logprobs = reader.feed(TokenResult(token=token, logprob=-float(number)))
        text += "".join(d.text for d in deltas if d.kind == "content")
        tokens += logprobs
        if reader.is_complete:
            reason = "stop"
            break
    deltas, logprobs, finish = reader.finish(reason)
    text += "".join(d.text for d in deltas if d.kind == "content")
    return text, [*tokens, *logprobs], finish


def chat_reader(tokenizer, *, thinking=False, tools=False, stop=(), max_calls=None):
    parser = OutputParser(thinking=thinking, tools_declared=tools, stop=stop, max_calls=max_calls)
    return ChatReader(tokenizer, parser)


@given(
    text=st.text(alphabet="abü\n", max_size=12),
    stops=st.lists(st.text("abü", min_size=1), max_size=3),
)
def test_a_completion_is_the_text_before_the_stop_text_that_is_complete_first(
    tokenizer, text, stops
):
    # Ends are tried one by one; of stop texts that end together, the first listed counts.
    ends = range(1, len(text) + 1)
    found = next(((end, s) for end in ends for s in stops if text[:end].endswith(s)), None)
    want = text if found is None else text[: found[0] - len(found[1])]
    reader = TextReader(tokenizer, stops)
    got, tokens, _ = read(reader, answer_ids(tokenizer, text))
    assert (got, reader.stop_text) == (want, found and found[1])
    assert all(t.offset <= len(got) for t in tokens)
    # A chat chooses alike, but for newlines before the first text, which match nothing.
    if not text.startswith("\n"):
        chat = chat_reader(tokenizer, stop=stops)
        assert read(chat, answer_ids(tokenizer, text))[0] == want
        assert chat.stop_text == reader.stop_text


@given(text=st.text(alphabet="abü ", max_size=12))
def test_told_tokens_of_a_completion_are_all_tokens_and_their_bytes_the_text(tokenizer, text):
    ids = answer_ids(tokenizer, text)
    got, tokens, finish = read(TextReader(tokenizer, ()), ids)
    assert (got, finish) == (text, "stop")
    assert b"".join(t.token_bytes for t in tokens) == text.encode()
    assert [t.logprob for t in tokens] == [-float(n) for n in range(len(ids) - 1)]


@pytest.mark.parametrize(("reason", "want"), [("length", ""), ("stop", "\ufffd")])
def test_a_character_that_a_limit_cuts_is_no_text_and_its_bytes_are_told(tokenizer, reason, want):
    ids = answer_ids(tokenizer, "ü", end=False)[:1]
    for reader in (TextReader(tokenizer, ()), chat_reader(tokenizer)):
        text, tokens, finish = read(reader, ids, reason)
        assert (text, finish) == (want, reason)
        if isinstance(reader, TextReader):
            assert [(t.token, t.token_bytes, t.offset) for t in tokens] == [("\\xc3", b"\xc3", 0)]


def test_a_stop_text_beyond_the_limits_is_refused_by_its_name(tokenizer):
    for stop in (("x" * 4097,), ("",), ("a",) * 17):
        with pytest.raises(OutputParserError, match=r"^stop: got .{1,40}, expected at most 16"):
            TextReader(tokenizer, stop)


# Of a byte-level tokenizer, with the characters that are whole before each byte, counted by hand.
BYTES = [
    *((b"a", 0), (b"\xc3", 1), (b"\xa9", 1)),
    *((b"\xf0", 2), (b"\x9f", 2), (b"\x98", 2), (b"\x80", 2)),
    *((b"\xe6", 3), (b"\x97", 3), (b"\xa5", 3), (b"b", 4), (b" ", 5), (b"x", 6)),
]


def test_an_offset_is_the_number_of_whole_characters_before_the_token(tokenizer):
    prompt = answer_ids(tokenizer, "aé😀日b x", end=False)
    assert [tokenizer.token_bytes(i) for i in prompt] == [each for each, _ in BYTES]
    _, tokens, _ = read(TextReader(tokenizer, ()), [*prompt, tokenizer.eos_id])
    assert [(t.token_bytes, t.offset) for t in tokens] == BYTES
    # Echoed, and gone on with.
    scores = tuple(TokenResult(token=i, logprob=-0.5) for i in (0, *prompt))
    more = tuple(TokenResult(token=i, logprob=-1.0) for i in answer_ids(tokenizer, "üz", end=False))

    async def main():
        messages = [
            RequestOutput(request_id="r", prompt_logprobs=scores),
            RequestOutput(request_id="r", index=0, new=more, finish_reason="length"),
        ]
        made, _ = generation(tokenizer, messages, echo=prompt)
        return (await made.collect())[0]

    result = asyncio.run(main())
    assert result.text == "aé😀日b xüz"
    answer = [(b"\xc3", 7), (b"\xbc", 7), (b"z", 8)]
    assert [(t.token_bytes, t.offset) for t in result.logprobs] == [*BYTES, *answer]
    assert all(t.offset <= len(result.text) for t in result.logprobs)


def test_an_empty_prompt_is_repeated_as_nothing(tokenizer):
    async def main():
        begun = RequestOutput(request_id="r", prompt_logprobs=(TokenResult(token=0),))
        messages = [begun, output(tokenizer, "y", 0, finish_reason="stop")]
        made, _ = generation(tokenizer, messages, echo=[])
        return (await made.collect())[0]

    result = asyncio.run(main())
    assert (result.text, result.logprobs) == ("y", [])


def test_a_chat_names_the_stop_text_that_ended_it(tokenizer):
    reader = chat_reader(tokenizer, stop=("zz", "b"))
    text, tokens, _ = read(reader, answer_ids(tokenizer, "\nab zz"))
    assert (text, reader.stop_text) == ("a", "b")
    assert b"".join(t.token_bytes for t in tokens).endswith(b"a")
    # Newlines before the first text match nothing.
    early = chat_reader(tokenizer, stop=("\n", "q"))
    assert read(early, answer_ids(tokenizer, "\n\nxq"))[0] == "x"
    assert early.stop_text == "q"


INVOKE = ("<", DSML, ' invoke name="f">\n</', DSML, " invoke>\n")
BLOCK = ("\n\n<", DSML, " calls>\n", *INVOKE, *INVOKE, "</", DSML, " calls>")


def test_tokens_of_a_call_are_not_told_and_those_of_the_text_before_are(tokenizer):
    for parts, finish in ((BLOCK, "tool_calls"), ((*BLOCK[:3], "prose</", *BLOCK[-2:]), "stop")):
        reader = chat_reader(tokenizer, tools=True)
        text, tokens, got = read(reader, answer_ids(tokenizer, "xy", *parts))
        assert got == finish
        assert text.startswith("xy")
        # The text of a block without calls has no tokens either: they were markup as well.
        assert b"".join(t.token_bytes for t in tokens) == b"xy"


def test_tokens_between_blocks_without_calls_are_those_of_the_text(tokenizer):
    empty = ("<", DSML, " calls>", "</", DSML, " calls>")
    ids = answer_ids(tokenizer, *empty, "b", *empty, "c")
    text, tokens, _ = read(chat_reader(tokenizer, tools=True), ids)
    # The second block has the reason of the first, which is said once.
    assert text == "[unreadable tool call: the block has no invoke]\nb\nc"
    assert [t.token for t in tokens] == ["b", "c"]


@pytest.mark.parametrize("size", [1, 1000])
def test_the_last_allowed_call_ends_the_choice_and_the_engine_is_told(tokenizer, size):
    async def main():
        messages = []
        told_ids = [TokenResult(token=token) for token in answer_ids(tokenizer, "x", *BLOCK)]
        for at in range(0, len(told_ids), size):
            new = tuple(told_ids[at : at + size])
            messages.append(RequestOutput(request_id="r", index=0, new=new))
        made, cancelled = generation(tokenizer, messages)
        made._readers = [chat_reader(tokenizer, tools=True, max_calls=1)]
        (result,) = await made.collect()
        assert [c["function"]["name"] for c in result.message["tool_calls"]] == ["f"]
        assert (result.finish_reason, result.stop_text, result.text) == ("tool_calls", None, "x")
        return made.usage.completion_tokens, cancelled

    num_read = len(answer_ids(tokenizer, "x", *BLOCK[:3], *INVOKE[:-1], " invoke>", end=False))
    assert asyncio.run(main()) == (num_read, ["r"])


def test_reasoning_tokens_are_told_as_reasoning_and_the_tag_not_at_all(tokenizer):
    reader = chat_reader(tokenizer, thinking=True)
    _, tokens, _ = read(reader, answer_ids(tokenizer, "xy", END_THINK, "z"))
    assert [(t.kind, t.token) for t in tokens] == [
        ("reasoning", "x"),
        ("reasoning", "y"),
        ("content", "z"),
    ]
    assert reader.num_reasoning_tokens == 2


def test_an_alternative_that_the_tokenizer_does_not_know_is_empty_text(tokenizer):
    result = TokenResult(token=3, logprob=-1.0, top=((tokenizer.vocab_size, -2.0),))
    assert told(tokenizer, result, "content").top == (("", b"", -2.0),)


def generation(tokenizer, messages, *, num_choices=1, stop=(), timeout_s=5.0, echo=None):
    """A generation over messages that have come already, and the ids that it cancels."""
    cancelled, waiting = [], asyncio.Queue()
    for message in messages:
        waiting.put_nowait(message)
    made = Generation(
        request_id="r",
        tokenizer=tokenizer,
        readers=[TextReader(tokenizer, stop) for _ in range(num_choices)],
        usage=Usage(prompt_tokens=7),
        messages=waiting,
        cancel=cancelled.append,
        timeout_s=timeout_s,
        echo=echo,
    )
    return made, cancelled


def output(tokenizer, text, index=0, **fields):
    new = tuple(TokenResult(token=i) for i in answer_ids(tokenizer, text, end=False))
    return RequestOutput(request_id="r", index=index, new=new, **fields)


def test_choices_are_joined_and_a_stopped_one_says_nothing_more(tokenizer):
    async def main():
        made, cancelled = generation(
            tokenizer,
            [
                "accepted",
                output(tokenizer, "x", 0, num_cached_tokens=3),
                output(tokenizer, "y", 1, num_cached_tokens=6),
                output(tokenizer, "q", 0),
                output(tokenizer, "x", 0, num_cached_tokens=5),
                output(tokenizer, "x", 1, finish_reason="length"),
            ],
            num_choices=2,
            stop=("q",),
        )
        results = await made.collect()
        assert [(r.text, r.finish_reason, r.stop_text) for r in results] == [
            ("x", "stop", "q"),
            ("yx", "length", None),
        ]
        assert (made.usage.completion_tokens, made.usage.cached_tokens) == (4, 3)
        assert made.usage.missed_tokens == 4
        # The first choice still runs in the engine.
        assert cancelled == ["r"]

    asyncio.run(main())


def test_an_error_of_the_engine_and_the_time_limit_are_raised(tokenizer):
    async def main():
        failed, cancelled = generation(tokenizer, ["accepted", EngineFailedError("x")])
        with pytest.raises(EngineFailedError):
            await failed.collect()
        assert not cancelled
        slow, cancelled = generation(tokenizer, ["accepted"], timeout_s=0.01)
        with pytest.raises(TimeLimitError):
            await slow.collect()
        assert cancelled == ["r"]

    asyncio.run(main())


def test_closing_the_events_early_cancels(tokenizer):
    async def main():
        made, cancelled = generation(tokenizer, [output(tokenizer, "x"), output(tokenizer, "y")])
        async with aclosing(made.events()) as events:
            await anext(events)
            assert not cancelled
        assert cancelled == ["r"]

    asyncio.run(main())


def test_an_aborted_choice_keeps_its_text(tokenizer):
    async def main():
        ended = output(tokenizer, "", finish_reason="cancelled")
        made, _ = generation(tokenizer, [output(tokenizer, "x"), ended])
        result = (await made.collect())[0]
        assert (result.text, result.finish_reason) == ("x", "aborted")

    asyncio.run(main())


def test_an_echo_stands_once_before_each_choice(tokenizer):
    async def main():
        prompt = answer_ids(tokenizer, "x", end=False)
        scores = tuple(TokenResult(token=t, logprob=-0.5) for t in (0, *prompt))
        made, _ = generation(
            tokenizer,
            [
                RequestOutput(request_id="r", prompt_logprobs=scores),
                output(tokenizer, "y", 0, finish_reason="stop"),
                output(tokenizer, "z", 1, finish_reason="stop"),
            ],
            num_choices=2,
            echo=prompt,
        )
        results = await made.collect()
        assert [r.text for r in results] == ["xy", "xz"]
        # The begin marker that the server added is not among the told tokens.
        assert [[t.token for t in r.logprobs] for r in results] == [["x"], ["x"]]

    asyncio.run(main())
