"""The web page at /: its files, their headers, and who gets them."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from rjax.serve import page
from rjax.serve.config.http_options import HttpOptions
from rjax.serve.page.files import PAGE_PATHS

from .live_server import LiveServer, live_server, make_engine
from .starting_server import SOON, starting

KEY = "first-key-1234"
TYPES = {
    "": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
STATIC = Path(page.__file__).parent / "static"
SOURCES = sorted(STATIC.iterdir())


@pytest.fixture(scope="module")
def guarded(folder) -> Iterator[LiveServer]:
    http = HttpOptions(root_path="/llm/one")
    with live_server(make_engine(folder), keys=[KEY], model="secret-name", http=http) as found:
        yield found


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
@pytest.mark.parametrize("root", ["", "/llm/one"])
def test_the_page_needs_no_key_and_reveals_nothing(guarded: LiveServer, root, path):
    found = httpx2.get(guarded.url + root + path, timeout=60)
    assert found.status_code == 200
    assert found.headers["content-type"] == TYPES[path.rpartition("/")[2].partition(".")[2]]
    assert found.content in [source.read_bytes() for source in SOURCES]
    head = httpx2.head(guarded.url + root + path, timeout=60)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(found.content))


def test_the_headers(server: LiveServer):
    for path in PAGE_PATHS:
        headers = httpx2.get(server.url + path, timeout=60).headers
        entries = headers["content-security-policy"].split("; ")
        policy = {name: values for name, *values in map(str.split, entries)}
        assert policy["default-src"] == ["'none'"]
        assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == ["'self'"]
        assert (
            policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == ["'none'"]
        )
        assert policy["require-trusted-types-for"] == ["'script'"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    "path",
    [
        *("/page", "/page/", "/page/index.html", "/page/other.js", "/page/static/main.js"),
        *("/page/../options.py", "/page/%2e%2e/files.py", "/page/main.js/", "/page//main.js"),
        *("/index.html", "//"),
    ],
)
def test_no_other_path_is_a_file(server: LiveServer, guarded: LiveServer, path):
    assert httpx2.get(server.url + path, timeout=60).status_code == 404
    for root in ("", "/llm/one", "/llm"):
        assert httpx2.get(guarded.url + root + path, timeout=60).status_code == 401


def test_the_page_is_there_before_the_model(folder):
    with starting(make_engine(folder)) as server:
        for root in ("", "/llm"):
            for path in PAGE_PATHS:
                early = httpx2.get(server.url + root + path, timeout=SOON)
                assert early.status_code == 200
                assert early.content in [source.read_bytes() for source in SOURCES]
                assert "content-security-policy" in early.headers
        assert httpx2.head(server.url + "/", timeout=SOON).status_code == 200
        assert httpx2.post(server.url + "/", timeout=SOON).status_code == 503


def test_other_methods_and_large_bodies(guarded: LiveServer):
    for method in ("POST", "PUT", "DELETE"):
        assert httpx2.request(method, guarded.url + "/", timeout=60).status_code == 405
    assert (
        httpx2.request("GET", guarded.url + "/", content=b"x" * 1025, timeout=60).status_code == 413
    )


def test_the_page_is_not_in_the_description(server: LiveServer):
    assert not PAGE_PATHS & set(
        httpx2.get(server.url + "/openapi.json", timeout=60).json()["paths"]
    )


OWN = [path for path in SOURCES if path.name != "marked.js"]  # a library, of which only the lexer


def test_every_file_is_served():
    assert len(SOURCES) == len(PAGE_PATHS)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_file_loads_nothing_from_elsewhere_and_writes_no_html(path):
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|\bon\w+=|style=|javascript:|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", text)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|\.cookie", text)
    # A proxy may serve the page at any path.
    for target in re.findall(r'(?:src|href|fetch\(|from|import) ?= ?"([^"]*)"', text):
        assert not target.startswith("/"), target
    assert not re.search(r'fetch\("/|from "/', text)
    assert text.count("\n") <= 250
