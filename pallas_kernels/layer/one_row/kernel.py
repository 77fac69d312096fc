"""A decoder layer of one row in one launch on Hopper (Mosaic GPU).

One CTA an SM. A producer warpgroup copies all weights and KV that its CTA multiplies through one
ring of blocks in shared memory, a few stages at a time: no copy waits for another CTA. Two consumer
warpgroups compute queries, keys and values, then attention, the output projection, gate
and up, and down; between these stages the CTAs send each other partial sums as words in device
memory (`words`), which every CTA adds up for the part of the next row that it multiplies. Few-bit
weights become float16 in registers and multiply a float16 row, whose groups have powers of two.
Bytes moved: the weights and the KV of the layer once from device memory; 4 bytes a word and reader
from L2, about 100 KB a CTA with the sizes of Qwen3-0.6B.

All CTAs must run at the same time, since they wait for each other's words: the grid has one CTA an
SM. A launch empties the words that the launch before it used.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int32

from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.layer.base import LayerProblem
from rjax.pallas_kernels.layer.one_row.cta import LayerCta, Ring
from rjax.pallas_kernels.layer.one_row.sizes import TILE, LayerSizes
from rjax.pallas_kernels.layer.one_row.smem_row import GROUP, padded
from rjax.pallas_kernels.layer.one_row.stage_scales import STAGE_COLUMNS
from rjax.pallas_kernels.layer.one_row.tables import TablePlaces
from rjax.pallas_kernels.layer.one_row.threads import (
    BLOCK_TRANSFORMS,
    CONSUMERS,
    LINE_BYTES,
    WARPS,
    prefetch,
)
from rjax.pallas_kernels.layer.one_row.weights import (
    BITS,
    LayerWeights,
    few_bit_refusal,
    scale_rows,
)
from rjax.pallas_kernels.mosaic.emit import begin_kernel, num_sms
from rjax.pallas_kernels.mosaic.words import EMPTY
from rjax.pallas_kernels.pending import Partial

_WARPGROUPS = CONSUMERS // 128
_SMEM_BYTES = 220 * 1024  # of 227 KB; Pallas and the barriers need some
_BLOCK_BYTES = 2 * TILE * TILE * 2  # of a stage
_MAX_STAGES = 14
_MIN_STAGES = 4
_MIN_KV_SPLITS = 8  # with fewer, long sequences wait for the CTAs that read their KV
_MIN_UNITS = 0.5  # of a product, for each CTA
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # a thread


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class PartialSumBuffer:
    """The buffers of two launches for sums of CTAs, which take turns.

    Attributes:
        current: words of the next launch, all ``EMPTY``.
        other: words of the launch before, which the next one empties.
    """

    current: Int32[Array, " X"]
    other: Int32[Array, " X"]

    @classmethod
    def empty(cls, sizes: LayerSizes) -> "PartialSumBuffer":
        """The words before the first launch of a step, which empties ``other`` whatever it holds.

        Its zeros keep the two arrays apart: see `mosaic.emit`, "Arrays that a kernel writes".
        """
        current = jnp.full(sizes.words, EMPTY, jnp.int32)
        return cls(current, jnp.zeros_like(current))


def refusal(problem: LayerProblem) -> str | None:
    """Why the kernel cannot compute a layer, or None."""
    D, F, H = problem.depth, problem.width, problem.head_dim
    N, K, dtype, kv_dtype = problem.num_heads, problem.num_kv_heads, problem.dtype, problem.kv_dtype
    if problem.rows != 1:
        return f"{problem.rows} rows; it takes one"
    if dtype != "bfloat16" or kv_dtype != "bfloat16":
        return f"activations in {dtype} and KV in {kv_dtype}; it takes bfloat16"
    if H not in (64, 128) or problem.rotary_dim != H:
        return f"heads of {H} dims, {problem.rotary_dim} rotated; it takes 64 or 128, all rotated"
    if problem.page_size != TILE:
        return f"pages of {problem.page_size} tokens; it takes {TILE}"
    if D % 128 or F % 128 or N * H % 128:
        return f"rows of {D}, {N * H} and {F} columns; it takes multiples of 128"
    why = few_bit_refusal(problem)
    if why is not None:
        return why
    sizes = layer_sizes(problem)
    if sizes.kv_splits < _MIN_KV_SPLITS:
        return f"{N} heads and {K} KV heads leave {sizes.kv_splits} CTAs for each; it needs eight"
    products = (sizes.qkv, sizes.output, sizes.gate_up, sizes.down)
    fewest = min(product.units * product.tile // TILE for product in products)
    if fewest < _MIN_UNITS * sizes.ctas:
        return f"a product of {fewest} parts; it has {sizes.ctas} CTAs, most of which would rest"
    if _stages(sizes, scale_rows(problem)) < _MIN_STAGES:
        return f"rows of {D} and {F} columns leave too little shared memory for weights"
    return None


def layer_sizes(problem: LayerProblem) -> LayerSizes:
    """The layer's sizes on this GPU."""
    heads = problem.num_heads, problem.num_kv_heads, problem.head_dim
    bits = 16 if problem.values is None else BITS[problem.values]
    return LayerSizes(problem.depth, *heads, problem.width, num_sms(), bits)


