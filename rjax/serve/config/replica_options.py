"""Options of a server about its replicas."""

import dataclasses
from typing import Any

from rjax.errors import InvalidConfigError

ROUTERS = ("prefix", "round-robin", "power-of-two")
"""Names of the request routers."""

_MOST = 1024  # replicas


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How many replicas run, where, and how requests are routed to them.

    Attributes:
        replicas: number of replicas at the start; without autoscaling, at all times.
        min_replicas: lower limit of autoscaling; by default ``replicas``.
        max_replicas: upper limit; None turns autoscaling off.
        target_ongoing_requests: sequences of a replica, running and waiting, that autoscaling aims
            at; None aims at its ``max_num_seqs``.
        target_kv_usage: share of a replica's KV pool in use that autoscaling aims at, 0 to 1.
        upscale_delay_s, downscale_delay_s: seconds that a decision must hold.
        imbalanced_threshold: requests that a replica may have more than the least loaded one before
            a prompt whose prefix it holds goes elsewhere; None takes ``max_num_seqs`` (64 if that
            is "auto").
        request_router: a name of `ROUTERS`, or the import path of a ``RequestRouter`` class of Ray
            Serve, whose requests are `rjax.replicas.replica_request.ReplicaRequest`.
        ray_address: address of a running Ray cluster, or "auto"; None starts one on this machine.

    Raises:
        InvalidConfigError: a value is out of range, or does nothing without another.
    """

    replicas: int
    min_replicas: int | None = None
    max_replicas: int | None = None
    target_ongoing_requests: float | None = None
    target_kv_usage: float = 0.8
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    request_router: str = "prefix"
    imbalanced_threshold: float | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= _MOST:
            raise InvalidConfigError(f"--replicas is {self.replicas}; give 1 to {_MOST}")
        if self.max_replicas is None:
            for name in _AUTOSCALING:
                if getattr(self, name) != _DEFAULTS[name]:
                    raise InvalidConfigError(
                        f"{flag(name)} does nothing without --max-replicas; give it too"
                    )
        elif not 1 <= self.lowest <= self.replicas <= self.max_replicas <= _MOST:
            raise InvalidConfigError(
                f"--min-replicas is {self.lowest}, --replicas {self.replicas} and --max-replicas "
                f"{self.max_replicas}; give them in this order, 1 to {_MOST}"
            )
        if self.request_router not in ROUTERS and "." not in self.request_router:
            raise InvalidConfigError(
                f"--request-router is {self.request_router!r}; give {', '.join(ROUTERS)}, or the "
                "import path of a class, such as package.module.Router"
            )
        if self.imbalanced_threshold is not None:
            if not self.imbalanced_threshold > 0:
                raise InvalidConfigError(
                    f"--imbalanced-threshold is {self.imbalanced_threshold}; give more than 0"
                )
            if self.request_router != "prefix":
                raise InvalidConfigError(
                    "--imbalanced-threshold does nothing with --request-router "
                    f"{self.request_router}; leave it out"
                )
        target = self.target_ongoing_requests
        if target is not None and not target > 0:
            raise InvalidConfigError(f"--target-ongoing-requests is {target}; give more than 0")
        if not 0 < self.target_kv_usage <= 1:
            raise InvalidConfigError(
                f"--target-kv-usage is {self.target_kv_usage}; give more than 0, up to 1"
            )
        for name in ("upscale_delay_s", "downscale_delay_s"):
            if not 0 <= getattr(self, name) < 86400:
                raise InvalidConfigError(
                    f"{flag(name)} is {getattr(self, name)}; give 0 to 86400 seconds"
                )

    @property
    def lowest(self) -> int:
        """The lower limit of autoscaling."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def loopback(self) -> bool:
        """Whether all processes are on this machine, so that Ray listens only there."""
        return self.ray_address is None


_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(ReplicaOptions)
}
_AUTOSCALING = (
    *("min_replicas", "target_ongoing_requests", "target_kv_usage"),
    *("upscale_delay_s", "downscale_delay_s"),
)


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-").replace("-delay-s", "-delay-seconds")
