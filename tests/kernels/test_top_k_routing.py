"""Top-k routing: the same experts and weights as plain JAX, in the interpreter; lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_mosaic import interpreting

from rjax.models import Router
from rjax.models.routing import route
from rjax.pallas_kernels.top_k_routing.mosaic import refusal, top_k_routing


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("renormalise", [False, True])
def test_it_chooses_as_plain_jax(monkeypatch, ties, renormalise):
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(2, 3, 128)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    with interpreting(monkeypatch):
        experts, weights = top_k_routing(jnp.asarray(logits), 4, renormalise=renormalise, scale=1.5)
    wanted = route(jnp.asarray(logits.sum(0)), Router(renormalise=renormalise, scale=1.5), 4)
    np.testing.assert_array_equal(experts, wanted.experts)
    np.testing.assert_allclose(weights, wanted.weights, rtol=1e-6)


@pytest.mark.parametrize(("Z", "T", "J", "X"), [(8, 1, 128, 8), (1, 64, 256, 4), (4, 8192, 128, 8)])
def test_lowers_for_cuda(Z, T, J, X):
    def run(logits):
        return top_k_routing(logits, X, renormalise=True, scale=1.0)

    logits = jax.ShapeDtypeStruct((Z, T, J), jnp.float32)
    assert "mosaic_gpu" in jax.jit(run).trace(logits).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize(("Z", "T", "J", "X"), [(8, 1, 128, 8), (1, 64, 256, 4), (4, 300, 128, 16)])
def test_on_a_gpu(Z, T, J, X):
    logits = np.random.default_rng(0).normal(size=(Z, T, J)).astype(np.float32)
    experts, weights = top_k_routing(jnp.asarray(logits), X, renormalise=True, scale=1.5)
    wanted = route(jnp.asarray(logits.sum(0)), Router(renormalise=True, scale=1.5), X)
    np.testing.assert_array_equal(experts, wanted.experts)
    np.testing.assert_allclose(weights, wanted.weights, rtol=1e-5)


def test_refusals():
    assert refusal(128, 8) is None
    assert "multiples of 128" in refusal(60, 4)
    assert "at most 16" in refusal(128, 17)
    with pytest.raises(ValueError, match="multiples of 128"):
        top_k_routing(jnp.zeros((1, 2, 60)), 4, renormalise=True, scale=1.0)
