"""The interface of the HTTP server's backend: an engine in this process, or replicas."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Backend(Protocol):
    """Starts, drains and stops with the HTTP server; see `rjax.serve.http.server.Server`."""

    @property
    def failed(self) -> bool:
        """Whether it stopped on an error and cannot answer any more."""
        ...

    @property
    def num_live(self) -> int:
        """Number of unfinished requests."""
        ...

    async def start(self) -> None:
        """Start to serve, on the event loop that all later calls come from."""
        ...

    async def log_throughput(self, interval: float) -> None:
        """Log the throughput every ``interval`` seconds until it stops."""
        ...

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the unfinished ones. Return whether all finished in
        time."""
        ...

    async def stop(self) -> None:
        """Abort unfinished requests and stop."""
        ...

    def close(self) -> None:
        """End processes and threads. Called once, after `stop`."""
        ...
