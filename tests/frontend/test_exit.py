"""A program that ends without closing its engine ends as any other."""

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio
import sys

from rjax import AsyncLLM, SamplingParams

kept = []


async def main():
    llm = AsyncLLM(max_model_len=128, max_num_seqs=2, num_pages=8, warmup="off")
    if sys.argv[1] != "dropped":
        kept.append(llm)
    params = SamplingParams(max_tokens=90 if sys.argv[1] == "running" else 2, ignore_eos=True)
    async for output in llm.generate("Once upon a time", params):
        if sys.argv[1] == "running":
            break
    print(len(output.outputs[0].token_ids) > 0)


asyncio.run(main())
"""


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("how", ["dropped", "idle", "running"])
def test_an_async_llm_that_is_not_closed(how):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
    assert "terminate" not in ended.stderr
