"""Random weights of few bits, for tests of the kernels that multiply them."""

import jax
import jax.numpy as jnp
import numpy as np

from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight

KINDS = (
    *("fp8", "fp8 blocks", "int8"),
    *("int4", "int4 zeros", "int4 64", "int4 interleaved", "int4 interleaved zeros"),
)


def values_dtype(kind: str):
    if kind.startswith("fp8"):
        return jnp.dtype(jnp.float8_e4m3fn)
    return jnp.dtype(jnp.int8 if kind == "int8" else jnp.int4)


def scale_shape(kind: str, W: int, X: int, E: int) -> tuple[int, ...]:
    if kind in ("fp8", "int8"):
        return (W, X)
    if kind == "fp8 blocks":
        return (W, X // (128 if X % 128 == 0 else 64), E // 128)
    return (W, X, E // (64 if kind == "int4 64" else 128))


def scale_dtype(kind: str):
    return jnp.bfloat16 if kind.startswith("int4") else jnp.float32


def weight_of(kind: str, W: int, X: int, E: int, seed: int = 0) -> ScaledWeight:
    rng = np.random.default_rng(seed)
    shape, dtype = scale_shape(kind, W, X, E), values_dtype(kind)
    if kind.startswith("fp8"):
        values = rng.standard_normal((W, X, E), np.float32)
    else:
        limit = 128 if kind == "int8" else 8
        values = rng.integers(-limit, limit, (W, X, E), np.int8)
    scale = rng.uniform(0.5, 1.5, shape).astype(np.float32) * E**-0.5
    scale /= {"fp8": 1, "int8": 74, "int4": 4.6}[kind.split()[0]]
    zero_points = None
    if "zeros" in kind:
        zero_points = jnp.asarray(rng.integers(-8, 9, shape, np.int8))
    return ScaledWeight(
        jnp.asarray(values).astype(dtype),
        jnp.asarray(scale, scale_dtype(kind)),
        zero_points,
        "interleaved" in kind,
    )


def weight_spec(kind: str, W: int, X: int, E: int) -> ScaledWeight:
    shape = scale_shape(kind, W, X, E)
    zero_points = jax.ShapeDtypeStruct(shape, jnp.int8) if "zeros" in kind else None
    return ScaledWeight(
        jax.ShapeDtypeStruct((W, X, E), values_dtype(kind)),  # pyright: ignore[reportArgumentType]
        jax.ShapeDtypeStruct(shape, scale_dtype(kind)),  # pyright: ignore[reportArgumentType]
        zero_points,  # pyright: ignore[reportArgumentType]
        "interleaved" in kind,
    )


def error(found, want) -> float:
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))
