"""Packages that stand in for vLLM and SGLang: they take the arguments that engine_side.py gives,
refuse others, and record them."""

import stat
import sys
from pathlib import Path

VLLM = """
import json
import os
import pathlib
import sys
import time

__version__ = "0.33.0"
_HERE = pathlib.Path(__file__).parent


def _note(**facts):
    with open(_HERE / "calls.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\\n")


class SamplingParams:
    def __init__(self, *, n, temperature, max_tokens, ignore_eos, detokenize):
        if n > 1 and temperature == 0:
            raise ValueError("n must be 1 when using greedy sampling")
        assert ignore_eos and not detokenize
        self.n, self.max_tokens, self.temperature = n, max_tokens, temperature


class Completion:
    def __init__(self, count):
        self.token_ids = [0] * count


class Output:
    def __init__(self, params):
        self.outputs = [Completion(params.max_tokens) for _ in range(params.n)]
        self.num_cached_tokens = None


class LLM:
    def __init__(
        self,
        model,
        *,
        dtype,
        load_format,
        max_model_len,
        max_num_seqs,
        gpu_memory_utilization,
        seed,
        enable_prefix_caching,
        skip_tokenizer_init,
    ):
        assert (pathlib.Path(model) / "config.json").exists() and enable_prefix_caching
        if max_num_seqs == 99:
            print("torch.OutOfMemoryError: CUDA out of memory. Tried 9 GiB", file=sys.stderr)
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        _note(options={k: v for k, v in locals().items() if k != "self"})

    def generate(self, prompts, sampling_params, *, use_tqdm):
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        if ids[0][0] == 1000:
            os._exit(3)
        if ids[0][0] == 1001:
            raise ValueError("no such token")
        if ids[0][0] == 1002:
            time.sleep(100)
        _note(
            prompts=ids,
            max_tokens=[params.max_tokens for params in sampling_params],
            n=[params.n for params in sampling_params],
            temperature=[params.temperature for params in sampling_params],
        )
        return [Output(params) for params in sampling_params]

    def reset_prefix_cache(self):
        _note(cleared=True)
        return True
"""

SGLANG = """
import json
import pathlib
import types

__version__ = "0.5.23"
_HERE = pathlib.Path(__file__).parent


def _note(**facts):
    with open(_HERE / "calls.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\\n")


class Engine:
    def __init__(
        self,
        *,
        model_path,
        dtype,
        load_format,
        context_length,
        max_running_requests,
        mem_fraction_static,
        random_seed,
        skip_tokenizer_init,
        disable_radix_cache,
    ):
        assert (pathlib.Path(model_path) / "config.json").exists() and not disable_radix_cache
        _note(options={k: v for k, v in locals().items() if k != "self"})
        self.tries = 0

    def generate(self, *, input_ids, sampling_params):
        if len({params["n"] for params in sampling_params}) > 1:
            raise ValueError("The parallel_sample_num should be the same")
        assert all(
            set(params) == {"n", "temperature", "max_new_tokens", "ignore_eos"}
            and params["ignore_eos"]
            for params in sampling_params
        )
        _note(
            prompts=input_ids,
            max_tokens=[params["max_new_tokens"] for params in sampling_params],
            n=[params["n"] for params in sampling_params],
            temperature=[params["temperature"] for params in sampling_params],
        )
        return [
            {
                "output_ids": [0] * params["max_new_tokens"],
                "meta_info": {
                    "prompt_tokens": len(ids),
                    "completion_tokens": params["max_new_tokens"],
                    "cached_tokens": 1,
                },
            }
            for ids, params in zip(input_ids, sampling_params)
            for _ in range(params["n"])
        ]

    def flush_cache(self):
        self.tries += 1
        if self.tries % 2:  # a request that just finished is still held
            return types.SimpleNamespace(success=False)
        _note(cleared=True)
        return types.SimpleNamespace(success=True)
"""


def python_with(folder: Path, **packages: str) -> str:
    """An interpreter that finds these packages, given as their source, in ``folder``."""
    for name, source in packages.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python)
