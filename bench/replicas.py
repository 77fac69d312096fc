"""Prefix cache hits of several replicas under one router or another, with the bundled model.

    python -m bench.replicas --replicas 2 3 --json bench/results/replicas_cpu.json

Clients ask under a few system prompts, more than one replica's KV pool holds beside its running
requests. "at home" is the share of requests that went to the replica most used for their system
prompt. The hit rate is that of the prefix caches, over all prompt tokens. Answers are compared with
those of one engine without replicas; "equal" is the share of equal ones.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.command_line import command_parser, keep, run, save_part
from bench.serve.fleet import TINY, Outcome, fleet, homes, load, system_prompts
from rjax.benchmarks.records import record
from rjax.cli.values import whole

COLUMNS = {
    "replicas": "replicas",
    "router": "router",
    "hit_rate": "prefix cache hit rate",
    "at_home": "at home",
    "equal": "equal",
    "errors": "errors",
    "seconds": "time, s",
    "ttft_p50_s": "TTFT p50, s",
    "ttft_p90_s": "p90",
}
ROUTERS = ("prefix", "round-robin", "power-of-two")


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's arguments."""
    p = command_parser("bench.replicas", __doc__)
    p.add_argument("--replicas", type=whole(1), nargs="+", default=[2, 3], metavar="N")
    p.add_argument("--routers", nargs="+", default=list(ROUTERS), metavar="NAME")
    p.add_argument("--clients", type=whole(1), default=200, metavar="N")
    p.add_argument("--concurrency", type=whole(1), default=16, metavar="N")
    p.add_argument("--systems", type=whole(1), default=8, metavar="N", help="system prompts")
    p.add_argument("--imbalanced-threshold", type=whole(1), default=8, metavar="N")
    p.add_argument("--max-tokens", type=whole(1), default=8, metavar="N")
    return p


def measure(
    arguments: argparse.Namespace, replicas: int, router: str
) -> tuple[dict[str, Any], list[Outcome]]:
    """One load on one fleet; with ``replicas`` 0 on a server without replicas."""
    systems = system_prompts(arguments.systems)
    fleet_options = [] if replicas else ["--num-pages", "160"]  # alone it must only be right
    if replicas:
        fleet_options += ["--replicas", str(replicas), "--request-router", router]
    if replicas and router == "prefix":
        fleet_options += ["--imbalanced-threshold", str(arguments.imbalanced_threshold)]
    with fleet(*TINY, *fleet_options) as server:

        def send(clients: int, texts: Sequence[str], seed: int) -> list[Outcome]:
            return asyncio.run(
                load(
                    server.url,
                    texts,
                    clients=clients,
                    concurrency=arguments.concurrency,
                    max_tokens=arguments.max_tokens,
                    seed=seed,
                )
            )

        send(8 * max(replicas, 1), ["warm-up"], seed=1)  # compiles
        before = server.figures() if replicas else {}
        start = time.monotonic()
        outcomes = send(arguments.clients, systems, seed=0)
        seconds = time.monotonic() - start
        after = server.figures() if replicas else {}

    def grown(name: str) -> float:
        return sum(f[name] - before.get(tag, {}).get(name, 0.0) for tag, f in after.items())

    firsts = sorted(outcome.first_s for outcome in outcomes if not outcome.error)
    most_used = [max(counts.values()) for counts in homes(outcomes).values()]
    row = {
        "replicas": replicas,
        "router": router,
        "hit_rate": grown("rjax:prefix_cache_hits_total")
        / max(grown("rjax:prefix_cache_queries_total"), 1.0),
        "at_home": sum(most_used) / len(outcomes),
        "errors": sum(bool(outcome.error) for outcome in outcomes),
        "seconds": seconds,
        "ttft_p50_s": statistics.median(firsts),
        "ttft_p90_s": firsts[int(0.9 * (len(firsts) - 1))],
    }
    return row, outcomes


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    arguments = build_parser().parse_args(argv)
    _, alone = measure(arguments, 0, "none")
    rows = []
    for count in arguments.replicas:
        for router in arguments.routers:
            row, outcomes = measure(arguments, count, router)
            same = [a.text == b.text for a, b in zip(alone, outcomes, strict=True)]
            row["equal"] = sum(same) / len(same)
            rows.append(row)
            print(row, flush=True)
        save_part(_record(rows, arguments), arguments.json, "replicas")
    keep(_record(rows, arguments), COLUMNS, arguments.json, "replicas")


def _record(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    return record("bench.replicas", rows, vars(arguments), backend="xla")


if __name__ == "__main__":
    run("bench.replicas", main)
