"""Quantised weights that an engine holds in the model's dtype."""

import jax.numpy as jnp
import pytest

from rjax.benchmarks.model_shapes import SHAPES
from rjax.build.plan_engine import choose_weights, dequantised_is_faster
from rjax.config import EngineConfig
from rjax.errors import InvalidConfigError
from rjax.models import config_from_dict, with_dequantised_weights
from rjax.models.loading.config import with_quantization
from rjax.sampling import SamplingParams
from tests.models.quantised_files import write_quantised

from .test_quantised_engine import SHAPES as SMALL
from .test_quantised_engine import answers
from .tiny import make_engine, run

H200 = {"compute_capability": 9.0, "memory_bytes": 140 * 10**9, "devices": 1}


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("name", ["awq", "gptq", "deepseek-fp8", "w8a8", "w4a16-asym"])
def test_tokens_are_those_of_the_dequantised_weights(name, tmp_path):
    quantised, plain = write_quantised(tmp_path, SMALL, name, seed=4)
    assert answers(quantised, dequantize="on") == answers(plain)


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_weights_that_would_be_quantised_stay_as_they_are(quantization, tmp_path):
    _, plain = write_quantised(tmp_path, SMALL, "w8a8", seed=4)
    assert answers(plain, quantization=quantization, dequantize="on") == answers(plain)


def test_the_summary_says_so(tmp_path):
    quantised, plain = write_quantised(tmp_path, SMALL, "w8a8")
    for folder, options, how in (
        (quantised, {}, "float32 (dequantised, int8 in the checkpoint), "),
        (plain, {"quantization": "int4"}, "float32 (not quantised to int4), "),
    ):
        engine = make_engine(folder, load_format="auto", dequantize="on", **options)
        assert engine.summary["weights"].startswith(how)
        assert engine.summary["weights"].endswith("GiB: 0.00 GiB more")


@pytest.mark.thorough
def test_random_weights(tmp_path):
    quantised, _ = write_quantised(tmp_path, SMALL, "awq")
    engine = make_engine(quantised, dequantize="on")
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    done = run(engine, [("0", [1, 2, 3], params)])
    assert len(done["0"].outputs[0].token_ids) == 2


def faster(shapes: str, **device) -> bool:
    quantised = with_quantization(config_from_dict(SHAPES[shapes]), "fp8")
    model = with_dequantised_weights(quantised)
    return dequantised_is_faster(model, jnp.dtype(jnp.bfloat16), **(H200 | device))


def test_small_projections_on_hopper():
    assert faster("qwen2.5-0.5b")
    assert not faster("qwen2.5-3b") and not faster("llama-3-8b")
    assert not faster("qwen2.5-0.5b", compute_capability=8.0)
    assert not faster("qwen2.5-0.5b", compute_capability=None)
    assert not faster("qwen2.5-0.5b", memory_bytes=16 * 10**9)  # 6 % of it


def test_the_option():
    model = with_quantization(config_from_dict(SHAPES["qwen2.5-0.5b"]), "fp8")
    for value, held in (("off", True), ("auto", True), ("on", False)):  # a CPU is no Hopper
        config = EngineConfig.from_options({"dequantize": value})
        assert bool(choose_weights(config, model).schemes) == held
    with pytest.raises(InvalidConfigError, match="dequantize is 'maybe'; choose one of auto, on"):
        EngineConfig.from_options({"dequantize": "maybe"})
