"""The attention kernel in Triton: FlashAttention-2 over paged KV by work list, in one launch.

A work tile is one block (up to BLOCK_M / G query rows of one item) on one KV head: a matrix of rows
times heads of the group against KV tiles, with an online softmax in float32. CTAs are persistent:
CTA i of n takes work tiles i, i + n, ...; large blocks come first. Both block sizes give a row the
same bits: the same KV tiles in the same order, the same products, and a sum that does not depend on
how rows are spread over warps. There are no atomics. Bytes from global memory: K and V of each
block once and its queries once; to global memory: the results of its live rows once.
Method: FlashAttention-2 (Dao, 2023).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_FP8_SCALE = tl.constexpr(256.0)  # ``_fp8_as_f16`` divides by it


# Triton reads the source of these functions, which a type checker's wrapper hides.
@triton.jit
@no_type_check
def attention_kernel(
    blocks,
    counts,
    page_table,
    positions,
    destinations,
    q,
    k_pages,
    v_pages,
    alibi_slopes,
    k_scales,
    v_scales,
    table_width,
    out,
    lse,
    partial_out,
    partial_lse,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    SMALL_BLOCK_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KV_TILE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    FP8: tl.constexpr,
    SCALES_PER_PAGE: tl.constexpr,
):
    """Compute the attention of every live block; all Refs are in global memory.

    Args:
        blocks: int32 [X, 8], see ``PackedPlan``; counts: int32 [2], large blocks and all blocks.
        page_table: int32 [B, table_width]; positions: int32 [T]; destinations: int32 [Y], the merge
            entry of a result slot, or -1 for the output.
        q: [T, N, H]; k_pages, v_pages: [P, K, S, H], of 8 bits as uint8.
        alibi_slopes: float32 [N], read if ALIBI; k_scales, v_scales: float32 [K], or [P, K] if
            SCALES_PER_PAGE, read if FP8.
        out, lse: [T, N, H] and float32 [T, N]; partial_out, partial_lse: [X, N, H] and float32
            [X, N].
        WINDOW, SOFT_CAP: 0 for none.
    """
    num_large = tl.load(counts) * K
    num_tiles = tl.load(counts + 1) * K
    for tile_id in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        block = blocks + tile_id // K * 8
        head = tile_id % K
        if SMALL_BLOCK_M == BLOCK_M:
            _attend(
                block, head, page_table, positions, destinations, q, k_pages, v_pages, alibi_slopes,
                k_scales, v_scales, table_width, out, lse, partial_out, partial_lse, N, K, H, S,
                BLOCK_M, False, KV_TILE, SCALE, WINDOW, SOFT_CAP, ALIBI, FP8, SCALES_PER_PAGE,
            )  # fmt: skip
        elif tile_id < num_large:
            _attend(
                block, head, page_table, positions, destinations, q, k_pages, v_pages, alibi_slopes,
                k_scales, v_scales, table_width, out, lse, partial_out, partial_lse, N, K, H, S,
                BLOCK_M, True, KV_TILE, SCALE, WINDOW, SOFT_CAP, ALIBI, FP8, SCALES_PER_PAGE,
            )  # fmt: skip
        else:
            _attend(
                block, head, page_table, positions, destinations, q, k_pages, v_pages, alibi_slopes,
                k_scales, v_scales, table_width, out, lse, partial_out, partial_lse, N, K, H, S,
                SMALL_BLOCK_M, True, KV_TILE, SCALE, WINDOW, SOFT_CAP, ALIBI, FP8, SCALES_PER_PAGE,
            )  # fmt: skip


@triton.jit
@no_type_check
def _attend(
    block,
    head,
    page_table,
    positions,
    destinations,
    q,
    k_pages,
    v_pages,
    alibi_slopes,
    k_scales,
    v_scales,
    table_width,
    out,
    lse,
    partial_out,
    partial_lse,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    SUM_BY_DOT: tl.constexpr,
    KV_TILE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    FP8: tl.constexpr,
    SCALES_PER_PAGE: tl.constexpr,
):
    """Compute one work tile: a block on one KV head, as a matrix of ROWS."""
    G: tl.constexpr = N // K
    H_PAD: tl.constexpr = triton.next_power_of_2(H)
    row_start = tl.load(block)
    row_count = tl.load(block + 1)
    table_row = tl.load(block + 2)
    kv_start = tl.load(block + 3)
    kv_stop = tl.load(block + 4)
    result_slot = tl.load(block + 5)

    matrix_row = tl.arange(0, ROWS)
    item_row = matrix_row // G
    live = item_row < row_count
    row = row_start + item_row
    q_head = head * G + matrix_row % G
    dims = tl.arange(0, H_PAD)
    q_mask = live[:, None] & (dims < H)[None, :]
    # Offset of the result in an array [rows, N]; 64 bits, because it is multiplied by H.
    row_offset = row.to(tl.int64) * N + q_head
    queries = tl.load(q + row_offset[:, None] * H + dims[None, :], mask=q_mask, other=0.0)
    position = tl.load(positions + row, mask=live, other=-1)

    # Skip KV tiles that no row sees; this changes no bit of any row.
    stop = tl.minimum(kv_stop, tl.max(position, 0) + 1)
    last_visible = tl.minimum(position, kv_stop - 1)  # the last token that each row sees here
    start = kv_start
    if WINDOW > 0:
        first_position = tl.min(tl.where(live, position, 2147483647), 0)
        start += tl.maximum(first_position + 1 - WINDOW - kv_start, 0) // KV_TILE * KV_TILE
    if ALIBI:
        slope = tl.load(alibi_slopes + q_head, mask=live, other=0.0) * _LOG2_E

    table = page_table + table_row.to(tl.int64) * table_width
    tile_offsets = tl.arange(0, KV_TILE)
    ones = tl.full((KV_TILE, 16), 1.0, tl.float32).to(queries.dtype)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS, 16), tl.float32) if SUM_BY_DOT else tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, H_PAD), tl.float32)
    # Page ids are read one tile ahead, so that no load of K or V waits for one. Items start at page
    # boundaries: a tile lies in one page if pages are multiples of tiles, else each token has its
    # own page id.
    step = 0 if S % KV_TILE == 0 else tile_offsets
    page = tl.load(table + (start + step) // S, mask=start + step < stop, other=0)
    for first in range(start, stop, KV_TILE):
        token = first + tile_offsets
        is_token = token < stop
        kv_block = page.to(tl.int64) * K + head
        ahead = first + KV_TILE + step
        page = tl.load(table + ahead // S, mask=ahead < stop, other=0)
        offset = ((token % S) * H)[:, None] + dims[None, :]
        kv_mask = is_token[:, None] & (dims < H)[None, :]
        if S % KV_TILE == 0:
            k_at = k_pages + kv_block * (S * H) + offset
            v_at = v_pages + kv_block * (S * H) + offset
        else:
            k_at = (k_pages + kv_block * (S * H))[:, None] + offset
            v_at = (v_pages + kv_block * (S * H))[:, None] + offset
        keys = tl.load(k_at, mask=kv_mask, other=0)
        values = tl.load(v_at, mask=kv_mask, other=0)
        if FP8:
            keys = _fp8_as_f16(keys).to(queries.dtype)
            values = _fp8_as_f16(values).to(queries.dtype)
            scale_at = tl.where(is_token, kv_block if SCALES_PER_PAGE else head, 0)
            k_scale = tl.load(k_scales + scale_at, mask=is_token, other=0.0)
            v_scale = tl.load(v_scales + scale_at, mask=is_token, other=0.0)

        # Scores as exponents of two.
        scores = tl.dot(queries, tl.trans(keys))
        if FP8:
            scores *= (k_scale * _FP8_SCALE)[None, :]
        if SOFT_CAP > 0:  # cap * tanh(x / cap) by the sigmoid
            scores = (2 * tl.sigmoid(scores * (2 * SCALE / SOFT_CAP)) - 1) * (SOFT_CAP * _LOG2_E)
        else:
            scores *= SCALE * _LOG2_E
        if ALIBI:
            scores += slope[:, None] * (token[None, :] - position[:, None]).to(tl.float32)
        visible = token[None, :] <= last_visible[:, None]
        if WINDOW > 0:
            visible &= token[None, :] > position[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(row_max - base)
        row_max = new_max
        if SUM_BY_DOT:
            row_sum = tl.dot(p.to(queries.dtype), ones, row_sum * rescale[:, None])
        else:
            row_sum = row_sum * rescale + tl.sum(p, 1)
        if FP8:
            p *= v_scale[None, :]
        acc = tl.dot(p.to(queries.dtype), values, acc * rescale[:, None])

    if SUM_BY_DOT:
        row_sum = tl.max(row_sum, 1)  # its columns are equal
    if FP8:
        acc *= _FP8_SCALE
    safe = tl.where(row_sum == 0, 1.0, row_sum)
    result = (acc / safe[:, None]).to(queries.dtype)
    log_sum = tl.where(row_sum == 0, float("-inf"), (row_max + tl.log2(safe)) * _LN_2)

    entry = tl.load(destinations + result_slot + item_row, mask=live, other=-1)
    direct = live & (entry < 0)
    merged = live & (entry >= 0)
    tl.store(out + row_offset[:, None] * H + dims[None, :], result, mask=q_mask & direct[:, None])
    tl.store(lse + row_offset, log_sum, mask=direct)
    row_offset = entry.to(tl.int64) * N + q_head
    tl.store(
        partial_out + row_offset[:, None] * H + dims[None, :], result, mask=q_mask & merged[:, None]
    )
    tl.store(partial_lse + row_offset, log_sum, mask=merged)


@triton.jit
@no_type_check
def _fp8_as_f16(x):
    """float8_e4m3fn bits as a float16 of 1 / 256 of the number: the exponent's bias is 8 less.

    Exact for every finite number; works on devices without fp8 instructions.
    """
    bits = x.to(tl.uint16)
    return (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
