"""Rotary embedding and the write of new K and V into pages, one launch on Hopper (Mosaic GPU).

A thread handles one task of one token: a pair of vectors from both halves of a query or key
head, which it rotates, or one vector of a value head (a pair, where values are normed). Queries are
written to a new array, keys and values directly into their page. Every element is read once and
written once. Bytes moved per token: 2 (N + 2 K) * H * itemsize, and the token's row of cos and sin.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector
from jaxlib.mlir.dialects import math as mlir_math
from jaxtyping import Array, Float, Int

from rjax.pallas_kernels.fp8 import Scales, check_scales
from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.mosaic.emit import (
    SCALAR,
    THREADS,
    begin_kernel,
    i32,
    i32_type,
    thread_index,
)
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.rope_and_cache.base import RopeAndCacheProblem

_WARP = 32


def refusal(
    head_dim: int,
    rotary_dim: int | None,
    dtype: DTypeLike,
    kv_dtype: DTypeLike,
    partial: bool = False,
) -> str | None:
    """Why the kernel cannot take projections of ``dtype`` and pages of ``kv_dtype``, or None."""
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype)
    fp8 = kv_dtype == jnp.float8_e4m3fn
    if dtype.itemsize != 2 or (not fp8 and dtype != kv_dtype):
        return (
            f"qkv is {dtype} and the pages are {kv_dtype}; the mosaic backend needs one 16-bit "
            "dtype for both, or pages in float8_e4m3fn"
        )
    if fp8 and partial:
        return "qkv is a Partial; with float8_e4m3fn pages the mosaic backend takes it reduced"
    if rotary_dim is None:
        return "no rotary embedding; the mosaic backend takes models that have one"
    if not 2 <= rotary_dim <= head_dim:
        return f"{rotary_dim} rotated dims; the head dim allows 2 to {head_dim}"
    if fp8 and _vector(head_dim, rotary_dim // 2) % 2:
        return (
            f"{rotary_dim} rotated dims of {head_dim} cannot be written in pairs; float8_e4m3fn "
            "pages need an even number of dims in each half and in the rest"
        )
    return None


def norm_refusal(head_dim: int, rotary_dim: int | None) -> str | None:
    """Why the kernel cannot norm queries and keys of ``head_dim``, or None."""
    if rotary_dim != head_dim:
        return f"{rotary_dim} rotated dims of {head_dim}; it norms heads that rotate as a whole"
    threads = head_dim // 2 // _vector(head_dim, head_dim // 2)
    if threads > _WARP or _WARP % threads:
        return f"heads of {head_dim} dims take {threads} threads; it takes divisors of {_WARP}"
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each query head and each key head.

    Attributes:
        q_weight, k_weight: any float dtype.
        eps: added to the mean square.
        values: whether each value head is normed too, without a weight (Gemma 4).
    """

    q_weight: Float[Array, " H"]
    k_weight: Float[Array, " H"]
    eps: float
    values: bool = False


