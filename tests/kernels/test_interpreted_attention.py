"""The Mosaic attention kernel against float32 attention, interpreted on the CPU."""

import functools

import batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_attention import interpreting_attention

from rjax.pallas_kernels.attention import mosaic
from rjax.pallas_kernels.attention.reference import paged_attention_reference
from rjax.pallas_kernels.attention.spec import AttentionSpec

OPTIONS = dict(sliding_window=70, soft_cap=5.0)
CASES = {
    "decode": (batches.DECODE, 16, 1, 512, 16, 4, {}),
    "relay": (batches.RELAY, 16, 2, 512, 64, 8, {}),
    "chunks": (batches.CHUNKS, 6, 2, 512, 128, 21, OPTIONS),
    "no swap-AB": (batches.DECODE, 34, 2, 512, 64, 3, {}),
    "relay of 256": (batches.RELAY, 8, 2, 256, 64, 32, {}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("ping_pong", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_against_reference(monkeypatch, name, ping_pong):
    """Fewer CTAs than work tiles, so that one follows the other."""
    batch, N, K, H, S, tile_rows, options = CASES[name]
    a = batches.make_arrays(
        batch,
        N=N,
        K=K,
        H=H,
        S=S,
        tile_rows=tile_rows,
        split=128,
        sharing="on",
        dtype=jnp.bfloat16,
    )
    spec = AttentionSpec(H**-0.5, **options)
    slopes = {"alibi_slopes": jnp.linspace(0, 0.1, N, dtype=jnp.float32)} if options else {}
    attend = functools.partial(mosaic.paged_attention, spec=spec, num_ctas=2, **slopes)
    with interpreting_attention(monkeypatch):
        run = jax.jit(functools.partial(attend, ping_pong=ping_pong))
        out, lse = run(a.q, a.k_pages, a.v_pages, a.page_table, a.positions, a.plan)
    reference = jax.jit(functools.partial(paged_attention_reference, spec=spec, **slopes))
    want, want_lse = reference(a.q, a.k_pages, a.v_pages, a.row_table, a.positions)
    error = jnp.linalg.norm(out.astype(jnp.float32) - want) / jnp.linalg.norm(want)
    assert float(error) < 8e-3
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)
    padding = np.asarray(a.positions) < 0
    assert not np.asarray(out, np.float32)[padding].any()
    assert np.isneginf(np.asarray(lse)[padding]).all()
