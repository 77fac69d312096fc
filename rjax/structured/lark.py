"""Building blocks of Lark grammars for llguidance."""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

# White space as in json.dumps: one space after commas and colons. With arbitrary white space a weak
# model may generate it until max_tokens.
JSON_FORM: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
TEXT_RULE = r"TEXT: /(.|\n)*/"  # any text without special tokens


def quoted(text: str) -> str:
    """A Lark string literal; empty for an empty text."""
    return json.dumps(text) if text else ""


def regex_text(text: str) -> str:
    """A text escaped for use in a ``/regex/``."""
    return re.escape(text).replace("/", r"\/")


@dataclasses.dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens in grammars. llguidance does not match a special token as text, so a grammar
    must refer to it by id.

    Attributes:
        special: ids of the special tokens, by their text.
        eos: ids of the tokens that end an output.
    """

    special: Mapping[str, int] = dataclasses.field(default_factory=dict)
    eos: tuple[int, ...] = ()

    def is_special(self, marker: str) -> bool:
        """Whether the marker is one special token."""
        return marker in self.special

    def rule(self, text: str) -> str:
        """The rule of a text that may contain special tokens; empty for an empty text."""
        pattern = "|".join(re.escape(marker) for marker in self.special)
        parts = re.split(f"({pattern})", text) if pattern else [text]
        rules = itertools.chain.from_iterable(
            (quoted(plain), f"<[{self.special[marker]}]>" if marker else "")
            for plain, marker in itertools.zip_longest(parts[::2], parts[1::2], fillvalue="")
        )
        return " ".join(filter(None, rules))

    def anything_up_to(self, name: str, marker: str) -> str:
        """A rule: any text, including other special tokens, up to and including ``marker``."""
        if marker not in self.special:
            return self.text_up_to(name, marker)
        last = self.special[marker]
        others = ",".join(map(str, sorted({last, *self.eos})))
        return f"{name}: <[^{others}]>* <[{last}]>"

    def text_up_to(self, name: str, marker: str, text: str = "TEXT") -> str:
        """A rule: text without special tokens, up to and including ``marker``.

        Args:
            name: name of the rule.
            marker: a special token or a text.
            text: terminal of the text before the marker.
        """
        if marker in self.special:
            return f"{name}: {text} {self.rule(marker)}"
        return f"{name}[lazy]: {text} {quoted(marker)}"
