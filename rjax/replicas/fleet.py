"""The replicas as one application of Ray Serve: deploy, call, update, drain, end."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.types import ASGIApp

from rjax.errors import InvalidConfigError
from rjax.extras import install_command
from rjax.replicas.autoscaling import QueueAndKvPolicy
from rjax.replicas.gateway import Gateway
from rjax.replicas.gateway_metrics import GatewayMetrics
from rjax.replicas.loopback import prepare_local_cluster
from rjax.replicas.replica import Replica, ReplicaSettings
from rjax.replicas.replica_client import ReplicaAnswer, ReplicaClient, ReplicaLostError
from rjax.replicas.replica_request import ReplicaRequest
from rjax.serve.config.replica_options import ReplicaOptions
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.protocol.errors import ApiError

APPLICATION = "rjax"
"""Name of the application in the Ray cluster."""

_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.5  # between two looks at the state of the replicas
_OBJECT_STORE = 128 * 2**20  # bytes; only metrics pass through it
_ROUTER_CLASSES: dict[str, Any] = {  # Ray takes import paths
    "prefix": "rjax.replicas.prefix_router.PrefixRouter",
    "round-robin": "ray.serve.experimental.round_robin_router.RoundRobinRouter",
    "power-of-two": "ray.serve._private.request_router.PowerOfTwoChoicesRequestRouter",
}
_REASON = re.compile(r"^(?:[\w.]*\(?(?:rjax\.[\w.]+|OSError)\)?): (.+)$", re.MULTILINE)
_log = logging.getLogger("rjax.serve")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """The settings of a fleet.

    Attributes:
        replica: settings of every replica.
        options: number, placement and routing of the replicas.
        serve: configuration of the server.
        drain_seconds: most seconds that an ending replica continues its requests.
    """

    replica: ReplicaSettings
    options: ReplicaOptions
    serve: ServeConfig
    drain_seconds: float


class Fleet:
    """The replicas of a server, as its `rjax.serve.http.backend.Backend`.

    SIGHUP updates the weights: Ray replaces the replicas one after another by new ones, which read
    the model anew, while the others serve.

    Args:
        settings: the fleet's settings.

    Raises:
        InvalidConfigError: Ray Serve is not installed.
    """

    def __init__(self, settings: FleetSettings) -> None:
        if settings.options.loopback:
            prepare_local_cluster()
        try:
            import ray.serve  # noqa: F401
        except ModuleNotFoundError as error:
            raise InvalidConfigError(
                f"--replicas needs Ray Serve ({error.name} is not installed); run: "
                + install_command("ray")
            ) from error
        self._settings = settings
        # Linux ends Ray's processes with the thread that started them, so that thread must stay.
        self._ray_thread = ThreadPoolExecutor(1, "rjax-ray")
        self._generation = 0
        self._handle: Any = None
        self._client: ReplicaClient
        self._num_running = 0
        self._lost_ray = False
        self._polling: asyncio.Task[None] | None = None
        self._updating: asyncio.Task[None] | None = None
        self._stopped = False
        self._gateway: Gateway

    def deploy(self) -> tuple["Fleet", ASGIApp]:
        """Start or join the cluster, deploy, and wait until the replicas run.

        Returns:
            The fleet and the app that sends requests to it.

        Raises:
            InvalidConfigError: the cluster has too few GPUs, or a replica cannot start.
        """
        self._ray_thread.submit(self._join_cluster).result()
        self._run()
        settings = self._settings
        self._gateway = Gateway(
            self,
            serve=settings.serve,
            metrics=GatewayMetrics(settings.serve.model),
        )
        self._num_running = self._count_running()
        return self, self._gateway

    def _join_cluster(self) -> None:
        import ray

        address = self._settings.options.ray_address
        own: dict[str, Any] = {}
        if address is None:
            own = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE}
        try:
            if address is not None:
                check_address(address)
            ray.init(
                address=address or "local", namespace=APPLICATION, configure_logging=False, **own
            )
        except OSError as error:
            raise InvalidConfigError(
                f"no Ray cluster answers at --ray-address {address}; start one with 'ray start "
                "--head', or leave the option out"
            ) from error
        hosts = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
        check_gpus(self._settings.options.replicas, self._gpus, hosts)

    @property
    def _gpus(self) -> int:
        """GPUs of a replica: 0 where the cluster has none, or JAX may not use them."""
        import ray

        if os.environ.get("JAX_PLATFORMS") == "cpu" or not ray.cluster_resources().get("GPU"):
            return 0
        return self._settings.replica.config.tensor_parallel_size

    def _run(self) -> None:
        """Deploy the present generation and wait until it runs."""
        from ray import serve
        from ray.serve.config import RequestRouterConfig
        from ray.serve.schema import LoggingConfig

        settings, options = self._settings, self._settings.options
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # importing it sets INFO
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        # Without proxies: the server's own port is the only one for clients.
        serve.start(proxy_location="Disabled", logging_config=quiet)
        router: Any = options.request_router
        deployment: Any = serve.deployment(
            Replica,
            name="Replica",
            max_ongoing_requests=settings.serve.limits.connections,
            ray_actor_options={"num_cpus": 0, "num_gpus": self._gpus},
            request_router_config=RequestRouterConfig(
                request_router_class=_ROUTER_CLASSES.get(router, router),
                request_router_kwargs={"tolerance": self._tolerance} if router == "prefix" else {},
            ),
            health_check_period_s=5,
            health_check_timeout_s=30,
            graceful_shutdown_timeout_s=settings.drain_seconds,
            graceful_shutdown_wait_loop_s=0.5,
            max_constructor_retry_count=1,
            logging_config=quiet,
            **self._scale(),
        )
        try:
            self._handle = serve.run(
                deployment.bind(settings.replica, self._generation),
                name=APPLICATION,
                route_prefix=None,
            )
        except RuntimeError as error:
            self._raise_reason(error)

    def _raise_reason(self, error: RuntimeError) -> None:
        """Raise what a replica raised in its constructor, in one line."""
        from ray import serve

        found = serve.status().applications.get(APPLICATION)
        texts = [d.message for d in found.deployments.values()] if found else []
        reasons = [reason for text in (*texts, str(error)) for reason in _REASON.findall(text)]
        raise InvalidConfigError(
            reasons[-1] if reasons else "the replicas could not start; the log says why"
        ) from error

    def _scale(self) -> dict[str, Any]:
        options = self._settings.options
        if options.max_replicas is None:
            return {"num_replicas": options.replicas}
        from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

        policy = AutoscalingPolicy(
            policy_function=QueueAndKvPolicy,
            policy_kwargs={
                "target_ongoing_requests": options.target_ongoing_requests,
                "target_kv_usage": options.target_kv_usage,
            },
        )
        return {
            "num_replicas": None,
            "autoscaling_config": AutoscalingConfig(
                min_replicas=options.lowest,
                initial_replicas=options.replicas,
                max_replicas=options.max_replicas,
                upscale_delay_s=options.upscale_delay_s,
                downscale_delay_s=options.downscale_delay_s,
                look_back_period_s=5.0,
                policy=policy,
            ),
        }

    @property
    def _tolerance(self) -> float:
        """See ``imbalanced_threshold`` of `ReplicaOptions`."""
        given = self._settings.options.imbalanced_threshold
        if given is not None:
            return given
        found = self._settings.replica.config.scheduler.max_num_seqs
        return float(found) if isinstance(found, int) else 64.0

    def _count_running(self) -> int:
        from ray import serve

        found = serve.status().applications.get(APPLICATION)
        if found is None:
            return 0
        states = (d.replica_states.items() for d in found.deployments.values())
        return sum(count for pairs in states for state, count in pairs if state == "RUNNING")

    # What the gateway needs.

    @property
    def num_running(self) -> int:
        """Number of running replicas."""
        return self._num_running

    @contextlib.asynccontextmanager
    async def ask(self, request: ReplicaRequest) -> AsyncGenerator[ReplicaAnswer]:
        """See `rjax.replicas.gateway.Replicas`.

        Ray counts the request as one of the replica for the length of the block, in which
        request and response pass over HTTP.
        """
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            async with self._handle.choose_replica(request) as replica:
                request.chosen = replica.replica_id
                async with self._client.ask(replica.replica_metadata["url"], request) as answer:
                    yield answer
        except RayServeException as error:
            _log.warning("no replica takes a request: %s", error)
            raise ApiError(503, "no replica takes requests now", code="overloaded") from error
        except RayError as error:
            raise ReplicaLostError(str(error).splitlines()[0]) from error
        finally:
            request.end()

    async def ask_all(self, method: str, seconds: float) -> list[Any]:
        """See `rjax.replicas.gateway.Replicas`."""
        from ray.serve.exceptions import RayServeException

        try:
            asked = self._handle.broadcast(method)
            found = await asked.results_async(timeout_s=seconds, return_exceptions=True)
        except (TimeoutError, RayServeException):
            return []
        return [result for result in found if not isinstance(result, BaseException)]

    # What the server needs.

    @property
    def failed(self) -> bool:
        """Whether the Ray cluster is gone."""
        return self._lost_ray

    @property
    def num_live(self) -> int:
        """Number of requests under way."""
        return self._gateway.num_live

    async def start(self) -> None:
        """Follow the state of the replicas, and update them on SIGHUP."""
        self._client = ReplicaClient(self._settings.replica.secret)
        self._polling = asyncio.ensure_future(self._poll())
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):  # Ray has replaced the handlers in C
                signal.signal(number, signal.getsignal(number))
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.update)

    async def log_throughput(self, interval: float) -> None:
        """Do nothing: the replicas log their own throughput."""

    def update(self) -> None:
        """Replace all replicas by new ones, which load the model anew, one after another."""
        if self._updating is not None and not self._updating.done():
            _log.warning("a rolling update is under way; asked for again, it is not started twice")
            return
        self._generation += 1
        self._updating = asyncio.ensure_future(self._update())

    async def _update(self) -> None:
        _log.info("rolling update to generation %d", self._generation)
        try:
            await asyncio.to_thread(self._run)
        except InvalidConfigError as error:
            _log.error("generation %d cannot start: %s", self._generation, error)
        else:
            _log.info("generation %d runs", self._generation)

    async def _poll(self) -> None:
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        failures = 0
        while True:
            try:
                self._num_running = await asyncio.to_thread(self._count_running)
                failures = 0
            except (RayError, RayServeException, RuntimeError, OSError) as error:
                failures += 1
                _log.warning("the state of the replicas is unknown: %s", error)
                self._lost_ray = failures >= 20
            await asyncio.sleep(_POLL_SECONDS)

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for those under way."""
        self._gateway.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gateway.wait_idle(), seconds)
        return not self._gateway.num_live

    async def stop(self) -> None:
        """Cut off the requests under way, end the replicas, and leave the cluster."""
        if self._stopped:
            return
        self._stopped = True
        self._gateway.abort()
        for task in (self._polling, self._updating):
            if task is not None:
                task.cancel()
        await self._client.close()
        await asyncio.to_thread(leave_cluster)

    def close(self) -> None:
        """End the thread that started Ray."""
        self._ray_thread.shutdown(wait=False)


