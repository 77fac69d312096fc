"""Alternatives in torch for the same batch; runs as a process and imports nothing of rjax.

    python torch_peers.py TASK.json    # writes a JSON line for each result

"sdpa" is the best backend of scaled_dot_product_attention on contiguous KV of each sequence; "flex"
is compiled FlexAttention with the same layout, or with all tokens in one row and a block mask that
shares the prefix. Each is checked against float32 attention, then timed in a CUDA graph over enough
copies of the KV that none is read from the L2 cache.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
CACHE_BYTES = 256 << 20
MOST_BYTES = 24 << 30
TOLERANCE = 1e-2
CALLS = 16  # in one graph
REST = 0.05  # seconds before each series, as in bench/kernels/timing.py


class Batch:
    """One case: P groups of rows with ``shared`` common tokens, followed by unique tokens.

    Attributes:
        q: [B, N, T, H]; T query rows, the last tokens of the context.
        prefix: K and V of the groups, each [P, K, shared, H].
        own: K and V of the rows, each [B, K, longest own, H].
    """

    def __init__(self, case: dict) -> None:
        self.B, self.P, self.T = case["batch"], case["prefixes"], case["queries"]
        self.N, self.K, self.H = case["N"], case["K"], case["H"]
        self.shared = case["shared"]
        self.lengths = torch.tensor(case["own"], device=DEVICE)
        torch.manual_seed(0)
        longest = max(case["own"])
        self.q = self._random(self.B, self.N, self.T)
        self.prefix = [self._random(self.P, self.K, self.shared) for _ in range(2)]
        self.own = [self._random(self.B, self.K, longest) for _ in range(2)]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, self.H, device=DEVICE, dtype=DTYPE)

    @property
    def ragged(self) -> bool:
        return bool((self.lengths != self.lengths.max()).any())

    @property
    def context(self) -> int:
        """Tokens of the longest row."""
        return self.shared + int(self.lengths.max())

    def laid_out(self) -> list[torch.Tensor]:
        """Contiguous K and V of every row, [B, K, context, H]."""
        size = 2 * self.q.element_size() * self.B * self.K * self.context * self.H
        if size > MOST_BYTES:
            raise MemoryError(f"its KV would take {size / 2**30:.0f} GiB")
        rows = self.B // self.P
        return [
            torch.cat([x.repeat_interleave(rows, 0), y], 2)
            for x, y in zip(self.prefix, self.own, strict=True)
        ]

    def visible(self) -> torch.Tensor:
        """[B, context], for one query row."""
        at = torch.arange(self.context, device=DEVICE)
        return at < self.shared + self.lengths[:, None]

    def packed(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """K and V of every distinct token once, [1, K, X, H], and the owner of each token.

        The owner is row b, -1 - p for the whole group p, or B for padding.
        """
        longest = int(self.lengths.max())
        group = -1 - torch.arange(self.P, device=DEVICE).repeat_interleave(self.shared)
        rows = torch.arange(self.B, device=DEVICE)[:, None].expand(self.B, longest)
        live = torch.arange(longest, device=DEVICE) < self.lengths[:, None]
        owner = torch.cat([group, torch.where(live, rows, self.B).reshape(-1)])
        kv = [
            torch.cat([z.transpose(0, 1).reshape(1, self.K, -1, self.H) for z in (x, y)], 2)
            for x, y in zip(self.prefix, self.own, strict=True)
        ]
        return kv, owner

    def error(self, out: torch.Tensor) -> float:
        """Relative error of a few rows of [B, N, T, H] against float32 attention."""
        off, size = 0.0, 0.0
        for b in torch.linspace(0, self.B - 1, min(4, self.B)).long().tolist():
            p = b // (self.B // self.P)
            k, v = (
                torch.cat([x[p], y[b, :, : int(self.lengths[b])]], 1).float()
                for x, y in zip(self.prefix, self.own, strict=True)
            )
            k, v = (x.repeat_interleave(self.N // self.K, 0) for x in (k, v))
            for t in sorted({0, self.T // 2, self.T - 1}):
                seen = k.shape[1] - (self.T - 1 - t)
                scores = torch.einsum("nh,nch->nc", self.q[b, :, t].float(), k[:, :seen])
                weights = torch.softmax(scores * self.H**-0.5, -1)
                want = torch.einsum("nc,nch->nh", weights, v[:, :seen])
                off += float((out[b, :, t].float() - want).square().sum())
                size += float(want.square().sum())
        return (off / size) ** 0.5


Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def sdpa(batch: Batch) -> Iterator[tuple[str, list[torch.Tensor], Call]]:
    kv = batch.laid_out()
    causal = batch.T > 1
    mask = batch.visible()[:, None, None] if batch.ragged else None
    for backend in (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ):
        if backend == SDPBackend.MATH and ON_GPU and kv[0].nbytes > 1 << 30:
            continue  # it copies the KV for every query head

        def call(q, k, v, backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
                )

        yield backend.name.lower(), kv, call


def flex(batch: Batch) -> Iterator[tuple[str, list[torch.Tensor], Call]]:
    attend = torch.compile(flex_attention, dynamic=False) if ON_GPU else flex_attention

    def laid(q, k, v, mask):
        return attend(q, k, v, block_mask=mask, enable_gqa=True)

    if batch.T > 1:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, batch.T, batch.context, device=DEVICE
        )
        yield "causal", batch.laid_out(), lambda q, k, v: laid(q, k, v, mask)
        return
    kv, owner = batch.packed()
    rows = batch.B // batch.P

    def sees(b, h, i, j):
        return (owner[j] == i) | (owner[j] == -1 - i // rows)

    shared = create_block_mask(sees, None, None, batch.B, owner.shape[0], device=DEVICE)

    def together(q, k, v):
        return laid(q[:, :, 0].transpose(0, 1)[None], k, v, shared)[0].transpose(0, 1)[:, :, None]

    yield "block mask", kv, together
    mask = None
    if batch.ragged:
        ends = batch.lengths + batch.shared
        mask = create_block_mask(
            lambda b, h, i, j: j < ends[b], batch.B, None, 1, batch.context, device=DEVICE
        )
    yield "laid out", batch.laid_out(), lambda q, k, v: laid(q, k, v, mask)


PEERS = {"sdpa": sdpa, "flex": flex}


def seconds_per_call(call: Call, q: torch.Tensor, kv: list[torch.Tensor]) -> float:
    """Device time in short bursts, the median of five slopes; calls cycle through KV copies."""
    copies = min(CALLS, -(-CACHE_BYTES // (2 * kv[0].nbytes))) if ON_GPU else 1
    sets = [kv] + [[x.clone() for x in kv] for _ in range(copies - 1)]

    def calls() -> None:
        for i in range(CALLS if ON_GPU else 1):
            call(q, *sets[i % copies])

    run = calls
    if ON_GPU:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        run = graph.replay
    count = CALLS if ON_GPU else 1

    def timed(repeats: int) -> float:
        if ON_GPU:
            torch.cuda.synchronize()
            time.sleep(REST)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    timed(2)
    slopes = sorted((timed(6) - timed(2)) / 4 for _ in range(5))
    return slopes[2] / count


def measure(case: dict, peer: str) -> list[dict]:
    """A line for each variant of the peer, with its time or error."""
    named = {"case": case["name"], "peer": peer}
    found: list[dict] = []
    torch._dynamo.reset()
    if ON_GPU:
        torch.cuda.empty_cache()
    try:
        batch = Batch(case)
        ways = PEERS[peer](batch)
        while True:
            try:
                name, kv, call = next(ways)
            except StopIteration:
                break
            try:
                error = batch.error(call(batch.q, *kv))
                if not error < TOLERANCE:
                    raise ValueError(f"wrong result, relative error {error:.1e}")
                us = 1e6 * seconds_per_call(call, batch.q, kv)
                found.append(named | {"variant": name, "us": us, "error": error})
            except Exception as error:
                found.append(named | {"variant": name, "failed": reason(error)})
    except Exception as error:
        found.append(named | {"variant": "", "failed": reason(error)})
    return found


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    start = time.monotonic()
    with Path(task["out"]).open("w") as out, torch.no_grad():
        print(json.dumps({"torch": torch.__version__}), file=out, flush=True)
        for case in task["cases"]:
            for peer in PEERS:
                if time.monotonic() - start > task["seconds"]:
                    late = f"{task['seconds']:g} s were over (--seconds)"
                    lines = [{"case": case["name"], "peer": peer, "variant": "", "failed": late}]
                else:
                    lines = measure(case, peer)
                for line in lines:
                    print(json.dumps(line), file=out, flush=True)
                    took = f"{line['us']:.1f} us" if "us" in line else line["failed"]
                    print(f"{line['case']:34s} {peer} {line['variant']}: {took}", flush=True)


if __name__ == "__main__":
    main()
