"""The page at / in headless Chromium, against a real server."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

from rjax.build.engine_builder import build_engine
from rjax.config import EngineConfig
from rjax.models.tables.demo import demo_questions, demo_system_prompt
from tests.bundled import BUNDLED_SIZES

from .chromium import CHROMIUM
from .hostile import until
from .live_server import LiveServer, live_server, make_engine
from .starting_server import KEY, starting

HOSTILE = (
    "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
    '<a href="javascript:alert(1)">link</a><style>*{display:none}</style>'
)
SECONDS = 180_000.0  # for what the page shows, in milliseconds; the first answer compiles

pytestmark = [
    pytest.mark.browser,
    pytest.mark.thorough,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: chromium)"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM)
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[[str], Page]]:
    """Opens a URL in a new page; at the end no page may have failed."""
    failures: list[str] = []
    context = browser.new_context()
    context.set_default_timeout(SECONDS)
    expect.set_options(timeout=SECONDS)

    def visit(url: str) -> Page:
        page = context.new_page()
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("dialog", lambda dialog: failures.append(dialog.message))
        page.on(
            "console",
            lambda message: (
                failures.append(message.text) if "Content Security" in message.text else None
            ),
        )
        page.goto(url)
        return page

    yield visit
    context.close()
    assert not failures


@pytest.fixture(scope="module")
def bundled(optimised: None, kept: None) -> Iterator[LiveServer]:
    engine = build_engine(EngineConfig.from_options({"use_tqdm": False, **BUNDLED_SIZES}))
    with live_server(engine) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(folder) -> Iterator[LiveServer]:
    """A server with a key, whose model has a hostile name."""
    with live_server(make_engine(folder), keys=[KEY], model=HOSTILE) as found:
        yield found


def ask(page: Page, question: str) -> None:
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")


def figures(turn: Page | Locator) -> str:
    """The figures of an answer."""
    return turn.locator(".figures").inner_text()


def adding(**fields: Any) -> Callable[[Route], None]:
    """A handler that adds fields to the body of a request."""

    def handle(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        route.continue_(post_data=json.dumps(body | fields))

    return handle


def answering(text: str) -> Callable[[Route], None]:
    """A handler that answers with a stream of one text."""
    event = json.dumps({"choices": [{"delta": {"content": text}}]})
    body = f"data: {event}\n\ndata: [DONE]\n\n"
    return lambda route: route.fulfill(content_type="text/event-stream", body=body)


def test_a_conversation(bundled: LiveServer, open_page):
    page = open_page(bundled.url + "/")
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#status")).to_have_text("ready")
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("System prompt").fill(demo_system_prompt())
    page.get_by_label("Temperature").fill("0")
    for number, (question, expected) in enumerate(demo_questions()[:2]):
        ask(page, question)
        turn = page.locator(".turn.assistant").nth(number)
        expect(turn.locator(".figures")).to_contain_text("tokens/s")
        expect(turn.locator(".text")).to_have_text(expected)
        prompt, cached, answer = map(int, re.findall(r"\d+", figures(turn))[:3])
        assert prompt > 500
        assert (cached > 500) == (number > 0)
        assert answer > 5
    page.get_by_label("Longest answer").fill("1")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, demo_questions()[2][0])
    body = sent.value.post_data_json
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert (body["temperature"], body["max_tokens"]) == (0, 1)
    expect(page.locator(".figures").nth(2)).to_contain_text("cut off")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Who?")
    assert len(sent.value.post_data_json["messages"]) == 2
    expect(page.locator(".figures")).to_have_count(1)


def test_stop_ends_the_request(bundled: LiveServer, open_page):
    page = open_page(bundled.url + "/")
    endless = adding(ignore_eos=True, max_tokens=1900)
    page.route("**/v1/chat/completions", endless)
    ask(page, "Who lives in Peru?")
    expect(page.locator(".turn.assistant .text")).not_to_be_empty()
    expect(page.get_by_role("button", name="Send")).to_be_hidden()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".figures")).to_contain_text("stopped")
    assert "answer 1900 tokens" not in figures(page)
    bundled.wait_idle()
    page.unroute("**/v1/chat/completions", endless)
    ask(page, "And in Chile?")  # the conversation goes on
    expect(page.locator(".figures")).to_have_count(2)


@pytest.mark.slow
def test_the_graphs_move(bundled: LiveServer, open_page):
    page = open_page(bundled.url + "/")
    rate, saved = (page.locator(f"#{name}-graph") for name in ("rate", "saved"))
    expect(rate.locator("output")).to_have_text("0.0")
    named = {"name": "table", "prompt": "A prefix that is long enough to be kept. " * 20}
    assert httpx2.post(bundled.url + "/v1/prefixes", json=named, timeout=60).status_code == 200
    system = {"role": "system", "content": demo_system_prompt()}
    stop = threading.Event()

    def work(question: str) -> None:
        messages = [system, {"role": "user", "content": question}]
        while not stop.is_set():
            body = {"messages": messages, "max_tokens": 200, "ignore_eos": True}
            httpx2.post(bundled.url + "/v1/chat/completions", json=body, timeout=60)

    with ThreadPoolExecutor() as clients:
        for question, _ in demo_questions()[:3]:
            clients.submit(work, question)
        try:
            expect(saved.locator("output")).to_have_text(re.compile(r"^[1-9].*%$"))
            expect(rate.locator("output")).to_have_text(re.compile(r"^[1-9]"))
            drawn = rate.locator(".line").get_attribute("d")
            expect(rate.locator(".line")).not_to_have_attribute("d", drawn or "")
            expect(page.locator("#sequences")).to_have_text(re.compile("^[1-3] sequences running"))
        finally:
            stop.set()
    expect(rate.locator("output")).to_have_text("0.0")
    expect(saved.locator("output")).to_have_text("-")
    assert "now" in (rate.locator("svg").get_attribute("aria-label") or "")
    expect(page.locator("#prefixes tbody tr")).to_have_text(re.compile(r"table\s*\d+\s*yes"))
    for name in ("pinned", "cached"):
        expect(page.locator(f"#pool-{name}")).to_have_text(re.compile(r"^[1-9][\d,]* tokens"))
    expect(page.locator("#hit-rate")).to_contain_text("%")


@pytest.mark.slow
def test_a_wrong_key_is_an_error(guarded: LiveServer, open_page):
    page = open_page(guarded.url + "/")
    key, error = page.get_by_label("API key"), page.locator("#key-error")
    expect(error).to_contain_text("401: give a valid API key")
    expect(page.locator("#status")).to_have_text("ready")
    assert page.locator("#model").inner_text() == ""
    key.fill("wrong-key-0000")
    ask(page, "Who?")
    expect(page.get_by_role("alert")).to_contain_text("401: give a valid API key")  # one
    expect(page.get_by_label("Message")).to_have_value("Who?")  # to be sent again
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#metrics-error")).to_be_hidden()
    key.fill(KEY)
    key.press("Enter")
    expect(page.locator("#model")).to_have_text(HOSTILE)
    expect(error).to_be_hidden()
    ask(page, "Who?")
    expect(page.locator(".figures")).to_contain_text("prompt")
    kept = "localStorage.length + sessionStorage.length + document.cookie.length"
    assert page.evaluate(kept) == 0
    page.reload()
    assert key.input_value() == ""


@pytest.fixture(scope="module")
def demo(optimised: None, kept: None) -> Iterator[LiveServer]:
    """The bundled model, which the page knows."""
    engine = build_engine(EngineConfig.from_options({"use_tqdm": False, **BUNDLED_SIZES}))
    with live_server(engine, bundled=True) as found:
        yield found


@pytest.mark.slow
def test_a_newcomer_clicks_a_question_and_asks_eight_at_once(demo: LiveServer, open_page):
    page = open_page(demo.url + "/")
    expect(page.locator(".questions button")).to_have_count(3)
    expect(page.locator("#start .api pre").first).to_contain_text(f"curl {demo.url}/v1/chat")
    (question, expected), *_ = demo_questions()
    page.get_by_role("button", name=question).click()
    turn = page.locator(".turn.assistant")
    expect(turn.locator(".text")).to_have_text(expected)
    expect(turn.locator(".figures")).to_contain_text("tokens/s")
    expect(page.locator("#start")).to_have_count(0)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".questions button")).to_have_count(3)
    page.get_by_role("button", name="Ask 8 at once").click()
    expect(page.locator(".many .figures")).to_have_count(8)
    for number, (question, expected) in enumerate(demo_questions()[:8]):
        turn = page.locator(".many .turn").nth(number)
        expect(turn.locator("h3")).to_have_text(question)
        expect(turn.locator(".text")).to_have_text(expected)


def test_one_message_is_asked_eight_times(bundled: LiveServer, open_page):
    page = open_page(bundled.url + "/")
    expect(page.locator("#start .api")).to_be_visible()
    expect(page.locator("#start .demo")).to_be_hidden()
    page.get_by_role("button", name="Ask 8 at once").click()
    expect(page.locator(".turn")).to_have_count(0)  # nothing to ask
    page.route("**/v1/chat/completions", adding(ignore_eos=True, max_tokens=1900))
    page.get_by_label("Message").fill("Who?")
    page.get_by_role("button", name="Ask 8 at once").click()
    expect(page.locator(".many .turn h3")).to_have_text(["Who?"] * 8)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".many .figures")).to_have_count(8)
    bundled.wait_idle()


MARKDOWN = """\
# Title

