"""Tokens per second of group sampling, through the engine and inside a program's own jit.

    python -m bench.rollout --shapes llama-3-8b                # on a GPU
    python -m bench.rollout --shapes llama-3-8b --what groups  # samples of equal lengths only
    python -m bench.rollout --shapes tiny --prompts 2 --samples 4 --input 40 --output 8
    python -m bench.rollout --simulate                         # rows in use, without a model

"groups": a few prompts, all samples at once, each generated to its full length: through
``LLM.generate`` and through ``functional.rollout``. "refill": a long queue of prompts, in rows that
are refilled, through ``functional.rollout``: once with samples of equal lengths, and once with
lognormal lengths of the same mean. "/ equal lengths" compares the two.

Prompts and weights are random, sampling is at temperature 1, and no token ends a sample. Times are
end to end, with the prompts, after a run that is not timed. The floor is the roofline of the
prompts and of decode steps with all rows in use at their mean length; see `bench.decode_step`.
"Rows in use" counts the rows with a running sample in all steps; ``--tail-rows`` makes the last
steps smaller. "Prompts at once" counts those whose samples run: where lengths differ, the last
samples of many prompts run beside the first of others, and samples that are longer than the mean
run for longer, so that a step reads more KV.
"""

import argparse
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from bench.ceilings import Ceilings, measure_ceilings
from bench.command_line import command_parser, keep, run, save_part
from bench.rollout.loads import Load, floor_seconds, lognormal_lengths, simulate
from rjax import functional
from rjax.benchmarks.engines import EngineSettings, running_llm
from rjax.benchmarks.model_shapes import SHAPES
from rjax.benchmarks.records import record
from rjax.benchmarks.text_tables import text
from rjax.cli.values import some_of, whole, wholes
from rjax.models import ModelConfig, config_from_dict, init_model
from rjax.sampling import SamplingParams

COLUMNS = {
    "model": "model",
    "through": "through",
    "prompts": "prompts",
    "samples": "samples",
    "rows": "rows",
    "input": "prompt tokens",
    "lengths": "new tokens",
    "tokens": "tokens",
    "seconds": "seconds",
    "output_per_s": "output tokens/s",
    "floor_per_s": "floor, tokens/s",
    "share": "/ floor",
    "in_use": "rows in use",
    "prompts_at_once": "prompts at once",
    "ratio": "/ equal lengths",
}
_GROUP_TOKENS = 2  # of the run before the timed one
_SPARE_PAGES = 1.1  # of what the simulation needs


