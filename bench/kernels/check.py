"""Check results against float32 attention, row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.cases.attention import Case, Inputs
from rjax.pallas_kernels.attention.reference import paged_attention_reference
from rjax.pallas_kernels.attention.spec import AttentionSpec

# The reference is not timed, so XLA need not autotune its GEMMs.
UNTUNED = {"xla_gpu_autotune_level": 0}


def errors(case: Case, inputs: Inputs, out, lse, spec: AttentionSpec, rows: int = 64):
    """(relative error of the output, largest error of the LSE) over at most ``rows`` rows."""
    picked = picked_rows(case, rows)
    found = _compare(spec, *picked, *inputs.arguments, inputs.options, out, lse)
    return float(found[0]), float(found[1])


def output_error(case: Case, inputs: Inputs, out, rows: int = 16) -> float:
    """Relative error of the output alone."""
    no_lse = np.zeros(out.shape[:2], np.float32)
    return errors(case, inputs, out, no_lse, case.spec, rows)[0]


def picked_rows(case: Case, rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """At most ``rows`` query rows spread over the batch, and the sequence of each."""
    T = case.batch * case.queries
    picked = np.unique(np.linspace(0, T - 1, min(rows, T)).astype(np.int32))
    return picked, picked // np.int32(case.queries)


def compare(
    spec: AttentionSpec, rows, seqs, q, k, v, table, positions, options, out, lse
) -> tuple[jax.Array, jax.Array]:
    """(relative error of ``out``, largest error of ``lse``) over these rows, jittable.

    One row after another, because each gathers the KV of its sequence in float32.
    """

    def wanted(row):
        t, b = row
        at = (q[t][None], k, v, table[b][None], positions[t][None])
        out, lse = paged_attention_reference(*at, spec, **options)
        return out[0], lse[0]

    want_out, want_lse = jax.lax.map(wanted, (rows, seqs))
    off = jnp.linalg.norm(out[rows].astype(jnp.float32) - want_out)
    return off / jnp.linalg.norm(want_out), jnp.abs(lse[rows] - want_lse).max()


# Module level, so that checks of equal shapes compile once.
_compare = functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)(compare)
