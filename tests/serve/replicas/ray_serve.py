"""Ray Serve, whose import warns of its own use of pydantic."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
    from ray.serve._private.request_router.common import RequestMetadata
    from ray.serve.request_router import PendingRequest, RunningReplica

    from rjax.replicas.prefix_router import PrefixRouter

__all__ = [
    "DeploymentHandleSource",
    "DeploymentID",
    "PendingRequest",
    "PrefixRouter",
    "ReplicaID",
    "RequestMetadata",
    "RunningReplica",
]