def through_engine(options: argparse.Namespace, load: Load) -> list[float]:
    """Seconds of each timed run through ``LLM.generate``."""
    prompts, n = load.lengths.shape
    most, Q, S = int(load.lengths.max()), load.prompt_tokens, options.page_size
    pages = prompts * -(-Q // S) + load.rows * (-(-most // S) + 2)
    settings = EngineSettings(
        model=None,
        shapes=options.shapes,
        quantization=None,
        max_num_seqs=load.rows,
        max_num_prefill_ahead=None,
        max_num_batched_tokens=None,
        num_decode_steps=1,
        num_pages=pages,
        page_size=S,
        backend=options.backend,
        seed=options.seed,
        quiet=options.quiet,
    )
    with running_llm(settings, relay="auto", max_model_len=Q + most) as llm:
        llm.engine._worker.warmup(modes=("random",))

        def generate(seed: int, tokens: int) -> float:
            params = SamplingParams(
                n=n, temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            ids = prompt_ids(llm.engine.model_config.vocab_size, prompts, Q, seed)
            llm.reset_prefix_cache()
            start = time.perf_counter()
            found = llm.generate(
                [{"prompt_token_ids": row.tolist()} for row in ids], params, use_tqdm=False
            )
            seconds = time.perf_counter() - start
            assert all(len(x.token_ids) == tokens for output in found for x in output.outputs)
            return seconds

        generate(options.seed + 1, min(_GROUP_TOKENS, most))
        return [generate(options.seed, most) for _ in range(options.rounds)]


def prompt_ids(vocab_size: int, prompts: int, tokens: int, seed: int) -> Int[np.ndarray, "A Q"]:
    """Random prompts."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, (prompts, tokens))
    return ids.astype(np.int32)


class Program:
    """A model, and the compiled ``functional.rollout`` for loads of the same sizes."""

    def __init__(self, options: argparse.Namespace, max_context: int) -> None:
        config = config_from_dict(SHAPES[options.shapes])
        self.options = options
        self.setup, self.weights = functional.prepare(
            init_model(config, seed=options.seed),
            max_context=max_context,
            page_size=options.page_size,
            backend=options.backend,
        )

    def seconds(self, loads: Sequence[Load], num_pages: int | None) -> list[list[float]]:
        """Seconds of each timed run of each load; the loads differ in their lengths only."""
        load, options = loads[0], self.options
        prompts, n = load.lengths.shape
        function = functools.partial(
            functional.rollout,
            self.setup,
            samples=n,
            max_new_tokens=max(int(load.lengths.max()) for load in loads),
            rows=load.rows,
            tail_rows=load.tail_rows,
            num_pages=num_pages,
        )
        vocab_size = self.setup.config.vocab_size
        given = (
            self.weights,
            jnp.asarray(prompt_ids(vocab_size, prompts, load.prompt_tokens, options.seed)),
            jnp.full(prompts, load.prompt_tokens),
            jax.random.split(jax.random.key(options.seed), prompts),
        )
        gpu = jax.default_backend() == "gpu"
        compiled = (
            jax.jit(function)
            .lower(*given, max_tokens=jnp.asarray(load.lengths))
            .compile({"xla_gpu_enable_triton_gemm": False} if gpu else None)
        )

        def once(lengths: Int[np.ndarray, "A n"]) -> float:
            start = time.perf_counter()
            out = compiled(*given, max_tokens=jnp.asarray(lengths))
            found = np.asarray(out.lengths)
            seconds = time.perf_counter() - start
            np.testing.assert_array_equal(found, lengths)
            return seconds

        once(np.minimum(load.lengths, _GROUP_TOKENS))
        return [[once(load.lengths) for _ in range(options.rounds)] for load in loads]


def group_load(options: argparse.Namespace) -> Load:
    """A few prompts; all samples run at once."""
    lengths = np.full((options.prompts, options.samples), options.output, np.int32)
    return Load(lengths, options.input, lengths.size)


def queue_loads(options: argparse.Namespace) -> tuple[Load, Load]:
    """A long queue of prompts: of equal and of lognormal lengths."""
    prompts, n = options.queue, options.samples
    uneven = lognormal_lengths(
        prompts,
        n,
        mean=options.mean,
        most=options.most,
        sigma=options.sigma,
        seed=options.seed,
    )
    equal = np.full((prompts, n), options.mean, np.int32)
    rows = min(options.rows, equal.size)
    tail = tuple(sorted(options.tail_rows, reverse=True))
    return (Load(equal, options.input, rows, tail), Load(uneven, options.input, rows, tail))


def measure(
    options: argparse.Namespace, config: ModelConfig, ceilings: Ceilings, add: Callable[..., None]
) -> None:
    """Measure all rows, and ``add`` each."""

    def row(through: str, load: Load, times: list[float], equal: float | None = None) -> float:
        seconds, tokens = statistics.median(times), int(load.lengths.sum())
        counted = simulate(load, options.page_size)
        floor = tokens / floor_seconds(config, load, counted.prompts, ceilings)
        rate = tokens / seconds
        prompts, n = load.lengths.shape
        even = load.lengths.min() == load.lengths.max()
        mean = f"lognormal, mean {load.lengths.mean():.0f}, most {load.lengths.max()}"
        add(
            {
                "model": options.shapes,
                "through": through,
                "prompts": prompts,
                "samples": n,
                "rows": load.rows,
                "input": load.prompt_tokens,
                "lengths": int(load.lengths.max()) if even else mean,
                "tokens": tokens,
                "seconds": seconds,
                "output_per_s": rate,
                "floor_per_s": floor,
                "share": rate / floor,
                "in_use": counted.in_use,
                "prompts_at_once": counted.prompts,
                "ratio": None if equal is None else rate / equal,
                "all_seconds": times,
            }
        )
        return rate

    group = group_load(options)
    if "groups" in options.what:
        row("LLM.generate", group, through_engine(options, group))
        gc.collect()
        program = Program(options, options.input + options.output)
        (times,) = program.seconds([group], None)
        row("functional.rollout", group, times)
        del program
        gc.collect()
    if "refill" in options.what:
        equal, uneven = queue_loads(options)
        program = Program(options, options.input + max(options.most, options.mean))
        even, others = program.seconds([equal, uneven], refill_pages(options, (equal, uneven)))
        rate = row("functional.rollout", equal, even)
        row("functional.rollout", uneven, others, rate)


def refill_pages(options: argparse.Namespace, loads: Sequence[Load]) -> int:
    """The given pages, or what the loads need by counting and a little more."""
    if options.num_pages is not None:
        return options.num_pages
    S = options.page_size
    most = max(int(load.lengths.max()) for load in loads)
    least = -(-options.input // S) + -(-(S - 1 + most) // S)
    needed = max(simulate(load, S).pages for load in loads)
    return max(least, int(_SPARE_PAGES * needed) + loads[0].rows)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.rollout", __doc__)
    p.add_argument(
        "--shapes",
        choices=sorted(SHAPES),
        default="llama-3-8b",
        help="a model's shapes, random weights (default: llama-3-8b)",
    )
    for option, default, told in (
        ("--prompts", 8, "of groups"),
        ("--samples", 64, "of each prompt"),
        ("--input", 2048, "tokens of each prompt"),
        ("--output", 512, "tokens of each sample of groups"),
        ("--queue", 256, "prompts of refill"),
        ("--rows", 512, "of refill, samples that run at once"),
        ("--mean", 256, "of the tokens of a sample of refill"),
        ("--most", 2048, "tokens of a sample of refill"),
        ("--rounds", 1, "timed runs; the middle one counts"),
        ("--page-size", 64, "tokens a page"),
    ):
        p.add_argument(option, type=whole(1), default=default, help=f"{told} (default: {default})")
    p.add_argument("--sigma", type=float, default=0.8, help="of lognormal lengths (default: 0.8)")
    p.add_argument(
        "--tail-rows",
        type=wholes(1),
        default=[256, 128, 64, 32],
        help="of refill, rows of the last steps (default: 256,128,64,32)",
    )
    p.add_argument("--num-pages", type=whole(1), help="of refill; default: by counting")
    p.add_argument(
        "--what", type=some_of("groups", "refill"), default="groups,refill", help="see above"
    )
    p.add_argument("--backend", default="auto", help="attention kernels: auto, mosaic or xla")
    p.add_argument("--seed", type=whole(0), default=0, help="of weights, prompts and sampling")
    p.add_argument("--simulate", action="store_true", help="only count the rows in use of refill")
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    p = parser()
    options = p.parse_args(arguments)
    if options.mean > options.most:
        p.error(f"--mean is {options.mean} and --most {options.most}; give a --most above the mean")
    if options.simulate:
        print_simulation(options)
        return
    config = config_from_dict(SHAPES[options.shapes])
    ceilings = measure_ceilings()
    found = record(
        "bench.rollout",
        [],
        vars(options),
        copy_bytes_per_s=ceilings.copy,
        matmul_flop_per_s=ceilings.matmul,
    )

    def add(row: dict[str, Any]) -> None:
        found["rows"].append(row)
        save_part(found, options.json, "rollout")

    measure(options, config, ceilings, add)
    keep(found, COLUMNS, options.json, "rollout")


def print_simulation(options: argparse.Namespace) -> None:
    """Print the steps and the rows in use of both loads of refill."""
    rows = []
    for name, load in zip(("equal", "lognormal"), queue_loads(options), strict=True):
        counted = simulate(load, options.page_size)
        rows.append({"lengths": name, "tokens": int(load.lengths.sum())})
        rows[-1] |= dataclasses.asdict(counted)
    columns = {"lengths": "lengths", "tokens": "tokens", "steps": "steps", "in_use": "rows in use"}
    print(text(rows, columns | {"prompts": "prompts at once", "pages": "pages"}))


if __name__ == "__main__":
    run("bench.rollout", main)
