"""The app of a replica's own HTTP server, which only answers the gateway."""

import hmac
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.starting_app import StartingApp
from rjax.serve.protocol.errors import ApiError, error_response

SECRET_HEADER = b"x-rjax-gateway"
"""Header of the gateway's requests, whose value is a secret that only the gateway knows."""

LOST_HEADER = b"x-rjax-replica-lost"
"""Header of responses that the gateway should replace by the answer of another replica."""


class ReplicaApp(StartingApp):
    """Passes the gateway's requests to the service's app, and refuses all others, because the port
    is open to other users of the machine or the cluster.

    Args:
        config: the server's configuration.
        secret: value of `SECRET_HEADER` in the gateway's requests.
        failed: returns whether the engine has stopped on an error.
    """

    def __init__(self, config: ServeConfig, secret: str, failed: Callable[[], bool]) -> None:
        super().__init__(config)
        self._secret = secret.encode()
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        headers: list[tuple[bytes, Any]] = scope["headers"]
        given = next((value for name, value in headers if name == SECRET_HEADER), b"")
        if not hmac.compare_digest(given, self._secret):
            error = ApiError(403, "this is the port of a replica; ask the server's own address")
            await error_response(error, self.limits.retry_after)(scope, receive, send)
        elif self._failed():
            error = ApiError(503, "the engine of this replica stopped", code="engine_dead")
            response = error_response(error, self.limits.retry_after)
            response.headers[LOST_HEADER.decode()] = "1"
            await response(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
