"""Named prefixes: register, use, list, pin, drop; one tenant's are not another's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from rjax.serve.config.limits import ServeLimits

from .live_server import LiveServer, live_server, make_engine

KEYS = ["first-key-1234", "second-key-5678"]
RULES = "Answer from this table and nothing else. " * 4


@pytest.fixture(scope="module")
def server(folder) -> Iterator[LiveServer]:
    limits = ServeLimits(prefixes=3)
    with live_server(make_engine(folder), keys=KEYS, limits=limits) as found:
        yield found


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx2.Client]:
    with as_client(server, KEYS[0]) as client:
        yield client
        for prefix in client.get("/v1/prefixes").json()["data"]:
            assert client.delete(f"/v1/prefixes/{prefix['name']}").is_success


def as_client(server: LiveServer, key: str) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=server.url, headers=headers, timeout=60)


def complete(http: httpx2.Client, **body) -> dict:
    found = http.post("/v1/completions", json={"max_tokens": 3, "temperature": 0, **body})
    assert found.status_code == 200, found.text
    return found.json()


def test_registered_prefix_is_used_and_changes_nothing(server: LiveServer, http):
    made = http.post("/v1/prefixes", json={"name": "rules", "prompt": RULES}).json()
    assert made["pinned"]
    found = complete(http, prompt="Who?", prefix="rules", return_token_ids=True)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= made["num_tokens"] - 8
    tokens = found["choices"][0]["prompt_token_ids"]
    assert len(tokens) > made["num_tokens"]
    plain = complete(http, prompt=tokens, cache_salt="apart")
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert plain["choices"][0]["text"] == found["choices"][0]["text"]
    # A prompt that merely begins so finds it too.
    same = complete(http, prompt=RULES + "Who?")
    assert same["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_pins_hold_pages_until_dropped(server: LiveServer, http):
    assert server.used_bytes() == 0
    http.post("/v1/prefixes", json={"name": "rules", "prompt": RULES})
    held = server.used_bytes()
    assert held > 0
    assert http.patch("/v1/prefixes/rules", json={"pin": False}).json()["pinned"] is False
    assert server.used_bytes() == 0
    complete(http, prompt="Who?", prefix="rules")  # the name stays
    assert http.patch("/v1/prefixes/rules", json={"pin": True}).json()["pinned"] is True
    assert server.used_bytes() == held
    assert http.get("/v1/prefixes/rules").json()["pinned"] is True
    assert http.delete("/v1/prefixes/rules").is_success
    assert server.used_bytes() == 0
    assert http.get("/v1/prefixes/rules").status_code == 404


def test_messages_as_a_prefix_serve_chats(server: LiveServer, http):
    system = {"role": "system", "content": RULES}
    made = http.post("/v1/prefixes", json={"name": "chat", "messages": [system]}).json()
    body = {"messages": [system, {"role": "user", "content": "Who?"}], "max_tokens": 1}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= made["num_tokens"] - 8


def test_tenants_do_not_see_one_anothers(server: LiveServer, http):
    http.post("/v1/prefixes", json={"name": "mine", "prompt": RULES})
    with as_client(server, KEYS[1]) as other:
        assert other.get("/v1/prefixes").json()["data"] == []
        assert other.get("/v1/prefixes/mine").status_code == 404
        assert other.delete("/v1/prefixes/mine").status_code == 404
        assert other.patch("/v1/prefixes/mine", json={"pin": False}).status_code == 404
        found = complete(other, prompt=RULES)
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        body = {"prompt": "a", "prefix": "mine"}
        assert other.post("/v1/completions", json=body).status_code == 404
    assert [p["name"] for p in http.get("/v1/prefixes").json()["data"]] == ["mine"]


@pytest.mark.parametrize("body", [
    {},
    {"name": "a"},
    {"name": "", "prompt": "a"},
    {"name": "a b", "prompt": "a"},
    {"name": "x" * 129, "prompt": "a"},
    {"name": "a", "prompt": ""},
    {"name": "a", "prompt": []},
    {"name": "a", "prompt": [-1]},
    {"name": "a", "prompt": [2**63]},
    {"name": "a", "prompt": [1] * 600},
    {"name": "a", "prompt": "a" * 10**6},
    {"name": "a", "messages": []},
    {"name": "a", "prompt": "a", "messages": [{"role": "user", "content": "a"}]},
    {"name": "a", "prompt": "a", "cache_salt": "é" * 129},
    {"name": "a", "prompt": "a", "ttl": 3},
])  # fmt: skip
def test_bad_prefixes_are_refused(http, body):
    found = http.post("/v1/prefixes", json=body)
    assert found.status_code == 400, found.text
    assert http.get("/v1/prefixes").json()["data"] == []


@pytest.mark.thorough
def test_saved_prefixes_are_every_tenants_from_the_start(
    folder, tmp_path, server: LiveServer, http
):
    http.post("/v1/prefixes", json={"name": "rules", "prompt": RULES})
    path = tmp_path / "rules.safetensors"
    [name] = [p.name for p in server.call(lambda engine: engine.prefixes())]
    server.call(lambda engine: engine.save_prefix(name, path))
    computed = complete(http, prompt="Who?", prefix="rules")
    with live_server(make_engine(folder), keys=KEYS, prefix_files={"saved": str(path)}) as later:
        for key in KEYS:
            with as_client(later, key) as client:
                [card] = client.get("/v1/prefixes").json()["data"]
                assert card["name"] == "saved"
                found = complete(client, prompt="Who?", prefix="saved")
                cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached >= card["num_tokens"] - 1
                assert found["choices"] == computed["choices"]
                assert client.delete("/v1/prefixes/saved").is_success
        later.wait_idle()
        assert later.used_bytes() == 0


def test_their_number_is_limited_at_once_too(http):
    def register(i: int) -> int:
        body = {"name": f"p{i}", "prompt": f"{i} {RULES}"}
        return http.post("/v1/prefixes", json=body).status_code

    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(register, range(8)))
    assert sorted(codes) == [200] * 3 + [409] * 5
    assert len(http.get("/v1/prefixes").json()["data"]) == 3


def test_their_number_is_limited(http):
    codes = [
        http.post("/v1/prefixes", json={"name": f"p{i}", "prompt": RULES}).status_code
        for i in range(4)
    ]
    assert codes == [200, 200, 200, 409]
    again = http.post("/v1/prefixes", json={"name": "p0", "prompt": "something else"})
    assert again.is_success
