"""Attention of one row over its pages, by the consumer threads of a unit.

A unit has a few query heads of one KV head and every ``kv_splits``-th chunk of 64 tokens. A thread
has two tokens of a chunk and 8 dims of each block of 64. Each warp keeps a softmax of its own, so
chunks need no barrier; `send_attention` merges those of the warps and of the new token, whose key
and value are not read from the page.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as mlir_math

from rjax.pallas_kernels.layer.one_row.sizes import TILE, LayerSizes
from rjax.pallas_kernels.layer.one_row.tables import TablePlaces
from rjax.pallas_kernels.layer.one_row.threads import (
    BLOCK_ROWS,
    CHUNK,
    CONSUMERS,
    LOG2_E,
    WARPS,
    across,
    barrier,
    below,
    block_place,
    equal,
    exp2,
    f32,
    filled,
    fma,
    lane,
    load,
    load_block,
    rounded,
    select,
    send,
    simt,
    store,
    take,
    thread,
    warp,
)
from rjax.pallas_kernels.mosaic.emit import add, div, i32, mul, rem

_LOWEST = -1e30  # of a score; less than any, and finite
_WARP = 32


def rotated_heads(
    words, tables, heads, new_scores, unit, has_new, *, sizes, scale, eps, normed, biased
) -> None:
    """The queries of a unit, and the new key and value if it has them: summed, normed, rotated.

    A warp computes a head.

    Args:
        words: int32 GMEM.
        tables: SMEM, written by `tables`.
        heads: float32 [heads + 2, H] SMEM: queries times scale * log2(e), key, value.
        new_scores: float32 [heads] SMEM: scores of the queries with the new key.
        unit: int32, KV head * passes + pass.
        has_new: int32, 1 if the new token is of this unit's split, else 0.
        sizes: the layer's sizes.
        scale: factor of the scores.
        eps: the norms' epsilon.
        normed, biased: whether there are norms and biases.
    """
    H, A = sizes.H, sizes.group + 2
    places = TablePlaces.of(sizes)
    count = sizes.heads + 2
    half, run = H // 2, H // 2 // _WARP
    refs = (words, tables, heads, new_scores)

    def emit(words, tables, heads, new_scores, unit, has_new):
        kv_head, number = div(unit, sizes.passes), rem(unit, sizes.passes)
        low = mul(lane(), run)
        high = add(low, half)
        angles = load(tables, [low], run), load(tables, [high], run)

        def head(place, is_key, is_value):
            entry = add(mul(number, sizes.heads), place)
            entry = select(is_key, i32(sizes.group), entry)
            entry = select(is_value, i32(sizes.group + 1), entry)
            column = mul(add(mul(kv_head, A), entry), H)
            firsts = [
                add(add(column, dim), sizes.qkv_words + split * sizes.qkv.columns)
                for dim in (low, high)
                for split in range(sizes.qkv.splits)
            ]
            parts = take(words, (firsts, run))
            values = []
            for at in range(2):
                mine = parts[at * sizes.qkv.splits : (at + 1) * sizes.qkv.splits]
                for j in range(run):
                    value = mine[0][j]
                    for other in mine[1:]:
                        value = arith.addf(value, other[j])
                    values.append(rounded(value))
            if biased:
                first = add(mul(entry, H), places.biases)
                added = load(tables, [arith.addi(first, low)], run)
                added += load(tables, [arith.addi(first, high)], run)
                values = [rounded(arith.addf(a, b)) for a, b in zip(values, added, strict=True)]
            plain = values
            if normed:
                first = select(is_key, i32(places.k_norm), i32(places.q_norm))
                weight = load(tables, [arith.addi(first, low)], run)
                weight += load(tables, [arith.addi(first, high)], run)
                square = f32(0)
                for value in values:
                    square = fma(value, value, square)
                square = across(square, (16, 8, 4, 2, 1), arith.addf)
                mean = arith.mulf(square, f32(1 / H))
                factor = mlir_math.rsqrt(arith.addf(mean, f32(eps)))
                values = [
                    rounded(arith.mulf(arith.mulf(x, factor), w))
                    for x, w in zip(values, weight, strict=True)
                ]
            lows, highs = [], []
            for a, b, c, s in zip(values[:run], values[run:], *angles, strict=True):
                lows.append(rounded(arith.subf(arith.mulf(a, c), arith.mulf(b, s))))
                highs.append(rounded(arith.addf(arith.mulf(b, c), arith.mulf(a, s))))
            turned = [select(is_value, x, y) for x, y in zip(plain, lows + highs, strict=True)]
            is_query = below(place, sizes.heads)
            factor = select(is_query, f32(scale * LOG2_E), f32(1))
            for dim, new in ((low, turned[:run]), (high, turned[run:])):
                store(heads, [place, dim], [arith.mulf(x, factor) for x in new])

        for turn in range(-(-count // WARPS)):
            place = add(warp(), turn * WARPS)
            flags = equal(place, sizes.heads), equal(place, sizes.heads + 1)
            used = arith.addi(mul(has_new, 2), i32(sizes.heads))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, place, used)):
                head(place, *flags)
        barrier()
        scored = arith.andi(below(warp(), sizes.heads), equal(has_new, 1))
        with mgpu.when(scored):
            score = f32(0)
            for dim in range(0, H, _WARP):
                at = add(lane(), dim)
                [q], [k] = load(heads, [warp(), at], 1), load(heads, [sizes.heads, at], 1)
                score = fma(q, k, score)
            score = across(score, (16, 8, 4, 2, 1), arith.addf)
            with mgpu.when(equal(lane(), 0)):
                store(new_scores, [warp()], [score])

    simt(emit, refs, (unit, has_new))


def write_kv(tables, heads, k_pages, v_pages, kv_head, sizes: LayerSizes) -> None:
    """Store the new key and value of a KV head in its pages, if the slot is not negative.

    tables, heads: SMEM, written by `tables` and `rotated_heads`. k_pages, v_pages: bfloat16
    [P, K, 64, H] GMEM. kv_head: int32.
    """
    run, places = 4, TablePlaces.of(sizes)

    def emit(tables, heads, k_pages, v_pages, kv_head):
        [slot] = load(tables, [places.slot], 1)
        slot = arith.bitcast(i32(0).type, slot)
        dim = mul(thread(), run)
        with mgpu.when(arith.andi(below(i32(-1), slot), below(dim, sizes.H))):
            place = [div(slot, TILE), kv_head, rem(slot, TILE), dim]
            for entry, pages in enumerate((k_pages, v_pages)):
                store(pages, place, load(heads, [sizes.heads + entry, dim], run))

    simt(emit, (tables, heads, k_pages, v_pages), (kv_head,))


def no_attention(sizes: LayerSizes):
    """The state of a warp without tokens: weighted sums, (largest scores, sums of weights)."""

    def lowest():
        return ([[f32(_LOWEST), *[f32(0)] * (CHUNK - 1)] for _ in range(sizes.heads)],)

    [softmax] = simt(lowest, (), returns=(sizes.heads,))
    return filled(sizes.heads * sizes.head_blocks, 0.0), softmax


def attended(state, keys, values, heads, tokens, *, sizes: LayerSizes):
    """The state with a chunk of 64 tokens, of which the first ``tokens`` (int32) count.

    state: (weighted sums, one register a head and block; softmax, one register a head: its largest
    score and its sum of weights, of the tokens of a lane). keys, values: bfloat16 [2, 64, 64] SMEM,
    by block of dims; with heads of 64 dims both are the same, keys first. heads: float32
    [heads + 2, H] SMEM.
    """
    blocks = sizes.head_blocks
    value_at = 0 if blocks == 2 else 1

    def emit(keys, values, heads, tokens, sums, softmax):
        places, column = block_place()
        counted = [below(place, tokens) for place in places]
        scores = [[f32(0)] * BLOCK_ROWS for _ in range(sizes.heads)]
        for block in range(blocks):
            of_tokens = [load_block(keys, block, place, column) for place in places]
            for head in range(sizes.heads):
                at = add(column, block * TILE)
                query = load(heads, [head, at], 4) + load(heads, [head, add(at, 4)], 4)
                for i, key in enumerate(of_tokens):
                    for a, b in zip(query, key, strict=True):
                        scores[head][i] = fma(a, b, scores[head][i])
        weights, new_sums, new_softmax = [], [], []
        for head in range(sizes.heads):
            old, weight_sum = softmax[head][0], softmax[head][1]
            found, largest = [], old
            for score, counts in zip(scores[head], counted, strict=True):
                score = across(score, (1, 2, 4), arith.addf)
                found.append(select(counts, score, f32(_LOWEST)))
                largest = arith.maximumf(largest, found[-1])
            largest = across(largest, (8, 16), arith.maximumf)
            shrink = exp2(arith.subf(old, largest))
            weight_sum = arith.mulf(weight_sum, shrink)
            mine = []
            for score, counts in zip(found, counted, strict=True):
                mine.append(select(counts, exp2(arith.subf(score, largest)), f32(0)))
                weight_sum = arith.addf(weight_sum, mine[-1])
            weights.append((shrink, mine))
            new_softmax.append([largest, weight_sum, *[f32(0)] * (CHUNK - 2)])
        for block in range(blocks):
            of_tokens = []
            for place, counts in zip(places, counted, strict=True):
                value = load_block(values, value_at + block, place, column)
                of_tokens.append([select(counts, x, f32(0)) for x in value])  # stale KV may be NaN
            for head, (shrink, mine) in enumerate(weights):
                total = [arith.mulf(x, shrink) for x in sums[head * blocks + block]]
                for weight, value in zip(mine, of_tokens, strict=True):
                    total = [fma(weight, x, y) for x, y in zip(value, total, strict=True)]
                new_sums.append((head, block, total))
        ordered = [total for *_, total in sorted(new_sums, key=lambda each: each[:2])]
        return ordered, new_softmax

    returns = (sizes.heads * blocks, sizes.heads)
    return simt(emit, (heads,), (tokens,), state, returns=returns, blocks=(keys, values))


def send_attention(
    state, heads, new_scores, by_warp, words, unit, split, has_new, *, sizes: LayerSizes
) -> None:
    """Merge the warps and the new token, and send the partial result of each head.

    Args:
        state: the state of `attended`.
        heads, new_scores: SMEM, written by `rotated_heads`.
        by_warp: float32 [WARPS, heads, head_words] SMEM.
        words: int32 GMEM.
        unit, split: int32.
        has_new: int32, 1 if the new token is of this split, else 0.
        sizes: the layer's sizes.
    """
    H, blocks, count = sizes.H, sizes.head_blocks, sizes.heads

    def emit(heads, new_scores, by_warp, words, unit, split, has_new, sums, softmax):
        _, column = block_place()
        column = add(column, mul(rem(div(lane(), CHUNK), 4), 2))
        has_new = equal(has_new, 1)
        for head in range(count):
            weight = across(softmax[head][1], (8, 16), arith.addf)
            with mgpu.when(equal(lane(), 0)):
                store(by_warp, [warp(), head, H], [softmax[head][0], weight])
            for block in range(blocks):
                mine = _scattered(sums[head * blocks + block])
                store(by_warp, [warp(), head, add(column, block * TILE)], mine)
        barrier()
        base = add(mul(unit, sizes.kv_splits), split)
        base = add(mul(base, count * sizes.head_words), sizes.attention_words)

        def finish(at):
            head, dim = div(at, H), rem(at, H)
            states = [load(by_warp, [other, head, H], 2) for other in range(WARPS)]
            [score] = load(new_scores, [head], 1)
            score = select(has_new, score, f32(_LOWEST))
            largest = score
            for other, _ in states:
                largest = arith.maximumf(largest, other)
            weight = select(has_new, exp2(arith.subf(score, largest)), f32(0))
            [value] = load(heads, [count + 1, dim], 1)
            total = arith.mulf(weight, select(has_new, value, f32(0)))
            for other, (found, sum_) in enumerate(states):
                factor = exp2(arith.subf(found, largest))
                [value] = load(by_warp, [other, head, dim], 1)
                total, weight = fma(factor, value, total), fma(factor, sum_, weight)
            first = add(base, mul(head, sizes.head_words))
            send(words, add(first, dim), [total])
            with mgpu.when(equal(dim, 0)):
                send(words, add(first, H), [largest, weight])

        for i in range(-(-count * H // CONSUMERS)):
            at = add(thread(), i * CONSUMERS)
            if (i + 1) * CONSUMERS <= count * H:
                finish(at)
            else:
                with mgpu.when(below(at, count * H)):
                    finish(at)

    simt(emit, (heads, new_scores, by_warp, words), (unit, split, has_new), state)


def _scattered(values):
    """Sum 8 numbers over the lanes that differ in bits 3 and 4; each lane gets two of the sums.

    Lane group g, the number in these bits, gets sums 2 g and 2 g + 1.
    """
    group = div(lane(), CHUNK)
    for bit in (1, 0):
        upper = equal(rem(div(group, 1 << bit), 2), 1)
        half = len(values) // 2
        pairs = list(zip(values[:half], values[half:], strict=True))
        kept = [select(upper, high, low) for low, high in pairs]
        sent = [select(upper, low, high) for low, high in pairs]
        came = [mgpu.utils.shfl_bfly(value, CHUNK << bit) for value in sent]
        values = [arith.addf(a, b) for a, b in zip(kept, came, strict=True)]
    return values
