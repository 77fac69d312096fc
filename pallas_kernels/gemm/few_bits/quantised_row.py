"""The quantised input row of a GEMV with fp8 weights, computed by every CTA (``gemv_row``).

The scale of a row needs its largest absolute value, so every CTA reads the whole row: 2 * E bytes
from the L2 cache, or those of the norm. The arithmetic is that of ``quantise_rows``, and so are
the bits.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref
from jaxtyping import Array

from rjax.pallas_kernels.gemm.few_bits.quantised_rows import LARGEST, MIN_ABS_MAX
from rjax.pallas_kernels.gemm.gemv_row import (
    NormedRow,
    RowSource,
    SmemRow,
    StoredRow,
    read_chunk,
    reduce_warpgroup,
    strided,
)
from rjax.pallas_kernels.mosaic.emit import SCALAR, THREADS
from rjax.pallas_kernels.pending import Partial

# With more, ptxas takes more than 128 registers for a norm that is quantised.
_FEW_SUMMANDS, _FEW_COLUMNS = 2, 4096


@dataclasses.dataclass(frozen=True, slots=True)
class QuantisedRow(RowSource):
    """A row in float8_e4m3fn with one scale.

    Attributes:
        source: the row before quantisation.
    """

    source: NormedRow | StoredRow

    @property
    def operands(self) -> tuple[Array, ...]:
        return self.source.operands

    @property
    def row(self) -> jax.ShapeDtypeStruct:
        return self.source.row

    @property
    def smem_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float8_e4m3fn)

    @property
    def shares_sm(self) -> bool:
        if not isinstance(self.source, NormedRow):
            return True
        update = self.source.update
        summands = len(update.summands) if isinstance(update, Partial) else 1
        return summands <= _FEW_SUMMANDS and self.shape[1] <= _FEW_COLUMNS

    @property
    def read_bytes(self) -> int:
        return self.source.read_bytes

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.source.results

    def fill(self, refs, results, smem_row: SmemRow, scratch, is_first) -> None:
        if isinstance(self.source, NormedRow):
            value, first, layout = self.source.whole(refs, results, scratch, is_first)
            value = value.astype(jnp.float32)
            largest = reduce_warpgroup("max", jnp.abs(value), layout, scratch)
            factor = _factor(largest, smem_row)
            smem_row.store((value * factor).astype(self.smem_dtype), first, layout)
            return
        h = refs[0].at[0]
        factor = _factor(_largest(h, smem_row.depth, scratch), smem_row)
        step, firsts = smem_row.chunks()
        values = [read_chunk(h, first, step).astype(jnp.float32) for first in firsts]
        for value, first in zip(values, firsts, strict=True):
            smem_row.store((value * factor).astype(self.smem_dtype), first, strided(step))


def _largest(h, depth: int, scratch):
    """The largest absolute value of h, 16-bit [depth] in GMEM."""
    step = next(s for s in (8, 4, 2, 1) if s == 1 or s * THREADS <= depth)
    size = step * THREADS
    firsts = [*range(0, depth - size, size), depth - size]  # the last two may overlap
    largest = None
    for first in firsts:
        value = jnp.abs(read_chunk(h, first, step).astype(jnp.float32))
        largest = value if largest is None else jnp.maximum(largest, value)
    return reduce_warpgroup("max", largest, strided(step), scratch)


def _factor(largest, smem_row: SmemRow):
    """The factor that the row is multiplied with; stores the row's scale."""
    largest = jnp.maximum(largest, MIN_ABS_MAX)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def store(_, ref_, value_):
        zero = mgpu.c(0, ir.IndexType.get())
        memref.store(value_.registers.flat[0], ref_, [zero, zero])

    store(smem_row.scale, largest * (1 / LARGEST))
    return LARGEST / largest
