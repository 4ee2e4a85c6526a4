"""The terminal chat: in a pseudo-terminal, through a pipe, and as an object without either."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from finwhale.chat_ui.chat_terminal import COMMANDS, Settings, Terminal, line_reader
from finwhale.chat_ui.demo_tools import FILES, MAX_ARGUMENT_LETTERS, MAX_KEYS, STORE, DemoTools
from finwhale.text.special_tokens import DSML, END_THINK
from tests.scripted_engine import ScriptedEngine, answer_ids, byte_tokenizer, scripted_service

ROOT = Path(__file__).resolve().parents[2]
BYTES_PER_TOKEN = 890


def call_of(name: str, **arguments: str) -> tuple[str, ...]:
    """Parts of an answer that calls a tool with texts."""
    parts = [f"<{DSML} calls>", "\n", f'<{DSML} invoke name="{name}">', "\n"]
    for key, value in arguments.items():
        parts += [f'<{DSML} parameter name="{key}" string="true">{value}</{DSML} parameter>', "\n"]
    parts += [f"</{DSML} invoke>", "\n", f"</{DSML} calls>"]
    pieces = []
    for part in parts:
        # The marker inside is one token of its own.
        head, marker, tail = part.partition(DSML)
        pieces += [piece for piece in (head, marker, tail) if piece]
    return tuple(pieces)


class Talk:
    """A terminal over an engine that says `answers` one after the other."""

    def __init__(self, tokenizer, *answers, tools=False, **settings):
        left = list(answers)
        self.engine = ScriptedEngine(lambda prompt, index: answer_ids(tokenizer, *left.pop(0)))
        self.service = scripted_service(tokenizer, self.engine)
        self.written: list[str] = []
        self.terminal = Terminal(
            service=self.service,
            write=self.written.append,
            settings=Settings(**settings),
            bytes_per_token=BYTES_PER_TOKEN,
            tools=DemoTools() if tools else None,
        )

    def say(self, *lines) -> str:
        """What was written in reply to `lines`."""
        left = list(lines)
        self.written.clear()
        self.service.start()
        try:
            self.terminal.converse(lambda: left.pop(0) if left else None)
        finally:
            self.service.close(grace_s=0)
        return "".join(self.written)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_reply_shows_reasoning_then_text_then_figures(tokenizer):
    talk = Talk(tokenizer, ("hm", END_THINK, "hello"))
    shown = talk.say("hi\n")
    assert shown.startswith("thinking: hm\nhello\n[prompt ")
    prompt = len(talk.engine.added[0][0])
    # Two bytes, the tag, five bytes and the end marker, of which two are reasoning.
    assert f"[prompt {prompt} tokens, 0 of them cache hits; reply 9 tokens, 2 of them" in shown
    assert "890 bytes per token" in shown
    assert "tokens/s]" in shown
    assert talk.terminal.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning_content": "hm"},
    ]


def test_a_later_turn_sends_the_turns_before_it(tokenizer):
    talk = Talk(tokenizer, ("one",), ("two",), thinking=False)
    talk.say("first", "second")
    text = tokenizer.decode(talk.engine.added[1][0])
    assert text.index("first") < text.index("one") < text.index("second")


def test_cache_hits_are_the_engines(tokenizer):
    talk = Talk(tokenizer, ("one",), ("two",), thinking=False)
    # After /reset the same words are the same prompt, cached but for its last token.
    shown = talk.say("same", "/reset", "same")
    prompt = len(talk.engine.added[0][0])
    assert f"[prompt {prompt} tokens, {prompt - 1} of them cache hits" in shown


def test_calls_run_here_and_their_results_go_back(tokenizer):
    talk = Talk(
        tokenizer, call_of("calculate", expression="17 * 3"), ("51",), thinking=False, tools=True
    )
    shown = talk.say("what is 17 * 3")
    assert 'call calculate {"expression": "17 * 3"}\n' in shown
    assert "  calculate -> 51\n51\n[" in shown
    roles = [message["role"] for message in talk.terminal.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert talk.terminal.messages[2]["content"] == "51"
    assert "51" in tokenizer.decode(talk.engine.added[1][0])


def test_without_tools_call_markup_is_text_and_nothing_runs(tokenizer):
    talk = Talk(tokenizer, call_of("calculate", expression="17 * 3"), thinking=False)
    shown = talk.say("x")
    assert "->" not in shown
    assert [message["role"] for message in talk.terminal.messages] == ["user", "assistant"]


def test_endless_calls_end_and_leave_no_trace(tokenizer):
    answers = [call_of("get_value", key="limo")] * 20
    talk = Talk(tokenizer, *answers, thinking=False, tools=True)
    shown = talk.say("x")
    assert "(stopped after 8 rounds of calls)" in shown
    assert len(talk.engine.added) == 8
    assert talk.terminal.messages == []


def test_commands_change_what_the_next_turn_asks(tokenizer):
    talk = Talk(tokenizer, ("a", END_THINK, "b"), ("c",))
    shown = talk.say("/effort 7", "x", "/thinking off", "y")
    assert "effort 7\n" in shown
    assert "thinking off\n" in shown
    first, second = (tokenizer.decode(prompt) for prompt, _, _ in talk.engine.added)
    assert "7" in first
    assert first.endswith("<think>")
    assert second.endswith(END_THINK)


@pytest.mark.parametrize(
    "line", ["/effort", "/effort 0", "/effort 101", "/effort -1", "/effort loud"]
)
def test_a_wrong_effort_is_refused_and_changes_nothing(tokenizer, line):
    talk = Talk(tokenizer)
    assert talk.say(line).startswith("effort: got")
    assert talk.terminal.settings.effort == 75


@pytest.mark.parametrize("line", ["/", "/nothing", "/thinking", "/thinking maybe", "/reset all"])
def test_an_unknown_command_names_the_known_and_asks_nobody(tokenizer, line):
    talk = Talk(tokenizer)
    assert COMMANDS in talk.say(line)
    assert talk.engine.added == []


def test_stats_add_up_and_reset_clears_them(tokenizer):
    talk = Talk(tokenizer, ("one",), ("two",), thinking=False)
    shown = talk.say("a", "b", "/stats", "/reset", "/stats")
    prompts = [len(prompt) for prompt, _, _ in talk.engine.added]
    # Three bytes and the end marker, twice; the context is the last prompt with its reply.
    held = (prompts[1] + 4) * BYTES_PER_TOKEN
    assert f"prompt tokens {sum(prompts):,}, of them cached 0 (0%); reply tokens 8 in" in shown
    assert f"= {held:,} bytes" in shown
    assert "turns 0, messages 0" in shown
    assert "= 0 bytes" in shown


def test_empty_lines_ask_nobody_and_quit_ends(tokenizer):
    talk = Talk(tokenizer)
    assert talk.say("", "   ", "/quit", "never read") == ""
    assert talk.engine.added == []


def test_a_refused_turn_is_told_and_forgotten(tokenizer):
    talk = Talk(tokenizer, ("fine",), thinking=False)
    # The scripted engine has a context of 4,096 tokens, and here each byte is one.
    shown = talk.say("x" * 5000, "short")
    assert "error: messages: got" in shown
    assert "shorten the prompt" in shown
    assert [message["content"] for message in talk.terminal.messages] == ["short", "fine"]


def test_control_characters_of_a_model_do_not_reach_the_terminal(tokenizer):
    talk = Talk(tokenizer, ("a\x1b[2Jb\x07\x9bc\td",), thinking=False)
    shown = talk.say("x")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert "\td" in shown
    # What goes back to the model is what it said.
    assert talk.terminal.messages[1]["content"] == "a\x1b[2Jb\x07\x9bc\td"


def test_styling_ends_where_reasoning_ends(tokenizer):
    talk = Talk(tokenizer, ("hm", END_THINK, "hello"), ("only thoughts",))
    talk.terminal.is_styled = True
    shown = talk.say("x", "y")
    assert shown.count("\x1b[2m") == shown.count("\x1b[0m")
    assert "\x1b[2mthinking: hm\x1b[0m\nhello\n" in shown


def test_interrupted_input_begins_a_new_line(tokenizer):
    talk = Talk(tokenizer)
    events = iter([KeyboardInterrupt, "/stats", None])

    def read():
        event = next(events)
        if event is KeyboardInterrupt:
            raise event
        return event

    talk.terminal.converse(read)
    assert "turns 0" in "".join(talk.written)


def test_a_pipe_is_read_line_by_line_without_a_prompt(tmp_path):
    file = tmp_path / "lines"
    file.write_text("one\ntwo", encoding="utf-8")
    with file.open(encoding="utf-8") as source, (tmp_path / "out").open("w") as out:
        read = line_reader(source, out)
        assert [read(), read(), read()] == ["one\n", "two", None]
    assert (tmp_path / "out").read_text() == ""


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculate", '{"expression": "2 * (3 + 4)"}', "14"),
        ("get_value", '{"key": "limo"}', "27"),
        ("list_files", '{"folder": "docs"}', "cache.txt\nwindow.md"),
        ("read_file", '{"path": "notes/whale.txt"}', FILES["notes/whale.txt"]),
    ],
)
def test_demo_tools_answer(name, arguments, result):
    assert DemoTools().run(name, arguments) == result


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calculate", '{"expression": "__import__(1)"}'),
        ("calculate", '{"expression": "9 ** 9"}'),
        ("calculate", "{}"),
        ("calculate", "[1]"),
        ("calculate", "{"),
        ("calculate", '{"expression": "' + "9" * MAX_ARGUMENT_LETTERS + '"}'),
        ("read_file", '{"path": "../README.md"}'),
        ("read_file", '{"path": "/etc/hostname"}'),
        ("nothing", "{}"),
        ("set_value", '{"key": "limo", "value": "many"}'),
    ],
)
def test_demo_tools_refuse_in_words_and_change_nothing(name, arguments):
    tools = DemoTools()
    assert tools.run(name, arguments).startswith("error: ")
    assert tools.store == STORE


def test_a_store_is_its_chats_own_and_bounded():
    first, second = DemoTools(), DemoTools()
    assert first.run("set_value", '{"key": "limo", "value": 5}') == "ok"
    assert (first.store["limo"], second.store["limo"], STORE["limo"]) == (5, 27, 27)
    full = DemoTools({str(n): n for n in range(MAX_KEYS)})
    assert full.run("set_value", '{"key": "new", "value": 5}').startswith("error: the store is")


# Answers of the program below: one that ends, one that would last minutes, one more that ends.
PROGRAM = """
import sys, tempfile
from pathlib import Path
from finwhale.chat_ui.chat_terminal import Settings, chat_on
from finwhale.text.special_tokens import END_THINK
from tests.scripted_engine import ScriptedEngine, answer_ids, byte_tokenizer, scripted_service
with tempfile.TemporaryDirectory() as folder:
    tokenizer = byte_tokenizer(Path(folder))
