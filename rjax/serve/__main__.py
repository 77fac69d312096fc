"""The command ``python -m rjax.serve``: an OpenAI-compatible server."""

if __name__ == "__main__":  # before all imports, so that Ctrl-C works during them
    from rjax.cli.process import run_module

    run_module("rjax.serve", "rjax.serve.__main__")

import argparse
import asyncio
import gc
import ipaddress
import logging
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from rjax.cli.arguments import add_engine_arguments, given_engine_options
from rjax.cli.bundled import BUNDLED_NAME
from rjax.cli.errors import BAD_INPUT, OneLineParser, run_command
from rjax.cli.prompts import read_text
from rjax.errors import InvalidConfigError
from rjax.serve.limits import ServeLimits, limits_table
from rjax.serve.options import HttpOptions, json_names

_NAME = "rjax.serve"
ENGINE_FAILED = 1

_EPILOG = """\
examples:
  python -m rjax.serve
      the bundled model on http://127.0.0.1:8000/v1
  python -m rjax.serve --model ./llama --port 9000 --api-key-file keys.txt
      your model, for clients with an API key (one key per line of the file)
  python -m rjax.serve --warmup off --max-model-len 1024
      a quick start for testing; the first use of each step size is slow
  python -m rjax.serve --prefix-file support=support.safetensors
      a long system prompt with saved KV
  python -m rjax.serve --list-limits
      all limits; change one with --limit n=8

Requests with a common prefix, such as a system message, share its KV automatically.

exit status: 0 stopped and drained, 1 the engine failed, 2 bad input, 130 interrupted before the
port was open
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
        from rjax.serve import prefixes
        from rjax.serve.app import check_root_path
        from rjax.serve.auth import KeyRing
        from rjax.serve.server import Server, bind, make_service, set_ulimit
    except ModuleNotFoundError as error:
        raise InvalidConfigError(
            f"the server needs {error.name}, which is not installed; install rjax[serve]"
        ) from error

    set_ulimit(limits)
    # Detect invalid keys, paths and names, and an address in use, before loading the model.
    check_root_path(http.root_path)
    key_ring = KeyRing(keys)
    prefix_files = _pairs("--prefix-file", arguments.prefix_file)
    for name, path in prefix_files.items():
        if not prefixes.is_valid_name(name, limits) or not pathlib.Path(path).is_file():
            raise InvalidConfigError(
                f"--prefix-file {name}={path}: give a name of letters, digits, '.', '_' or '-', "
                "and a file that is there"
            )
    with bind(arguments.host, arguments.port) as listener:
        if not keys and not _loopback(arguments.host):
            print(
                f"{_NAME}: warning: anyone who reaches {arguments.host} may use this server; give "
                "--api-key-file",
                file=sys.stderr,
            )
        engine = _engine(options)
        root = _name(options.get("model"))
        service = make_service(
            engine,
            model=arguments.served_model_name or root,
            root=root,
            keys=key_ring,
            limits=limits,
            tool_format=arguments.tool_format,
            strict_fields=arguments.strict_fields,
            reasoning_parser=arguments.reasoning_parser,
            literal_json_schemas=arguments.literal_json_schemas,
            http=http,
        )
        prefixes.load(prefix_files, engine, service)
        # Exclude the long-lived objects from garbage collection.
        gc.collect()
        gc.freeze()
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        server = Server(
            service,
            drain_seconds=arguments.drain_seconds,
            access_log=arguments.access_log,
            ready=lambda: print(f"{service.model} on http://{shown}:{port}/v1", flush=True),
        )
        asyncio.run(server.run_on(listener))
    if service.engine.failed:
        print(f"{_NAME}: error: the engine stopped; the log says why", file=sys.stderr)
        return ENGINE_FAILED
    return 0


def _engine(options: dict[str, Any]) -> Any:
    """The engine, after two warm-up requests."""
    from rjax.config import EngineConfig
    from rjax.engine_builder import build_engine
    from rjax.sampling import SamplingParams

    engine = build_engine(EngineConfig.from_options(options))
    if engine.tokenizer is None:
        raise InvalidConfigError("the model has no tokenizer; a server needs one")
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for i in range(2):  # the second runs with the same array layouts as all later ones
        engine.add_request(f"warm-up {i}", [0], greedy)
        while engine.has_unfinished_requests():
            engine.step()
    return engine


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
