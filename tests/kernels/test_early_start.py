"""Programmatic dependent launch: kernels wait before they read what others write."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from bench.decode_step.roofline import DecodeCase
from bench.machine_code.lowered_step import kernels_of, lowered_step
from rjax.pallas_kernels.gemm.few_bits.quantised_gemm import quantised_gemm
from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.gemm.gate_up_gemm import gate_up_gemm
from rjax.pallas_kernels.gemm.split_k_gemm import split_k_gemm

_WAIT, _TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_COPY = re.compile(r"cp[.]async[.]bulk[.]tensor")
STEPS = [
    ("llama-3-8b", 64, None),
    ("glm-4.7-flash", 8, None),
    ("llama-3-8b", 1, None),
    ("gpt-oss-20b", 8, None),
    ("llama-3-8b", 64, "fp8"),
    ("llama-3-8b", 1, "int4"),
    ("llama-3-8b", 8, None),
    ("qwen3-0.6b", 256, None),
]


@pytest.mark.sample(0, 3)
@pytest.mark.parametrize(("model", "rows", "quantization"), STEPS)
def test_every_kernel_of_a_step_waits_and_lets_the_next_start(model, rows, quantization):
    """One that did not wait could start while a kernel before the last one still writes."""
    lowered = lowered_step(model, DecodeCase(rows, 2048, 128), quantization)
    kernels = kernels_of(lowered)
    assert len(kernels) > 1
    for _, module in kernels:
        text = _text(module)
        assert _WAIT in text and _TRIGGER in text, text[:2000]


def _text(module: bytes) -> str:
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        return str(ir.Module.parse(module))


def _split_k(early: bool):
    shapes = (64, 512), (512, 512)
    return functools.partial(split_k_gemm, early_weights=early), shapes


def _gate_up(early: bool):
    return functools.partial(gate_up_gemm, early_weights=early), ((64, 512), (512, 2, 512))


def _int8(early: bool):
    def product(h, w):
        scale = jnp.ones((1, 512), jnp.float32)
        return quantised_gemm(h, ScaledWeight(w.astype(jnp.int8)[None], scale, is_early=early))

    return product, ((64, 512), (512, 512))


@pytest.mark.sample(3)
@pytest.mark.parametrize("product", [_split_k, _gate_up, _int8])
@pytest.mark.parametrize("early", [False, True])
def test_only_weights_of_arguments_are_read_before_the_wait(product, early):
    run, shapes = product(early)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    lowered = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",))
    text = _text(kernels_of(lowered)[-1][1])
    copies = [found.start() for found in _COPY.finditer(text)]
    waits = [found.start() for found in re.finditer(re.escape(_WAIT), text)]
    before = [place for place in copies if place < waits[0]]
    assert bool(before) == early
