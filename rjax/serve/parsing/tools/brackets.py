"""Finds where nested brackets close."""


class BracketScanner:
    """Finds where a value in brackets ends, incrementally.

    Args:
        depth: nesting depth of the brackets around the next character.
        brackets: opening and closing brackets.
        quotes: characters around strings, in which brackets do not count.
    """

    def __init__(
        self, depth: int = 0, *, brackets: tuple[str, str] = ("{[", "}]"), quotes: str = '"'
    ) -> None:
        self._depth = depth
        self._begin, self._end = brackets
        self._quotes = quotes
        self._quote = ""  # of the string around the next character
        self._escaped = False

    def closing(self, text: str, floor: int) -> int | None:
        """Index after the bracket that lowers the nesting depth to ``floor``; None if it is not in
        this piece of text."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                if char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in self._quotes:
                self._quote = char
            elif char in self._begin:
                self._depth += 1
            elif char in self._end:
                self._depth -= 1
                if self._depth <= floor:
                    return i + 1
        return None
