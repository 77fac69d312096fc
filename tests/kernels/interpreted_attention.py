"""The Mosaic attention kernel on the CPU: models of what the interpreter lacks.

The functions that emit MLIR are replaced, and so are products that add to an accumulator in
registers. Work tiles, pipeline, barriers, softmax and the places of results are the kernel's own.
Views of the same shared memory are separate here, and start with NaN. Relay fusion is in plain JAX.
"""

import contextlib
from typing import Any

import jax.numpy as jnp
from interpreted_mosaic import interpreting
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.attention.mosaic import backend, mainloop, producer, softmax, swap_ab
from rjax.pallas_kernels.attention.mosaic.config import KV_TILE, WGMMA_M
from rjax.pallas_kernels.attention.relay_fusion.xla import relay_fusion


def add_products(acc, *products):
    """As the kernel's function of this name, and so the others."""
    for a, b in products:
        a, b = (x[...].astype(jnp.float32) for x in (a, b))
        acc = acc + jnp.dot(a, b, precision="highest")
    return acc


def _copy_queries(q, rows, head, dims, target, barrier) -> None:
    row = rows.start + jnp.arange(rows.size)
    found = q[...][jnp.minimum(row, q.shape[0] - 1), head][..., dims.start : dims.start + dims.size]
    found = jnp.where((row < q.shape[0])[:, None, None], found, 0)
    target[...] = found.reshape(target.shape)
    plgpu.barrier_arrive(barrier)


def load_tile(source, rows, H: int, dtype):
    del H
    return source[...][jnp.minimum(jnp.arange(WGMMA_M), rows - 1)].astype(dtype)


def gather_rows(table, base, live, group: int):
    return table[...][base + jnp.minimum(jnp.arange(WGMMA_M) // group, live - 1)]


def gather_heads(table, head0, group: int):
    heads = head0 + jnp.arange(WGMMA_M) % group
    return table[...][jnp.minimum(heads, table.shape[0] - 1)]


def gather_columns(table, head0, C: int):
    return table[...][jnp.minimum(head0 + jnp.arange(C), table.shape[0] - 1)]


def sum_eight_rows(sums):
    return sums[:8].sum(0)


def _partial_row_sums(p):
    """Added in pairs, as the kernel adds them."""
    runs = list(jnp.moveaxis(p.reshape(WGMMA_M, -1, 8), 1, 0))
    while len(runs) > 1:
        runs = [a + b for a, b in zip(runs[::2], runs[1::2], strict=True)]
    return runs[0]


def _any_differ(a, b):
    return (a != b).any()


def _split_tiles(products):
    return tuple(jnp.split(products, products.shape[1] // KV_TILE, axis=1))


def store_rows(results, value, rows, group: int) -> None:
    def store(m, _) -> None:
        row, head, entry = m // group, rows.head + m % group, rows.entry[m]
        dims = pl.ds(rows.dim, value.shape[1])

        @pl.when((row < rows.live) & (entry < 0))
        def _direct():
            results.out[rows.row + row, head, dims] = value[m]

        @pl.when((row < rows.live) & (entry >= 0))
        def _partial():
            results.partial_out[entry, head, dims] = value[m]

    lax.fori_loop(0, WGMMA_M, store, None)


def store_lse(results, value, rows, group: int) -> None:
    def store(m, _) -> None:
        row, head, entry = m // group, rows.head + m % group, rows.entry[m]

        @pl.when((row < rows.live) & (entry < 0))
        def _direct():
            results.lse[rows.row + row, head] = value[m]

        @pl.when((row < rows.live) & (entry >= 0))
        def _partial():
            results.partial_lse[entry, head] = value[m]

    lax.fori_loop(0, WGMMA_M, store, None)


def store_swap_ab(results, value, lse, row, group: int) -> None:
    heads, dims = pl.ds(row.head, group), pl.ds(row.dim, value.shape[0])
    for direct, out, scalars, place in (
        (row.entry < 0, results.out, results.lse, row.row),
        (row.entry >= 0, results.partial_out, results.partial_lse, row.entry),
    ):

        @pl.when(direct & (row.live != 0))
        def _values(out=out, place=place):
            out[place, heads, dims] = value[:, :group].T

        @pl.when(direct & (row.live != 0) & (row.stores_lse != 0))
        def _lse(scalars=scalars, place=place):
            scalars[place, heads] = lse[:group]


class SwapAbSmem(swap_ab.SwapAbSmem):
    """Sums of probabilities and scales of queries do not go through shared memory."""

    def stage_queries(self) -> None:
        global _query_scales
        raws = [ref[pl.ds(0, self.C), :].astype(jnp.float32) for ref in self.all_raws]
        operands = self._operands(self.q_tiles)
        if self.itemsize == 2:
            operands[0][...] = raws[0].astype(self.raw.dtype)
            return
        largest = jnp.stack([jnp.abs(raw).max(axis=1) for raw in raws]).max(axis=0)
        _query_scales = jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(largest, 2.0**-100)))) / 128
        scaled = raws[0] / _query_scales[:, None]
        high = scaled.astype(jnp.float8_e4m3fn)
        operands[0][...] = high
        operands[1][...] = (scaled - high.astype(jnp.float32)).astype(jnp.float8_e4m3fn)

    @property
    def all_raws(self):
        return self.raw, *self.other_raws

    def query_scales(self):
        return _query_scales

    def column_max(self, scores):
        return scores.max(axis=0)

    def store_probabilities(self, p, rounded) -> None:
        global _probabilities
        _probabilities = p
        self.p_tile[...] = rounded.T

    def row_sums(self):
        """Of a column: threads add pairs of rows 8 apart, then four warps their sums."""
        pairs = _probabilities.reshape(4, 2, 8, self.C)
        warps = pairs[:, 0] + pairs[:, 1]
        total = (warps[0] + warps[1]) + (warps[2] + warps[3])
        return jnp.tile(total, (WGMMA_M // 8, 1))


_probabilities: Any = None  # of the step that is traced
_query_scales: Any = None  # of the work tile that is traced


def merge_in_place(out, lse, partial_out, partial_lse, merge_indptr):
    entries = jnp.arange(partial_out.shape[0])
    merged, merged_lse = relay_fusion(partial_out, partial_lse, merge_indptr, entries)
    once = jnp.diff(merge_indptr) == 1
    return (
        jnp.where(once[:, None, None], out, merged.astype(out.dtype)),
        jnp.where(once[:, None], lse, merged_lse),
    )


@contextlib.contextmanager
def interpreting_attention(monkeypatch: Any):
    """The Mosaic attention kernels that are traced inside run on the CPU."""
    models = {
        producer: (_copy_queries,),
        mainloop: (
            add_products,
            load_tile,
            gather_rows,
            gather_heads,
            store_rows,
            store_lse,
            _split_tiles,
        ),
        softmax: (_partial_row_sums, _any_differ),
        swap_ab: (add_products, gather_columns, sum_eight_rows, store_swap_ab, SwapAbSmem),
        backend: (merge_in_place,),
    }
    for module, replacements in models.items():
        for model in replacements:
            monkeypatch.setattr(module, model.__name__, model)
    monkeypatch.setattr(plgpu, "set_max_registers", lambda *_, **__: None)
    with interpreting(monkeypatch):
        yield
