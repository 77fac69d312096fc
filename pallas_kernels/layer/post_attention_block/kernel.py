"""From one attention to the next in one launch on Hopper (Mosaic GPU), for few rows.

Output projection, residual sum and norm, gate-up with SwiGLU, down, and, where a layer follows, its
norm and its projection to queries, keys and values. One CTA an SM, three warpgroups: one copies the
weights of all products through a pipeline in shared memory (TMA) and waits for no other CTA, so
that device memory does not rest between products; one copies the rows, from L2; one multiplies
(wgmma). Split-K partials, normed rows and activations go through device memory, and the CTAs meet
at counters (`grid_barrier`) before each next product. Bytes moved: the weights once from device
memory; from L2 the rows once a column tile and 8 * T * D a split of the output and down
projections.

All CTAs must run at the same time, since they wait for each other: the grid has one CTA an SM.
Source: "Look ma, no bubbles" (Hazy Research, 2025) for one kernel over products that stream.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm.activation import swiglu
from rjax.pallas_kernels.gemm.gemv_row import reduce_warpgroup
from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.layer.base import PostAttentionProblem
from rjax.pallas_kernels.layer.post_attention_block.cta import BlockCta, store_transposed
from rjax.pallas_kernels.layer.post_attention_block.grid_barrier import (
    GridBarrier,
    arrive,
    clear,
    wait_for,
)
from rjax.pallas_kernels.layer.post_attention_block.sizes import WGMMA_M, BlockSizes, Product
from rjax.pallas_kernels.mosaic.emit import (
    THREADS,
    begin_kernel,
    num_sms,
    store_strided,
    widest_vector,
)
from rjax.pallas_kernels.mosaic.pipeline import Pipeline
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual.add_rms_norm import normed_row

ROWS = (8, 16)
"""Supported row counts."""

_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # a thread


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class PostAttentionWeights:
    """The arrays that the kernel reads, in the dtype of the rows; those of norms may be float32.

    Attributes:
        output: weight of the projection behind attention.
        mlp_norm: weight of the norm before the feed-forward.
        gate_up: weights of the gate and up projections.
        down: weight of the projection behind the activation.
        next_norm, next_qkv: weights of the first norm and projection of the layer that follows, or
            None.
    """

    output: Float[Array, "E D"]
    mlp_norm: Float[Array, " D"]
    gate_up: Float[Array, "D 2 F"]
    down: Float[Array, "F D"]
    next_norm: Float[Array, " D"] | None = None
    next_qkv: Float[Array, "D Q"] | None = None


def refusal(problem: PostAttentionProblem) -> str | None:
    """Why the kernel cannot take a problem, or None."""
    if problem.rows not in ROWS:
        return f"{problem.rows} rows; it takes {', '.join(map(str, ROWS))}"
    if jnp.dtype(problem.dtype).itemsize != 2:
        return f"operands are {problem.dtype}; it takes one 16-bit dtype"
    D, (E, *others) = problem.depth, problem.columns
    if D % THREADS or any(n % 64 for n in problem.columns):
        found = ", ".join(map(str, (E, D, *others)))
        return f"products of {found} columns; it takes multiples of 64, and {THREADS} of the row"
    if problem.rows > num_sms():
        return f"{problem.rows} rows on {num_sms()} SMs; it takes no more rows than SMs"
    return None


def post_attention_block(
    problem: PostAttentionProblem,
    x: Float[Array, "T D"],
    attended: Float[Array, "T E"],
    weights: PostAttentionWeights,
    barrier: GridBarrier,
) -> tuple[Float[Array, "T D"], Partial, GridBarrier]:
    """(the residual stream, what follows from it, counters for the next launch).

    Args:
        problem: one that ``refusal`` takes, with the sizes of the arrays.
        x: bfloat16 or float16, the residual stream; no update is pending. T is 8 or 16.
        attended: the result of attention, in the dtype of x.
        weights: weights of the layer, and of the next one's norm and first projection if a layer
            follows.
        barrier: counters of this launch and the one before.

    Returns:
        Where a layer follows, the stream with both updates added, and queries, keys and values of
        that layer [X, T, Q]; else the stream with the update of attention, and the update of the
        feed-forward [X, T, D]. Sums are float32 and rounded where separate kernels store them:
        given the same splits, the bits are those of ``split_k_gemm``, ``add_rms_norm`` and
        ``gate_up_gemm``.

    Raises:
        ValueError: arrays of several dtypes.
    """
    (T, D), F, dtype = x.shape, problem.columns[1], x.dtype
    early_weights, follows = problem.early_weights, weights.next_qkv is not None
    sizes = BlockSizes.of(T, D, problem.columns, num_sms())
    arrays = {
        "x": x,
        "attended": attended,
        "output": weights.output[:, None],
        "mlp_norm": weights.mlp_norm,
        "gate_up": weights.gate_up,
        "down": weights.down[:, None],
    }
    if weights.next_norm is not None and weights.next_qkv is not None:
        arrays |= {"next_norm": weights.next_norm, "qkv": weights.next_qkv[:, None]}
    wrong = [name for name, a in arrays.items() if "norm" not in name and a.dtype != dtype]
    if wrong:
        raise ValueError(f"x is {dtype}, but not {', '.join(wrong)}; the kernel takes one dtype")

    def partials(product: Product) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((product.splits, T, product.columns), jnp.float32)

    row = jax.ShapeDtypeStruct((T, D), dtype)
    outputs = {
        "output_partials": partials(sizes.output),
        "residual": row,
        "normed": row,
        "activated": jax.ShapeDtypeStruct((T, F), dtype),
        "down_partials": partials(sizes.down),
    }
    if sizes.qkv is not None:
        outputs |= {"next_residual": row, "next_normed": row, "qkv_partials": partials(sizes.qkv)}
    stages = {"w": sizes.weight_stages, "h": sizes.row_stages}

    def kernel(*refs, w_smem, h_smem, w_full, w_empty, h_full, h_empty, sums):
        """GMEM: ``arrays``, both counters [X], ``outputs``. SMEM: w_smem [stages, step, tile],
        h_smem [stages * T, step], sums float32 [4]. Barriers: one a stage."""
        begin_kernel(early_weights)
        inputs = dict(zip(arrays, refs, strict=False))
        current, other, *rest = refs[len(arrays) :]
        found = dict(zip(outputs, rest, strict=True))
        wg, index = lax.axis_index("wg"), lax.axis_index("cta")
        cta = BlockCta(
            sizes=sizes,
            cta=index,
            weights=Pipeline(w_full, w_empty, sizes.weight_stages),
            rows=Pipeline(h_full, h_empty, sizes.row_stages),
            w_smem=w_smem,
            h_smem=h_smem,
        )
        block = _Block(cta, inputs, found, current, problem.eps, dtype, sums)

        @pl.when(wg == 0)
        def _consumer():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            if early_weights:
                plgpu.griddepcontrol_wait()
            block.consume()

        @pl.when(wg == 1)
        def _weights():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            block.produce_weights()

        @pl.when(wg == 2)
        def _rows():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            if early_weights:
                plgpu.griddepcontrol_wait()
            pl.when(index == 0)(lambda: clear(other))
            block.produce_rows()

    kernel.__name__ = "post_attention_block"
    counters = [jax.new_ref(barrier.current), jax.new_ref(barrier.other)]
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    row_memory = (sizes.row_stages * T, sizes.step)
    results = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        scratch_types=dict(
            w_smem=plgpu.SMEM((stages["w"], sizes.step, sizes.tile), dtype, transforms=swizzled),
            h_smem=plgpu.SMEM(row_memory, dtype, transforms=swizzled),
            sums=plgpu.SMEM((4,), jnp.float32),
            **{
                f"{name}_{state}": plgpu.Barrier(num_barriers=count)
                for name, count in stages.items()
                for state in ("full", "empty")
            },
        ),
        grid=(sizes.ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*arrays.values(), *counters)
    found = dict(zip(outputs, results, strict=True))
    used, emptied = (jax.freeze(ref) for ref in counters)
    stream, pending = (
        ("next_residual", "qkv_partials") if follows else ("residual", "down_partials")
    )
    return found[stream], Partial(found[pending], dtype=dtype), GridBarrier(emptied, used)


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """The order of the products and norms, the same for all warpgroups.

    Attributes:
        cta: the CTA.
        inputs, found: GMEM, the arrays that the kernel reads and those that it writes, by name.
        current: int32 [X] GMEM: counters of this launch. Number n counts the results of the n-th
            product or norm.
        eps, dtype: epsilon of the norms and dtype of the rows.
        sums: float32 [4] SMEM.
    """

    cta: BlockCta
    inputs: dict[str, Any]
    found: dict[str, Any]
    current: Any
    eps: float
    dtype: DTypeLike
    sums: Any

    @property
    def _follows(self) -> bool:
        return self.cta.sizes.qkv is not None

    def produce_weights(self) -> None:
        """Copy the weights of all products."""
        sizes, numbers = self.cta.sizes, (jnp.int32(0), jnp.int32(0))
        for name in ("output", "gate_up", "down", *(("qkv",) if self._follows else ())):
            product = getattr(sizes, name)
            numbers = self.cta.produce_weights(product, self.inputs[name], numbers)

    def produce_rows(self) -> None:
        """Copy the rows of each product as soon as all of them are there."""
        sizes, inputs, found = self.cta.sizes, self.inputs, self.found
        number = self.cta.produce_rows(sizes.output, inputs["attended"], jnp.int32(0))
        wait_for(self.current, 1, sizes.rows)
        number = self.cta.produce_rows(sizes.gate_up, found["normed"], number)
        wait_for(self.current, 2, sizes.gate_up.units)
        number = self.cta.produce_rows(sizes.down, found["activated"], number)
        if sizes.qkv is not None:
            wait_for(self.current, 4, sizes.rows)
            self.cta.produce_rows(sizes.qkv, found["next_normed"], number)

    def consume(self) -> None:
        """Multiply and norm."""
        sizes, numbers = self.cta.sizes, (jnp.int32(0), jnp.int32(0))
        store = self._store_partials
        numbers = self.cta.multiply(sizes.output, store("output_partials", 0), numbers)
        norm = ("x", "output_partials", "mlp_norm", "residual", "normed")
        self._norm(norm, 0, sizes.output.units)
        numbers = self.cta.multiply(sizes.gate_up, self._activate, numbers)
        down = store("down_partials", 3 if self._follows else None)
        numbers = self.cta.multiply(sizes.down, down, numbers)
        if sizes.qkv is not None:
            norm = ("residual", "down_partials", "next_norm", "next_residual", "next_normed")
            self._norm(norm, 3, sizes.down.units)
            self.cta.multiply(sizes.qkv, store("qkv_partials", None), numbers)

    def _store_partials(self, name: str, which: int | None):
        def epilogue(accs, split, column):
            self._store(self.found[name].at[split], accs, column)
            if which is not None:
                arrive(self.current, which)

        return epilogue

    def _activate(self, accs, split, column) -> None:
        del split
        gates, ups = accs[: len(accs) // 2], accs[len(accs) // 2 :]
        hidden = [swiglu(*both).astype(self.dtype) for both in zip(gates, ups, strict=True)]
        self._store(self.found["activated"], hidden, column)
        arrive(self.current, 2)

    @staticmethod
    def _store(ref, blocks, column) -> None:
        """``ref[t, column + 64 * i + n] = blocks[i][n, t]``."""
        for i, block in enumerate(blocks):
            store_transposed(ref, block, column + i * WGMMA_M)

    def _norm(self, names: tuple[str, ...], which: int, count: int) -> None:
        """A row of the residual sum and its norm, as `add_rms_norm`; the last CTAs have one each.

        names: x, update, weight, residual, normed. which, count: arrivals of the update.
        """
        refs = self.inputs | self.found
        x, update, weight, residual_ref, normed_ref = (refs[name] for name in names)
        sizes = self.cta.sizes
        row = sizes.ctas - 1 - self.cta.cta
        layout = plgpu.Layout.WG_STRIDED((sizes.D,), vec_size=widest_vector(sizes.D))

        def total(squares):
            return reduce_warpgroup("add", squares, layout, self.sums)

        @pl.when(row < sizes.rows)
        def _():
            wait_for(self.current, which, count)
            rows = (x, update, weight, row, self.eps, self.dtype, layout)
            residual, normed = normed_row(*rows, total=total)
            store_strided(residual_ref.at[row], residual, layout)
            store_strided(normed_ref.at[row], normed, layout)
            arrive(self.current, which + 1)


KERNEL = Kernel(
    "mosaic.post_attention_block",
    "post_attention_block",
    "mosaic",
    refusal,
    post_attention_block,
    compute_capabilities=HOPPER,
)
