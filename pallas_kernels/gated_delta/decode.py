"""One token of the gated delta rule for each sequence, on Hopper (Mosaic GPU).

A unit is one sequence and one value head. One CTA an SM takes units until none is left: a warpgroup
copies the state and the tail of the next units (TMA) to shared memory while the other computes. It
multiplies the state with the key and the query and attends to the tail up to the token, whose
updates are not in the state yet (keys and updates, in steps of 8 tokens); a warp has 32 of the Y
columns, so that no sum needs another warp. It writes the output and the token's key, value, update
and gates, and no state. Bytes moved for each unit: 4 * H * Y of the state, 2 * Y for each update of
the tail and 2 * H for each key, which the units of a key head share in the L2 cache.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from rjax.pallas_kernels.gated_delta.page_rows import HEAD_DIM, PAGE_SIZE
from rjax.pallas_kernels.gated_delta.states import LayerStates, StateRows
from rjax.pallas_kernels.mosaic.emit import begin_kernel, num_sms
from rjax.pallas_kernels.mosaic.pipeline import Pipeline

_STAGES = 2
_STEP_ROWS = 32  # rows of the state that are multiplied at once
_TAIL_ROWS = 16  # tokens of the tail that are multiplied at once
_TAIL_SIZES = (64, 32, 16, 8)  # tokens of the tail that one copy reads
_TOKENS = plgpu.Layout.TILED(  # [tokens, columns] over 4 warps, 2 half warps and 4 columns a lane
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
_ROW = _TOKENS.reduce(0)
_COLUMNS = plgpu.Layout.TILED(  # [rows, 128]: 32 columns a warp, 4 of each fourth row a lane
    plgpu.Tiling(((4, 128), (4, 32), (4,))),
    warp_dims=(-4,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
_COLUMN = _COLUMNS.reduce(0)
_STRIDED = plgpu.Layout.WG_STRIDED((HEAD_DIM,), vec_size=1)


def _along(x, axis: int, shape: tuple[int, int], layout):
    """x along ``axis`` of an array of this shape and layout; x is in the layout's other axis."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), layout)