def rope_and_cache(
    qkv: Float[Array, "T K A H"] | Partial,
    cos: Float[Array, "T R"],
    sin: Float[Array, "T R"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    slots: Int[Array, " T"],
    *,
    norms: HeadNorms | None = None,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Rotate q and k, write k and v at token slots page * S + offset; negative slots write nothing.

    Args:
        qkv: each KV head's A - 2 queries, its key, its value; bfloat16 or float16, the dtype of the
            pages unless they are float8_e4m3fn, for which qkv is not a Partial.
        cos, sin: float32; the first 2R of H dims are rotated, x[i] paired with x[i + R].
        k_pages, v_pages: updated in place when donated.
        slots: int32.
        norms: RMS norms of q and k before they rotate, and perhaps of v, or None; see
            ``norm_refusal``.
        k_scales, v_scales: float32 [K] or [P, K], with float8_e4m3fn pages only: those hold
            value / scale (``fp8``), rounded to nearest and clipped to +-448.

    Returns:
        (rotated q with N = K (A - 2), k_pages, v_pages). Arithmetic in float32.

    Raises:
        ValueError: dtypes that differ, R that does not fit H, scales that do not fit the pages.

    Source: rotary position embedding, Su et al., 2021.
    """
    T, K, A, H = qkv.shape
    S, R = k_pages.shape[2], cos.shape[-1]
    dtype = jnp.dtype(qkv.dtype)
    check_scales(k_pages, v_pages, k_scales, v_scales)
    why = refusal(H, 2 * R, dtype, k_pages.dtype, isinstance(qkv, Partial))
    why = why or (norms and norm_refusal(H, 2 * R))
    if why is not None:
        raise ValueError(why)
    bias = qkv.bias if isinstance(qkv, Partial) else None
    addend = qkv.summands if isinstance(qkv, Partial) else qkv
    given = (addend,) if bias is None else (addend, bias)
    scales = () if k_scales is None or v_scales is None else (k_scales, v_scales)
    if k_pages.dtype != v_pages.dtype or (bias is not None and bias.dtype != dtype):
        found = ", ".join(str(x.dtype) for x in (*given, k_pages, v_pages))
        raise ValueError(
            f"qkv, bias and pages are {found}; bias must be as qkv, both pools the same"
        )
    if cos.dtype != jnp.float32 or sin.dtype != jnp.float32:
        raise ValueError(f"cos and sin are {cos.dtype} and {sin.dtype}; they must be float32")
    sizes = _Sizes(K, A - 2, H, R, S, norms is not None and norms.values)

    def rope_and_cache_kernel(*refs):
        """GMEM: qkv [T, K, A, H] or its summands [X, T, K, A, H], bias [K, A, H] if any, weights of
        the norms [H] if any, cos, sin [T, R], slots [T], k_scales and v_scales [K] or [P, K] if
        any, k_pages and v_pages [P, K, S, H], out [T, N, H].
        """
        begin_kernel()
        token, block = lax.axis_index("token"), lax.axis_index("block")

        @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType() for _ in refs), SCALAR, SCALAR))
        def run(_, *rest):
            [qkv_, *bias_], rest = rest[: len(given)], rest[len(given) :]
            weights, rest = rest[: len(weights_of)], rest[len(weights_of) :]
            cos_, sin_, slots_, *scales_, k_pool, v_pool, q_out, token_, block_ = rest
            [row], [block_index] = token_.registers.flat, block_.registers.flat
            rounded = q_out.type.element_type
            bias = bias_[0] if bias_ else None
            reader = _Reader(row, qkv_, bias, cos_, sin_, sizes, rounded, norms and norms.eps)
            k_scale, v_scale = scales_ or (None, None)
            keys, values = (k_pool, k_scale), (v_pool, v_scale)
            _write(reader, block_index, slots_, keys, values, q_out, weights or (None, None))

        run(*refs, token, block)

    weights_of = () if norms is None else (norms.q_weight, norms.k_weight)
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    rotated = plgpu.kernel(
        rope_and_cache_kernel,
        out_type=jax.ShapeDtypeStruct((T, K * (A - 2), H), dtype),
        grid=(T, -(-sizes.tasks // THREADS)),
        grid_names=("token", "block"),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*given, *weights_of, cos, sin, slots, *scales, k_ref, v_ref)
    return rotated, jax.freeze(k_ref), jax.freeze(v_ref)


def _vector(H: int, R: int) -> int:
    """Elements that a thread reads at once."""
    return math.gcd(8, R, H - 2 * R)


class _Sizes:
    """How a token's projections are divided into tasks of one vector, or of two if rotated."""

    def __init__(self, K: int, G: int, H: int, R: int, S: int, norms_values: bool):
        self.K, self.G, self.H, self.R, self.S = K, G, H, R, S
        self.norms_values = norms_values
        rest = H - 2 * R
        self.vector = _vector(H, R)
        self.per_head = R // self.vector + rest // self.vector  # rotated pairs, then plain vectors
        self.per_value = self.per_head if norms_values else H // self.vector
        self.queries = K * G * self.per_head
        self.keys = self.queries + K * self.per_head
        self.tasks = self.keys + K * self.per_value


class _Reader:
    """Emits the reads of one token's row."""

    def __init__(
        self, row, qkv, bias, cos, sin, sizes: _Sizes, rounded: ir.Type, eps: float | None
    ):
        self.row, self.sizes, self._rounded = _index(row), sizes, rounded
        self.qkv, self.bias, self.cos, self.sin = qkv, bias, cos, sin
        self._eps = eps

    def values(self, group, entry, dim):
        """float32 [vector] of qkv: summands reduced, then bias added, each rounded to its dtype."""
        indices, vector_size = [self.row, group, entry, dim], self.sizes.vector
        summands = ir.MemRefType(self.qkv.type).shape[:-4]
        if not summands:
            value = _load(self.qkv, indices, vector_size)
        else:
            value = _load(self.qkv, [_const(0), *indices], vector_size)
            for i in range(1, summands[0]):
                addend = _load(self.qkv, [_const(i), *indices], vector_size)
                value = arith.addf(value, addend)
            value = self._round(value)
        if self.bias is None:
            return value
        bias = _load(self.bias, [group, entry, dim], vector_size)
        return self._round(arith.addf(value, bias))

    def _round(self, value):
        kind = ir.VectorType.get(value.type.shape, self._rounded)
        return arith.extf(value.type, arith.truncf(kind, value))

    def _normed(self, a, b, weight, low, high):
        """a and b times the RMS norm's factors, rounded; they are all of a head's threads' dims.

        weight: [H], or None for 1.
        """
        f32, threads = ir.F32Type.get(), self.sizes.per_head
        squares = arith.addf(arith.mulf(a, a), arith.mulf(b, b))
        total = vector.reduction(f32, vector.CombiningKind.ADD, squares)
        distance = 1
        while distance < threads:
            total = arith.addf(total, _from_thread_across(total, distance, threads))
            distance *= 2
        assert self._eps is not None
        mean = arith.mulf(total, mgpu.c(1 / self.sizes.H, f32))
        factor = mlir_math.rsqrt(arith.addf(mean, mgpu.c(self._eps, f32)))
        factor = vector.broadcast(a.type, factor)

        def scaled(value, dim):
            value = arith.mulf(value, factor)
            if weight is not None:
                value = arith.mulf(value, _load(weight, [dim], self.sizes.vector))
            return self._round(value)

        return scaled(a, low), scaled(b, high)

    def rotated(self, group, entry, which, weight, store) -> None:
        """Call ``store(dim, values)`` for the ``which``-th task of a head.

        weight: [H] of the norm before the rotation, or None.
        """
        z = self.sizes
        pairs = z.R // z.vector
        low = _times(which, z.vector)

        def pair():
            high = arith.addi(low, _const(z.R))
            a, b = self.values(group, entry, low), self.values(group, entry, high)
            if weight is not None:
                a, b = self._normed(a, b, weight, low, high)
            cos = _load(self.cos, [self.row, low], z.vector)
            sin = _load(self.sin, [self.row, low], z.vector)
            store(low, arith.subf(arith.mulf(a, cos), arith.mulf(b, sin)))
            store(high, arith.addf(arith.mulf(b, cos), arith.mulf(a, sin)))

        if z.per_head == pairs:
            pair()
            return
        is_pair = arith.cmpi(arith.CmpIPredicate.ult, which, _const(pairs))
        with mgpu.when(is_pair):
            pair()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.uge, which, _const(pairs))):
            dim = arith.addi(
                low, _const(z.R)
            )  # the plain vectors begin at 2R, after R / vector pairs
            store(dim, self.values(group, entry, dim))

    def value(self, head, which, store) -> None:
        """Call ``store(dim, values)`` for the ``which``-th task of a value head."""
        z = self.sizes
        low, entry = _times(which, z.vector), _const(z.G + 1)
        if not z.norms_values:
            store(low, self.values(head, entry, low))
            return
        high = arith.addi(low, _const(z.R))
        a, b = self.values(head, entry, low), self.values(head, entry, high)
        a, b = self._normed(a, b, None, low, high)
        store(low, a)
        store(high, b)


