"""The torch half of bench.compare_torch; runs in a separate process and imports nothing of rjax.

    python torch_side.py make TASK.json      # a model folder with random weights
    python torch_side.py measure TASK.json   # logits, then times

Methods: "generate" is transformers' generate with a static cache, "compiled" the same with its
forward compiled, "continuous" transformers' continuous batching. "hand" is a decode step written
here: fused projections, in-place KV, SDPA, on a GPU replayed as one CUDA graph; "flex" is that with
FlexAttention, and with the operations between the GEMMs compiled; "shared" also stores the shared
prefix once and reads it once for all rows. Only these three run with quantised
weights: transformers has no quantisation of its own.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch_weights import fused_layer, linear, quantised_layers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def prompts(task: dict, batch: int, prefix: int) -> list[list[int]]:
    """The same token ids as in the rjax half."""
    rng = np.random.default_rng(task["seed"])
    shared = rng.integers(0, task["vocab_size"], prefix).tolist()
    own = rng.integers(0, task["vocab_size"], (batch, task["own"])).tolist()
    return [shared + row for row in own]


def make(task: dict) -> None:
    """Write random weights in a format that both halves load."""
    config = AutoConfig.from_pretrained(task["folder"])
    torch.manual_seed(task["seed"])
    dtype = getattr(torch, task["dtype"])
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(task["folder"])


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def timed(run) -> float:
    """Seconds of one call, until the device is done."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


class Generate:
    """transformers' own loop with a static cache."""

    def __init__(self, model, task: dict, compiled: bool) -> None:
        self.model, self.steps, self.compiled = model, task["steps"], compiled

    def seconds(self, rows: list[list[int]], prefix: int) -> float:
        del prefix
        ids = torch.tensor(rows, device=DEVICE)

        def run(count: int) -> None:
            config = GenerationConfig(
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                cache_implementation="static",
                disable_compile=not self.compiled,
                pad_token_id=0,
            )
            self.model.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))

        return slope(run, self.steps)


