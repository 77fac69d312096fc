"""One token of the gated delta rule for each sequence, on Hopper (Mosaic GPU).

One CTA handles block_y of the Y columns of one sequence's state of one value head. It reads those
columns of the state once and multiplies them with the key and the query. It reads the tail up to
the token, whose updates are not in the state yet: keys and updates, in steps of 8 tokens. It writes
the output, and the token's key, value, update and gates into the tail; it writes no state.
Bytes moved for each sequence and value head: 4 * H * Y of the state, 2 * Y for each update of the
tail and 2 * H for each key, which the CTAs of a key head share in the L2 cache.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from rjax.pallas_kernels.gated_delta.page_rows import HEAD_DIM, PAGE_SIZE
from rjax.pallas_kernels.gated_delta.states import LayerStates, StateRows
from rjax.pallas_kernels.mosaic.emit import begin_kernel

DECODE_BLOCK_Y = 128
"""Columns of the state of a CTA."""

_STEP_ROWS = 32  # rows of the state that are copied, and multiplied, at once
_STEPS = HEAD_DIM // _STEP_ROWS
_TAIL_ROWS = 16  # tokens of the tail that are multiplied at once
_TAIL_SIZES = (64, 32, 16, 8)  # tokens of the tail that one copy reads
_TOKENS = plgpu.Layout.TILED(  # [tokens, columns] over 4 warps, 2 half warps and 4 columns a lane
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
_ROW = _TOKENS.reduce(0)
_STRIDED = plgpu.Layout.WG_STRIDED((HEAD_DIM,), vec_size=1)


def _state_rows(columns: int):
    """[rows of the state, columns] over 4 warps, consecutive columns in each lane."""
    rows = _STEP_ROWS
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, columns), (rows // 4, columns), (columns // 32,))),
        warp_dims=(-5,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def _load(ref, layout):
    """``ref`` of GMEM in a tiled layout."""
    return plgpu.load(ref, layout=layout, optimized=False)


def _along(x, axis: int, shape: tuple[int, int], layout):
    """x along ``axis`` of an array of this shape and layout; x is in the layout's other axis."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), layout)


def _iota(axis: int, shape: tuple[int, int]):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_TOKENS)


def decode_places(rows: StateRows, T: int) -> Int32[Array, "T 3"]:
    """(slot, token of the page, page with the state before it) of each row; slot -1 for padding."""
    sequence = jnp.asarray(rows.item_sequence)
    row = jnp.where(sequence >= 0, jnp.asarray(rows.item_row), T)
    slot = jnp.asarray(rows.slot)[jnp.maximum(sequence, 0)]
    place = jnp.stack([slot, jnp.asarray(rows.start), jnp.asarray(rows.read_page)], 1)
    return jnp.full((T, 3), -1, jnp.int32).at[row].set(place.astype(jnp.int32), mode="drop")


