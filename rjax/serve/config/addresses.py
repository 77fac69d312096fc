"""The addresses that a server listens on."""

import contextlib
import dataclasses
import errno
import ipaddress
import os
import pathlib
import socket
import stat
from collections.abc import Iterator

from rjax.errors import InvalidConfigError

_MODE = 0o660  # of a Unix socket: its owner and group may connect
_MAX_PATH = 107  # bytes of a Unix socket's path, in Linux


@dataclasses.dataclass(frozen=True, slots=True)
class HostAddress:
    """A host and a port; port 0 takes a free one."""

    host: str
    port: int

    @property
    def is_private(self) -> bool:
        """Whether only users of this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @contextlib.contextmanager
    def bound(self) -> Iterator[socket.socket]:
        """A bound socket that does not listen yet.

        Raises:
            OSError: the address is in use or not local.
        """
        with bind(self.host, self.port) as found:
            yield found

    def url(self, listener: socket.socket) -> str:
        """The URL of the bound socket, without a path."""
        host, port = listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def api(self, listener: socket.socket) -> str:
        """The base URL of OpenAI's API."""
        return self.url(listener) + "/v1"


@dataclasses.dataclass(frozen=True, slots=True)
class UnixAddress:
    """The path of a Unix socket."""

    path: str

    @property
    def is_private(self) -> bool:
        """Whether only users of this machine can connect."""
        return True

    @contextlib.contextmanager
    def bound(self) -> Iterator[socket.socket]:
        """A bound socket that does not listen yet. Its file is replaced if no process listens on
        it, and removed at the end.

        Raises:
            InvalidConfigError: the path is too long, or its file is not a socket.
            OSError: a process listens on the socket, or the file cannot be made.
        """
        path = pathlib.Path(self.path)
        if not 0 < len(os.fsencode(self.path)) <= _MAX_PATH:
            raise InvalidConfigError(
                f"--uds is {self.path!r}; give a path of at most {_MAX_PATH} bytes"
            )
        with socket.socket(socket.AF_UNIX) as found:
            found.setblocking(False)
            self._remove_stale(path)
            mask = os.umask(0o777 & ~_MODE)
            try:
                found.bind(self.path)
            except OSError as error:
                raise OSError(error.errno, f"--uds {self.path}: {error.strerror}") from None
            finally:
                os.umask(mask)
            own = path.stat().st_ino
            try:
                yield found
            finally:
                with contextlib.suppress(OSError):
                    if path.lstat().st_ino == own:  # another server may have replaced it
                        path.unlink()

    def url(self, listener: socket.socket) -> str:
        """The address as nginx and vLLM write it."""
        return f"unix:{self.path}"

    def api(self, listener: socket.socket) -> str:
        """The same as `url`: the path /v1 is not part of it."""
        return self.url(listener)

    def _remove_stale(self, path: pathlib.Path) -> None:
        try:
            mode = path.lstat().st_mode
        except OSError:
            return
        if not stat.S_ISSOCK(mode):
            raise InvalidConfigError(
                f"--uds {self.path} is a file that is no socket; give another path"
            )
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self.path)
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)  # of a server that was killed
                return
            except OSError:  # such as a full queue of connections
                pass
        raise OSError(
            errno.EADDRINUSE, f"--uds {self.path}: another server listens on it; give another path"
        )


type Address = HostAddress | UnixAddress


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 takes a free one.

    Raises:
        OSError: the address is in use or not local.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on the connections.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setblocking(False)
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise OSError(error.errno, f"{host} port {port}: {error.strerror}") from None
    return found
