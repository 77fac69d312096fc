"""Which layers have a sliding window, as config.json spells it."""

from models.config_fields import ConfigFields
from models.errors import CheckpointError

_KINDS = ("full_attention", "sliding_attention")
LAYER_WINDOW_FIELDS = frozenset(
    {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}
)
"""Fields that `layer_windows` reads."""


def uniform_window(
    fields: ConfigFields, num_layers: int, default: int | None
) -> tuple[int | None, ...]:
    """``sliding_window`` on every layer; null means none, and a missing field the default."""
    if fields.given("sliding_window"):
        default = None
    return (fields.integer("sliding_window", default),) * num_layers


def typed_windows(
    fields: ConfigFields, num_layers: int, default: int | None
) -> tuple[int | None, ...]:
    """Ministral's rule: ``sliding_window`` where ``layer_types`` has it, without these on all."""
    windows = uniform_window(fields, num_layers, default)
    kinds = fields.texts("layer_types")
    return windows if kinds is None else _of_kinds(kinds, windows, "set sliding_window to its size")


def layer_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: ``layer_types``, else a window from layer ``max_window_layers`` on.

    Both count only where ``use_sliding_window`` is true.
    """
    used = fields.flag("use_sliding_window", False)
    windows = uniform_window(fields, num_layers, 4096) if used else (None,) * num_layers
    kinds = fields.texts("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if i >= first else None for i, window in enumerate(windows))
    mend = "set use_sliding_window to true and sliding_window to its size"
    return _of_kinds(kinds, windows, mend)


def _of_kinds(
    kinds: tuple[str, ...], windows: tuple[int | None, ...], mend: str
) -> tuple[int | None, ...]:
    """The windows of the layers with sliding attention; ``mend`` says how to give them one."""
    if len(kinds) != len(windows) or not set(kinds) <= set(_KINDS):
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} entries of the kinds "
            f"{', '.join(sorted(set(kinds)))}; expected one of {' or '.join(_KINDS)} for each of "
            f"the {len(windows)} layers"
        )
    if "sliding_attention" in kinds and None in windows:
        raise CheckpointError(
            f"config.json: layer_types has sliding_attention, but no window applies; {mend}"
        )
    return tuple(
        window if kind == "sliding_attention" else None
        for kind, window in zip(kinds, windows, strict=True)
    )
