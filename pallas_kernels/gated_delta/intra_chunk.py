"""The part of the gated delta rule inside each page, on Hopper (Mosaic GPU), before the states.

One CTA handles one item (the tokens of one page) and one value head: the inverse T of the page's
unit lower triangular system in float32, then U = T (beta v) and R = T (beta e^c k), by which the
scan gets the updates U - R S for a state S, and the decayed scores of the queries with the keys.
Products are by wgmma, 16-bit operands and float32 accumulators. Bytes moved: per value head
2 * S * (2 H + 2 Y + S), and per key head 4 * S * H of keys and queries read and as many written, so
that the scan finds whole pages with zeros where an item has no tokens.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from rjax.pallas_kernels.gated_delta.page_rows import (
    HEAD_DIM,
    PAGE_SIZE,
    TILE,
    PageRows,
    await_rows,
    clear_padding,
    gather_gates,
    gather_rows,
)
from rjax.pallas_kernels.gated_delta.triangular import PITCH, invert_unit_lower
from rjax.pallas_kernels.mosaic.emit import begin_kernel, num_sms

_HALF = HEAD_DIM // 2
_HALVES = tuple(pl.ds(i * _HALF, _HALF) for i in range(2))
_WGMMA = plgpu.Layout.WGMMA
_ROW, _COLUMN = _WGMMA.reduce(1), _WGMMA.reduce(0)
_ACC = plgpu.WGMMAAccumulatorRef


class ChunkOutputs(NamedTuple):
    """What the scan reads of each page, with zeros where an item has no tokens.

    Attributes:
        logs: log decay from the start of the page to each token and with it.
        keys: the keys; those before ``start`` from the tail.
        own: U, the updates of the page's tokens after a state of zeros.
        read: -R, by which a state changes the updates.
        queries: the queries from ``start`` on, and
        scores: their decayed products with the keys, times H^-0.5; None where only states count.
    """

    logs: Float32[Array, "I K G S"]
    keys: Float[Array, "I K S H"]
    own: Float[Array, "I K G S Y"]
    read: Float[Array, "I K G S H"]
    queries: Float[Array, "I K S H"] | None
    scores: Float[Array, "I K G S S"] | None


def intra_chunk(
    items: Int32[Array, "I 6"],
    sequence: Int32[Array, " T"],
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K G Y"],
    decay: Float32[Array, "T K G"],
    beta: Float32[Array, "T K G"],
    keys: Float[Array, "slots K S H"],
    values: Float[Array, "slots K G S Y"],
    gates: Float32[Array, "slots K G 2 S"],
) -> tuple[Float[Array, "T K G Y"], ChunkOutputs]:
    """(outputs whose padding rows are 0 and whose other rows are unset, what the scan reads).

    Args:
        items: see `chunk_items`; an item whose ``stop`` is 0 is skipped, and its results are unset.
        sequence: negative for padding rows.
        keys, values, gates: the tails.
    """
    (num_items, _), (T, K, G, _), S, dtype = items.shape, v.shape, PAGE_SIZE, v.dtype
    padding_blocks = -(
        -T // (num_items * S)
    )  # of 64 rows, in which the CTAs of an item look for padding
    shapes = _state_outputs(num_items, v) | dict(
        queries=((num_items, K, S, HEAD_DIM), dtype),
        scores=((num_items, K, G, S, S), dtype),
        out=(v.shape, dtype),
    )

    def intra_chunk_kernel(sequence_, q_, *refs, q_smem, **smem):
        """GMEM: sequence [T], q [T, K, H], then as `_Pages`, with the outputs queries, scores, out.
        SMEM: q_smem [2, S, H / 2], then as `_Pages`.
        """
        begin_kernel()
        pages = _Pages.of(refs, tuple(shapes), smem)
        item, head = lax.axis_index("item"), lax.axis_index("head")
        key_head, value_head = lax.div(head, jnp.int32(G)), lax.rem(head, jnp.int32(G))
        for i in range(padding_blocks):
            first = (item * padding_blocks + i) * S
            clear_padding(pages.outputs["out"].at[:, key_head, value_head], sequence_, first)

        @pl.when(pages.items[item, 2] > 0)
        def _page():
            pages.compute(item, key_head, value_head, q_, q_smem)

    given = items, k, v, decay, beta, keys, values, gates
    found = plgpu.kernel(
        intra_chunk_kernel,
        out_type=tuple(jax.ShapeDtypeStruct(*x) for x in shapes.values()),
        scratch_types=_scratch(dtype)
        | dict(q_smem=plgpu.SMEM((2, S, _HALF), dtype, transforms=TILE)),
        grid=(num_items, K * G),
        grid_names=("item", "head"),
        compiler_params=_PARAMETERS,
    )(sequence, q, *given)
    results = dict(zip(shapes, found, strict=True))
    return results.pop("out"), ChunkOutputs(**results)


def intra_chunk_states(
    items: Int32[Array, "I 6"],
    count: Int32[Array, " 1"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K G Y"],
    decay: Float32[Array, "T K G"],
    beta: Float32[Array, "T K G"],
    keys: Float[Array, "slots K S H"],
    values: Float[Array, "slots K G S Y"],
    gates: Float32[Array, "slots K G 2 S"],
) -> ChunkOutputs:
    """What `states_after_pages` reads of the first ``count`` items, in the bits of `intra_chunk`.

    There is a CTA for each SM; CTAs without an item end at once. Arguments as in `intra_chunk`.
    """
    (num_items, _), (_, K, G, _), dtype = items.shape, v.shape, v.dtype
    shapes, ctas = _state_outputs(num_items, v), min(num_sms(), num_items * K * G)

    def intra_chunk_states_kernel(count_, *refs, **smem):
        """GMEM: count [1], then as `_Pages`. SMEM: as `_Pages`."""
        begin_kernel()
        pages, cta = _Pages.of(refs, tuple(shapes), smem), lax.axis_index("cta")

        def compute(i, _):
            unit = cta + i * ctas
            item, head = lax.div(unit, jnp.int32(K * G)), lax.rem(unit, jnp.int32(K * G))
            pages.compute(item, lax.div(head, jnp.int32(G)), lax.rem(head, jnp.int32(G)))

        units = count_[0] * (K * G) - cta + ctas - 1
        lax.fori_loop(0, lax.div(units, jnp.int32(ctas)), compute, None)

    given = items, k, v, decay, beta, keys, values, gates
    found = plgpu.kernel(
        intra_chunk_states_kernel,
        out_type=tuple(jax.ShapeDtypeStruct(*x) for x in shapes.values()),
        scratch_types=_scratch(dtype),
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=_PARAMETERS,
    )(count, *given)
    return ChunkOutputs(*found, None, None)


_PARAMETERS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


def _state_outputs(num_items: int, v: Float[Array, "T K G Y"]) -> dict[str, Any]:
    """(shape, dtype) of the results that states need, by the names of `ChunkOutputs`."""
    _, K, G, Y = v.shape
    S, H, dtype = PAGE_SIZE, HEAD_DIM, v.dtype
    return dict(
        logs=((num_items, K, G, S), jnp.float32),
        keys=((num_items, K, S, H), dtype),
        own=((num_items, K, G, S, Y), dtype),
        read=((num_items, K, G, S, H), dtype),
    )


def _scratch(dtype: DTypeLike) -> dict[str, Any]:
    S, H = PAGE_SIZE, HEAD_DIM
    return dict(
        k_smem=plgpu.SMEM((S, H), dtype, transforms=TILE),
        v_smem=plgpu.SMEM((S, H), dtype, transforms=TILE),
        matrix=plgpu.SMEM((S, PITCH), jnp.float32),
        gates_smem=plgpu.SMEM((2, S), jnp.float32),
        logs_smem=plgpu.SMEM((S,), jnp.float32),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Pages:
    """The memory of a CTA, which computes one page and value head after the other.

    Attributes:
        items: GMEM [I, 6].
        k, v, decay, beta: GMEM, the rows: [T, K, H], [T, K, G, Y], [T, K, G] twice.
        keys, values, gates: GMEM, the tails: [slots, K, S, H], [slots, K, G, S, Y],
            [slots, K, G, 2, S].
        outputs: GMEM, as in `ChunkOutputs`.
        k_smem, v_smem: SMEM [S, H], tiles.
        matrix: SMEM float32 [S, PITCH].
        gates_smem, logs_smem: SMEM float32 [2, S] and [S].
    """

    items: Any
    k: Any
    v: Any
    decay: Any
    beta: Any
    keys: Any
    values: Any
    gates: Any
    outputs: dict[str, Any]
    k_smem: Any
    v_smem: Any
    matrix: Any
    gates_smem: Any
    logs_smem: Any

    @classmethod
    def of(cls, refs, names: tuple[str, ...], smem: dict[str, Any]) -> "_Pages":
        """From the refs of a kernel, whose outputs have these names."""
        count = len(refs) - len(names)
        return cls(*refs[:count], dict(zip(names, refs[count:], strict=True)), **smem)

    def compute(self, item, key_head, value_head, q: Any = None, q_smem: Any = None) -> None:
        """Compute the results of an item and value head; int32 scalars.

        q: GMEM [T, K, H], with q_smem [2, S, H / 2] SMEM tiles, for queries and scores.
        """
        S, dtype, to = PAGE_SIZE, self.k_smem.dtype, self.outputs
        of_head, of_item = (key_head, value_head), (item, key_head, value_head)
        page = PageRows(*(self.items[item, i] for i in range(3)))
        tail = (self.items[item, 3], *of_head)
        gather_rows(self.k_smem, self.k.at[:, key_head], self.keys.at[*tail[:2]], page)
        gather_rows(self.v_smem, self.v.at[:, *of_head], self.values.at[*tail], page)
        if q is not None:
            for half, columns in enumerate(_HALVES):
                gather_rows(q_smem.at[half], q.at[:, key_head, columns], None, page)
        rows = self.decay.at[:, *of_head], self.beta.at[:, *of_head]
        gather_gates(self.gates_smem, *rows, self.gates.at[*tail], page)
        await_rows()
        plgpu.commit_smem()

        @pl.when(value_head == 0)
        def _store_rows():
            plgpu.copy_smem_to_gmem(self.k_smem, to["keys"].at[item, key_head])
            if q is not None:
                for half, columns in enumerate(_HALVES):
                    queries = to["queries"].at[item, key_head, :, columns]
                    plgpu.copy_smem_to_gmem(q_smem.at[half], queries)

        second = plgpu.broadcasted_iota(jnp.int32, (S, S), 1, layout=_WGMMA)
        first = plgpu.broadcasted_iota(jnp.int32, (S, S), 0, layout=_WGMMA)
        causal = second <= first
        between = _decays(self.gates_smem, self.logs_smem, to["logs"].at[*of_item], causal)
        overlap = _products([(self.k_smem, self.k_smem.transpose((1, 0)))])
        rates = plgpu.load(self.gates_smem.at[1], layout=_ROW)
        system = lax.broadcast_in_dim(rates, (S, S), [0]) * overlap * between
        self.matrix.at[:, pl.ds(0, S)][...] = jnp.where(second < first, system, 0.0)
        scores = None
        if q is not None:
            scores = _products(
                [
                    (q_smem.at[half], self.k_smem.at[:, columns].transpose((1, 0)))
                    for half, columns in enumerate(_HALVES)
                ]
            )
            scores = jnp.where(causal, scores * between, 0.0) * HEAD_DIM**-0.5
            scores = scores.astype(dtype)
        plgpu.commit_smem()
        invert_unit_lower(self.matrix)
        plgpu.commit_smem()
        read, own = self._solved(causal)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # all threads are done with the tiles
        self.k_smem[...] = read
        self.v_smem[...] = own
        if scores is not None:
            q_smem.at[0][...] = scores
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.k_smem, to["read"].at[*of_item])
        plgpu.copy_smem_to_gmem(self.v_smem, to["own"].at[*of_item])
        if scores is not None:
            plgpu.copy_smem_to_gmem(q_smem.at[0], to["scores"].at[*of_item])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _solved(self, causal):
        """(-R, U), 16-bit [S, H] and [S, Y], from the inverse in ``matrix``."""
        shape, dtype = causal.shape, self.k_smem.dtype
        inverse = plgpu.load(self.matrix.at[:, pl.ds(0, shape[1])], layout=_WGMMA, optimized=False)
        rates = plgpu.load(self.gates_smem.at[1], layout=_COLUMN)
        decays = jnp.exp(plgpu.load(self.logs_smem, layout=_COLUMN))
        inverse = jnp.where(causal, inverse, 0.0) * lax.broadcast_in_dim(rates, shape, [1])
        decayed = inverse * lax.broadcast_in_dim(-decays, shape, [1])
        read = _products([(decayed.astype(dtype), self.k_smem)]).astype(dtype)
        return read, _products([(inverse.astype(dtype), self.v_smem)]).astype(dtype)


def _decays(gates_smem, logs_smem, logs, causal):
    """Decay from the second token to the first, float32 [S, S]; any number where not causal.

    gates_smem [2, S], logs_smem [S]: SMEM; logs: GMEM [S]. The last two get the logs of the decays
    from the start of the page.
    """
    shape = causal.shape
    each = lax.broadcast_in_dim(plgpu.load(gates_smem.at[0], layout=_COLUMN), shape, [1])
    total = jnp.where(causal, each, 0.0).sum(axis=1)
    logs_smem[...] = total
    logs[...] = total
    plgpu.commit_smem()
    column = lax.broadcast_in_dim(plgpu.load(logs_smem, layout=_COLUMN), shape, [1])
    row = lax.broadcast_in_dim(total, shape, [0])
    return jnp.exp(jnp.where(causal, row - column, 0.0))


def _products(pairs):
    """The sum of products by wgmma, float32; SMEM, or registers on the left."""
    rows, columns = pairs[0][0].shape[0], pairs[0][1].shape[1]

    def multiply(acc):
        for left, right in pairs:
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(multiply, _ACC((rows, columns), jnp.float32))
