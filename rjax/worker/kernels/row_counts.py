"""The numbers of rows that a model's steps are padded to."""

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from rjax.models import DecoderLayer, Linear, ModelConfig
from rjax.models.layers.experts import Experts
from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.skinny_gemm import ROWS
from rjax.worker.kernels.dispatcher import Dispatcher
from rjax.worker.kernels.experts_problem import experts_problem
from rjax.worker.kernels.linear_problem import linear_problem, linear_sharding
from rjax.worker.kernels.problem import Operation, Problem


def streamed_rows(
    dispatcher: Dispatcher, model: ModelConfig, dtype: DTypeLike, devices: int
) -> tuple[int, ...]:
    """Rows at which kernels that stream weights take every projection of a layer, ascending.

    The layer is one with or without experts, whichever most layers are: DeepSeek's first dense
    layer has a width that not all kernels take. One row counts where the norms and the merge of
    attention are part of the products too.
    """
    mesh = AbstractMesh((devices,), (TENSOR_AXIS,))
    kinds: dict[bool, list[int]] = {}
    for i in range(model.num_layers):
        kinds.setdefault(model.has_experts(i), []).append(i)
    usual = [of_kind[0] for of_kind in kinds.values() if 2 * len(of_kind) >= model.num_layers]
    layers = [DecoderLayer(model, i, jnp.dtype(dtype)) for i in usual]

    def streams(rows: int) -> bool:
        problems = [problem for layer in layers for problem in _problems(layer, rows, dtype, mesh)]
        chosen = [dispatcher.choose(problem).kernel for problem in problems]
        return all(kernel is not None and kernel.pads_rows for kernel in chosen)

    return tuple(rows for rows in ROWS if streams(rows))


def _problems(
    layer: DecoderLayer, rows: int, dtype: DTypeLike, mesh: AbstractMesh
) -> list[Problem]:
    attention, mlp = layer.attention, layer.mlp
    one = rows == 1 and layer.attention_norm is not None and layer.mlp_norm is not None
    activated: Operation = "norm_linear_activation" if one else "linear_activation"
    up: Operation = activated if mlp.activation.is_swiglu else "linear"
    joins_norm = one and attention.joins_norm
    operations: list[tuple[Operation, Linear]] = [
        ("norm_linear" if joins_norm and i == 0 else "linear", linear)
        for i, linear in enumerate(attention.input_projections)
    ]
    operations.append(("merge_linear" if rows == 1 else "linear", attention.output))
    if not isinstance(mlp, Experts):
        operations.append((up, mlp.up))
        operations.append(("linear", mlp.down))
    problems = [
        linear_problem(
            operation,
            linear,
            linear_sharding(linear, mesh),
            rows=rows,
            dtype=dtype,
            activation=None if isinstance(mlp, Experts) or linear is not mlp.up else mlp.activation,
        )
        for operation, linear in operations
    ]
    if isinstance(mlp, Experts):
        problems.append(
            experts_problem(
                mlp.up,
                mlp.down,
                mesh,
                rows=rows,
                top_k=mlp.top_k,
                dtype=dtype,
                activation=mlp.activation,
            )
        )
    return problems
