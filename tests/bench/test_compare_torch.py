"""Torch beside rjax on tiny random weights; the comparison must notice different models."""

import importlib.util
import json

import numpy as np
import pytest

from bench.compare_torch import __main__ as compare_torch


def test_an_error_is_relative_and_nan_never_passes():
    a = np.array([3.0, 4.0])
    assert compare_torch.relative_error(a * 1.01, a) == pytest.approx(0.01)
    assert not compare_torch.relative_error(np.array([np.nan, 1.0]), a) <= 1.0


def test_pictures_show_every_system(tmp_path):
    rows = [
        {"system": s, "batch": b, "prefix": p, "own": 8, "step_ms": 1.0 + p}
        for s in ("x", "y")
        for b in (1, 4)
        for p in (0, 64)
    ]
    found = {
        "settings": {"model": "tiny"},
        "environment": {"device": "CPU"},
        "rows": [*rows, {"system": "z", "batch": 4, "prefix": 0, "failed": "no"}],
    }
    compare_torch.draw(found, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").exists()


def test_transformers_loops_are_not_quantised():
    with pytest.raises(SystemExit, match="runs with the methods hand, flex, shared"):
        compare_torch.main(["--shapes=tiny", "--quantization=fp8", "--methods=hand,generate"])


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is missing"
)


@pytest.mark.torch
@needs_torch
@pytest.mark.parametrize(("quantization", "torch_error"), [("fp8", 0.05), ("int4", 1e-5)])
def test_both_round_weights_to_the_same_values(tmp_path, quantization, torch_error):
    path = tmp_path / "compare.json"
    compare_torch.main(
        [
            "--shapes=tiny",
            "--dtype=float32",
            f"--quantization={quantization}",
            "--batch=2",
            "--prefix=64",
            "--own=8",
            "--steps=2",
            "--relay=auto",
            "--decode-steps=1",
            "--methods=hand",
            f"--json={path}",
        ]
    )
    found = json.loads(path.read_text())
    assert found["settings"]["quantization"] == quantization
    # Activations stay float32 here in rjax; torch rounds them to fp8 for fp8 weights.
    assert found["logits"]["relative_error"]["rjax_logits"] < 1e-5
    assert found["logits"]["relative_error"]["hand_logits"] < torch_error
    assert not [row for row in found["rows"] if "failed" in row]


@pytest.mark.torch
@needs_torch
def test_torch_and_rjax_agree(tmp_path):
    path = tmp_path / "compare.json"
    compare_torch.main(
        [
            "--shapes=tiny",
            "--dtype=float32",
            "--batch=2",
            "--prefix=64",
            "--own=8",
            "--steps=4",
            "--relay=auto",
            "--decode-steps=1,2",
            "--methods=hand,flex,shared,generate",
            f"--json={path}",
        ]
    )
    found = json.loads(path.read_text())
    assert found["logits"]["relative_error"]["rjax_logits"] < 1e-5
    assert found["logits"]["same_likeliest"] == 1
    assert {row["system"] for row in found["rows"]} == {
        "rjax, bare step",
        "rjax, engine, relay auto",
        "rjax, engine, relay auto, 2 steps at once",
        "torch, hand",
        "torch, flex",
        "torch, shared",
        "torch, generate",
    }
    assert not [row for row in found["rows"] if "failed" in row]
