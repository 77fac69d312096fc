"""Keeps Ray's sockets on this machine."""

import os
import secrets
from collections.abc import Callable
from typing import Any

from rjax.errors import InvalidConfigError

_ENVIRONMENT = {
    # Ray then takes 127.0.0.1 as the address of the machine, and its servers listen there only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default 15, at which other processes delay the engine's steps
}


def prepare_local_cluster() -> None:
    """Make the Ray cluster that this process starts listen on 127.0.0.1 only, and require a secret
    that other users of the machine do not know. Must run before ``import ray``.

    Ray has no arguments for this; it reads the environment, which its processes inherit.
    """
    os.environ.update(_ENVIRONMENT)
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def bind_replica_to_loopback() -> None:
    """Bind the gRPC server of this replica's process to 127.0.0.1.

    Ray Serve starts it after the replica's constructor, on all interfaces, and has no option for
    the address. Requests do not come through it.

    Raises:
        InvalidConfigError: this version of Ray starts the server in another way.
    """
    from ray.serve._private import replica

    name = "add_port_to_grpc_server"
    add_port: Callable[[Any, str], int] | None = getattr(replica, name, None)
    if add_port is None:
        raise InvalidConfigError(
            "this version of Ray Serve would open a port to other machines; install the version "
            "of requirements.lock"
        )

    def add_local_port(server: Any, address: str) -> int:
        return add_port(server, address.replace("[::]", "127.0.0.1"))

    setattr(replica, name, add_local_port)
