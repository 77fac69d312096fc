"""Cases of the GEMMs of few rows: weights of each scheme, in the shapes of a model's layers."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from rjax.pallas_kernels.gemm.few_bits.config import GemmConfig
from rjax.pallas_kernels.gemm.few_bits.quantised_gemm import (
    gemm_configs,
    quantised_gate_up_gemm,
    quantised_gemm,
)
from rjax.pallas_kernels.gemm.few_bits.quantised_rows import QuantisedRows, quantise_rows_xla
from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.gemm.gate_up_gemm import gate_up_gemm
from rjax.pallas_kernels.gemm.split_k_gemm import split_k_gemm
from rjax.pallas_kernels.pending import Partial

SCHEMES = ("bf16", "fp8", "fp8 blocks", "int8", "int4", "int4 interleaved")
ROWS = (1, 8, 16, 32, 64)
_GROUP = 128
LAYERS = {
    "llama-3-8b qkv": (1, 6144, 4096),
    "llama-3-8b output": (1, 4096, 4096),
    "llama-3-8b gate-up": (2, 14336, 4096),
    "llama-3-8b down": (1, 4096, 14336),
    "qwen2.5-3b gate-up": (2, 11008, 2048),
    "qwen2.5-3b down": (1, 2048, 11008),
}
"""(W, X, E): matrices, outputs, inputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProductCase:
    """One GEMM.

    Attributes:
        layer: of LAYERS, or a name of its own.
        shape: (W, X, E).
        scheme: of SCHEMES.
        rows: T.
        config: tile sizes; None for the kernel's own choice.
    """

    layer: str
    shape: tuple[int, int, int]
    scheme: str
    rows: int
    config: GemmConfig | None = None

    @property
    def name(self) -> str:
        return f"{self.layer}, {self.scheme}, {self.rows} rows"

    @property
    def weight_bytes(self) -> int:
        """Bytes of values and scales."""
        leaves = jax.eval_shape(self.draw_weight, jax.random.key(0))
        bits = (
            x.size * (4 if x.dtype == jnp.int4 else 8 * x.dtype.itemsize) for x in _arrays(leaves)
        )
        return sum(bits) // 8

    def draw_weight(self, key: jax.Array) -> jax.Array | ScaledWeight:
        """Random values; about as large as a trained weight's."""
        W, X, E = self.shape
        if self.scheme == "bf16":
            shape = (E, X) if W == 1 else (E, W, X)
            return E**-0.5 * jax.random.normal(key, shape, jnp.bfloat16)
        of_values, of_scale = jax.random.split(key)

        def scale(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
            return (E**-0.5 * jax.random.uniform(of_scale, shape, minval=0.5)).astype(dtype)

        if self.scheme.startswith("fp8"):
            values = jax.random.normal(of_values, (W, X, E), jnp.bfloat16)
            blocks = (W, X // _GROUP, E // _GROUP) if "blocks" in self.scheme else (W, X)
            return ScaledWeight(values.astype(jnp.float8_e4m3fn), scale(*blocks))
        int8 = self.scheme.startswith("int8")
        bound = 128 if int8 else 8
        values = jax.random.randint(of_values, (W, X, E), -bound, bound, jnp.int8)
        if int8:
            return ScaledWeight(values, scale(W, X) / bound)
        scales = scale(W, X, E // _GROUP, dtype=jnp.bfloat16) / bound
        interleaved = self.scheme == "int4 interleaved"
        return ScaledWeight(values.astype(jnp.int4), scales, None, interleaved)

    def draw_rows(self, key: jax.Array) -> jax.Array | QuantisedRows:
        """Random rows, quantised before if the weight is fp8."""
        h = jax.random.normal(key, (self.rows, self.shape[2]), jnp.bfloat16)
        if self.scheme.startswith("fp8"):
            return quantise_rows_xla(h, grouped="blocks" in self.scheme)
        return h

    def mosaic(self, h: Any, weight: Any) -> jax.Array:
        """The kernel's result: partials, or the activated product of two matrices."""
        if self.scheme == "bf16":
            result = gate_up_gemm(h, weight) if self.shape[0] == 2 else split_k_gemm(h, weight)
        elif self.shape[0] == 2:
            result = quantised_gate_up_gemm(h, weight, config=self.config)
        else:
            result = quantised_gemm(h, weight, config=self.config)
        return result.summands if isinstance(result, Partial) else result

    def plain(self, h: Any, weight: Any) -> jax.Array:
        """The result in float32, in plain JAX; partials have one summand."""
        W, X, E = self.shape
        h = h.dequantise() if isinstance(h, QuantisedRows) else h.astype(jnp.float32)
        if self.scheme == "bf16":
            matrices = weight.reshape(E, W, X).transpose(1, 2, 0).astype(jnp.float32)
        else:
            matrices = weight.dequantise()
        sums = jnp.einsum("te,wxe->wtx", h, matrices, precision=jax.lax.Precision.HIGHEST)
        return sums if W == 1 else jax.nn.silu(sums[0]) * sums[1]

    def configs(self, count: int) -> Iterator["ProductCase"]:
        """This case with the ``count`` configs that are fastest by the kernel's estimate."""
        if self.scheme == "bf16":
            yield self
            return
        weight = jax.eval_shape(self.draw_weight, jax.random.key(0))
        h = jax.eval_shape(self.draw_rows, jax.random.key(0))
        for config in itertools.islice(gemm_configs(h, weight), count):
            yield dataclasses.replace(self, config=config)


def _arrays(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


def product_cases() -> list[ProductCase]:
    """Every layer, scheme and number of rows."""
    return [
        ProductCase(layer, shape, scheme, rows)
        for layer, shape in LAYERS.items()
        for scheme in SCHEMES
        for rows in ROWS
    ]


def small_product_cases() -> list[ProductCase]:
    """Two small layers, for a CPU."""
    layers = {"small": (1, 256, 384), "small gate-up": (2, 128, 256)}
    return [
        ProductCase(layer, shape, scheme, rows=8)
        for layer, shape in layers.items()
        for scheme in SCHEMES
    ]


def distinct_weights(case: ProductCase, cache_bytes: int) -> int:
    """Weights to cycle through, so that none is read from the L2 cache."""
    return max(2, min(32, math.ceil(cache_bytes / case.weight_bytes)))
