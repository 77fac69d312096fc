"""The torch half of bench.compare_torch; runs in a process of its own and imports nothing of ours.

    python bench/torch_side.py make TASK.json      # a model folder with random weights
    python bench/torch_side.py measure TASK.json   # logits, then times

Methods: "generate" is transformers' generate with a static cache, "compiled" the same with its
forward compiled, "continuous" transformers' continuous batching, "hand" a decode step written here:
fused projections, in-place KV, SDPA, on a GPU replayed as one CUDA graph.
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
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def prompts(task: dict, batch: int, prefix: int) -> list[list[int]]:
    """The same token ids as the other half draws."""
    rng = np.random.default_rng(task["seed"])
    shared = rng.integers(0, task["vocab_size"], prefix).tolist()
    own = rng.integers(0, task["vocab_size"], (batch, task["own"])).tolist()
    return [shared + row for row in own]


def make(task: dict) -> None:
    """Random weights in the form that both halves load."""
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
    """Seconds of one call, everything it started included."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


class Generate:
    """transformers' own loop with a static cache."""

    def __init__(self, model, task: dict, compiled: bool) -> None:
        self.model, self.steps, self.compiled = model, task["steps"], compiled

    def seconds(self, rows: list[list[int]]) -> float:
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

    def seconds(self, rows: list[list[int]]) -> float:
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


class Hand:
    """A decode step for Llama-like models as fast as torch's own operations allow."""

    def __init__(self, model, task: dict) -> None:
        config = model.config
        self.model, self.steps = model, task["steps"]
        self.N, self.K = config.num_attention_heads, config.num_key_value_heads
        self.H = getattr(config, "head_dim", None) or config.hidden_size // self.N
        self.eps = config.rms_norm_eps
        self.layers = [self._layer(layer) for layer in model.model.layers]

    @staticmethod
    def _layer(layer) -> dict:
        attention, mlp = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        biased = parts[0].bias is not None
        return {
            "norm": layer.input_layernorm.weight,
            "qkv": torch.cat([p.weight for p in parts]),
            "bias": torch.cat([p.bias for p in parts]) if biased else None,
            "out": attention.o_proj.weight,
            "mlp_norm": layer.post_attention_layernorm.weight,
            "up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "down": mlp.down_proj.weight,
        }

    def step(self, tokens, position, pools):
        """Logits of one token for each row, its KV written at ``position`` (a device tensor)."""
        B = tokens.shape[0]
        x = F.embedding(tokens, self.model.model.embed_tokens.weight)
        cos, sin = self.model.model.rotary_emb(x[:, None], position.expand(B, 1))
        cos, sin = cos[:, 0, None], sin[:, 0, None]
        for layer, (keys, values) in zip(self.layers, pools, strict=True):
            h = F.rms_norm(x, (x.shape[-1],), layer["norm"], self.eps)
            qkv = F.linear(h, layer["qkv"], layer["bias"]).view(B, -1, self.H)
            q, k, v = qkv.split([self.N, self.K, self.K], dim=1)
            q, k = (t * cos + _halves(t) * sin for t in (q, k))
            keys.index_copy_(2, position, k.unsqueeze(2).contiguous())
            values.index_copy_(2, position, v.unsqueeze(2).contiguous())
            # A group's queries as rows against their one KV head: no head is repeated in memory.
            q = q.reshape(B, self.K, self.N // self.K, self.H)
            a = F.scaled_dot_product_attention(q, keys, values)
            x = x + F.linear(a.reshape(B, -1), layer["out"])
            h = F.rms_norm(x, (x.shape[-1],), layer["mlp_norm"], self.eps)
            gate, up = F.linear(h, layer["up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        x = F.rms_norm(x, (x.shape[-1],), self.model.model.norm.weight, self.eps)
        return F.linear(x, self.model.lm_head.weight)

    def filled(self, rows: list[list[int]]) -> list:
        """KV of all tokens but the last, by the model's own prefill, a few rows at a time."""
        B, length = len(rows), len(rows[0])
        weight = self.model.lm_head.weight
        pools = [
            tuple(
                torch.zeros(B, self.K, length, self.H, device=DEVICE, dtype=weight.dtype)
                for _ in range(2)
            )
            for _ in self.layers
        ]
        group = max(1, 32768 // length)
        for at in range(0, B, group):
            ids = torch.tensor([row[:-1] for row in rows[at : at + group]], device=DEVICE)
            cache = self.model(ids, use_cache=True, logits_to_keep=1).past_key_values
            for (keys, values), layer in zip(pools, cache.layers, strict=True):
                keys[at : at + group, :, : length - 1] = layer.keys
                values[at : at + group, :, : length - 1] = layer.values
        return pools

    def logits(self, rows: list[list[int]]):
        """Of what follows each row, by prefill and one step."""
        tokens = torch.tensor([row[-1] for row in rows], device=DEVICE)
        position = torch.tensor([len(rows[0]) - 1], device=DEVICE)
        return self.step(tokens, position, self.filled(rows))

    def seconds(self, rows: list[list[int]]) -> float:
        """A step at the full context, its token fed back into it."""
        tokens = torch.tensor([row[-1] for row in rows], device=DEVICE)
        position = torch.tensor([len(rows[0]) - 1], device=DEVICE)
        pools = self.filled(rows)

        def once() -> None:
            tokens.copy_(self.step(tokens, position, pools).argmax(-1))

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


def _halves(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


METHODS = {
    "generate": lambda model, task: Generate(model, task, False),
    "compiled": lambda model, task: Generate(model, task, True),
    "continuous": Continuous,
    "hand": Hand,
}


@torch.no_grad()  # inference mode would not reach the threads of continuous batching
def measure(task: dict) -> dict:
    """Logits of the check prompts, then every method at every point."""
    dtype = getattr(torch, task["dtype"])
    model: Any = AutoModelForCausalLM.from_pretrained(task["folder"], dtype=dtype)
    model = model.to(DEVICE).eval()
    # A random model says end-of-sequence as readily as anything; every answer has full length.
    model.generation_config = GenerationConfig(pad_token_id=0)
    check = prompts(task, 4, task["check_tokens"])
    ids = torch.tensor(check, device=DEVICE)
    np.save(task["logits"], model(ids).logits[:, -1].float().cpu().numpy())
    np.save(task["hand_logits"], Hand(model, task).logits(check).float().cpu().numpy())
    rows = []
    for name in task["methods"]:
        for batch, prefix in task["points"]:
            rows.append(point(model, task, name, batch, prefix))
            print(f"torch {name}: {rows[-1]}", file=sys.stderr, flush=True)
    return {"rows": rows, "torch": torch.__version__}


def point(model, task: dict, name: str, batch: int, prefix: int) -> dict:
    """One method at one point; what keeps it from running is told in place of a time."""
    row = {"system": f"torch, {name}", "batch": batch, "prefix": prefix, "own": task["own"]}
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = METHODS[name](model, task).seconds(prompts(task, batch, prefix))
    except Exception as error:  # a peer that fails at one point is a finding, not an end
        return row | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    row |= {"step_ms": 1e3 * seconds, "tokens_per_s": batch / seconds}
    if ON_GPU:
        row["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def main() -> None:
    """What the command line says."""
    verb, path = sys.argv[1:]
    task = json.loads(Path(path).read_text())
    if verb == "make":
        make(task)
    else:
        Path(task["torch_out"]).write_text(json.dumps(measure(task)))


if __name__ == "__main__":
    main()
