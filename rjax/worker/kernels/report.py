"""The kernels of a step, found by tracing one layer of each kind and the choice of tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from rjax.batch.kernel_use import KernelUse
from rjax.models import DecoderLayer, ModelConfig, Residual, rotary_tables
from rjax.pallas_kernels.partial import Partial
from rjax.pallas_kernels.peer_exchange.peers import Peers
from rjax.worker.backend import Backend
from rjax.worker.kernels.dispatcher import Choice
from rjax.worker.kernels.uses import kernel_uses
from rjax.worker.paged_operations import PagedOperations
from rjax.worker.step_input import PackedLayout
from rjax.worker.step_shape import StepShape


def step_kernels(
    shape: StepShape,
    layout: PackedLayout,
    *,
    model: ModelConfig,
    dtype: DTypeLike,
    kv_dtype: DTypeLike,
    backend: Backend,
    mesh: Mesh,
    peers: Peers | None = None,
) -> list[KernelUse]:
    """The kernel of each operation in a step of this shape; nothing is computed or compiled."""
    choices: list[Choice] = []
    kinds = {model.has_experts(i): i for i in reversed(range(model.num_layers))}

    def run(
        graph: Any, state: Any, x: jax.Array, page: jax.Array, packed: jax.Array, peers: Any
    ) -> Any:
        step = layout.unpack(packed)
        pages = [page] * model.num_layers
        operations = PagedOperations(
            pages, pages, step, backend, mesh, choices.append, peers, shape.groups
        )
        rope = model.rope_of(0)
        rotary = None if rope is None else rotary_tables(rope, jnp.asarray(step.positions))
        # With an update, as in every layer but the first.
        update = x
        if mesh.size > 1:
            shares = jnp.zeros((mesh.size, *x.shape), jnp.float32)
            update = Partial(shares, dtype=x.dtype)
        residual = nnx.merge(graph, state)(Residual(x, update), rotary, operations)
        logits = jnp.zeros((shape.seqs, model.vocab_size), jnp.float32)
        return residual.x, operations.summed(residual.update), operations.argmax(logits)

    x = jax.ShapeDtypeStruct((shape.rows, model.hidden_size), dtype)
    page = jax.ShapeDtypeStruct((1, model.num_kv_heads, shape.page_size, model.head_dim), kv_dtype)
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    for first in sorted(kinds.values()):
        graph, state = nnx.split(DecoderLayer(model, first, jnp.dtype(dtype)))
        jax.eval_shape(functools.partial(run, graph), state, x, page, packed, peers)
    return kernel_uses(shape.rows, choices, backend)
