"""The benchmark of the products of few rows, with plain forms in place of the kernels."""

import json
import types

import jax
import jax.numpy as jnp
import pytest

from bench.ceilings import Ceilings
from bench.kernels import products
from pallas_kernels.gated_activation import xla as plain_activation
from pallas_kernels.products import mosaic, xla
from pallas_kernels.residual_norm import xla as plain_norm

TINY = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)


def stand_in(name, scale=1.0):
    def run(*arguments, weights_ready=False, tiling=None):
        first, *others = jax.tree.leaves(getattr(xla, name)(*arguments))
        found = [(scale * first).astype(first.dtype), *others]
        return found[0] if len(found) == 1 else tuple(found)

    return run


@pytest.fixture
def plain(monkeypatch):
    module = types.SimpleNamespace(
        multiprocessors=mosaic.multiprocessors,
        **{name: stand_in(name) for name in ("product", "gated_product", "add_product")},
    )
    monkeypatch.setattr(products, "mosaic", module)
    monkeypatch.setattr(products, "norm", plain_norm)
    monkeypatch.setattr(products, "activation", plain_activation)
    monkeypatch.setattr(products, "SHAPES", {"llama-3-8b": TINY})
    monkeypatch.setattr(products, "_CHAIN", 4e-6)
    monkeypatch.setattr(products, "measure_ceilings", lambda: Ceilings(4e12, 8e14))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return module


def measured(tmp_path, *options):
    path = tmp_path / "products.json"
    given = ["--only", "llama-3-8b", "--rows=8", "--json", str(path), *options]
    return products.main(given), json.loads(path.read_text())["rows"]


def test_every_product_is_checked_and_timed(plain, tmp_path, capsys):
    code, rows = measured(tmp_path)
    assert code == 0
    assert [row["product"] for row in rows] == ["layer", *products.PRODUCTS]
    for row in rows:
        assert row["error"] < 1e-2
        assert {"kernel_us", "early_us", "present_us", "floor_us"} <= set(row)
    assert "best / floor" in capsys.readouterr().out


def test_a_wrong_kernel_is_told_and_costs_no_other(plain, tmp_path):
    plain.gated_product = stand_in("gated_product", scale=1.1)
    code, rows = measured(tmp_path)
    assert code == 1
    by_name = {row["product"]: row for row in rows}
    assert "relative error" in by_name["up"]["failed"]
    assert "kernel_us" not in by_name["up"]
    assert "failed" not in by_name["down"]


def test_other_tilings_are_those_the_kernels_take():
    shape = products.Shape("llama-3-8b", 16)
    for name in ("qkv", "down"):
        found = list(shape.variants(name))
        assert len(found) > 5
        assert shape.tiling(name) not in found
        run = products.mosaic.add_product if name == "down" else products.mosaic.product
        arguments = jax.eval_shape(lambda name=name: products.inputs(shape, name, 0))
        for tiling in found:
            taken = arguments if name == "down" else arguments[:2]
            out = jax.eval_shape(lambda *a, run=run, t=tiling: run(*a, tiling=t), *taken)
            assert jax.tree.leaves(out)[0].dtype == jnp.bfloat16


def test_it_needs_a_gpu(capsys):
    assert products.main([]) == 1
    assert "Hopper" in capsys.readouterr().err
