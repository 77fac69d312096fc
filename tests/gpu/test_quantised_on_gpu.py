"""Quantised weights on a GPU: the answers of the dequantised weights, in the memory of few bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from rjax import LLM, SamplingParams
from rjax.models import Decoder, config_from_dict
from rjax.models.families import FAMILIES
from rjax.models.loading.pieces import tensor_shape
from tests.models.quantised_files import write_quantised

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

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
LARGE = SHAPES | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
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
        dequantize="off",  # which is the default for so small a model
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
    errors = np.abs(np.subtract(logprobs(quantised), logprobs(plain)))
    assert np.quantile(errors, 0.98) < TOLERANCE
    assert errors.max() < 2 * TOLERANCE


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """An unquantised checkpoint of 730 MB in bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    config = config_from_dict(LARGE)
    draw = np.random.default_rng(0)
    by_shape: dict[tuple[int, ...], np.ndarray] = {}
    tensors = {}
    for pieces in FAMILIES[config.architecture].weights(config).values():
        for piece in pieces:
            shape = tensor_shape(piece, config)
            if shape not in by_shape:
                drawn = draw.standard_normal(shape, np.float32)
                by_shape[shape] = drawn.astype(ml_dtypes.bfloat16)
            tensors[piece.tensor] = by_shape[shape]
    (folder / "config.json").write_text(json.dumps(LARGE))
    save_file(tensors, folder / "model.safetensors")
    return folder


# In a process of its own: the peak is that of a whole process.
_LOAD = """
import gc, json, sys
from pathlib import Path

import jax
import jax.numpy as jnp

from rjax.models import Decoder, config_from_folder
from rjax.models.loading.blocks import ReusedBuffers
from rjax.models.loading.load import load_weights
from rjax.models.sharding import single_device_mesh

class FewAhead(ReusedBuffers):
    ahead_bytes = 0  # only the next two parameters are in flight

def memory():
    gc.collect()
    return jax.devices()[0].memory_stats()

folder, quantization = Path(sys.argv[1]), sys.argv[2]
config = config_from_folder(folder, quantization)
abstract = Decoder(config, jnp.bfloat16)
jax.block_until_ready(jnp.zeros(8) + 1)  # the device is ready
before = memory()["bytes_in_use"]
model = load_weights(abstract, config, folder, single_device_mesh(), False, FewAhead())
jax.block_until_ready(jax.tree.leaves(model))
after = memory()
print(json.dumps({
    "weights": model.weight_bytes,
    "taken": after["bytes_in_use"] - before,
    "peak": after["peak_bytes_in_use"] - before,
}))
"""


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_quantised_at_loading_takes_the_memory_of_few_bits(quantization, large):
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(large), quantization],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".03"},  # other tests have a share
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    unquantised = Decoder(config_from_dict(LARGE), jnp.bfloat16).weight_bytes
    few_bits = 0.27 if quantization == "int4" else 0.51
    assert found["weights"] < few_bits * unquantised
    assert found["taken"] == pytest.approx(found["weights"], rel=0.02)
    # The unquantised model is never there as a whole.
    assert found["peak"] < unquantised
