"""The choices of kernels for a layer, found by tracing it; nothing is computed or compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from rjax.models import (
    DecoderLayer,
    HeadNorms,
    HeadOptions,
    KvScales,
    ModelConfig,
    Residual,
    Rotary,
    Routing,
    rotary_tables,
)
from rjax.models.layers.layer_inputs import empty_inputs
from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.attention.backend import AttentionBackend
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.experts.base import ExpertsProblem, RouteProblem
from rjax.pallas_kernels.gated_delta.base import GatedDeltaProblem
from rjax.pallas_kernels.gated_delta.states import state_shapes
from rjax.pallas_kernels.gemm.base import LinearProblem
from rjax.pallas_kernels.kernel import Kernel, Problem
from rjax.pallas_kernels.layer.base import LayerProblem, PostAttentionProblem
from rjax.pallas_kernels.pending import Partial, UnmergedAttention
from rjax.pallas_kernels.residual.base import ResidualProblem
from rjax.pallas_kernels.residual.peers import Peers
from rjax.worker.kernels import Choice, Dispatcher
from rjax.worker.layer_kernels import Pools
from rjax.worker.operations import DispatchedOperations
from rjax.worker.step.state_rows import empty_state_rows

_PAGE_SIZE = 64  # of the states, where the caller gives none


class RecordedOperations(DispatchedOperations):
    """Records the choices; every result is zeros of the shape that the chosen kernel gives.

    Args:
        dispatcher, attention, mesh, record, peers: see `DispatchedOperations`.
        rows: rows of the step, T.
        kv_dtype: dtype of the KV.
        page_size: tokens a page; None to have every operation chosen by itself, although a kernel
            may do more than one.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        attention: AttentionBackend,
        mesh: AbstractMesh,
        record: Callable[[Choice], None],
        *,
        rows: int,
        kv_dtype: DTypeLike,
        page_size: int | None = None,
        peers: Peers | None = None,
    ) -> None:
        super().__init__(dispatcher, attention, mesh, record, peers)
        self._rows, self._kv_dtype = rows, kv_dtype
        self._page_size = page_size

    def decoder_layer(
        self,
        layer: DecoderLayer,
        residual: Residual,
        rotary: Rotary | None,
        following: DecoderLayer | None = None,
    ) -> Residual | None:
        """See `DispatchedOperations`; None where every operation is chosen by itself."""
        if self._page_size is None:
            return None
        return super().decoder_layer(layer, residual, rotary, following)

    def attention(
        self,
        layer: int,
        qkv: Float[Array, "T K A H"] | Partial,
        rotary: Rotary | None,
        spec: AttentionSpec,
        kv_scales: KvScales | None = None,
        heads: HeadOptions | None = None,
        norms: HeadNorms | None = None,
    ) -> Float[Array, "T N H"] | UnmergedAttention:
        """Zeros, unmerged where the attention of a step would be."""
        del layer, spec, kv_scales
        self._write_kernel(qkv, rotary, norms, self._kv_dtype)
        T, K, A, H = qkv.shape
        out = jnp.zeros((T, K * (A - 2), H), qkv.dtype)
        if not self._leaves_unmerged(T, heads):
            return out
        return UnmergedAttention(out, out, out[:, :, 0].astype("float32"), jnp.arange(T + 1))

    def gated_delta(
        self,
        layer: int,
        mixed: Float[Array, "T K W"],
        weight: Float[Array, "K X W"],
        decay: Float32[Array, "T K G"],
        beta: Float32[Array, "T K G"],
        key_dim: int,
    ) -> Float[Array, "T K G Y"]:
        """Zeros; the step is taken to have one row a sequence."""
        del layer
        page_size = self._page_size or _PAGE_SIZE
        (T, K, W), G = mixed.shape, decay.shape[2]
        values = G, (W - 2 * key_dim) // G
        states = state_shapes(
            (K, key_dim, *values),
            taps=weight.shape[1],
            num_states=1,
            num_slots=1,
            page_size=page_size,
            dtype=mixed.dtype,
        )
        states = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), states)
        rows = empty_state_rows(rows=T, seqs=T, page_size=page_size, one_row_each=True)
        rows = jax.tree.map(jnp.asarray, rows)
        found, _ = self._through_states(mixed, weight, decay, beta, key_dim, states, rows)
        return found

    @property
    def _positions(self) -> Int[Array, " T"]:
        return jnp.zeros(self._rows, jnp.int32)

    def _merged(self, h: Float[Array, "T ..."] | UnmergedAttention) -> Float[Array, "T ..."]:
        return h.out if isinstance(h, UnmergedAttention) else h

    def _paged(self, layer: int) -> tuple[Pools, tuple[Any, Any, Any]]:
        del layer
        assert self._page_size is not None
        pool = jnp.zeros((1, 1, self._page_size, 1), self._kv_dtype)
        return (pool, pool), (None, None, None)

    def _keep(self, layer: int, pools: Pools) -> None:
        del layer, pools

    def _run(
        self,
        kernel: Kernel,
        problem: Problem,
        operands: tuple[Any, ...],
        specs: tuple[Any, ...],
        of_result: Callable[[Any], Any],
    ) -> Any:
        del specs
        local = _result(kernel, problem, operands)
        cuts = jax.tree.broadcast(of_result(local), local, is_leaf=_is_spec)

        def whole(leaf: jax.ShapeDtypeStruct | Array, spec: PartitionSpec) -> Array:
            if isinstance(leaf, Array):  # an operand, which is whole
                return leaf
            axes = [*spec, *[None] * (leaf.ndim - len(spec))]
            sizes = zip(leaf.shape, axes, strict=True)
            shape = [size * (1 if axis is None else self._mesh.size) for size, axis in sizes]
            return jnp.zeros(shape, leaf.dtype)

        return jax.tree.map(whole, local, cuts, is_leaf=_is_shape)


