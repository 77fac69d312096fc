"""The families of tool-call formats, and the choice of one by the markers of a chat template."""

import importlib
from typing import TYPE_CHECKING

from rjax.errors import InvalidConfigError

if TYPE_CHECKING:
    from rjax.serve.parsing.tools.base import ToolFormat
    from rjax.tokenization import Tokenizer

# Modules of this package whose ``FORMATS`` have these names. They are loaded when they are needed,
# since the command line only needs the names.
FAMILIES = {
    "hermes": ("hermes",),
    "llama3": ("llama3_json", "llama4_json"),
    "mistral": ("mistral", "mistral_v13"),
    "qwen3_coder": ("qwen3_coder",),
    "glm4": ("glm45", "glm47"),
    "deepseek_v3": ("deepseek_v3", "deepseek_v31"),
    "granite": ("granite",),
    "gemma4": ("gemma4",),
    "pythonic": ("pythonic", "llama4_pythonic"),
}
TOOL_CALL_PARSERS = tuple(name for names in FAMILIES.values() for name in names)


def tool_format(name: str) -> "ToolFormat":
    """The format of a name in ``TOOL_CALL_PARSERS``."""
    (module,) = (family for family, names in FAMILIES.items() if name in names)
    loaded = importlib.import_module(f"rjax.serve.parsing.tools.{module}")
    (found,) = (fmt for fmt in loaded.FORMATS if fmt.name == name)
    return found


def choose_tool_format(name: str, tokenizer: "Tokenizer") -> "ToolFormat | None":
    """The format of this name, or for "auto" the one whose markers the chat template has.

    A template that does not know tools and has no markers gets Hermes, in which rjax then describes
    the functions itself. The result is None if the template knows tools in an unknown format.

    Raises:
        InvalidConfigError: the name is unknown.
    """
    if name not in ("auto", *TOOL_CALL_PARSERS):
        raise InvalidConfigError(
            f"the tool call parser is {name!r}; choose one of auto, {', '.join(TOOL_CALL_PARSERS)}"
        )
    template = template_text(tokenizer)
    formats = [tool_format(known) for known in TOOL_CALL_PARSERS]
    if name != "auto":
        formats = [fmt for fmt in formats if name in (fmt.name, fmt.variant_of)]
    for fmt in formats:
        if fmt.fits(template):
            return fmt
    if name != "auto":
        return tool_format(name)
    return None if knows_tools(tokenizer) else tool_format("hermes")


def knows_tools(tokenizer: "Tokenizer") -> bool:
    """Whether the model's chat template supports tools."""
    return "tools" in template_text(tokenizer)


def template_text(tokenizer: "Tokenizer") -> str:
    """The source of the chat template, or of all if it has several, with quotes unescaped."""
    found = tokenizer.hf.chat_template or ""
    text = "\n".join(map(str, found.values())) if isinstance(found, dict) else str(found)
    return text.replace('\\"', '"')
