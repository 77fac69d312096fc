"""Kernels that start before those that they depend on have ended: the bits of an engine stay.

Each engine answers in a process of its own, with XLA's programmatic dependent launch and without.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.gpu

CASES = {
    "rows": {},
    "fp8": {"quantization": "fp8"},
    "int4": {"quantization": "int4"},
    "one row": {"count": 1},
    "one row of fp8": {"quantization": "fp8", "count": 1},
    "two GPUs": {"tensor_parallel_size": 2},
}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Without autotuning, which may find other GEMMs for the logits in another process.
_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_pdl={on} --xla_gpu_enable_pdl_launch={on}"

_PROGRAM = """
import json, sys
import numpy as np
from rjax import LLM, SamplingParams

path, options = sys.argv[1], json.loads(sys.argv[2])
count = options.pop("count", 32)
llm = LLM(
    model=path, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", backend="mosaic",
    max_num_seqs=32, max_model_len=1024, num_pages=512, use_tqdm=False, **options,
)
draw = np.random.default_rng(5)
stem = draw.integers(3, 4000, 320).tolist()
prompts = [stem + draw.integers(3, 4000, int(n)).tolist() for n in draw.integers(1, 90, count)]
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=5)
for output in llm.generate(prompts, params, use_tqdm=False):
    [answer] = output.outputs
    logprobs = [sorted((t, e.logprob.hex()) for t, e in row.items()) for row in answer.logprobs]
    print("answer", json.dumps([list(answer.token_ids), logprobs]))
"""


def answers(path: Path, options: dict, on: str) -> list[str]:
    environment = os.environ | {
        "XLA_FLAGS": _FLAGS.format(on=on),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-c", _PROGRAM, str(path), json.dumps(options)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
    return [line for line in found.stdout.splitlines() if line.startswith("answer")]


@pytest.mark.parametrize("name", CASES)
def test_an_engine_has_the_same_bits_with_early_starts(name, tmp_path):
    options = CASES[name]
    if jax.device_count() < options.get("tensor_parallel_size", 1):
        pytest.skip("one GPU")
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    early = answers(tmp_path, options, "true")
    assert len(early) == options.get("count", 32)
    assert early == answers(tmp_path, options, "false")
    assert early == answers(tmp_path, options, "true")
