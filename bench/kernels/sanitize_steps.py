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

from bench.decode_step.roofline import DecodeCase
from bench.decode_step.step_bench import Bench
from rjax.benchmarks.model_shapes import SHAPES

_FEW_TOKENS = {"vocab_size": 4096}
DENSE = SHAPES["qwen3-0.6b"] | _FEW_TOKENS | {"num_hidden_layers": 2}
EXPERTS = SHAPES["qwen3-30b-a3b"] | _FEW_TOKENS
EXPERTS |= {"num_hidden_layers": 1, "num_experts": 16, "num_experts_per_tok": 2}
ONE_ROW, FEW_ROWS = DecodeCase(1, 0, 70), DecodeCase(5, 128, 70)
_BOUND = 2e-2  # plain JAX in bfloat16 has an error of 1.1e-2
_FP8_ROWS_BOUND = 2e-1  # for kernels that quantise rows to fp8, which alone gives 8e-2
_PAGE = 64  # tokens


@dataclasses.dataclass(frozen=True, slots=True)
class StepCase:
    """A decode step.

    Attributes:
        name: of the case.
        rows: of the step, and their contexts.
        config: config.json of the model.
        quantization: of the weights.
        without: a kernel that the mosaic backend must do without.
        bound: of `step_error`.
    """

    name: str
    rows: DecodeCase
    config: dict[str, Any]
    quantization: str | None = None
    without: str | None = None
    bound: float = _BOUND


def step_cases() -> list[StepCase]:
    """Of one row and of few rows, with each kind of weights."""
    layer = "mosaic.one_row_layer"
    return [
        StepCase("one-row", ONE_ROW, DENSE),
        StepCase("one-row-fp8", ONE_ROW, DENSE, "fp8"),
        StepCase("one-row-int4", ONE_ROW, DENSE, "int4"),
        StepCase("one-row-unfused", ONE_ROW, DENSE, None, layer),
        StepCase("one-row-unfused-fp8", ONE_ROW, DENSE, "fp8", layer, _FP8_ROWS_BOUND),
        StepCase("one-row-unfused-int4", ONE_ROW, DENSE, "int4", layer),
        StepCase("few-rows", FEW_ROWS, DENSE),
        StepCase("few-rows-unfused", FEW_ROWS, DENSE, None, "mosaic.post_attention_block"),
        StepCase("few-rows-fp8", FEW_ROWS, DENSE, "fp8", bound=_FP8_ROWS_BOUND),
        StepCase("few-rows-int4", FEW_ROWS, DENSE, "int4"),
        StepCase("few-rows-experts", FEW_ROWS, EXPERTS),
    ]


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
