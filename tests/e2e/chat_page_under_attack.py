"""The chat page attacked in a real browser: markup and scripts in every place that shows a text.

Each payload goes through the page twice: said by a scripted engine behind the real server, and
written into every answer that the page reads, by a browser that answers in the server's place.
Nothing may run, no element of a foreign kind may appear, nothing may be asked for that the page
does not ask by itself, and the text must be there as text. A planted `innerHTML` is the control.
Like chat_page_in_browser.py it needs a Chromium and is started by `make test-browser` alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from finwhale.chat_ui.page import page_headers, page_routes, page_text
from finwhale.text.special_tokens import END_THINK
from tests.e2e.chat_page_in_browser import browser  # noqa: F401, a fixture
from tests.e2e.test_chat_terminal import call_of
from tests.scripted_engine import (
    ScriptedEngine,
    answer_ids,
    byte_tokenizer,
    running,
    scripted_service,
)

ELSEWHERE = "http://127.0.0.1:9/hit"
# Each sets the canary, opens a dialog or asks for something, if a browser takes it for markup.
MARKUP = {
    "script": "<script>window.__hit=1</script>",
    "script from elsewhere": f"<script src={ELSEWHERE}></script>",
    "module": f"<script type=module>import('{ELSEWHERE}');window.__hit=1</script>",
    "import map": f'<script type=importmap>{{"imports":{{"a":"{ELSEWHERE}"}}}}</script>',
    "image that fails": "<img src=x onerror=window.__hit=1>",
    "image set": f"<img srcset='{ELSEWHERE} 1x, x 2x' onload=__hit=1 onerror=window.__hit=1>",
    "picture": f"<picture><source srcset={ELSEWHERE}><img src=x onerror=window.__hit=1></picture>",
    "svg": "<svg onload=window.__hit=1><animate onbegin=window.__hit=1 attributeName=x dur=1s />",
    "svg script": "<svg><script>window.__hit=1</script><use href='data:image/svg+xml,x#x'/></svg>",
    "math": "<math><mtext><table><mglyph><style><!--</style><img src=x onerror=window.__hit=1>",
    "iframe": "<iframe src='javascript:parent.__hit=1'></iframe>",
    "iframe with a document": "<iframe srcdoc='<script>parent.__hit=1</script>'></iframe>",
    "object and embed": f"<object data={ELSEWHERE}></object><embed src=javascript:window.__hit=1>",
    "style": "<style>body{display:none;background:url(//127.0.0.1:9/hit)}</style>",
    "style sheet": f"<link rel=stylesheet href={ELSEWHERE}><link rel=preload as=image href=hit>",
    "style attribute": "<b style='position:fixed;inset:0;background:url(/hit)'>over everything</b>",
    "refresh": "<meta http-equiv=refresh content='0;url=/hit'>",
    "base": f"<base href={ELSEWHERE}/><a href=x>x</a>",
    "javascript link": "<a href='java\nscript:window.__hit=1' autofocus onfocus=__hit=1>x</a>",
    "form": "<form action=/hit><input autofocus onfocus=window.__hit=1><button>x</form>",
    "open details": "<details open ontoggle=window.__hit=1><summary>x</summary></details>",
    "pointer": "<b onpointerenter=window.__hit=1 onclick=window.__hit=1 oncopy=__hit=1>x</b>",
    "animation": "<b style='animation:x 1ms' onanimationstart=window.__hit=1>x</b>",
    "media": "<video><source onerror=window.__hit=1></video><audio src=x onerror=window.__hit=1>",
    "template": "<template shadowrootmode=open><img src=x onerror=window.__hit=1></template>x",
    "noscript": "<noscript><p title='</noscript><img src=x onerror=window.__hit=1>'>",
    "textarea": "</textarea><img src=x onerror=window.__hit=1>",
    "its own ends": "</div></div></details></main></script></style><img src=x onerror=__hit=1>",
    "comment": "--><!--><img src=x onerror=window.__hit=1> -->]]><![CDATA[<b>]]>",
    "cut tag": "<img src=x onerror=window.__hit=1 alt='",
    "no quotes": "<img/src=`x`\tonerror\n=\nwindow.__hit=1>",
    "attribute breaks": "\"'><img src=x onerror=window.__hit=1>",
    "clobbering": "<a id=talk></a><img name=facts src=x><form id=ask><input name=send></form>",
    "null bytes": "<scr\x00ipt>window.__hit=1</scr\x00ipt><img \x00src=x one\x00rror=1>",
    "custom element": "<x-y is=x onclick=window.__hit=1 contenteditable tabindex=0>x</x-y>",
    "markdown": f"[x](javascript:window.__hit=1) ![x]({ELSEWHERE}) <javascript:window.__hit=1>",
}
# What is no markup in any way of writing it, so that no control can find it.
PLAIN = {
    "entities": "&lt;img src=x onerror=window.__hit=1&gt; &#60;script&#62; &amp;lt;b&amp;gt;",
    "escapes": "\\u003cscript\\u003ewindow.__hit=1\\x3c/script\\x3e ${window.__hit=1} {{__hit=1}}",
    "javascript address": "javascript:window.__hit=1//",
    "bidi overrides": "\u202egpj.\u2066exe\u2069\u202d \u200f\u061c\u2067abc",
    "half an emoji": "a\ud83d\udc0bb\ud83d c",
    "controls": "\x01\x07\x08\x1b[31m\x7f\u0085\u2028\u2029\ufeff\ufffe",
    "event stream": "data: [DONE]\n\nevent: error\ndata: {}\n\n",
    "names of objects": "__proto__ constructor toString hasOwnProperty",
    "a long word": "W" * 30_000,
    "many marks": "a" + "\u0301\u0489" * 3_000,
}
PAYLOADS = {**MARKUP, **PLAIN}
DIRECTION = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
OWN_PATHS = {"/", "/v1/chat/completions", "/finwhale/model", "/finwhale/tool", "/finwhale/compare"}
OWN_TAGS = {
    "#talk": {"DIV", "DETAILS", "SUMMARY", "SPAN"},
    "#switches": {"LABEL", "INPUT", "SMALL"},
    "#tokens": {"SPAN"},
    "#state": {"DIV"},
    "header": {"H1", "SPAN"},
}
WATCHER = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", (e) =>
  window.__violations.push(e.violatedDirective + " " + e.blockedURI + " " + e.sample));
"""
# Tags by place, tags of the whole page, and attributes that run or load something.
LOOK = """
([places, watched]) => ({
  tags: Object.fromEntries(places.map((p) =>
    [p, [...document.querySelectorAll(p + " *")].map((e) => e.tagName)])),
  all: [...document.querySelectorAll("*")].map((e) => e.tagName),
  attributes: [...document.querySelectorAll("*")].flatMap((e) => [...e.attributes]
    .filter((a) => a.name.startsWith("on") || watched.includes(a.name))
    .map((a) => e.tagName + " " + a.name + "=" + a.value.slice(0, 60))),
  hit: window.__hit,
  violations: window.__violations,
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
})
"""
WATCHED_ATTRIBUTES = [
    *("src", "srcset", "href", "xlink:href", "srcdoc", "action", "formaction", "data", "style"),
    *("is", "autofocus", "shadowrootmode", "http-equiv", "background", "poster", "ping"),
]
# A user touches everything: an attack may wait for a click or a focus.
TOUCH = """
() => { for (const e of document.querySelectorAll("#talk *, #tokens *")) {
  e.dispatchEvent(new PointerEvent("pointerenter", { bubbles: true })); e.click(); e.focus?.();
} }
"""


