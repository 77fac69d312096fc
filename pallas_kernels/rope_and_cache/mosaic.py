"""Rotary embedding and the write of new K and V into pages, one launch on Hopper (Mosaic GPU).

A thread takes one piece of one token's projections: matching runs of both halves of a query or key
head, which it rotates, or one run of a value head. Queries go to a new array, keys and values
straight into their page. Every number is read once and written once. Bytes moved per token:
2 (N + 2 K) * H * itemsize, and the token's row of cos and sin.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8 import Scales, check_scales
from pallas_kernels.mosaic_emit import SCALAR, THREADS, thread_index
from pallas_kernels.partial import Partial


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
        return f"{rotary_dim} rotated dims; {head_dim} dims have room for 2 to {head_dim}"
    if fp8 and _run(head_dim, rotary_dim // 2) % 2:
        return (
            f"{head_dim} dims of which {rotary_dim} are rotated are no pairs; float8_e4m3fn pages "
            "need an even number of each half"
        )
    return None


def rope_and_cache(
    qkv: Float[Array, "T K A H"] | Partial,
    cos: Float[Array, "T R"],
    sin: Float[Array, "T R"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    slots: Int[Array, " T"],
    *,
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
        k_scales, v_scales: float32 [K] or [P, K], with float8_e4m3fn pages only: those hold numbers
            in units of their scales (``fp8``), rounded to nearest, saturating at 448 units.

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
    if why is not None:
        raise ValueError(why)
    bias = qkv.bias if isinstance(qkv, Partial) else None
    addend = qkv.summands if isinstance(qkv, Partial) else qkv
    given = (addend,) if bias is None else (addend, bias)
    scales = () if k_scales is None or v_scales is None else (k_scales, v_scales)
    if k_pages.dtype != v_pages.dtype or (bias is not None and bias.dtype != dtype):
        found = ", ".join(str(x.dtype) for x in (*given, k_pages, v_pages))
        raise ValueError(f"qkv, bias and pages are {found}; bias must be as qkv, both pages alike")
    if cos.dtype != jnp.float32 or sin.dtype != jnp.float32:
        raise ValueError(f"cos and sin are {cos.dtype} and {sin.dtype}; they must be float32")
    sizes = _Sizes(K, A - 2, H, R, S)

    def rope_and_cache_kernel(*refs):
        """GMEM: qkv [T, K, A, H] or its summands [X, T, K, A, H], bias [K, A, H] if any, cos, sin
        [T, R], slots [T], both scales [K] or [P, K] if any, both pools [P, K, S, H], out [T, N, H].
        """
        token, part = lax.axis_index("token"), lax.axis_index("part")

        @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType() for _ in refs), SCALAR, SCALAR))
        def run(_, *rest):
            [qkv_, *bias_], rest = rest[: len(given)], rest[len(given) :]
            cos_, sin_, slots_, *scales_, k_pool, v_pool, q_out, token_, part_ = rest
            [row], [which] = token_.registers.flat, part_.registers.flat
            rounded = q_out.type.element_type
            reader = _Reader(row, qkv_, bias_[0] if bias_ else None, cos_, sin_, sizes, rounded)
            k_scale, v_scale = scales_ or (None, None)
            _write(reader, which, slots_, (k_pool, k_scale), (v_pool, v_scale), q_out)

        run(*refs, token, part)

    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    rotated = plgpu.kernel(
        rope_and_cache_kernel,
        out_type=jax.ShapeDtypeStruct((T, K * (A - 2), H), dtype),
        grid=(T, -(-sizes.pieces // THREADS)),
        grid_names=("token", "part"),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*given, cos, sin, slots, *scales, k_ref, v_ref)
    return rotated, jax.freeze(k_ref), jax.freeze(v_ref)


def _run(H: int, R: int) -> int:
    """Numbers that a thread reads at once."""
    return math.gcd(8, R, H - 2 * R)


class _Sizes:
    """How a token's projections are cut into pieces of ``run`` numbers (twice that if rotated)."""

    def __init__(self, K: int, G: int, H: int, R: int, S: int):
        self.K, self.G, self.H, self.R, self.S = K, G, H, R, S
        rest = H - 2 * R
        self.run = _run(H, R)
        self.per_head = R // self.run + rest // self.run  # rotated pairs, then plain runs
        self.per_value = H // self.run
        self.queries = K * G * self.per_head
        self.keys = self.queries + K * self.per_head
        self.pieces = self.keys + K * self.per_value


