"""Ordinary tokens that spell a tag are text, where the tag is a token."""

import itertools
import json
import re
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from rjax.outputs import CompletionOutput
from rjax.sampling import SamplingParams
from rjax.serve.parsing.reader import OutputReader
from rjax.serve.parsing.registry import choose_output_format
from rjax.serve.parsing.tools.base import Functions
from rjax.serve.parsing.tools.parser import join_call_deltas
from rjax.serve.protocol.requests import Tool
from rjax.structured.constraint import Constraint
from rjax.structured.grammar import compile_grammar, grammar_special_tokens, grammar_tokenizer
from rjax.tokenization import Tokenizer

from .live_server import live_server, make_engine
from .reasoning_model import write_reasoning_model
from .tool_formats import TOOL_FORMATS

NAMES: Functions = {"find": None}
CALL = TOOL_FORMATS["hermes"].call_text("find", '{"a": 1}')
FIRST = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
PARAMS = SamplingParams(skip_special_tokens=False)


@pytest.fixture(scope="module", params=[False, True])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    """Tags as added tokens of Qwen's kind, and as special tokens."""
    folder = tmp_path_factory.mktemp("tags")
    return Tokenizer(write_reasoning_model(folder, special=request.param))


@pytest.fixture(scope="module")
def special(tmp_path_factory) -> Tokenizer:
    return Tokenizer(write_reasoning_model(tmp_path_factory.mktemp("special"), special=True))


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text in which no tag is a token."""
    found = [i for part in re.split("(?<=<)", text) for i in encoded(tokenizer, part)]
    assert tokenizer.decode(found, skip_special_tokens=False) == text
    assert not set(found) & tokenizer.added_tokens.keys()
    return found


def llt_of(tokenizer: Tokenizer) -> Any:
    return grammar_tokenizer(tokenizer, tokenizer.vocab_size, sorted(tokenizer.eos_token_ids))


def make_reader(
    tokenizer: Tokenizer, parser: str | None, start: str, names: Functions = NAMES
) -> OutputReader:
    tags = grammar_special_tokens(tokenizer, llt_of(tokenizer), tokenizer.vocab_size)
    answers = choose_output_format(parser, TOOL_FORMATS["hermes"], "auto", tokenizer, tags)
    return OutputReader(answers, start, names, tokenizer, [], PARAMS)


def read(
    reader: OutputReader,
    tokenizer: Tokenizer,
    tokens: list[int],
    cuts: list[tuple[int, int]] | None = None,
) -> tuple[str, str, list[tuple[str, str]]]:
    """The parts of an output in deltas that end at these tokens and characters."""
    text = tokenizer.decode(tokens, skip_special_tokens=False).rstrip("\ufffd")
    deltas = []
    for (at, place), (end, last) in itertools.pairwise(
        [(0, 0), *(cuts or ()), (len(tokens), len(text))]
    ):
        deltas.append(reader.read(CompletionOutput(0, text[place:last], tokens[at:end])))
    deltas.append(reader.read(CompletionOutput(0, "", [], finish_reason="length")))
    calls = join_call_deltas(itertools.chain.from_iterable(delta.calls for delta in deltas))
    assert reader.num_calls == len(calls)
    reasoning, content = (
        "".join(getattr(delta, name) for delta in deltas) for name in ("reasoning", "content")
    )
    return reasoning, content, [(call.name, call.arguments) for call in calls]


def test_spelled_calls_are_content(tokenizer):
    reader = make_reader(tokenizer, None, "outside")
    assert read(reader, tokenizer, spelled(tokenizer, CALL)) == ("", CALL, [])
    reader = make_reader(tokenizer, None, "outside")
    assert read(reader, tokenizer, encoded(tokenizer, CALL)) == ("", "", [("find", '{"a": 1}')])
    # A tag in the arguments is written out, and one that opens no call stays.
    for text, expected in (
        (CALL.replace("1", '"</tool_call>"'), ("", "", [("find", '{"a": "</tool_call>"}')])),
        ("<tool_call>no</tool_call> é", ("", "<tool_call>no</tool_call> é", [])),
        ("a<tool_call>", ("", "a<tool_call>", [])),
    ):
        reader = make_reader(tokenizer, None, "outside")
        assert read(reader, tokenizer, encoded(tokenizer, text)) == expected


def test_the_grammar_and_the_parser_agree(tokenizer):
    """A strict function's arguments cannot be written past its schema by spelling the tag."""
    llt = llt_of(tokenizer)
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    function = {"name": "find", "parameters": parameters, "strict": True}
    tool = Tool.model_validate({"type": "function", "function": function})
    source = TOOL_FORMATS["hermes"].text_or_calls_grammar(
        [tool], grammar_special_tokens(tokenizer, llt, tokenizer.vocab_size), several=False
    )
    for text in (CALL, CALL.replace("1", '"x"'), f"{CALL}\n{CALL}"):
        for tokens in (encoded(tokenizer, text), spelled(tokenizer, text)):
            matcher = compile_grammar(Constraint("grammar", source), llt)
            allowed = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            calls = read(make_reader(tokenizer, None, "outside"), tokenizer, tokens)[2]
            is_text = tokens == spelled(tokenizer, text)
            assert allowed == (is_text or text == CALL)
            assert bool(calls) == (not is_text)


