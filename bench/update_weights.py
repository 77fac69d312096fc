"""Seconds that a running engine takes for new weights, and what memory it needs for them.

    python -m bench.update_weights --shapes llama-3-8b                 # on a GPU
    python -m bench.update_weights --shapes tiny --rounds 1

The weights are random and have the names and axes of a Hugging Face checkpoint: "device" are JAX
arrays beside the engine, as of a trainer in the same process, "host" are NumPy arrays. Times are of
``LLM.update_weights`` without running requests, checks included, after a first update that compiles
("first"). "Floor" is the time to read and write the weights at the copy rate; from the host nothing
is counted but that. "Memory above" is what the first update took of the device beyond what was in
use before; a dash without such counts.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from bench.ceilings import measure_ceilings
from bench.command_line import command_parser, keep, run
from rjax.benchmarks.engines import EngineSettings, model_name, running_llm
from rjax.benchmarks.records import record
from rjax.cli.values import some_of, whole
from rjax.commands.bench.options import add_engine_options, given_settings
from rjax.models import Decoder
from rjax.models.loading.stored_model import stored_model

COLUMNS = {
    "model": "model",
    "arrays": "arrays",
    "gib": "GiB",
    "first_s": "first, s",
    "seconds": "seconds",
    "floor_s": "floor, s",
    "above_mib": "memory above, MiB",
}


def measure(options: argparse.Namespace, llm: Any, model: str) -> list[dict[str, Any]]:
    """A row for each kind of arrays."""
    copy = measure_ceilings().copy
    rows = []
    for kind in tqdm(options.arrays, desc="update_weights", disable=options.quiet):
        tensors = random_tensors(llm.engine.model_config, on_device=kind == "device")
        num_bytes = sum(x.nbytes for x in tensors.values())
        in_use, above, seconds = _memory("bytes_in_use"), None, []
        for _ in range(1 + options.rounds):
            start = time.perf_counter()
            llm.update_weights(tensors)
            seconds.append(time.perf_counter() - start)
            if len(seconds) == 1 and in_use is not None:
                above = (_memory("peak_bytes_in_use") - in_use) / 2**20
        rows.append(
            {
                "model": model,
                "arrays": kind,
                "gib": num_bytes / 2**30,
                "first_s": seconds[0],
                "seconds": statistics.median(seconds[1:]),
                "floor_s": 2 * num_bytes / copy,  # the copy rate counts reads and writes
                "above_mib": above,
            }
        )
    return rows


def _memory(name: str) -> Any:
    """Bytes, or None where a device does not count."""
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats[name]


def random_tensors(config: Any, *, on_device: bool) -> dict[str, Any]:
    """All tensors of a checkpoint in bfloat16, by name."""
    shapes = stored_model(Decoder(config, jnp.bfloat16), config, {}).expected.shapes(config)
    draw = jax.jit(
        lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1
    )
    keys = jax.random.split(jax.random.key(0), len(shapes))
    found = {}
    for key, name in zip(keys, sorted(shapes), strict=True):
        array = draw(key, shapes[name][0])
        found[name] = array if on_device else np.asarray(array)
    return jax.block_until_ready(found)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.update_weights", __doc__)
    add_engine_options(p)
    p.add_argument("--rounds", type=whole(1), default=5, help="updates that count (default: 5)")
    p.add_argument(
        "--arrays",
        type=some_of("device", "host"),
        default=["device", "host"],
        help="where the new weights are (default: both)",
    )
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    options = parser().parse_args(arguments)
    settings = given_settings(EngineSettings, options)
    with running_llm(settings, relay="auto", max_model_len=256, num_pages=64) as llm:
        rows = measure(options, llm, model_name(settings))
        backend = llm.stats().backend
    found = record("bench.update_weights", rows, vars(options), backend=backend)
    keep(found, COLUMNS, options.json, "update_weights")


if __name__ == "__main__":
    run("bench.update_weights", main)
