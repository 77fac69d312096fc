"""Grammars whose text spells a special token, such as an enum of "<think>"."""

import json
import re

import llguidance

# Strings and regexes of a grammar; one that is not closed ends with the text, in linear time.
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"?|/(?:\\.|[^/\\])*/?', re.DOTALL)
_NOT_FORCED = '%llguidance {"no_forcing": true}\n'


def spells_special_token(kind: str, source: str, tokenizer: llguidance.LLTokenizer) -> bool:
    """Whether a constraint's text has a special token's text.

    Args:
        kind: kind of the constraint.
        source: source of the constraint; a grammar's references to special tokens are no text.
        tokenizer: the model's tokenizer.
    """
    text = "\n".join(_LITERAL.findall(source)) if kind == "grammar" else source
    return any(map(tokenizer.is_special_token, tokenizer.tokenize_str(text)))


def without_forcing(grammar: str) -> str:
    """An llguidance grammar that does not choose the tokens of text without alternatives.

    llguidance tokenises such text itself and then offers the special token that the text spells,
    which is no text for the grammar: the output ends in an error.
    """
    found = json.loads(grammar)
    for part in found["grammars"]:
        if part.get("json_schema") is not None:
            part["lark_grammar"] = f"start: %json {json.dumps(part.pop('json_schema'))}"
        if "%llguidance" not in part["lark_grammar"]:
            part["lark_grammar"] = _NOT_FORCED + part["lark_grammar"]
    return json.dumps(found)
