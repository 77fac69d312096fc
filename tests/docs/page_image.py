"""Makes the picture of the server's web page: python -m tests.docs.page_image

Needs Chromium.
"""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
from playwright.sync_api import expect, sync_playwright

from rjax.build.engine_builder import build_engine
from rjax.config import EngineConfig
from rjax.models.tables.demo import demo_questions, demo_system_prompt
from tests.bundled import BUNDLED_SIZES
from tests.serve.chromium import CHROMIUM
from tests.serve.live_server import LiveServer, live_server

IMAGE = Path(__file__).parents[2] / "docs" / "images" / "page.png"
_CLIENTS = 3
_GRAPH_MILLISECONDS = 40_000  # of work by other clients, for the graphs


def main() -> None:
    """Ask the bundled model questions beside other clients, and write the picture."""
    engine = build_engine(EngineConfig.from_options({"use_tqdm": False, **BUNDLED_SIZES}))
    with (
        live_server(engine, model="tables", bundled=True) as server,
        ThreadPoolExecutor() as clients,
    ):
        messages = [{"role": "system", "content": demo_system_prompt()}]
        named = {"name": "people", "messages": messages}
        httpx2.post(server.url + "/v1/prefixes", json=named, timeout=300).raise_for_status()
        stop = threading.Event()
        for question, _ in demo_questions()[-_CLIENTS:]:
            clients.submit(_work, server, question, stop)
        try:
            _picture(server)
        finally:
            stop.set()


def _work(server: LiveServer, question: str, stop: threading.Event) -> None:
    """Ask one question over and over."""
    system = {"role": "system", "content": demo_system_prompt()}
    body = {"messages": [system, {"role": "user", "content": question}]}
    while not stop.is_set():
        httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=300)


def _picture(server: LiveServer) -> None:
    expect.set_options(timeout=120_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.goto(server.url + "/")
        (question, expected), *_ = demo_questions()
        page.get_by_role("button", name=question).click()
        expect(page.locator(".turn.assistant .text")).to_have_text(expected)
        page.wait_for_timeout(_GRAPH_MILLISECONDS)
        page.get_by_role("button", name="Ask 8 at once").click()
        expect(page.locator(".many .figures")).to_have_count(8)
        expect(page.locator("#saved-graph output")).to_have_text(re.compile("%"))
        page.screenshot(path=IMAGE)
        browser.close()


if __name__ == "__main__":
    main()
