"""Results against float32 attention computed row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.cases import Case, Inputs
from pallas_kernels.attention.reference import paged_attention_reference
from pallas_kernels.attention.spec import AttentionSpec


def errors(case: Case, inputs: Inputs, out, lse, spec: AttentionSpec, rows: int = 64):
    """(relative error of the output, largest error of the LSE) over at most ``rows`` rows."""
    picked, want_out, want_lse = _reference(case, inputs, spec, rows)
    return _relative(out[picked], want_out), float(jnp.abs(lse[picked] - want_lse).max())


def output_error(case: Case, inputs: Inputs, out, rows: int = 16) -> float:
    """Relative error of the output alone."""
    picked, want, _ = _reference(case, inputs, case.spec, rows)
    return _relative(out[picked], want)


@functools.cache
def _compiled(spec: AttentionSpec):
    """One for each spec, so that checks of equal shapes compile once."""
    return jax.jit(functools.partial(paged_attention_reference, spec=spec))


def _relative(got: jax.Array, want: jax.Array) -> float:
    off = jnp.linalg.norm(got.astype(jnp.float32) - want)
    return float(off / jnp.linalg.norm(want))


def _reference(
    case: Case, inputs: Inputs, spec: AttentionSpec, rows: int
) -> tuple[np.ndarray, jax.Array, jax.Array]:
    """Rows spread over the batch, and their float32 output and LSE."""
    T = inputs.q.shape[0]
    picked = np.unique(np.linspace(0, T - 1, min(rows, T)).astype(int))
    k, v = inputs.pools[0]
    reference = _compiled(spec)
    outs, lses = [], []
    for t in picked:
        b = t // case.queries
        out, lse = reference(
            inputs.q[t][None],
            k,
            v,
            inputs.page_table[b][None],
            inputs.positions[t][None],
            **inputs.options,
        )
        outs.append(out[0])
        lses.append(lse[0])
    return picked, jnp.stack(outs), jnp.stack(lses)
