"""The quantised projections whose weights are dequantised before each product."""

import functools
from collections.abc import Callable, Iterable, Iterator

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from rjax.models import Activation, DecoderLayer, Linear, ModelConfig
from rjax.models.layers.experts import Experts
from rjax.models.schemes import UNQUANTISED
from rjax.models.sharding import TENSOR_AXIS
from rjax.worker.kernels.dispatcher import Dispatcher
from rjax.worker.kernels.experts_problem import experts_problem
from rjax.worker.kernels.linear_problem import linear_problem, linear_sharding
from rjax.worker.kernels.problem import Operation, Problem

type _Use = Callable[[int], list[Problem]]


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
        dtype: dtype of the activations.
        devices: number of devices that the projections are sharded over.
        rows: numbers of rows of the steps.

    Returns:
        For each quantised projection, such as "D -> K A H", and each number of rows: None where a
        kernel reads the weights as they are stored; else why the first kernel does not, "" if there
        is none.
    """
    mesh = AbstractMesh((devices,), (TENSOR_AXIS,))
    found: dict[str, dict[int, str | None]] = {}
    rows = list(rows)
    for problems in _quantised(model, dtype, mesh):
        label = problems(1)[0].label
        of_rows = found.setdefault(label, dict.fromkeys(rows))
        for count in rows:
            choices = [dispatcher.choose(problem) for problem in problems(count)]
            choice = next((choice for choice in choices if choice.kernel is not None), choices[-1])
            if choice.kernel is not None and choice.kernel.dequantises:
                of_rows[count] = next((reason for _, reason in choice.refused), "")
    return found


def _quantised(model: ModelConfig, dtype: DTypeLike, mesh: AbstractMesh) -> Iterator[_Use]:
    """Functions for the quantised projections of layers that differ.

    Each maps a number of rows to the problems of its projection, fused operations first.
    """
    for number in _different_layers(model):
        layer = DecoderLayer(model, number, jnp.dtype(dtype))
        attention, mlp = layer.attention, layer.mlp
        first: tuple[Operation, ...] = (
            ("norm_linear", "linear") if attention.joins_norm else ("linear",)
        )
        uses: list[tuple[Linear, tuple[Operation, ...], Activation | None]] = [
            (linear, ("linear",) if i else first, None)
            for i, linear in enumerate(attention.input_projections)
        ]
        uses.append((attention.output, ("merge_linear", "linear"), None))
        if not isinstance(mlp, Experts):
            activated: tuple[Operation, ...] = ("norm_linear_activation", "linear_activation")
            uses.append((mlp.up, (*activated, "linear"), mlp.activation))
            uses.append((mlp.down, ("linear",), None))
        elif mlp.shared is not None:
            uses.append((mlp.shared.up, ("linear",), None))
            uses.append((mlp.shared.down, ("linear",), None))
        for use in uses:
            if use[0].scheme != UNQUANTISED:
                yield functools.partial(_linear_problems, *use, mesh, dtype)
        if isinstance(mlp, Experts) and UNQUANTISED not in (mlp.up.scheme, mlp.down.scheme):
            yield functools.partial(_experts_problems, mlp, mesh, dtype)


def _linear_problems(
    linear: Linear,
    operations: tuple[Operation, ...],
    activation: Activation | None,
    mesh: AbstractMesh,
    dtype: DTypeLike,
    rows: int,
) -> list[Problem]:
    sharding = linear_sharding(linear, mesh)
    return [
        linear_problem(operation, linear, sharding, rows=rows, dtype=dtype, activation=activation)
        for operation in operations
    ]


def _experts_problems(
    experts: Experts, mesh: AbstractMesh, dtype: DTypeLike, rows: int
) -> list[Problem]:
    problem = experts_problem(
        experts.up,
        experts.down,
        mesh,
        rows=rows,
        top_k=experts.top_k,
        dtype=dtype,
        activation=experts.activation,
    )
    return [problem]


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
