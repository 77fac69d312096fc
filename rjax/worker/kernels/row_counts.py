"""The numbers of rows that a model's steps are padded to."""

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from rjax.models import DecoderLayer, Linear, ModelConfig
from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.skinny_gemm import ROWS
from rjax.worker.kernels.dispatcher import Dispatcher
from rjax.worker.kernels.linear_problem import linear_problem, linear_sharding
from rjax.worker.kernels.problem import Operation


def streamed_rows(
    dispatcher: Dispatcher, model: ModelConfig, dtype: DTypeLike, devices: int
) -> tuple[int, ...]:
    """Rows at which kernels that stream weights take every projection of a layer, ascending.

    One row counts where the norms and the merge of attention are part of the products too.
    """
    layer = DecoderLayer(model, 0, jnp.dtype(dtype))
    mesh = AbstractMesh((devices,), (TENSOR_AXIS,))
    attention, mlp = layer.attention, layer.mlp

    def streams(rows: int) -> bool:
        one = rows == 1 and layer.attention_norm is not None and layer.mlp_norm is not None
        activated: Operation = "norm_linear_activation" if one else "linear_activation"
        operations: list[tuple[Operation, Linear]] = [
            ("norm_linear" if one else "linear", attention.qkv),
            ("merge_linear" if rows == 1 else "linear", attention.output),
            (activated if mlp.activation.is_swiglu else "linear", mlp.up),
            ("linear", mlp.down),
        ]
        problems = [
            linear_problem(
                operation,
                linear,
                linear_sharding(linear, mesh),
                rows=rows,
                dtype=dtype,
                activation=mlp.activation if linear is mlp.up else None,
            )
            for operation, linear in operations
        ]
        chosen = [dispatcher.choose(problem).kernel for problem in problems]
        return all(kernel is not None and kernel.pads_rows for kernel in chosen)

    return tuple(rows for rows in ROWS if streams(rows))