def _write(reader: _Reader, block, slots, keys, values, q_out, norms) -> None:
    """Emit the thread's task.

    keys, values: (pool, its scales or None); norms: weights for a query and a key, or None.
    """
    z = reader.sizes
    task = _index(arith.addi(arith.muli(block, i32(THREADS)), thread_index()))
    slot = memref.load(slots, [reader.row])

    def between(first: int, end: int):
        above = arith.cmpi(arith.CmpIPredicate.uge, task, _const(first))
        return arith.andi(above, arith.cmpi(arith.CmpIPredicate.ult, task, _const(end)))

    def head_task(first: int, per_head: int):
        """(head, index of the task in the head)."""
        local = arith.subi(task, _const(first))
        return arith.divui(local, _const(per_head)), arith.remui(local, _const(per_head))

    with mgpu.when(between(0, z.queries)):
        head, which = head_task(0, z.per_head)
        group, entry = arith.divui(head, _const(z.G)), arith.remui(head, _const(z.G))
        to = lambda dim, value: _store(value, q_out, [reader.row, head, dim])  # noqa: E731
        reader.rotated(group, entry, which, norms[0], to)
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, slot, i32(0))):
        page = _index(arith.divui(slot, i32(z.S)))
        offset = _index(arith.remui(slot, i32(z.S)))
        with mgpu.when(between(z.queries, z.keys)):
            key, which = head_task(z.queries, z.per_head)
            to = lambda dim, value: _store_kv(value, keys, [page, key, offset, dim])  # noqa: E731
            reader.rotated(key, _const(z.G), which, norms[1], to)
        with mgpu.when(between(z.keys, z.tasks)):
            head, which = head_task(z.keys, z.per_value)
            to = lambda dim, value: _store_kv(value, values, [page, head, offset, dim])  # noqa: E731
            reader.value(head, which, to)


