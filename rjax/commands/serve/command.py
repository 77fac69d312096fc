"""Runs ``rjax serve``: an OpenAI-compatible server."""

import argparse
import asyncio
import dataclasses
import functools
import logging
import signal
import sys
import time
from collections.abc import Sequence

from rjax.cli.arguments import given_engine_options
from rjax.cli.errors import parse_and_run
from rjax.cli.exit_status import FAILED
from rjax.cli.process import end_soon
from rjax.cli.prompts import read_text
from rjax.commands.serve import options as command_line
from rjax.commands.serve.options import NAME
from rjax.commands.serve.replicas import replica_options
from rjax.config import EngineConfig
from rjax.errors import InvalidConfigError
from rjax.extras import install_command
from rjax.serve.config.limits import ServeLimits, limits_table
from rjax.serve.config.route_paths import check_root_path
from rjax.serve.telemetry.logs import set_up_logs

_STATS_SECONDS = 10.0  # between two lines of throughput in the log
_log = logging.getLogger("rjax.serve")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return parse_and_run(NAME, command_line.build_parser(), argv, _serve)


def _serve(arguments: argparse.Namespace) -> int:
    limits = ServeLimits.from_options(command_line.pairs("--limit", arguments.limit))
    if arguments.list_limits:
        print(limits_table(limits))
        return 0
    if not 0 <= arguments.drain_seconds < 86400:
        raise InvalidConfigError(
            f"--drain-seconds is {arguments.drain_seconds}; give 0 to 86400 seconds"
        )
    address = command_line.address(arguments)
    serve = command_line.serve_config(arguments, limits)
    command_line.check_operators(arguments, serve, address)
    options = given_engine_options(arguments)
    if "chat_template" in arguments:
        options["chat_template"] = read_text(arguments.chat_template, "--chat-template")
    replicas = replica_options(arguments)
    set_up_logs(
        access_log=arguments.access_log,
        http_level=command_line.LOG_LEVELS[arguments.uvicorn_log_level],
    )
    try:
        from rjax.serve.http.auth import KeyRing
        from rjax.serve.http.server import Server, set_ulimit
        from rjax.serve.http.starting_app import StartingApp
        from rjax.serve.loading.service_loader import ServiceLoader
        from rjax.serve.workers.memory import keep_trimmed, share_arenas
    except ModuleNotFoundError as error:
        raise InvalidConfigError(
            f"the server needs {error.name}, which is not installed; run: "
            + install_command("serve")
        ) from error

    set_ulimit(limits)
    share_arenas()
    keep_trimmed()
    # Detect all invalid options, and an address in use, before clients can connect.
    check_root_path(serve.http.root_path)
    num_short = KeyRing(serve.keys, serve.operator_keys).num_short
    prefix_files = command_line.prefix_files(arguments, limits)
    config = EngineConfig.from_options(options)
    with address.bound() as listener:
        if not serve.needs_key and not address.is_private:
            print(
                f"{NAME}: warning: anyone who reaches {arguments.host} may use this server; give "
                "--api-key-file",
                file=sys.stderr,
            )
        if num_short:
            print(
                f"{NAME}: warning: {num_short} of the API keys can be guessed; give keys "
                "of at least 16 random characters",
                file=sys.stderr,
            )
        api = address.api(listener)
        serve = dataclasses.replace(serve, created=int(time.time()))
        if serve.http.allowed_hosts is None and not serve.needs_key and address.is_private:
            http = dataclasses.replace(serve.http, allowed_hosts=())
            serve = dataclasses.replace(serve, http=http)
        stats_seconds = None if arguments.disable_log_stats else _STATS_SECONDS
        engine_process = not arguments.disable_frontend_multiprocessing
        if replicas is None:
            loader = ServiceLoader(config, prefix_files, serve, engine_process=engine_process)
        else:
            from rjax.replicas.fleet_builder import FleetLoader

            loader = FleetLoader(
                config,
                prefix_files,
                serve,
                options=replicas,
                engine_process=engine_process,
                drain_seconds=arguments.drain_seconds,
                access_log=arguments.access_log,
                http_level=command_line.LOG_LEVELS[arguments.uvicorn_log_level],
                stats_seconds=stats_seconds,
            )
        app = StartingApp(
            serve,
            early_requests=arguments.early_requests,
            progress=loader.progress,
        )

        def ready() -> None:
            print("\n".join(loader.summary({"address": api})), file=sys.stderr)
            print(f"{serve.model} on {api}", flush=True)

        server = Server(
            app,
            loader.load,
            drain_seconds=arguments.drain_seconds,
            access_log=arguments.access_log,
            stats_seconds=stats_seconds,
            listening=lambda: _log.info("listening on %s, starting", address.url(listener)),
            ready=ready,
            interrupted=functools.partial(end_soon, NAME),
        )
        asyncio.run(server.run_on(listener))
    if server.stopped_by is not None:
        _end_by_signal(server.stopped_by)
    if server.service is not None and server.service.failed:
        print(f"{NAME}: error: the engine stopped; the log says why", file=sys.stderr)
        return FAILED
    return 0


def _end_by_signal(sig: int) -> None:
    """End as a process does that does not handle the signal. The thread that loads the model is
    not waited for."""
    if sig == signal.SIGINT:
        raise KeyboardInterrupt
    sys.stdout.flush()
    signal.signal(sig, signal.SIG_DFL)
    signal.raise_signal(sig)
