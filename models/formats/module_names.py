"""Names of modules as quantisation configs write them."""

import re
from collections.abc import Iterable

from rjax.models.errors import CheckpointError


def matches(entry: str, module: str) -> bool:
    """Whether an entry such as "lm_head", "layers.3.mlp" or "re:.*down_proj" means a module.

    An entry is a whole name, or some parts of one; after "re:" it is a regular expression for the
    start of the name, as in compressed-tensors. "Linear" means every projection.
    """
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return entry == "Linear" or f".{entry}." in f".{module}."


def checked_entries(entries: object, where: str) -> tuple[str, ...]:
    """A list of entries, or () for null.

    Raises:
        CheckpointError: it is not a list of texts, or one is no regular expression.
    """
    if entries is None:
        return ()
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise CheckpointError(f"{where} is {entries!r:.200}; expected a list of module names")
    for entry in entries:
        try:
            re.compile(entry.removeprefix("re:"))
        except re.error as error:
            raise CheckpointError(f"{where} has {entry!r:.200}: {error}") from None
    return tuple(entries)


def is_in(module: str, entries: Iterable[str]) -> bool:
    """Whether any of the entries means a module."""
    return any(matches(entry, module) for entry in entries)


def is_head(module: str) -> bool:
    """Whether a module is the output projection: "lm_head" or "language_model.lm_head"."""
    return module.rpartition(".")[2] == "lm_head"
