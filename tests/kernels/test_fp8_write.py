"""KV written to float8_e4m3fn pages: what comes back, what saturates, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.pallas_kernels.fp8 import check_scales, scales_at
from rjax.pallas_kernels.rope_and_cache import base as xla

P, K, S, H = 5, 3, 16, 32
FP8 = jnp.float8_e4m3fn


def pages(dtype=FP8):
    return jnp.full((P, K, S, H), jnp.nan, dtype)


def scales(per_page, seed=0):
    size = (P, K) if per_page else (K,)
    return jnp.asarray(np.random.default_rng(seed).uniform(0.01, 0.5, size), jnp.float32)


@pytest.mark.parametrize("per_page", [False, True])
def test_what_comes_back(per_page):
    """Within half a step of three bits of mantissa, in the right place, and nowhere else."""
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal((6, K, H)), jnp.bfloat16) for _ in range(2))
    slots = jnp.asarray([3, 17, -1, 70, 4, 79])
    k_scales, v_scales = scales(per_page), scales(per_page, 1)
    new = jax.jit(xla.write_kv)(k, v, pages(), pages(), slots, k_scales=k_scales, v_scales=v_scales)
    for pool, given, scale in zip(new, (k, v), (k_scales, v_scales), strict=True):
        assert pool.dtype == FP8
        meant = pool.astype(jnp.float32) * scales_at(scale, jnp.arange(P))[..., None, None]
        written = np.zeros((P, S), bool)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                got, want = meant[slot // S, :, slot % S], given[row].astype(jnp.float32)
                # Below 2**-6 units the steps are 2**-9 units.
                least = np.asarray(scales_at(scale, jnp.asarray(slot // S)))[:, None] * 2.0**-10
                error = np.abs(np.asarray(got - want))
                assert (error <= np.maximum(np.abs(want) * 2.0**-4, least) * 1.0001).all()
                written[slot // S, slot % S] = True
        assert np.isnan(np.asarray(meant).swapaxes(1, 2)[~written]).all()


def test_large_numbers_saturate():
    k = jnp.asarray([[[1e4] * H, [-1e4] * H, [jnp.inf] * H]], jnp.float32)
    one = jnp.ones(K, jnp.float32)
    new, _ = xla.write_kv(k, k, pages(), pages(), jnp.asarray([0]), k_scales=one, v_scales=2 * one)
    np.testing.assert_array_equal(new[0, :, 0, 0].astype(jnp.float32), [448, -448, 448])


def test_refusals():
    one = jnp.ones(K, jnp.float32)
    for args, message in (
        ((pages(), pages(), None, None), "give k_scales"),
        ((pages(), pages(), one, None), "give v_scales"),
        ((pages(jnp.bfloat16), pages(jnp.bfloat16), one, one), "k_scales must be None"),
        ((pages(), pages(), jnp.ones(P), one), "it must be float32"),
        ((pages(), pages(), one, one.astype(jnp.float16)), "it must be float32"),
        ((pages(jnp.bfloat16), pages(jnp.float32), None, None), "must be equal"),
    ):
        with pytest.raises(ValueError, match=message):
            check_scales(*args)
    with pytest.raises(ValueError, match="give k_scales"):
        xla.write_kv(jnp.ones((1, K, H)), jnp.ones((1, K, H)), pages(), pages(), jnp.asarray([0]))
