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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
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
from rjax.pallas_kernels.gated_delta.states import LayerStates
from rjax.pallas_kernels.mosaic.emit import begin_kernel, num_sms
from rjax.pallas_kernels.mosaic.pipeline import Pipeline

BLOCK_Y = 64
"""Columns of the state of a CTA: the rows of a wgmma."""

_STAGES = 2
_WGMMA = plgpu.Layout.WGMMA
_COLUMN = _WGMMA.reduce(0)
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
        SMEM: passed as `_Passed`, out_smem [3, S, BLOCK_Y], else as `_stages`. Barriers, one a
        stage: full, empty.
        """
        begin_kernel()
        rows_, refs = refs[: len(rows)], refs[len(rows) :]
        chunks_, [states, *written] = ChunkOutputs(*refs[: len(chunks)]), refs[len(chunks) :]
        place = _Place(*(lax.axis_index(name) for name in ("head", "block")), G)
        wg, run = lax.axis_index("wg"), lax.axis_index("run")
        first, count = runs_[run, 0], runs_[run, 1]
        pipeline, shared = Pipeline(full, empty, _STAGES), _Passed(*passed)
        outputs = _Outputs(rows_, written, out_smem, place, items_)

        @pl.when(wg == 2)
        def _producer():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            def copy(i, _):
                stage = pipeline.acquire(i)
                _copy_page(chunks_, first + i, place, smem, stage, full)

            lax.fori_loop(0, count, copy, None)

        @pl.when(wg == 1)
        def _compute_outputs():
            def step(i, _):
                stage = pipeline.wait(i)
                found = shared.outputs(i, _at(smem, stage)).astype(dtype)
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
                state, update = _next_state(_at(smem, stage), state, before, after)
                pipeline.release(stage)
                wanted, stop = items_[first + i, 5], items_[first + i, 2]
                pl.when(wanted >= 0)(lambda: store_transposed(of_states(wanted), state))

                @pl.when((i == count - 1) & (stop < S))
                def _store_tail():
                    outputs.store_tail(first + i, update)

                return state

            lax.fori_loop(0, count, step, _first_state(of_states, items_[first, 4]))

    plgpu.kernel(
        inter_chunk_kernel,
        scratch_types=_stages(chunks, _STAGES)
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
        compiler_params=_PARAMETERS,
    )(items, runs, *rows, *chunks, *refs)
    states, out, keys, values, updates, gates = (jax.freeze(x) for x in refs)
    tails = dict(keys=keys, values=values, updates=updates, gates=gates)
    return out, dataclasses.replace(layer, states=states, **tails)


def states_after_pages(
    items: Int32[Array, "I 6"],
    count: Int32[Array, " 1"],
    chunks: ChunkOutputs,
    layer: LayerStates,
) -> LayerStates:
    """The states with those after the pages of the first ``count`` items, from their own states.

    There is a CTA for each SM; CTAs without an item end at once. The bits are those of
    `inter_chunk`. Arguments as there, with ``chunks`` of `intra_chunk_states`.
    """
    num_items, K, G, _, Y = chunks.own.shape
    blocks = Y // BLOCK_Y
    given = [x for x in chunks if x is not None]
    heads = K * G * blocks
    ctas = min(num_sms(), num_items * heads)
    states_ref = jax.new_ref(layer.states)

    def states_after_pages_kernel(items_, count_, *refs, full, **smem):
        """GMEM: items [I, 6], count [1], the arrays of ``chunks``, states [P, K, G, H, Y]. SMEM as
        `_stages`. Barrier: full.
        """
        begin_kernel()
        *given_, states = refs
        chunks_, cta = ChunkOutputs(*given_, None, None), lax.axis_index("cta")

        def compute(i, _):
            unit = cta + i * ctas
            item, rest = lax.div(unit, jnp.int32(heads)), lax.rem(unit, jnp.int32(heads))
            place = _Place(lax.div(rest, jnp.int32(blocks)), lax.rem(rest, jnp.int32(blocks)), G)
            _copy_page(chunks_, item, place, smem, 0, full)
            of_states = functools.partial(place.of_state, states)
            state = _first_state(of_states, items_[item, 4])
            plgpu.barrier_wait(full.at[0])
            state, _ = _next_state(_at(smem, 0), state)
            store_transposed(of_states(items_[item, 5]), state)
            plgpu.commit_smem()  # all threads have read it

        units = count_[0] * heads - cta + ctas - 1
        lax.fori_loop(0, lax.div(units, jnp.int32(ctas)), compute, None)

    plgpu.kernel(
        states_after_pages_kernel,
        scratch_types=_stages(chunks, 1)
        | dict(full=plgpu.Barrier(num_barriers=1, num_arrivals=len(given))),
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=_PARAMETERS,
    )(items, count, *given, states_ref)
    return dataclasses.replace(layer, states=jax.freeze(states_ref))


_PARAMETERS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


def _stages(chunks: ChunkOutputs, stages: int) -> dict[str, Any]:
    """SMEM for what a CTA reads of a page, by the names of `ChunkOutputs`."""
    S, H, dtype = PAGE_SIZE, HEAD_DIM, chunks.own.dtype
    columns = dict(keys=H, own=BLOCK_Y, read=H, queries=H, scores=S)
    found: dict[str, Any] = dict(logs=plgpu.SMEM((stages, S), jnp.float32))
    for name, x in zip(chunks._fields, chunks, strict=True):
        if name in columns and x is not None:
            found[name] = plgpu.SMEM((stages, S, columns[name]), dtype, transforms=TILE)
    return found


def _at(smem: dict[str, Any], stage) -> dict[str, Any]:
    return {name: ref.at[stage] for name, ref in smem.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """The value head and the block of columns of a CTA; int32 scalars.

    Attributes:
        head, block: of K * G and of Y / BLOCK_Y.
        G: value heads of a key head.
    """

    head: Any
    block: Any
    G: int

    @property
    def heads(self) -> tuple[Any, Any]:
        """(key head, value head of it)."""
        return lax.div(self.head, jnp.int32(self.G)), lax.rem(self.head, jnp.int32(self.G))

    @property
    def columns(self):
        return pl.ds(pl.multiple_of(self.block * BLOCK_Y, BLOCK_Y), BLOCK_Y)

    def of_state(self, states, page):
        """[H, BLOCK_Y] of the state in a page."""
        return states.at[page, *self.heads, :, self.columns]


def _copy_page(chunks: ChunkOutputs, item, place: _Place, smem, stage, full) -> None:
    """Start the copies of an item's arrays to a stage."""
    for name, to in smem.items():
        source = getattr(chunks, name).at[item]
        if name in ("keys", "queries"):
            source = source.at[place.heads[0]]
        elif name == "own":
            source = source.at[*place.heads, :, place.columns]
        else:
            source = source.at[*place.heads]
        plgpu.copy_gmem_to_smem(source, to.at[stage], full.at[stage])


