"""The built-in mappings, by name."""

from typing import Any

from rjax.models.adopting.mapping import WeightMapping
from rjax.models.errors import CheckpointError

MAPPINGS: dict[str, WeightMapping] = {}


def named_mapping(mapping: Any) -> WeightMapping | None:
    """The mapping of a name; others as they are.

    Raises:
        CheckpointError: no built-in mapping has the name.
    """
    if not isinstance(mapping, str):
        return mapping
    if mapping not in MAPPINGS:
        raise CheckpointError(
            f"mapping is {mapping!r}; it must be one of {', '.join(MAPPINGS)}, a table, or a "
            "function of a name"
        )
    return MAPPINGS[mapping]
