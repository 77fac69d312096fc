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
# Batch, N, K, H, S, tile_rows, options of AttentionSpec and whether pages are fp8.
CASES = {
    "decode": (batches.DECODE, 16, 1, 512, 16, 4, {}, False),
    "relay": (batches.RELAY, 16, 2, 512, 64, 8, {}, False),
    "chunks": (batches.CHUNKS, 6, 2, 512, 128, 21, OPTIONS, False),
    "no swap-AB": (batches.DECODE, 34, 2, 512, 64, 3, {}, False),
    "fp8": (batches.CHUNKS, 16, 2, 512, 64, 8, {}, True),
    "relay of 256": (batches.RELAY, 8, 2, 256, 64, 32, {}, False),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_against_reference(monkeypatch, name):
    """Fewer CTAs than work tiles, so that one follows the other."""
    batch, N, K, H, S, tile_rows, options, fp8 = CASES[name]
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
        kv_dtype=jnp.float8_e4m3fn if fp8 else None,
    )
    spec = AttentionSpec(H**-0.5, **options)
    more = {"alibi_slopes": jnp.linspace(0, 0.1, N, dtype=jnp.float32)} if options else {}
    if fp8:
        more = {name: jnp.linspace(0.5, 2, K) for name in ("k_scales", "v_scales")}
    attend = functools.partial(mosaic.paged_attention, spec=spec, num_ctas=2, **more)
    with interpreting_attention(monkeypatch):
        out, lse = jax.jit(attend)(a.q, a.k_pages, a.v_pages, a.page_table, a.positions, a.plan)
    reference = jax.jit(functools.partial(paged_attention_reference, spec=spec, **more))
    want, want_lse = reference(a.q, a.k_pages, a.v_pages, a.row_table, a.positions)
    error = jnp.linalg.norm(out.astype(jnp.float32) - want) / jnp.linalg.norm(want)
    assert float(error) < 8e-3
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)
    padding = np.asarray(a.positions) < 0
    assert not np.asarray(out, np.float32)[padding].any()
    assert np.isneginf(np.asarray(lse)[padding]).all()
