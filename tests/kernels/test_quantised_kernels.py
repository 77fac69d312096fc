"""The dispatcher's entries for quantised projections, from the leaves of a `Linear`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_mosaic import interpreting, load_interleaved, store_all, store_transposed

from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import DecoderLayer, Linear, ModelConfig, config_from_dict
from rjax.models.schemes import Scaled
from rjax.models.sharding import single_device_mesh
from rjax.pallas_kernels.gemm.base import PLAIN_KERNELS, LinearProblem
from rjax.pallas_kernels.gemm.few_bits import norm_quantise, quantised_gemm, quantised_rows, upcast
from rjax.pallas_kernels.gemm.few_bits.kernels import KERNELS
from rjax.pallas_kernels.pending import Partial, reduced
from rjax.pallas_kernels.residual import base as xla_norm
from rjax.worker.kernels import Dispatcher
from rjax.worker.kernels.linear_problem import linear_problem, linear_sharding
from tests.crossed import crossed

SCHEMES = {
    "fp8": Scaled("fp8"),
    "fp8 blocks": Scaled("fp8", (128, 128)),
    "int4": Scaled("int4", (1, 128), zero_points=True, scale_dtype="bfloat16"),
    "int8": Scaled("int8"),
}
DISPATCHER = Dispatcher("mosaic", (*KERNELS, *PLAIN_KERNELS))


def small_config() -> ModelConfig:
    config = config_from_dict(SHAPES["qwen2.5-0.5b"])
    return dataclasses.replace(
        config,
        hidden_size=256,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
    )


def linear(axes: str, scheme: Scaled) -> Linear:
    """A projection with random leaves, such as "D -> A F"."""
    inputs, outputs = axes.split(" -> ")
    a = {"K A H": 4, "A F": 2}.get(outputs, 1)
    layer = Linear(inputs, outputs, small_config(), jnp.bfloat16, scheme=scheme, a=a)
    rng = np.random.default_rng(0)
    for name, _ in layer.leaf_letters:
        leaf = getattr(layer, name)
        if name == "weight_scale":
            values = rng.uniform(0.01, 0.02, leaf.shape).astype(np.float32)
        elif scheme.values == "fp8":
            values = rng.standard_normal(leaf.shape, np.float32)
        else:
            values = rng.integers(-8, 8, leaf.shape, np.int8)
        leaf.set_value(jnp.asarray(values).astype(leaf.dtype))
    return layer


def problem_of(axes: str, layer: Linear, rows: int) -> LinearProblem:
    activated = axes == "D -> A F"
    with_activation: dict[str, Any] = {}
    if activated:
        with_activation["activation"] = DecoderLayer(small_config(), 0, jnp.bfloat16).mlp.activation
    sharding = linear_sharding(layer, single_device_mesh())
    operation = "linear_activation" if activated else "linear"
    return linear_problem(
        operation, layer, sharding, rows=rows, dtype=jnp.bfloat16, **with_activation
    )


def rows_of(rows: int, depth: int) -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(1).standard_normal((rows, depth), np.float32), jnp.bfloat16
    )


def plain(problem: LinearProblem, h: jax.Array, leaves: Any) -> np.ndarray:
    assert problem.scheme is not None
    weight = problem.scheme.dequantise(leaves, problem.depth, jnp.float32)
    product = (h.astype(jnp.float32) @ weight).reshape(len(h), *problem.columns)
    if problem.activation is not None:
        product = problem.activation(product)
    return np.asarray(product)


LAYERS = [("D -> K A H", 8), ("N H -> D", 16), ("D -> A F", 8), ("F -> D", 1)]


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize(("name", "case"), crossed(list(SCHEMES), LAYERS, 2))
def test_streamed(name, case, monkeypatch):
    axes, rows = case
    if (name, rows) == ("fp8", 1):
        rows = (
            2  # the interpreter cannot run the kernel of one row: test_quantised_row.py, on a GPU
        )
    monkeypatch.setattr(quantised_gemm, "store_transposed", store_transposed)
    monkeypatch.setattr(upcast, "load_interleaved", load_interleaved)
    monkeypatch.setattr(quantised_rows, "store_strided", store_all)
    layer = linear(axes, SCHEMES[name])
    problem = problem_of(axes, layer, rows)
    choice = DISPATCHER.choose(problem)
    assert choice.kernel is not None and choice.kernel.name.startswith("mosaic.quantised")
    h = rows_of(rows, problem.depth)
    with interpreting(monkeypatch):
        found = reduced(choice.kernel.run(problem, h, dict(layer.leaves)))
    want = plain(problem, h, layer.leaves)
    assert found.shape == want.shape
    error = np.linalg.norm(np.asarray(found, np.float32) - want) / np.linalg.norm(want)
    assert error < (0.06 if name.startswith("fp8") else 5e-3)  # fp8 rows have 4 bits


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("rows", [8, 72])
@pytest.mark.parametrize("axes", ["D -> K A H", "D -> A F"])
def test_norm_before_fp8(axes, rows, monkeypatch):
    monkeypatch.setattr(quantised_gemm, "store_transposed", store_transposed)
    monkeypatch.setattr(upcast, "load_interleaved", load_interleaved)
    for module in (quantised_rows, norm_quantise):
        monkeypatch.setattr(module, "store_strided", store_all)
    layer = linear(axes, SCHEMES["fp8"])
    problem = problem_of(axes, layer, rows)
    operation = "norm_linear_activation" if problem.activation else "norm_linear"
    problem = dataclasses.replace(problem, operation=operation, eps=1e-5)
    choice = DISPATCHER.choose(problem)
    assert choice.kernel is not None
    assert choice.kernel.name.startswith("mosaic.norm_quantised" if rows == 8 else "xla.norm_fp8")
    x, weight = rows_of(rows, 256), rows_of(1, 256)[0]
    update = Partial(rows_of(2 * rows, 256).reshape(2, rows, 256).astype(jnp.float32))
    with interpreting(monkeypatch):
        residual, found = choice.kernel.run(problem, x, update, weight, dict(layer.leaves))
        found = reduced(found)
    want_residual, normed = xla_norm.add_rms_norm(x, update, weight, problem.eps)
    np.testing.assert_array_equal(
        np.asarray(residual, np.float32), np.asarray(want_residual, np.float32)
    )
    want = plain(problem, normed, layer.leaves)
    error = np.linalg.norm(np.asarray(found, np.float32) - want) / np.linalg.norm(want)
    assert error < 0.06


@pytest.mark.parametrize("needs_partial", [False, True])
def test_many_rows_of_fp8_stay_fp8(needs_partial, monkeypatch):
    monkeypatch.setattr(quantised_rows, "store_strided", store_all)
    layer = linear("D -> K A H", SCHEMES["fp8"])
    problem = dataclasses.replace(problem_of("D -> K A H", layer, 80), needs_partial=needs_partial)
    choice = DISPATCHER.choose(problem)
    assert choice.kernel is not None and choice.kernel.name == "xla.fp8_dot"
    h, leaves = rows_of(80, problem.depth), dict(layer.leaves)
    run = choice.kernel.run
    traced = jax.jit(lambda h, leaves: run(problem, h, leaves)).trace(h, leaves)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    [dot] = [line for line in lowered.splitlines() if "dot_general" in line]
    assert dot.count("f8E4M3FN") == 2
    assert dot.count("xf32>" if needs_partial else "xbf16>") == 1
    with interpreting(monkeypatch):
        found = np.asarray(reduced(run(problem, h, leaves)), np.float32)
    want = plain(problem, h, leaves)
    assert np.linalg.norm(found - want) / np.linalg.norm(want) < 0.06


@pytest.mark.parametrize(
    ("name", "rows", "kernel"),
    [
        ("int4", 1024, "mosaic.quantised_gemm"),
        ("int4", 1032, "xla.linear"),
        ("int8", 512, "mosaic.quantised_gemm"),
        ("int8", 520, "xla.linear"),
        ("fp8 blocks", 8192, "mosaic.quantised_gemm"),
        ("fp8", 8192, "xla.fp8_dot"),
    ],
)
def test_choice_by_rows(name, rows, kernel):
    layer = linear("F -> D", SCHEMES[name])
    chosen = DISPATCHER.choose(problem_of("F -> D", layer, rows)).kernel
    assert chosen is not None and chosen.name == kernel


@pytest.mark.parametrize(
    ("scheme", "found"),
    [
        (Scaled("int4", (1, 32)), "1 x 32"),
        (Scaled("fp8", (1, 64)), "1 x 64 fp8"),
        (None, "unquantised"),
    ],
)
def test_refused(scheme, found):
    layer = linear("F -> D", scheme or SCHEMES["fp8"])
    problem = problem_of("F -> D", layer, 8)
    if scheme is None:
        problem = dataclasses.replace(problem, scheme=None, layout=None)
    choice = DISPATCHER.choose(problem)
    assert choice.kernel is not None and choice.kernel.name == "xla.linear"
    assert found in choice.refused[0][1]
