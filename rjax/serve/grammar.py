"""Grammars of llguidance, and the budget that each is compiled and followed within."""

import dataclasses
from typing import Any, Literal

import llguidance
import llguidance.hf

from rjax.tokenization import Tokenizer

# One space after commas and colons and none elsewhere, as json.dumps writes: free white space lets
# a weak model go on with it until its tokens are used up.
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """What a text must match: a JSON schema (as text), a regex, or a grammar (Lark or GBNF)."""

    kind: Literal["json", "regex", "grammar"]
    source: str


def grammar_tokenizer(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]
) -> llguidance.LLTokenizer | None:
    """llguidance's view of a tokenizer; None of one that is not fast, which it cannot read."""
    if not tokenizer.is_fast:
        return None
    return llguidance.hf.from_tokenizer(tokenizer.hf, n_vocab=vocab_size, eos_token=eos_token_ids)


def compile_grammar(
    constraint: Constraint, tokenizer: llguidance.LLTokenizer
) -> llguidance.LLMatcher:
    """The matcher of a constraint, at its start.

    llguidance's own budget bounds each mask, but not the time that a compile takes: a schema of
    64 KiB can take hours.

    Raises:
        ValueError: the constraint is not valid.
    """
    make = llguidance.LLMatcher
    try:
        match constraint.kind:
            case "json":
                grammar = make.grammar_from_json_schema(constraint.source, overrides=_JSON_FORM)
            case "regex":
                grammar = make.grammar_from_regex(constraint.source)
            case "grammar":
                grammar = llguidance.grammar_from("grammar", constraint.source)
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


def brief(error: object) -> str:
    """An error of llguidance in one line."""
    return " ".join(str(error).split())[:300]
