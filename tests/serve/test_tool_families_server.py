"""Tool calls of several families through the server."""

import json
import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest

from .live_server import LiveServer, live_server, make_engine, write_model
from .tool_formats import rendered, template

FIND = {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}}
CALLS: list[tuple[str, Any]] = [("find", {"q": 'é "5"', "n": 5}), ("now", {})]
BOUNDED = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["kind", "count"],
}


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def write_family(folder: Path, name: str) -> Path:
    """A model folder whose chat template is that of a family."""
    write_model(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": template(name)}
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["qwen3_coder", "glm45", "mistral", "deepseek_v31"])
def served(request, tmp_path_factory):
    folder = write_family(tmp_path_factory.mktemp("family") / "tiny", request.param)
    with live_server(make_engine(folder, max_num_seqs=2)) as found:
        yield request.param, found


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    folder = write_family(tmp_path_factory.mktemp("unknown") / "tiny", "unknown")
    with live_server(make_engine(folder, max_num_seqs=2)) as found:
        yield found


def post(server: LiveServer, body: dict[str, Any], path: str = "chat/completions") -> Any:
    return httpx2.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def ask(server: LiveServer, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of a body, and the deltas of its stream."""
    body = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, **more}
    answer = post(server, body)
    assert answer.status_code == 200, answer.text
    lines = post(server, {**body, "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line[6:7] == "{"]
    return answer.json()["choices"][0], [event["choices"][0]["delta"] for event in events]


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in choice["message"]["tool_calls"] or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def joined(deltas: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    calls: list[list[str]] = []
    for delta in deltas:
        for call in delta.get("tool_calls") or ():
            if call.get("id"):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.sample(0, 1)
def test_what_the_template_writes_reaches_the_client_as_calls(served):
    name, server = served
    text = rendered(name, CALLS, "Let me see.")
    choice, deltas = ask(
        server,
        tools=[tool("find", FIND), tool("now", None)],
        structured_outputs={"choice": [text]},
    )
    assert called(choice) == joined(deltas) == CALLS
    content = "".join(delta.get("content") or "" for delta in deltas)
    assert choice["message"]["content"] == content
    assert content.rstrip("\n") == "Let me see."
    assert choice["finish_reason"] == "tool_calls"
    # The calls can be sent back.
    sent = [
        {"role": "user", "content": "a"},
        {**choice["message"], "content": "Let me see."},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "user", "content": "a"},
    ]
    body = {"messages": [m for m in sent if m["role"] != "tool" or name == "mistral"]}
    assert httpx2.post(f"{server.url}/tokenize", json=body, timeout=60).status_code == 200


@pytest.mark.sample(0, 1)
def test_forced_calls_match_the_schema(served):
    _, server = served
    forced = {"type": "function", "function": {"name": "pick"}}
    for choice_of in ("required", forced):
        choice, deltas = ask(
            server,
            tools=[tool("pick", BOUNDED)],
            tool_choice=choice_of,
            parallel_tool_calls=False,
            max_tokens=200,
        )
        ((function, arguments),) = called(choice)
        assert [(function, arguments)] == joined(deltas)
        assert function == "pick"
        assert arguments["kind"] in ("red", "blue") and 0 <= arguments["count"] <= 9
        assert not choice["message"]["content"]
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.sample(0, 1)
def test_responses_have_the_calls(served):
    name, server = served
    body = {
        "input": "a",
        "tools": [{"type": "function", "name": "find", "parameters": FIND}],
        "structured_outputs": {"choice": [rendered(name, CALLS[:1])]},
        "temperature": 0,
    }
    answer = post(server, body, "responses")
    assert answer.status_code == 200, answer.text
    (item,) = answer.json()["output"]
    assert (item["type"], item["name"], item["arguments"]) == (
        "function_call",
        "find",
        '{"q": "é \\"5\\"", "n": 5}',
    )


def test_a_schema_that_the_format_cannot_enforce_is_refused(served):
    name, server = served
    parameters = {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [tool("f", parameters, strict=True)],
        "max_tokens": 1,
    }
    answer = post(server, body)
    refused = name in ("qwen3_coder", "glm45")
    assert answer.status_code == (400 if refused else 200)
    assert not refused or "cannot enforce" in answer.json()["error"]["message"]


@pytest.mark.thorough
def test_an_unknown_format_is_not_guessed(unknown):
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    choice, _ = ask(unknown, tools=[tool("now", None)], structured_outputs={"choice": [text]})
    assert choice["message"]["content"] == text
    assert choice["message"]["tool_calls"] is None
    # The template describes the tools.
    sizes = []
    for tools in ([], [tool("now", None)]):
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": tools}
        sizes.append(post(unknown, body).json()["usage"]["prompt_tokens"])
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "now"}}},
        {"parallel_tool_calls": False},
        {"tools": [tool("now", None, strict=True)]},
    ],
)
def test_calls_of_an_unknown_format_cannot_be_forced(unknown, more):
    messages = [{"role": "user", "content": "a"}]
    answer = post(unknown, {"messages": messages, "tools": [tool("now", None)], **more})
    assert answer.status_code == 400
    assert "--tool-call-parser" in answer.json()["error"]["message"]


@pytest.mark.thorough
def test_an_unknown_format_is_told_at_the_start(tmp_path, caplog):
    engine = make_engine(write_family(tmp_path / "tiny", "unknown"), max_num_seqs=2)
    with caplog.at_level(logging.WARNING, "rjax.serve"), live_server(engine):
        pass
    assert "Give --tool-call-parser" in caplog.text
    caplog.clear()
    engine = make_engine(tmp_path / "tiny", max_num_seqs=2)
    with (
        caplog.at_level(logging.WARNING, "rjax.serve"),
        live_server(engine, tool_call_parser="glm45"),
    ):
        pass
    assert "tool-call-parser" not in caplog.text
