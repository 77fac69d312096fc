"""What engines answered when it was recorded, bit for bit: for changes that must change nothing.

    python -m tests.engine.recorded     # record again, where a change of the bits is meant

XLA computes with the instructions that a CPU has, so bits are compared on the kind of machine that
recorded them, and values within rounding elsewhere.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rjax.build.engine_builder import build_engine
from rjax.config import EngineConfig
from rjax.models import BUNDLED_MODEL
from rjax.sampling import SamplingParams
from tests import quick_compilation

TESTS = Path(__file__).parents[1]
FILE = TESTS / "golden" / "recorded.json"
FAMILIES = (
    "llama_g1_h80_tied_biases",
    "mistral_g8_h64_window",
    "ministral_g2_h32_layer_types",
    "opt_h64_tied",
    "phi3_g7_h80_partial_window",
    "qwen2_g7_h64",
    "qwen3_g8_h128_tied",
)
MODELS = {"bundled": BUNDLED_MODEL} | {name: TESTS / "golden/models" / name for name in FAMILIES}
RELAY = (True, False, "auto")


def machine() -> dict[str, str]:
    """What decides the bits besides the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line.partition(":")[2] for line in lines if line.startswith("flags"))
    wide = [flag for flag in flags.split() if flag.startswith(("avx", "fma", "amx"))]
    return {"cpu": " ".join(sorted(wide)), "jax": jax.__version__}


def answers(folder: Path, relay: bool | str) -> list[dict[str, Any]]:
    """Greedy tokens and the hexadecimal bits of their logprobs, of prompts that share a prefix."""
    options = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "enable_relay_attention": relay,
        "page_size": 8,
        "num_pages": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "kv_split_size": 16,
        "max_model_len": 64,
        "use_tqdm": False,
    }
    engine = build_engine(EngineConfig.from_options(options))
    draw = np.random.default_rng(7)
    shared = draw.integers(3, 60, 24).tolist()
    for i, suffix in enumerate((3, 9, 17, 1, 25)):
        prompt = (shared if i < 4 else []) + draw.integers(3, 60, suffix).tolist()
        params = SamplingParams(max_tokens=10, temperature=0, logprobs=1, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                [completion] = output.outputs
                tokens = list(completion.token_ids)
                assert completion.logprobs is not None
                chosen = [at[t].logprob for at, t in zip(completion.logprobs, tokens, strict=True)]
                bits = struct.pack(f">{len(chosen)}f", *chosen).hex()
                done[output.request_id] = {"tokens": tokens, "logprobs": bits}
    engine.close()
    return [done[key] for key in sorted(done)]


def main() -> None:
    """Record all models, compiled as tests compile them."""
    quick_compilation.set_flags()
    quick_compilation.optimise(False)
    found = {
        name: {str(relay): answers(folder, relay) for relay in RELAY}
        for name, folder in MODELS.items()
    }
    FILE.write_text(json.dumps({"machine": machine(), "answers": found}, indent=1) + "\n")
    print(f"recorded {len(found)} models in {FILE}", file=sys.stderr)


if __name__ == "__main__":
    main()
