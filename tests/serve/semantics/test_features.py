"""What every route can do, whole and streamed: one table of feature and route."""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

TEXT = "Who lives in Peru?"
HI = [{"role": "user", "content": TEXT}]
BEGUN = "The people are"
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": TEXT},
}
COMPLETIONS, CHAT, RESPONSES = PROMPTS
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


@dataclasses.dataclass
class Answer:
    """One choice of any route, whole or joined from the events of a stream."""

    text: str = ""
    reason: str | None = None
    calls: list[list[str]] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    prompt_token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    logprobs: list[float | None] = dataclasses.field(default_factory=list)
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, part: dict[str, Any]) -> None:
        """Join a whole answer, or a chunk, of completions or chats."""
        self.usage = part.get("usage") or self.usage
        for choice in part["choices"]:
            said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            self.text += said.get("content") or ""
            for i, call in enumerate(said.get("tool_calls") or ()):
                self.add_call(call.get("index", i), call["function"])
            self.reason = choice["finish_reason"] or self.reason
            self.token_ids += choice.get("token_ids") or []
            prompt = choice.get("prompt_token_ids") or part.get("prompt_token_ids")
            self.prompt_token_ids += [prompt] if prompt else []
            scored = choice.get("logprobs") or {}
            self.logprobs += scored.get("token_logprobs") or []
            self.logprobs += [entry["logprob"] for entry in scored.get("content") or ()]

    def add_call(self, index: int, said: dict[str, Any]) -> None:
        self.calls += [["", ""] for _ in range(index + 1 - len(self.calls))]
        self.calls[index][0] += said.get("name") or ""
        self.calls[index][1] += said.get("arguments") or ""

    def add_response(self, found: dict[str, Any]) -> None:
        """Take a whole response."""
        for item in found["output"]:
            if item["type"] == "function_call":
                self.calls.append([item["name"], item["arguments"]])
            for content in item.get("content") or ():
                self.text += content["text"]
                self.logprobs += [entry["logprob"] for entry in content.get("logprobs") or ()]
        self.reason = "length" if found["incomplete_details"] else "stop"
        self.reason = "tool_calls" if self.calls and self.reason == "stop" else self.reason
        used = found["usage"]
        self.usage = {
            "prompt_tokens": used["input_tokens"],
            "completion_tokens": used["output_tokens"],
            "total_tokens": used["total_tokens"],
            "prompt_tokens_details": used["input_tokens_details"],
        }

    def add_event(self, event: dict[str, Any]) -> None:
        """Join an event of a streamed response; the last one has the usage and the reason."""
        match event["type"].removeprefix("response."):
            case "output_text.delta":
                self.text += event["delta"]
                self.logprobs += [entry["logprob"] for entry in event.get("logprobs") or ()]
            case "function_call_arguments.delta":
                self.add_call(event["output_index"], {"arguments": event["delta"]})
            case "output_item.added" if event["item"]["type"] == "function_call":
                self.add_call(event["output_index"], {"name": event["item"]["name"]})
            case "completed" | "incomplete":
                whole = Answer()
                whole.add_response(event["response"])
                assert (whole.text, whole.calls) == (self.text, self.calls)
                self.reason, self.usage = whole.reason, whole.usage


Ask = Callable[..., Answer]


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def ask(http: httpx2.Client, request: pytest.FixtureRequest) -> Ask:
    """The answer of a route to a body with these fields, asked for in both ways."""

    def send(route: str, max_tokens: int = 6, **fields: Any) -> Answer:
        body = {"model": "tiny", "temperature": 0, "stream": request.param} | PROMPTS[route]
        body |= {"max_output_tokens" if route == RESPONSES else "max_tokens": max_tokens} | fields
        if request.param and route != RESPONSES:
            body["stream_options"] = {"include_usage": True}
        found = http.post(route, json=body)
        assert found.status_code == 200, found.text
        answer = Answer()
        if not request.param:
            (answer.add_response if route == RESPONSES else answer.add)(found.json())
            return answer
        lines = [x.removeprefix("data: ") for x in found.text.splitlines() if x[:6] == "data: "]
        for line in lines:
            if line != "[DONE]":
                (answer.add_event if route == RESPONSES else answer.add)(json.loads(line))
        assert (lines[-1] == "[DONE]") == (route != RESPONSES)
        return answer

    return send


