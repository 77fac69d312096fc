"""Whether experts that are cut over devices run without a kernel that whole ones would have."""

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from rjax.models import DecoderLayer, ModelConfig, place
from rjax.models.layers.experts import Experts
from rjax.models.sharding import TENSOR_AXIS
from rjax.worker.kernels.dispatcher import Choice, Dispatcher
from rjax.worker.kernels.experts_problem import experts_problem

_ROWS = 64  # the kernels of experts take any number


def advise_whole_experts(
    dispatcher: Dispatcher, model: ModelConfig, dtype: DTypeLike, devices: int
) -> str | None:
    """What ``enable_expert_parallel`` would gain, or None.

    Args:
        dispatcher: chooses the kernels.
        model: the model's configuration, placed on the devices.
        dtype: dtype of the activations.
        devices: number of devices on the mesh axis ``tensor``.
    """
    if devices == 1 or model.experts is None or model.experts.parallel:
        return None
    try:
        whole = place(model, devices, expert_parallel=True)
    except ValueError:
        return None
    cut, other = (_choice(dispatcher, each, dtype, devices) for each in (model, whole))
    if cut.kernel is None or other.kernel is None or not cut.kernel.dequantises:
        return None
    if other.kernel.dequantises:
        return None
    reasons = [reason for name, reason in cut.refused if name == other.kernel.name]
    return (
        f"experts that are cut over {devices} devices run as {cut.kernel.name} "
        f"({'; '.join(reasons)}); enable_expert_parallel keeps them whole, for {other.kernel.name}"
    )


def _choice(dispatcher: Dispatcher, model: ModelConfig, dtype: DTypeLike, devices: int) -> Choice:
    layer = next(i for i in range(model.num_layers) if model.has_experts(i))
    experts = DecoderLayer(model, layer, jnp.dtype(dtype)).mlp
    assert isinstance(experts, Experts)
    problem = experts_problem(
        experts.up,
        experts.down,
        AbstractMesh((devices,), (TENSOR_AXIS,)),
        rows=_ROWS,
        top_k=experts.top_k,
        dtype=dtype,
        activation=experts.activation,
    )
    return dispatcher.choose(problem)
