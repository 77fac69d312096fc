"""How far log-probabilities are from those of transformers in float32 on the same weights.

    python -m tests.engine.logprob_errors     # measure again, where a change of the errors is meant

The tokens and logits are those of the goldens: random tokens after random weights, whose
log-probabilities differ more than those of tokens that a trained model samples. The weights are
bfloat16 numbers in all of them, so that float32 and bfloat16 differ by arithmetic alone; fp8 rounds
weights too.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from rjax.api.llm import LLM
from rjax.build.engine_builder import build_engine
from rjax.config import EngineConfig
from rjax.engine.llm_engine import LLMEngine
from rjax.sampling import SamplingParams
from tests import quick_compilation

TESTS = Path(__file__).parents[1]
FILE = TESTS / "golden" / "logprob_errors.json"
CASES = {
    "llama_g7_h64": "",
    "qwen2_g2_h32_windows_tied": "",
    "phi3_g7_h80_partial_window": "",
    "mistral_g8_h64_window": "",
    "gemma3_g1_h24_old_fields": "families",
    "smollm3_g1_h24_windows": "families",
    "qwen3_moe_j16_k8_fused": "experts",
    "deepseek_v2_j5_k2_lite_fused": "experts",
}
"""The goldens, and the folder of each."""

DTYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
}
PROMPT = 9
"""Tokens before the first whose log-probability is measured."""


class Forced:
    """A token mask that allows the tokens of a list, one after the other."""

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        self._tokens, self._words, self._taken = tokens, -(-vocab_size // 32), 0

    @property
    def bitmask(self) -> np.ndarray:
        token = self._tokens[self._taken]
        words = np.zeros(self._words, np.uint32)
        words[token // 32] = np.uint32(1 << token % 32)
        return words

    def accept(self, token_id: int) -> None:
        self._taken += 1


def wanted(name: str) -> tuple[list[int], np.ndarray]:
    """Tokens of a golden, and the float32 log-probabilities of those behind the prompt."""
    golden = load_file(TESTS / "golden" / CASES[name] / "expected" / f"{name}.safetensors")
    tokens, logits = golden["tokens"], golden["logits"].astype(np.float64)
    assert (golden["positions"] == np.arange(tokens.size)).all(), f"{name} has strided positions"
    rows, following = logits[PROMPT - 1 : -1], tokens[PROMPT:]
    chosen = np.take_along_axis(rows, following[:, None], axis=1)[:, 0]
    return tokens.tolist(), chosen - np.logaddexp.reduce(rows, axis=1)


def make(name: str, dtype: str, **others: Any) -> LLMEngine:
    """An engine over the model of a golden; ``others`` are options in place of those here."""
    options = {
        "model": str(TESTS / "golden" / CASES[name] / "models" / name),
        "skip_tokenizer_init": True,
        "page_size": 8,
        "num_pages": 48,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "kv_split_size": 16,
        "use_tqdm": False,
        **DTYPES[dtype],
        **others,
    }
    return build_engine(EngineConfig.from_options(options))


def by_decoding(engine: LLMEngine, tokens: list[int]) -> np.ndarray:
    """Raw log-probabilities that decode steps report of the tokens behind the prompt."""
    given = tokens[PROMPT:]
    params = SamplingParams(max_tokens=len(given), logprobs=0, ignore_eos=True)
    mask = Forced(given, engine.model_config.vocab_size)
    engine.add_request("forced", tokens[:PROMPT], params, masks=[mask])
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                [completion] = output.outputs
                assert completion.token_ids == given
                return np.array(completion.logprobs.sampled(), np.float32)  # pyright: ignore
    raise AssertionError("the request did not finish")


def measure(name: str, dtype: str, **others: Any) -> dict[str, dict[str, float]]:
    """Largest and mean absolute difference of the log-probabilities of both paths."""
    tokens, want = wanted(name)
    engine = make(name, dtype, **others)
    with LLM.from_engine(engine) as llm:
        [prefill] = llm.get_per_token_logps([tokens[:PROMPT]], [tokens[PROMPT:]], use_tqdm=False)
    engine.reset_prefix_cache()
    decode = by_decoding(engine, tokens)
    engine.close()
    differences = {
        "prefill": prefill - want,
        "decode": decode - want,
        "decode - prefill": decode - prefill,
    }
    return {
        kind: {"max": float(np.abs(found).max()), "mean": float(np.abs(found).mean())}
        for kind, found in differences.items()
    }


def main() -> None:
    """Measure and keep all, compiled as tests compile them."""
    quick_compilation.set_flags()
    quick_compilation.optimise(False)
    found = {}
    for name in CASES:
        found[name] = {dtype: measure(name, dtype) for dtype in DTYPES}
        print(name, json.dumps(found[name]), file=sys.stderr)
    device = jax.devices()[0].device_kind
    kept = {"device": device, "jax": jax.__version__, "errors": _rounded(found)}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")


def _rounded(found: Any) -> Any:
    """Numbers with three digits."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    return float(f"{found:.2e}")


if __name__ == "__main__":
    main()
