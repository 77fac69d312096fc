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
    T = inputs.q.shape[0]
    picked = np.unique(np.linspace(0, T - 1, min(rows, T)).astype(int))
    k, v = inputs.pools[0]
    reference = jax.jit(functools.partial(paged_attention_reference, spec=spec))
    want_out, want_lse = [], []
    for t in picked:
        b = t // case.queries
        o, s = reference(
            inputs.q[t][None],
            k,
            v,
            inputs.page_table[b][None],
            inputs.positions[t][None],
            **inputs.options,
        )
        want_out.append(o[0])
        want_lse.append(s[0])
    want_out, want_lse = jnp.stack(want_out), jnp.stack(want_lse)
    got = out[picked].astype(jnp.float32)
    relative = jnp.linalg.norm(got - want_out) / jnp.linalg.norm(want_out)
    return float(relative), float(jnp.abs(lse[picked] - want_lse).max())
