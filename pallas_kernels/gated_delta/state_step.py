"""A state over one page, on Hopper (Mosaic GPU): what the kernels that follow states share.

A warpgroup keeps 64 columns of a state in registers, transposed and in float32, and computes the
updates U - R S and then S = e^c S + k updates by wgmma, both with a left operand in registers. Both
kernels call `next_state`, so that a state has the same bits wherever it is computed.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from rjax.pallas_kernels.gated_delta.intra_chunk import ChunkOutputs
from rjax.pallas_kernels.gated_delta.page_rows import HEAD_DIM, PAGE_SIZE, TILE

BLOCK_Y = 64
"""Columns of the state of a CTA: the rows of a wgmma."""

PARAMETERS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)
"""How the kernels are compiled; the same for both, for the same bits."""

_WGMMA = plgpu.Layout.WGMMA
_COLUMN = _WGMMA.reduce(0)
_ACC = plgpu.WGMMAAccumulatorRef


def stages(chunks: ChunkOutputs, stages: int) -> dict[str, Any]:
    """SMEM for what a CTA reads of a page, by the names of `ChunkOutputs`."""
    S, H, dtype = PAGE_SIZE, HEAD_DIM, chunks.own.dtype
    columns = dict(keys=H, own=BLOCK_Y, read=H, queries=H, scores=S)
    found: dict[str, Any] = dict(logs=plgpu.SMEM((stages, S), jnp.float32))
    for name, x in zip(chunks._fields, chunks, strict=True):
        if name in columns and x is not None:
            found[name] = plgpu.SMEM((stages, S, columns[name]), dtype, transforms=TILE)
    return found


def stage_refs(smem: dict[str, Any], stage) -> dict[str, Any]:
    """The SMEM of one stage."""
    return {name: ref.at[stage] for name, ref in smem.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The value head and the block of columns of a CTA; int32 scalars.

    Attributes:
        head, block: of K * G and of Y / BLOCK_Y.
        G: value heads of a key head.
    """

    head: Any
    block: Any
    G: int

    @property
    def heads(self) -> tuple[Any, Any]:
        """(key head, value head of it)."""
        return lax.div(self.head, jnp.int32(self.G)), lax.rem(self.head, jnp.int32(self.G))

    @property
    def columns(self):
        return pl.ds(pl.multiple_of(self.block * BLOCK_Y, BLOCK_Y), BLOCK_Y)

    def of_state(self, states, page):
        """[H, BLOCK_Y] of the state in a page."""
        return states.at[page, *self.heads, :, self.columns]


def copy_page(chunks: ChunkOutputs, item, place: Place, smem, stage, full) -> None:
    """Start the copies of an item's arrays to a stage."""
    for name, to in smem.items():
        source = getattr(chunks, name).at[item]
        if name in ("keys", "queries"):
            source = source.at[place.heads[0]]
        elif name == "own":
            source = source.at[*place.heads, :, place.columns]
        else:
            source = source.at[*place.heads]
        plgpu.copy_gmem_to_smem(source, to.at[stage], full.at[stage])


def first_state(of_states: Callable[[Any], Any], page):
    """The transposed state in a page, float32 [BLOCK_Y, H]; zeros without a page."""
    return lax.cond(
        page >= 0,
        lambda: load_transposed(of_states(jnp.maximum(page, 0))),
        lambda: plgpu.layout_cast(jnp.zeros((BLOCK_Y, HEAD_DIM), jnp.float32), _WGMMA),
    )


def next_state(at: dict[str, Any], state, before=lambda _: None, after=lambda _: None) -> Any:
    """(state after a page, its updates), transposed, float32.

    at: SMEM of the page's stage; state: [BLOCK_Y, H]. While products run, ``before`` is called with
    the state and ``after`` with the updates, both in 16 bits.
    """
    dtype, shape = at["keys"].dtype, (BLOCK_Y, PAGE_SIZE)
    left = state.astype(dtype)

    def updates(acc):
        plgpu.wgmma(acc, left, at["read"].transpose((1, 0)))
        before(left)
        own = plgpu.load(at["own"].transpose((1, 0)), layout=_WGMMA).astype(jnp.float32)
        logs, last = plgpu.load(at["logs"], layout=_COLUMN), at["logs"][PAGE_SIZE - 1]
        decays = lax.broadcast_in_dim(jnp.exp(last - logs), shape, [1])
        return own + acc[...], decays, state * jnp.exp(last)

    update, decays, whole = pl.run_scoped(updates, _ACC(shape, jnp.float32))
    decayed = (update * decays).astype(dtype)

    def add(acc):
        plgpu.wgmma(acc, decayed, at["keys"])
        after(update.astype(dtype))
        return whole + acc[...]

    return pl.run_scoped(add, _ACC((BLOCK_Y, HEAD_DIM), jnp.float32)), update


def load_transposed(ref):
    """float32 [BLOCK_Y, H] in WGMMA layout, the transposed [H, BLOCK_Y] in GMEM."""
    shape = ref.shape[::-1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_WGMMA),
    )
    def load(_, ref_):
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        result = mgpu.FragmentedArray.splat(mgpu.c(0.0, f32), shape, _WGMMA.to_mgpu())
        places = list(result.layout.thread_idxs(shape))
        for n, (row, column) in enumerate(places):
            elements = [memref.load(ref_, [_next(column, i), row]) for i in range(2)]
            result.registers.flat[n] = vector.from_elements(pair, elements)
        return result

    return load(ref)


def store_transposed(ref, value) -> None:
    """``ref`` [H, BLOCK_Y] in GMEM = the transposed value, float32 [BLOCK_Y, H] in WGMMA layout."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA))
    def store(_, ref_, value_):
        places = value_.layout.thread_idxs(value_.shape)
        for (row, column), register in zip(places, value_.registers.flat, strict=True):
            for i in range(2):
                element = vector.extract(register, [], ir.DenseI64ArrayAttr.get([i]))
                memref.store(element, ref_, [_next(column, i), row])

    store(ref, value)


def _next(index, count: int):
    return arith.addi(index, mgpu.c(count, ir.IndexType.get()))
