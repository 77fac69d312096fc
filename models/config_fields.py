"""Checked reading of a config.json."""

import math
from collections.abc import Mapping
from typing import Any

from models.errors import CheckpointError

MAX_LAYERS = 4096
"""More layers than any model has; a file that claims more is refused before memory is spent."""

_REQUIRED = object()


class ConfigFields:
    """The fields of one config.json, or of one object inside it, with checks on each.

    Every method raises CheckpointError where the field is missing without a default, or is not what
    it must be. A null counts as missing.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def given(self, name: str) -> bool:
        """Whether the field is there at all, be it null."""
        return name in self._values

    def raw(self, name: str) -> Any:
        """The field as JSON gives it, or None."""
        return self._values.get(name)

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
            self._fail(name, value, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite number above 0, as float."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(name, value, "a number above 0")
        if not (math.isfinite(value) and value > 0):
            self._fail(name, value, "a finite number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            self._fail(name, value, "true or false")
        return value

    def choice(self, name: str, allowed: Mapping[str, str], default: str) -> str:
        """The entry of ``allowed`` under the text found."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in allowed:
            self._fail(name, value, "one of " + ", ".join(sorted(allowed)))
        return allowed[value]

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts, or None where there is none."""
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._fail(name, value, "a list of texts")
        return tuple(value)

    def inner(self, name: str) -> "ConfigFields":
        """An object inside this one; empty where there is none."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            self._fail(name, value, "an object")
        return ConfigFields(value, f"{self._where}: {name}")

    def require(self, name: str, expected: Any, why: str) -> None:
        """Raise unless the field is missing or equal to ``expected``."""
        value = self._get(name, expected)
        if value != expected:
            self._fail(name, value, f"{expected!r}: {why}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise CheckpointError(
                    f"{self._where} has no field {name!r}; this architecture needs it"
                )
            return default
        return value

    def _fail(self, name: str, value: Any, allowed: str) -> None:
        raise CheckpointError(f"{self._where}: {name} is {value!r:.200}; it must be {allowed}")
