"""The chat page in a real browser: headless Chromium through playwright, on loopback.

No `test_` in the name, so `make test` does not collect it and cannot pass it by; `make
test-browser` runs it and fails without a browser. It needs the package `playwright`, which drives
a Chromium of the system (Debian: chromium-headless-shell); CHROMIUM names another one.
FINWHALE_SCREENSHOT=FILE keeps the picture of the last test, for the README.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from finwhale.chat_ui.comparison import Comparison
from finwhale.chat_ui.page import page_routes
from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.shipped import shipped_model
from finwhale.config.accounting import kv_bytes_per_token
from finwhale.config.engine import EngineConfig
from finwhale.config.server import ServerConfig
from finwhale.engine.engine import Engine
from finwhale.model import Numerics
from finwhale.ops import FAST
from finwhale.serve.exchange import ApiKeys
from finwhale.serve.service import Service
from finwhale.text.special_tokens import END_THINK
from finwhale.text.tokenizer import Tokenizer
from tests.e2e.test_chat_page import model_for_text
from tests.e2e.test_chat_terminal import call_of
from tests.scripted_engine import (
    ScriptedEngine,
    answer_ids,
    byte_tokenizer,
    running,
    scripted_service,
    until,
)

HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script><b>bold</b>'
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.fail(f"no Chromium: install one of {', '.join(NAMES)} or set CHROMIUM")
    with sync_playwright() as playwright:
        # A container's root has no sandbox of its own; pages come from this process alone.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


class World:
    """A page over an engine that says the next of `answers`."""

    def __init__(self, tokenizer, *, keys=None):
        self.answers: list[tuple[str, ...]] = []
        self.engine = ScriptedEngine(
            lambda prompt, index: answer_ids(tokenizer, *self.answers.pop(0))
        )
        self.service = scripted_service(tokenizer, self.engine)
        self.comparison = Comparison(model_for_text(), self.service.preparer, max_tokens=1000)
        # What the browser's console complained about.
        self.problems: list[str] = []
        self.keys = keys or ApiKeys()
        self.routes = page_routes(
            self.service, self.keys, bytes_per_token=890, comparison=self.comparison
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def world(tokenizer):
    return World(tokenizer)


@pytest.fixture
def page(world, browser):
    with running(world.service, world.keys, routes=world.routes) as address:
        context = browser.new_context()
        opened = context.new_page()
        problems = world.problems
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        asked: list[str] = []
        opened.on("request", lambda request: asked.append(request.url))
        opened.goto(address)
        expect(opened.locator("#model")).to_have_text("finwhale")
        yield opened
        context.close()
    # Neither an error of the script nor a request that the policy had to stop; a refused request
    # is one that a test asked for.
    assert [text for text in problems if "status of" not in text] == []
    assert all(url.startswith((address, "data:")) for url in asked)


def say(page: Page, text: str) -> None:
    """Send `text` and wait for the end of the turn."""
    page.fill("#text", text)
    page.click("#send")
    expect(page.locator("#stop")).to_be_disabled(timeout=300_000)


def last_turn(page: Page):
    return page.locator("#talk .turn").last


def test_page_shows_reasoning_folded_then_text_and_the_figures(page, world):
    world.answers = [("because", END_THINK, "the answer")]
    say(page, "a question")
    turn = last_turn(page)
    assert turn.locator(".said").inner_text() == "the answer"
    assert turn.locator("details").get_attribute("open") is None
    assert not turn.locator("details div").is_visible()
    turn.locator("summary").click()
    assert turn.locator("details div").inner_text() == "because"
    prompt = len(world.engine.added[0][0])
    assert page.inner_text("#prompt") == f"{prompt:,}"
    assert page.inner_text("#hits") == "0"
    # Seven bytes, the tag, ten bytes and the end marker.
    assert page.inner_text("#reply") == "19"
    assert page.inner_text("#reasoned") == "7"
    assert page.inner_text("#bytes") == "890"
    held, unit = page.inner_text("#held").split()
    assert (float(held), unit) == (pytest.approx(0.89 * (prompt + 19), abs=0.06), "kB")


def test_page_counts_cache_hits_of_the_engine(page, world):
    world.answers = [("one",), ("one",)]
    page.uncheck("#thinking")
    say(page, "same")
    page.click("#reset")
    say(page, "same")
    assert page.inner_text("#hits") == f"{len(world.engine.added[0][0]) - 1:,}"


def test_page_sends_the_turns_before_and_the_settings(page, world, tokenizer):
    world.answers = [("first",), ("x", END_THINK, "second")]
    page.uncheck("#thinking")
    say(page, "one")
    page.check("#thinking")
    page.fill("#effort", "7")
    say(page, "two")
    off, on = (tokenizer.decode(prompt) for prompt, _, _ in world.engine.added)
    assert off.endswith(END_THINK)
    assert on.endswith("<think>")
    assert on.index("one") < on.index("first") < on.index("two")
    assert ": 7" in on.partition("one")[0] or " 7" in on.partition("one")[0]


def test_page_shows_tokens_before_the_reply_has_ended(page, world):
    world.engine.step_s = 0.02
    world.answers = [("x", END_THINK, "ab " * 500)]
    page.fill("#text", "long")
    page.click("#send")
    expect(last_turn(page).locator(".said")).to_contain_text("ab")
    assert page.is_enabled("#stop")
    page.click("#stop")
    expect(page.locator("#stop")).to_be_disabled()
    shown = last_turn(page).locator(".said").inner_text()
    assert shown.startswith("ab")
    assert len(shown) < 1000
    assert "(stopped)" in last_turn(page).inner_text()
    # The engine heard of it, and what was said stays in the chat.
    until(lambda: world.engine.cancelled)
    world.engine.step_s = 0.0
    world.answers = [("y", END_THINK, "next")]
    say(page, "more")
    assert last_turn(page).locator(".said").inner_text() == "next"


def test_page_runs_the_calls_of_demo_tools(page, world, tokenizer):
    page.uncheck("#thinking")
    page.check("#tools")
    world.answers = [call_of("calculate", expression="17 * 3"), ("51",)]
    say(page, "what is 17 * 3")
    call = last_turn(page).locator(".call")
    assert call.inner_text().startswith('calculate {"expression": "17 * 3"}')
    assert call.locator(".soft").inner_text() == "→ 51"
    assert last_turn(page).locator(".said").inner_text() == "51"
    assert "51" in tokenizer.decode(world.engine.added[1][0])


def test_page_keeps_a_chats_values_to_itself(page, world):
    page.uncheck("#thinking")
    page.check("#tools")
    world.answers = [
        call_of("set_value", key="limo", value="5"),
        call_of("get_value", key="limo"),
        ("5",),
        call_of("get_value", key="limo"),
        ("27",),
    ]
    say(page, "set it and read it")
    assert last_turn(page).locator(".call .soft").all_inner_texts() == ["→ ok", "→ 5"]
    page.click("#reset")
    say(page, "read it")
    assert last_turn(page).locator(".call .soft").all_inner_texts() == ["→ 27"]


def test_page_shows_markup_as_text_wherever_it_comes_from(page, world):
    page.check("#tools")
    call = call_of("read_file", path=HOSTILE)
    world.answers = [(HOSTILE, END_THINK, HOSTILE, *call), (END_THINK, HOSTILE)]
    say(page, HOSTILE)
    assert page.locator("#talk .user .said").inner_text() == HOSTILE
    turn = last_turn(page)
    assert turn.locator(".said").first.inner_text().startswith(HOSTILE)
    assert turn.locator("img, b, script").count() == 0
    # Without tools, whose declarations would make the scored prompt long.
    page.click("#reset")
    page.uncheck("#tools")
    world.answers = [("hm", END_THINK, HOSTILE)]
    say(page, HOSTILE)
    page.locator(".switch input").first.uncheck()
    expect(page.locator("#result")).to_be_visible(timeout=30_000)
    assert "<b>bold</b>" in page.text_content("#tokens")
    assert page.locator("#tokens img, #tokens b").count() == 0
    assert page.evaluate("window.broken") is None


def test_page_policy_stops_a_script_that_got_in(page, world):
    # The control of the test above: markup as HTML would be an element, and still not run.
    page.evaluate("document.getElementById('talk').innerHTML = '<b id=got>in</b>'")
    assert page.locator("#got").count() == 1
    ran = page.evaluate(
        """() => { const s = document.createElement("script");
        s.textContent = "window.broken = 1"; document.body.append(s);
        return window.broken === undefined; }"""
    )
    assert ran
    assert "Content Security Policy" in world.problems.pop()


def test_page_compares_the_last_reply_without_engram_and_back(page, world):
    world.answers = [("hm", END_THINK, "yes")]
    say(page, "a question")
    box = page.locator('.switch input[value="engram"]')
    box.uncheck()
    expect(page.locator("#result")).to_be_visible(timeout=30_000)
    assert page.text_content("#tokens").startswith("hm")
    with_, without = (float(page.inner_text(f"#{side}")) for side in ("with", "without"))
    assert with_ != without
    change = float(page.inner_text("#change"))
    assert change == pytest.approx(without - with_, abs=2e-4)
    assert page.locator("#tokens span[class]").count() > 0
    box.check()
    expect(page.locator("#result")).to_be_hidden()
    # What cannot matter here is said not to.
    page.locator('.switch input[value="candidate_pool"]').uncheck()
    expect(page.locator("#result")).to_be_visible(timeout=30_000)
    assert page.text_content("#state").startswith(("Candidate pool: it holds", "Took"))


def test_page_says_why_a_comparison_is_refused(page, world):
    page.locator('.switch input[value="engram"]').uncheck()
    expect(page.locator("#state")).to_have_text("There is no reply to compare yet.")
    world.answers = [("hm", END_THINK, "yes")]
    assert world.comparison._busy.acquire(blocking=False)
    try:
        say(page, "a question")
        expect(page.locator("#state")).to_contain_text("another comparison runs")
    finally:
        world.comparison._busy.release()
    assert not page.is_visible("#result")


def test_page_tells_a_refused_turn_and_goes_on(page, world):
    world.answers = [("hm", END_THINK, "fine")]
    # The scripted engine has a context of 4,096 tokens, and here each byte is one.
    say(page, "x" * 5000)
    assert "shorten the prompt" in last_turn(page).locator(".problem").inner_text()
    say(page, "short")
    assert last_turn(page).locator(".said").inner_text() == "fine"


def test_page_works_with_a_key(tokenizer, browser):
    world = World(tokenizer, keys=ApiKeys({"open": "me"}))
    with running(world.service, world.keys, routes=world.routes) as address:
        page = browser.new_page()
        page.goto(address)
        expect(page.locator("#model")).to_contain_text("API key")
        page.fill("#key", "open")
        page.locator("#key").blur()
        expect(page.locator("#model")).to_have_text("finwhale")
        world.answers = [("hm", END_THINK, "welcome")]
        say(page, "hello")
        assert last_turn(page).locator(".said").inner_text() == "welcome"
        page.close()


@pytest.mark.timeout(600)
def test_page_with_the_shipped_model_calls_a_tool_and_shows_what_engram_is_worth(browser, tmp_path):
    folder = shipped_model()
    tokenizer = Tokenizer.from_file(folder)
    model = load_model(folder, numerics=Numerics(), ops=FAST).model
    engine = Engine(model, EngineConfig(num_blocks=128, max_sequences=2))
    config = ServerConfig(model_names=("finwhale-mini",), temperature=0.0)
    service = Service.of_engine(engine, tokenizer, config)
    bytes_per_token = kv_bytes_per_token(model.config.text_config)
    comparison = Comparison(model, service.preparer)
    routes = page_routes(service, bytes_per_token=bytes_per_token, comparison=comparison)
    with running(service, routes=routes) as address:
        page = browser.new_page(viewport={"width": 1180, "height": 830})
        page.goto(address)
        expect(page.locator("#model")).to_have_text("finwhale-mini")
        page.check("#tools")
        say(page, "Read notes/whale.txt.")
        assert "The colour of the whale is blue." in last_turn(page).locator(".call").inner_text()
        say(page, "Calculate 17 * 3.")
        assert last_turn(page).locator(".call .soft").inner_text() == "→ 51"
        assert int(page.inner_text("#hits").replace(",", "")) > 0
        page.locator('.switch input[value="engram"]').uncheck()
        expect(page.locator("#result")).to_be_visible(timeout=300_000)
        assert float(page.inner_text("#change")) != 0
        for details in page.locator("details").all()[-1:]:
            details.locator("summary").click()
        file = Path(os.environ.get("FINWHALE_SCREENSHOT") or tmp_path / "page.png")
        page.screenshot(path=str(file))
        page.close()
    assert 10_000 < file.stat().st_size <= 200_000
