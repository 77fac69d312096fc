"""The sliding window of each layer, from config.json."""

from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError

_KINDS = ("full_attention", "sliding_attention")
LAYER_WINDOW_FIELDS = frozenset(
    {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}
)
"""Fields that `layer_windows` reads."""


def uniform_window(
    fields: ConfigFields, num_layers: int, default: int | None
) -> tuple[int | None, ...]:
    """``sliding_window`` on every layer; null means none, a missing field means the default."""
    if fields.given("sliding_window"):
        default = None
    return (fields.integer("sliding_window", default),) * num_layers


def typed_windows(
    fields: ConfigFields, num_layers: int, default: int | None
) -> tuple[int | None, ...]:
    """Ministral's rule: ``sliding_window`` on the layers that ``layer_types`` names, or on all."""
    windows = uniform_window(fields, num_layers, default)
    kinds = fields.texts("layer_types")
    return windows if kinds is None else _of_kinds(kinds, windows, "set sliding_window to its size")


def layer_windows(
    fields: ConfigFields, num_layers: int, *, first: int = 28
) -> tuple[int | None, ...]:
    """Qwen's rule: ``layer_types``, else a window from layer ``max_window_layers`` on.

    Both apply only if ``use_sliding_window`` is true. ``first`` is the family's default of
    ``max_window_layers``.
    """
    used = fields.flag("use_sliding_window", False)
    windows = uniform_window(fields, num_layers, 4096) if used else (None,) * num_layers
    kinds = fields.texts("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", first, minimum=0)
        return tuple(window if i >= first else None for i, window in enumerate(windows))
    fix = "set use_sliding_window to true and sliding_window to its size"
    return _of_kinds(kinds, windows, fix)


def alternating_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Qwen2-MoE's rule: ``layer_types``, else every second layer below ``max_window_layers``.

    Both apply only if ``use_sliding_window`` is true.
    """
    used = fields.flag("use_sliding_window", False)
    windows = uniform_window(fields, num_layers, 4096) if used else (None,) * num_layers
    kinds = fields.texts("layer_types")
    if kinds is None:
        last = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(w if i < last and i % 2 == 0 else None for i, w in enumerate(windows))
    fix = "set use_sliding_window to true and sliding_window to its size"
    return _of_kinds(kinds, windows, fix)


def patterned_windows(
    fields: ConfigFields,
    num_layers: int,
    *,
    window: int | None,
    pattern: int | None = None,
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """(the type of each layer, its window): ``layer_types``, or a rule.

    Args:
        fields: the fields of config.json.
        num_layers: L.
        window: default of ``sliding_window``.
        pattern: without ``layer_types``, layers with this distance have full attention.
    """
    windows = uniform_window(fields, num_layers, window)
    kinds = fields.texts("layer_types")
    if kinds is None:
        assert pattern is not None
        kinds = tuple(_KINDS[(i + 1) % pattern != 0] for i in range(num_layers))
    return kinds, _of_kinds(kinds, windows, "set sliding_window to its size")


def _of_kinds(
    kinds: tuple[str, ...], windows: tuple[int | None, ...], fix: str
) -> tuple[int | None, ...]:
    """Keep the windows of sliding layers only; ``fix`` is the advice if a window is missing."""
    if len(kinds) != len(windows) or not set(kinds) <= set(_KINDS):
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} entries of the kinds "
            f"{', '.join(sorted(set(kinds)))}; expected one of {' or '.join(_KINDS)} for each of "
            f"the {len(windows)} layers"
        )
    if "sliding_attention" in kinds and None in windows:
        raise CheckpointError(
            f"config.json: layer_types has sliding_attention, but no window applies; {fix}"
        )
    return tuple(
        window if kind == "sliding_attention" else None
        for kind, window in zip(kinds, windows, strict=True)
    )