def _from_thread_across(value, distance: int, threads: int):
    """float32 of the thread whose index differs in one bit, in aligned groups of ``threads``.

    Only the threads of a group have to be here.
    """
    lane = arith.remui(mgpu.utils.thread_idx(), i32(_WARP))
    first = arith.andi(lane, i32(-threads))
    mask = arith.shli(i32((1 << threads) - 1 if threads < _WARP else -1), first)
    found = nvvm.shfl_sync(
        mask,
        arith.bitcast(i32_type(), value),
        i32(distance),
        i32(_WARP - 1),
        nvvm.ShflKind.bfly,
    )
    return arith.bitcast(ir.F32Type.get(), found)


def _index(value):
    return arith.index_cast(ir.IndexType.get(), value)


def _const(value: int):
    return mgpu.c(value, ir.IndexType.get())


def _times(value, factor: int):
    return arith.muli(value, _const(factor))


def _load(ref, indices, vector_size: int):
    element = ref.type.element_type
    size = vector_size * mgpu.utils.bitwidth(element) // 8
    kind = ir.VectorType.get((vector_size,), element)
    value = vector.load(kind, ref, indices, alignment=size)
    if isinstance(element, ir.F32Type):
        return value
    return arith.extf(ir.VectorType.get((vector_size,), ir.F32Type.get()), value)


def _store(value, ref, indices) -> None:
    kind = ir.VectorType.get(value.type.shape, ref.type.element_type)
    _store_vector(arith.truncf(kind, value), ref, indices)


def _store_kv(value, pool, indices) -> None:
    """Store a float32 vector into a page; pool: (pages, their scales or None)."""
    pages, scales = pool
    if scales is None:
        _store(value, pages, indices)
        return
    page, head, *_ = indices
    scale = memref.load(scales, [page, head] if len(scales.type.shape) == 2 else [head])
    scaled = arith.divf(value, vector.broadcast(value.type, scale))
    _store_vector(_to_fp8(scaled), pages, indices)


def _store_vector(value, ref, indices) -> None:
    [vector_size] = value.type.shape
    size = vector_size * mgpu.utils.bitwidth(value.type.element_type) // 8
    vector.store(value, ref, indices, alignment=size)


def _to_fp8(value):
    """float32 [X] to float8_e4m3fn, rounded to nearest, saturating; MLIR has no lowering."""
    i16, [vector_size] = ir.IntegerType.get_signless(16), value.type.shape
    elements = [
        vector.extract(value, [], ir.DenseI64ArrayAttr.get([i])) for i in range(vector_size)
    ]
    pairs = [
        llvm.inline_asm(i16, [low, high], "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f")
        for low, high in zip(elements[::2], elements[1::2], strict=True)
    ]
    packed = vector.from_elements(ir.VectorType.get((vector_size // 2,), i16), pairs)
    return vector.bitcast(ir.VectorType.get((vector_size,), ir.Float8E4M3FNType.get()), packed)


def _refusal(problem: RopeAndCacheProblem) -> str | None:
    return refusal(problem.head_dim, problem.rotary_dim, problem.dtype, problem.kv_dtype)


def _norm_refusal(problem: RopeAndCacheProblem) -> str | None:
    return norm_refusal(problem.head_dim, problem.rotary_dim) or _refusal(problem)


def _run(problem: RopeAndCacheProblem, *operands: Any) -> Any:
    del problem
    return _written(*operands, norms=None)


def _norm_run(
    problem: RopeAndCacheProblem, qkv: Any, q_weight: Array, k_weight: Array, *operands: Any
) -> Any:
    norms = HeadNorms(q_weight, k_weight, problem.eps, problem.norms_values)
    return _written(qkv, *operands, norms=norms)


def _written(qkv: Any, *operands: Any, norms: HeadNorms | None) -> Any:
    *arrays, scales = operands
    if scales and isinstance(qkv, Partial):
        qkv = qkv.reduce()
    return rope_and_cache(qkv, *arrays, norms=norms, **scales)


KERNELS = tuple(
    Kernel(f"mosaic.{name}", name, "mosaic", refusal, run, compute_capabilities=HOPPER)
    for name, refusal, run in (
        ("rope_and_cache", _refusal, _run),
        ("norm_rope_and_cache", _norm_refusal, _norm_run),
    )
)
