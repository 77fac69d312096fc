"""Logits of one row on a GPU are sums of products, and equal the product on a CPU."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import config_from_dict
from rjax.models.layers import embedding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_products_are_the_product(dtype):
    keys = jax.random.split(jax.random.key(0))
    hidden, table = (
        jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for key, shape in zip(keys, [(1, 96), (50, 96)], strict=True)
    )
    exact = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T
    for found in embedding._sum_of_products(hidden, table), embedding._product(hidden, table):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "rows", "products"), [("cuda", 1, 0), ("cuda", 2, 1), ("cpu", 1, 1)]
)
def test_one_row_on_a_gpu_has_no_product(platform, rows, products):
    config = config_from_dict(SHAPES["tiny"])
    graph, weights = nnx.split(embedding.Embedding("V", config, jnp.bfloat16))
    logits = jax.jit(lambda weights, hidden: nnx.merge(graph, weights).logits(hidden))
    hidden = jax.ShapeDtypeStruct((rows, config.hidden_size), jnp.bfloat16)
    exported = jax.export.export(logits, platforms=[platform])(weights, hidden)
    assert exported.mlir_module().count("stablehlo.dot_general") == products
