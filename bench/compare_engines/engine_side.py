"""One engine of bench.compare_engines, in a process of its own: its argument is a JSON file.

Runs in the Python that has the engine. It imports that engine and the standard library, nothing of
rjax or bench, so that all engines are timed by the same code. The answer is written after each
workload, and has what was measured when the process dies.
"""

import contextlib
import importlib
import importlib.metadata
import json
import statistics
import sys
import time
from pathlib import Path

_TRIES, _PAUSE = 50, 0.1  # seconds between two tries to clear the prefix cache


class VllmEngine:
    """vLLM's ``LLM``. rjax has the same classes and names.

    Args:
        module: "vllm" or "rjax".
        options: of the engine, by vLLM's names.
    """

    def __init__(self, module, options):
        package = importlib.import_module(module)
        self._params = package.SamplingParams
        if module == "rjax":
            options = {**options, "warmup": "on", "use_tqdm": False}
        self._llm = package.LLM(**options, enable_prefix_caching=True, skip_tokenizer_init=True)

    def generate(self, prompts, max_tokens, n):
        """Generate ``n`` outputs of ``max_tokens[i]`` tokens for each prompt.

        Returns:
            Tokens of each output, those of a prompt side by side, and the number of prompt tokens
            that came from the prefix cache.
        """
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [
                self._params(
                    n=n,
                    temperature=0.0 if n == 1 else 1.0,
                    max_tokens=count,
                    ignore_eos=True,
                    detokenize=False,
                )
                for count in max_tokens
            ],
            use_tqdm=False,
        )
        lengths = [len(one.token_ids) for output in outputs for one in output.outputs]
        return lengths, sum(output.num_cached_tokens or 0 for output in outputs)

    def clear_prefix_cache(self):
        """Evict the KV of finished requests; whether that was possible."""
        return self._llm.reset_prefix_cache() is not False


class SglangEngine:
    """SGLang's offline ``Engine``.

    Args:
        module: "sglang".
        options: of the engine, by vLLM's names.
    """

    def __init__(self, module, options):
        self._engine = importlib.import_module(module).Engine(
            model_path=options["model"],
            dtype=options["dtype"],
            load_format=options["load_format"],
            context_length=options["max_model_len"],
            max_running_requests=options["max_num_seqs"],
            mem_fraction_static=options["gpu_memory_utilization"],
            random_seed=options["seed"],
            skip_tokenizer_init=True,
            disable_radix_cache=False,
        )

    def generate(self, prompts, max_tokens, n):
        """As `VllmEngine.generate`."""
        outputs = self._engine.generate(
            input_ids=prompts,
            sampling_params=[
                {
                    "n": n,
                    "temperature": 0.0 if n == 1 else 1.0,
                    "max_new_tokens": count,
                    "ignore_eos": True,
                }
                for count in max_tokens
            ],
        )
        facts = [output["meta_info"] for output in outputs]
        lengths = [fact["completion_tokens"] for fact in facts]
        return lengths, sum(fact["cached_tokens"] for fact in facts)

    def clear_prefix_cache(self):
        """As `VllmEngine.clear_prefix_cache`."""
        return self._engine.flush_cache().success


def clear_prefix_cache(engine):
    """Evict the KV of finished requests, which an engine may still hold for a moment.

    Raises:
        RuntimeError: the engine still holds it after seconds.
    """
    for _ in range(_TRIES):
        if engine.clear_prefix_cache():
            return
        time.sleep(_PAUSE)
    raise RuntimeError("the prefix cache was not cleared")


ENGINES = {"rjax": VllmEngine, "vllm": VllmEngine, "sglang": SglangEngine}


def timed(engine, workload, max_tokens):
    """Seconds of one run of the requests, and the prompt tokens from the prefix cache.

    Raises:
        RuntimeError: an output is shorter or longer than asked for.
    """
    n = workload["n"]
    start = time.perf_counter()
    lengths, cached = engine.generate(workload["prompts"], max_tokens, n)
    seconds = time.perf_counter() - start
    wanted = [count for count in max_tokens for _ in range(n)]
    if lengths != wanted:
        raise RuntimeError(
            f"{sum(lengths)} tokens in {len(lengths)} outputs; the requests are for {sum(wanted)} "
            f"in {len(wanted)}"
        )
    return seconds, cached


def measure(engine, workload, repeats):
    """The times of one workload, after a run that is not timed.

    The runs end to end start with an empty prefix cache. A decode step is the difference between a
    run and one of a single token, both with the prompts in the prefix cache, over the steps between
    them.
    """
    max_tokens = workload["max_tokens"]
    timed(engine, workload, max_tokens)
    seconds, cached = [], 0
    for _ in range(repeats):
        clear_prefix_cache(engine)
        took, cached = timed(engine, workload, max_tokens)
        seconds.append(took)
    found = {"all_seconds": seconds, "cached_tokens": cached}
    if workload["measure_step"]:
        one = [1] * len(max_tokens)
        timed(engine, workload, one)
        pairs = [
            (timed(engine, workload, max_tokens)[0], timed(engine, workload, one)[0])
            for _ in range(repeats)
        ]
        long, short = (statistics.median(times) for times in zip(*pairs, strict=True))
        found["step_ms"] = 1e3 * (long - short) / (max_tokens[0] - 1)
    return found


def versions(engine):
    """Versions of the engine and of torch."""
    found = {engine: getattr(sys.modules[engine], "__version__", "unknown")}
    if engine != "rjax":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["torch"] = importlib.metadata.version("torch")
    return found


def main():
    """Start the engine and measure the workloads of the task, each saved at once."""
    task = json.loads(Path(sys.argv[1]).read_text())
    workloads = json.loads(Path(task["requests"]).read_text())
    answer = {"ready": False, "workloads": {}}

    def save():
        part = Path(task["answer"] + ".part")
        part.write_text(json.dumps(answer))
        part.replace(task["answer"])  # at once: the process may be ended at any time

    try:
        begun = time.perf_counter()
        engine = ENGINES[task["engine"]](task["engine"], task["options"])
        answer["ready_s"] = time.perf_counter() - begun
        answer["ready"] = True
        answer["versions"] = versions(task["engine"])
        save()
        for name in task["names"]:
            answer["workloads"][name] = measure(engine, workloads[name], task["repeats"])
            save()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        answer["failed"] = f"{type(error).__name__}: {lines[0]}"
        save()
        raise


if __name__ == "__main__":  # the engines start processes that import this file
    main()
