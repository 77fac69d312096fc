"""Which layers have a sliding window, as config.json spells it."""

from models.config_fields import ConfigFields
from models.errors import CheckpointError

_KINDS = ("full_attention", "sliding_attention")


def uniform_window(
    fields: ConfigFields, num_layers: int, default: int | None
) -> tuple[int | None, ...]:
    """``sliding_window`` on every layer; null means none, and a missing field the default."""
    if fields.given("sliding_window"):
        default = None
    return (fields.integer("sliding_window", default),) * num_layers


def layer_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: ``layer_types``, else a window from layer ``max_window_layers`` on.

    Both count only where ``use_sliding_window`` is true.
    """
    used = fields.flag("use_sliding_window", False)
    window = uniform_window(fields, 1, 4096)[0] if used else None
    kinds = fields.texts("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if i >= first else None for i in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} entries of the kinds "
            f"{', '.join(sorted(set(kinds)))}; expected one of {' or '.join(_KINDS)} for each of "
            f"the {num_layers} layers"
        )
    if window is None and "sliding_attention" in kinds:
        raise CheckpointError(
            "config.json: layer_types has sliding_attention, but no window applies; set "
            "use_sliding_window to true and sliding_window to its size"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