class _Reader:
    """Emits the reads of one token's row."""

    def __init__(self, row, qkv, bias, cos, sin, sizes: _Sizes, rounded: ir.Type):
        self.row, self.sizes, self._rounded = _index(row), sizes, rounded
        self.qkv, self.bias, self.cos, self.sin = qkv, bias, cos, sin

    def values(self, group, entry, dim):
        """float32 [run] of qkv, its parts summed, the bias added, each rounded as a product is."""
        place, run = [self.row, group, entry, dim], self.sizes.run
        parts = ir.MemRefType(self.qkv.type).shape[:-4]
        if not parts:
            value = _load(self.qkv, place, run)
        else:
            value = _load(self.qkv, [_const(0), *place], run)
            for i in range(1, parts[0]):
                value = arith.addf(value, _load(self.qkv, [_const(i), *place], run))
            value = self._round(value)
        if self.bias is None:
            return value
        return self._round(arith.addf(value, _load(self.bias, [group, entry, dim], run)))

    def _round(self, value):
        kind = ir.VectorType.get(value.type.shape, self._rounded)
        return arith.extf(value.type, arith.truncf(kind, value))

    def rotated(self, group, entry, which, store) -> None:
        """``store(dim, values)`` for the ``which``-th piece of a head."""
        z = self.sizes
        pairs = z.R // z.run
        low = _times(which, z.run)

        def pair():
            high = arith.addi(low, _const(z.R))
            a, b = self.values(group, entry, low), self.values(group, entry, high)
            cos = _load(self.cos, [self.row, low], z.run)
            sin = _load(self.sin, [self.row, low], z.run)
            store(low, arith.subf(arith.mulf(a, cos), arith.mulf(b, sin)))
            store(high, arith.addf(arith.mulf(b, cos), arith.mulf(a, sin)))

        if z.per_head == pairs:
            pair()
            return
        is_pair = arith.cmpi(arith.CmpIPredicate.ult, which, _const(pairs))
        with mgpu.when(is_pair):
            pair()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.uge, which, _const(pairs))):
            dim = arith.addi(low, _const(z.R))  # the plain runs begin at 2R, after R numbers
            store(dim, self.values(group, entry, dim))


def _write(reader: _Reader, part, slots, keys, values, q_out) -> None:
    """keys, values: (pool, its scales or None)."""
    z = reader.sizes
    i32 = ir.IntegerType.get_signless(32)
    piece = _index(arith.addi(arith.muli(part, mgpu.c(THREADS, i32)), thread_index()))
    slot = memref.load(slots, [reader.row])

    def between(first: int, end: int):
        above = arith.cmpi(arith.CmpIPredicate.uge, piece, _const(first))
        return arith.andi(above, arith.cmpi(arith.CmpIPredicate.ult, piece, _const(end)))

    def place(first: int, per_head: int):
        """(head, which piece of it)."""
        local = arith.subi(piece, _const(first))
        return arith.divui(local, _const(per_head)), arith.remui(local, _const(per_head))

    with mgpu.when(between(0, z.queries)):
        head, which = place(0, z.per_head)
        group, entry = arith.divui(head, _const(z.G)), arith.remui(head, _const(z.G))
        to = lambda dim, value: _store(value, q_out, [reader.row, head, dim])  # noqa: E731
        reader.rotated(group, entry, which, to)
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, slot, mgpu.c(0, i32))):
        page = _index(arith.divui(slot, mgpu.c(z.S, i32)))
        offset = _index(arith.remui(slot, mgpu.c(z.S, i32)))
        with mgpu.when(between(z.queries, z.keys)):
            key, which = place(z.queries, z.per_head)
            to = lambda dim, value: _store_kv(value, keys, [page, key, offset, dim])  # noqa: E731
            reader.rotated(key, _const(z.G), which, to)
        with mgpu.when(between(z.keys, z.pieces)):
            head, which = place(z.keys, z.per_value)
            dim = _times(which, z.run)
            value = reader.values(head, _const(z.G + 1), dim)
            _store_kv(value, values, [page, head, offset, dim])


def _index(value):
    return arith.index_cast(ir.IndexType.get(), value)


def _const(value: int):
    return mgpu.c(value, ir.IndexType.get())


def _times(value, factor: int):
    return arith.muli(value, _const(factor))


def _load(ref, place, run: int):
    element = ref.type.element_type
    size = run * mgpu.utils.bitwidth(element) // 8
    value = vector.load(ir.VectorType.get((run,), element), ref, place, alignment=size)
    if isinstance(element, ir.F32Type):
        return value
    return arith.extf(ir.VectorType.get((run,), ir.F32Type.get()), value)


def _store(value, ref, place) -> None:
    kind = ir.VectorType.get(value.type.shape, ref.type.element_type)
    _store_vector(arith.truncf(kind, value), ref, place)


def _store_kv(value, pool, place) -> None:
    """value, float32, into a page; pool: (pages, their scales or None)."""
    pages, scales = pool
    if scales is None:
        _store(value, pages, place)
        return
    page, head, *_ = place
    scale = memref.load(scales, [page, head] if len(scales.type.shape) == 2 else [head])
    units = arith.divf(value, vector.broadcast(value.type, scale))
    _store_vector(_narrow(units), pages, place)


def _store_vector(value, ref, place) -> None:
    [run] = value.type.shape
    size = run * mgpu.utils.bitwidth(value.type.element_type) // 8
    vector.store(value, ref, place, alignment=size)


def _narrow(value):
    """float32 [run] to float8_e4m3fn, rounded to nearest, saturating; MLIR has no lowering."""
    i16, [run] = ir.IntegerType.get_signless(16), value.type.shape
    numbers = [vector.extract(value, [], ir.DenseI64ArrayAttr.get([place])) for place in range(run)]
    pairs = [
        llvm.inline_asm(i16, [low, high], "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f")
        for low, high in zip(numbers[::2], numbers[1::2], strict=True)
    ]
    packed = vector.from_elements(ir.VectorType.get((run // 2,), i16), pairs)
    return vector.bitcast(ir.VectorType.get((run,), ir.Float8E4M3FNType.get()), packed)
