"""Reading tool calls, whole and in pieces."""

import itertools
import json
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.serve.parsing.tools.base import Functions
from rjax.serve.parsing.tools.parser import join_call_deltas

from .live_server import live_server, make_engine
from .tool_formats import JSON_FORMATS, TOOL_FORMATS

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
NAMES: Functions = dict.fromkeys(("find", "count"))
HERMES = '<tool_call>\n{"name": "find", "arguments": {"a": "</b>"}}\n</tool_call>'


def read(fmt: str, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    content, calls = read_texts(fmt, pieces)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def read_texts(fmt: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = TOOL_FORMATS[fmt].parser(NAMES, str)
    content, news = "", []
    for i, piece in enumerate(pieces):
        text, found = reader.feed(piece, ended=i == len(pieces) - 1)
        content, news = content + text, news + found
    calls = join_call_deltas(news)
    assert reader.num_calls == len(calls)
    assert len({call.id for call in calls}) == len(calls)
    return content, [(call.name, call.arguments) for call in calls]


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
    ("llama3_json", '{"name": "find", "parameters": {"a": 1}}', "", [("find", {"a": 1})]),
    ("llama3_json", '<|python_tag|>{"name": "count", "parameters": {}}', "", [("count", {})]),
    (
        "llama3_json",
        '{"name": "find", "parameters": {}}; {"name": "count", "parameters": {"b": [1]}}',
        "",
        [("find", {}), ("count", {"b": [1]})],
    ),
    ("llama3_json", "No call.", "No call.", []),
    ("llama3_json", '{"name": "evil", "parameters": {}}', '{"name": "evil", "parameters": {}}', []),
    ("llama3_json", '{"name": "find", "parameters": {}} and  more', "and  more", [("find", {})]),
    ("llama3_json", '{"parameters": {"a": 2}, "name": "find"}', "", [("find", {"a": 2})]),
    ("llama3_json", '{"type": "function", "name": "find", "parameters": {}}', "", [("find", {})]),
    ("llama3_json", '{"answer": {"name": "find"}}', None, []),
    ("llama3_json", '<|python_tag|>print("{")', None, []),
    ("llama3_json", '{"name": "find", "parameters": "{}"}', None, []),
    (
        "llama3_json",
        '{"name": "find", "parameters": {}}; {"name": "evil", "parameters": {}}',
        '; {"name": "evil", "parameters": {}}',
        [("find", {})],
    ),
    ("hermes", f"a {HERMES}\n b  c\n\n{HERMES} d", "a b  c\n\nd", [("find", {"a": "</b>"})] * 2),
    (
        "hermes",
        '<tool_call>{"name": "find", "arguments": {"a": "</tool_call> \\" }"}} </tool_call>',
        "",
        [("find", {"a": '</tool_call> " }'})],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "count"}</tool_call>.',
        ".",
        [("count", {"a": 1})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "find", "arguments": {"a": [{}]}, "id": "}"}</tool_call>',
        "",
        [("find", {"a": [{}]})],
    ),
    ("hermes", '<tool_call>{"name": "find", "arguments": {}</tool_call> x', "x", [("find", {})]),
    ("hermes", '<tool_call>{"name": "find", "arguments": ', None, []),
    ("hermes", '<tool_call>{"name": "find", "arguments": {}}</tool_c', "", [("find", {})]),
    ("llama3_json", "{" * 50_000, "{" * 50_000, []),
]


@pytest.mark.parametrize(("fmt", "text", "content", "calls"), CASES)
def test_whole_and_by_character(fmt, text, content, calls):
    expected = (text if content is None else content, calls)
    assert read(fmt, [text]) == expected
    if len(text) < 1000:
        assert read(fmt, list(text)) == expected


