"""Compile constraints to llguidance matchers, with limits on their work per token."""

import json
import re

import llguidance
import llguidance.hf

from rjax.structured.constraint import Constraint
from rjax.structured.exact_numbers import check_numbers
from rjax.structured.exhausted_patterns import merge_exhausted_patterns
from rjax.structured.lark import JSON_FORM, SpecialTokens
from rjax.structured.spelled_tokens import spells_special_token, without_forcing
from rjax.tokenization import Tokenizer

NEEDED = (
    "structured output needs a fast tokenizer and an end-of-sequence token in the model's "
    "vocabulary, and this model has no such pair"
)


def grammar_tokenizer(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]
) -> llguidance.LLTokenizer | None:
    """The tokenizer for llguidance; None if it cannot make grammars (`NEEDED`).

    It has the tokens of the logits and of the tokenizer, whichever are more.
    """
    ends = [token for token in eos_token_ids if token < vocab_size]
    if not tokenizer.is_fast or not ends:
        return None
    width = max(vocab_size, 1 + max(tokenizer.hf.get_vocab().values(), default=0))
    return llguidance.hf.from_tokenizer(tokenizer.hf, n_vocab=width, eos_token=ends)


def grammar_special_tokens(
    tokenizer: Tokenizer, seen: llguidance.LLTokenizer | None, vocab_size: int
) -> SpecialTokens:
    """The added tokens that llguidance treats as special, which includes every token in angle
    brackets. Tokens beyond the logits, which are never sampled, are left out."""
    if seen is None:
        return SpecialTokens()
    added = tokenizer.hf.added_tokens_decoder
    return SpecialTokens(
        {
            token.content: i
            for i, token in added.items()
            if i < vocab_size and seen.is_special_token(i)
        },
        tuple(token for token in tokenizer.eos_token_ids if token < vocab_size),
    )


def compile_grammar(
    constraint: Constraint, tokenizer: llguidance.LLTokenizer
) -> llguidance.LLMatcher:
    """The matcher of a constraint, in its initial state.

    llguidance limits the work per mask, but not the time of a compilation: a schema of 64 KiB can
    take hours.

    Raises:
        ValueError: the constraint is not valid.
    """
    make = llguidance.LLMatcher
    try:
        match constraint.kind:
            case "json":
                source, _ = _prepared_schema(constraint.source, 0)
                grammar = make.grammar_from_json_schema(source, overrides=JSON_FORM)
            case "regex":
                grammar = make.grammar_from_regex(constraint.source)
            case "grammar":
                lark = llguidance.grammar_from("grammar", _prepared_grammar(constraint.source))
                grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
        if constraint.outer:
            grammar = _with_outer(grammar, constraint.outer)
        if spells_special_token(constraint.kind, constraint.source, tokenizer):
            grammar = without_forcing(grammar)
        budget = llguidance.LLParserLimits(
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            max_lexer_states=50_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )
        matcher = make(tokenizer, grammar, log_level=0, limits=budget)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(brief(error)) from error
    if matcher.is_error():
        raise ValueError(brief(matcher.get_error()))
    return matcher


def _prepared_schema(text: str, start: int) -> tuple[str, int]:
    """The JSON schema that starts at an offset, as llguidance can follow it, and its end.

    Raises:
        ValueError: it holds a number that would be rounded.
    """
    try:
        schema, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:  # llguidance says what is wrong
        return text[start:], len(text)
    if isinstance(schema, dict):
        check_numbers(schema)
        merge_exhausted_patterns(schema)
    return json.dumps(schema), end


def _prepared_grammar(source: str) -> str:
    """A Lark grammar whose inline schemas are prepared."""
    parts, place = [], 0
    for found in re.finditer(r"%json\s*(?={)", source):
        if found.end() >= place:
            parts.append(source[place : found.end()])
            schema, place = _prepared_schema(source, found.end())
            parts.append(schema)
    return "".join([*parts, source[place:]])


def _with_outer(grammar: str, outer: str) -> str:
    """Embed an llguidance grammar in a Lark grammar that refers to it by ``@body``."""
    found = json.loads(grammar)
    (body,) = found["grammars"]
    return json.dumps(
        {**found, "grammars": [{"name": "outer", "lark_grammar": outer}, {**body, "name": "body"}]}
    )


def brief(error: object) -> str:
    """An error of llguidance on one line."""
    return " ".join(str(error).split())[:300]
