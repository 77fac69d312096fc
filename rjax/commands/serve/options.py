"""The options of ``rjax serve``, and the settings that they give."""

import argparse
import logging
import pathlib

from rjax.cli.arguments import add_engine_arguments, add_model_argument
from rjax.cli.bundled import BUNDLED_NAME
from rjax.cli.parser import OneLineParser, add_no_ops
from rjax.cli.prompts import read_text
from rjax.commands.serve.replicas import add_replica_arguments
from rjax.config.option_docs import attribute_docs
from rjax.errors import InvalidConfigError
from rjax.serve.config.addresses import Address, HostAddress, UnixAddress
from rjax.serve.config.http_options import HttpOptions, json_names
from rjax.serve.config.limits import ServeLimits
from rjax.serve.config.prefix_names import is_valid_name
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.parsing.tools.registry import TOOL_CALL_PARSERS
from rjax.vllm.options import SERVER_NO_OPS, instead_of

NAME = "rjax serve"
_HARMONY = "openai_gptoss"
LOG_LEVELS = {
    "critical": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": 5,  # uvicorn's own
}

_HELP = {
    name: text.replace("``", "").removesuffix(".")
    for name, text in attribute_docs(ServeConfig).items()
}

_EPILOG = """\
examples:
  rjax serve
      the bundled model on http://127.0.0.1:8000/v1
  rjax serve Qwen/Qwen3-0.6B --max-model-len 8k --port 9000
      a model of the hub, for sequences of up to 8,000 tokens
  rjax serve ./llama --api-key-file keys.txt --host 0.0.0.0
      your model, for clients with an API key (one key per line of the file)
  rjax serve --warmup off --max-model-len 1024
      for short tests: nothing compiles in the background, only what requests need
  rjax serve --warmup on --early-requests refuse
      requests get a 503 until all step sizes are compiled
  rjax serve --prefix-file support=support.safetensors
      a long system prompt with saved KV
  rjax serve Qwen/Qwen3-8B --replicas 4
      four replicas, one on each GPU, behind one address; requests with a common prefix go to the
      same one
  rjax serve --list-limits
      all limits; change one with --limit n=8

Requests with a common prefix, such as a system message, share its KV automatically.

The port opens at once. Until the model is loaded, requests wait and /health is a 503.

SIGTERM drains: accepted requests continue for --drain-seconds. Ctrl-C stops at once.

exit status: 0 drained after SIGTERM, 1 the engine failed, 2 bad input, 130 Ctrl-C; SIGTERM before
the server is ready ends the process at once
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = OneLineParser(
        prog=NAME,
        usage="%(prog)s [MODEL] [options]",
        description="Serve a model over HTTP with OpenAI's API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        instead=instead_of,
    )
    add_model_argument(parser)
    _add_server_arguments(parser.add_argument_group("server"))
    add_replica_arguments(parser.add_argument_group("replicas"))
    _add_output_arguments(parser.add_argument_group("tools, reasoning and structured outputs"))
    _add_log_arguments(parser.add_argument_group("logs"))
    add_no_ops(parser.add_argument_group("flags of vLLM without effect"), SERVER_NO_OPS)
    add_engine_arguments(parser, {"warmup": "background"})
    return parser


def _add_server_arguments(server: "argparse._ArgumentGroup") -> None:
    server.add_argument("--host", help="address to listen on (default: this machine only)")
    server.add_argument("--port", type=int, help="0 takes a free one (default: 8000)")
    server.add_argument(
        "--uds",
        metavar="PATH",
        help="listen on a Unix socket instead, for its owner and group",
    )
    server.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names for clients; responses have the first one (default: the model's)",
    )
    server.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="accepted API keys; other users of this machine can read a command line, so prefer "
        "--api-key-file",
    )
    server.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="accepted API keys, one per line; each is a tenant with its own prefix cache",
    )
    server.add_argument(
        "--enable-weight-updates",
        action="store_true",
        help=_HELP["enable_weight_updates"],
    )
    server.add_argument(
        "--operator-key-file",
        metavar="FILE",
        help="API keys of operators, one per line (default: none for a server without keys on an "
        "address of this machine, whose clients are all operators)",
    )
    server.add_argument(
        "--priority-across-keys",
        action="store_true",
        help=f"{_HELP['priority_across_keys']}; for keys that trust each other",
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
        "--allowed-hosts",
        metavar="JSON",
        help="a JSON list of names of this server in the header Host, beside localhost and "
        "addresses; '[\"*\"]' is all (default: none for a server without keys on an address of "
        "this machine, so that no web page reaches it through a name; otherwise all)",
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
        "--enable-request-id-headers",
        action="store_true",
        help="give each response the header X-Request-Id: that of its request, or a new one",
    )
    server.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that accepted requests may continue after SIGTERM (default: 30)",
    )
    server.add_argument(
        "--disable-frontend-multiprocessing",
        action="store_true",
        help="run the engine on a thread of the server's process, not in a process of its own",
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
    server.add_argument("--list-limits", action="store_true", help="print the limits and stop")
    server.add_argument(
        "--strict-fields",
        action="store_true",
        help=_HELP["strict_fields"],
    )


def _add_output_arguments(outputs: "argparse._ArgumentGroup") -> None:
    outputs.add_argument(
        "--tool-call-parser",
        choices=("auto", *TOOL_CALL_PARSERS, "openai"),
        default="auto",
        help=f"{_HELP['tool_call_parser']}; openai goes with --reasoning-parser {_HARMONY}",
    )
    outputs.add_argument(
        "--reasoning-parser",
        choices=("qwen3", "deepseek_r1", "gemma4", _HARMONY),
        help=_HELP["reasoning_parser"],
    )
    outputs.add_argument(
        "--return-tokens-as-token-ids",
        action="store_true",
        help=_HELP["return_tokens_as_token_ids"],
    )
    outputs.add_argument(
        "--literal-json-schemas",
        action="store_true",
        help=_HELP["literal_json_schemas"],
    )


def _add_log_arguments(logs: "argparse._ArgumentGroup") -> None:
    logs.add_argument(
        "--disable-log-stats",
        action="store_true",
        help="do not log the throughput every 10 seconds under load",
    )
    logs.add_argument(
        "--access-log",
        "--enable-log-requests",
        action="store_true",
        help="log a line for each request",
    )
    logs.add_argument(
        "--uvicorn-log-level",
        choices=tuple(LOG_LEVELS),
        default="warning",
        help="level of the HTTP server's own log (default: warning)",
    )


def serve_config(arguments: argparse.Namespace, limits: ServeLimits) -> ServeConfig:
    """The configuration of the server.

    Raises:
        InvalidConfigError: a name is blank, a key file or an option for browsers is not valid, or
            harmony's tool calls have another reasoning parser.
    """
    given = getattr(arguments, "model", None)
    own = _model_name(given)
    model, *aliases = _served_names(arguments, own)
    return ServeConfig(
        model=model,
        aliases=tuple(aliases),
        folder=None if own == given or arguments.served_model_name else given,
        root=own,
        keys=tuple([*arguments.api_key, *_keys_of(arguments, "api_key_file")]),
        enable_weight_updates=arguments.enable_weight_updates,
        operator_keys=tuple(_keys_of(arguments, "operator_key_file")),
        priority_across_keys=arguments.priority_across_keys,
        limits=limits,
        http=_http_options(arguments),
        tool_call_parser=_tool_call_parser(arguments),
        reasoning_parser=arguments.reasoning_parser,
        strict_fields=arguments.strict_fields,
        literal_json_schemas=arguments.literal_json_schemas,
        return_tokens_as_token_ids=arguments.return_tokens_as_token_ids,
        bundled=given is None,
    )


def _model_name(model: str | None) -> str:
    if model is None:
        return BUNDLED_NAME
    path = pathlib.Path(model)
    return path.resolve().name if path.exists() else model


def _served_names(arguments: argparse.Namespace, own: str) -> list[str]:
    """The model's names in requests, the one of responses first; by default ``own``."""
    names = list(dict.fromkeys(arguments.served_model_name or [own]))
    if not all(name.strip() for name in names):
        raise InvalidConfigError(
            "--served-model-name holds a blank name; give names that requests can have, or leave "
            f"it out for {own!r}"
        )
    return names


