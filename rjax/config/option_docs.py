"""The documentation of options, read from the docstrings of the dataclasses that define them."""

import dataclasses
import inspect
import re
import textwrap

from rjax.config.engine_config import GROUPS, EngineConfig

_ATTRIBUTE = re.compile(r"    (\w+(?:, \w+)*): (.*)")
_CONTINUATION = re.compile(r" {8,}(\S.*)")


def attribute_docs(cls: type) -> dict[str, str]:
    """The "Attributes" section of a class's docstring: each attribute's text on one line."""
    lines = (inspect.getdoc(cls) or "").splitlines()
    start = lines.index("Attributes:") + 1 if "Attributes:" in lines else len(lines)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines[start:]:
        if first := _ATTRIBUTE.fullmatch(line):
            names = first[1].split(", ")
            found |= dict.fromkeys(names, first[2])
        elif more := _CONTINUATION.fullmatch(line):
            found |= {name: f"{found[name]} {more[1]}" for name in names}
        else:
            break
    return found


def engine_options() -> dict[str, "dataclasses.Field[object]"]:
    """Every option of the engine, as ``LLM(model, **options)`` takes them, in order."""
    classes = (*GROUPS.values(), EngineConfig)
    return {
        field.name: field
        for cls in classes
        for field in dataclasses.fields(cls)
        if field.name not in GROUPS or cls is not EngineConfig
    }


def engine_option_docs() -> dict[str, str]:
    """The text of every option of `engine_options`."""
    texts: dict[str, str] = {}
    for cls in (*GROUPS.values(), EngineConfig):
        texts = attribute_docs(cls) | texts
    return {name: texts[name] for name in engine_options()}


def with_engine_options[C: type](cls: C) -> C:
    """Class decorator: replaces the line ``{options}`` in a docstring by all options."""
    entries = [
        textwrap.fill(f"{name}: {text}", 88, subsequent_indent=" " * 4, break_on_hyphens=False)
        for name, text in engine_option_docs().items()
    ]
    if cls.__doc__ is not None:  # with -OO there are no docstrings
        listed = textwrap.indent("\n".join(entries), " " * 8)
        cls.__doc__ = cls.__doc__.replace(" " * 8 + "{options}", listed)
    return cls
