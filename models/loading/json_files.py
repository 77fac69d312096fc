"""Reading JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from rjax.models.errors import CheckpointError


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """Read a JSON object from a file of at most ``limit`` bytes, or raise CheckpointError."""
    try:
        if path.stat().st_size > limit:
            raise CheckpointError(f"{path} is larger than {limit} bytes; it is not a {path.name}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value