FORCED = [
    (Constraint("json", '{"enum": ["<tool_call>"]}'), '"<tool_call>"'),
    (Constraint("json", '{"enum": ["<think>"]}', outer='start: "a" @body'), 'a"<think>"'),
    (Constraint("regex", r"<think>\{1}"), "<think>{1}"),
    (Constraint("regex", r"a</think>/"), "a</think>/"),
    (Constraint("grammar", 'start: "</tool_call>" /b/'), "</tool_call>b"),
    (Constraint("grammar", 'start: "a" %json {"const": "</think>"}'), 'a"</think>"'),
]


@pytest.mark.parametrize(("constraint", "text"), FORCED)
def test_a_constraint_may_spell_a_tag(tokenizer, constraint, text):
    """llguidance would offer the tag's token, and then refuse it."""
    matcher = compile_grammar(constraint, llt_of(tokenizer))
    made: list[int] = []
    while not matcher.is_stopped():
        mask = allocate_token_bitmask(1, tokenizer.vocab_size)
        fill_next_token_bitmask(matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        token = int(np.flatnonzero(bits)[-1])
        if token in tokenizer.eos_token_ids:
            break
        assert matcher.consume_token(token), matcher.get_error()
        made.append(token)
    assert tokenizer.decode(made) == text
    assert not set(made) & tokenizer.added_tokens.keys()


def test_a_grammar_may_name_a_tag(tokenizer):
    ids = tokenizer.hf.get_vocab()
    for source in ('start: "a" <think> "b"', f'start: "a" <[{ids["<think>"]}]> "b"'):
        matcher = compile_grammar(Constraint("grammar", source), llt_of(tokenizer))
        tokens = [ids["a"], ids["<think>"], ids["b"]]
        assert matcher.try_consume_tokens(tokens) == 3
        assert matcher.is_accepting()


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_spelled_reasoning_tags_are_text(tokenizer, parser):
    tokens = [
        *encoded(tokenizer, "<think>a "),
        *spelled(tokenizer, "</think>"),
        *encoded(tokenizer, " b</think>c "),
        *spelled(tokenizer, "<think>"),
    ]
    reader = make_reader(tokenizer, parser, "inside", {})
    assert read(reader, tokenizer, tokens) == ("a </think> b", "c <think>", [])
    thought = tokens.index(tokenizer.hf.get_vocab()["</think>"]) - 1
    assert reader.count_reasoning() == thought
    reader = make_reader(tokenizer, "qwen3", "undecided", {})
    tokens = spelled(tokenizer, "<think>a</think>b")
    assert read(reader, tokenizer, tokens) == ("", "<think>a</think>b", [])
    assert reader.count_reasoning() == 0


def test_spelled_channels_are_text(special):
    def tokens(*parts: tuple[bool, str]) -> list[int]:
        return [i for tag, text in parts for i in (encoded if tag else spelled)(special, text)]

    def parts(*given: tuple[bool, str], names: Functions = NAMES) -> Any:
        reader = make_reader(special, "openai_gptoss", FIRST, names)
        return read(reader, special, tokens(*given))

    call = '<|channel|>commentary to=functions.find<|message|>{"a": 1}<|call|>'
    analysis = "<|channel|>analysis<|message|>"
    assert parts((True, f"{FINAL}a"), (False, f"<|end|>{FIRST}{analysis}b")) == (
        "",
        f"a<|end|>{FIRST}{analysis}b",
        [],
    )
    assert parts((True, f"{FINAL}a"), (False, f"<|end|>{FIRST}{call}"))[2] == []
    assert parts((True, f"{FINAL}a<|end|>{FIRST}{call}"))[2] == [("find", '{"a": 1}')]
    assert parts(
        (True, f"{analysis}a"), (False, "<|end|>"), (True, f"b<|end|>{FIRST}{FINAL}c")
    ) == (
        "a<|end|>b",
        "c",
        [],
    )


PIECES = ("<tool_call>", "</tool_call>", '{"name": "find", "arguments": ', "{}", "}", "é", "🙂",
          "\n", "<think>", "</think>", "<", "a ")  # fmt: skip


@given(st.sampled_from((None, "qwen3", "deepseek_r1")), st.data())
def test_deltas_do_not_matter(special, parser, data):
    """Text may be behind the tokens, and a delta may end inside a tag."""
    parts = data.draw(st.lists(st.tuples(st.sampled_from(PIECES), st.booleans())))
    tokens = [i for text, tag in parts for i in (encoded if tag else spelled)(special, text)]
    start = "outside" if parser is None else data.draw(st.sampled_from(("inside", "undecided")))
    cuts = []
    shown = 0
    for at in data.draw(st.lists(st.integers(0, len(tokens)), max_size=6).map(sorted)):
        most = len(special.decode(tokens[:at], skip_special_tokens=False).rstrip("\ufffd"))
        shown = data.draw(st.integers(shown, max(shown, most)))
        cuts.append((at, shown))
    whole, cut = make_reader(special, parser, start), make_reader(special, parser, start)
    assert read(cut, special, tokens, cuts) == read(whole, special, tokens)
    assert cut.count_reasoning() == whole.count_reasoning()


def test_an_output_that_ends_inside_a_tag(special):
    reader = make_reader(special, None, "outside")
    delta = reader.read(CompletionOutput(0, "a<tool", encoded(special, "a<tool_call>")))
    last = reader.read(CompletionOutput(0, "_", [], finish_reason="stop", stop_reason="_"))
    assert delta.content + last.content == "a<tool_"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = write_reasoning_model(tmp_path_factory.mktemp("spelled") / "tiny", special=False)
    with live_server(make_engine(folder, max_num_seqs=2)) as found:
        yield found


@pytest.mark.thorough
def test_the_server_calls_nothing_that_was_only_spelled(served):
    text = '<tool_call>{"name": "find", "arguments": {"a": "no number"}}</tool_call>'
    function = {"name": "find", "parameters": {"type": "object", "properties": {}}}
    body: dict[str, Any] = {"structured_outputs": {"choice": [text]}, "temperature": 0}
    chat = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": function}],
        **body,
    }
    asked = {"input": "a", "tools": [{"type": "function", **function}], **body}

    def post(path: str, body: dict[str, Any]) -> httpx2.Response:
        answer = httpx2.post(f"{served.url}/v1/{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer

    def events(answer: httpx2.Response) -> list[dict[str, Any]]:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    (choice,) = post("chat/completions", chat).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["tool_calls"]) == (text, None)
    assert choice["finish_reason"] == "stop"
    choices = [
        event["choices"][0] for event in events(post("chat/completions", chat | {"stream": True}))
    ]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert not any(delta.get("tool_calls") for delta in deltas)
    (item,) = post("responses", asked).json()["output"]
    assert item["content"][0]["text"] == text
    last = events(post("responses", asked | {"stream": True}))[-1]["response"]
    assert [item["content"][0]["text"] for item in last["output"]] == [text]
