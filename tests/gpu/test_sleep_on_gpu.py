"""A GPU's memory while an engine sleeps: what JAX has in use, and what the driver has given."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from rjax import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
SLACK = 2**21  # bytes of results, masks and rounded sizes
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
OPTIONS = {
    "use_tqdm": False,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 2048,
    "num_pages": 512,
    "swap_space": 0,
}
pytestmark = pytest.mark.gpu


def weights_and_pool(llm: LLM) -> tuple[int, int]:
    """Bytes of the weights, and of the pools, states and slots."""
    worker = llm.engine._worker
    of_state = jax.tree.leaves(worker._state.arrays)
    return sum(x.nbytes for x in worker._runner.leaves), sum(x.nbytes for x in of_state)


def in_use() -> int:
    stats = jax.devices()[0].memory_stats()
    assert stats is not None
    return stats["bytes_in_use"]


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize("level", [1, 2])
def test_weights_and_pools_are_given_back(level, quantization):
    with LLM(quantization=quantization, dequantize="off", **OPTIONS) as llm:
        prompts = ["Who?", "Where is the nearest town?"]
        wanted = [o.outputs[0].token_ids for o in llm.generate(prompts, PARAMS)]
        weights, pool = weights_and_pool(llm)
        assert min(weights, pool) > 2 * SLACK
        awake = in_use()
        llm.sleep(level)
        asleep = in_use()  # results of the last steps are gone too
        assert asleep <= awake - weights - pool + SLACK
        llm.wake_up(["weights"])  # the allocator rounds up
        assert asleep + weights <= in_use() <= awake - pool + SLACK
        llm.wake_up(["kv_cache"])
        assert asleep + weights + pool <= in_use() <= awake + SLACK
        progress = llm.engine.compile_progress()
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, PARAMS)] == wanted
        assert llm.engine.compile_progress().waits == progress.waits


_PROGRAM = """
import json, subprocess, sys
from rjax import LLM
from tests.gpu.test_sleep_on_gpu import OPTIONS, PARAMS, weights_and_pool

def used():
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20

llm = LLM(**OPTIONS | {"num_pages": 8192})
llm.generate("Who?", PARAMS)
found = {"bytes": sum(weights_and_pool(llm)), "awake": used()}
llm.sleep()
found["asleep"] = used()
llm.wake_up()
found["again"] = used()
print(json.dumps(found))
"""


@pytest.mark.parametrize("allocator", ["platform", "default"])
def test_nvidia_smi_shows_a_sleep_without_an_allocator_of_its_own(allocator):
    """Nothing else may allocate on the GPU meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ
        | {"XLA_PYTHON_CLIENT_ALLOCATOR": allocator, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if allocator == "platform":
        assert found["awake"] - found["asleep"] > 0.95 * found["bytes"]
        assert found["again"] - found["asleep"] > 0.95 * found["bytes"]
    else:  # JAX keeps what it has taken, and the driver takes a little more
        sizes = [found[when] for when in ("awake", "asleep", "again")]
        assert max(sizes) - min(sizes) <= 16 * SLACK < found["bytes"] / 4
