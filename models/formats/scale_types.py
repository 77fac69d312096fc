"""Types of the scales of a checkpoint."""

from collections.abc import Mapping

from rjax.models.schemes.values import ScaleDType

_NAMES: Mapping[str, ScaleDType] = {"F16": "float16", "BF16": "bfloat16"}


def widest_scale_type(types: Mapping[str, str], default: ScaleDType) -> ScaleDType:
    """The type that holds all scales of a checkpoint exactly.

    Args:
        types: safetensors type of each tensor by name.
        default: the type for a checkpoint without scales.
    """
    found: set[ScaleDType] = {
        _NAMES.get(kind, "float32")
        for name, kind in types.items()
        if name.endswith((".scales", ".weight_scale"))
    }
    if not found:
        return default
    return found.pop() if len(found) == 1 else "float32"
