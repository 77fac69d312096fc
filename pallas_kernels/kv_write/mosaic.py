"""Rotary embedding and the write of new K and V into pages, one launch on Hopper (Mosaic GPU).

A program takes one token: it rotates its N query heads into a new array, rotates its K key heads
straight into their page, and copies its K value heads into theirs. Each thread reads matching runs
of both halves of a head, so that every number is read once and written once. Bytes moved per token:
(2 N + 4 K) * H * itemsize, and the token's row of cos and sin.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector
from jaxtyping import Array, Float, Int

_THREADS = 128
_SCALAR = plgpu.Layout.WG_SPLAT(())


def rotate_and_write(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cos: Float[Array, "T R"],
    sin: Float[Array, "T R"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    slots: Int[Array, " T"],
) -> tuple[Float[Array, "T N H"], Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Rotate q and k, write k and v at token slots page * S + offset; negative slots write nothing.

    Args:
        q, k, v: bfloat16 or float16, one dtype, that of the pages.
        cos, sin: float32; the first 2R of H dims are rotated, x[i] paired with x[i + R].
        k_pages, v_pages: updated in place when donated.
        slots: int32.

    Returns:
        (rotated q, k_pages, v_pages). Arithmetic in float32.

    Raises:
        ValueError: dtypes that differ, or R that does not fit H.

    Source: rotary position embedding, Su et al., 2021.
    """
    T, N, H = q.shape
    _, K, S, _ = k_pages.shape
    R = cos.shape[-1]
    if any(x.dtype != q.dtype for x in (k, v, k_pages, v_pages)) or q.dtype.itemsize != 2:
        raise ValueError(
            f"q, k, v and the pages are {q.dtype}, {k.dtype}, {v.dtype}, {k_pages.dtype}, "
            f"{v_pages.dtype}; the mosaic backend needs one 16-bit dtype for all"
        )
    if 2 * R > H or R < 1:
        raise ValueError(f"cos and sin hold {R} frequencies; {H} dims have room for 1 to {H // 2}")
    if cos.dtype != jnp.float32 or sin.dtype != jnp.float32:
        raise ValueError(f"cos and sin are {cos.dtype} and {sin.dtype}; they must be float32")

    def body(q_, k_, v_, cos_, sin_, slots_, k_pool, v_pool, q_out):
        token = lax.axis_index("token")
        refs = (q_, k_, v_, cos_, sin_, slots_, k_pool, v_pool, q_out)

        @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType() for _ in refs), _SCALAR))
        def run(_, q_, k_, v_, cos_, sin_, slots_, k_pool, v_pool, q_out, token_):
            [row] = token_.registers.flat
            _Token(row, H, R, S, cos_, sin_).write(q_, k_, v_, slots_, k_pool, v_pool, q_out)

        run(*refs, token)

    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    rotated = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, N, H), q.dtype),
        grid=(T,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(q, k, v, cos, sin, slots, k_ref, v_ref)
    return rotated, jax.freeze(k_ref), jax.freeze(v_ref)


class _Token:
    """Emits the code of one program."""

    def __init__(self, row, H: int, R: int, S: int, cos, sin):
        self.i32, self.index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        self.row = self._index(row)
        self.H, self.R, self.S = H, R, S
        self.cos, self.sin = cos, sin
        self.run = math.gcd(8, R, H - 2 * R) if H > 2 * R else math.gcd(8, R)

    def write(self, q, k, v, slots, k_pool, v_pool, q_out) -> None:
        heads_q, heads_k = q.type.shape[1], k.type.shape[1]
        self._rotate(q, heads_q, lambda head, dim: (q_out, [self.row, head, dim]))
        slot = memref.load(slots, [self.row])
        zero = mgpu.c(0, self.i32)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, slot, zero)):
            page = self._index(arith.divui(slot, mgpu.c(self.S, self.i32)))
            offset = self._index(arith.remui(slot, mgpu.c(self.S, self.i32)))
            self._rotate(k, heads_k, lambda head, dim: (k_pool, [page, head, offset, dim]))
            place = lambda head, dim: (v_pool, [page, head, offset, dim])  # noqa: E731
            self._copy(v, heads_k, 0, self.H, place)

    def _index(self, value):
        return arith.index_cast(self.index, value)

    def _each(self, heads: int, runs: int, emit) -> None:
        """``emit(head, which run)`` for heads * runs pieces, spread over the threads."""
        lane = arith.remui(mgpu.utils.thread_idx(), mgpu.c(_THREADS, self.i32))
        loop = scf.ForOp(
            self._index(lane), mgpu.c(heads * runs, self.index), mgpu.c(_THREADS, self.index)
        )
        with ir.InsertionPoint(loop.body):
            piece, size = loop.induction_variable, mgpu.c(runs, self.index)
            emit(arith.divui(piece, size), arith.remui(piece, size))
            scf.yield_([])

    def _load(self, ref, place):
        element = ref.type.element_type
        value = vector.load(ir.VectorType.get((self.run,), element), ref, place)
        if isinstance(element, ir.F32Type):
            return value
        return arith.extf(ir.VectorType.get((self.run,), ir.F32Type.get()), value)

    def _store(self, value, ref, place) -> None:
        kind = ir.VectorType.get((self.run,), ref.type.element_type)
        vector.store(arith.truncf(kind, value), ref, place)

    def _rotate(self, source, heads: int, target) -> None:
        def emit(head, which):
            low = arith.muli(which, mgpu.c(self.run, self.index))
            high = arith.addi(low, mgpu.c(self.R, self.index))
            a = self._load(source, [self.row, head, low])
            b = self._load(source, [self.row, head, high])
            cos = self._load(self.cos, [self.row, low])
            sin = self._load(self.sin, [self.row, low])
            first = arith.subf(arith.mulf(a, cos), arith.mulf(b, sin))
            second = arith.addf(arith.mulf(b, cos), arith.mulf(a, sin))
            self._store(first, *target(head, low))
            self._store(second, *target(head, high))

        self._each(heads, self.R // self.run, emit)
        if self.H > 2 * self.R:
            self._copy(source, heads, 2 * self.R, self.H, target)

    def _copy(self, source, heads: int, begin: int, end: int, target) -> None:
        def emit(head, which):
            dim = arith.muli(which, mgpu.c(self.run, self.index))
            dim = arith.addi(dim, mgpu.c(begin, self.index))
            kind = ir.VectorType.get((self.run,), source.type.element_type)
            ref, place = target(head, dim)
            vector.store(vector.load(kind, source, [self.row, head, dim]), ref, place)

        self._each(heads, (end - begin) // self.run, emit)
