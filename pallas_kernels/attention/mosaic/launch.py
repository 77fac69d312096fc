"""The launch of the attention kernel: its shapes, grid and operands."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportAbstractUsage=false

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from rjax.pallas_kernels.attention.mosaic.config import CONSUMERS, KernelConfig, swap_ab_columns
from rjax.pallas_kernels.attention.mosaic.cta import KernelShape, SharedMemory
from rjax.pallas_kernels.attention.mosaic.epilogue import Results
from rjax.pallas_kernels.attention.mosaic.kernel import CTA_AXIS, WARPGROUP_AXIS, make_kernel
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import PackedPlan


class Operands(NamedTuple):
    """Arrays of one attention call besides the plan.

    Attributes:
        options: the optional operands that were given, by name: ``alibi_slopes`` float32 [N],
            ``k_scales`` and ``v_scales`` float32 [K] or [P, K].
    """

    page_table: Int[Array, "B M"]
    positions: Int[Array, " T"]
    q: Float[Array, "T N H"]
    k_pages: Float[Array, "P K S H"]
    v_pages: Float[Array, "P K S H"]
    options: dict[str, Float32[Array, "..."]]


def kernel_shape(packed: PackedPlan, operands: Operands) -> KernelShape:
    """The static shapes of a launch."""
    T, N, H = operands.q.shape
    K, S = operands.k_pages.shape[1:3]
    single_row = any(work.tile_rows == 1 for work in packed.lists)
    return KernelShape(
        T=T,
        N=N,
        K=K,
        S=S,
        H=H,
        q_dtype=operands.q.dtype,
        kv_dtype=operands.k_pages.dtype,
        lists=packed.lists,
        swap_ab_columns=swap_ab_columns(N // K, H) if single_row else 0,
    )


def attention_call(cfg: KernelConfig, packed: PackedPlan, operands: Operands) -> Results:
    """Launch the kernel. Rows with one partial result are in (out, lse), the others are not."""
    shape = kernel_shape(packed, operands)
    T, N, H = operands.q.shape
    entries = max(1, packed.num_merge_entries)
    options = operands.options
    kernel = plgpu.kernel(
        make_kernel(cfg, shape, tuple(options)),
        out_type=(
            jax.ShapeDtypeStruct((T, N, H), shape.q_dtype),
            jax.ShapeDtypeStruct((T, N), jnp.float32),
            jax.ShapeDtypeStruct((entries, N, H), shape.q_dtype),
            jax.ShapeDtypeStruct((entries, N), jnp.float32),
        ),
        scratch_types=SharedMemory.scratch_types(cfg, shape),
        grid=(cfg.num_ctas,),
        grid_names=(CTA_AXIS,),
        num_threads=CONSUMERS + 1,
        thread_name=WARPGROUP_AXIS,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    # A TMA copy of queries may take more rows than there are.
    padding = max(0, max(map(shape.q_box, packed.lists)) - T)
    q = jnp.pad(operands.q, ((0, padding), (0, 0), (0, 0))).reshape(-1, shape.K, shape.G, H)
    if "alibi_slopes" in options:
        options = options | {"alibi_slopes": options["alibi_slopes"] / cfg.score_unit}
    plan = (packed.work_tiles, packed.schedule, packed.destinations)
    tables = (operands.page_table, operands.positions)
    return Results(
        *kernel(*plan, *tables, q, operands.k_pages, operands.v_pages, *options.values())
    )
