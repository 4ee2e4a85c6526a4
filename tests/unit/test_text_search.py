"""The search for stop texts equals an obvious one at every cut; its memory and work are linear."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finwhale.text.output_parser import MAX_STOP_CHARS, MAX_STOPS, OutputParser
from finwhale.text.text_search import TextSearch


def first(text, wanted):
    """The text that is complete first: ends are tried one by one; ties go to the first listed."""
    for end in range(1, len(text) + 1):
        for each in wanted:
            if text[:end].endswith(each):
                return end, each
    return None


def num_open(text, wanted):
    """The longest end of `text` that is a proper beginning of a wanted text."""
    ends = [text[begin:] for begin in range(len(text))]
    return max((len(e) for e in ends for w in wanted if w.startswith(e) and w != e), default=0)


@settings(max_examples=400)
@given(
    text=st.text("ab", min_size=3, max_size=24),
    wanted=st.lists(st.text("ab", min_size=3, max_size=7), max_size=3)
    | st.lists(st.text("ab", min_size=1, max_size=2), max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=6),
)
# A text that begins again inside its own beginning, once and through two shorter ones.
@example(text="aaab", wanted=["aab"], cuts=[])
@example(text="aabaaabaaaa", wanted=["aabaaaa"], cuts=[])
@example(text="aabaaabaabaaab", wanted=["aabaaaba", "abab"], cuts=[3, 7])
@example(text="abcd", wanted=["abcde", "cd", "bcd"], cuts=[])
def test_any_cut_finds_what_is_complete_first(text, wanted, cuts):
    search = TextSearch(wanted)
    ends = sorted(min(cut, len(text)) for cut in cuts)
    at, want = 0, first(text, wanted)
    for begin, end in zip([0, *ends], [*ends, len(text)], strict=True):
        found = search.feed(text[begin:end])
        if found is not None:
            assert (begin + found[0], found[1]) == want
            assert search.num_open == 0
            return
        at = end
        assert search.num_open == num_open(text[:at], wanted)
    assert want is None


def test_a_search_begins_anew_behind_what_it_found():
    search = TextSearch(["aa"])
    assert [search.feed(letter) for letter in "aaa"] == [None, (1, "aa"), None]
    assert search.num_open == 1


def peak(chars):
    """Bytes of a parser whose stop texts have all matched but for their last character."""
    stop = tuple(chr(97 + i) + "x" * (chars - 2) + "y" for i in range(MAX_STOPS))
    tracemalloc.start()
    parser = OutputParser(thinking=False, tools_declared=False, stop=stop)
    for text in stop:
        parser.feed(text[:-1])
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return size


def test_memory_is_linear_in_the_stop_texts_and_given_back():
    peak(8)
    small, large = peak(MAX_STOP_CHARS // 4), peak(MAX_STOP_CHARS)
    # Every beginning of every text, kept as a text, would be 16 times the small one, and 134 MB.
    assert large < 6 * small
    assert large < 40 * MAX_STOPS * MAX_STOP_CHARS
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    stop = tuple(chr(97 + i) * MAX_STOP_CHARS for i in range(MAX_STOPS))
    OutputParser(thinking=False, tools_declared=False, stop=stop).feed("a" * MAX_STOP_CHARS)
    del stop
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept < 20_000


class _Counted(str):
    """A text that counts how often one of its characters is looked at."""

    num_reads = 0

    def __getitem__(self, key):
        _Counted.num_reads += 1
        return str.__getitem__(self, key)


@pytest.mark.parametrize("wanted", ["a" * 400 + "b", "ab" * 200 + "c", "a" * 401])
def test_work_is_linear_in_what_was_fed(wanted):
    def reads(num):
        _Counted.num_reads = 0
        search = TextSearch([_Counted(wanted)])
        for _ in range(num):
            search.feed("ab" if wanted.startswith("ab") else "aaaaab"[: 5 + (wanted[-1] != "b")])
        return _Counted.num_reads

    small, large = reads(500), reads(2000)
    assert large <= 5 * small
    assert large <= 8 * 2000 * 6