def check_address(address: str) -> None:
    """Check that something listens at HOST:PORT. Ray itself would try for minutes and then end the
    process.

    Raises:
        OSError: nothing listens there, or the name is unknown.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def check_gpus(replicas: int, each: int, hosts: list[float]) -> None:
    """Check that the replicas fit.

    Args:
        replicas: number of replicas.
        each: GPUs of one replica.
        hosts: GPUs of each host of the cluster.

    Raises:
        InvalidConfigError: they do not fit.
    """
    if each > max(hosts, default=0):
        raise InvalidConfigError(
            f"--tensor-parallel-size is {each}, and no host of the cluster has more than "
            f"{max(hosts, default=0):g} GPUs; a replica uses the GPUs of one host"
        )
    if each and sum(host // each for host in hosts) < replicas:
        raise InvalidConfigError(
            f"{replicas} replicas of {each} GPUs do not fit on hosts with "
            f"{', '.join(f'{host:g}' for host in hosts)} GPUs; lower --replicas or "
            "--tensor-parallel-size"
        )


def leave_cluster() -> None:
    """End the replicas and disconnect; a cluster that this process started ends."""
    import ray
    from ray import serve
    from ray.exceptions import RayError

    if ray.is_initialized():
        with contextlib.suppress(RayError, RuntimeError):
            serve.delete(APPLICATION)
        ray.shutdown()
