"""The built-in mappings, by name."""

from collections.abc import Callable
from typing import Any

from rjax.models.adopting.easydel import easydel
from rjax.models.adopting.mapping import TableLookup, Targets
from rjax.models.adopting.maxtext import maxtext
from rjax.models.adopting.tunix import tunix
from rjax.models.config import ModelConfig
from rjax.models.errors import CheckpointError
from rjax.models.families.multimodal import renamed_tensor

MAPPINGS: dict[str, Callable[[ModelConfig], dict[str, Targets]]] = {
    "tunix": tunix,
    "easydel": easydel,
    "maxtext": maxtext,
}
_WRAPPERS = ("params.", "base.")  # collections of Flax, and the module that MaxText gives to Tunix


def named_mapping(mapping: Any, config: ModelConfig | None) -> Any:
    """The mapping of a name, for a model; others as they are.

    Raises:
        CheckpointError: no built-in mapping has the name, or there is no model.
    """
    if not isinstance(mapping, str):
        return mapping
    if mapping not in MAPPINGS or config is None:
        raise CheckpointError(
            f"mapping is {mapping!r}; it must be one of {', '.join(MAPPINGS)}, a table, or a "
            "function of a name"
        )
    lookup = TableLookup(MAPPINGS[mapping](config))

    def find(name: str) -> Targets:
        while name.startswith(_WRAPPERS):
            name = name.partition(".")[2]
        found = lookup(name)
        if config.text_model is None:
            return found
        return [(renamed_tensor(tensor, config), reading) for tensor, reading in found]

    return find
