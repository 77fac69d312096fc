"""The options of ``rjax serve`` about replicas."""

import argparse
import dataclasses

from rjax.errors import InvalidConfigError
from rjax.serve.config.replica_options import ReplicaOptions, flag

_NAMES = [field.name for field in dataclasses.fields(ReplicaOptions)]


def add_replica_arguments(group: "argparse._ArgumentGroup") -> None:
    """Add the flags. Those that are not given leave None."""
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="run N replicas of the model under Ray Serve behind this address; needs rjax[ray]. "
        "Each takes --tensor-parallel-size GPUs (default: one engine in this process)",
    )
    for name, kind, letter, text in (
        ("min_replicas", int, "N", "lower limit of autoscaling (default: --replicas)"),
        ("max_replicas", int, "N", "upper limit; turns autoscaling on (default: off)"),
        (
            "target_ongoing_requests",
            float,
            "N",
            "running and waiting sequences of a replica that autoscaling aims at (default: its "
            "--max-num-seqs)",
        ),
        (
            "target_kv_usage",
            float,
            "SHARE",
            "share of the KV pool in use that autoscaling aims at (default: 0.8)",
        ),
        ("upscale_delay_s", float, "S", "seconds that replicas must be too few (default: 10)"),
        ("downscale_delay_s", float, "S", "seconds that they must be too many (default: 300)"),
    ):
        group.add_argument(flag(name), dest=name, type=kind, metavar=letter, help=text)
    group.add_argument(
        "--request-router",
        metavar="NAME",
        help="how requests are routed: prefix sends equal prefixes to the same replica unless it "
        "is overloaded; round-robin; power-of-two; or the import path of a RequestRouter class of "
        "Ray Serve (default: prefix)",
    )
    group.add_argument(
        "--imbalanced-threshold",
        type=float,
        metavar="N",
        help="with the router prefix: requests that a replica may have more than the least loaded "
        "one before requests with its prefixes go elsewhere (default: --max-num-seqs)",
    )
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="HOST:PORT of a running Ray cluster, or auto (default: start one that listens on this "
        "machine only)",
    )


def replica_options(arguments: argparse.Namespace) -> ReplicaOptions | None:
    """The options on a command line; None without ``--replicas``.

    Raises:
        InvalidConfigError: an option is out of range, or does nothing without ``--replicas``.
    """
    given = {name: value for name in _NAMES if (value := getattr(arguments, name)) is not None}
    if "replicas" not in given:
        for name in given:
            raise InvalidConfigError(f"{flag(name)} does nothing without --replicas; give it too")
        return None
    return ReplicaOptions(**given)
