"""Routes that say what the server is and how it does."""

import pytest


def test_health_needs_no_body(http):
    assert http.get("/health").status_code == 200


def test_version_is_the_packages(http):
    import rjax

    assert http.get("/version").json()["version"] == rjax.__version__


def test_the_model_is_listed_with_its_length(http):
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert model["id"] == "tiny"
    assert model["object"] == "model"
    assert model["max_model_len"] == 512
    assert http.get("/v1/models/tiny").json() == model


def test_metrics_are_prometheus_text(http, post):
    post("/v1/completions", prompt="a", max_tokens=1)
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "# TYPE rjax:prompt_tokens_total counter" in answer.text


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_wrong_method_is_a_405(http, route, method):
    assert http.request(method, route).status_code == 405


def test_an_unknown_route_is_a_404_of_the_apis_form(http):
    answer = http.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_an_unknown_model_is_a_404_that_names_it(http, route):
    body = {"model": "other", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    body.pop("messages" if route == "/v1/completions" else "prompt")
    answer = http.post(route, json=body)
    assert answer.status_code == 404
    assert "other" in answer.json()["error"]["message"]