def _stages(sizes: LayerSizes, scales: int) -> int:
    rest = 4 * (sizes.D + (sizes.heads + 2) * sizes.H + 2 * 4 * TILE)
    rest += 2 * padded(sizes.row_numbers) + 4 * sizes.row_numbers // GROUP
    rest += 4 * WARPS * sizes.heads * sizes.head_words + 4 * TablePlaces.of(sizes).size
    stage_bytes = _BLOCK_BYTES + 4 * STAGE_COLUMNS * scales
    return min(_MAX_STAGES, (_SMEM_BYTES - rest) // stage_bytes)


def _under_way(sizes: LayerSizes, stages: int) -> int:
    """Stages that are copied at the same time, which words wait behind.

    Four keep device memory busy. A layer that two rings hold waits for words more than for weights,
    and takes two.
    """
    D, attention = sizes.D, 2 * (sizes.N + sizes.K) * sizes.H
    weight_bytes = D * (attention + 3 * sizes.F) * sizes.bits // 8
    return 2 if weight_bytes <= 2 * stages * _BLOCK_BYTES * sizes.ctas else 4


def decoder_layer(
    problem: LayerProblem,
    x: Float[Array, "1 D"],
    update: Float[Array, "1 D"] | Partial | None,
    weights: LayerWeights,
    cos: Float[Array, "1 R"],
    sin: Float[Array, "1 R"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, "1"],
    slots: Int[Array, "1"],
    words: PartialSumBuffer | None,
) -> tuple[
    Float[Array, "1 D"], Partial, Float[Array, "P K S H"], Float[Array, "P K S H"], PartialSumBuffer
]:
    """A layer of a decoder: attention and a gated feed-forward with silu, each behind a norm.

    Args:
        problem: one that ``refusal`` takes, with the sizes of the arrays.
        x, update: the residual stream and what the layer before adds to it.
        weights: the layer's weights.
        cos, sin: float32, those of the row's position.
        k_pages, v_pages: bfloat16; the row's key and value are written in place.
        page_table: int32; row 0 lists the pages of the sequence.
        positions: int32, the row's position: it attends to itself and all tokens before. Negative
            for padding, whose result is not used.
        slots: int32, where its key and value are stored, page * S + offset; negative for nowhere.
        words: words of this launch and the one before; None before the first launch of a step.

    Returns:
        (the residual stream after attention, the update of the feed-forward, the pages, the words
        for the next launch). Sums are float32; the row is rounded to bfloat16 where separate
        kernels store it.

    Source: "Look ma, no bubbles" (Hazy Research, 2025) for one kernel over stages that stream.
    """
    D, H = problem.depth, problem.head_dim
    sizes, scales = layer_sizes(problem), scale_rows(problem)
    stages, early_weights = _stages(sizes, scales), problem.early_weights
    if update is None:  # of the first layer; as many summands as in the others, for one kernel
        update = Partial(jnp.zeros((sizes.down.splits, *x.shape), jnp.float32), dtype=x.dtype)
    if words is None or words.current.shape != (sizes.words,):  # the layer before has other bits
        words = PartialSumBuffer.empty(sizes)
    summands = update.summands if isinstance(update, Partial) else update[None]
    summands = summands.astype(jnp.float32).reshape(-1, 1, D)
    mutable = (k_pages, v_pages, words.current, words.other)
    given = {
        "x": x,
        "summands": summands,
        "cos": cos,
        "sin": sin,
        "page_table": page_table,
        "positions": positions,
        "slots": slots,
        **weights.operands(),
    }

    def one_row_layer(*refs, ring, full, empty, scale_words=None, **scratch):
        """GMEM: the arrays of ``given``; K and V pages [P, K, 64, H], both words [X]; residual
        [1, D], update [splits * D]. SMEM: ring bfloat16 [stages, 2, 64, 64], or a union of that
        and few-bit [stages, 2, 64, 128 bytes]; scale_words [stages, `scale_rows`, 128], and
        ``scratch``."""
        inputs = dict(zip(given, refs, strict=False))
        blocks, few_blocks = (ring, ring) if sizes.bits == 16 else ring
        k_ref, v_ref, current, other, residual, partial = refs[len(given) :]
        begin_kernel(early_weights)
        position = None if early_weights else prefetch(inputs["positions"], 0)
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        layer = LayerCta(
            sizes=sizes,
            inputs=inputs,
            few_bits=weights.few_bits(inputs),
            pages=(k_ref, v_ref),
            current=current,
            outputs=(residual, partial),
            scratch=scratch,
            ring=Ring(
                full, empty, stages, blocks, few_blocks, _under_way(sizes, stages), scale_words
            ),
            cta=cta,
            scale=problem.score_scale,
            eps=problem.eps,
            head_eps=problem.head_eps,
        )

        def placed() -> LayerCta:
            at = position
            if early_weights:
                plgpu.griddepcontrol_wait()
                at = prefetch(inputs["positions"], 0)
            return dataclasses.replace(layer, prefetched_position=at)

        @pl.when(wg == _WARPGROUPS)
        def _producer():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            number = layer.produce_qkv() if early_weights else None
            placed().produce(other, number)

        @pl.when(wg < _WARPGROUPS)
        def _consumer():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            placed().consume()

    pools = [jax.new_ref(array) for array in mutable]
    floats = {
        "stream": (D,),
        "tables": (TablePlaces.of(sizes).size,),
        "heads": (sizes.heads + 2, H),
        "new_scores": (sizes.heads,),
        "by_warp": (WARPS, sizes.heads, sizes.head_words),
        "sums": (2, 2, 2, TILE),
        "totals": (2, WARPS),
    }
    row_memory = ((sizes.row_numbers,), jnp.bfloat16)
    ring_memory = plgpu.SMEM((stages, 2, TILE, TILE), jnp.bfloat16, transforms=BLOCK_TRANSFORMS)
    if sizes.bits < 16:
        step, dtype = sizes.qkv.step, weights.qkv.values.dtype
        transforms = (plgpu.TilingTransform((8, step)), plgpu.SwizzleTransform(LINE_BYTES))
        few_bits = plgpu.SMEM((stages, 2, TILE, step), dtype, transforms=transforms)
        ring_memory = plgpu.RefUnion(ring_memory, few_bits)
        row_memory = ((padded(sizes.row_numbers),), jnp.float16)
        floats["powers"] = (sizes.row_numbers // GROUP,)
    if scales:
        floats["scale_words"] = (stages, scales, STAGE_COLUMNS)
    residual, partial = plgpu.kernel(
        one_row_layer,
        out_type=(
            jax.ShapeDtypeStruct((1, D), x.dtype),
            jax.ShapeDtypeStruct((sizes.down.splits * D,), jnp.float32),
        ),
        scratch_types=dict(
            ring=ring_memory,
            row=plgpu.SMEM(*row_memory),
            full=plgpu.Barrier(num_barriers=stages, num_arrivals=3 if scales else 2),
            empty=plgpu.Barrier(num_barriers=stages, num_arrivals=_WARPGROUPS),
            **{name: plgpu.SMEM(shape, jnp.float32) for name, shape in floats.items()},
        ),
        grid=(sizes.ctas,),
        grid_names=("cta",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*given.values(), *pools)
    k_pages, v_pages, used, emptied = (jax.freeze(pool) for pool in pools)
    found = Partial(partial.reshape(-1, 1, D), dtype=x.dtype)
    return residual, found, k_pages, v_pages, PartialSumBuffer(emptied, used)


KERNEL = Kernel(
    "mosaic.one_row_layer",
    "decoder_layer",
    "mosaic",
    refusal,
    decoder_layer,
    compute_capabilities=HOPPER,
)
