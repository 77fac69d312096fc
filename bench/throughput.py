"""Tokens per second of the engine, compared with its decode step alone.

The requests are those of `rjax.benchmarks.throughput`.

    python -m bench.throughput --shapes llama-3-8b               # on a GPU
    python -m bench.throughput --shapes tiny --requests 8 --prefix 64 --input 16 --output 8
    python -m bench.throughput --file sharegpt.json --requests 200 --prefix 0
    python -m bench.throughput --shapes llama-3-8b --requests 64 --input 512 --output 1  # prefill

All requests arrive at once. Each has the shared prefix and a unique input, and generates its output
to the full length. All step shapes run once before the measurement, and the prefix cache is then
cleared, so that the prefill of the prefix is part of the time. ``--relay`` names modes to compare.

"/ bare step" is the output rate over that of the decode step alone, timed in the same process at
full batch and half the output, in a sustained run. The difference is lost to prompts, to the start
and end of the run, and to the host. A "burst" step is faster, because the GPU is not yet at its
power limit. TFLOP/s counts the GEMMs and the attention of computed tokens, without cached tokens.
"""

import argparse
import math
from typing import Any

import jax.numpy as jnp

from bench.ceilings import Ceilings, measure_ceilings
from bench.command_line import command_parser, keep, run, save_part
from bench.decode_step.bare_step import time_bare_step
from bench.decode_step.roofline import DecodeCase
from rjax.benchmarks import throughput
from rjax.benchmarks.engines import pool_pages, running_llm
from rjax.benchmarks.points import in_time
from rjax.benchmarks.records import record
from rjax.benchmarks.throughput import ThroughputSettings, draw, lengths
from rjax.commands.bench.options import given_settings
from rjax.commands.bench.throughput import add_throughput_options
from rjax.models import DecoderLayer, ModelConfig

COLUMNS = {
    "model": "model",
    **throughput.REQUEST_COLUMNS,
    "bare_ms": "bare step, ms",
    "bare_share": "/ bare step",
    "burst_ms": "bare step, burst, ms",
    "burst_share": "/ burst",
    "tflop_per_s": "TFLOP/s",
    "matmul_share": "/ matmul rate",
    **throughput.TOTAL_COLUMNS,
}


def _widths(config: ModelConfig) -> list[int]:
    """Feed-forward columns that a row goes through, of each layer."""
    experts = config.experts
    return [
        experts.top_k * experts.width + (experts.shared_width or 0)
        if experts is not None and experts.layers[i]
        else config.intermediate_size
        for i in range(config.num_layers)
    ]


def useful_flops(config: ModelConfig, outputs: list[Any]) -> float:
    """FLOP of the GEMMs and the attention of all computed tokens.

    Tokens from the prefix cache and the last token of each output are not computed; logits count
    only for sampled tokens.
    """
    D, L = config.hidden_size, config.num_layers
    layer = DecoderLayer(config, 0, jnp.bfloat16).attention
    attention = L * sum(
        linear.depth * math.prod(linear.output_shape)
        for linear in (*layer.input_projections, layer.output)
    )
    latent = config.latent
    dims = 2 * config.head_dim if latent is None else latent.qk_dim + latent.value_dim
    feed_forward = sum(_widths(config)) * (2 + config.gated_mlp) * D
    computed = seen = sampled = 0
    for output in outputs:
        start = output.num_cached_tokens
        written = len(output.outputs[0].token_ids)
        stop = len(output.prompt_token_ids) + written - 1
        computed += stop - start
        seen += (stop * (stop + 1) - start * (start + 1)) // 2
        sampled += written
    products = 2.0 * computed * (attention + feed_forward) + 2.0 * sampled * D * config.vocab_size
    return products + 2.0 * seen * L * config.num_heads * dims


def measure(
    settings: ThroughputSettings, relay: str, ceilings: Ceilings
) -> tuple[dict[str, Any], str]:
    """One engine, one mode; the row and the attention backend."""
    longest, own = lengths(settings)
    pages = pool_pages(settings, own, [settings.prefix])
    with running_llm(settings, relay=relay, max_model_len=longest, num_pages=pages) as llm:
        config = llm.engine.model_config
        found = throughput.measure(settings, llm)
        batch = min(settings.max_num_seqs, len(found.outputs))
        case = DecodeCase(batch, settings.prefix, settings.input + settings.output // 2)
        bare = None
        if settings.output > 1 and settings.file is None:
            bare = time_bare_step(llm, case)
    row = throughput.row(settings, relay, found)
    steps_per_s = row["output_per_s"] / batch
    rate = useful_flops(config, found.outputs) / found.seconds
    row |= {
        "bare_ms": None if bare is None else 1e3 * bare.sustained,
        "bare_share": None if bare is None else steps_per_s * bare.sustained,
        "burst_ms": None if bare is None else 1e3 * bare.burst,
        "burst_share": None if bare is None else steps_per_s * bare.burst,
        "tflop_per_s": rate / 1e12,
        "matmul_share": rate / ceilings.matmul,
    }
    return row, found.stats.backend


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.throughput", __doc__)
    add_throughput_options(p)
    p.add_argument("--name", default="throughput", help="name of the kept result")
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep, draw."""
    options = parser().parse_args(arguments)
    settings = given_settings(ThroughputSettings, options)
    lengths(settings)  # before anything is measured
    ceilings = measure_ceilings()
    found = record("bench.throughput", [], vars(options), matmul_flop_per_s=ceilings.matmul)
    for relay in in_time(options.relay, options.seconds, desc="throughput", quiet=options.quiet):
        row, found["backend"] = measure(settings, relay, ceilings)
        found["rows"].append(row)
        save_part(found, options.json, options.name)
    keep(found, COLUMNS, options.json, options.name)
    if options.png is not None:
        draw(found, options.png)


if __name__ == "__main__":
    run("bench.throughput", main)
