"""The convolution of a decode step on Hopper against plain JAX, over states that hold NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_steps import Part, Sizes, empty_states, state_rows
from interpreted_mosaic import interpreting, store_all

from rjax.pallas_kernels.gated_delta import conv_step
from rjax.pallas_kernels.gated_delta.base import GatedDeltaProblem, causal_conv, split_mixed
from rjax.pallas_kernels.gated_delta.states import NO_PAGE, StateRows


def _plain(x, weight, layer, rows):
    mixed, layer = causal_conv(x, weight, layer, rows)
    return split_mixed(mixed, 128, x.shape[2] // 128 - 2), layer


def _check(G: int, taps: int, dtype) -> None:
    """Sequences at, inside, at the end of and behind a page; one row of padding."""
    sizes = Sizes(K=2, G=G, H=128, Y=128, S=4, taps=taps)
    rng = np.random.default_rng(G)
    shape = (2, taps, sizes.mixed_dim)
    weight = jnp.asarray(rng.normal(size=shape), dtype)
    layer, plain = empty_states(sizes, 12, 7, dtype), jax.jit(_plain)
    lengths = [1, 3, 4, 5, 9]
    pages = [[2 * n, 2 * n + 1, NO_PAGE] for n in range(5)]
    for n, length in enumerate(lengths[1:], 1):
        parts = [Part(n, 0, length - 1, pages[n])]
        rows = state_rows(parts, 4, rows=9, seqs=1)
        x = jnp.asarray(rng.normal(size=(9, 2, sizes.mixed_dim)), dtype)
        _, layer = plain(x, weight, layer, rows)
    parts = [Part(n, length - 1, length, pages[n]) for n, length in enumerate(lengths)]
    rows = state_rows(parts, 4, rows=6, seqs=6)
    rows = StateRows(*(leaf if len(leaf) == 1 else leaf[:6] for leaf in rows))
    assert len(rows.item_row) == len(rows.slot)
    x = jnp.asarray(rng.normal(size=(6, 2, sizes.mixed_dim)), dtype)
    (q, k, v), want = plain(x, weight, layer, rows)
    found, got = jax.jit(lambda *given: conv_step.causal_conv_step(*given))(x, weight, layer, rows)
    for ours, theirs in zip(found, (q, k, v), strict=True):
        ours, theirs = (np.asarray(each, np.float32) for each in (ours, theirs))
        np.testing.assert_allclose(ours[:5], theirs[:5], rtol=2**-7, atol=1e-5)
        np.testing.assert_array_equal(ours[5], 0)
    for name in ("recent", "conv_ends"):
        ours, theirs = (np.asarray(getattr(each, name), np.float32) for each in (got, want))
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture
def interpreter(monkeypatch):
    monkeypatch.setattr(conv_step, "store_strided", store_all)
    with interpreting(monkeypatch):
        yield


@pytest.mark.usefixtures("interpreter")
def test_conv_step():
    _check(2, 4, jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("G", "taps", "dtype"), [(1, 2, jnp.float16), (2, 4, jnp.bfloat16), (3, 4, jnp.bfloat16)]
)
def test_conv_step_on_gpu(G, taps, dtype):
    _check(G, taps, dtype)


@pytest.mark.parametrize("G", [1, 4])
def test_lowering(G):
    sizes = Sizes(K=16, G=G, H=128, Y=128, S=64)
    layer = jax.eval_shape(lambda: empty_states(sizes, 9, 7, jnp.bfloat16))
    described: Any = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (*[5] * 11, 1)]
    rows = StateRows(*described)
    x = jax.ShapeDtypeStruct((5, 16, sizes.mixed_dim), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((16, 4, sizes.mixed_dim), jnp.bfloat16)
    step = jax.jit(conv_step.causal_conv_step)
    step.trace(x, weight, layer, rows).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(items=9), "several rows of a sequence"),
        (dict(dtype="float32"), "float32"),
        (dict(value_dim=64), "values of 64"),
        ({}, None),
    ],
)
def test_refusals(change, message):
    problem = dict(operation="causal_conv", rows=8, dtype="bfloat16", key_heads=4, values_a_key=2)
    problem |= dict(key_dim=128, value_dim=128, page_size=64, seqs=8, items=8) | change
    found = conv_step.refusal(GatedDeltaProblem(**problem))
    assert (found is None) if message is None else message in (found or "")
