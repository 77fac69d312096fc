"""HTTP between the gateway and the servers of the replicas."""

import contextlib
import dataclasses
import io
from collections.abc import AsyncGenerator, Awaitable, Callable

import aiohttp
import yarl
from starlette.types import Scope

from rjax.replicas.replica_app import LOST_HEADER, SECRET_HEADER
from rjax.replicas.replica_request import ReplicaRequest
from rjax.serve.protocol.errors import ApiError

_CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 60.0  # that an unused connection is kept; a replica keeps it longer
_HEADER_BYTES = 64 * 2**10  # of a response's header
_ONE_WRITE = 2**20  # bytes; larger bodies are sent in pieces
_OF_CONNECTION = frozenset(  # headers that hold between two machines (RFC 9110, 7.6.1)
    (
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"expect"),
    )
)
_OF_THIS_HOP = _OF_CONNECTION | {b"content-length", SECRET_HEADER}


class ReplicaLostError(Exception):
    """The replica of a request died, or its engine did."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """A response whose body is still to come.

    Attributes:
        status: HTTP status code.
        headers: headers of the response, without those of the connection.
        read: returns the bytes that have come, and b"" at the end. Raises `ReplicaLostError`.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    read: Callable[[], Awaitable[bytes]]


class ReplicaClient:
    """Sends requests to replicas, over connections that it keeps. Make it on the event loop that
    uses it.

    Args:
        secret: secret that the replicas ask for.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            auto_decompress=False,
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
        )

    @contextlib.asynccontextmanager
    async def ask(self, url: str, request: ReplicaRequest) -> AsyncGenerator[ReplicaAnswer]:
        """Send a request and wait for the headers of its response. Leaving the block before the
        body has ended closes the connection, which ends the request in its replica.

        Args:
            url: URL of the replica, without a path.
            request: the request to send.

        Raises:
            ReplicaLostError: nothing answers there, the connection broke, or the engine is dead.
            ApiError: 404, the target of the request is no path.
        """
        given = request.scope["headers"]
        named = b",".join(value for name, value in given if name == b"connection")
        dropped = _OF_THIS_HOP.union(name.strip().lower() for name in named.split(b","))
        headers = [(_text(name), _text(value)) for name, value in given if name not in dropped]
        headers.append((SECRET_HEADER.decode(), self._secret))
        body = request.body
        try:
            response = await self._session.request(
                request.scope["method"],
                _target(url, request.scope),
                data=body if len(body) <= _ONE_WRITE else io.BytesIO(body),
                headers=headers,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReplicaLostError(f"{type(error).__name__}: {error}") from error
        try:
            found = [(name.lower(), value) for name, value in response.raw_headers]
            if any(name == LOST_HEADER for name, _ in found):
                raise ReplicaLostError("its engine stopped")

            async def read() -> bytes:
                try:
                    return await response.content.readany()
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    raise ReplicaLostError(f"{type(error).__name__}: {error}") from error

            own = [(name, value) for name, value in found if name not in _OF_CONNECTION]
            yield ReplicaAnswer(response.status, own, read)
        finally:
            response.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


def _target(url: str, scope: Scope) -> yarl.URL:
    path = scope.get("raw_path") or scope["path"].encode()
    query = scope["query_string"]
    if not path.startswith(b"/"):
        raise ApiError(404, "the target of the request is no path")
    target = path + b"?" + query if query else path
    return yarl.URL(url + _text(target), encoded=True)


def _text(value: bytes) -> str:
    """A header or a target for aiohttp, which sends UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
