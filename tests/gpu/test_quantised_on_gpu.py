"""Quantised weights on a GPU: the answers of the dequantised weights, in the memory of few bits."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rjax import LLM, SamplingParams
from rjax.models import load_model
from tests.models.quantised_files import write_quantised

pytestmark = pytest.mark.gpu

SHAPES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
FORMATS = ("awq", "gptq", "w4a16-asym", "w8a8", "fp8-dynamic", "deepseek-fp8")
PROMPTS = [[*range(3, 150), i, 7] for i in range(6)] + [[5, 9, 200]]
TOLERANCE = 0.1  # of a logprob: bfloat16 keeps 8 bits, and a fused product may round elsewhere


def logprobs(folder: Path, **options) -> list[float]:
    """The logprobs of the tokens of all prompts, without the first token of each."""
    with LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_num_seqs=8,
        max_model_len=512,
        num_pages=64,
        use_tqdm=False,
        **options,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    found = []
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        places = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        found += [place[token].logprob for place, token in places]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_the_answers_are_those_of_the_dequantised_weights(name, tmp_path):
    quantised, plain = write_quantised(tmp_path, SHAPES, name)
    assert logprobs(quantised) == pytest.approx(logprobs(plain), abs=TOLERANCE)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_quantised_at_loading_takes_the_memory_of_few_bits(quantization, tmp_path):
    _, plain = write_quantised(tmp_path, SHAPES, "w8a8")
    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    loaded = load_model(plain, dtype=jnp.bfloat16, quantization=quantization, progress=False)
    taken = device.memory_stats()["bytes_in_use"] - before
    assert taken == pytest.approx(loaded.model.weight_bytes, rel=0.02)
