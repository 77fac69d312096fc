"""Decode steps of one or two layers, each compared with a step in plain JAX and float32.

They run the kernels between the attention kernels: a layer of one row, or what few rows need from
one attention to the next, in one launch and in several, split-K and gate-up GEMMs, norms, RoPE with
the KV write, GEMMs of fp8 and int4 weights, and experts. Weights are random and equal in both
steps; so are KV and tokens.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.decode_step.step_bench import Bench
from bench.kernels.cases.sanitizer import StepCase

_PAGE = 64  # tokens


def step_error(case: StepCase, backend: str) -> float:
    """The largest error of the logits and of each KV pool, over its largest element."""
    bench = _bench(case, backend, "bfloat16", case.without if backend == "mosaic" else None)
    step, state, packed = bench.compiled(case.rows)
    reference = _bench(case, "xla", "float32")
    leaves = [
        given.astype(own.dtype) for given, own in zip(bench.leaves, reference.leaves, strict=True)
    ]
    with jax.default_matmul_precision("highest"):
        reference_step, reference_state, reference_packed = reference.compiled(case.rows)
    widened = dataclasses.replace(
        reference_state,
        k_pages=[pages.astype(jnp.float32) for pages in state.k_pages],
        v_pages=[pages.astype(jnp.float32) for pages in state.v_pages],
    )
    found = _arrays(*step(bench.leaves, state, packed))
    expected = _arrays(*reference_step(leaves, widened, reference_packed))
    return float(np.max([_error(*pair) for pair in zip(found, expected, strict=True)]))


def check_step(case: StepCase, backend: str) -> bool:
    """Whether the step is right; prints a line."""
    start = time.perf_counter()
    error = step_error(case, backend)
    print(
        f"{case.name}: relative error {error:.1e}, {time.perf_counter() - start:.1f} s", flush=True
    )
    return error < case.bound


def _bench(case: StepCase, backend: str, dtype: str, without: str | None = None) -> Bench:
    return Bench(
        case.config,
        backend=backend,
        page_size=_PAGE,
        relay="auto",
        mode="greedy",
        dtype=dtype,
        quantization=case.quantization,
        without=without,
    )


def _arrays(state: Any, result: Any) -> list[np.ndarray]:
    """Logits, and the KV pools of every layer."""
    arrays = (result.logits, *state.k_pages, *state.v_pages)
    return [np.asarray(array, np.float32) for array in arrays]


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference over the largest expected element; NaN if any element is."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
