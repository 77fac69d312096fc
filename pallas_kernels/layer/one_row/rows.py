"""The rows that a CTA multiplies, computed by its consumer threads into shared memory.

Every CTA computes the rows that it needs by itself, from words that all CTAs sent. Numbers are
rounded to bfloat16 where separate kernels would store them.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as mlir_math

from rjax.pallas_kernels.layer.one_row.sizes import LayerSizes
from rjax.pallas_kernels.layer.one_row.smem_row import Row, store_run
from rjax.pallas_kernels.layer.one_row.tables import Overlap
from rjax.pallas_kernels.layer.one_row.threads import (
    CONSUMERS,
    LOG2_E,
    barrier,
    below,
    equal,
    exp2,
    f32,
    fma,
    load,
    quotient,
    rounded,
    select,
    simt,
    store,
    take,
    thread,
    total,
)
from rjax.pallas_kernels.mosaic.emit import add, div, i32, mul, rem

_RUN = 4  # neighbours that a thread computes


def normed_row(
    residual,
    summands,
    out,
    weight,
    stream,
    row: Row,
    scratch,
    cta,
    *,
    eps,
    words_at=None,
    overlap: Overlap | None = None,
) -> None:
    """row = RMSNorm(residual + sum of the update); that sum also goes to ``stream`` and ``out``.

    Args:
        residual: bfloat16 [1, D] GMEM, or ``stream`` itself.
        summands: float32 [X, 1, D] GMEM, or the words, int32 [words] GMEM.
        out: bfloat16 [1, D] GMEM, written by CTA 0; None for no output.
        weight: bfloat16 [D] GMEM, or float32 [D] SMEM.
        stream: float32 [D] SMEM.
        row: the result, a row of D numbers or more.
        scratch: float32 [WARPS] SMEM.
        cta: int32.
        eps: the norm's epsilon.
        words_at: (first word, splits) of the update among the words; None for an array.
        overlap: work that is emitted with the norm and ends before its last barrier.
    """
    [D] = stream.shape[:1]
    refs = [residual, summands, weight, stream, scratch, *([] if out is None else [out])]
    own, stored = len(refs), len(row.refs)
    other = overlap or Overlap()
    scalars = (cta, *other.scalars)

    def emit(*given):
        residual, summands, weight, stream, scratch, *out = given[:own]
        row, given = given[own : own + stored], (*given[:own], *given[own + stored :])
        others = (*given[own : own + len(other.refs)], *given[len(given) - len(other.scalars) :])
        cta = given[own + len(other.refs)]
        prefetched = other.prefetch(*others)
        square, kept, columns = f32(0), [], []
        for i in range(-(-D // (CONSUMERS * _RUN))):
            at = mul(add(thread(), i * CONSUMERS), _RUN)
            inside = below(at, D)
            column = select(inside, at, i32(0))
            is_array = len(residual.type.shape) == 2
            old = load(residual, [0, column] if is_array else [column], _RUN)
            columns.append((column, inside, old, load(weight, [column], _RUN)))
        for column, inside, old, scale in columns:
            if words_at is not None:
                first, splits = words_at
                places = [add(column, first + split * D) for split in range(splits)]
                parts = take(summands, (places, _RUN))
            else:
                [X, _, _] = summands.type.shape
                parts = [load(summands, [j, 0, column], _RUN) for j in range(X)]
            new = []
            for j in range(_RUN):
                update = parts[0][j]
                for part in parts[1:]:
                    update = arith.addf(update, part[j])
                new.append(rounded(arith.addf(old[j], rounded(update))))
                square = select(inside, fma(new[-1], new[-1], square), square)
            with mgpu.when(inside):
                store(stream, [column], new)
            if out:
                with mgpu.when(arith.andi(inside, equal(cta, 0))):
                    store(out[0], [0, column], new)
            kept.append((column, inside, new, scale))
        mean = arith.mulf(total(square, scratch), f32(1 / D))
        factor = mlir_math.rsqrt(arith.addf(mean, f32(eps)))
        for column, inside, new, scale in kept:
            values = [arith.mulf(arith.mulf(x, factor), y) for x, y in zip(new, scale, strict=True)]
            with mgpu.when(inside):
                store_run(row, column, [rounded(value) for value in values])
        other.finish(*others, prefetched)
        barrier()

    simt(emit, (*refs, *row.refs, *other.refs), scalars)


def merged_row(words, row: Row, first_head, splits, sizes: LayerSizes) -> None:
    """row = the attention of the heads of a unit of the output projection, merged.

    words: int32 GMEM. first_head: int32. splits: int32, KV splits that have tokens.
    """
    H, heads, most = sizes.H, sizes.N // sizes.output.splits, sizes.kv_splits
    runs = heads * H // _RUN

    def emit(words, *given):
        *row, first_head, splits = given
        for i in range(-(-runs // CONSUMERS)):
            run = add(thread(), i * CONSUMERS)

            def merge(run=run):
                local = mul(run, _RUN)
                head = add(first_head, div(local, H))
                unit, place = div(head, sizes.heads), rem(head, sizes.heads)
                base = mul(unit, most * sizes.heads * sizes.head_words)
                base = add(base, mul(place, sizes.head_words))
                base = add(base, sizes.attention_words)
                firsts = []
                for split in range(most):
                    used = arith.minsi(i32(split), add(splits, -1))
                    firsts.append(add(base, mul(used, sizes.heads * sizes.head_words)))
                places = [add(first, rem(local, H)) for first in firsts]
                found = take(words, ([add(first, H) for first in firsts], 2), (places, _RUN))
                states, sums = found[:most], found[most:]
                largest = states[0][0]
                for score, _ in states[1:]:
                    largest = arith.maximumf(largest, score)
                weight, result = f32(0), [f32(0)] * _RUN
                for split, ((score, sum_), values) in enumerate(zip(states, sums, strict=True)):
                    factor = exp2(arith.subf(score, largest))
                    factor = select(below(i32(split), splits), factor, f32(0))
                    weight = fma(factor, sum_, weight)
                    result = [fma(factor, x, y) for x, y in zip(values, result, strict=True)]
                result = [rounded(quotient(value, weight)) for value in result]
                store_run(row, local, result)

            if runs % CONSUMERS == 0:
                merge()
            else:
                with mgpu.when(below(run, runs)):
                    merge()
        barrier()

    simt(emit, (words, *row.refs), (first_head, splits))


def activated_row(words, row: Row, first, count, sizes: LayerSizes) -> None:
    """row = silu(gate) * up of ``count`` (int32) columns of F from ``first`` (int32) on.

    words: int32 GMEM.
    """
    F, splits, most = sizes.F, sizes.gate_up.splits, sizes.activated_numbers

    def emit(words, *given):
        *row, first, count = given
        for i in range(-(-most // (_RUN * CONSUMERS))):
            local = mul(add(thread(), i * CONSUMERS), _RUN)
            with mgpu.when(below(local, count)):
                base = add(add(first, local), sizes.gate_up_words)
                places = [add(base, n * F) for n in range(2 * splits)]
                parts = take(words, (places, _RUN))
                values = []
                for j in range(_RUN):
                    gate, up = parts[0][j], parts[1][j]
                    for split in range(1, splits):
                        gate = arith.addf(gate, parts[2 * split][j])
                        up = arith.addf(up, parts[2 * split + 1][j])
                    power = exp2(arith.mulf(gate, f32(-LOG2_E)))
                    silu = quotient(gate, arith.addf(power, f32(1)))
                    values.append(rounded(arith.mulf(silu, up)))
                store_run(row, local, values)
        barrier()

    simt(emit, (words, *row.refs), (first, count))
