"""One start of bench.startup, run as a process: python -m bench.startup_side TASK.json"""

import time

_BEGUN = time.time()  # before the large imports

import json  # noqa: E402
import sys  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable  # noqa: E402
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


class Clock:
    """Seconds of each phase, without nested phases."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._inner = 0.0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time counts under ``name``."""

        def run(*args: Any, **options: Any) -> Any:
            before, start = self._inner, time.perf_counter()
            self._inner = 0.0
            try:
                return call(*args, **options)
            finally:
                whole = time.perf_counter() - start
                self.phases[name] = self.phases.get(name, 0.0) + whole - self._inner
                self._inner = before + whole

        return run


def main() -> None:
    """Start an engine, generate one token, and report the phases."""
    task = json.loads(Path(sys.argv[1]).read_text())
    clock = Clock()
    clock.phases["python_s"] = _BEGUN - task["launched"]

    def imports() -> Any:
        import jax

        import rjax
        import rjax.engine_builder as builder  # LLM imports it when it is made

        return jax, rjax, builder

    jax, rjax, builder = clock.timed("imports_s", imports)()
    compiler: Counter[str] = Counter(dict.fromkeys([*_COMPILER.values(), *_CACHE.values()], 0))

    def spent(event: str, seconds: float, **_: Any) -> None:
        if event in _COMPILER:
            compiler[_COMPILER[event]] += seconds  # pyright: ignore[reportArgumentType]

    def happened(event: str, **_: Any) -> None:
        if event in _CACHE:
            compiler[_CACHE[event]] += 1

    jax.monitoring.register_event_duration_secs_listener(spent)
    jax.monitoring.register_event_listener(happened)
    clock.timed("device_s", jax.devices)()
    builder.load_model = clock.timed("weights_s", builder.load_model)
    builder.Worker.warmup = clock.timed("warmup_s", builder.Worker.warmup)
    builder.Worker = clock.timed("pool_s", builder.Worker)
    llm = clock.timed("engine_s", rjax.LLM)(**task["options"])
    params = rjax.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = list(range(task["prompt"]))
    generate = clock.timed("first_token_s", llm.generate)
    generate([prompt], params, use_tqdm=False)
    total = time.time() - task["launched"]
    again = time.perf_counter()
    llm.generate([prompt[::-1]], params, use_tqdm=False)
    found = {
        **clock.phases,
        "total_s": total,
        **compiler,
        "next_first_token_s": time.perf_counter() - again,
        "backend": llm.stats().backend,
    }
    Path(task["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