def _first_state(of_states: Callable[[Any], Any], page):
    """The transposed state in a page, float32 [BLOCK_Y, H]; zeros without a page."""
    return lax.cond(
        page >= 0,
        lambda: load_transposed(of_states(jnp.maximum(page, 0))),
        lambda: plgpu.layout_cast(jnp.zeros((BLOCK_Y, HEAD_DIM), jnp.float32), _WGMMA),
    )


def _next_state(at: dict[str, Any], state, before=lambda _: None, after=lambda _: None) -> Any:
    """(state after a page, its updates), transposed, float32.

    at: SMEM of the page's stage; state: [BLOCK_Y, H]. While products run, ``before`` is called with
    the state and ``after`` with the updates, both in 16 bits.
    """
    dtype, shape = at["keys"].dtype, (BLOCK_Y, PAGE_SIZE)
    left = state.astype(dtype)

    def updates(acc):
        plgpu.wgmma(acc, left, at["read"].transpose((1, 0)))
        before(left)
        own = plgpu.load(at["own"].transpose((1, 0)), layout=_WGMMA).astype(jnp.float32)
        logs, last = plgpu.load(at["logs"], layout=_COLUMN), at["logs"][PAGE_SIZE - 1]
        decays = lax.broadcast_in_dim(jnp.exp(last - logs), shape, [1])
        return own + acc[...], decays, state * jnp.exp(last)

    update, decays, whole = pl.run_scoped(updates, _ACC(shape, jnp.float32))
    decayed = (update * decays).astype(dtype)

    def add(acc):
        plgpu.wgmma(acc, decayed, at["keys"])
        after(update.astype(dtype))
        return whole + acc[...]

    return pl.run_scoped(add, _ACC((BLOCK_Y, HEAD_DIM), jnp.float32)), update


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
    place: _Place
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


def load_transposed(ref):
    """float32 [BLOCK_Y, H] in WGMMA layout, the transposed [H, BLOCK_Y] in GMEM."""
    shape = ref.shape[::-1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_WGMMA),
    )
    def load(_, ref_):
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        result = mgpu.FragmentedArray.splat(mgpu.c(0.0, f32), shape, _WGMMA.to_mgpu())
        places = list(result.layout.thread_idxs(shape))
        for n, (row, column) in enumerate(places):
            elements = [memref.load(ref_, [_next(column, i), row]) for i in range(2)]
            result.registers.flat[n] = vector.from_elements(pair, elements)
        return result

    return load(ref)


def store_transposed(ref, value) -> None:
    """``ref`` [H, BLOCK_Y] in GMEM = the transposed value, float32 [BLOCK_Y, H] in WGMMA layout."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA))
    def store(_, ref_, value_):
        places = value_.layout.thread_idxs(value_.shape)
        for (row, column), register in zip(places, value_.registers.flat, strict=True):
            for i in range(2):
                element = vector.extract(register, [], ir.DenseI64ArrayAttr.get([i]))
                memref.store(element, ref_, [_next(column, i), row])

    store(ref, value)


def _next(index, count: int):
    return arith.addi(index, mgpu.c(count, ir.IndexType.get()))
