"""Loads the model and builds the service of the command, on a thread beside the open port."""

import gc
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from rjax.batch.compile_progress import CompileProgress
from rjax.config import EngineConfig
from rjax.serve.config.serve_config import ServeConfig

if TYPE_CHECKING:  # these import JAX, and the port opens before that
    from rjax.engine_channel.channel import EngineChannel
    from rjax.serve.api.service import Service
    from rjax.serve.workers.zygote import Zygote

_ENGINE = "rjax.serve.loading.served_engine"
_END_SECONDS = 5.0  # for the engine's process if the service cannot be built


class ServiceLoader:
    """Loads a service. Modules that need JAX are imported only in `load`.

    Args:
        config: the engine's configuration.
        prefix_files: paths of prefix files by prefix name.
        serve: configuration of the server.
        engine_process: run the engine in a process of its own, not on a thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        prefix_files: Mapping[str, str],
        serve: ServeConfig,
        *,
        engine_process: bool,
    ) -> None:
        self._config = config
        self._prefix_files = prefix_files
        self._serve = serve
        self._engine_process = engine_process
        self._channel: EngineChannel | None = None

    def progress(self) -> CompileProgress | None:
        """The compilation's progress; None before the engine is built. Any thread may call this."""
        channel = self._channel
        return None if channel is None or not channel.is_built else channel.compile_progress()

    def summary(self, more: Mapping[str, str]) -> list[str]:
        """The engine's model, sizes and kernels, and these further facts, in aligned columns."""
        from rjax.build.summary import summary_lines

        assert self._channel is not None
        return summary_lines({**self._channel.facts.summary, **more})

    def load(self) -> "tuple[Service, ASGIApp]":
        """The service and its app, after two warm-up requests.

        Raises:
            InvalidConfigError: a setting that this model or machine cannot meet.
            OutOfMemoryError: weights or KV pool do not fit.
            EngineDeadError: the engine's process ended while it started.
        """
        from rjax.serve.workers.zygote import Zygote

        zygote = Zygote()  # its imports take a second or two, while the model loads
        try:
            return self._load(zygote)
        except BaseException:
            zygote.close()
            raise

    def _load(self, zygote: "Zygote") -> "tuple[Service, ASGIApp]":
        channel = self._open_process() if self._engine_process else self._open_thread()
        try:
            service, app = self._build(channel, zygote)
        except BaseException:
            channel.end()
            channel.join(_END_SECONDS)
            raise
        # Exclude the long-lived objects from garbage collection.
        gc.collect()
        gc.freeze()
        return service, app

    def _open_process(self) -> "EngineChannel":
        from rjax.engine_channel.process_channel import ProcessChannel

        channel = self._channel = ProcessChannel(
            f"{_ENGINE}:build_in_process",
            {"options": self._config.to_options()},
            prepare=f"{_ENGINE}:run_warmup_requests",
        )
        try:
            importlib.import_module("rjax.serve.api.app")  # takes seconds, while the model loads

            channel.wait_ready()
        except BaseException:
            channel.end()
            channel.join(_END_SECONDS)
            raise
        return channel

    def _open_thread(self) -> "EngineChannel":
        from rjax.engine_channel.thread_channel import ThreadChannel
        from rjax.serve.loading.served_engine import build_served_engine, run_warmup_requests

        engine = build_served_engine(self._config)
        channel = self._channel = ThreadChannel(engine)
        run_warmup_requests(engine)
        return channel

    def _build(self, channel: "EngineChannel", zygote: "Zygote") -> "tuple[Service, ASGIApp]":
        from rjax.serve.api import prefixes
        from rjax.serve.api.app import build_app
        from rjax.serve.loading.service_builder import make_service

        service = make_service(channel, self._serve, zygote=zygote, close_zygote=True)
        try:
            prefixes.load(self._prefix_files, service)
        except BaseException:
            service.close()
            raise
        return service, build_app(service)
