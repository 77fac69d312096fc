"""The projections of a checkpoint, and what their inputs come from."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.families import FAMILIES
from rjax.models.loading.pieces import Piece, Weights, module_of, piece_shape

LINEARS = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
"""The projections of a decoder layer, in the order in which they are applied."""

_LATENT_LINEARS = ("attention.q_a", "attention.q", "attention.kv_a", "attention.kv_b")
"""The projections of latent attention, instead of "attention.qkv"; some models lack the first."""

_GATED_DELTA_INPUT = "attention.qkvz"
"""The projection of a gated delta net, instead of "attention.qkv"."""

EXPERTS = ("mlp.up", "mlp.down")
"""The projections of experts, in a layer that has some."""

_SHARED_EXPERT = ("mlp.shared.up", "mlp.shared.down")
_UNQUANTISED = (
    *("mlp.router", "mlp.shared.gate", "attention.ba.weight"),
    *("per_layer.projection.weight", "per_layer.gate.weight", "per_layer.output.weight"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a tensor."""

    tensor: str
    first: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class SharedInput:
    """Projections of one input, and the tensors that its channels can be scaled by.

    Attributes:
        linear: name of the projection, as in `LINEARS`.
        tensors: the weights [outputs, inputs] in the checkpoint.
        norm: weight and perhaps bias of the norm that makes the input; empty if none does.
        rows: rows of the weight, and perhaps of the bias, that make the input; empty if there are
            none, or if something that is not linear follows them.
    """

    linear: str
    tensors: tuple[str, ...]
    norm: tuple[str, ...] = ()
    rows: tuple[Rows, ...] = ()


def linear_pieces(config: ModelConfig) -> Weights:
    """The pieces of each projection's weight, by the projection's path."""
    names = (*LINEARS, *_LATENT_LINEARS, _GATED_DELTA_INPUT, *_SHARED_EXPERT)
    weights = FAMILIES[config.architecture].weights(config)
    return {
        path.removesuffix(".weight"): pieces
        for path, pieces in weights.items()
        if path.startswith("layers.") and path.removesuffix(".weight").endswith(names)
    }


def unquantised_modules(config: ModelConfig) -> tuple[str, ...]:
    """The linear modules that are not quantised: those of a number or two a head or an expert, and
    of per-layer inputs."""
    weights = FAMILIES[config.architecture].weights(config)
    return tuple(
        module_of(piece)
        for path, pieces in weights.items()
        if path.endswith(_UNQUANTISED)
        for piece in pieces
    )


def linears_of(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The projections of a layer, whose attention is not latent, in the order of `LINEARS`."""
    first, *others = LINEARS
    return _GATED_DELTA_INPUT if config.is_linear(layer) else first, *others


def shared_inputs(config: ModelConfig, layer: int) -> tuple[SharedInput, ...]:
    """The projections of a layer in the order of `LINEARS`, then those of a shared expert.

    The projections of experts are not scaled, nor those of a model with latent attention.
    """
    weights = FAMILIES[config.architecture].weights(config)

    def norm(name: str) -> tuple[str, ...]:
        if config.norms.unit_offset or config.norms.placement == "parallel":
            return ()  # a factor on the stored weight is none on the input, or reaches both blocks
        paths = (f"layers.{layer}.{name}.{leaf}" for leaf in ("weight", "bias"))
        return tuple(weights[path][0].tensor for path in paths if path in weights)

    def last_rows(linear: str) -> tuple[Rows, ...]:
        paths = (f"layers.{layer}.{linear}.{leaf}" for leaf in ("weight", "bias"))
        last = weights[f"layers.{layer}.{linear}.weight"][-1]
        if last.a > 1 and not last.pattern.startswith("(A"):
            return ()  # the rows of its last entry are not neighbours
        return tuple(_last_entry(weights[path][-1], config) for path in paths if path in weights)

    def tensors(linear: str) -> tuple[str, ...]:
        pieces = weights[f"layers.{layer}.{linear}.weight"]
        return tuple(dict.fromkeys(piece.tensor for piece in pieces))

    first, output, up, down = linears_of(config, layer)
    if config.has_experts(layer) or config.latent is not None:
        names = (first, *_LATENT_LINEARS, output, up, down, *_SHARED_EXPERT)
        own = [name for name in names if f"layers.{layer}.{name}.weight" in weights]
        return tuple(SharedInput(name, tensors(name)) for name in own)
    # The gated delta rule is not linear in what it reads.
    linear_in_values = config.num_heads == config.num_kv_heads and not config.is_linear(layer)
    # relu(x / s) * s is relu(x) for s > 0.
    linear_in_up = config.gated_mlp or config.activation == "relu"
    return (
        SharedInput(first, tensors(first), norm=norm("attention_norm")),
        SharedInput(output, tensors(output), rows=last_rows(first) if linear_in_values else ()),
        SharedInput(up, tensors(up), norm=norm("mlp_norm")),
        SharedInput(down, tensors(down), rows=last_rows(up) if linear_in_up else ()),
    )


def _last_entry(piece: Piece, config: ModelConfig) -> Rows:
    """The rows of the last entry of the fused axis: the values, or the ungated half."""
    rows = piece_shape(piece, config)[0]
    count = rows // piece.a
    return Rows(piece.tensor, piece.first_row + rows - count, count)