def of_schema(route: str) -> dict[str, Any]:
    """The field by which OpenAI's clients ask for JSON of a schema."""
    if route == RESPONSES:
        return {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    return {"response_format": wanted}


@pytest.mark.parametrize("route", PROMPTS)
def test_usage(ask: Ask, route):
    found = ask(route)
    assert found.reason == "length"
    assert found.usage["completion_tokens"] == 6
    assert found.usage["total_tokens"] == found.usage["prompt_tokens"] + 6


@pytest.mark.parametrize("route", PROMPTS)
def test_json_of_a_schema(ask: Ask, route):
    """All ways of asking give one answer."""
    asked = (
        of_schema(route),
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    )
    first, *others = (ask(route, 40, **wanted) for wanted in asked)
    assert first.reason == "stop"
    assert 0 <= json.loads(first.text)["age"] <= 99
    assert [found.text for found in others] == [first.text] * 2


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"choice": ["red", 'green "x"', "blue"]}, 'red|green "x"|blue'),
        ({"grammar": 'start: "a" ("b" | "c") "d"'}, "a[bc]d"),
        ({"grammar": 'root ::= "x" ("y" | "z")'}, "x[yz]"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
@pytest.mark.parametrize("route", PROMPTS)
def test_structured_outputs(ask: Ask, route, wanted, pattern):
    found = ask(route, 40, structured_outputs=wanted, temperature=1.2, seed=11)
    assert found.reason == "stop"
    assert re.fullmatch(pattern, found.text)


@pytest.mark.parametrize("choice", ["required", "named", "none"])
@pytest.mark.parametrize("route", [CHAT, RESPONSES])
def test_tools(ask: Ask, route, choice):
    def stated(**function: Any) -> dict[str, Any]:
        if route == RESPONSES:
            return {"type": "function", **function}
        return {"type": "function", "function": function}

    tools = [stated(name=name, parameters=SCHEMA) for name in ("find", "count")]
    asked = stated(name="count") if choice == "named" else choice
    more = {"tools": tools, "tool_choice": asked, "parallel_tool_calls": False}
    found = ask(route, 6 if choice == "none" else 80, **more)
    if choice == "none":
        assert found.text and not found.calls
        return
    [[name, arguments]] = found.calls
    assert name in (("count",) if choice == "named" else ("find", "count"))
    assert 0 <= json.loads(arguments)["age"] <= 99
    assert found.reason == "tool_calls"


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_echo(ask: Ask, route):
    begun = {"messages": [*HI, {"role": "assistant", "content": BEGUN}]}
    begun |= {"add_generation_prompt": False, "continue_final_message": True}
    more = begun if route == CHAT else {}
    echoed, plain = (ask(route, echo=echo, **more) for echo in (True, False))
    assert echoed.text == (BEGUN if route == CHAT else TEXT) + plain.text
    assert not echoed.logprobs
    if route == CHAT:  # the last message is the user's: there is nothing to echo
        assert ask(route, echo=True).text == ask(route).text


@pytest.mark.parametrize("route", PROMPTS)
def test_cached_tokens(ask: Ask, request: pytest.FixtureRequest, route):
    text = f"A text that comes twice, {request.node.name}. " * 6
    prompt = {COMPLETIONS: {"prompt": text}, RESPONSES: {"input": text}}
    more = prompt.get(route, {"messages": [{"role": "user", "content": text}]})
    first, again = (ask(route, 1, **more).usage for _ in range(2))
    before, after = (usage["prompt_tokens_details"] for usage in (first, again))
    assert again["prompt_tokens"] == first["prompt_tokens"]
    assert before["cached_tokens"] + 16 <= after["cached_tokens"] < again["prompt_tokens"]
    if route == RESPONSES:
        assert after["cached_tokens"] + after["cache_write_tokens"] == again["prompt_tokens"]


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_token_ids(ask: Ask, post, route):
    plain, found = ask(route), ask(route, return_token_ids=True)
    assert not plain.token_ids and not plain.prompt_token_ids
    [prompt] = found.prompt_token_ids  # with the first chunk, and never again
    assert prompt == post("/tokenize", **PROMPTS[route])[1]["tokens"]
    assert len(found.token_ids) == found.usage["completion_tokens"] == 6
    assert len(prompt) == found.usage["prompt_tokens"]
    assert found.text == plain.text
    whole = post("/detokenize", tokens=prompt + found.token_ids)[1]["prompt"]
    assert whole.endswith(plain.text)


@pytest.mark.parametrize("route", PROMPTS)
def test_logprobs(ask: Ask, route):
    asked = {
        COMPLETIONS: {"logprobs": 2},
        CHAT: {"logprobs": True, "top_logprobs": 2},
        RESPONSES: {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    }
    assert not ask(route).logprobs
    found = ask(route, **asked[route])
    assert len(found.logprobs) == 6
    assert all(value is not None and value <= 0 for value in found.logprobs)
