"""The deployment of Ray Serve: one engine with the HTTP server and app of a server alone."""

import asyncio
import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

from rjax.config import EngineConfig
from rjax.config.kv_events import kv_events_config
from rjax.engine.stats import EngineStats
from rjax.errors import EngineDeadError
from rjax.replicas.loopback import bind_replica_to_loopback
from rjax.replicas.replica_app import ReplicaApp
from rjax.serve.config.addresses import HostAddress
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.server import Server, set_ulimit
from rjax.serve.loading.service_loader import ServiceLoader
from rjax.serve.telemetry.logs import set_up_logs

_log = logging.getLogger("rjax.serve")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """The settings of a replica.

    Attributes:
        config: configuration of the engine, with absolute paths.
        prefix_files: paths of prefix files by prefix name.
        serve: configuration of its app.
        secret: the gateway's secret, which the replica's HTTP server asks for.
        engine_process: run the engine in a process of its own.
        loopback: listen on this machine only.
        stats_seconds: interval of the throughput in the log; None never.
        access_log, http_level: arguments of `rjax.serve.telemetry.logs.set_up_logs`.
    """

    config: EngineConfig
    prefix_files: Mapping[str, str]
    serve: ServeConfig
    secret: str = dataclasses.field(repr=False)
    engine_process: bool
    loopback: bool
    stats_seconds: float | None
    access_log: bool
    http_level: int


class Replica:
    """One replica; Ray creates it in a process of its own and calls its methods. The gateway's
    requests come to the HTTP server whose address is in `record_replica_metadata`.

    Args:
        settings: the replica's settings.
        generation: changes with each rolling update, so that Ray replaces the replicas.
    """

    def __init__(self, settings: ReplicaSettings, generation: int) -> None:
        from ray import serve

        set_up_logs(access_log=settings.access_log, http_level=settings.http_level)
        set_ulimit(settings.serve.limits)
        if settings.loopback:
            bind_replica_to_loopback()
        self._settings = settings
        self._tag = serve.get_replica_context().replica_id.unique_id
        config = dataclasses.replace(settings.serve, replica_tag=self._tag)
        loader = ServiceLoader(
            _with_event_rank(settings.config, serve.get_replica_context().rank.rank),
            settings.prefix_files,
            config,
            engine_process=settings.engine_process,
        )
        self._service, app = loader.load()
        self._ready = asyncio.Event()
        self._server = Server(
            ReplicaApp(config, settings.secret, lambda: self._service.failed),
            lambda: (self._service, app),
            stats_seconds=settings.stats_seconds,
            ready=self._ready.set,
        )
        self._serving: asyncio.Task[None] | None = None
        _log.info("replica %s of generation %d is loaded", self._tag, generation)

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Start the HTTP server and return its "url". Ray calls this once, before the first
        request."""
        from ray.util import get_node_ip_address

        address = HostAddress("127.0.0.1" if self._settings.loopback else get_node_ip_address(), 0)
        with address.bound() as bound:
            listener = bound.dup()  # the server closes it
        self._serving = asyncio.ensure_future(self._server.run_on(listener))
        ready = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait((ready, self._serving), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serving.done():
            self._serving.result()
        return {"url": address.url(listener)}

    async def check_health(self) -> None:
        """Raise if the replica is not healthy; called by Ray.

        Raises:
            EngineDeadError: the engine is dead or hung, or no worker process can read requests; if
                that lasts, Ray replaces the replica.
        """
        health = self._service.health if self._ready.is_set() else "starting"
        if health in ("dead", "hung", "workers_hung"):
            raise EngineDeadError(f"replica {self._tag} is not healthy: {health}")

    async def metrics(self) -> tuple[str, bytes]:
        """The replica's tag and its metrics in Prometheus' format."""
        stats = await self._stats()
        return self._tag, self._service.metrics.exposition(stats)

    async def num_live(self) -> int:
        """Number of unfinished prompts in the engine."""
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
        """Stop the server. Ray calls this once, after the last request."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        else:
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