def gated_delta_decode(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K G Y"],
    decay: Float32[Array, "T K G"],
    beta: Float32[Array, "T K G"],
    layer: LayerStates,
    rows: StateRows,
    *,
    block_y: int = DECODE_BLOCK_Y,
) -> tuple[Float[Array, "T K G Y"], LayerStates]:
    """Outputs of rows of one token a sequence, and the tails with the tokens added.

    It computes no state: a page that the token completes is left to `gated_delta_chunks`.

    Args:
        q, k, v, layer: bfloat16 or float16, H = Y = 128 and pages of 64 tokens; float32 states.
        block_y: columns of the state of a CTA, 64 or 128.
    """
    T, K, G, Y = v.shape
    H, S, dtype = q.shape[-1], layer.keys.shape[2], v.dtype
    tails = [jax.new_ref(x) for x in (layer.keys, layer.values, layer.updates, layer.gates)]

    def gated_delta_decode_kernel(*refs, **smem):
        _decode_kernel(*refs, **smem, block_y=block_y)

    out = plgpu.kernel(
        gated_delta_decode_kernel,
        out_type=jax.ShapeDtypeStruct((T, K, G, Y), dtype),
        scratch_types=dict(
            state_smem=plgpu.SMEM((H, block_y), jnp.float32),
            keys_smem=plgpu.SMEM((S, H), dtype),
            updates_smem=plgpu.SMEM((S, block_y), dtype),
            rows_smem=plgpu.SMEM((2, H), jnp.float32),
            decays_smem=plgpu.SMEM((S,), jnp.float32),
            sums_smem=plgpu.SMEM((2, block_y), jnp.float32),
            state_full=plgpu.Barrier(num_barriers=_STEPS),
            tail_full=plgpu.Barrier(num_arrivals=2 * len(_TAIL_SIZES)),
        ),
        grid=(T, K, G, Y // block_y),
        grid_names=("row", "key_head", "value_head", "block"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=8192,
        ),
    )(decode_places(rows, T), q, k, v, decay, beta, layer.states, *tails)
    keys, values, updates, gates = (jax.freeze(x) for x in tails)
    layer = dataclasses.replace(layer, keys=keys, values=values, updates=updates, gates=gates)
    return out, layer


def _decode_kernel(
    places,
    q,
    k,
    v,
    decay,
    beta,
    states,
    keys,
    values,
    updates,
    gates,
    out,
    *,
    block_y: int,
    state_smem,
    keys_smem,
    updates_smem,
    rows_smem,
    decays_smem,
    sums_smem,
    state_full,
    tail_full,
) -> None:
    """GMEM: places [T, 3], q, k [T, K, H], v, out [T, K, G, Y], decay, beta [T, K, G], states
    [P, K, G, H, Y], keys [slots, K, S, H], values, updates [slots, K, G, S, Y], gates
    [slots, K, G, 2, S]. SMEM: state_smem [H, block_y] float32, keys_smem [S, H], updates_smem
    [S, block_y], rows_smem [2, H] the key and the query, decays_smem [S] of the tail,
    sums_smem [2, block_y] what the tail adds
    to the products with them. Barriers: state_full, one a step of rows; tail_full.
    """
    begin_kernel()
    row, key_head, value_head, block = (
        lax.axis_index(name) for name in ("row", "key_head", "value_head", "block")
    )
    slot, offset, page = places[row, 0], places[row, 1], places[row, 2]
    columns = pl.ds(pl.multiple_of(block * block_y, block_y), block_y)
    of_row = (row, key_head, value_head)
    layout = _state_rows(block_y).reduce(0)

    @pl.when(slot < 0)
    def _padding():
        zero = plgpu.layout_cast(jnp.zeros((block_y,), out.dtype), layout)
        out.at[*of_row, columns][...] = zero

    @pl.when(slot >= 0)
    def _token():
        @pl.when(page >= 0)
        def _copy_state():
            for step in range(_STEPS):
                part = pl.ds(step * _STEP_ROWS, _STEP_ROWS)
                state = states.at[page, key_head, value_head, part, columns]
                plgpu.copy_gmem_to_smem(state, state_smem.at[part], state_full.at[step])

        of_slot = (slot, key_head, value_head)
        _copy_tail(
            keys.at[slot, key_head],
            updates.at[*of_slot, :, columns],
            offset,
            keys_smem,
            updates_smem,
            tail_full,
        )
        key, query = k.at[row, key_head], q.at[row, key_head]
        stored_key = plgpu.load(key, layout=_STRIDED)
        rows_smem.at[0][...] = stored_key.astype(jnp.float32)
        rows_smem.at[1][...] = plgpu.load(query, layout=_STRIDED).astype(jnp.float32)
        gate, rate = decay[*of_row], beta[*of_row]
        value = _load(v.at[*of_row, columns], layout)

        decays_smem[...], total = _decays(gates.at[*of_slot, 0], offset, gate)
        plgpu.commit_smem()
        own = plgpu.load(rows_smem.at[0], layout=_ROW) * plgpu.load(rows_smem.at[1], layout=_ROW)
        own = jnp.sum(own)
        plgpu.barrier_wait(tail_full)
        _add_tail((keys_smem, updates_smem, decays_smem), rows_smem, offset, sums_smem)
        plgpu.commit_smem()
        of_key, of_query = (plgpu.load(sums_smem.at[i], layout=layout) for i in range(2))
        from_key, from_query = lax.cond(
            page >= 0,
            lambda: _multiply_state(state_smem, rows_smem, state_full, block_y),
            lambda: (plgpu.layout_cast(jnp.zeros((block_y,), jnp.float32), layout),) * 2,
        )
        grown = jnp.exp(total)
        update = rate * (value.astype(jnp.float32) - grown * from_key - of_key)
        result = (grown * from_query + of_query + own * update) * HEAD_DIM**-0.5
        out.at[*of_row, columns][...] = result.astype(out.dtype)
        updates.at[*of_slot, offset, columns][...] = update.astype(updates.dtype)
        values.at[*of_slot, offset, columns][...] = value.astype(values.dtype)

        @pl.when(block == 0)
        def _store_gates():
            gates[*of_slot, 0, offset] = gate
            gates[*of_slot, 1, offset] = rate

        @pl.when((block == 0) & (value_head == 0))
        def _store_key():
            keys.at[slot, key_head, offset][...] = stored_key.astype(keys.dtype)


def _copy_tail(keys, updates, count, keys_smem, updates_smem, full) -> None:
    """Start copies of the first ``count`` tokens, rounded up to 8; ``full`` completes in any case.

    keys [S, H], updates [S, block_y]: GMEM, with the SMEM of the same shapes.
    """
    rounded = (count + 7) & -8
    for size in _TAIL_SIZES:
        part = pl.ds(pl.multiple_of(rounded & (-2 * size), size), size)

        @pl.when((rounded & size) != 0)
        def _copy(part=part):
            plgpu.copy_gmem_to_smem(keys.at[part], keys_smem.at[part], full)
            plgpu.copy_gmem_to_smem(updates.at[part], updates_smem.at[part], full)

        @pl.when((rounded & size) == 0)
        def _skip():
            plgpu.barrier_arrive(full)
            plgpu.barrier_arrive(full)


def _decays(gates, offset, gate):
    """(decay from each token of the page to the one at ``offset``, [S]; its log from all), float32.

    Tokens from ``offset`` on get 0. gates: log decays [S] in GMEM, where those may be NaN; gate:
    the log decay of the token at ``offset``.
    """
    shape = PAGE_SIZE, PAGE_SIZE
    logs = _load(gates, _ROW)
    logs = jnp.where(_index(PAGE_SIZE, _ROW) < offset, logs, 0.0)
    later = _iota(1, shape) > _iota(0, shape)
    after = jnp.where(later, _along(logs, 1, shape, _TOKENS), 0.0).sum(axis=1)
    existing = _index(PAGE_SIZE, _TOKENS.reduce(1)) < offset
    return jnp.where(existing, jnp.exp(after + gate), 0.0), jnp.sum(logs) + gate


def _add_tail(tail, rows_smem, offset, sums_smem) -> None:
    """Store what the tail's updates add to the products of the state with the key and the query.

    tail: SMEM, keys [S, H], updates [S, block_y] and decays [S]; tokens from ``offset`` on may be
    NaN. SMEM: rows_smem [2, H] the key and the query, decays_smem [S] of the tail,
    sums_smem [2, block_y].
    """
    keys_smem, updates_smem, decays_smem = tail
    keys_shape, shape = (_TAIL_ROWS, HEAD_DIM), (_TAIL_ROWS, updates_smem.shape[1])
    now = [plgpu.load(rows_smem.at[i], layout=_ROW) for i in range(2)]

    def step(i, sums):
        part = pl.ds(pl.multiple_of(i * _TAIL_ROWS, _TAIL_ROWS), _TAIL_ROWS)
        left = offset - i * _TAIL_ROWS
        keys = plgpu.load(keys_smem.at[part], layout=_TOKENS).astype(jnp.float32)
        decays = plgpu.load(decays_smem.at[part], layout=_TOKENS.reduce(1))
        update = plgpu.load(updates_smem.at[part], layout=_TOKENS).astype(jnp.float32)
        update = jnp.where(_iota(0, shape) < left, update, 0.0)
        existing = _index(_TAIL_ROWS, _TOKENS.reduce(1)) < left
        for n in range(2):
            score = (keys * _along(now[n], 1, keys_shape, _TOKENS)).sum(axis=1)
            score = jnp.where(existing, score * decays, 0.0)
            sums[n] = sums[n] + update * _along(score, 0, shape, _TOKENS)
        return sums

    zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _TOKENS)
    steps = lax.div(offset + _TAIL_ROWS - 1, jnp.int32(_TAIL_ROWS))
    for i, found in enumerate(lax.fori_loop(0, steps, step, [zero, zero])):
        sums_smem.at[i][...] = found.sum(axis=0)


def _multiply_state(state_smem, rows_smem, full, block_y: int):
    """The products of the state [H, block_y] with the key and the query, float32 [block_y]."""
    shape, layout = (_STEP_ROWS, block_y), _state_rows(block_y)

    def step(i, sums):
        part = pl.ds(pl.multiple_of(i * _STEP_ROWS, _STEP_ROWS), _STEP_ROWS)
        plgpu.barrier_wait(full.at[i])
        state = plgpu.load(state_smem.at[part], layout=layout)
        for n in range(2):
            factor = plgpu.load(rows_smem.at[n, part], layout=layout.reduce(1))
            sums[n] = sums[n] + state * _along(factor, 0, shape, layout)
        return sums

    zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    return tuple(x.sum(axis=0) for x in lax.fori_loop(0, _STEPS, step, [zero, zero]))


def _index(size: int, layout):
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
