"""The Mosaic kernels of the gated delta rule on the CPU: models of what the interpreter lacks.

The functions that emit MLIR are replaced; everything else is interpreted as it is.
"""

import contextlib
from typing import Any

import jax.numpy as jnp
from interpreted_mosaic import interpreting
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.scipy.linalg import solve_triangular

from rjax.pallas_kernels.gated_delta import (
    inter_chunk,
    intra_chunk,
    page_end_states,
    state_step,
)

S = 64


def _rows(ref, page):
    """[S, ...] rows of a page's tokens, and whether each token is one of them."""
    token = jnp.arange(S)
    row = jnp.clip(page.first_row + token - page.start, 0, ref.shape[0] - 1)
    return ref[...][row], (token >= page.start) & (token < page.stop)


def _page(ref, tail, page):
    found, new = _rows(ref, page)
    new, old = (x.reshape(S, *(1,) * (found.ndim - 1)) for x in (new, jnp.arange(S) < page.start))
    before = jnp.zeros_like(found) if tail is None else jnp.where(old, tail, 0)
    return jnp.where(new, found, before)


def gather_rows(tile, rows, tail, page) -> None:
    """As the kernel's function of this name, and so the others."""
    tile[...] = _page(rows, None if tail is None else tail[...], page)


def await_rows() -> None:
    pass


def gather_gates(gates, decay, beta, tail, page) -> None:
    for i, rows in enumerate((decay, beta)):
        gates.at[i][...] = _page(rows, tail.at[i][...], page)


def _each_token(page, store) -> None:
    lax.fori_loop(page.start, page.stop, lambda token, _: store(token), None)


def store_rows(rows, tile, page) -> None:
    def store(token) -> None:
        rows[page.first_row + token - page.start] = tile[token]

    _each_token(page, store)


def copy_rows(tail, rows, page) -> None:
    def store(token) -> None:
        tail[token] = rows[page.first_row + token - page.start]

    _each_token(page, store)


def copy_gates(tail, decay, beta, page) -> None:
    for i, rows in enumerate((decay, beta)):

        def store(token, i=i, rows=rows) -> None:
            tail[i, token] = rows[page.first_row + token - page.start]

        _each_token(page, store)


def clear_padding(out, sequence, first) -> None:
    def clear(row, _) -> None:
        @pl.when(sequence[row] < 0)
        def _clear():
            out[row] = jnp.zeros(out.shape[1:], out.dtype)

    lax.fori_loop(first, jnp.minimum(first + S, out.shape[0]), clear, None)


def invert_unit_lower(matrix) -> None:
    lower = jnp.tril(matrix[:, :S], -1)
    matrix[:, :S] = solve_triangular(lower, jnp.eye(S), lower=True, unit_diagonal=True)


def load_transposed(ref):
    return ref[...].T


def store_transposed(ref, value) -> None:
    ref[...] = value.T


@contextlib.contextmanager
def interpreting_gated_delta(monkeypatch: Any):
    """The kernels of the gated delta rule that are traced inside run on the CPU."""
    for name in ("gather_rows", "await_rows", "gather_gates", "clear_padding", "invert_unit_lower"):
        monkeypatch.setattr(intra_chunk, name, globals()[name])
    for name in ("store_rows", "copy_rows", "copy_gates"):
        monkeypatch.setattr(inter_chunk, name, globals()[name])
    monkeypatch.setattr(state_step, "load_transposed", load_transposed)
    for module in (inter_chunk, page_end_states):
        monkeypatch.setattr(module, "store_transposed", store_transposed)
    monkeypatch.setattr(plgpu, "set_max_registers", lambda *_, **__: None)
    with interpreting(monkeypatch):
        yield