answers = [("hm", END_THINK, "hello"), ("w", END_THINK, "ab " * 1000), ("z", END_THINK, "after")]
engine = ScriptedEngine(lambda prompt, index: answer_ids(tokenizer, *answers.pop(0)), step_s=0.01)
service = scripted_service(tokenizer, engine)
chat_on(service, settings=Settings(), bytes_per_token=890, greeting="scripted")
print("left", engine.cancelled != [])
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm"}


class PseudoTerminal:
    """A process whose terminal is ours: type into it, wait for what it shows."""

    def __init__(self, arguments):
        self.master, slave = os.openpty()

        def own_terminal():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            # A shell's background job ignores it, and so would what it starts.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.process = subprocess.Popen(
            arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
            # Only so does Ctrl-C become a signal.
            preexec_fn=own_terminal,
        )
        os.close(slave)
        self.seen = ""

    def type(self, text):
        os.write(self.master, text.encode())

    def until(self, text, seconds=45):
        """What it has shown up to `text`, which is dropped from what a later call sees."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen!r}"
            if select.select([self.master], [], [], min(left, 0.5))[0]:
                try:
                    self.seen += os.read(self.master, 4096).decode(errors="replace")
                except OSError:
                    assert text in self.seen, f"ended without {text!r}: {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

    def press_until(self, key, text):
        """Press a key until `text` appears.

        A signal between the prompt and the wait for a key ends no wait: a person presses again.
        """
        for _ in range(20):
            self.type(key)
            with contextlib.suppress(AssertionError):
                return self.until(text, seconds=2)
        raise AssertionError(f"no {text!r} in {self.seen!r}")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.mark.slow
def test_in_a_terminal_a_reply_streams_dim_and_ctrl_c_stops_it_alone():
    terminal = PseudoTerminal([sys.executable, "-c", PROGRAM])
    try:
        terminal.until("Ctrl-C stops a reply")
        terminal.until("> ")
        terminal.type("hi\n")
        terminal.until("\x1b[2mthinking: hm\x1b[0m")
        terminal.until("hello")
        terminal.until("890 bytes per token")
        terminal.until("> ")
        terminal.type("long\n")
        # Three thousand tokens at a hundredth of a second: what is seen now was streamed.
        terminal.until("ab ab ab")
        terminal.type("\x03")
        terminal.until("(stopped)", seconds=10)
        terminal.until("> ")
        terminal.type("again\n")
        terminal.until("after")
        terminal.until("> ")
        # At the prompt it ends nothing either.
        terminal.press_until("\x03", "/quit or end of input leaves")
        terminal.type("/stats\n")
        terminal.until("turns 3, messages 6")
        # End of input counts where a line is read, and not before.
        terminal.until("\n> ")
        terminal.type("\x04")
        terminal.until("left True")
        assert terminal.process.wait(timeout=10) == 0
    finally:
        terminal.close()


COMMAND = """
import sys, tyro
from finwhale.chat_ui.command import Chat
sys.exit(tyro.cli(Chat).run())
"""


@pytest.mark.slow
def test_the_shipped_model_talks_in_a_terminal_and_runs_a_tool():
    arguments = [sys.executable, "-c", COMMAND, "--tools", "--temperature", "0", "--no-thinking"]
    terminal = PseudoTerminal(arguments)
    try:
        terminal.until("> ", seconds=120)
        terminal.type("What is 17 * 3?\n")
        terminal.until("calculate -> 51", seconds=120)
        terminal.until("51", seconds=60)
        terminal.until("890 bytes per token", seconds=60)
        terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.process.wait(timeout=20) == 0
    finally:
        terminal.close()
