"""Tables of mappings that are the same in each layer."""

from typing import Any

from rjax.models.adopting.mapping import Targets


def in_layers(of_layer: dict[str, Targets], start: str) -> dict[str, Targets]:
    """The entries of a layer, of arrays whose names begin with ``start``; those of tensors begin
    with "model.layers.*."."""
    return {start + name: _of_layer(targets) for name, targets in of_layer.items()}


def _of_layer(targets: Any) -> Targets:
    if isinstance(targets, str):
        return f"model.layers.*.{targets}"
    if isinstance(targets, tuple):
        name, reading = targets
        return f"model.layers.*.{name}", reading
    return [_of_layer(one) for one in targets]  # pyright: ignore[reportReturnType]
