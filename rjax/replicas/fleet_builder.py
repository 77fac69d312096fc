"""Builds the fleet of the command ``rjax serve --replicas``."""

import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from rjax.batch.compile_progress import CompileProgress
from rjax.config import EngineConfig
from rjax.replicas.fleet import Fleet, FleetSettings
from rjax.replicas.replica import ReplicaSettings
from rjax.serve.config.http_options import HttpOptions
from rjax.serve.config.replica_options import ReplicaOptions
from rjax.serve.config.serve_config import ServeConfig

_KEEP_SECONDS = 24 * 3600  # that a replica keeps unused connections


class FleetLoader:
    """Loads a fleet, as `rjax.serve.loading.service_loader.ServiceLoader` loads a service.

    Args:
        config: configuration of every engine.
        prefix_files: paths of prefix files by prefix name.
        serve: configuration of the server.
        options: number, placement and routing of the replicas.
        engine_process: run each engine in a process of its own.
        drain_seconds: most seconds that an ending replica continues its requests.
        access_log, http_level: arguments of `rjax.serve.telemetry.logs.set_up_logs`.
        stats_seconds: interval of each replica's throughput in the log; None never.
    """

    def __init__(
        self,
        config: EngineConfig,
        prefix_files: Mapping[str, str],
        serve: ServeConfig,
        *,
        options: ReplicaOptions,
        engine_process: bool,
        drain_seconds: float,
        access_log: bool,
        http_level: int,
        stats_seconds: float | None,
    ) -> None:
        replica = ReplicaSettings(
            config=_with_absolute_paths(config),
            prefix_files={name: str(Path(path).resolve()) for name, path in prefix_files.items()},
            serve=_behind_the_gateway(serve),
            secret=secrets.token_hex(32),
            engine_process=engine_process,
            loopback=options.loopback,
            access_log=access_log,
            http_level=http_level,
            stats_seconds=stats_seconds,
        )
        self._fleet = Fleet(
            FleetSettings(
                replica=replica,
                options=options,
                serve=serve,
                drain_seconds=drain_seconds,
            )
        )
        self._facts = {
            "model": serve.own_name,
            "replicas": str(options.replicas)
            + (
                ""
                if options.max_replicas is None
                else f", {options.lowest} to {options.max_replicas}"
            ),
            "router": options.request_router,
        }

    def progress(self) -> CompileProgress | None:
        """Return None: each replica logs its own progress."""
        return None

    def summary(self, more: Mapping[str, str]) -> list[str]:
        """The model, the replicas and these further facts, in aligned columns."""
        from rjax.build.summary import summary_lines

        return summary_lines({**self._facts, **more})

    def load(self) -> tuple[Fleet, ASGIApp]:
        """Deploy the fleet; see `Fleet.deploy`."""
        try:
            return self._fleet.deploy()
        except BaseException:
            from rjax.replicas.fleet import leave_cluster

            leave_cluster()
            raise


def _behind_the_gateway(serve: ServeConfig) -> ServeConfig:
    """The configuration of a replica's server: the gateway answers browsers, and its connections
    are all that there are; it closes unused ones itself."""
    return dataclasses.replace(
        serve,
        http=HttpOptions(root_path=serve.http.root_path, tokenizer_info=serve.http.tokenizer_info),
        limits=dataclasses.replace(
            serve.limits,
            address_connections=serve.limits.open_connections,
            keep_alive_seconds=_KEEP_SECONDS,
        ),
    )


def _with_absolute_paths(config: EngineConfig) -> EngineConfig:
    """The config with absolute paths: a replica's process has another working folder."""

    def absolute(value: Any) -> Any:
        if isinstance(value, str) and Path(value).exists():
            return str(Path(value).resolve())
        return value

    model = dataclasses.replace(
        config.model,
        model=absolute(config.model.model),
        tokenizer=absolute(config.model.tokenizer),
    )
    folder = config.compilation_cache_dir
    if folder is not None:
        folder = str(Path(folder).expanduser().resolve())
    return dataclasses.replace(config, model=model, compilation_cache_dir=folder)
