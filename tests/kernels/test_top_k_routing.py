"""Top-k routing: the same experts and weights as plain JAX, in the interpreter; lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_mosaic import interpreting

from rjax.models import Router
from rjax.pallas_kernels.experts.base import route
from rjax.pallas_kernels.experts.top_k_routing import padded_experts, refusal, top_k_routing

ROUTERS = [
    pytest.param(Router(scale=1.5), id="softmax"),
    pytest.param(Router(renormalise=True, scale=1.5), id="renormalised"),
    pytest.param(Router("softmax_of_topk"), id="softmax of top-k"),
    pytest.param(Router("sigmoid", renormalise=True, scale=2.5), id="sigmoid"),
    pytest.param(Router("sigmoid", correction_bias=True), id="corrected"),
]


def logits_of(Z: int, T: int, J: int, ties: bool = False) -> jax.Array:
    logits = np.random.default_rng(0).normal(size=(Z, T, J)).astype(np.float32)
    return jnp.asarray(np.round(logits) if ties else logits)


def both(logits: jax.Array, router: Router, top_k: int):
    """What the kernel finds and what plain JAX does; NaN in the columns of padding."""
    J = logits.shape[2]
    correction = None
    if router.correction_bias:
        correction = jnp.asarray(np.random.default_rng(1).normal(size=J) - 2, jnp.float32)
    padding = ((0, 0), (0, 0), (0, padded_experts(J) - J))
    found = top_k_routing(
        jnp.pad(logits, padding, constant_values=jnp.nan),
        router,
        top_k,
        num_experts=J,
        correction=correction,
    )
    return found, route(logits.sum(0), router, top_k, correction)


@pytest.mark.sample(3, 6)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("J", [128, 60])
def test_it_chooses_as_plain_jax(monkeypatch, ties, router, J):
    with interpreting(monkeypatch):
        (experts, weights), wanted = both(logits_of(2, 3, J, ties), router, 4)
    np.testing.assert_array_equal(experts, wanted.experts)
    np.testing.assert_allclose(weights, wanted.weights, rtol=1e-6)


SIZES = [(8, 1, 128, 8), (1, 64, 256, 4), (4, 300, 128, 16), (1, 64, 32, 4)]


@pytest.mark.sample(3, 6)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("Z", "T", "J", "X"), SIZES)
def test_lowers_for_cuda(Z, T, J, X, router):
    traced = jax.jit(lambda logits: both(logits, router, X)[0]).trace(logits_of(Z, T, J))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("Z", "T", "J", "X"), SIZES)
def test_on_a_gpu(Z, T, J, X, router):
    (experts, weights), wanted = both(logits_of(Z, T, J), router, X)
    np.testing.assert_array_equal(experts, wanted.experts)
    near = 1e-5 if router.score == "softmax" else 1e-4
    np.testing.assert_allclose(weights, wanted.weights, rtol=near)


def test_refusals():
    assert refusal(128, 8) is None
    assert "at most 16" in refusal(128, 17)
    assert "4 experts of a row of 3" in refusal(3, 4)
    with pytest.raises(ValueError, match="takes 128 for 60 experts"):
        top_k_routing(jnp.zeros((1, 2, 60)), Router(renormalise=True), 4, num_experts=60)
