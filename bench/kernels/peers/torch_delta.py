"""flash-linear-attention's Triton kernels of the gated delta rule; imports nothing of rjax.

    python torch_delta.py TASK.json    # [[name, seqs, tokens, key heads, value heads, dim, calls]]

Prints [name, us, failure] as JSON for each case: `fused_recurrent_gated_delta_rule` for one token a
sequence, `chunk_gated_delta_rule` for more, with initial and final states in float32, in a CUDA
graph of calls on different data. The first line is the version of fla-core.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

REST = 0.05  # seconds before each series, as in bench/kernels/timing.py


def measure(B: int, T: int, K: int, N: int, H: int, calls: int) -> float:
    """Microseconds of one call."""
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    sets = []
    for _ in range(calls):
        q, k = (torch.randn(B, T, K, H, **options) for _ in range(2))
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        v = torch.randn(B, T, N, H, **options)
        g = -0.1 * torch.randn(B, T, N, device="cuda").abs()
        beta = torch.rand(B, T, N, device="cuda")
        state = 0.3 * torch.randn(B, N, H, H, device="cuda")
        sets.append({"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state})
    run = fused_recurrent_gated_delta_rule if T == 1 else chunk_gated_delta_rule

    def call(given: dict) -> None:
        run(**given, output_final_state=True)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):  # tunes
            call(sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for given in sets:
            call(given)

    def timed(repeats: int) -> float:
        torch.cuda.synchronize()
        time.sleep(REST)
        start = time.perf_counter()
        for _ in range(repeats):
            graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    timed(2)
    slopes = sorted((timed(6) - timed(2)) / 4 for _ in range(5))
    return 1e6 * slopes[2] / calls


def main() -> None:
    print(json.dumps(importlib.metadata.version("fla-core")), flush=True)
    with torch.no_grad():
        for name, *shape in json.loads(Path(sys.argv[1]).read_text()):
            try:
                print(json.dumps([name, measure(*shape), None]), flush=True)
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                print(json.dumps([name, None, text]), flush=True)


if __name__ == "__main__":
    main()
