"""Fields of request bodies that no model has: refused by name, or ignored with a warning.

A null is an absent field everywhere.
"""

import dataclasses
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

_MOST_UNKNOWN = 64  # unknown fields of one object, and names that one body reports
_MOST_LOGGED = 256  # names
_LONGEST = 64  # characters of a name
_log = logging.getLogger("rjax.serve")


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer's meaning if it were ignored.

    Attributes:
        advice: what to do instead.
        neutral: values that ask for nothing; a field with one of them is dropped.
    """

    advice: str
    neutral: tuple[Any, ...] = ()


@dataclasses.dataclass(slots=True)
class FieldCheck:
    """The unknown fields of one body.

    Attributes:
        strict: refuse them.
        ignored: their names, with the names of the objects around them; escaped and bounded.
    """

    strict: bool = False
    ignored: dict[str, None] = dataclasses.field(default_factory=dict)


class UnknownFields:
    """What a server does with unknown fields: it refuses them, or logs each name once.

    Clients choose the names: they are escaped and cut, and only the first 256 are logged.

    Args:
        strict: refuse bodies that have such fields.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._logged: set[str] = set()
        self._lock = threading.Lock()  # large bodies are read on threads

    def check(self) -> FieldCheck:
        """The check of one body, to be given to its model as the validation context."""
        return FieldCheck(self._strict)

    def warn(self, names: Iterable[str]) -> None:
        """Log the names that were not logged before."""
        with self._lock:
            new = [name for name in names if name not in self._logged]
            new = new[: _MOST_LOGGED - len(self._logged)]
            self._logged.update(new)
            full = bool(new) and len(self._logged) == _MOST_LOGGED
        for name in new:
            _log.warning("requests have the field '%s', which is unknown and ignored", name)
        if full:
            _log.warning("%d unknown fields were logged; further ones are not", _MOST_LOGGED)


def known_fields(
    value: dict[str, Any],
    names: frozenset[str],
    refused: Mapping[str, Refused],
    place: str,
    check: FieldCheck | None,
) -> dict[str, Any]:
    """The fields of an object that its model has, without nulls.

    Args:
        value: the object.
        names: of the model's fields.
        refused: fields that may not be ignored, by name.
        place: of the object in its body, with a dot at its end; empty for the body itself.
        check: takes the names of the other fields; None drops them.

    Raises:
        PydanticCustomError: more unknown fields than any client has use for, a refused one, or an
            unknown one where the check is strict.
    """
    if value.keys() <= names and None not in value.values():
        return value
    if len(value) > len(names) + _MOST_UNKNOWN:
        raise PydanticCustomError(
            "too_many_fields",
            "there are {count} fields, and {known} are known; at most {most} others are ignored",
            {"count": len(value), "known": len(names), "most": _MOST_UNKNOWN},
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
            raise PydanticCustomError("unknown_field", "{name}", {"name": _shown(name)})
        elif check is not None and len(check.ignored) < _MOST_UNKNOWN:
            check.ignored[place + _shown(name)] = None
    return found


def _shown(name: str) -> str:
    """A client's name for a field, on one line of ASCII."""
    cut = name if len(name) <= _LONGEST else name[:_LONGEST] + "..."
    return ascii(cut)[1:-1]
