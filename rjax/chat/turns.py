"""Turns of a chat, read from a terminal or a pipe; a turn can have several lines."""

from collections.abc import Callable

QUOTES = '"""'
PROMPT, MORE = "> ", "... "


def read_turn(read_line: Callable[[str], str | None]) -> str | None:
    """The next turn without its marks of continuation; None at the end of the input.

    A line that ends in a backslash continues on the next one. A line that starts with three double
    quotes begins a block, which ends with the next three at the end of a line.

    Args:
        read_line: returns a line without its line break, or None at the end of the input; called
            with the prompt to show.
    """
    line = read_line(PROMPT)
    if line is None:
        return None
    if line.lstrip().startswith(QUOTES):
        return _block(line.lstrip().removeprefix(QUOTES), read_line)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        more = read_line(MORE)
        if more is None:
            break
        lines.append(more)
    return "\n".join(lines)


def _block(first: str, read_line: Callable[[str], str | None]) -> str:
    lines, line = [], first
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        more = read_line(MORE)
        if more is None:
            return "\n".join(lines).strip("\n")
        line = more
    return "\n".join([*lines, line.rstrip().removesuffix(QUOTES)]).strip("\n")
