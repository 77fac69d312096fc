"""The command ``python -m rjax.serve``: an OpenAI-compatible server."""

if __name__ == "__main__":  # before all imports, so that Ctrl-C works during them
    from rjax.cli.process import run_module

    run_module("rjax.serve", "rjax.serve.__main__")

import argparse
import asyncio
import ipaddress
import logging
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Sequence

from rjax.cli.arguments import add_engine_arguments, given_engine_options
from rjax.cli.bundled import BUNDLED_NAME
from rjax.cli.errors import BAD_INPUT, OneLineParser, run_command
from rjax.cli.prompts import read_text
from rjax.config import EngineConfig
from rjax.errors import InvalidConfigError
from rjax.serve.limits import ServeLimits, limits_table
from rjax.serve.options import HttpOptions, json_names
from rjax.serve.prefix_names import is_valid_name
from rjax.serve.route_paths import check_root_path

_NAME = "rjax.serve"
ENGINE_FAILED = 1
_log = logging.getLogger(_NAME)

_EPILOG = """\
examples:
  python -m rjax.serve
      the bundled model on http://127.0.0.1:8000/v1
  python -m rjax.serve --model ./llama --port 9000 --api-key-file keys.txt
      your model, for clients with an API key (one key per line of the file)
  python -m rjax.serve --warmup off --max-model-len 1024
      for short tests: nothing compiles in the background, only what requests need
  python -m rjax.serve --warmup on --early-requests refuse
      requests get a 503 until all step sizes are compiled
  python -m rjax.serve --prefix-file support=support.safetensors
      a long system prompt with saved KV
  python -m rjax.serve --list-limits
      all limits; change one with --limit n=8

Requests with a common prefix, such as a system message, share its KV automatically.

The port opens at once. Until the model is loaded, requests wait and /health is a 503.

exit status: 0 stopped and drained, 1 the engine failed, 2 bad input, 130 interrupted before the
server was ready; SIGTERM before that ends the process at once
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = OneLineParser(
        prog=f"python -m {_NAME}",
        usage="%(prog)s [options]",
        description="Serve a model over HTTP with OpenAI's API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    server = parser.add_argument_group("server")
    server.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    server.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    server.add_argument(
        "--served-model-name", metavar="NAME", help="name for clients (default: the model's)"
    )
    server.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="accepted API keys, one per line; each is a tenant with its own prefix cache",
    )
    server.add_argument(
        "--prefix-file",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a named prefix for every client, from a file that LLM.save_prefix wrote; repeatable",
    )
    server.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="path at which a reverse proxy serves this server, such as /llm; requests may contain "
        "it or not",
    )
    for flag, what, default in (
        ("--allowed-origins", "origins of web pages that may use the server (CORS)", "none"),
        ("--allowed-methods", "methods of their requests", "all"),
        ("--allowed-headers", "headers of their requests", "all"),
    ):
        server.add_argument(
            flag,
            metavar="JSON",
            help=f"a JSON list of {what}; '[\"*\"]' is all (default: {default})",
        )
    server.add_argument(
        "--allow-credentials",
        action="store_true",
        help="let those pages send cookies, for example for a proxy",
    )
    server.add_argument(
        "--enable-tokenizer-info-endpoint",
        action="store_true",
        help="show the tokenizer's configuration and chat template at /tokenizer_info",
    )
    server.add_argument(
        "--tool-format",
        choices=("auto", "hermes", "llama3"),
        default="auto",
        help="how the model writes tool calls (default: by its chat template)",
    )
    server.add_argument(
        "--reasoning-parser",
        choices=("qwen3", "deepseek_r1", "openai_gptoss"),
        help="separate the model's reasoning from the content, by its markup (default: none)",
    )
    server.add_argument(
        "--literal-json-schemas",
        action="store_true",
        help="let the model add properties to objects whose schema does not set "
        "additionalProperties (default: such objects are closed)",
    )
    server.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that accepted requests may continue after SIGTERM (default: 30)",
    )
    server.add_argument(
        "--early-requests",
        choices=("wait", "refuse"),
        default="wait",
        help="requests before the server is ready wait, or get a 503 with Retry-After (default: "
        "wait)",
    )
    server.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a limit; repeatable",
    )
    server.add_argument(
        "--strict-fields",
        action="store_true",
        help="refuse requests with unknown fields (default: ignore them, and log each name once)",
    )
    server.add_argument("--list-limits", action="store_true", help="print the limits and stop")
    server.add_argument("--access-log", action="store_true", help="log a line for each request")
    add_engine_arguments(parser, {"warmup": "background"})
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else BAD_INPUT
    return run_command(_NAME, lambda: _serve(arguments))


def _serve(arguments: argparse.Namespace) -> int:
    limits = ServeLimits.from_options(_pairs("--limit", arguments.limit))
    if arguments.list_limits:
        print(limits_table(limits))
        return 0
    if not 0 <= arguments.drain_seconds < 86400:
        raise InvalidConfigError(
            f"--drain-seconds is {arguments.drain_seconds}; give 0 to 86400 seconds"
        )
    if not 0 <= arguments.port < 65536:
        raise InvalidConfigError(f"--port is {arguments.port}; give 0 to 65535")
    keys = _keys(arguments.api_key_file)
    http = _http_options(arguments)
    options = given_engine_options(arguments)
    if "chat_template" in arguments:
        options["chat_template"] = read_text(arguments.chat_template, "--chat-template")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    quiet = ["jax", "uvicorn.error", "transformers"]
    if not arguments.access_log:
        quiet.append("rjax.serve.requests")
    for name in quiet:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        from rjax.serve.auth import KeyRing
        from rjax.serve.responses import model_card
        from rjax.serve.server import Server, bind, set_ulimit
        from rjax.serve.service_loader import ServiceLoader
        from rjax.serve.starting_app import StartingApp
    except ModuleNotFoundError as error:
        raise InvalidConfigError(
            f"the server needs {error.name}, which is not installed; install rjax[serve]"
        ) from error

    set_ulimit(limits)
    # Detect all invalid options, and an address in use, before clients can connect.
    check_root_path(http.root_path)
    key_ring = KeyRing(keys)
    prefix_files = _prefix_files(arguments.prefix_file, limits)
    config = EngineConfig.from_options(options)
    root = _name(options.get("model"))
    model = arguments.served_model_name or root
    with bind(arguments.host, arguments.port) as listener:
        if not keys and not _loopback(arguments.host):
            print(
                f"{_NAME}: warning: anyone who reaches {arguments.host} may use this server; give "
                "--api-key-file",
                file=sys.stderr,
            )
        url = _url(listener)
        card = model_card(model, root, int(time.time()), None)
        loader = ServiceLoader(
            config,
            prefix_files,
            {
                "model": model,
                "root": root,
                "created": card.created,
                "keys": key_ring,
                "limits": limits,
                "http": http,
                "tool_format": arguments.tool_format,
                "strict_fields": arguments.strict_fields,
                "reasoning_parser": arguments.reasoning_parser,
                "literal_json_schemas": arguments.literal_json_schemas,
            },
        )
        app = StartingApp(
            card,
            keys=key_ring,
            limits=limits,
            http=http,
            early_requests=arguments.early_requests,
            progress=loader.progress,
        )
        server = Server(
            app,
            loader.load,
            drain_seconds=arguments.drain_seconds,
            access_log=arguments.access_log,
            listening=lambda: _log.info("listening on %s, starting", url),
            ready=lambda: print(f"{model} on {url}/v1", flush=True),
        )
        asyncio.run(server.run_on(listener))
    if server.stopped_by is not None:
        _end_by_signal(server.stopped_by)
    if server.service is not None and server.service.engine.failed:
        print(f"{_NAME}: error: the engine stopped; the log says why", file=sys.stderr)
        return ENGINE_FAILED
    return 0


def _end_by_signal(sig: int) -> None:
    """End as a process does that does not handle the signal. The thread that loads the model is
    not waited for."""
    if sig == signal.SIGINT:
        raise KeyboardInterrupt
    sys.stdout.flush()
    signal.signal(sig, signal.SIG_DFL)
    signal.raise_signal(sig)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _prefix_files(given: list[str], limits: ServeLimits) -> dict[str, str]:
    files = _pairs("--prefix-file", given)
    for name, path in files.items():
        if not is_valid_name(name, limits) or not pathlib.Path(path).is_file():
            raise InvalidConfigError(
                f"--prefix-file {name}={path}: give a name of letters, digits, '.', '_' or '-', "
                "and a file that is there"
            )
    return files


def _http_options(arguments: argparse.Namespace) -> HttpOptions:
    lists = {
        name: json_names("--" + name.replace("_", "-"), text)
        for name in ("allowed_origins", "allowed_methods", "allowed_headers")
        if (text := getattr(arguments, name)) is not None
    }
    return HttpOptions(
        root_path=arguments.root_path,
        allow_credentials=arguments.allow_credentials,
        tokenizer_info=arguments.enable_tokenizer_info_endpoint,
        **lists,
    )


def _keys(path: str | None) -> list[str]:
    if path is None:
        return []
    lines = [line.strip() for line in read_text(path, "--api-key-file").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InvalidConfigError(f"--api-key-file {path!r} holds no key; write one on each line")
    return keys


def _pairs(flag: str, given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or name in found:
            raise InvalidConfigError(
                f"{flag} {text!r} is not of the form NAME=VALUE, or the name is there twice"
            )
        found[name] = value
    return found


def _name(model: str | None) -> str:
    if model is None:
        return BUNDLED_NAME
    path = pathlib.Path(model)
    return path.resolve().name if path.exists() else model


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