def layer_choices(
    dispatcher: Dispatcher,
    attention: AttentionBackend,
    model: ModelConfig,
    number: int,
    *,
    rows: int,
    dtype: DTypeLike,
    devices: int = 1,
    kv_dtype: DTypeLike | None = None,
    page_size: int | None = None,
    peers: Peers | None = None,
) -> list[Choice]:
    """The choices for a layer behind another like it, for a sum behind it and the argmax of logits.

    Args:
        dispatcher, attention: choose the kernels.
        model: the model's configuration, placed on the devices.
        number: the layer.
        rows: rows of the step, T.
        dtype: dtype of the activations.
        devices: number of devices on the mesh axis ``tensor``.
        kv_dtype: dtype of the KV; None for that of the activations.
        page_size: see `RecordedOperations`.
        peers: exchange buffers of the devices, as shapes; None without.
    """
    mesh = AbstractMesh((devices,), (TENSOR_AXIS,))
    choices: list[Choice] = []
    graph, state = nnx.split(DecoderLayer(model, number, jnp.dtype(dtype)))
    rope = model.rope_of(number)

    def run(state: Any, x: Array, peers: Peers | None) -> None:
        layer = nnx.merge(graph, state)
        positions = jnp.zeros(rows, jnp.int32)
        rotary = None if rope is None else rotary_tables(rope, positions)
        operations = RecordedOperations(
            dispatcher,
            attention,
            mesh,
            choices.append,
            rows=rows,
            kv_dtype=kv_dtype or dtype,
            page_size=page_size,
            peers=peers,
        )
        inputs = empty_inputs(model, number, rows, dtype)
        residual = layer(Residual(x), rotary, operations, inputs=inputs)
        choices.clear()
        residual = layer(residual, rotary, operations, inputs=inputs)
        if residual.update is None:  # a layer with a factor of its own adds its updates
            residual = residual.plus(residual.x)
        assert residual.update is not None
        operations.summed(residual.update)
        operations.argmax(jnp.zeros((rows, model.vocab_size), jnp.float32))

    x = jax.ShapeDtypeStruct((rows, model.hidden_size), dtype)
    jax.eval_shape(run, state, x, peers)
    return choices


def _result(kernel: Kernel, problem: Problem, operands: tuple[Any, ...]) -> Any:
    """The result of one device, as shapes."""
    T, dtype = problem.rows, problem.dtype

    def array(*axes: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct((T, *axes), dtype)

    def partial(*axes: int) -> Partial:
        summands = jax.ShapeDtypeStruct((1, T, *axes), jnp.float32)
        return Partial(summands, dtype=dtype)  # type: ignore[arg-type]

    match problem:
        case LinearProblem():
            is_partial = kernel.gives_partial or problem.needs_partial
            value = (partial if is_partial else array)(*problem.columns)
            if problem.operation.endswith("activation"):
                value = array(problem.columns[-1])
            normed = problem.operation.startswith("norm")
            return (array(problem.depth), value) if normed else value
        case ResidualProblem(operation="all_reduce_argmax"):
            return jax.ShapeDtypeStruct((T,), jnp.int32), operands[-1]
        case ResidualProblem(operation="all_reduce"):
            return array(*problem.columns), operands[-1]
        case ResidualProblem():
            both = array(problem.depth), array(problem.depth)
            return both if problem.operation == "add_rms_norm" else (*both, operands[-1])
        case RouteProblem():
            of_row = problem.top_k
            return Routing(array(of_row, dtype=jnp.int32), array(of_row, dtype=jnp.float32))
        case ExpertsProblem():
            return partial(problem.depth)
        case GatedDeltaProblem(operation="causal_conv"):
            K, G, states = problem.key_heads, problem.values_a_key, operands[-2]
            of_head = array(K, problem.key_dim)
            return (of_head, of_head, array(K, G, problem.value_dim)), states
        case GatedDeltaProblem():
            values = problem.key_heads, problem.values_a_key, problem.value_dim
            return array(*values), operands[-2]
        case LayerProblem():
            return array(problem.depth), partial(problem.depth), *operands[5:7], None
        case PostAttentionProblem():
            [width] = problem.columns[2:] or (problem.depth,)
            return array(problem.depth), partial(width), None
    raise AssertionError(problem)


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _is_shape(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)
