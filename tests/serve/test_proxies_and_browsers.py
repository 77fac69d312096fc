"""A server behind a reverse proxy, used by pages of a browser."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from starlette.responses import PlainTextResponse

from rjax.errors import InvalidConfigError
from rjax.serve.config.http_options import HttpOptions, json_names
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.starting_app import StartingApp

from .live_server import LiveServer, live_server, make_engine

KEY = "first-key-1234"
PAGE = "https://page.example"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def proxied(folder) -> Iterator[LiveServer]:
    http = HttpOptions(root_path="/llm/one", allowed_origins=(PAGE,), tokenizer_info=True)
    with live_server(make_engine(folder), keys=[KEY], http=http, root="plain") as found:
        yield found


@pytest.mark.parametrize("prefix", ["", "/llm/one"])
def test_a_path_comes_with_the_root_or_without(proxied: LiveServer, prefix):
    url = proxied.url + prefix
    for path in ("/health", "/ping"):
        assert httpx2.get(url + path, timeout=60).json() == {"status": "ready"}
        assert httpx2.post(url + path, content=b"x" * 1025, timeout=60).status_code == 413
    assert httpx2.get(url + "/v1/models", timeout=60).status_code == 401
    [card] = httpx2.get(url + "/v1/models", headers=BEARER, timeout=60).json()["data"]
    assert (card["id"], card["root"]) == ("tiny", "plain")
    schema = httpx2.get(url + "/openapi.json", headers=BEARER, timeout=60).json()
    assert schema["servers"] == [{"url": "/llm/one"}]


@pytest.mark.parametrize("path", ["/llm/health", "/llm/one/llm/one/health", "/llm/oneX/health"])
def test_no_other_path_is_a_probe(proxied: LiveServer, path):
    assert httpx2.get(proxied.url + path, timeout=60).status_code == 401


def test_the_tokenizer_without_the_servers_files(proxied: LiveServer, folder):
    found = httpx2.get(proxied.url + "/tokenizer_info", headers=BEARER, timeout=60)
    assert found.status_code == 200
    assert str(folder) not in found.text
    told = json.loads((folder / "tokenizer_config.json").read_text())
    shown = found.json()
    for name in ("chat_template", "model_max_length", "bos_token", "eos_token", "pad_token"):
        assert shown[name] == told[name]
    assert shown["tokenizer_class"]


@pytest.mark.parametrize(
    ("host", "hosts", "allowed"),
    [
        ("evil.example", None, True),
        ("evil.example", ("*",), True),
        ("evil.example", (), False),
        ("evil.example:8000", (), False),
        ("127.0.0.1.evil.example", (), False),
        ("localhost.evil.example", (), False),
        ("evil.example", ("good.example",), False),
        ("Good.Example:80", ("good.example",), True),
        ("good.example.", ("Good.example",), True),
        ("localhost", (), True),
        ("LOCALHOST:8000", (), True),
        ("127.0.0.1:8000", (), True),
        ("192.168.1.5", (), True),
        ("[::1]:8000", (), True),
        ("[evil.example]", (), False),
        ("", (), False),
        ("@127.0.0.1", (), False),
    ],
)
def test_pages_reach_a_local_server_through_no_name(host, hosts, allowed):
    assert HttpOptions(allowed_hosts=hosts).allows_host(host) == allowed


def test_a_name_is_refused_before_the_model_is_loaded_and_after():
    app = StartingApp(ServeConfig(model="m", http=HttpOptions(allowed_hosts=("a.example",))))

    async def get(host: str, path: str) -> httpx2.Response:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=60
        ) as client:
            return await client.get(path, headers={"Host": host})

    async def real(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("real")(scope, receive, send)

    async def look() -> None:
        for path in ("/health", "/v1/models", "/", "/v1/completions"):
            refused = await get("b.example" + "b" * 500, path)
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "host_not_allowed"
            assert len(refused.text) < 500
        assert (await get("a.example:80", "/v1/models")).status_code == 200
        app.open(real)
        assert (await get("b.example", "/v1/models")).status_code == 403
        assert (await get("127.0.0.1", "/v1/models")).text == "real"

    asyncio.run(look())


def preflight(server: LiveServer, origin: str, **more: str) -> httpx2.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        **more,
    }
    return httpx2.request(
        "OPTIONS", server.url + "/v1/chat/completions", headers=headers, timeout=60
    )


def test_a_page_that_is_allowed_asks_without_a_key(proxied: LiveServer):
    found = preflight(proxied, PAGE)
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == PAGE
    assert found.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in found.headers
    # Answers and refusals are for it to read.
    for headers, status in ((BEARER, 200), ({}, 401)):
        answer = httpx2.get(
            proxied.url + "/v1/models", headers={"Origin": PAGE, **headers}, timeout=60
        )
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE


def test_other_pages_are_not_allowed(proxied: LiveServer, server: LiveServer):
    found = preflight(proxied, "https://other.example")
    assert found.status_code == 400
    assert "access-control-allow-origin" not in found.headers
    headers = {"Origin": "https://other.example", **BEARER}
    answer = httpx2.get(proxied.url + "/v1/models", headers=headers, timeout=60)
    assert "access-control-allow-origin" not in answer.headers
    # Nor is any, where nobody asked for it.
    plain = preflight(server, PAGE)
    assert plain.status_code == 405
    assert not [name for name in plain.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "wrong",
    [
        {"root_path": "/"},
        {"root_path": "/a/../b"},
        {"root_path": "/a b"},
        {"allowed_origins": ("example.com",)},
        {"allowed_origins": ("https://a.example, https://b.example",)},
        {"allowed_origins": ("*",), "allowed_headers": ("a\r\nb",)},
    ],
)
def test_options_that_are_none(wrong):
    with pytest.raises(InvalidConfigError):
        HttpOptions(**wrong)


def test_lists_are_read_as_vllm_reads_them():
    assert json_names("--allowed-origins", '["*", "null"]') == ("*", "null")
    assert HttpOptions(allowed_origins=("*", "null", "http://localhost:3000")).health_paths
