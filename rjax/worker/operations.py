"""The engine's operations: each call of a layer is a problem that a kernel is chosen for."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from rjax.models import (
    DecoderLayer,
    Embedding,
    HeadNorms,
    HeadOptions,
    Linear,
    Norm,
    Operations,
    Residual,
    Rotary,
    Router,
    Routing,
)
from rjax.models.layers.gated_delta_net import GatedDeltaNet
from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.attention.backend import AttentionBackend
from rjax.pallas_kernels.experts.base import RouteProblem
from rjax.pallas_kernels.gated_delta.base import GatedDeltaProblem
from rjax.pallas_kernels.gated_delta.states import LayerStates, StateRows
from rjax.pallas_kernels.gemm.activation import Activation
from rjax.pallas_kernels.gemm.base import LinearProblem
from rjax.pallas_kernels.kernel import Kernel, Problem
from rjax.pallas_kernels.pending import Partial, UnmergedAttention, reduced
from rjax.pallas_kernels.residual.base import ResidualProblem
from rjax.pallas_kernels.residual.peers import Peers
from rjax.pallas_kernels.rope_and_cache.base import RopeAndCacheProblem
from rjax.sampling import first_largest
from rjax.worker.device_sums import DeviceSums
from rjax.worker.kernels import Choice, Dispatcher
from rjax.worker.kernels.experts_problem import (
    expert_specs,
    experts_problem,
    own_experts,
    shares_of_bias,
)
from rjax.worker.kernels.linear_problem import LinearSharding, linear_problem, linear_sharding
from rjax.worker.layer_kernels import LayerKernels, Pools
from rjax.worker.pages.states import STATES
from rjax.worker.value_specs import shares, value_specs

_WHOLE = PartitionSpec()
_ROUTED = Routing(_WHOLE, _WHOLE)  # type: ignore[arg-type]
_HEADS = PartitionSpec(None, TENSOR_AXIS)
HEADS = PartitionSpec(None, TENSOR_AXIS, None)
UNMERGED = UnmergedAttention(HEADS, HEADS, PartitionSpec(None, TENSOR_AXIS), _WHOLE)  # type: ignore[arg-type]
"""How devices share attention, merged or not: each has the results of its own heads."""
_MAX_UNMERGED_ROWS = 64  # for more rows, no projection merges attention


class DispatchedOperations(Operations):
    """Turns each call of a layer into a problem, has its kernel chosen, and records the choice.

    What is done with a chosen kernel is left to subclasses; an object lives for one trace. A
    projection whose inputs are sharded gives a Partial whose summands are the devices' shares;
    `DeviceSums` adds those of an update of the residual stream.

    Args:
        dispatcher: chooses the kernels.
        attention: the attention backend.
        mesh: the devices, with an axis ``tensor``.
        record: called with every choice of a kernel.
        peers: exchange buffers of the mesh; None without.
        early_weights: whether the weights are arguments of the compiled program, so that no kernel
            of it writes them; see `Problem`.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        attention: AttentionBackend,
        mesh: Mesh | AbstractMesh,
        record: Callable[[Choice], None] | None = None,
        peers: Peers | None = None,
        *,
        early_weights: bool = False,
    ) -> None:
        self._dispatcher = dispatcher
        self._attention = attention
        self._mesh = mesh
        self._record = record
        self._early_weights = early_weights
        self._layers = LayerKernels(
            self._choose,
            lambda kernel, problem, operands: self._run(
                kernel, problem, operands, (), lambda _: _WHOLE
            ),
            early_weights=early_weights,
        )
        self._sums = DeviceSums(mesh, self._choose, self._run, peers) if mesh.size > 1 else None

    @abc.abstractmethod
    def _run(
        self,
        kernel: Kernel,
        problem: Problem,
        operands: tuple[Any, ...],
        specs: tuple[Any, ...],
        of_result: Callable[[Any], Any],
    ) -> Any:
        """The result of a kernel; the arguments are those of `run_kernel`."""

    @abc.abstractmethod
    def _merged(self, h: Float[Array, "T ..."] | UnmergedAttention) -> Float[Array, "T ..."]:
        """The result of attention as one array."""

    @property
    @abc.abstractmethod
    def _positions(self) -> Int[Array, " T"]:
        """Positions of the rows, below 0 where a row is padding."""

    @abc.abstractmethod
    def _paged(self, layer: int) -> tuple[Pools, tuple[Any, Any, Any]]:
        """(K pool and V pool; page table, positions and KV slots) of a layer."""

    @abc.abstractmethod
    def _keep(self, layer: int, pools: Pools) -> None:
        """Replace the pools of a layer by those that its kernel wrote."""

    @property
    def peers(self) -> Peers | None:
        """Exchange buffers as the last operation over the devices leaves them; None without."""
        return None if self._sums is None else self._sums.peers

    def decoder_layer(
        self,
        layer: DecoderLayer,
        residual: Residual,
        rotary: Rotary | None,
        following: DecoderLayer | None = None,
    ) -> Residual | None:
        """The stream after a layer, or None where no kernel computes more than an operation."""
        if isinstance(layer.attention, GatedDeltaNet):
            return None
        obstacle = None if self._mesh.size == 1 else f"{self._mesh.size} devices; it takes one"
        pools, rows = self._paged(layer.attention.layer)
        whole = self._layers.whole_layer(layer, residual, rotary, pools, rows, obstacle)
        if whole is not None:
            residual, pools = whole
            self._keep(layer.attention.layer, pools)
            return residual
        return self._layers.post_attention_block(
            layer, residual, rotary, following, self, self._merged, obstacle
        )

    def argmax(self, logits: Float32[Array, "B V"]) -> Int[Array, " B"]:
        """``jnp.argmax`` over V, which the devices may share; no NaN."""
        return first_largest(logits) if self._sums is None else self._sums.argmax(logits)

    def embed(self, embedding: Embedding, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        """The embeddings of tokens."""
        return embedding(tokens) if self._sums is None else self._sums.embed(embedding, tokens)

    def _write_kernel(
        self,
        qkv: Float[Array, "T K A H"] | Partial,
        rotary: Rotary | None,
        norms: HeadNorms | None,
        kv_dtype: Any,
    ) -> tuple[Kernel, RopeAndCacheProblem, Float[Array, "T K A H"] | Partial, tuple[Array, ...]]:
        """The kernel that norms, rotates and stores: (it, its problem, qkv, weights of its norms).

        Where no kernel norms queries and keys too, qkv is normed already, and there are no weights.
        """
        problem = RopeAndCacheProblem(
            operation="rope_and_cache",
            rows=qkv.shape[0],
            dtype=str(jnp.dtype(qkv.dtype)),
            head_dim=qkv.shape[3],
            rotary_dim=None if rotary is None else 2 * rotary.cos.shape[-1],
            kv_dtype=str(jnp.dtype(kv_dtype)),
        )
        if norms is not None:
            normed = dataclasses.replace(
                problem,
                operation="norm_rope_and_cache",
                eps=norms.q.eps,
                norms_values=norms.values,
            )
            write = self._choose(normed).kernel
            if write is not None:
                return write, normed, qkv, (norms.q.weight[...], norms.k.weight[...])
            qkv = norms(qkv)
        write = self._choose(problem).kernel
        assert write is not None, "plain JAX stores all KV"
        return write, problem, qkv, ()

    def _leaves_unmerged(self, rows: int, heads: HeadOptions | None) -> bool:
        """Whether the projection behind attention merges it.

        It does so for few rows where the backend can leave them so; over several devices that is
        one row only. Sinks join the merged result.
        """
        few = (_MAX_UNMERGED_ROWS if self._mesh.size == 1 else 1) >= rows
        return few and self._attention.unmerged_attention is not None and heads is None

    def linear(
        self, linear: Linear, h: Float[Array, "T ..."] | UnmergedAttention
    ) -> Float[Array, "T ..."] | Partial:
        """The projection of h, perhaps as split-K partials or as the devices' shares."""
        sharding = linear_sharding(linear, self._mesh)
        if isinstance(h, UnmergedAttention):
            problem = self._linear_problem("merge_linear", linear, sharding, h.out)
            kernel = self._choose(problem).kernel
            if kernel is not None:
                operands, value = (h, linear.leaves), value_specs(sharding)
                product = self._run(kernel, problem, operands, (UNMERGED, sharding.leaves), value)
                return _with_bias(product, linear)
        h = self._merged(h)
        h = h.reshape(len(h), linear.depth)
        problem = self._linear_problem("linear", linear, sharding, h)
        kernel = self._choose(problem).kernel
        assert kernel is not None, "plain JAX takes every product"
        specs = (PartitionSpec(None, sharding.inputs), sharding.leaves)
        product = self._run(kernel, problem, (h, linear.leaves), specs, value_specs(sharding))
        return _with_bias(product, linear)

    def merged(self, attended: Float[Array, "T ..."] | UnmergedAttention) -> Float[Array, "T ..."]:
        """The result of attention as one array."""
        return self._merged(attended)

    def _through_states(
        self,
        mixed: Float[Array, "T K W"],
        weight: Float[Array, "K X W"],
        decay: Float32[Array, "T K G"],
        beta: Float32[Array, "T K G"],
        key_dim: int,
        states: LayerStates,
        rows: StateRows,
    ) -> tuple[Float[Array, "T K G Y"], LayerStates]:
        """The gated delta rule behind its convolution: (its outputs, the states with the rows)."""
        values = decay.shape[2]
        problem = GatedDeltaProblem(
            operation="causal_conv",
            rows=len(mixed),
            dtype=str(mixed.dtype),
            key_heads=mixed.shape[1] // self._mesh.size,
            values_a_key=values,
            key_dim=key_dim,
            value_dim=(mixed.shape[2] - 2 * key_dim) // values,
            page_size=states.keys.shape[2],
            seqs=rows.slot.shape[0],
            items=rows.item_row.shape[0],
        )

        def run(
            operation: str, operands: tuple[Array, ...], shared: PartitionSpec, out: Any
        ) -> Any:
            of_operation = dataclasses.replace(problem, operation=operation)
            kernel = self._choose(of_operation).kernel
            assert kernel is not None, "plain JAX takes every problem"
            specs = (*(_HEADS for _ in operands[:1]), *(shared for _ in operands[1:]))
            return self._run(
                kernel,
                of_operation,
                (*operands, states, rows),
                (*specs, STATES, _WHOLE),
                lambda _: (out, STATES),
            )

        of_heads = (_HEADS,) * 3
        of_weight = PartitionSpec(TENSOR_AXIS)
        qkv, states = run("causal_conv", (mixed, weight), of_weight, of_heads)
        return run("gated_delta", (*qkv, decay, beta), _HEADS, _HEADS)

    def add_rms_norm(
        self, x: Float[Array, "T D"], update: Float[Array, "T D"] | Partial, norm: Norm
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """(x + update, the RMSNorm of it)."""
        if self._sums is not None and isinstance(update, Partial):
            found = self._sums.all_reduce_rms_norm(x, update, norm)
            if found is not None:
                return found
            update = self._sums.all_reduce(update)
        problem = ResidualProblem(
            operation="add_rms_norm",
            rows=len(x),
            dtype=str(x.dtype),
            depth=x.shape[1],
            columns=x.shape[1:],
            pending_bias=_has_bias(update),
            eps=norm.eps,
        )
        kernel = self._choose(problem).kernel
        assert kernel is not None, "plain JAX takes every norm"
        operands = (x, update, norm.weight[...])
        return self._run(kernel, problem, operands, (_WHOLE,) * 3, lambda _: _WHOLE)

    def summed(self, value: Float[Array, "T ..."] | Partial) -> Float[Array, "T ..."]:
        """An update of the residual stream as an array; shares of several devices are summed."""
        if self._sums is None or not isinstance(value, Partial):
            return reduced(value)
        return self._sums.all_reduce(value)

    def norm_linear(
        self, residual: Residual, norm: Norm | None, linear: Linear
    ) -> tuple[Residual, Float[Array, "T ..."] | Partial]:
        """(the stream with its update added, the projection of its norm)."""
        fused = self._norm_and("norm_linear", residual, norm, linear, None)
        return super().norm_linear(residual, norm, linear) if fused is None else fused

    def norm_linear_activation(
        self, residual: Residual, norm: Norm | None, linear: Linear, activation: Activation
    ) -> tuple[Residual, Float[Array, "T F"]]:
        """(the stream with its update added, the activated projection of its norm)."""
        fused = self._norm_and("norm_linear_activation", residual, norm, linear, activation)
        if fused is not None:
            return fused
        residual, h = self.norm(residual, norm)
        sharding = linear_sharding(linear, self._mesh)
        problem = self._linear_problem("linear_activation", linear, sharding, h, activation)
        kernel = self._choose(problem).kernel
        if kernel is not None:
            specs = (_WHOLE, sharding.leaves)
            of_value = value_specs(sharding, activated=True)
            return residual, self._run(kernel, problem, (h, linear.leaves), specs, of_value)
        return residual, self._activate(reduced(self.linear(linear, h)), activation, sharding)

    def route(
        self,
        h: Float[Array, "T D"],
        weight: Float[Array, "D J"],
        router: Router,
        top_k: int,
        *,
        bias: Float[Array, " J"] | None = None,
        correction: Float[Array, " J"] | None = None,
    ) -> Routing:
        """The experts of each row; every device computes them."""
        problem = RouteProblem(
            operation="route",
            label="D -> J",
            rows=len(h),
            dtype=str(h.dtype),
            depth=h.shape[1],
            num_experts=weight.shape[1],
            router=router,
            top_k=top_k,
        )
        kernel = self._choose(problem).kernel
        assert kernel is not None, "plain JAX takes every router"
        operands = (h, weight, bias, correction)
        return self._run(kernel, problem, operands, (_WHOLE,) * 4, lambda _: _ROUTED)

    def experts(
        self,
        h: Float[Array, "T D"],
        routing: Routing,
        up: Linear,
        down: Linear,
        activation: Activation,
    ) -> Float[Array, "T D"] | Partial:
        """The weighted sum of what the experts of each row make of it; padding takes none."""
        problem = experts_problem(
            up,
            down,
            self._mesh,
            rows=len(h),
            dtype=h.dtype,
            activation=activation,
        )
        kernel = self._choose(problem).kernel
        assert kernel is not None, "plain JAX takes all experts"
        chosen = routing.experts
        if len(h) > 1:  # nobody reads what a single row of padding gives
            padding = self._positions[:, None] < 0
            chosen = jnp.where(padding, up.num_experts, chosen)
        chosen, of_chosen = own_experts(chosen, up, self._mesh)
        biases = up.bias_array, shares_of_bias(down, self._mesh)
        operands = (h, chosen, routing.weights, dict(up.leaves), dict(down.leaves), *biases)
        specs = (_WHOLE, of_chosen, _WHOLE, *expert_specs(up, down, self._mesh))
        return self._run(kernel, problem, operands, specs, shares)

    def _activate(
        self, h: Float[Array, "T A F"], activation: Activation, sharding: LinearSharding
    ) -> Float[Array, "T F"]:
        problem = LinearProblem(
            operation="activation",
            rows=len(h),
            dtype=str(h.dtype),
            columns=sharding.columns,
            activation=activation,
        )
        kernel = self._choose(problem).kernel
        assert kernel is not None, "plain JAX takes every activation"
        specs = (PartitionSpec(None, *sharding.outputs),)
        of_value = value_specs(sharding, activated=True)
        return self._run(kernel, problem, (h,), specs, of_value)

    def _norm_and(
        self,
        operation: Any,
        residual: Residual,
        norm: Norm | None,
        linear: Linear,
        activation: Activation | None,
    ) -> tuple[Residual, Any] | None:
        """A norm and what follows it in one kernel, or None where there is no such kernel."""
        if residual.update is None or norm is None:
            return None
        if self._sums is not None and isinstance(residual.update, Partial):
            return None  # the kernel that sums the shares computes the norm too
        x, update = residual.x, residual.update
        sharding = linear_sharding(linear, self._mesh)
        problem = self._linear_problem(
            operation, linear, sharding, x, activation, norm.eps, _has_bias(update)
        )
        if not norm.is_rms:
            problem = dataclasses.replace(problem, obstacle="a norm that is not an RMS norm")
        kernel = self._choose(problem).kernel
        if kernel is None:
            return None
        operands = (x, update, norm.weight[...], linear.leaves)
        of_value = value_specs(sharding, activated=activation is not None)
        x, value = self._run(
            kernel,
            problem,
            operands,
            (_WHOLE, _WHOLE, _WHOLE, sharding.leaves),
            lambda found: (_WHOLE, of_value(found[1])),
        )
        return Residual(x), value if activation is not None else _with_bias(value, linear)

    def _linear_problem(
        self,
        operation: Any,
        linear: Linear,
        sharding: LinearSharding,
        h: Array,
        activation: Activation | None = None,
        eps: float = 0.0,
        pending_bias: bool = False,
    ) -> LinearProblem:
        return linear_problem(
            operation,
            linear,
            sharding,
            rows=len(h),
            dtype=h.dtype,
            activation=activation,
            eps=eps,
            pending_bias=pending_bias,
            early_weights=self._early_weights,
        )

    def _choose(self, problem: Problem) -> Choice:
        choice = self._dispatcher.choose(problem)
        if self._record is not None:
            self._record(choice)
        return choice


def _has_bias(update: Array | Partial) -> bool:
    return isinstance(update, Partial) and update.bias is not None


def _with_bias(product: Any, linear: Linear) -> Any:
    if linear.bias is None:
        return product
    if isinstance(product, Partial):
        return Partial(product.summands, linear.bias[...], product.dtype)
    return product + linear.bias[...]
