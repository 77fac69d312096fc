"""Reading the JSON files beside a tokenizer or a model."""

import json
import pathlib
from typing import Any

from rjax.errors import InvalidConfigError


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file.

    Raises:
        InvalidConfigError: the file is not readable as JSON, or holds no object.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidConfigError(f"{path}: holds {type(found).__name__}, expected an object")
    return found
