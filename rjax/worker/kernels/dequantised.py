"""The quantised projections whose weights are dequantised before each product."""

from collections.abc import Iterable, Iterator

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from rjax.models import Activation, DecoderLayer, Linear, ModelConfig
from rjax.models.layers.experts import Experts
from rjax.models.schemes import UNQUANTISED
from rjax.models.sharding import TENSOR_AXIS
from rjax.worker.kernels.dispatcher import Dispatcher
from rjax.worker.kernels.linear_problem import linear_problem, linear_sharding
from rjax.worker.kernels.problem import Operation

type _Use = tuple[Linear, tuple[Operation, ...], Activation | None]


def dequantised_projections(
    dispatcher: Dispatcher,
    model: ModelConfig,
    dtype: DTypeLike,
    *,
    devices: int,
    rows: Iterable[int],
) -> dict[str, dict[int, str | None]]:
    """Which quantised projections are dequantised before each product, in steps of which rows.

    Args:
        dispatcher: chooses the kernels.
        model: its layers may be quantised differently.
        dtype: of the activations.
        devices: that the projections are sharded over.
        rows: of the steps.

    Returns:
        For each quantised projection, such as "D -> K A H", and each number of rows: None where a
        kernel reads the weights as they are stored; else why the first kernel does not, "" if there
        is none.
    """
    mesh = AbstractMesh((devices,), (TENSOR_AXIS,))
    found: dict[str, dict[int, str | None]] = {}
    rows = list(rows)
    for linear, operations, activation in _quantised(model, dtype):
        sharding = linear_sharding(linear, mesh)
        of_rows = found.setdefault(f"{linear.inputs} -> {linear.outputs}", dict.fromkeys(rows))
        for count in rows:
            choices = [
                dispatcher.choose(
                    linear_problem(
                        operation, linear, sharding, rows=count, dtype=dtype, activation=activation
                    )
                )
                for operation in operations
            ]
            choice = next((choice for choice in choices if choice.kernel is not None), choices[-1])
            if choice.kernel is not None and choice.kernel.dequantises:
                of_rows[count] = next((reason for _, reason in choice.refused), "")
    return found


def _quantised(model: ModelConfig, dtype: DTypeLike) -> Iterator[_Use]:
    """The quantised projections of layers that differ, each with its operations, fused ones first,
    and the activation that follows."""
    for number in _different_layers(model):
        layer = DecoderLayer(model, number, jnp.dtype(dtype))
        attention, mlp = layer.attention, layer.mlp
        uses: list[_Use] = [
            (attention.qkv, ("norm_linear", "linear"), None),
            (attention.output, ("merge_linear", "linear"), None),
        ]
        if not isinstance(mlp, Experts):
            activated: tuple[Operation, ...] = ("norm_linear_activation", "linear_activation")
            uses.append((mlp.up, (*activated, "linear"), mlp.activation))
            uses.append((mlp.down, ("linear",), None))
        yield from (use for use in uses if use[0].scheme != UNQUANTISED)


def _different_layers(model: ModelConfig) -> list[int]:
    """The first layer of each way in which layers are quantised."""
    first = {}
    for number in range(model.num_layers):
        path = f"layers.{number}."
        schemes = (
            (name.removeprefix(path), scheme)
            for name, scheme in model.schemes
            if name.startswith(path)
        )
        first.setdefault(frozenset(schemes), number)
    return list(first.values())
