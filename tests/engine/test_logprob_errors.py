"""Log-probabilities stay as close to transformers' float32 as they were when that was kept."""

import json

import jax
import numpy as np
import pytest

from rjax import functional
from rjax.models import load_model

from .logprob_errors import CASES, DTYPES, FILE, TESTS, measure, wanted

KEPT = json.loads(FILE.read_text())["errors"]
MARGIN = 1.5  # another CPU sums in another order
THOROUGH = {
    ("llama_g7_h64", "bfloat16"),
    ("llama_g7_h64", "fp8"),
    ("gemma3_g1_h24_old_fields", "bfloat16"),
    ("qwen3_moe_j16_k8_fused", "fp8"),
}

pytestmark = pytest.mark.usefixtures("no_annotations_checked")


def cases():
    for case in ((name, dtype) for name in CASES for dtype in DTYPES):
        mark = pytest.mark.thorough if case in THOROUGH else pytest.mark.slow
        yield pytest.param(*case, marks=mark)


@pytest.mark.parametrize(("name", "dtype"), [*cases()])
def test_errors_are_within_those_kept(name, dtype):
    found, kept = measure(name, dtype), KEPT[name][dtype]
    for path in ("prefill", "decode"):
        for statistic in ("max", "mean"):
            assert found[path][statistic] <= MARGIN * kept[path][statistic], path
        # Without an error the numbers would not be of this dtype.
        assert found[path]["mean"] >= kept[path]["mean"] / 3
    most = max(kept[path]["max"] for path in ("prefill", "decode"))
    assert found["decode - prefill"]["max"] <= MARGIN * most


def test_every_kept_error_says_how_exact_its_dtype_is():
    """The bounds that the pages state."""
    assert set(KEPT) == set(CASES)
    for errors in KEPT.values():
        assert max(errors["float32"][path]["max"] for path in ("prefill", "decode")) < 1e-5
        assert max(errors["bfloat16"][path]["max"] for path in ("prefill", "decode")) < 0.1
        assert max(errors["fp8"][path]["max"] for path in ("prefill", "decode")) < 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_forward_pass_of_functional_is_as_close(dtype):
    name = "llama_g7_h64"
    tokens, want = wanted(name)
    loaded = load_model(
        TESTS / "golden" / "models" / name, dtype=dtype, progress=False, max_length=64
    )
    setup, weights = functional.prepare(
        loaded.model, max_context=64, page_size=8, kv_split_size=16, relay="off"
    )
    run = jax.jit(functional.token_logprobs, static_argnums=0)
    found = np.asarray(run(setup, weights, np.array([tokens], np.int32)))[0, -want.size :]
    assert found.dtype == np.float32
    assert np.abs(found - want).max() <= MARGIN * KEPT[name][dtype]["prefill"]["max"]
