"""Log-probabilities of Hopper's kernels beside transformers' float32 on the same weights."""

import pytest

from tests.engine.logprob_errors import measure

MOST = {"bfloat16": 0.1, "fp8": 0.5}  # those that the pages state of plain JAX
OPTIONS = {"backend": "mosaic", "page_size": 64, "num_pages": 16, "max_model_len": 128}
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("name", ["llama_g7_h64", "mistral_g8_h64_window"])
def test_errors_are_those_that_the_pages_state(name, dtype):
    found = measure(name, dtype, kv_split_size=64, dequantize="off", **OPTIONS)
    print(name, dtype, found)
    for path in ("prefill", "decode"):
        assert found[path]["max"] < MOST[dtype], path
