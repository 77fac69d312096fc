"""StructuredOutputsParams: what a request's text must match, with the names of vLLM."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, no_type_check

from rjax.errors import InvalidRequestError
from rjax.sampling import checks
from rjax.structured.constraint import Constraint, choice_source, json_source
from rjax.structured.schemas import generation_schema
from rjax.vllm.names import STRUCTURED_FIELDS, with_refusals

EXCLUDED = ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words")
"""Fields of `SamplingParams` that conflict with a constraint."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@no_type_check  # ``__post_init__`` checks the values, with messages for users
@with_refusals(STRUCTURED_FIELDS)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the text must match: set exactly one field.

    The constructor checks the types. The schema, regex or grammar is compiled when the request is
    added.

    The tokens of each sample are masked, so that the text always matches. A text that
    ``max_tokens`` cuts off is a prefix of a match. JSON has one space after commas and colons and
    no other white space between its values.

    Attributes:
        json: a JSON schema, as a dict, text, or pydantic model class; stored as text.
        regex: a regular expression that matches the whole text.
        choice: the allowed texts; stored as a tuple.
        grammar: a context-free grammar in Lark or GBNF notation.
        json_object: True for any JSON object.

    Raises:
        InvalidRequestError: none or several fields are set, or one is empty or of the wrong type.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InvalidRequestError(
                f"structured_outputs has {found}; give exactly one of {', '.join(_KINDS)}"
            )
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                checks.refuse(f"structured_outputs.{name}", text, "give a text that is not empty")
            _check_unicode(name, text or "")
        if self.json_object is not None:
            value = checks.boolean("structured_outputs.json_object", self.json_object)
            object.__setattr__(self, "json_object", value)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            remedy = "give a list of texts, none empty"
            choices = checks.sequence("structured_outputs.choice", self.choice, 2**31, remedy)
            if not choices or not all(isinstance(text, str) and text for text in choices):
                checks.refuse("structured_outputs.choice", self.choice, remedy)
            _check_unicode("choice", "".join(choices))
            object.__setattr__(self, "choice", choices)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "StructuredOutputsParams":
        """Build from a mapping, for example from a line of a JSON Lines file.

        Raises:
            InvalidRequestError: an unknown key, or a value that the constructor refuses.
        """
        for key in options:
            if key not in _KINDS:
                checks.refuse(
                    "a key of structured_outputs", key, f"give one of {', '.join(_KINDS)}"
                )
        return cls(**options)

    @property
    def constraint(self) -> Constraint:
        """The constraint to compile."""
        if self.regex is not None:
            return Constraint("regex", self.regex)
        if self.grammar is not None:
            return Constraint("grammar", self.grammar)
        if self.choice is not None:
            return Constraint("grammar", choice_source(self.choice))
        if self.json is None:
            return Constraint("json", json_source({"type": "object"}))
        assert isinstance(self.json, str), "kept as text"
        return Constraint("json", self.json)


@no_type_check
def _schema_text(given: Any) -> str:
    where = "structured_outputs.json"
    schema = given
    if isinstance(given, type) and callable(getattr(given, "model_json_schema", None)):
        schema = given.model_json_schema()
    elif isinstance(given, str):
        try:
            schema = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(schema, Mapping):
        checks.refuse(where, given, "give a JSON schema: a dict, its text, or a pydantic class")
    try:
        text = json_source(generation_schema(dict(schema)))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"{where} cannot be written as JSON: {error}") from error
    return text


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"structured_outputs.{name} holds half of a surrogate pair; give valid Unicode"
        ) from error
