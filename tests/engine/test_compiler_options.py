"""Options of XLA for steps."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from rjax.worker.programs.cache import compiler_options

TRITON = "xla_gpu_enable_triton_gemm"


@pytest.mark.parametrize(
    ("capability", "dtypes", "expected"),
    [
        ("9.0", ["bfloat16"], {TRITON: False}),
        ("9.0", ["float8_e4m3fn", "float32", "bfloat16"], {TRITON: False}),
        ("9.0", ["bfloat16", "int4"], {}),
        ("9.0", ["int8", "float32"], {}),
        ("8.0", ["bfloat16"], {}),
        ("10.0", ["bfloat16"], {}),
        (None, ["bfloat16"], {}),
    ],
)
def test_products_are_cublas_where_that_was_measured(capability, dtypes, expected):
    leaves = [jax.ShapeDtypeStruct((2, 2), jnp.dtype(dtype)) for dtype in dtypes]
    device = SimpleNamespace(compute_capability=capability) if capability else jax.devices()[0]
    assert compiler_options(leaves, device) == expected


def test_xla_knows_the_options():
    options = compiler_options([], SimpleNamespace(compute_capability="9.0"))
    lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8)))
    assert (lowered.compile(compiler_options=options)(jnp.ones((8, 8))) == 8).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={f"{TRITON}s": False})