@pytest.mark.parametrize("fmt", JSON_FORMATS)
def test_arguments_are_passed_on_as_they_come(fmt):
    text = TOOL_FORMATS[fmt].call_text("find", '{"a": [1, {"b": "}\\""}], "c": null}')
    reader = TOOL_FORMATS[fmt].parser(NAMES, str)
    news = [reader.feed(char) for char in text]
    assert all(content == "" for content, _ in news)
    first, *rest = [piece for _, found in news for piece in found]
    assert (first.index, first.name, first.arguments) == (0, "find", "")
    assert first.id
    assert all(piece.id is None and piece.name is None for piece in rest)
    assert len(rest) == len('{"a": [1, {"b": "}\\""}], "c": null}')  # one for each character
    # A call that is cut off is as long as it came.
    assert read_texts(fmt, [text[: text.index("null") + 2]]) == (
        "",
        [("find", '{"a": [1, {"b": "}\\""}], "c": nu')],
    )


def test_prose_is_not_held_back():
    for fmt in TOOL_FORMATS:
        reader = TOOL_FORMATS[fmt].parser(NAMES, str)
        assert [reader.feed(word)[0] for word in ("No ", "call < ", "here.")] == [
            "No ",
            "call < ",
            "here.",
        ]


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("fmt", ["hermes", "llama3_json"])
def test_a_streamed_call_through_the_server(folder, fmt):
    tool: Any = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
    body: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 60,
        "seed": 1,
    }
    with (
        live_server(make_engine(folder), tool_call_parser=fmt) as found,
        openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with client.chat.completions.stream(**body) as events:
            choice = events.get_final_completion().choices[0]
        chunks: Any = [c.choices[0] for c in client.chat.completions.create(stream=True, **body)]
        whole: Any = client.chat.completions.create(**body).choices[0]
    assert choice.finish_reason == whole.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.function.name == "find"
    assert set(json.loads(call.function.arguments)) == {"age"}
    [same] = whole.message.tool_calls or []
    assert same.function.arguments == call.function.arguments
    assert not whole.message.content
    first, *rest = [made for c in chunks for made in c.delta.tool_calls or ()]
    assert (first.index, first.type, first.function.name) == (0, "function", "find")
    assert first.id and first.function.arguments == ""
    assert len(rest) > 1
    assert all((r.index, r.id, r.type, r.function.name) == (0, None, None, None) for r in rest)
    assert "".join(r.function.arguments for r in rest) == call.function.arguments
    assert not "".join(c.delta.content or "" for c in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.thorough
def test_a_call_cut_off_says_so(folder):
    tool: Any = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [tool],
        "tool_choice": "required",
        "seed": 1,
    }
    with live_server(make_engine(folder)) as found:
        url = found.url + "/v1/chat/completions"
        texts = []
        for tokens in range(1, 60, 4):
            answer = httpx2.post(url, json={**body, "max_tokens": tokens}, timeout=60).json()
            [choice] = answer["choices"]
            texts.append(
                [c["function"]["arguments"] for c in choice["message"]["tool_calls"] or ()]
            )
            if choice["finish_reason"] == "tool_calls":
                break
            assert choice["finish_reason"] == "length"
    whole = texts[-1][0]
    cut = [text for [text] in filter(None, texts)]
    assert json.loads(whole)
    assert len(set(cut)) > 1
    assert all(whole.startswith(text) for text in cut)


PARTS = (
    *(HERMES, '{"name": "find", "parameters": {"a": "}"}}', "<|python_tag|>"),
    *("<tool_call>", "</tool_call>", '{"name": "find", "arguments": ', '{"a": {"b": "'),
    *("plain", "<", "\n", "{", "}", '"', "\\", ";", " ", "é", "[", "]", "(", ")", ",", "find", "'"),
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "find(a=", "<function=find>", "<parameter=a>"),
    *("</parameter>", "</function>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "None"),
    *("function", "\n```json\n", "\n```"),
    *(tag for fmt in TOOL_FORMATS.values() for tag in (*fmt.tags, *fmt.opening)),
)


@given(st.sampled_from(list(TOOL_FORMATS)), st.lists(st.sampled_from(PARTS)), st.data())
def test_pieces_do_not_matter(fmt, parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert read_texts(fmt, pieces) == read_texts(fmt, [text])


@pytest.mark.parametrize("fmt", TOOL_FORMATS)
def test_what_a_format_writes_it_reads(fmt):
    text = TOOL_FORMATS[fmt].call_text("find", '{"a": "\\n"}')
    assert read(fmt, [text]) == ("", [("find", {"a": "\n"})])