class Continuous:
    """transformers' continuous batching."""

    def __init__(self, model, task: dict) -> None:
        self.model, self.steps = model, task["steps"]

    def seconds(self, rows: list[list[int]], prefix: int) -> float:
        del prefix
        if not ON_GPU:
            raise RuntimeError("transformers' continuous batching needs a GPU")

        def run(count: int) -> None:
            config = GenerationConfig(
                max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
            found = self.model.generate_batch(rows, generation_config=config, progress_bar=False)
            lengths = [len(output.generated_tokens) for output in found.values()]
            if lengths != [count] * len(rows):
                raise RuntimeError(f"{len(lengths)} answers of {len(rows)}, lengths {lengths[:3]}")

        return slope(run, self.steps)


def slope(run, steps: int) -> float:
    """Seconds of a step: the difference between a long and a short run, prefill cancelled."""
    run(steps + 1)  # warms up
    long = statistics.median(timed(lambda: run(steps + 1)) for _ in range(3))
    short = statistics.median(timed(lambda: run(1)) for _ in range(3))
    if long <= short:
        raise RuntimeError(f"{steps} steps more took no longer: {short:.3g} s and {long:.3g} s")
    return (long - short) / steps


def rotated_qkv(x, weights: tuple, eps, cos, sin, heads: tuple[int, int, int]):
    """Queries, keys and values; queries and keys are normed, if they have norms, and rotated."""
    (weight, bias, norm, head_norms), (N, K, H) = weights, heads
    h = F.rms_norm(x, (x.shape[-1],), norm, eps)
    qkv = linear(h, weight, bias).view(x.shape[0], -1, H)
    q, k, v = qkv.split([N, K, K], dim=1)
    if head_norms is not None:
        q, k = (F.rms_norm(t, (H,), w, eps) for t, w in zip((q, k), head_norms, strict=True))
    q, k = (t * cos + _halves(t) * sin for t in (q, k))
    return q, k.unsqueeze(2).contiguous(), v.unsqueeze(2).contiguous()


def rest_of_layer(x, a, out, norm, eps, up, down):
    """Residual after output projection and feed-forward."""
    x = x + linear(a.reshape(x.shape[0], -1), out)
    h = F.rms_norm(x, (x.shape[-1],), norm, eps)
    gate, up = linear(h, up).chunk(2, dim=-1)
    return x + linear(F.silu(gate) * up, down)


def sdpa(q, shared, own):
    """Attention of the rows of one KV head; all KV is in ``own``."""
    del shared
    return F.scaled_dot_product_attention(q, *own)


def flex(q, shared, own):
    """The same by FlexAttention."""
    del shared
    return flex_attention(q, *own)


def flex_shared(q, shared, own):
    """Attention to ``shared`` for all sequences' rows at once, then to ``own``, and their merge."""
    B, K, G, H = q.shape
    together = q.transpose(0, 1).reshape(1, K, B * G, H)
    first, aux = flex_attention(together, *shared, return_aux=AuxRequest(lse=True))
    first, weight = (t.view(K, B, G, -1).transpose(0, 1) for t in (first, aux.lse))
    second, aux = flex_attention(q, *own, return_aux=AuxRequest(lse=True))
    part = torch.sigmoid(weight - aux.lse.unsqueeze(-1))
    return (first * part + second * (1 - part)).to(q.dtype)


def _halves(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


class Hand:
    """A fast decode step for Llama-like models, made of torch operations.

    Args:
        model: the model.
        task: of the benchmark.
        attend: the attention.
        layers: fused weights, if they are not the model's own.
    """

    def __init__(self, model, task: dict, attend=sdpa, layers: list[dict] | None = None) -> None:
        config = model.config
        self.model, self.steps = model, task["steps"]
        self.N, self.K = config.num_attention_heads, config.num_key_value_heads
        self.H = getattr(config, "head_dim", None) or config.hidden_size // self.N
        self.eps = config.rms_norm_eps
        self.layers = layers or [fused_layer(layer) for layer in model.model.layers]
        self.shares = attend is flex_shared
        self.before, self.attend, self.after = rotated_qkv, attend, rest_of_layer
        if ON_GPU and attend is not sdpa:
            torch._dynamo.config.recompile_limit = 64
            # KV is written outside: a compiled function might copy all of it.
            self.before, self.attend, self.after = (
                torch.compile(f, dynamic=False) for f in (rotated_qkv, attend, rest_of_layer)
            )

    def step(self, tokens, position, slot, pools):
        """Logits of one token for each row at ``position``, its KV written at ``slot`` (both are
        device tensors; they differ where the shared tokens lie apart)."""
        B = tokens.shape[0]
        x = F.embedding(tokens, self.model.model.embed_tokens.weight)
        cos, sin = self.model.model.rotary_emb(x[:, None], position.expand(B, 1))
        cos, sin = cos[:, 0, None], sin[:, 0, None]
        heads = (self.N, self.K, self.H)
        for layer, (shared, own) in zip(self.layers, pools, strict=True):
            weights = tuple(layer[name] for name in ("qkv", "bias", "norm", "head_norms"))
            q, k, v = self.before(x, weights, self.eps, cos, sin, heads)
            own[0].index_copy_(2, slot, k)
            own[1].index_copy_(2, slot, v)
            # The queries of a group are rows of one matmul with their KV head; no head is repeated.
            a = self.attend(q.reshape(B, self.K, self.N // self.K, self.H), shared, own)
            x = self.after(
                x, a, layer["out"], layer["mlp_norm"], self.eps, layer["up"], layer["down"]
            )
        x = F.rms_norm(x, (x.shape[-1],), self.model.model.norm.weight, self.eps)
        return F.linear(x, self.model.lm_head.weight)

    def filled(self, rows: list[list[int]], shared: int) -> list:
        """KV of all tokens but the last, by the model's own prefill, a few rows at a time: of each
        layer the shared tokens' (of length 0 where they are not kept apart), and the rows' own."""
        B, length = len(rows), len(rows[0])
        dtype = self.model.lm_head.weight.dtype

        def empty(rows: int, tokens: int) -> tuple:
            shape = (rows, self.K, tokens, self.H)
            return tuple(torch.zeros(shape, device=DEVICE, dtype=dtype) for _ in range(2))

        pools = [(empty(1, shared), empty(B, length - shared)) for _ in self.layers]
        group = max(1, 32768 // length)
        for at in range(0, B, group):
            ids = torch.tensor([row[:-1] for row in rows[at : at + group]], device=DEVICE)
            cache = self.model(ids, use_cache=True, logits_to_keep=1).past_key_values
            for (first, own), layer in zip(pools, cache.layers, strict=True):
                for i, found in enumerate((layer.keys, layer.values)):
                    first[i][:] = found[:1, :, :shared]
                    own[i][at : at + group, :, : length - 1 - shared] = found[:, :, shared:]
        return pools

    def begin(self, rows: list[list[int]], prefix: int) -> tuple:
        """Arguments of ``step`` at the end of these rows."""
        shared = prefix if self.shares else 0
        last = len(rows[0]) - 1
        tokens = torch.tensor([row[-1] for row in rows], device=DEVICE)
        position, slot = (torch.tensor([at], device=DEVICE) for at in (last, last - shared))
        return tokens, position, slot, self.filled(rows, shared)

    def logits(self, rows: list[list[int]], prefix: int):
        """Logits of the next token of each row, from prefill and one step."""
        return self.step(*self.begin(rows, prefix))

    def seconds(self, rows: list[list[int]], prefix: int) -> float:
        """A step at the full context, its token fed back into it."""
        if self.shares and not prefix:
            raise RuntimeError("nothing is shared")
        tokens, *where = self.begin(rows, prefix)

        def once() -> None:
            tokens.copy_(self.step(tokens, *where).argmax(-1))

        once()
        run = once
        if ON_GPU:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    once()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                once()
            run = graph.replay

        def many() -> None:
            for _ in range(self.steps):
                run()

        many()
        many()
        return statistics.median(timed(many) for _ in range(5)) / self.steps


METHODS = {
    "generate": lambda model, task, layers: Generate(model, task, False),
    "compiled": lambda model, task, layers: Generate(model, task, True),
    "continuous": lambda model, task, layers: Continuous(model, task),
    "hand": lambda model, task, layers: Hand(model, task, sdpa, layers),
    "flex": lambda model, task, layers: Hand(model, task, flex, layers),
    "shared": lambda model, task, layers: Hand(model, task, flex_shared, layers),
}


@torch.no_grad()  # inference mode does not apply to the threads of continuous batching
def measure(task: dict) -> None:
    """Logits of the check prompts, then every method at every point, each saved at once."""
    dtype = getattr(torch, task["dtype"])
    model: Any = AutoModelForCausalLM.from_pretrained(task["folder"], dtype=dtype)
    model = model.to(DEVICE).eval()
    # A random model may generate EOS; ignore it, so that every answer has full length.
    model.generation_config = GenerationConfig(pad_token_id=0)
    layers, missing, scheme = None, None, task["quantization"]
    if scheme is not None:
        try:
            layers = quantised_layers(model, scheme)
        except RuntimeError as error:
            missing = f"not available: {_told(error)}"
    check = prompts(task, 4, task["check_tokens"])
    ids = torch.tensor(check, device=DEVICE)
    right = model(ids).logits[:, -1].float()
    np.save(task["logits"], right.cpu().numpy())
    if missing is None:
        try:
            hand = Hand(model, task, sdpa, layers).logits(check, task["check_tokens"])
            np.save(task["hand_logits"], hand.float().cpu().numpy())
        except RuntimeError as error:
            if scheme is None:
                raise
            missing = f"not available: {_told(error)}"
    rows = []
    for name in task["methods"]:
        wrong = missing or wrong_logits(model, layers, task, name, check, right)
        for batch, prefix in task["points"]:
            row = {"system": f"torch, {name}", "batch": batch, "prefix": prefix, "own": task["own"]}
            if wrong is not None:
                row["failed"] = wrong
            elif time.time() > task["until"]:
                row["failed"] = "left out: no time"
            else:
                row |= point(model, layers, task, name, batch, prefix)
            rows.append(row)
            print(f"torch {name}: {row}", file=sys.stderr, flush=True)
            found = {"rows": rows, "torch": torch.__version__}
            Path(task["torch_out"]).write_text(json.dumps(found))


def wrong_logits(
    model, layers: list[dict] | None, task: dict, name: str, rows: list[list[int]], right
) -> str | None:
    """Error of a method's logits, or None; only for the decode steps of this file."""
    try:
        method = METHODS[name](model, task, layers)
        if not isinstance(method, Hand) or time.time() > task["until"]:
            return None
        found = method.logits(rows, task["check_tokens"]).float()
        error = float((found - right).norm() / right.norm())
    except Exception as error:
        return _told(error)
    return None if error <= task["most_error"] else f"its logits are wrong by {error:.1e}"


def point(model, layers: list[dict] | None, task: dict, name: str, batch: int, prefix: int) -> dict:
    """Time one method at one point; the row has an error if it does not run."""
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        method = METHODS[name](model, task, layers)
        seconds = method.seconds(prompts(task, batch, prefix), prefix)
    except Exception as error:  # a failure of a peer is recorded, and the run continues
        return {"failed": _told(error)}
    row = {"step_ms": 1e3 * seconds, "tokens_per_s": batch / seconds}
    if ON_GPU and layers is None:  # else the dequantised model is there too
        row["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def main() -> None:
    """Run the command."""
    verb, path = sys.argv[1:]
    task = json.loads(Path(path).read_text())
    if verb == "make":
        make(task)
    else:
        measure(task)


if __name__ == "__main__":
    main()
