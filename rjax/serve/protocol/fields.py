"""Unknown fields of request bodies: refused by name, or ignored with a warning.

A null counts as an absent field everywhere.
"""

import dataclasses
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

_MAX_UNKNOWN = 64  # unknown fields of one object, and reported names of one body
_MAX_LOGGED = 256  # names
_MAX_NAME = 64  # characters of a logged name
_log = logging.getLogger("rjax.serve")


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """An unsupported field that would mislead the client if it were ignored.

    Attributes:
        advice: what to do instead.
        neutral: values without effect; a field with one of them is ignored.
    """

    advice: str
    neutral: tuple[Any, ...] = ()


@dataclasses.dataclass(slots=True)
class FieldCheck:
    """The unknown fields of one body.

    Attributes:
        strict: refuse unknown fields.
        ignored: paths of the unknown fields in the body; escaped and truncated.
    """

    strict: bool = False
    ignored: dict[str, None] = dataclasses.field(default_factory=dict)


class UnknownFields:
    """Refuses unknown fields, or logs each name once.

    Names come from clients: they are escaped and truncated, and at most 256 are logged.

    Args:
        strict: refuse bodies with unknown fields.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._logged: set[str] = set()
        self._lock = threading.Lock()  # large bodies are parsed on threads

    def check(self) -> FieldCheck:
        """A validation context for one body."""
        return FieldCheck(self._strict)

    def warn(self, names: Iterable[str]) -> None:
        """Log names that were not logged before."""
        with self._lock:
            new = [name for name in names if name not in self._logged]
            new = new[: _MAX_LOGGED - len(self._logged)]
            self._logged.update(new)
            full = bool(new) and len(self._logged) == _MAX_LOGGED
        for name in new:
            _log.warning("requests have the field '%s', which is unknown and ignored", name)
        if full:
            _log.warning("%d unknown fields were logged; further ones are not", _MAX_LOGGED)


def known_fields(
    value: dict[str, Any],
    names: frozenset[str],
    refused: Mapping[str, Refused],
    place: str,
    check: FieldCheck | None,
) -> dict[str, Any]:
    """The known fields of an object, without nulls.

    Args:
        value: the object.
        names: names of the model's fields.
        refused: fields that may not be ignored, by name.
        place: path of the object in the body, with a trailing dot; empty for the body itself.
        check: collects the names of ignored fields; None drops them.

    Raises:
        PydanticCustomError: too many unknown fields, a refused field, or an unknown field in a
            strict check.
    """
    if value.keys() <= names and None not in value.values():
        return value
    if len(value) > len(names) + _MAX_UNKNOWN:
        raise PydanticCustomError(
            "too_many_fields",
            "there are {count} fields, and {known} are known; at most {most} others are ignored",
            {"count": len(value), "known": len(names), "most": _MAX_UNKNOWN},
        )
    found = {}
    for name, item in value.items():
        if item is None:
            continue
        if name in names:
            found[name] = item
        elif name in refused:
            if item not in refused[name].neutral:
                context = {"name": name, "advice": refused[name].advice}
                raise PydanticCustomError("refused_field", "{name}", context)
        elif check is not None and check.strict:
            raise PydanticCustomError(
                "unknown_field", "{name}", {"name": ascii(shortened(name))[1:-1]}
            )
        elif check is not None and len(check.ignored) < _MAX_UNKNOWN:
            check.ignored[place + ascii(shortened(name))[1:-1]] = None
    return found


def shortened(text: str) -> str:
    """A client's text, short enough for a line of the log."""
    return text if len(text) <= _MAX_NAME else text[:_MAX_NAME] + "..."