Some **bold**, *slanted* and `code <b>` text with a [link](https://a.example/x) and a
[bad one](javascript:alert(1)).

```python
print("<i>&amp;")
```

1. one
   - inner
2. two

| a | b |
| - | - |
| 1 | <u>2</u> |
"""


def test_markdown_becomes_elements_and_html_stays_text(bundled: LiveServer, open_page):
    page = open_page(bundled.url + "/")
    page.route("**/v1/chat/completions", answering(MARKDOWN))
    ask(page, "Who?")
    text = page.locator(".turn.assistant .text")
    expect(text.locator("h4")).to_have_text("Title")
    expect(text.locator("strong")).to_have_text("bold")
    expect(text.locator("em")).to_have_text("slanted")
    expect(text.locator("p code")).to_have_text("code <b>")
    expect(text.locator("a")).to_have_count(1)
    expect(text.locator("a")).to_have_attribute("href", "https://a.example/x")
    expect(text.locator("pre code")).to_have_text('print("<i>&amp;")')
    expect(text.locator("ol > li")).to_have_count(2)
    expect(text.locator("ol ul li")).to_have_text("inner")
    expect(text.locator("td")).to_have_text(["1", "<u>2</u>"])
    assert text.locator(":is(b, i, u, img, script)").count() == 0


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (800, 600), (390, 844)])
def test_the_input_stays_in_the_window_while_the_log_scrolls(
    bundled: LiveServer, open_page, width, height
):
    page = open_page(bundled.url + "/")
    page.set_viewport_size({"width": width, "height": height})
    long = "".join(f"line {i}\n\n" for i in range(200))
    page.route("**/v1/chat/completions", answering(long))
    ask(page, "Who?")
    expect(page.locator(".turn.assistant .text")).to_contain_text("line 199")
    log = page.locator("#log")
    assert log.evaluate("e => e.scrollHeight > e.clientHeight")
    expect(page.get_by_text("line 199", exact=True)).to_be_in_viewport()
    expect(page.get_by_label("Message")).to_be_in_viewport(ratio=1)
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_text_stays_text(guarded: LiveServer, open_page):
    page = open_page(guarded.url + "/")
    page.get_by_label("API key").fill(KEY)
    page.route("**/v1/chat/completions", adding(structured_outputs={"choice": [HOSTILE]}))
    ask(page, HOSTILE)
    expect(page.locator(".figures")).to_contain_text("answer")
    for turn in ("user", "assistant"):
        expect(page.locator(f".turn.{turn} .text")).to_have_text(HOSTILE)
    page.route("**/v1/chat/completions", adding(model=f"no {HOSTILE}"))
    ask(page, "Who?")
    expect(page.get_by_role("alert")).to_contain_text("<img src=x")
    expect(page.locator("#model")).to_have_text(HOSTILE)
    assert page.locator("main :is(img, script, a, style), header img").count() == 0
    assert page.title() == "rjax"


def test_a_mistake_in_a_script_would_not_make_html_of_text(guarded: LiveServer, browser):
    page = browser.new_page()
    page.goto(guarded.url + "/")
    write = "text => { try { document.body.innerHTML = text } catch (e) { return e.name } }"
    assert page.evaluate(write, HOSTILE) == "TypeError"
    assert page.locator("header img").count() == 0
    page.close()


@pytest.mark.slow
def test_the_progress_of_a_start_on_a_phone_behind_a_proxy(folder, open_page):
    with starting(make_engine(folder)) as server:
        page = open_page(server.url + "/llm/")
        page.set_viewport_size({"width": 360, "height": 640})
        expect(page.locator("#status")).to_have_text("starting, 3 of 20 programs compiled")
        expect(page.get_by_role("progressbar")).to_have_js_property("value", 3)
        page.get_by_label("API key").fill(KEY)
        ask(page, "Who lives in Peru?")
        until(lambda: server.app._waiting == 1, 60)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        server.load()
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.get_by_role("progressbar")).to_be_hidden()
        expect(page.locator(".figures")).to_contain_text("prompt")
