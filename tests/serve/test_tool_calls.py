"""Reading tool calls, whole and in pieces."""

import itertools
import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.serve.tools import FORMATS, CallReader

from .running import make_engine, running

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
NAMES = frozenset(("find", "count"))
HERMES = '<tool_call>\n{"name": "find", "arguments": {"a": "</b>"}}\n</tool_call>'


def read(fmt: str, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    reader = CallReader(FORMATS[fmt], NAMES)
    content, calls = "", []
    for piece in pieces:
        text, found = reader.feed(piece)
        content, calls = content + text, calls + found
    text, found = reader.finish()
    calls += found
    assert reader.num_calls == len(calls)
    assert len({call.id for call in calls}) == len(calls)
    return content + text, [(call.name, json.loads(call.arguments)) for call in calls]


CASES = [
    ("hermes", HERMES, "", [("find", {"a": "</b>"})]),
    ("hermes", f"Let me see. {HERMES}", "Let me see. ", [("find", {"a": "</b>"})]),
    ("hermes", f"{HERMES}\n{HERMES}", "", [("find", {"a": "</b>"})] * 2),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", [("find", {"a": "</b>"})]),
    ("hermes", "a <tool_cal b <", "a <tool_cal b <", []),
    ("hermes", "<tool_call>not json</tool_call> x", "<tool_call>not json</tool_call> x", []),
    ("hermes", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ("hermes", HERMES.replace("find", "evil"), HERMES.replace("find", "evil"), []),
    ("hermes", "<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
    ("hermes", '<tool_call>{"name": "find", "arguments": "__import__(1)"}</tool_call>', None, []),
    ("llama3", '{"name": "find", "parameters": {"a": 1}}', "", [("find", {"a": 1})]),
    ("llama3", '<|python_tag|>{"name": "count", "parameters": {}}', "", [("count", {})]),
    (
        "llama3",
        '{"name": "find", "parameters": {}}; {"name": "count", "parameters": {"b": [1]}}',
        "",
        [("find", {}), ("count", {"b": [1]})],
    ),
    ("llama3", "No call.", "No call.", []),
    ("llama3", '{"name": "evil", "parameters": {}}', '{"name": "evil", "parameters": {}}', []),
    ("llama3", '{"name": "find", "parameters": {}} and more', None, []),
    ("llama3", "{" * 50_000, "{" * 50_000, []),
]


@pytest.mark.parametrize(("fmt", "text", "content", "calls"), CASES)
def test_whole_and_by_character(fmt, text, content, calls):
    expected = (text if content is None else content, calls)
    assert read(fmt, [text]) == expected
    if len(text) < 1000:
        assert read(fmt, list(text)) == expected


def test_llama_calls_through_the_server(folder):
    tool = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
    engine = make_engine(folder)
    with (
        running(engine, tool_format="llama3") as found,
        openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=60,
            seed=1,
        ) as events,
    ):
        choice = events.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "find"
    assert set(json.loads(call.function.arguments)) == {"age"}


@given(
    st.lists(
        st.sampled_from([HERMES, "plain", "<", "<tool_call>", "\n", "</tool_call>", "{", "é"])
    ),
    st.data(),
)
def test_pieces_do_not_matter(parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    whole = read("hermes", [text])
    found = read("hermes", pieces)
    assert found[1] == whole[1]
    # Where there are calls, line breaks between them belong to nobody.
    assert "".join(found[0].split()) == "".join(whole[0].split())


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_a_format_writes_it_reads(fmt):
    text = FORMATS[fmt].call_text("find", '{"a": "\\n"}')
    assert read(fmt, [text]) == ("", [("find", {"a": "\n"})])
