"""API keys on every route but /health and /ping; tenants learn nothing of one another's prompts."""

import asyncio
import hmac
import itertools
from collections.abc import Iterator

import httpx2
import pytest
from fastapi import FastAPI, Request

from rjax.errors import InvalidConfigError
from rjax.serve.api.app import build_app
from rjax.serve.api.tenancy import cache_salt
from rjax.serve.http import auth
from rjax.serve.http.auth import KeyRing, authenticate_operator
from rjax.serve.protocol.errors import ApiError

from .live_server import LiveServer, live_server, make_engine

KEYS = ["first-key-1234", "second-key-5678"]


@pytest.fixture(scope="module")
def guarded(folder) -> Iterator[LiveServer]:
    with live_server(make_engine(folder), keys=KEYS) as found:
        yield found


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_route_but_probes_asks_for_a_key(guarded: LiveServer):
    paths = build_app(guarded.service).openapi()["paths"]
    asked = 0
    hidden = {"/openapi.json": {"get": {}}, "/docs": {"get": {}}}
    headers_tried = ({}, bearer("wrong-key-0000"), {"Authorization": KEYS[0]}, bearer("x"))
    with httpx2.Client(base_url=guarded.url, timeout=60) as client:
        for path, methods in {**paths, **hidden}.items():
            shown = path.replace("{model}", "tiny").replace("{name}", "x")
            shown = shown.replace("{response_id}", "resp_x")
            for method, headers in itertools.product(methods, headers_tried):
                found = client.request(method.upper(), shown, headers=headers)
                if path in ("/health", "/ping"):
                    assert found.status_code == 200
                else:
                    assert found.status_code == 401, (path, method, headers)
                    assert found.json()["error"]["code"] == "invalid_api_key"
                    asked += 1
    assert asked >= 4 * 25
    # Nor is a stranger's body read.
    for content in (b"{", b"x" * 10_000_000):
        assert (
            httpx2.post(guarded.url + "/v1/completions", content=content, timeout=60).status_code
            == 401
        )
    assert httpx2.get(guarded.url + "/redoc", timeout=60).status_code == 401
    assert (
        httpx2.get(guarded.url + "/redoc", headers=bearer(KEYS[0]), timeout=60).status_code == 404
    )


def test_a_probe_brings_no_large_body(guarded: LiveServer):
    for path in ("/health", "/ping"):
        assert httpx2.post(guarded.url + path, content=b"x" * 1025, timeout=60).status_code == 413
    assert httpx2.post(guarded.url + "/ping", content=b"x" * 1024, timeout=60).status_code == 200


@pytest.mark.parametrize(
    "path", ["//v1/models", "/health/../v1/models", "/v1/models/", "/V1/MODELS"]
)
def test_no_spelling_of_a_path_goes_around(guarded: LiveServer, path):
    found = httpx2.get(guarded.url + path, headers={"Host": "evil/health?"}, timeout=60)
    assert found.status_code in (401, 404, 400, 307)
    assert "tiny" not in found.text


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(guarded: LiveServer, key):
    assert (
        httpx2.get(guarded.url + "/v1/models", headers=bearer(key), timeout=60).status_code == 200
    )
    lower = {"Authorization": f"bearer {key}"}
    assert httpx2.get(guarded.url + "/v1/models", headers=lower, timeout=60).status_code == 200


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch):
    seen = []

    def compare(a, b):
        seen.append(a)
        return hmac.compare_digest(a, b)

    class Spy:
        compare_digest = staticmethod(compare)

    ring = KeyRing(KEYS)
    monkeypatch.setattr(auth, "hmac", Spy)
    assert ring.tenant(f"Bearer {KEYS[0]}").name == "key-1"
    assert len(seen) == 2


@pytest.mark.parametrize("key", ["", " ", " around ", "ünicode-key", "line\nbreak-key"])
def test_unusable_keys_are_refused(key):
    with pytest.raises(InvalidConfigError, match="API key 2 is"):
        KeyRing([KEYS[0], key])


@pytest.mark.parametrize("key", ["x", "test", "with space 1", "token-abc123"])
def test_any_other_key_opens(key):
    ring = KeyRing([key])
    assert ring.tenant(f"Bearer {key}").name == "key-1"
    assert ring.num_short == 1
    with pytest.raises(ApiError):
        ring.tenant(f"Bearer {key}x")
    with pytest.raises(ApiError):
        ring.tenant("Bearer ")


def test_tenants_have_salts_of_their_own():
    ring = KeyRing(KEYS)
    first, second = (ring.tenant(f"Bearer {key}") for key in KEYS)
    salts = {
        cache_salt(tenant, wanted) for tenant in (first, second) for wanted in (None, "a", "b")
    }
    assert len(salts) == 6
    # Nobody can spell another's salt.
    assert cache_salt(first, second.salt) not in salts
    assert cache_salt(KeyRing([]).tenant(None), None) is None


@pytest.mark.parametrize(
    ("keys", "headers", "status"),
    [
        (KEYS, bearer("operator-key-1234"), None),
        (KEYS, bearer("operator-key-1234") | {"Origin": "https://page"}, None),
        ((), bearer("operator-key-1234"), None),
        (KEYS, bearer(KEYS[0]), 403),
        (KEYS, {}, 401),
        ((), {}, 401),
        (None, {}, None),
        (None, {"Origin": "https://page"}, 403),
    ],
)
def test_only_operators_reach_their_routes(keys, headers, status):
    app = FastAPI()
    app.state.keys = KeyRing([]) if keys is None else KeyRing(keys, ["operator-key-1234"])
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    request = Request({"type": "http", "app": app, "headers": raw})
    if status is None:
        assert asyncio.run(authenticate_operator(request)).is_operator
        return
    with pytest.raises(ApiError) as refused:
        asyncio.run(authenticate_operator(request))
    assert refused.value.status == status


def test_one_tenants_prompt_is_not_cached_for_another(guarded: LiveServer):
    def cached(key: str) -> int:
        body = {"prompt": "A secret that only one of them knows. " * 5, "max_tokens": 1}
        found = httpx2.post(
            guarded.url + "/v1/completions", json=body, headers=bearer(key), timeout=60
        )
        return found.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) >= 16
    assert cached(KEYS[1]) == 0
