"""Options of XLA for steps."""

import jax
import jax.numpy as jnp
import pytest

from rjax.worker.programs.cache import compiler_options

TRITON = "xla_gpu_enable_triton_gemm"


@pytest.mark.parametrize(
    ("platform", "dtypes", "expected"),
    [
        ("gpu", ["bfloat16"], {TRITON: False}),
        ("gpu", ["float8_e4m3fn", "float32", "bfloat16"], {TRITON: False}),
        ("gpu", ["bfloat16", "int4"], {}),
        ("gpu", ["int8", "float32"], {}),
        ("cpu", ["bfloat16"], {}),
    ],
)
def test_products_are_cublas_where_that_was_measured(platform, dtypes, expected):
    leaves = [jax.ShapeDtypeStruct((2, 2), jnp.dtype(dtype)) for dtype in dtypes]
    assert compiler_options(leaves, platform) == expected


def test_xla_knows_the_options():
    options = compiler_options([], "gpu")
    lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8)))
    assert (lowered.compile(compiler_options=options)(jnp.ones((8, 8))) == 8).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={f"{TRITON}s": False})
