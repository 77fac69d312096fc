"""The attention kernel in Triton: all blocks of query rows, each against its pages, in one launch.

A unit of work is one block (up to ``matrix rows / G`` query rows of one item) on one KV head: a
matrix of rows times heads of the group against tiles of tokens, with a running softmax in float32.
Programs are persistent: program i takes units i, i + programs, ...; blocks of the wide kind come
first. Both kinds give a row the same bits: the same tiles in the same order, the same products and
a sum that does not depend on how rows are spread over warps. Nothing is added atomically.
Method: FlashAttention-2 (Dao, 2023) by work list.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_FP8_UNIT = tl.constexpr(256.0)  # what ``_widened`` divides by


# Triton reads the source of these functions: a type checker's wrapper would hide it.
@triton.jit
@no_type_check
def attention_kernel(
    blocks,
    counts,
    page_table,
    positions,
    dest,
    q,
    k_pages,
    v_pages,
    alibi_slopes,
    k_scales,
    v_scales,
    table_width,
    out,
    lse,
    part,
    part_lse,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    NARROW_ROWS: tl.constexpr,
    WIDE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    FP8: tl.constexpr,
    SCALES_PER_PAGE: tl.constexpr,
):
    """Partial or whole attention results of every live block.

    Args:
        blocks: int32 [X, 8], see ``PackedPlan``; counts: int32 [2], wide blocks and all blocks.
        page_table: int32 [B, table_width]; positions: int32 [T]; dest: int32, a slot's merge entry
            or -1 for the output itself.
        q: [T, N, H]; k_pages, v_pages: [P, K, S, H], of 8 bits as uint8.
        alibi_slopes: float32 [N], read if ALIBI; k_scales, v_scales: float32 [K], or [P, K] if
            SCALES_PER_PAGE, read if FP8.
        out, lse: [T, N, H] and float32 [T, N]; part, part_lse: [E, N, H] and float32 [E, N].
        WINDOW, SOFT_CAP: 0 for none.
    """
    wide = tl.load(counts) * K
    units = tl.load(counts + 1) * K
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        block = blocks + unit // K * 8
        head = unit % K
        if NARROW_ROWS == WIDE_ROWS:
            _attend(
                block, head, page_table, positions, dest, q, k_pages, v_pages, alibi_slopes,
                k_scales, v_scales, table_width, out, lse, part, part_lse, N, K, H, S,
                WIDE_ROWS, False, TILE, SCALE, WINDOW, SOFT_CAP, ALIBI, FP8, SCALES_PER_PAGE,
            )  # fmt: skip
        elif unit < wide:
            _attend(
                block, head, page_table, positions, dest, q, k_pages, v_pages, alibi_slopes,
                k_scales, v_scales, table_width, out, lse, part, part_lse, N, K, H, S,
                WIDE_ROWS, True, TILE, SCALE, WINDOW, SOFT_CAP, ALIBI, FP8, SCALES_PER_PAGE,
            )  # fmt: skip
        else:
            _attend(
                block, head, page_table, positions, dest, q, k_pages, v_pages, alibi_slopes,
                k_scales, v_scales, table_width, out, lse, part, part_lse, N, K, H, S,
                NARROW_ROWS, True, TILE, SCALE, WINDOW, SOFT_CAP, ALIBI, FP8, SCALES_PER_PAGE,
            )  # fmt: skip


@triton.jit
@no_type_check
def _attend(
    block,
    head,
    page_table,
    positions,
    dest,
    q,
    k_pages,
    v_pages,
    alibi_slopes,
    k_scales,
    v_scales,
    table_width,
    out,
    lse,
    part,
    part_lse,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    SUM_BY_DOT: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    FP8: tl.constexpr,
    SCALES_PER_PAGE: tl.constexpr,
):
    """One block on one KV head, as a matrix of ROWS."""
    G: tl.constexpr = N // K
    H_PAD: tl.constexpr = triton.next_power_of_2(H)
    row_start = tl.load(block)
    row_count = tl.load(block + 1)
    table_row = tl.load(block + 2)
    kv_start = tl.load(block + 3)
    kv_stop = tl.load(block + 4)
    slot = tl.load(block + 5)

    matrix_row = tl.arange(0, ROWS)
    item_row = matrix_row // G
    live = item_row < row_count
    row = row_start + item_row
    own_head = head * G + matrix_row % G
    dims = tl.arange(0, H_PAD)
    inside = live[:, None] & (dims < H)[None, :]
    # Where the result lies in an array of [rows, N]; 64 bits before it is times H.
    place = row.to(tl.int64) * N + own_head
    queries = tl.load(q + place[:, None] * H + dims[None, :], mask=inside, other=0.0)
    position = tl.load(positions + row, mask=live, other=-1)

    # Tiles that no row sees are left out; that changes no bit of any row.
    stop = tl.minimum(kv_stop, tl.max(position, 0) + 1)
    last = tl.minimum(position, kv_stop - 1)  # the last token that each row sees here
    start = kv_start
    if WINDOW > 0:
        least = tl.min(tl.where(live, position, 2147483647), 0)
        start += tl.maximum(least + 1 - WINDOW - kv_start, 0) // TILE * TILE
    if ALIBI:
        slope = tl.load(alibi_slopes + own_head, mask=live, other=0.0) * _LOG2_E

    table = page_table + table_row.to(tl.int64) * table_width
    tile = tl.arange(0, TILE)
    ones = tl.full((TILE, 16), 1.0, tl.float32).to(queries.dtype)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, 16), tl.float32) if SUM_BY_DOT else tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, H_PAD), tl.float32)
    # Page ids are read a tile ahead, so that no load of K or V waits for one. Runs start at whole
    # pages: where a page is whole tiles, a tile lies in one page, else its tokens have their own.
    step = 0 if S % TILE == 0 else tile
    page = tl.load(table + (start + step) // S, mask=start + step < stop, other=0)
    for first in range(start, stop, TILE):
        token = first + tile
        used = token < stop
        number = page.to(tl.int64) * K + head
        ahead = first + TILE + step
        page = tl.load(table + ahead // S, mask=ahead < stop, other=0)
        offset = ((token % S) * H)[:, None] + dims[None, :]
        filled = used[:, None] & (dims < H)[None, :]
        if S % TILE == 0:
            k_at = k_pages + number * (S * H) + offset
            v_at = v_pages + number * (S * H) + offset
        else:
            k_at = (k_pages + number * (S * H))[:, None] + offset
            v_at = (v_pages + number * (S * H))[:, None] + offset
        keys = tl.load(k_at, mask=filled, other=0)
        values = tl.load(v_at, mask=filled, other=0)
        if FP8:
            keys = _widened(keys).to(queries.dtype)
            values = _widened(values).to(queries.dtype)
            scale_at = tl.where(used, number if SCALES_PER_PAGE else head, 0)
            k_scale = tl.load(k_scales + scale_at, mask=used, other=0.0)
            v_scale = tl.load(v_scales + scale_at, mask=used, other=0.0)

        # Scores in powers of two.
        scores = tl.dot(queries, tl.trans(keys))
        if FP8:
            scores *= (k_scale * _FP8_UNIT)[None, :]
        if SOFT_CAP > 0:  # cap * tanh(x / cap) by the sigmoid
            scores = (2 * tl.sigmoid(scores * (2 * SCALE / SOFT_CAP)) - 1) * (SOFT_CAP * _LOG2_E)
        else:
            scores *= SCALE * _LOG2_E
        if ALIBI:
            scores += slope[:, None] * (token[None, :] - position[:, None]).to(tl.float32)
        visible = token[None, :] <= last[:, None]
        if WINDOW > 0:
            visible &= token[None, :] > position[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))

        peak = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        top = peak
        if SUM_BY_DOT:
            total = tl.dot(weights.to(queries.dtype), ones, total * fade[:, None])
        else:
            total = total * fade + tl.sum(weights, 1)
        if FP8:
            weights *= v_scale[None, :]
        acc = tl.dot(weights.to(queries.dtype), values, acc * fade[:, None])

    if SUM_BY_DOT:
        total = tl.max(total, 1)  # its columns are equal
    if FP8:
        acc *= _FP8_UNIT
    safe = tl.where(total == 0, 1.0, total)
    result = (acc / safe[:, None]).to(queries.dtype)
    log_sum = tl.where(total == 0, float("-inf"), (top + tl.log2(safe)) * _LN_2)

    entry = tl.load(dest + slot + item_row, mask=live, other=-1)
    alone = live & (entry < 0)
    merged = live & (entry >= 0)
    tl.store(out + place[:, None] * H + dims[None, :], result, mask=inside & alone[:, None])
    tl.store(lse + place, log_sum, mask=alone)
    place = entry.to(tl.int64) * N + own_head
    tl.store(part + place[:, None] * H + dims[None, :], result, mask=inside & merged[:, None])
    tl.store(part_lse + place, log_sum, mask=merged)


@triton.jit
@no_type_check
def _widened(x):
    """float8_e4m3fn bits as a float16 of 1 / 256 of the number: the exponent's bias is 8 less.

    Exact for every finite number; works on devices without fp8 instructions.
    """
    bits = x.to(tl.uint16)
    return (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
