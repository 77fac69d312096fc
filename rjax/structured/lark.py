"""Pieces of Lark grammars for llguidance."""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

# One space after commas and colons and none elsewhere, as json.dumps writes: free white space lets
# a weak model go on with it until its tokens are used up.
JSON_FORM: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
TEXT_RULE = r"TEXT: /(.|\n)*/"  # any text without special tokens


def quoted(text: str) -> str:
    """A text as it is; nothing for none."""
    return json.dumps(text) if text else ""


def regex_text(text: str) -> str:
    """A text as part of a ``/regex/``."""
    return re.escape(text).replace("/", r"\/")


@dataclasses.dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Markers in grammars. A token that llguidance takes as special is no text to it: a grammar
    must name it, and a model would otherwise have to spell it in pieces.

    Attributes:
        special: ids of these tokens.
        eos: ids of the tokens that end an answer.
    """

    special: Mapping[str, int] = dataclasses.field(default_factory=dict)
    eos: tuple[int, ...] = ()

    def is_special(self, marker: str) -> bool:
        """Whether the marker is one special token."""
        return marker in self.special

    def rule(self, text: str) -> str:
        """A text that may hold markers; nothing for none."""
        pattern = "|".join(re.escape(marker) for marker in self.special)
        parts = re.split(f"({pattern})", text) if pattern else [text]
        rules = itertools.chain.from_iterable(
            (quoted(plain), f"<[{self.special[marker]}]>" if marker else "")
            for plain, marker in itertools.zip_longest(parts[::2], parts[1::2], fillvalue="")
        )
        return " ".join(filter(None, rules))

    def anything_up_to(self, name: str, marker: str) -> str:
        """A rule: any text, other markers among it, and the first such marker."""
        if marker not in self.special:
            return self.text_up_to(name, marker)
        last = self.special[marker]
        others = ",".join(map(str, sorted({last, *self.eos})))
        return f"{name}: <[^{others}]>* <[{last}]>"

    def text_up_to(self, name: str, marker: str, text: str = "TEXT") -> str:
        """A rule: any text, and the first such marker.

        Args:
            name: of the rule.
            marker: to end with.
            text: a terminal in place of any text.
        """
        if marker in self.special:
            return f"{name}: {text} {self.rule(marker)}"
        return f"{name}[lazy]: {text} {quoted(marker)}"