def _tool_call_parser(arguments: argparse.Namespace) -> str:
    """The format of tool calls; harmony's follows from its reasoning parser."""
    if arguments.tool_call_parser != "openai":
        return arguments.tool_call_parser
    if arguments.reasoning_parser != _HARMONY:
        raise InvalidConfigError(
            f"--tool-call-parser openai goes with --reasoning-parser {_HARMONY}; give both"
        )
    return "auto"


def prefix_files(arguments: argparse.Namespace, limits: ServeLimits) -> dict[str, str]:
    """Paths of the prefix files by prefix name.

    Raises:
        InvalidConfigError: a name is invalid, or a file is missing.
    """
    files = pairs("--prefix-file", arguments.prefix_file)
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
        for name in ("allowed_origins", "allowed_methods", "allowed_headers", "allowed_hosts")
        if (text := getattr(arguments, name)) is not None
    }
    return HttpOptions(
        root_path=arguments.root_path,
        allow_credentials=arguments.allow_credentials,
        tokenizer_info=arguments.enable_tokenizer_info_endpoint,
        request_id_headers=arguments.enable_request_id_headers,
        **lists,
    )


def address(arguments: argparse.Namespace) -> Address:
    """The address to listen on.

    Raises:
        InvalidConfigError: the port is out of range, or a Unix socket has a host or port.
    """
    host, port, path = arguments.host, arguments.port, arguments.uds
    if path is not None:
        if host is not None or port is not None:
            raise InvalidConfigError("--uds goes without --host and --port; leave them out")
        return UnixAddress(path)
    port = 8000 if port is None else port
    if not 0 <= port < 65536:
        raise InvalidConfigError(f"--port is {port}; give 0 to 65535")
    return HostAddress("127.0.0.1" if host is None else host, port)


def check_operators(arguments: argparse.Namespace, serve: ServeConfig, address: Address) -> None:
    """Check that only operators can change the weights.

    Raises:
        InvalidConfigError: everyone could, from other machines too; or there are replicas, of which
            a request would reach one.
    """
    if not serve.enable_weight_updates:
        return
    if arguments.replicas is not None:
        raise InvalidConfigError(
            "--enable-weight-updates changes one engine, not --replicas; leave one of them out"
        )
    if not serve.operator_keys and not address.is_private:
        raise InvalidConfigError(
            f"--enable-weight-updates lets anyone who reaches {arguments.host} change the weights; "
            "give --operator-key-file, or listen on this machine only"
        )


def _keys_of(arguments: argparse.Namespace, name: str) -> list[str]:
    """The keys in the file of an option; none without it."""
    path, flag = getattr(arguments, name), "--" + name.replace("_", "-")
    if path is None:
        return []
    lines = [line.strip() for line in read_text(path, flag).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InvalidConfigError(f"{flag} {path!r} holds no key; write one on each line")
    return keys


def pairs(flag: str, given: list[str]) -> dict[str, str]:
    """The values of a repeatable flag NAME=VALUE by name.

    Raises:
        InvalidConfigError: one has another form, or a name is there twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or name in found:
            raise InvalidConfigError(
                f"{flag} {text!r} is not of the form NAME=VALUE, or the name is there twice"
            )
        found[name] = value
    return found