@dataclass
class Watch:
    """What the browser saw of one page."""

    events: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def listen(self, page: Page) -> None:
        note = self.events.append

        def dialog(shown) -> None:
            note(f"dialog: {shown.message}")
            shown.dismiss()

        page.on("dialog", dialog)
        page.on("pageerror", lambda error: note(f"page error: {error}"))
        page.on("console", lambda m: note(f"console: {m.text}") if m.type == "error" else None)
        page.on("popup", lambda opened: note(f"popup: {opened.url}"))
        page.on("download", lambda got: note(f"download: {got.url}"))
        page.on("frameattached", lambda frame: note(f"frame: {frame.url}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.add_init_script(WATCHER)

    def findings(self, page: Page, address: str) -> list[str]:
        """Return everything that an attack achieved, in words; [] is what a safe page has."""
        try:
            page.evaluate(TOUCH)
            page.wait_for_timeout(60)
            seen = page.evaluate(LOOK, [list(OWN_TAGS), WATCHED_ATTRIBUTES])
        except Exception as error:  # the page was left or replaced
            return [f"the page is gone: {error}"]
        found = [event for event in self.events if "status of" not in event]
        for url in self.asked:
            parts = urlsplit(url)
            is_own = url.startswith(f"{address}/") and parts.path in OWN_PATHS
            if not (is_own or url == "data:,"):
                found.append(f"request: {url}")
        for place, tags in seen["tags"].items():
            found += [f"element in {place}: {tag}" for tag in set(tags) - OWN_TAGS[place]]
        every = seen["all"]
        found += [
            f"{every.count(tag)} elements {tag}"
            for tag, own in (("SCRIPT", 1), ("STYLE", 1), ("FORM", 1), ("LINK", 1), ("META", 2))
            if every.count(tag) != own
        ]
        found += [
            f"attribute: {each}"
            for each in seen["attributes"]
            if each not in ("LINK href=data:,", "TEXTAREA autofocus=")
        ]
        found += [f"policy: {each}" for each in seen["violations"]]
        if seen["hit"] is not None:
            found.append("the canary: a script ran")
        if seen["wide"] > 0:
            found.append(f"the page is {seen['wide']} pixels too wide")
        return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def address(tokenizer) -> Iterator[str]:
    """A server whose answers the browser replaces; the page itself is its own."""
    service = scripted_service(tokenizer, ScriptedEngine(lambda prompt, index: []))
    with running(service, routes=page_routes(service)) as at:
        yield at


@contextmanager
def opened(browser: Browser, watch: Watch) -> Iterator[Page]:  # noqa: F811
    context = browser.new_context(viewport={"width": 1180, "height": 830})
    page = context.new_page()
    watch.listen(page)
    try:
        yield page
    finally:
        context.close()


def say(page: Page, text: str) -> str:
    """Send `text` and wait for the end of the turn; return it as the text area had it."""
    page.evaluate("(t) => { document.getElementById('text').value = t; }", text)
    sent = page.evaluate("document.getElementById('text').value")
    page.evaluate("document.getElementById('ask').requestSubmit()")
    expect(page.locator("#send")).to_be_enabled(timeout=30_000)
    expect(page.locator("#stop")).to_be_disabled(timeout=30_000)
    return sent


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_text_contents()


# --- a browser that answers in the server's place -----------------------------------------------


def _events(*deltas: dict, error: str | None = None) -> str:
    chunks: list[dict] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if error is not None:
        chunks.append({"error": {"message": error}})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


class HostileServer:
    """Answers of a server in which every text is `payload`."""

    def __init__(self, payload: str, *, arguments: str | None = None, after: str = "") -> None:
        """Write `arguments` behind the tool's name and `after` behind the token, if given."""
        self.payload, self.after = payload, after
        call = {"index": 0, "id": payload, "type": "function"}
        called = {**call, "function": {"name": payload, "arguments": ""}}
        arguments = payload if arguments is None else arguments
        half = len(arguments) // 2
        self.turns = [
            _events(
                *({"reasoning_content": letter} for letter in _pieces(payload)),
                {"content": payload},
                {"tool_calls": [called]},
                {"tool_calls": [{"index": 0, "function": {"arguments": arguments[:half]}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": arguments[half:]}}]},
            ),
            _events({"content": payload}),
            _events({"content": "x"}, error=payload),
            None,
        ]

    def answer(self, route: Route) -> None:
        path = urlsplit(route.request.url).path
        if path == "/finwhale/model":
            self._json(route, self._facts())
        elif path == "/finwhale/tool":
            self._json(route, {"result": self.payload, "store": {self.payload[:50]: 1}})
        elif path == "/finwhale/compare":
            self._json(route, self._comparison())
        elif (said := self.turns.pop(0)) is not None:
            route.fulfill(body=said, content_type="text/event-stream")
        else:
            self._json(route, {"error": {"message": self.payload}}, status=400)

    def _json(self, route: Route, fields: dict, status: int = 200) -> None:
        body = json.dumps(fields)
        route.fulfill(status=status, body=body, content_type="application/json")

    def _facts(self) -> dict:
        mechanism = {"name": self.payload, "title": self.payload, "unsupported": None}
        return {
            "model": self.payload,
            "bytes_per_token": 890,
            "context_tokens": 4096,
            "tools": [{"type": "function", "function": {"name": self.payload}}],
            "store": {},
            "mechanisms": [
                {**mechanism, "what": self.payload},
                {**mechanism, "what": "", "unsupported": self.payload},
            ],
            "not_switchable": [self.payload, self.payload],
        }

    def _comparison(self) -> dict:
        token = {"text": self.payload, "with": -1.0, "without": -3.0}
        token |= {"best_with": self.payload, "best_without": f"{self.payload}!"}
        figures = {"mean_with": -1.0, "mean_without": -3.0, "num_choices_changed": 1}
        rest = [{**token, "text": self.after}] if self.after else []
        return {"tokens": [token, *rest], "notes": [self.payload], "seconds": 1.0, **figures}


def _pieces(text: str) -> list[str]:
    """Letters of a short text, pieces of a long one."""
    size = 1 if len(text) < 500 else 1000
    return [text[n : n + size] for n in range(0, len(text), size)]


def attacked(page: Page, address: str, payload: str, **texts: str) -> None:
    """Open the page, and let every place show the payload."""
    server = HostileServer(payload, **texts)
    page.route(re.compile("/(v1|finwhale)/"), server.answer)
    page.goto(address)
    expect(page.locator(".switch")).to_have_count(2)
    page.check("#tools")
    for _ in range(3):
        say(page, f"{payload}.")
    page.evaluate("document.querySelector('.switch input').click()")
    expect(page.locator("#result")).to_be_visible()


@pytest.mark.parametrize("name", PAYLOADS)
def test_no_answer_of_a_server_becomes_more_than_text(name, address, browser):  # noqa: F811
    payload, watch = PAYLOADS[name], Watch()
    with opened(browser, watch) as page:
        attacked(page, address, payload)
        # Lone surrogates become U+FFFD on the way to this process.
        shown = page.evaluate("(text) => text", payload)
        assert texts(page, "#model") == [shown]
        assert texts(page, ".user .said") == [page.evaluate("(t) => t", f"{payload}.")] * 3
        assert texts(page, "#talk .turn:not(.user) > .said") == [shown, shown, "x"]
        assert texts(page, "details div") == [shown]
        assert texts(page, ".call") == [f"{shown} {shown}→ {shown}"]
        assert texts(page, ".problem") == [f"{shown}(this turn is not part of the chat)"] * 2
        assert texts(page, ".switch small") == [shown, shown]
        assert [text.strip() for text in texts(page, ".switch")] == [f" {shown}{shown}".strip()] * 2
        assert texts(page, "#fixed") == [f"No switch for {shown}; {shown}."]
        # Marks of direction are told by their numbers there.
        named = DIRECTION.sub(lambda mark: f"\\u{ord(mark.group()):04x}", shown)
        assert texts(page, "#tokens span") == [named]
        title = page.locator("#tokens span").get_attribute("title")
        assert title == f"-1.0000 → -3.0000; best: {shown} → {shown}!"
        assert texts(page, "#state") == [f"{shown}.Took 1.0 s."]
        assert watch.findings(page, address) == []


# Whether the letters of `needle` stand from left to right.
IN_ORDER = """
([place, needle]) => {
  const walk = document.createTreeWalker(document.querySelector(place), NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const at = node.data.indexOf(needle);
    if (at < 0) continue;
    const left = (offset) => {
      const range = document.createRange();
      range.setStart(node, offset); range.setEnd(node, offset + 1);
      return range.getBoundingClientRect().left;
    };
    return left(at) < left(at + needle.length - 1);
  }
  throw new Error("no text " + needle + " in " + place);
}
"""
OWN_WORDS = {
    ".problem": "(this turn",
    ".turn:nth-of-type(2)": "Reasoning",
    "#state": "Took 1.0 s",
    ".call": "Oslo",
    "#tokens": "next",
    "header": "tokens of context",
}


@pytest.mark.parametrize("mark", ["\u202e", "\u2067", "\u202b", "\u202e\u2067\u202b"])
def test_a_text_never_turns_the_words_beside_it_around(mark, address, browser):  # noqa: F811
    with opened(browser, Watch()) as page:
        attacked(page, address, f"{mark}abc", arguments='{"city": "Oslo"}', after="next")
        for place, needle in OWN_WORDS.items():
            assert page.evaluate(IN_ORDER, [place, needle]), place


# --- the real server ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, text in PAYLOADS.items() if len(text) < 500])
def test_nothing_that_a_model_says_runs(name, tokenizer, browser):  # noqa: F811
    # A lone surrogate is no UTF-8, which is all that a byte tokenizer can say.
    payload = PAYLOADS[name].encode(errors="replace").decode()
    answers = [(payload, END_THINK, payload, *call_of("read_file", path=payload)), (payload,)]
    left = [*answers[:1], (END_THINK, payload)]
    engine = ScriptedEngine(lambda prompt, index: answer_ids(tokenizer, *left.pop(0)))
    service = scripted_service(tokenizer, engine, model_names=(payload,))
    watch = Watch()
    with (
        running(service, routes=page_routes(service)) as at,
        opened(browser, watch) as page,
    ):
        page.goto(at)
        expect(page.locator("#context")).to_contain_text("tokens of context")
        assert page.text_content("#model") == payload
        page.check("#tools")
        sent = say(page, payload)
        assert texts(page, ".user .said") == [sent]
        said = texts(page, "#talk .turn:not(.user) > .said")
        assert said[0].startswith(payload.rstrip())
        assert said[-1] == payload
        # The parser takes the blank end of a thought away.
        assert texts(page, "details div")[0].rstrip() == payload.rstrip()
        call = page.text_content(".call")
        assert call.startswith("read_file {")
        written = json.loads(call.removeprefix("read_file ").partition("→")[0])
        assert written == {"path": payload}
        assert watch.findings(page, at) == []


# --- controls -----------------------------------------------------------------------------------

_HOLES = {
    "made.append(text)": "made.innerHTML = text",
    "said.append(delta.content)": "said.innerHTML += delta.content",
    "thought.append(delta.reasoning_content)": "thought.innerHTML += delta.reasoning_content",
}


def page_with_holes() -> str:
    page = page_text()
    for safe, hole in _HOLES.items():
        assert safe in page, f"the control plants its hole at {safe!r}"
        page = page.replace(safe, hole)
    return page


def served_with(page: Page, html: str, headers: dict[str, str]) -> None:
    kind = "text/html; charset=utf-8"
    page.route(
        lambda url: urlsplit(url).path == "/",
        lambda route: route.fulfill(body=html, headers={**headers, "content-type": kind}),
    )


# Of these, text inside a div makes nothing: only another reader takes them for markup.
_HARMLESS_IN_A_DIV = {"markdown", "cut tag"}


@pytest.mark.parametrize("name", [name for name in MARKUP if name not in _HARMLESS_IN_A_DIV])
def test_control_a_planted_hole_is_found(name, address, browser):  # noqa: F811
    watch = Watch()
    with opened(browser, watch) as page:
        served_with(page, page_with_holes(), {})
        try:
            attacked(page, address, MARKUP[name])
        except Exception as error:  # an attack may break the page before the end
            watch.events.append(f"the turn did not end: {error}")
        assert watch.findings(page, address) != []


def test_control_a_hole_without_a_policy_runs_scripts(address, browser):  # noqa: F811
    watch = Watch()
    with opened(browser, watch) as page:
        served_with(page, page_with_holes(), {})
        attacked(page, address, MARKUP["image that fails"])
        assert "the canary: a script ran" in watch.findings(page, address)


def test_the_policy_alone_stops_scripts_of_a_planted_hole(address, browser):  # noqa: F811
    html, watch = page_with_holes(), Watch()
    with opened(browser, watch) as page:
        served_with(page, html, page_headers(html))
        attacked(page, address, MARKUP["image that fails"])
        found = watch.findings(page, address)
        assert "element in #talk: IMG" in found
        assert any(each.startswith("policy: script-src") for each in found)
        assert "the canary: a script ran" not in found
