"""One start of an engine for bench.startup, as a process: python -m bench.startup.side TASK.json"""

import time

_BEGUN = time.time()  # before the large imports

import json  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections import Counter  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

_COMPILER = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering_s",
    "/jax/core/compile/backend_compile_duration": "compiling_s",
}
_CACHE = {
    "/jax/compilation_cache/cache_hits": "cache_hits",
    "/jax/compilation_cache/cache_misses": "cache_misses",
}
_POLL = 0.02  # seconds between two looks at the progress of the compilation


class CompilerTimes:
    """Time and cache use of the compiler, from JAX's events.

    Attributes:
        totals: of all threads: seconds of tracing, lowering and compiling; programs compiled or
            taken from JAX's cache; its hits and misses.
        own_seconds: of the thread that made this object.
    """

    def __init__(self, monitoring: Any) -> None:
        self.totals: Counter[str] = Counter(
            dict.fromkeys([*_COMPILER.values(), *_CACHE.values(), "compilations"], 0)
        )
        self.own_seconds = 0.0
        self._thread = threading.get_ident()
        monitoring.register_event_duration_secs_listener(self._spent)
        monitoring.register_event_listener(self._happened)

    def _spent(self, event: str, seconds: float, **_: Any) -> None:
        if event in _COMPILER:
            self.totals[_COMPILER[event]] += seconds  # pyright: ignore[reportArgumentType]
            self.totals["compilations"] += event.endswith("backend_compile_duration")
            if threading.get_ident() == self._thread:
                self.own_seconds += seconds

    def _happened(self, event: str, **_: Any) -> None:
        if event in _CACHE:
            self.totals[_CACHE[event]] += 1


def main() -> None:
    """Start an engine, generate one token, wait for the compilation, and report the phases."""
    task = json.loads(Path(sys.argv[1]).read_text())
    launched = task["launched"]
    begun = time.perf_counter()
    import jax

    import rjax
    import rjax.build.engine_builder  # LLM imports it when it is made

    imported = time.perf_counter()
    compiler = CompilerTimes(jax.monitoring)
    llm = rjax.LLM(**task["options"])
    made = time.time() - launched
    params = rjax.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = list(range(task["prompt"]))

    def first_token(prompt: list[int]) -> float:
        start = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        return time.perf_counter() - start

    before = compiler.own_seconds
    seconds = first_token(prompt)
    total = time.time() - launched
    waited = llm.engine.compile_progress().waited_seconds()
    found = {
        "python_s": _BEGUN - launched,
        "imports_s": imported - begun,
        **{f"{name}_s": value for name, value in llm.engine.startup_seconds().items()},
        "engine_made_s": made,
        "first_token_s": seconds,
        "first_run_s": max(0.0, seconds - max(waited, compiler.own_seconds - before)),
        "total_s": total,
        "next_first_token_s": first_token(prompt[::-1]),
        "all_compiled_s": _all_compiled(llm, task),
        **compiler.totals,
        "backend": llm.stats().backend,
    }
    Path(task["out"]).write_text(json.dumps(found))


def _all_compiled(llm: Any, task: dict[str, Any]) -> float | None:
    """Seconds from launch until every program is compiled; None without a plan or in no time."""
    if task["options"]["warmup"] != "background":
        return None
    deadline = time.time() + task["compile_limit"]
    while time.time() < deadline:
        progress = llm.engine.compile_progress()
        if progress.compiled >= progress.total:
            return time.time() - task["launched"] if progress.total else None
        time.sleep(_POLL)
    return None


if __name__ == "__main__":
    main()
