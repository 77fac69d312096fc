"""Builds the engine of a server: loaded, checked and warmed up."""

import logging
from typing import Any

from rjax.batch.compile_progress import CompileProgress
from rjax.config import EngineConfig
from rjax.engine.protocol import Engine
from rjax.errors import InvalidConfigError
from rjax.sampling import SamplingParams
from rjax.serve.telemetry.logs import set_up_logs

_log = logging.getLogger("rjax.serve")


def build_in_process(options: dict[str, Any]) -> Engine:
    """Run `build_served_engine` in a process of its own, which logs as the server does.

    Args:
        options: the engine's options, as `EngineConfig.from_options` takes them.
    """
    set_up_logs(access_log=False, http_level=logging.WARNING)
    return build_served_engine(EngineConfig.from_options(options))


def build_served_engine(config: EngineConfig) -> Engine:
    """An engine with a tokenizer, to be warmed up by `run_warmup_requests`.

    Raises:
        InvalidConfigError: a setting that this model or machine cannot meet.
        OutOfMemoryError: weights or KV pool do not fit.
    """
    engine = build_engine(config)
    if engine.tokenizer is None:
        raise InvalidConfigError("the model has no tokenizer; a server needs one")
    _log_progress(engine.compile_progress())
    return engine


def build_engine(config: EngineConfig) -> Any:
    """Call `rjax.build.engine_builder.build_engine`, which is imported at the call."""
    from rjax.build import engine_builder

    return engine_builder.build_engine(config)


def run_warmup_requests(engine: Any) -> None:
    """Run two requests; the second has the same array layouts as all later ones."""
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for i in range(2):
        engine.add_request(f"warm-up {i}", [0], greedy)
        while engine.has_unfinished_requests():
            engine.step()
    engine.reset_stats()  # no client sent them


def _log_progress(progress: CompileProgress) -> None:
    import jax

    folder = jax.config.jax_compilation_cache_dir
    _log.info(
        "the model is loaded; %d of %d programs are compiled, the others compile when they are "
        "needed or in the background%s",
        progress.compiled,
        progress.total,
        f"; they are kept in {folder}, so that the next start is quicker" if folder else "",
    )
