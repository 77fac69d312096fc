"""Checked reading of a config.json."""

from collections.abc import Mapping, Set
from typing import Any, NoReturn

from rjax.models.errors import CheckpointError

MAX_LAYERS = 4096
"""Limit on the number of layers; a config.json with more is refused before memory is allocated."""

_REQUIRED = object()
# No model has numbers outside this range; the product of two numbers in it fits float32.
_SMALLEST, _LARGEST = 1e-18, 1e18


class ConfigFields:
    """The fields of one config.json, or of one object inside it, with checks on each.

    Every method raises CheckpointError if the field is missing and has no default, or if its value
    is not allowed. A null counts as missing.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "config.json",
        readable: Set[str] | None = None,
    ) -> None:
        self._values = values
        self._where = where
        self._readable = readable

    def only(self, readable: Set[str]) -> "ConfigFields":
        """The same fields, of which only ``readable`` may be read."""
        return ConfigFields(self._values, self._where, readable)

    def among(self, names: Set[str]) -> "ConfigFields":
        """The fields that have one of the names."""
        values = {name: value for name, value in self._values.items() if name in names}
        return ConfigFields(values, self._where, self._readable)

    def filled(self, **defaults: Any) -> "ConfigFields":
        """The same fields, with values for those that are missing or null."""
        given = {name: value for name, value in self._values.items() if value is not None}
        return ConfigFields({**self._values, **defaults, **given}, self._where, self._readable)

    def names(self) -> Set[str]:
        """Names of all fields, including those that are null."""
        return self._values.keys()

    def values(self) -> dict[str, Any]:
        """All fields with their parsed JSON values."""
        return dict(self._values)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.raw(name) is not None

    def given(self, name: str) -> bool:
        """Whether the field is present, even if it is null."""
        assert self._readable is None or name in self._readable, f"{name} is read undeclared"
        return name in self._values

    def raw(self, name: str) -> Any:
        """The parsed JSON value of the field, or None."""
        return self._values[name] if self.given(name) else None

    def integer(
        self,
        name: str,
        default: Any = _REQUIRED,
        minimum: int = 1,
        maximum: int = 2**31 - 1,
    ) -> Any:
        """A whole number from ``minimum`` to ``maximum``."""
        value = self._get(name, default)
        if value is default:
            return value
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not minimum <= value <= maximum:
            self.refuse(name, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A number from 1e-18 to 1e18, as float."""
        value = self._get(name, default)
        if value is default:
            return value
        if not _is_number(value):
            self.refuse(name, f"a number from {_SMALLEST:g} to {_LARGEST:g}")
        return float(value)

    def flag(self, name: str, default: bool, null: bool | None = None) -> bool:
        """true or false; ``null`` is the meaning of null, if it is not that of a missing field."""
        if null is not None and self.given(name) and not self.has(name):
            return null
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def choice(self, name: str, allowed: Mapping[str, str], default: str) -> str:
        """The entry of ``allowed`` for the text of the field."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in allowed:
            self.refuse(name, "one of " + ", ".join(sorted(allowed)))
        return allowed[value]

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts, or None if the field is missing."""
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(name, "a list of texts")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers from 0; empty if the field is missing."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            self.refuse(name, "a list of whole numbers")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers from 1e-18 to 1e18."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            self.refuse(name, f"a list of numbers from {_SMALLEST:g} to {_LARGEST:g}")
        return tuple(map(float, value))

    def inner(self, name: str) -> "ConfigFields":
        """The fields of a nested object; empty if it is missing."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return ConfigFields(value, f"{self._where}: {name}")

    def refuse(self, name: str, allowed: str) -> NoReturn:
        """Raise CheckpointError with the field's value and the allowed values."""
        value = self.raw(name)
        raise CheckpointError(f"{self._where}: {name} is {value!r:.200}; it must be {allowed}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw(name)
        if value is None:
            if default is _REQUIRED:
                raise CheckpointError(
                    f"{self._where} has no field {name!r}; this architecture needs it"
                )
            return default
        return value


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and _SMALLEST <= value <= _LARGEST
