"""The states of a sequence page after page, on Hopper (Mosaic GPU), from what `intra_chunk` found.

One CTA handles 64 of the Y columns of one value head over the items of one sequence; the columns of
a state are independent. The first warpgroup keeps the transposed state in registers, float32, and
computes the updates U - R S and then S = e^c S + k updates, both with a left operand in registers.
It passes each page's state and updates, in 16 bits, to the second warpgroup in shared memory, which
computes the outputs e^c q S + scores updates. The third one copies what `intra_chunk` found (TMA).
Products are by wgmma. Bytes moved per page and value head: 2 * S * (4 * H + Y + 2 * S) read by each
CTA, 2 * S * Y of outputs, and 4 * H * Y where a state is read or wanted.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from rjax.pallas_kernels.gated_delta.intra_chunk import ChunkOutputs
from rjax.pallas_kernels.gated_delta.page_rows import (
    HEAD_DIM,
    PAGE_SIZE,
    TILE,
    PageRows,
    copy_gates,
    copy_rows,
    store_rows,
)
from rjax.pallas_kernels.gated_delta.state_step import (
    BLOCK_Y,
    PARAMETERS,
    Place,
    copy_page,
    first_state,
    next_state,
    stage_refs,
    stages,
    store_transposed,
)
from rjax.pallas_kernels.gated_delta.states import LayerStates
from rjax.pallas_kernels.mosaic.emit import begin_kernel
from rjax.pallas_kernels.mosaic.pipeline import Pipeline

_STAGES = 2
_WGMMA = plgpu.Layout.WGMMA
_ACC = plgpu.WGMMAAccumulatorRef
_STATE_REGISTERS, _PRODUCER_REGISTERS = 240, 40  # a thread


def inter_chunk(
    items: Int32[Array, "I 6"],
    runs: Int32[Array, "R 2"],
    rows: tuple[Array, ...],
    out: Float[Array, "T K G Y"],
    chunks: ChunkOutputs,
    layer: LayerStates,
) -> tuple[Float[Array, "T K G Y"], LayerStates]:
    """(outputs, the states with the wanted ones, and the tails of sequences in a page).

    Args:
        items, runs: see `chunk_items`.
        rows: k [T, K, H], v [T, K, G, Y], decay and beta [T, K, G], for the tails.
        out: the array that gets the outputs.
        chunks: from `intra_chunk`.
    """
    (_, K, G, S, Y), dtype, (R, _) = chunks.own.shape, chunks.own.dtype, runs.shape
    tails = layer.keys, layer.values, layer.updates, layer.gates
    refs = [jax.new_ref(x) for x in (layer.states, out, *tails)]

    def inter_chunk_kernel(items_, runs_, *refs, passed, out_smem, full, empty, **smem):
        """GMEM: items [I, 6], runs [R, 2], the rows k [T, K, H], v [T, K, G, Y], decay, beta
        [T, K, G], the arrays of ``chunks``, states [P, K, G, H, Y], out [T, K, G, Y], the tails:
        keys [slots, K, S, H], values, updates [slots, K, G, S, Y], gates [slots, K, G, 2, S].
        SMEM: passed as `_Passed`, out_smem [3, S, BLOCK_Y], else as `stages`. Barriers, one a
        stage: full, empty.
        """
        begin_kernel()
        rows_, refs = refs[: len(rows)], refs[len(rows) :]
        chunks_, [states, *written] = ChunkOutputs(*refs[: len(chunks)]), refs[len(chunks) :]
        place = Place(*(lax.axis_index(name) for name in ("head", "block")), G)
        wg, run = lax.axis_index("wg"), lax.axis_index("run")
        first, count = runs_[run, 0], runs_[run, 1]
        pipeline, shared = Pipeline(full, empty, _STAGES), _Passed(*passed)
        outputs = _Outputs(rows_, written, out_smem, place, items_)

        @pl.when(wg == 2)
        def _producer():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            def copy(i, _):
                stage = pipeline.acquire(i)
                copy_page(chunks_, first + i, place, smem, stage, full)

            lax.fori_loop(0, count, copy, None)

        @pl.when(wg == 1)
        def _compute_outputs():
            def step(i, _):
                stage = pipeline.wait(i)
                found = shared.outputs(i, stage_refs(smem, stage)).astype(dtype)
                pipeline.release(stage)
                outputs.store(first + i, lax.rem(i, 2), found)

            lax.fori_loop(0, count, step, None)

        @pl.when((wg == 0) & (count > 0))
        def _compute_states():
            plgpu.set_max_registers(_STATE_REGISTERS, action="increase")
            of_states = functools.partial(place.of_state, states)

            def step(i, state):
                stage = pipeline.wait(i)
                before = functools.partial(shared.store_state, i)
                after = functools.partial(shared.store_updates, i)
                state, update = next_state(stage_refs(smem, stage), state, before, after)
                pipeline.release(stage)
                wanted, stop = items_[first + i, 5], items_[first + i, 2]
                pl.when(wanted >= 0)(lambda: store_transposed(of_states(wanted), state))

                @pl.when((i == count - 1) & (stop < S))
                def _store_tail():
                    outputs.store_tail(first + i, update)

                return state

            lax.fori_loop(0, count, step, first_state(of_states, items_[first, 4]))

    plgpu.kernel(
        inter_chunk_kernel,
        scratch_types=stages(chunks, _STAGES)
        | dict(
            passed=(
                plgpu.SMEM((2, BLOCK_Y, HEAD_DIM), dtype, transforms=TILE),
                plgpu.SMEM((2, BLOCK_Y, S), dtype, transforms=TILE),
                plgpu.Barrier(num_barriers=2),
                plgpu.Barrier(num_barriers=2),
            ),
            out_smem=plgpu.SMEM((3, S, BLOCK_Y), dtype, transforms=TILE),
            full=plgpu.Barrier(num_barriers=_STAGES, num_arrivals=len(chunks)),
            empty=plgpu.Barrier(num_barriers=_STAGES, num_arrivals=2),
        ),
        grid=(R, K * G, Y // BLOCK_Y),
        grid_names=("run", "head", "block"),
        num_threads=3,
        thread_name="wg",
        compiler_params=PARAMETERS,
    )(items, runs, *rows, *chunks, *refs)
    states, out, keys, values, updates, gates = (jax.freeze(x) for x in refs)
    tails = dict(keys=keys, values=values, updates=updates, gates=gates)
    return out, dataclasses.replace(layer, states=states, **tails)


@dataclasses.dataclass(frozen=True, slots=True)
class _Passed:
    """States and updates that one warpgroup passes to another, in turn in two places.

    Attributes:
        states, updates: SMEM [2, BLOCK_Y, H] and [2, BLOCK_Y, S], transposed, tiles.
        full, empty: barriers, one a place.
    """

    states: Any
    updates: Any
    full: Any
    empty: Any

    def store_state(self, i, state) -> None:
        """Store the state before page ``i``, once its place is free."""
        place = lax.rem(i, 2)
        pl.when(i >= 2)(lambda: plgpu.barrier_wait(self.empty.at[place]))
        self.states.at[place][...] = state

    def store_updates(self, i, updates) -> None:
        """Store the updates of page ``i`` and let the other warpgroup read both."""
        place = lax.rem(i, 2)
        self.updates.at[place][...] = updates
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.full.at[place])

    def outputs(self, i, at: dict[str, Any]):
        """The outputs of page ``i``, float32 [S, BLOCK_Y]; at: SMEM of the page's stage."""
        place, shape = lax.rem(i, 2), (PAGE_SIZE, BLOCK_Y)
        plgpu.barrier_wait(self.full.at[place])

        def multiply(from_state, from_updates):
            plgpu.wgmma(from_state, at["queries"], self.states.at[place].transpose((1, 0)))
            plgpu.wgmma(from_updates, at["scores"], self.updates.at[place].transpose((1, 0)))
            decays = jnp.exp(plgpu.load(at["logs"], layout=_WGMMA.reduce(1))) * HEAD_DIM**-0.5
            decays = lax.broadcast_in_dim(decays, shape, [0])
            return from_state[...] * decays + from_updates[...]

        accs = [_ACC(shape, jnp.float32) for _ in range(2)]
        found = pl.run_scoped(multiply, *accs)
        plgpu.barrier_arrive(self.empty.at[place])
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Outputs:
    """Stores what a CTA computes of the rows of its items.

    Attributes:
        rows: GMEM k, v, decay, beta, the rows.
        written: GMEM out and the tails: keys, values, updates, gates.
        smem: SMEM [3, S, BLOCK_Y], two tiles for outputs and one for updates.
        place: the CTA's columns.
        items: GMEM [I, 6].
    """

    rows: tuple[Any, ...]
    written: Sequence[Any]
    smem: Any
    place: Place
    items: Any

    def _rows_of(self, item) -> PageRows:
        return PageRows(*(self.items[item, n] for n in range(3)))

    def store(self, item, buffer, outputs) -> None:
        """Store outputs, 16-bit [S, BLOCK_Y], in the rows of an item.

        Two tiles in turn need one barrier an item: threads that write one again have passed the
        barrier of the item between, and so all have read it.
        """
        tile = self.smem.at[buffer]
        tile[...] = outputs
        plgpu.commit_smem()
        rows = self.written[0].at[:, *self.place.heads, self.place.columns]
        store_rows(rows, tile, self._rows_of(item))

    def store_tail(self, item, update) -> None:
        """Store the tail of a sequence's last item; update: transposed, float32 [BLOCK_Y, S]."""
        page, slot = self._rows_of(item), self.items[item, 3]
        _, keys, values, updates, gates = self.written
        k, v, decay, beta = self.rows
        heads, columns = self.place.heads, self.place.columns
        tile = self.smem.at[2]
        tile.transpose((1, 0))[...] = update.astype(updates.dtype)
        plgpu.commit_smem()
        in_tail = page._replace(first_row=page.start)
        store_rows(updates.at[slot, *heads, :, columns], tile, in_tail)
        copy_rows(values.at[slot, *heads, :, columns], v.at[:, *heads, columns], page)

        @pl.when(self.place.block == 0)
        def _store_gates():
            copy_gates(gates.at[slot, *heads], decay.at[:, *heads], beta.at[:, *heads], page)

        @pl.when((self.place.block == 0) & (heads[1] == 0))
        def _store_keys():
            copy_rows(keys.at[slot, heads[0]], k.at[:, heads[0]], page)
