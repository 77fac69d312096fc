"""torch's grouped product on the experts of a layer; a process that imports nothing of rjax.

    python torch_experts.py TASK.json    # [[name, J, X, D, I, T], ...]

Prints [name, us, failure] as JSON for each case: both products and SwiGLU between them, on rows
that are sorted by expert, in a CUDA graph of calls with different routings.
"""

import json
import sys
import time
from pathlib import Path

import torch

CALLS = 8
REST = 0.05  # seconds before each series, as in bench/kernels/timing.py


def measure(J: int, X: int, D: int, width: int, T: int) -> float:
    """Microseconds of one call."""
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    rows = torch.randn(T * X, D, **options)
    up = torch.randn(J, D, 2 * width, **options) * D**-0.5
    down = torch.randn(J, width, D, **options) * width**-0.5
    offsets = []
    for _ in range(CALLS):
        chosen = torch.rand(T, J, device="cuda").argsort(1)[:, :X].reshape(-1)
        offsets.append(torch.bincount(chosen, minlength=J).cumsum(0).int())

    def call(ends: torch.Tensor) -> torch.Tensor:
        both = torch._grouped_mm(rows, up, offs=ends)
        hidden = torch.nn.functional.silu(both[:, :width]) * both[:, width:]
        return torch._grouped_mm(hidden, down, offs=ends)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(offsets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for ends in offsets:
            call(ends)

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
    return 1e6 * slopes[2] / CALLS


def main() -> None:
    with torch.no_grad():
        for name, *shape in json.loads(Path(sys.argv[1]).read_text()):
            try:
                print(json.dumps([name, measure(*shape), None]), flush=True)
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                print(json.dumps([name, None, text]), flush=True)


if __name__ == "__main__":
    main()
