"""The command: what it compiles ahead, and what it says to wrong input."""

import subprocess
import sys

import httpx2
import pytest
from fastapi.routing import APIRoute

from rjax.commands.serve.command import main
from rjax.serve.api.app import OPERATOR_ROUTERS, ROUTERS
from rjax.serve.config.addresses import bind
from rjax.serve.config.route_paths import ROUTE_PATHS

ON_A_THREAD = "--disable-frontend-multiprocessing"  # no process has to start


def test_an_address_in_use_is_named():
    with bind("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        held.listen()
        with pytest.raises(OSError, match=f"port {port}"):
            bind("127.0.0.1", port)


def test_every_route_is_known_before_the_routes_are_imported():
    routers = (*ROUTERS, *OPERATOR_ROUTERS)
    routes = [route for router in routers for route in router.routes]
    assert set(ROUTE_PATHS) == {route.path for route in routes if isinstance(route, APIRoute)}


def test_weights_can_be_changed_by_operators_only(tmp_path, capsys):
    keys = tmp_path / "keys"
    keys.write_text("one-key-of-sixteen\n")
    flag, operators = "--enable-weight-updates", ["--operator-key-file", str(keys)]
    for given, message in (
        ([flag, "--api-key", "another-key-1234"], "give --operator-key-file"),
        (operators, "does nothing without --enable-weight-updates"),
        ([flag, "--host", "0.0.0.0"], "anyone who reaches 0.0.0.0"),
        ([flag, *operators, "--replicas", "2"], "not --replicas"),
        ([flag, *operators, "--api-key", "one-key-of-sixteen"], "operators keys of their own"),
    ):
        assert main([*given, "--port", "0", "--model", "/nowhere"]) == 2
        assert message in capsys.readouterr().err
    # With an operator's key, every client needs one, and any address will do.
    anywhere = ["--host", "0.0.0.0", "--port", "0", "--model", "/nowhere", ON_A_THREAD]
    assert main([flag, *operators, *anywhere]) == 2
    assert "/nowhere" in (err := capsys.readouterr().err) and "warning" not in err


@pytest.mark.slow
def test_steps_are_compiled_before_the_server_is_ready(folder, tmp_path):
    command = [
        *(sys.executable, "-m", "rjax.serve", "--model", str(folder), "--load-format", "dummy"),
        *("--port", "0", "--num-pages", "64", "--page-size", "8", "--max-num-seqs", "2"),
        *("--max-num-batched-tokens", "8", "--drain-seconds", "1", "--warmup", "on"),
    ]
    log = tmp_path / "stderr"
    with log.open("w") as errors, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as started:  # fmt: skip
        assert started.stdout is not None
        line = started.stdout.readline()
        assert "Compiling steps: 100%" in log.read_text()
        url = line.split(" on ")[1].strip()
        assert httpx2.get(url.removesuffix("/v1") + "/health", timeout=60).json() == {
            "status": "ready"
        }
        started.terminate()
        assert started.wait(60) == 0


def test_a_bad_key_is_found_before_the_model_is_loaded(tmp_path, capsys):
    keys = tmp_path / "keys"
    keys.write_text("ses\tame\n")
    assert main(["--api-key-file", str(keys), "--model", "/nowhere"]) == 2
    assert "API key 1 is not acceptable" in capsys.readouterr().err


@pytest.mark.thorough
def test_short_keys_are_taken_with_a_warning(tmp_path, capsys):
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    unserved = ["--port", "0", "--model", "/nowhere", ON_A_THREAD]
    assert main(["--api-key", "test", "--api-key-file", str(keys), *unserved]) == 2
    lines = capsys.readouterr().err.splitlines()
    [warning] = [line for line in lines if "warning" in line]
    assert warning == (
        "rjax serve: warning: 2 of the API keys can be guessed; give keys of at least 16 random "
        "characters"
    )
    assert "/nowhere" in lines[-1]
    assert main(["--api-key", "a-long-key-of-many-letters", *unserved]) == 2
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--port", "70000"], "--port is 70000; give 0 to 65535"),
        (["--served-model-name", ""], "--served-model-name holds a blank name"),
        (["--served-model-name", "a", " "], "--served-model-name holds a blank name"),
        (["--port", "x"], "invalid int value"),
        (["--uds", "/tmp/x", "--port", "8000"], "--uds goes without --host and --port"),
        (["--uds", "/tmp/x", "--host", "127.0.0.1"], "--uds goes without --host and --port"),
        (["--uds", "/nowhere/x"], "--uds /nowhere/x: No such file or directory"),
        (["--uds", __file__], "is a file that is no socket"),
        (["--uds", "/tmp/" + "x" * 103], "give a path of at most 107 bytes"),
        (["--uds", ""], "give a path of at most 107 bytes"),
        (["--root-path", "llm/"], "give a path such as /llm"),
        (["--root-path", "/v1"], "the route /v1/"),
        (["--root-path", "/metrics"], "the route /metrics begins"),
        (["--allowed-origins", "https://a.example"], "give a JSON list"),
        (["--allowed-origins", "[1]"], "give a JSON list"),
        (["--allowed-origins", '["https://a.example/x"]'], "without a path"),
        (["--allowed-origins", '["*"]', "--allow-credentials"], "name the origins"),
        (["--allowed-origins", '["*"]', "--allowed-methods", '["A B"]'], "give names, or *"),
        (["--allowed-headers", '["a"]'], "give the origins too"),
        (["--allowed-hosts", "a.example"], "give a JSON list"),
        (["--allowed-hosts", '["a.example:80"]'], "without a port"),
        (["--drain-seconds", "-1"], "give 0 to 86400 seconds"),
        (["--drain-seconds", "nan"], "give 0 to 86400 seconds"),
        (["--limit", "n"], "NAME=VALUE"),
        (["--limit", "n=0"], "above 0"),
        (["--limit", "sequence=1"], "the nearest is 'sequences'"),
        (["--limit", "m=1"], "known are address_connections, "),
        (["--api-key-file", "/nowhere"], "/nowhere"),
        (["--api-key-file", "/dev/null"], "holds no key"),
        (["--api-key", ""], "API key 1 is empty"),
        (["--chat-template", "/nowhere"], "/nowhere"),
        (["--prefix-file", "a=/nowhere"], "a=/nowhere"),
        (["--prefix-file", f"a b={__file__}"], "a b="),
        (["--prefix-file", "a"], "--prefix-file 'a' is not of the form NAME=VALUE"),
        (["--host", "192.0.2.1", "--port", "0"], "192.0.2.1 port 0"),
        pytest.param(["--model", "/nowhere"], "/nowhere", marks=pytest.mark.thorough),
        (["--tool-call-parser", "x"], "hermes"),
        (["--drain-second", "3"], "did you mean --drain-seconds?"),
        (["--page-size", "7"], "page_size is 7"),
        pytest.param(
            *(["--num-pages", "1", "--warmup", "off", ON_A_THREAD], "raise num_pages"),
            marks=pytest.mark.thorough,  # it loads the model
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line(given, said, capsys):
    port = [] if {"--port", "--uds"} & set(given) else ["--port", "0"]  # others may have 8000
    assert main([*given, *port]) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("rjax serve: error: ")]
    assert len(lines) == 1
    assert said in lines[0]
