"""The benchmark of the gated product, with the plain form in place of the kernel."""

import json
import types

import jax
import jax.numpy as jnp
import pytest

from bench.ceilings import Ceilings
from bench.kernels import gated_product as bench
from bench.model_shapes import SHAPES
from pallas_kernels.gated_activation import xla as plain_activation
from pallas_kernels.gated_product import mosaic, xla


def stand_in(scale=1.0):
    def run(h, w, *, tiling):
        return (scale * xla.gated_product(h, w)).astype(h.dtype)

    return run


@pytest.fixture
def plain(monkeypatch):
    """The plain form on a device of two multiprocessors."""
    module = types.SimpleNamespace(multiprocessors=lambda: 2, gated_product=stand_in())
    tiny = {"llama-3-8b": dict(hidden_size=256, intermediate_size=256)}
    monkeypatch.setattr(bench, "mosaic", module)
    monkeypatch.setattr(bench, "activation", plain_activation)
    monkeypatch.setattr(bench, "SHAPES", tiny)
    monkeypatch.setattr(bench, "_CHAIN", 3e-7)
    monkeypatch.setattr(bench, "measure_ceilings", lambda: Ceilings(4e12, 8e14))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return module


def measured(tmp_path, *options):
    path = tmp_path / "gated_product.json"
    given = ["--only", "llama-3-8b", "--rows=8,64", "--quiet", "--json", str(path), *options]
    return bench.main(given), json.loads(path.read_text())["rows"]


def test_each_row_count_is_checked_and_timed(plain, tmp_path, capsys):
    code, rows = measured(tmp_path)
    assert code == 0
    assert [(row["rows"], row["columns"]) for row in rows] == [(8, 128), (64, 128)]
    for row in rows:
        assert row["error"] < 1e-2
        assert {"kernel_us", "present_us", "floor_us", "speedup"} <= set(row)
    assert "XLA and activation, us" in capsys.readouterr().out


def test_a_wrong_kernel_is_told(plain, tmp_path):
    plain.gated_product = stand_in(scale=1.1)
    code, rows = measured(tmp_path, "--variants")
    assert code == 1
    assert len(rows) > 4
    assert all("relative error" in row["failed"] and "kernel_us" not in row for row in rows)


def test_other_tilings_are_those_the_kernel_takes():
    D, F = SHAPES["llama-3-8b"]["hidden_size"], SHAPES["llama-3-8b"]["intermediate_size"]
    given = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, D), (D, 2, F))]
    found = list(bench.variants("llama-3-8b", 64))
    assert len(set(found)) == len(found) > 5
    for tiling in found:
        out = jax.eval_shape(lambda h, w, t=tiling: mosaic.gated_product(h, w, tiling=t), *given)
        assert out.shape == (64, F)


def test_it_needs_a_gpu(capsys):
    assert bench.main([]) == 1
    assert "Hopper" in capsys.readouterr().err
