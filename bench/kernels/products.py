"""The products of a decode step of few rows: the streaming kernels beside XLA's products.

    python -m bench.kernels.products                     # on a Hopper GPU, about a minute
    python -m bench.kernels.products --only llama-3-8b --rows 8
    python -m bench.kernels.products --variants          # other tilings of each product too

Checks each kernel against float32, then times it over weights that the cache does not hold. What it
stands beside is what models do without it: XLA's product and the kernel that follows. "layer" is
the four products of a layer and all between them, less attention.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ceilings import Ceilings, measure_ceilings
from bench.command_line import command_parser, keep, numbers
from bench.kernels.run_table import reason
from bench.kernels.timing import seconds_per_call
from bench.model_shapes import SHAPES
from bench.records import record
from pallas_kernels.gated_activation import mosaic as activation
from pallas_kernels.products import mosaic, xla
from pallas_kernels.products.tiling import Tiling, choose_tiling, most_slots
from pallas_kernels.residual_norm import mosaic as norm

COLUMNS = {
    "model": "model",
    "rows": "rows",
    "product": "product",
    "columns": "columns a program",
    "chunk": "chunk",
    "ring": "ring",
    "kernel_us": "kernel, us",
    "early_us": "weights early, us",
    "present_us": "XLA and kernels between, us",
    "floor_us": "floor, us",
    "ratio": "best / floor",
    "error": "relative error",
    "failed": "did not run",
}
CASES = (("qwen2.5-0.5b", 16), ("qwen2.5-3b", 16), ("llama-3-8b", 8), ("llama-3-8b", 16))
PRODUCTS = ("qkv", "out", "up", "down")
_EPS = 1e-6
_CHAIN = 400e-6  # seconds of the device at least, each call with weights of its own
_LAUNCH = 2e-6  # of a call, about
_WORST = 5e-3  # relative error: two roundings to bfloat16
_REPEATS, _ROUNDS = 6, 3


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The products of a layer at ``rows`` rows."""

    model: str
    rows: int

    def weight(self, name: str) -> tuple[int, ...]:
        """Shape of the weights of one product."""
        c = SHAPES[self.model]
        D, F, N, K = (
            c[f"{key}"]
            for key in (
                "hidden_size",
                "intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
            )
        )
        H = D // N
        shapes = dict(qkv=(D, (N + 2 * K) * H), out=(N * H, D), up=(D, 2, F), down=(F, D))
        return shapes[name]

    def weight_bytes(self, names: Sequence[str]) -> int:
        return sum(2 * int(np.prod(self.weight(name))) for name in names)

    def tiling(self, name: str) -> Tiling:
        """That the kernel takes by itself."""
        depth, *parts, columns = self.weight(name)
        return choose_tiling(
            self.rows,
            depth,
            columns,
            parts=2 if parts else 1,
            whole=name in ("out", "down"),
            multiprocessors=mosaic.multiprocessors(),
        )

    def variants(self, name: str) -> Iterator[Tiling]:
        """Tilings to try: other columns, chunks and rings."""
        depth, *rest, columns = self.weight(name)
        parts = 2 if rest else 1
        chosen = self.tiling(name)
        whole = name in ("out", "down")
        for n in (16, 32, 48, 64, 96, 112, 128):
            programs = -(-columns // n)
            if (whole and columns % n) or not 48 <= programs <= 300:
                continue
            chunks = [c for c in range(64, 513, 64) if depth % c == 0]
            sizes = {c: c * n * parts * 2 for c in chunks}
            for chunk in [c for c in chunks if 8192 <= sizes[c] <= 20000][:2] or chunks[:1]:
                rings = {
                    most_slots(self.rows, depth, n, chunk, parts=parts, resident=resident)
                    for resident in (1, 2)
                }
                for ring in sorted(rings):
                    if (found := Tiling(n, chunk, ring)) != chosen:
                        yield found


@functools.partial(jax.jit, static_argnums=(0, 1))
def inputs(shape: Shape, name: str, seed: int) -> tuple[jax.Array, ...]:
    """Arguments of one kernel."""
    w_shape = shape.weight(name)
    depth, T, D = w_shape[0], shape.rows, w_shape[-1]
    keys = jax.random.split(jax.random.key(seed), 4)

    def normal(key, dims, scale=1.0):
        return (scale * jax.random.normal(key, dims)).astype(jnp.bfloat16)

    w = normal(keys[0], w_shape, depth**-0.5)
    h = normal(keys[1], (T, depth))
    if name in ("out", "down"):
        return normal(keys[2], (T, D)), h, w, normal(keys[3], (D,))
    squares = jax.random.uniform(keys[2], (T, shape.weight("out")[1] // 32), minval=10, maxval=99)
    return h, w, squares


def call(
    name: str, backend: Any, arguments: Sequence[jax.Array], **options: Any
) -> tuple[jax.Array, ...]:
    """One product of ``mosaic`` or ``xla``."""
    if name in ("out", "down"):
        return backend.add_product(*arguments, **options)
    run = backend.gated_product if name == "up" else backend.product
    return (run(*arguments, _EPS, **options),)


def present(name: str, arguments: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """What models do with the same weights: the product and the kernel that follows."""
    if name in ("out", "down"):
        x, h, w, weight = arguments
        return norm.add_rms_norm(x, jnp.einsum("TF,FD->TD", h, w), weight, _EPS)
    h, w, _ = arguments
    if name == "up":
        return (activation.gated_silu(jnp.einsum("TD,DAF->TAF", h, w)),)
    return (jnp.einsum("TD,DE->TE", h, w),)


def fused_layer(x, h, w, weight, **options):
    """(x, qkv) after the products of a layer."""
    x, scaled, squares = mosaic.add_product(x, h, w["out"], weight, **options)
    hidden = mosaic.gated_product(scaled, w["up"], squares, _EPS, **options)
    x, scaled, squares = mosaic.add_product(x, hidden, w["down"], weight, **options)
    return x, mosaic.product(scaled, w["qkv"], squares, _EPS, **options)


def present_layer(x, h, w, weight):
    """The same as models do it now."""
    x, normed = norm.add_rms_norm(x, jnp.einsum("TF,FD->TD", h, w["out"]), weight, _EPS)
    hidden = activation.gated_silu(jnp.einsum("TD,DAF->TAF", normed, w["up"]))
    x, normed = norm.add_rms_norm(x, jnp.einsum("TF,FD->TD", hidden, w["down"]), weight, _EPS)
    return x, jnp.einsum("TD,DE->TE", normed, w["qkv"])


def worst_error(got: Sequence[jax.Array], want: Sequence[jax.Array]) -> float:
    """The largest, over the outputs, of the norm of the difference to that of what is wanted."""
    errors = []
    for mine, right in zip(got, want, strict=True):
        a, b = np.asarray(mine, np.float64), np.asarray(right, np.float64)
        errors.append(np.linalg.norm(a - b) / np.linalg.norm(b))
    return float(max(errors)) if np.isfinite(errors).all() else float("inf")


def check(shape: Shape, name: str, tiling: Tiling | None) -> float:
    """Relative error against float32.

    Raises:
        RuntimeError: too large, or two runs differ.
    """
    arguments = inputs(shape, name, 0)
    wide = tuple(a.astype(jnp.float32) for a in arguments)
    with jax.default_matmul_precision("highest"):
        want = list(jax.jit(lambda *a: call(name, xla, a))(*wide))
    error = 0.0
    for ready in (False, True):
        run = jax.jit(
            lambda *a, ready=ready: call(name, mosaic, a, tiling=tiling, weights_ready=ready)
        )
        got, again = list(run(*arguments)), list(run(*arguments))
        if not all(np.array_equal(a, b) for a, b in zip(got, again, strict=True)):
            raise RuntimeError("two runs differ")
        if len(got) == 3:  # as many partial sums as programs
            got[2] = got[2].sum(axis=1, keepdims=True)
        error = max(error, worst_error(got, want))
    if not error < _WORST:
        raise RuntimeError(f"relative error {error:.1e}")
    return error


def seconds(run: Callable[..., Any], given: Sequence[Any]) -> float:
    """Of one call of ``run``, of a chain over all that is given."""
    run = jax.jit(run)  # traced once
    chain = jax.jit(lambda given: [run(*arguments) for arguments in given])
    return seconds_per_call(lambda: chain(given), _REPEATS, _ROUNDS) / len(given)


def chain_of(shape: Shape, name: str, floor: float) -> list[tuple[jax.Array, ...]]:
    """Arguments of calls that take the device longer than their dispatch takes the host.

    Each has rows and weights of its own, or XLA would join the products.
    """
    which = (1, 2) if name in ("out", "down") else (0, 1)
    first = inputs(shape, name, 0)
    chain = []
    for seed in range(int(np.ceil(_CHAIN / (floor + _LAUNCH)))):
        own = inputs(shape, name, seed)
        chain.append(tuple(own[i] if i in which else a for i, a in enumerate(first)))
    return chain


def measure(
    shape: Shape, name: str, tiling: Tiling | None, floor: float, *, beside: bool
) -> dict[str, Any]:
    """A row; ``beside``: time what models do now too."""
    row: dict[str, Any] = {"model": shape.model, "rows": shape.rows, "product": name}
    row |= dataclasses.asdict(tiling or shape.tiling(name)) | {"floor_us": 1e6 * floor}
    try:
        row["error"] = check(shape, name, tiling)
        given = chain_of(shape, name, floor)
        for key, ready in (("kernel_us", False), ("early_us", True)):
            row[key] = 1e6 * seconds(
                lambda *a, ready=ready: call(name, mosaic, a, tiling=tiling, weights_ready=ready),
                given,
            )
        row["ratio"] = min(row["kernel_us"], row["early_us"]) / row["floor_us"]
        if beside:
            row["present_us"] = 1e6 * seconds(lambda *a: present(name, a), given)
    except Exception as error:
        row["failed"] = reason(error)
    return row


def measure_layer(shape: Shape, floor: float) -> dict[str, Any]:
    """A row for all products of a layer, in the order they depend on each other."""
    row: dict[str, Any] = {"model": shape.model, "rows": shape.rows, "product": "layer"}
    row["floor_us"] = 1e6 * floor
    try:
        layers = []
        for seed in range(int(np.ceil(_CHAIN / (floor + 4 * _LAUNCH)))):
            w = {
                name: inputs(shape, name, seed)[1 + (name in ("out", "down"))] for name in PRODUCTS
            }
            _, h, _, weight = inputs(shape, "out", seed)
            layers.append((h, w, weight))
        x = inputs(shape, "out", 0)[0]

        def time_of(one, **options):
            one = jax.jit(functools.partial(one, **options))

            @jax.jit
            def chain(x, layers):
                results = []
                for layer in layers:
                    x, qkv = one(x, *layer)
                    results.append(qkv)
                return x, results

            run = seconds_per_call(lambda: chain(x, layers), _REPEATS, _ROUNDS)
            return 1e6 * run / len(layers), chain(x, layers)

        row["kernel_us"], got = time_of(fused_layer)
        row["early_us"], early = time_of(fused_layer, weights_ready=True)
        if not all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(early))):
            raise RuntimeError("weights fetched early give another result")
        row["ratio"] = min(row["kernel_us"], row["early_us"]) / row["floor_us"]
        row["present_us"], want = time_of(present_layer)
        row["error"] = worst_error(jax.tree.leaves(got), jax.tree.leaves(want))
    except Exception as error:
        row["failed"] = reason(error)
    return row


def rows(options: argparse.Namespace, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Measure what is asked for, as long as there is time."""
    start = time.monotonic()

    def late() -> bool:
        return time.monotonic() - start > options.seconds

    wanted = [
        Shape(model, T)
        for model, T in CASES
        if (not options.only or model in options.only) and (not options.rows or T in options.rows)
    ]
    for shape in wanted:
        if not late():
            yield measure_layer(shape, shape.weight_bytes(PRODUCTS) / ceilings.copy)
        for name in PRODUCTS:
            floor = shape.weight_bytes([name]) / ceilings.copy
            if not late():
                yield measure(shape, name, None, floor, beside=True)
            for tiling in shape.variants(name) if options.variants else ():
                if not late():
                    yield measure(shape, name, tiling, floor, beside=False)
    if late():
        print(f"{options.seconds:g} s were over (--seconds); what came later is left out")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.kernels.products", __doc__)
    models = [model for model, _ in CASES]
    p.add_argument("--only", nargs="+", choices=sorted(set(models)), help="models")
    p.add_argument("--rows", type=numbers, help="of 8 and 16")
    p.add_argument("--variants", action="store_true", help="time other tilings too")
    p.add_argument("--seconds", type=float, default=540.0, help="begin nothing after so many")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Measure, print each as it comes, keep."""
    options = parser().parse_args(arguments)
    if jax.default_backend() != "gpu":
        print("needs a Hopper GPU: the kernels use its instructions", file=sys.stderr)
        return 1
    ceilings = measure_ceilings()
    found = []
    for row in rows(options, ceilings):
        print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        found.append(row)
    result = record("bench.kernels.products", found, vars(options), copy_bytes_per_s=ceilings.copy)
    keep(result, COLUMNS, options.json, "kernels_products")
    return 1 if any("failed" in row for row in found) else 0


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
