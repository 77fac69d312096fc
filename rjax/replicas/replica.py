"""The deployment of Ray Serve: one engine with the app of a server alone."""

import asyncio
import dataclasses
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.types import ASGIApp

from rjax.config import EngineConfig
from rjax.engine.stats import EngineStats
from rjax.errors import EngineDeadError
from rjax.kv_events_config import kv_events_config
from rjax.replicas.asgi_call import call_app
from rjax.replicas.loopback import bind_replica_to_loopback
from rjax.replicas.replica_request import Messages, ReplicaRequest
from rjax.serve.api.service import Service
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.loading.service_loader import ServiceLoader
from rjax.serve.telemetry.logs import set_up_logs

_log = logging.getLogger("rjax.serve")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """What a replica is made from.

    Attributes:
        config: of the engine, with absolute paths.
        prefix_files: paths of prefix files by prefix name.
        serve: configuration of its app.
        loopback: listen on this machine only.
        stats_seconds: interval of the throughput in the log; None never.
        access_log, http_level: of `rjax.serve.telemetry.logs.set_up_logs`.
    """

    config: EngineConfig
    prefix_files: Mapping[str, str]
    serve: ServeConfig
    loopback: bool
    stats_seconds: float | None
    access_log: bool
    http_level: int


class Replica:
    """One replica; Ray creates it in a process of its own and calls its methods.

    Args:
        settings: of the replica.
        generation: changes with each rolling update, so that Ray replaces the replicas.
    """

    def __init__(self, settings: ReplicaSettings, generation: int) -> None:
        from ray import serve

        set_up_logs(access_log=settings.access_log, http_level=settings.http_level)
        if settings.loopback:
            bind_replica_to_loopback()
        self._settings = settings
        self._tag = serve.get_replica_context().replica_id.unique_id
        loader = ServiceLoader(
            _with_event_rank(settings.config, serve.get_replica_context().rank.rank),
            settings.prefix_files,
            dataclasses.replace(settings.serve, replica_tag=self._tag),
            engine_process=False,
        )
        self._service: Service
        self._app: ASGIApp
        self._service, self._app = loader.load()
        self._started = False
        self._logging: asyncio.Task[None] | None = None
        _log.info("replica %s of generation %d is loaded", self._tag, generation)

    async def check_health(self) -> None:
        """Called by Ray, for the first time before the first request.

        Raises:
            EngineDeadError: the engine is dead or hung, or no worker process can read requests; if
                that lasts, Ray replaces the replica.
        """
        if not self._started:
            self._started = True
            await self._service.start()
            if self._settings.stats_seconds is not None:
                self._logging = asyncio.ensure_future(
                    self._service.log_throughput(self._settings.stats_seconds)
                )
        health = self._service.health
        if health in ("dead", "hung", "workers_hung"):
            raise EngineDeadError(f"replica {self._tag} is not healthy: {health}")

    async def serve(self, request: ReplicaRequest) -> AsyncGenerator[Messages]:
        """Answer a request; yields its ASGI messages. Cancelling it is a disconnect. The header
        ``X-Replica`` of the response has the replica's tag, and
        the first message says what chose the replica.

        Raises:
            EngineDeadError: the engine is dead, so another replica should answer.
        """
        if self._service.failed:
            raise EngineDeadError("the engine of this replica stopped")
        messages = call_app(self._app, request.scope, request.body)
        try:
            async for ready in messages:
                if ready[0]["type"] == "http.response.start":
                    ready[0]["headers"] = [*ready[0]["headers"], (b"x-replica", self._tag.encode())]
                    ready[0]["routed_by"] = request.routed_by
                yield ready
        finally:
            await messages.aclose()

    async def metrics(self) -> tuple[str, bytes]:
        """The replica's tag and its metrics in Prometheus' format."""
        stats = await self._stats()
        return self._tag, self._service.metrics.exposition(stats)

    async def num_live(self) -> int:
        """Unfinished prompts in the engine."""
        return self._service.num_live

    async def facts(self) -> dict[str, Any]:
        """The replica's tag, process and engine, for people and tests."""
        stats = await self._stats()
        return {
            "tag": self._tag,
            "pid": os.getpid(),
            "device": stats.device,
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "num_live": self._service.num_live,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Figures for `rjax.replicas.autoscaling`: sequences, batch size and KV use."""
        stats = await self._stats()
        return {
            "sequences": float(stats.num_running + stats.num_waiting + stats.num_swapped),
            "max_num_seqs": float(stats.max_num_seqs),
            "kv_usage": stats.kv_bytes_used / max(stats.kv_bytes_total, 1),
        }

    async def _stats(self) -> EngineStats:
        return await self._service.engine.stats()

    async def __del__(self) -> None:
        """Called by Ray once, after the last request."""
        if self._logging is not None:
            self._logging.cancel()
        await self._service.stop()
        self._service.close()


def _with_event_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """The config with addresses of KV events that no other replica uses."""
    events = kv_events_config(config.cache.kv_events_config)
    if events is None or not events.published:
        return config
    ranked = dataclasses.replace(events, data_parallel_rank=rank)
    return dataclasses.replace(
        config, cache=dataclasses.replace(config.cache, kv_events_config=ranked)
    )
