"""Loads the model and builds the service of the command, on a thread beside the open port."""

import gc
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from rjax.batch.compile_progress import CompileProgress
from rjax.config import EngineConfig
from rjax.errors import InvalidConfigError

if TYPE_CHECKING:  # these import JAX, and the port opens before that
    from rjax.engine.llm_engine import LLMEngine
    from rjax.serve.service import Service
    from rjax.serve.workers.zygote import Zygote

_log = logging.getLogger("rjax.serve")


class ServiceLoader:
    """Loads a service. Imports what needs JAX only in `load`.

    Args:
        config: of the engine.
        prefix_files: paths of prefix files by prefix name.
        options: further arguments of `rjax.serve.service_builder.make_service`.
    """

    def __init__(
        self, config: EngineConfig, prefix_files: Mapping[str, str], options: Mapping[str, Any]
    ) -> None:
        self._config = config
        self._prefix_files = prefix_files
        self._options = options
        self._engine: LLMEngine | None = None

    def progress(self) -> CompileProgress | None:
        """How far the compilation is; None before the engine is built. Any thread may call this."""
        return None if self._engine is None else self._engine.compile_progress()

    def summary(self, more: Mapping[str, str]) -> list[str]:
        """The engine's model, sizes and kernels, and these further facts, in aligned columns."""
        from rjax.engine_summary import summary_lines

        assert self._engine is not None
        return summary_lines({**self._engine.summary, **more})

    def load(self) -> "tuple[Service, ASGIApp]":
        """The service and its app, after two warm-up requests.

        Raises:
            InvalidConfigError: a setting that this model or machine cannot meet.
            OutOfMemoryError: weights or KV pool do not fit.
        """
        from rjax.serve.workers.zygote import Zygote

        zygote = Zygote()  # its imports take a second or two, while the model loads
        try:
            return self._load(zygote)
        except BaseException:
            zygote.close()
            raise

    def _load(self, zygote: "Zygote") -> "tuple[Service, ASGIApp]":
        from rjax.serve import prefixes
        from rjax.serve.app import build_app
        from rjax.serve.service_builder import make_service

        self._engine = engine = build_engine(self._config)
        if engine.tokenizer is None:
            raise InvalidConfigError("the model has no tokenizer; a server needs one")
        _log_progress(engine.compile_progress())
        run_warmup_requests(engine)
        service = make_service(engine, zygote=zygote, close_zygote=True, **self._options)
        try:
            prefixes.load(self._prefix_files, engine, service)
        except BaseException:
            service.close()
            raise
        app = build_app(service)
        # Exclude the long-lived objects from garbage collection.
        gc.collect()
        gc.freeze()
        return service, app


def build_engine(config: EngineConfig) -> "LLMEngine":
    """`rjax.engine_builder.build_engine`, imported at the call."""
    from rjax import engine_builder

    return engine_builder.build_engine(config)


def run_warmup_requests(engine: "LLMEngine") -> None:
    """Run two requests; the second has the same array layouts as all later ones."""
    from rjax.sampling import SamplingParams

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