def _iota(axis: int, shape: tuple[int, int], layout=_TOKENS):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


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
) -> tuple[Float[Array, "T K G Y"], LayerStates]:
    """Outputs of rows of one token a sequence, and the tails with the tokens added.

    It computes no state: a page that the token completes is left to `states_at_page_ends`.

    Args:
        q, k, v, layer: bfloat16 or float16, H = Y = 128 and pages of 64 tokens; float32 states.
    """
    T, K, G, Y = v.shape
    H, S, dtype = HEAD_DIM, PAGE_SIZE, v.dtype
    tails = [jax.new_ref(x) for x in (layer.keys, layer.values, layer.updates, layer.gates)]
    units = T * K * G
    ctas = min(num_sms(), units)

    def gated_delta_decode_kernel(*refs, **smem):
        """GMEM: places [T, 3], q, k [T, K, H], v [T, K, G, Y], decay, beta [T, K, G], states
        [P, K, G, H, Y], keys [slots, K, S, H], values, updates [slots, K, G, S, Y], gates
        [slots, K, G, 2, S], out [T, K, G, Y]. SMEM and barriers: as `_Stages`.
        """
        begin_kernel()
        places_, q_, k_, v_, decay_, beta_, states_, *tails_, out_ = refs
        keys_, values_, updates_, gates_ = tails_
        stages, cta = _Stages(**smem), lax.axis_index("cta")
        count = lax.div(units - cta + ctas - 1, jnp.int32(ctas))
        pipeline = Pipeline(stages.tail_full, stages.empty, _STAGES)

        def heads_of(i):
            """(row, key head, value head) of the CTA's i-th unit."""
            n = cta + i * ctas
            heads = lax.rem(n, jnp.int32(K * G))
            row = lax.div(n, jnp.int32(K * G))
            return row, lax.div(heads, jnp.int32(G)), lax.rem(heads, jnp.int32(G))

        def place_of(row):
            return tuple(places_[row, j] for j in range(3))

        @pl.when(lax.axis_index("wg") == 1)
        def _producer():
            def copy(i, _):
                row, key_head, value_head = heads_of(i)
                slot, offset, page = place_of(row)
                stage = pipeline.acquire(i)
                of_slot = jnp.maximum(slot, 0), key_head, value_head
                state = states_.at[jnp.maximum(page, 0), key_head, value_head]
                stages.copy_state(stage, state, page >= 0)
                small = q_.at[row, key_head], k_.at[row, key_head], v_.at[row, *of_slot[1:]]
                stages.copy_rows(stage, *small, gates_.at[*of_slot, 0])
                tail = keys_.at[*of_slot[:2]], updates_.at[*of_slot]
                stages.copy_tail(stage, *tail, jnp.where(slot >= 0, offset, 0))

            lax.fori_loop(0, count, copy, None)

        @pl.when(lax.axis_index("wg") == 0)
        def _consumer():
            def scalars(i):
                of_row = heads_of(jnp.minimum(i, count - 1))
                return *place_of(of_row[0]), decay_[*of_row], beta_[*of_row]

            def compute(i, of_unit):
                slot, offset, page, gate, rate = of_unit
                of_next = scalars(i + 1)  # on their way while this unit is computed
                of_row = heads_of(i)
                _, key_head, value_head = of_row
                stage = pipeline.wait(i)
                token = _token(stages, stage, lax.rem(i, 2), offset, gate, rate, page >= 0)
                pipeline.release(stage)
                exists = slot >= 0
                output = jnp.where(exists, token.output, 0.0)
                out_.at[*of_row][...] = output.astype(dtype)

                @pl.when(exists)
                def _store_tail():
                    of_slot = slot, key_head, value_head
                    updates_.at[*of_slot, offset][...] = token.update.astype(dtype)
                    values_.at[*of_slot, offset][...] = token.value
                    gates_[*of_slot, 0, offset] = gate
                    gates_[*of_slot, 1, offset] = rate

                    @pl.when(value_head == 0)
                    def _store_key():
                        keys_.at[slot, key_head, offset][...] = token.key

                return of_next

            lax.fori_loop(0, count, compute, scalars(0))

    out = plgpu.kernel(
        gated_delta_decode_kernel,
        out_type=jax.ShapeDtypeStruct((T, K, G, Y), dtype),
        scratch_types=dict(
            state=plgpu.SMEM((_STAGES, H, Y), jnp.float32),
            keys=plgpu.SMEM((_STAGES, S, H), dtype),
            updates=plgpu.SMEM((_STAGES, S, Y), dtype),
            rows=plgpu.SMEM((_STAGES, 3, H), dtype),
            logs=plgpu.SMEM((_STAGES, S), jnp.float32),
            factors=plgpu.SMEM((2, 2, H), jnp.float32),
            decays=plgpu.SMEM((2, S), jnp.float32),
            scores=plgpu.SMEM((2, 2, S), jnp.float32),
            state_full=plgpu.Barrier(num_barriers=_STAGES),
            tail_full=plgpu.Barrier(num_barriers=_STAGES, num_arrivals=2 * len(_TAIL_SIZES) + 4),
            empty=plgpu.Barrier(num_barriers=_STAGES),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(decode_places(rows, T), q, k, v, decay, beta, layer.states, *tails)
    keys, values, updates, gates = (jax.freeze(x) for x in tails)
    layer = dataclasses.replace(layer, keys=keys, values=values, updates=updates, gates=gates)
    return out, layer


@dataclasses.dataclass(frozen=True, slots=True)
class _Stages:
    """Shared memory of a CTA.

    Attributes:
        state, keys, updates, logs: [stages, H, Y], [stages, S, H], [stages, S, Y], [stages, S]; the
            state before the page, and the tail with its log decays.
        rows: [stages, 3, H]; the query, key and value.
        factors: float32 [2, 2, H]; the key and the query of the unit that is computed, for units of
            even and of odd number, so that a warp may be ahead of another.
        decays: float32 [2, S]; the decays of its tail.
        scores: float32 [2, 2, S]; the decayed products of the tail's keys with the factors.
        state_full, tail_full, empty: barriers, one a stage; the second is of all but the state.
    """

    state: Any
    keys: Any
    updates: Any
    rows: Any
    logs: Any
    factors: Any
    decays: Any
    scores: Any
    state_full: Any
    tail_full: Any
    empty: Any

    def copy_state(self, stage, state, exists) -> None:
        """Start the copy of a state, GMEM [H, Y], if it exists."""
        full = self.state_full.at[stage]
        copy = functools.partial(plgpu.copy_gmem_to_smem, state, self.state.at[stage], full)
        pl.when(exists)(copy)
        pl.when(jnp.logical_not(exists))(lambda: plgpu.barrier_arrive(full))

    def copy_rows(self, stage, q, k, v, logs) -> None:
        """Start the copies of the rows, GMEM [H], and of the log decays, GMEM [S]."""
        full = self.tail_full.at[stage]
        for i, row in enumerate((q, k, v)):
            plgpu.copy_gmem_to_smem(row, self.rows.at[stage, i], full)
        plgpu.copy_gmem_to_smem(logs, self.logs.at[stage], full)

    def copy_tail(self, stage, keys, updates, count) -> None:
        """Start the copies of the first ``count`` tokens of a tail, rounded up to 8.

        keys [S, H], updates [S, Y]: GMEM.
        """
        rounded, full = (count + 7) & -8, self.tail_full.at[stage]
        for size in _TAIL_SIZES:
            part = pl.ds(pl.multiple_of(rounded & (-2 * size), size), size)

            @pl.when((rounded & size) != 0)
            def _copy(part=part):
                plgpu.copy_gmem_to_smem(keys.at[part], self.keys.at[stage, part], full)
                plgpu.copy_gmem_to_smem(updates.at[part], self.updates.at[stage, part], full)

            @pl.when((rounded & size) == 0)
            def _skip():
                plgpu.barrier_arrive(full)
                plgpu.barrier_arrive(full)


class _Token(NamedTuple):
    """What a unit computes: float32 output and update [Y], and the 16-bit value and key."""

    output: Any
    update: Any
    value: Any
    key: Any


def _token(stages: _Stages, stage, parity, offset, gate, rate, has_state) -> _Token:
    """Compute the token at ``offset``, whose log decay is ``gate`` and whose beta is ``rate``.

    parity: of the unit's number.
    """
    factors, scores = stages.factors.at[parity], stages.scores.at[parity]
    key = plgpu.load(stages.rows.at[stage, 1], layout=_STRIDED)
    query = plgpu.load(stages.rows.at[stage, 0], layout=_STRIDED)
    factors.at[0][...] = key.astype(jnp.float32)
    factors.at[1][...] = query.astype(jnp.float32)
    stages.decays.at[parity][...], total = _decays(stages.logs.at[stage], offset, gate)
    plgpu.commit_smem()
    now = [plgpu.load(factors.at[i], layout=_ROW) for i in range(2)]
    own = jnp.sum(now[0] * now[1])
    _score_tail(stages.keys.at[stage], stages.decays.at[parity], now, scores, offset)
    plgpu.commit_smem()
    of_key, of_query = _add_tail(stages.updates.at[stage], scores, offset)
    value = plgpu.load(stages.rows.at[stage, 2], layout=_COLUMN)
    plgpu.barrier_wait(stages.state_full.at[stage])
    zero = plgpu.layout_cast(jnp.zeros((HEAD_DIM,), jnp.float32), _COLUMN)
    from_key, from_query = lax.cond(
        has_state,
        lambda: _multiply_state(stages.state.at[stage], factors),
        lambda: (zero, zero),
    )
    grown = jnp.exp(total)
    update = rate * (value.astype(jnp.float32) - grown * from_key - of_key)
    output = (grown * from_query + of_query + own * update) * HEAD_DIM**-0.5
    return _Token(output, update, value, key)


def _decays(logs_smem, offset, gate):
    """(decay from each token of the page to the one at ``offset``, [S]; its log from all), float32.

    Tokens from ``offset`` on get 0. logs_smem: log decays [S] in SMEM, where those may be NaN.
    """
    shape = PAGE_SIZE, PAGE_SIZE
    logs = plgpu.load(logs_smem, layout=_ROW)
    logs = jnp.where(_index(PAGE_SIZE, _ROW) < offset, logs, 0.0)
    later = _iota(1, shape) > _iota(0, shape)
    after = jnp.where(later, _along(logs, 1, shape, _TOKENS), 0.0).sum(axis=1)
    existing = _index(PAGE_SIZE, _TOKENS.reduce(1)) < offset
    return jnp.where(existing, jnp.exp(after + gate), 0.0), jnp.sum(logs) + gate


def _tail_steps(offset):
    return lax.div(offset + _TAIL_ROWS - 1, jnp.int32(_TAIL_ROWS))


def _tail_part(i):
    return pl.ds(pl.multiple_of(i * _TAIL_ROWS, _TAIL_ROWS), _TAIL_ROWS)


def _score_tail(keys_smem, decays_smem, now, scores_smem, offset) -> None:
    """Store the decayed products of each factor with the keys of the tokens before ``offset``.

    SMEM: keys [S, H], of which those from there on may be NaN, decays [S], scores [2, S], 0 from
    there on up to the end of a step. now: the factors, float32 [H] each.
    """
    shape = _TAIL_ROWS, HEAD_DIM

    def step(i, _):
        part = _tail_part(i)
        keys = plgpu.load(keys_smem.at[part], layout=_TOKENS).astype(jnp.float32)
        decays = plgpu.load(decays_smem.at[part], layout=_TOKENS.reduce(1))
        existing = _index(_TAIL_ROWS, _TOKENS.reduce(1)) < offset - i * _TAIL_ROWS
        for n in range(2):
            score = (keys * _along(now[n], 1, shape, _TOKENS)).sum(axis=1)
            scores_smem.at[n, part][...] = jnp.where(existing, score * decays, 0.0)

    lax.fori_loop(0, _tail_steps(offset), step, None)


def _add_tail(updates_smem, scores_smem, offset):
    """What the updates of the tokens before ``offset`` add to both products, float32 [Y] each.

    SMEM: updates [S, Y], of which those from there on may be NaN, scores [2, S].
    """
    shape = _TAIL_ROWS, HEAD_DIM

    def step(i, sums):
        part = _tail_part(i)
        # Two lanes of 16-bit rows meet in each bank; another layout would need another's sums.
        update = plgpu.load(updates_smem.at[part], layout=_COLUMNS, optimized=False)
        update = update.astype(jnp.float32)
        update = jnp.where(_iota(0, shape, _COLUMNS) < offset - i * _TAIL_ROWS, update, 0.0)
        for n in range(2):
            score = plgpu.load(scores_smem.at[n, part], layout=_COLUMNS.reduce(1))
            sums[n] = sums[n] + update * _along(score, 0, shape, _COLUMNS)
        return sums

    zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _COLUMNS)
    sums = lax.fori_loop(0, _tail_steps(offset), step, [zero, zero])
    return tuple(x.sum(axis=0) for x in sums)


def _multiply_state(state_smem, factors_smem):
    """The products of the state, SMEM [H, Y], with each factor, SMEM [2, H]: float32 [Y]."""
    shape = _STEP_ROWS, HEAD_DIM

    def step(i, sums):
        part = pl.ds(pl.multiple_of(i * _STEP_ROWS, _STEP_ROWS), _STEP_ROWS)
        state = plgpu.load(state_smem.at[part], layout=_COLUMNS)
        for n in range(2):
            factor = plgpu.load(factors_smem.at[n, part], layout=_COLUMNS.reduce(1))
            sums[n] = sums[n] + state * _along(factor, 0, shape, _COLUMNS)
        return sums

    zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _COLUMNS)
    sums = lax.fori_loop(0, HEAD_DIM // _STEP_ROWS, step, [zero, zero])
    return tuple(x.sum(axis=0) for x in sums)


def _index(size: int, layout):
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
