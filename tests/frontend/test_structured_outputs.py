"""Structured output offline: every kind, beside free requests, and what is refused."""

import json
import re
import sys
from typing import Any

import pydantic
import pytest

import rjax.structured
from rjax.api.llm import LLM
from rjax.cli.arguments import sampling_options
from rjax.commands.generate import build_parser, main
from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.sampling import SamplingParams, StructuredOutputsParams
from rjax.structured.compiler import GrammarCompiler

from .tiny_tokenizers import build

SYSTEM = "Name: Ann Lee, age: 41, country: Peru. " * 3


class Person(pydantic.BaseModel):
    """A schema given as a class."""

    model_config = pydantic.ConfigDict(extra="forbid")
    age: int = pydantic.Field(ge=0, le=99)
    colour: str = pydantic.Field(pattern="^(red|blue)$")


def params(seed: int = 3, n: int = 1, **wanted: Any) -> SamplingParams:
    outputs = StructuredOutputsParams(**wanted) if wanted else None
    return SamplingParams(max_tokens=48, seed=seed, n=n, structured_outputs=outputs)


def person(text: str) -> bool:
    return bool(Person.model_validate_json(text))


SCHEMA = Person.model_json_schema()
KINDS: list[tuple[dict[str, Any], Any]] = [
    ({"json": Person}, person),
    ({"json": SCHEMA}, person),
    ({"json": json.dumps(SCHEMA)}, person),
    ({"regex": "[a-f]{3}-[0-9]{2}"}, re.compile("[a-f]{3}-[0-9]{2}").fullmatch),
    ({"choice": ["yes", "no \"never\""]}, lambda text: text in ("yes", 'no "never"')),
    ({"grammar": 'start: "a" ("b" | "c") "d"'}, lambda text: text in ("abd", "acd")),
    ({"grammar": 'root ::= "x" ("y" | "z")'}, lambda text: text in ("xy", "xz")),
]  # fmt: skip


@pytest.mark.thorough
def test_every_kind_beside_free_requests_with_relay_on(tiny_llm: LLM) -> None:
    free = [params(seed=7), params(seed=8, n=2)]
    every = [free[0], *(params(n=2, **wanted) for wanted, _ in KINDS), free[1]]
    prompts = [f"{SYSTEM}{i}" for i in range(len(every))]
    outputs = tiny_llm.generate(prompts, every, use_tqdm=False)
    for (wanted, matches), output in zip(KINDS, outputs[1:-1], strict=True):
        assert output.error is None
        assert len(output.outputs) == 2
        for completion in output.outputs:
            assert completion.finish_reason == "stop", wanted
            assert matches(completion.text), (wanted, completion.text)
    texts = [[c.text for c in o.outputs] for o in outputs]
    assert texts[1] == texts[2] == texts[3]  # the same schema
    for place, mine in ((0, free[0]), (-1, free[1])):
        (alone,) = tiny_llm.generate(prompts[place], mine, use_tqdm=False)
        assert [c.text for c in alone.outputs] == texts[place]


def test_any_json_object_begins_as_one(tiny_llm: LLM) -> None:
    (output,) = tiny_llm.generate("A", params(json_object=True), use_tqdm=False)
    assert output.outputs[0].text.startswith("{")


def test_chat_follows_a_constraint(tiny_llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hello"}]
    (output,) = tiny_llm.chat(talk, params(choice=["red", "blue"]), use_tqdm=False)
    assert output.outputs[0].text in ("red", "blue")


def test_a_choice_of_thousands(tiny_llm: LLM) -> None:
    choices = [f"number {i * 7919 % 100_003}" for i in range(4_096)]
    (output,) = tiny_llm.generate("A", params(n=4, choice=choices), use_tqdm=False)
    assert all(completion.text in choices for completion in output.outputs)
    assert {completion.finish_reason for completion in output.outputs} == {"stop"}


def test_an_invalid_constraint_harms_no_other(tiny_llm: LLM) -> None:
    bad = [params(regex="("), params(grammar="start: nothing"), params(json={"type": 5})]
    good = params(choice=["a"])
    outputs = tiny_llm.generate(["x"] * 4, [*bad, good], use_tqdm=False)
    for output, kind in zip(outputs, ("regex", "grammar", "json"), strict=False):
        assert isinstance(output.error, InvalidRequestError)
        assert f"the {kind} is not valid" in str(output.error)
        assert "\n" not in str(output.error)
    assert outputs[3].outputs[0].text == "a"
    with pytest.raises(InvalidRequestError, match="not valid"):
        tiny_llm.generate("x", bad[0], use_tqdm=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "none of them"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"json": {"a": {1}}}, "written as JSON"),
        ({"json": {"maximum": float("inf")}}, "written as JSON"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "json"),
        ({"json": int}, "pydantic"),
        ({"regex": ""}, "regex"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": []}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["\udc00"]}, "surrogate"),
        ({"json_object": False}, "none of them"),
        ({"json_object": 1}, "json_object"),
    ],
)
def test_wrong_constraints_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    "other",
    [{"ignore_eos": True}, {"min_tokens": 2}, {"allowed_token_ids": [1]}, {"bad_words": ["a"]}],
)
def test_contradicting_parameters_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{next(iter(other))} contradicts"):
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]), **other)


def test_a_line_of_json_gives_a_constraint() -> None:
    made = SamplingParams.from_options({"structured_outputs": {"choice": ["a", "b"]}})
    assert made.structured_outputs == StructuredOutputsParams(choice=("a", "b"))
    assert hash(made)
    with pytest.raises(InvalidRequestError, match="whitespace"):
        SamplingParams.from_options({"structured_outputs": {"whitespace": " "}})


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mask", "grammar"):
        monkeypatch.delitem(sys.modules, f"rjax.structured.{name}", raising=False)
        monkeypatch.delattr(rjax.structured, name, raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        InvalidConfigError, match=r"llguidance.*pip install.*\[structured\]"
    ) as raised:
        GrammarCompiler(build("byte_level"), 512)
    assert "\n" not in str(raised.value)


def test_the_command_takes_a_constraint_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--structured-outputs", '{"choice": ["yes", "no"]}']
    options = sampling_options(build_parser().parse_args(given))
    made = SamplingParams.from_options(options)
    assert made.structured_outputs == StructuredOutputsParams(choice=("yes", "no"))
    for bad, message in (("{", "not JSON"), ("[1]", "no JSON object"), ('{"a": 1}', "'a'")):
        assert main(["--prompt", "x", "--structured-outputs", bad]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
