"""The gated product of few rows beside XLA's product and the activation's kernel.

    python -m bench.kernels.gated_product                     # on a Hopper GPU, within a minute
    python -m bench.kernels.gated_product --only llama-3-8b --rows 8,64
    python -m bench.kernels.gated_product --variants          # other tilings too

Checks the kernel against float32 and against itself, then times it over weights that the cache does
not hold, beside what models do without it. The floor is the time to copy the weights' bytes.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ceilings import Ceilings, measure_ceilings
from bench.command_line import add_time_limit, command_parser, in_time, keep, numbers
from bench.kernels.run_table import reason
from bench.kernels.timing import seconds_per_call
from bench.model_shapes import SHAPES
from bench.records import record
from pallas_kernels.gated_activation import mosaic as activation
from pallas_kernels.gated_product import mosaic, xla
from pallas_kernels.gated_product.tiling import (
    COLUMNS as WIDTHS,
)
from pallas_kernels.gated_product.tiling import (
    ROW_COUNTS,
    Tiling,
    choose_tiling,
    misfit,
    most_slots,
)

COLUMNS = {
    "model": "model",
    "rows": "rows",
    "columns": "columns a program",
    "chunk": "chunk",
    "ring": "ring",
    "kernel_us": "kernel, us",
    "present_us": "XLA and activation, us",
    "floor_us": "floor, us",
    "speedup": "speedup",
    "error": "relative error",
    "failed": "did not run",
}
MODELS = ("llama-3-8b", "qwen2.5-3b")
_CHAIN = 400e-6  # seconds of the device at least, each call with weights of its own
_WORST = 8e-3  # relative error: roundings to bfloat16
_REPEATS, _ROUNDS = 6, 3


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A model's arguments: rows and weights of several calls, and what the first should give."""

    model: str
    h: Sequence[jax.Array]  # [64, D] each; fewer rows are the first of them
    w: Sequence[jax.Array]
    want: np.ndarray
    floor: float  # seconds

    def arguments(self, T: int) -> list[tuple[jax.Array, jax.Array]]:
        """Of the calls of T rows."""
        return [(h[:T], w) for h, w in zip(self.h, self.w, strict=True)]


def given_of(model: str, ceilings: Ceilings) -> Given:
    """As many calls as the device takes longer for than the host for their dispatch."""
    D, F = SHAPES[model]["hidden_size"], SHAPES[model]["intermediate_size"]
    floor = 2 * 2 * D * F / ceilings.copy

    @jax.jit
    def draw(seed):
        rows, weights = jax.random.split(jax.random.key(seed))
        h = jax.random.normal(rows, (ROW_COUNTS[-1], D))
        w = D**-0.5 * jax.random.normal(weights, (D, 2, F))
        return h.astype(jnp.bfloat16), w.astype(jnp.bfloat16)

    calls = [draw(seed) for seed in range(int(np.ceil(_CHAIN / floor)))]
    wide = [a.astype(jnp.float32) for a in calls[0]]
    with jax.default_matmul_precision("highest"):
        want = np.asarray(jax.jit(xla.gated_product)(*wide), np.float64)
    return Given(model, [h for h, _ in calls], [w for _, w in calls], want, floor)


def variants(model: str, T: int) -> Iterator[Tiling]:
    """Other tilings than the kernel's own: all programs at once, one or two a multiprocessor."""
    D, F = SHAPES[model]["hidden_size"], SHAPES[model]["intermediate_size"]
    count = mosaic.multiprocessors()
    chosen = choose_tiling(T, D, F, count)
    for n in WIDTHS:
        for chunk in (64, 128):
            most = most_slots(T, D, n, chunk)
            for ring, resident in ((most, 1), (most // 2, 2)):
                tiling = Tiling(n, chunk, ring)
                fits = ring >= 2 and misfit(tiling, T, D) is None
                if fits and -(-F // n) <= resident * count and tiling != chosen:
                    yield tiling


def present(h: jax.Array, w: jax.Array) -> jax.Array:
    """What models do without the kernel."""
    return activation.gated_silu(jnp.einsum("TD,DAF->TAF", h, w))


def check(run: Callable[..., jax.Array], given: Given, T: int) -> float:
    """Relative error against float32.

    Raises:
        RuntimeError: too large, or two runs differ.
    """
    arguments = given.arguments(T)[0]
    got, again = (np.asarray(run(*arguments), np.float64) for _ in range(2))
    if not np.array_equal(got, again):
        raise RuntimeError("two runs differ")
    want = given.want[:T]
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not error < _WORST:
        raise RuntimeError(f"relative error {error:.1e}")
    return error


def seconds(run: Callable[..., jax.Array], arguments: Sequence[tuple[jax.Array, ...]]) -> float:
    """Of one call of the jitted ``run``, of a chain over all arguments."""
    chain = jax.jit(lambda arguments: [run(*own) for own in arguments])
    return seconds_per_call(lambda: chain(arguments), _REPEATS, _ROUNDS) / len(arguments)


def measure(given: Given, T: int, tiling: Tiling, present_s: float) -> dict[str, Any]:
    """A row of the table; a failure is a row too."""
    row: dict[str, Any] = {"model": given.model, "rows": T}
    row |= dataclasses.asdict(tiling)
    row |= {"present_us": 1e6 * present_s, "floor_us": 1e6 * given.floor}
    run = jax.jit(functools.partial(mosaic.gated_product, tiling=tiling))
    try:
        row["error"] = check(run, given, T)
        found = seconds(run, given.arguments(T))
        row |= {"kernel_us": 1e6 * found, "speedup": present_s / found}
    except Exception as error:
        row["failed"] = reason(error)
    return row


def rows(options: argparse.Namespace, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Measure what is asked for, as long as there is time."""
    wanted = [(m, T) for m in options.only or MODELS for T in options.rows or ROW_COUNTS]
    given = None
    for model, T in in_time(wanted, options.seconds, desc="shapes", quiet=options.quiet):
        if given is None or given.model != model:
            given = None  # its weights go before others come
            given = given_of(model, ceilings)
        D, _, F = given.w[0].shape
        own = choose_tiling(T, D, F, mosaic.multiprocessors())
        tilings = [*([own] if own else []), *(variants(model, T) if options.variants else ())]
        present_s = seconds(jax.jit(present), given.arguments(T))
        for tiling in tilings:
            yield measure(given, T, tiling, present_s)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.kernels.gated_product", __doc__)
    p.add_argument("--only", nargs="+", choices=MODELS, help="models")
    p.add_argument("--rows", type=numbers, help=f"of {', '.join(map(str, ROW_COUNTS))}")
    p.add_argument("--variants", action="store_true", help="time other tilings too")
    add_time_limit(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Measure, print each as it comes, keep."""
    options = parser().parse_args(arguments)
    if jax.default_backend() != "gpu":
        print("needs a Hopper GPU: the kernel uses its instructions", file=sys.stderr)
        return 1
    ceilings = measure_ceilings()
    found = []
    for row in rows(options, ceilings):
        print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        found.append(row)
    result = record(
        "bench.kernels.gated_product", found, vars(options), copy_bytes_per_s=ceilings.copy
    )
    keep(result, COLUMNS, options.json, "kernels_gated_product")
    return 1 if any("failed" in row for row in found) else 0


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
