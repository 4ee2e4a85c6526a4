"""Cleaning: what is removed, what must stay, by hand-made examples."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finwhale.data.clean import (
    MAX_LINE_CHARS,
    clean_text,
    dropped_document_reason,
    dropped_line_reason,
    html_to_text,
    rst_to_text,
    tagged_to_text,
    wordnet_to_texts,
)


@pytest.mark.parametrize(
    "line",
    [
        "Write to jane.doe@example.org for more.",
        "# Author: J <jd+code@mail.example.co.uk>",
        "jane (at) example.com",
        "a@b.net",
    ],
)
def test_line_with_an_address_is_dropped(line):
    assert dropped_line_reason(line) == "e-mail address"


@pytest.mark.parametrize(
    "line",
    [
        "y = A @ b.T",
        "@property",
        "loss = (X@W.sum()).mean()",
        "x @ y.reshape(-1)",
        "@app.route('/')",
        "sold 3 apples @ 2 shillings.",
        "",
    ],
)
def test_line_of_code_with_the_same_sign_stays(line):
    assert dropped_line_reason(line) is None


def test_minified_line_is_dropped_and_long_prose_is_not():
    assert dropped_line_reason("a=b;" * 101) == "minified line"
    assert dropped_line_reason("a=b;" * 100) is None  # 400 characters: still a line
    assert dropped_line_reason("word " * 500) is None


def test_dropped_lines_are_counted_and_the_others_stay():
    cleaned = clean_text("one\nme@example.org\ntwo\n" + "x" * 500 + "\nthree")
    assert cleaned.text == "one\ntwo\nthree\n"
    assert dict(cleaned.dropped_lines) == {"e-mail address": 1, "minified line": 1}


def test_characters_that_are_no_text_go():
    text = "\ufeffa\x00b\u200bc\r\nu\x08un\x08nd\x1b  \t\n\n\n\n\n  e\u0301\f"
    assert clean_text(text).text == "abc\nund\n\n\n  \u00e9\n"


@given(text=st.text(alphabet=st.sampled_from("ab .\n\r\t\x08\x00e\u0301@\u00c5\u1161\u1100")))
def test_clean_text_is_a_fixed_point(text):
    once = clean_text(text).text
    assert clean_text(once).text == once
    assert unicodedata.is_normalized("NFC", once)
    assert not {"\r", "\x00", "\x08"} & set(once)


@pytest.mark.parametrize("length", [MAX_LINE_CHARS - 1, MAX_LINE_CHARS, MAX_LINE_CHARS + 1, 45_678])
def test_no_line_is_longer_than_the_cap_and_no_word_is_lost(length):
    line = ("A sentence of words. " * (length // 20 + 1))[:length].strip()
    cleaned = clean_text(line).text
    assert max(map(len, cleaned.splitlines())) <= MAX_LINE_CHARS
    assert cleaned.split() == line.split()
    assert (len(cleaned.splitlines()) == 1) is (len(line) <= MAX_LINE_CHARS)


def test_long_line_without_sentences_is_cut_at_the_cap():
    cleaned = clean_text(("word " * 5_000).strip()).text
    assert [len(part) for part in cleaned.splitlines()][:2] == [MAX_LINE_CHARS - 1] * 2
    assert len(cleaned.split()) == 5_000


def test_etext_frame_goes_and_a_book_without_one_stays():
    body = "Line of the book.\n" * 50
    framed = f"Legal.\n*** START OF THIS EBOOK ***\n{body}*** END OF THIS EBOOK ***\nLegal.\n"
    assert clean_text(framed).text == body
    assert clean_text(body).text == body


def test_documents_are_dropped_for_their_reason():
    assert dropped_document_reason("") == "too short"
    assert dropped_document_reason("x" * 63) == "too short"
    assert dropped_document_reason("Plain words. " * 5) is None
    assert dropped_document_reason("12.5 13.5 | 99\n" * 20) == "not language"


def test_html_keeps_text_and_code_and_drops_the_rest():
    page = (
        "<html><head><title>T</title><style>x{}</style></head><body>"
        '<div class="a navheader">Prev<div>Up</div>Next</div>'
        "<h1>Head &amp; tail</h1><p>One\n   two <b>three</b></p><script>if (a<b) {}</script>"
        '<a class="toc"/><pre>for x:\n    y\n</pre><ul><li>p<li>q</ul><img class="menu">end'
        "</body></html>"
    )
    lines = [line for line in html_to_text(page).splitlines() if line.strip()]
    assert lines == ["Head & tail", "One two three", "for x:", "    y", "p", "q", "end"]


def test_html_without_a_skipped_class_keeps_that_element():
    assert "Prev" in html_to_text('<div class="other">Prev</div>')
    assert "Prev" not in html_to_text('<div class="navheader">Prev</div>')


def test_rst_loses_roles_and_anchors_only():
    source = (
        ".. _tut:\n\nTitle\n=====\n\n.. index:: single: x\n   pair: y; z\n\n"
        "Use :keyword:`!while` or :py:func:`~os.walk`, :ref:`this page <tut>`.\n\n"
        ".. code-block:: python\n\n   a = 'b'\n"
    )
    expected = (
        "\nTitle\n=====\n\n\nUse `while` or `os.walk`, `this page`.\n\n"
        ".. code-block:: python\n\n   a = 'b'\n"
    )
    assert rst_to_text(source) == expected


def test_tagged_words_become_a_sentence():
    tagged = "\n\tThe/at jury/nn said/vbd ``/`` no/at (/( 3/4/cd )/) evidence/nn ''/'' ,/, ./.\n\n"
    assert tagged_to_text(tagged) == 'The jury said "no (3/4) evidence",.'
    assert tagged_to_text("") == ""


WORDNET = (
    "  1 This is a licence line\n"
    "00001740 03 n 01 entity 0 001 ~ 00001930 n 0000 | that which is  \n"
    "00001930 03 n 02 physical_entity 0 thing(p) 1 002 @ 00001740 n 0000 + 00009999 v 0101 "
    '| an entity that exists; "it | was"  \n'
)


def test_wordnet_record_becomes_a_sentence():
    [(name, text)] = wordnet_to_texts({"data.noun": WORDNET})
    assert name == "data.noun#0"
    assert text.splitlines() == [
        "entity (noun): that which is",
        'physical entity, thing (noun): an entity that exists; "it | was" (a kind of entity)',
    ]


@pytest.mark.parametrize(("count", "parts"), [(0, 0), (255, 1), (256, 1), (257, 2)])
def test_wordnet_documents_hold_256_records(count, parts):
    lines = [f"{n:08d} 03 v 01 w{n} 0 000 | g" for n in range(count)]
    texts = [text for _, text in wordnet_to_texts({"d": "\n".join(lines)})]
    assert len(texts) == parts
    assert sum(len(text.splitlines()) for text in texts) == count
