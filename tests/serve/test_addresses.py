"""The addresses that a server listens on: files of Unix sockets, and requests over them."""

import socket
import stat
from pathlib import Path

import httpx2
import pytest

from rjax.commands.serve.command import main
from rjax.errors import InvalidConfigError
from rjax.serve.config.addresses import HostAddress, UnixAddress
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.server import Server
from rjax.serve.http.starting_app import StartingApp

from .live_server import running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rjax.sock"


def never_built():
    raise InvalidConfigError("the model has no tokenizer")


def test_requests_over_a_unix_socket(path, capsys):
    app = StartingApp(ServeConfig(model="tiny"))
    server = Server(app, never_built, listening=lambda: None)
    server._start = app._decided.wait  # type: ignore[method-assign]
    with running(server, address=UnixAddress(str(path))) as (url, _):
        assert url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), timeout=60) as client:
            health = client.get("http://server/health")
            assert (health.status_code, health.json()) == (503, {"status": "starting"})
            [card] = client.get("http://server/v1/models").json()["data"]
            assert card["id"] == "tiny"
        assert main(["--uds", str(path), "--model", "/nowhere"]) == 2
        assert f"--uds {path}: another server listens on it" in capsys.readouterr().err
    assert not path.exists()


def test_the_file_of_a_dead_server_is_replaced(path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with UnixAddress(str(path)).bound() as listener, socket.socket(socket.AF_UNIX) as client:
        listener.listen()
        client.connect(str(path))
    assert not path.exists()


def test_the_file_of_a_later_server_is_left(path):
    address = UnixAddress(str(path))
    with address.bound():
        path.unlink()
        with socket.socket(socket.AF_UNIX) as later:
            later.bind(str(path))
            own = path.stat().st_ino
    assert path.stat().st_ino == own


def test_another_file_is_left(path):
    path.write_text("mine")
    with pytest.raises(InvalidConfigError, match="no socket"), UnixAddress(str(path)).bound():
        pass
    assert path.read_text() == "mine"


@pytest.mark.thorough
def test_the_file_goes_when_the_model_cannot_be_loaded(path, capsys):
    on_a_thread = "--disable-frontend-multiprocessing"  # no process has to start
    assert main(["--uds", str(path), "--model", "/nowhere", on_a_thread]) == 2
    assert "/nowhere" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("host", "private"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("x", False)],
)
def test_who_can_reach_a_host(host, private):
    assert HostAddress(host, 0).is_private is private


def test_the_url_of_a_free_port():
    with HostAddress("127.0.0.1", 0).bound() as listener:
        port = listener.getsockname()[1]
        address = HostAddress("127.0.0.1", 0)
        assert address.api(listener) == f"http://127.0.0.1:{port}/v1"
