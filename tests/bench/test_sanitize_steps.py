"""The decode steps that run under compute-sanitizer."""

import dataclasses
import re

import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from bench.kernels.cases.sanitizer import step_cases
from bench.kernels.sanitize import __main__ as sanitize
from bench.machine_code.lowered_step import kernels_of, lowered_step

CASES = {case.name: case for case in step_cases()}
_LAYER = {"one_row_layer"}
_UNFUSED = {"rope_and_cache_kernel", "attention_kernel"}
_DENSE = {"split_k_gemm", "gate_up_gemm"}
_FP8 = {f"quantised_{name}_float8_e4m3fn" for name in ("gemm", "gate_up_gemm")}
_INT4 = {f"quantised_{name}_int4" for name in ("gemm", "gate_up_gemm")}
_FP8_ROWS = {f"{name}_kernel" for name in ("merge_quantise", "quantise_rows")}
_EXPERTS = {"top_k_routing_kernel", "work_list_kernel", "grouped_gate_up", "grouped_down"}
KERNELS = {
    "one-row": _LAYER,
    "one-row-fp8": _LAYER,
    "one-row-int4": _LAYER,
    "one-row-unfused": _UNFUSED | _DENSE,
    "one-row-unfused-fp8": _UNFUSED | _FP8 | {"merge_kernel"},
    "one-row-unfused-int4": _UNFUSED | _INT4,
    "few-rows": _UNFUSED | {"split_k_gemm", "merge_kernel", "post_attention_block"},
    "few-rows-unfused": _UNFUSED | _DENSE | {"merge_kernel"},
    "few-rows-fp8": _UNFUSED | _FP8 | _FP8_ROWS | {"add_rms_norm_quantise_kernel"},
    "few-rows-int4": _UNFUSED | _INT4 | {"merge_kernel"},
    "few-rows-experts": _UNFUSED | _EXPERTS | {"split_k_gemm", "merge_kernel"},
}
_QUICK = ("one-row", "one-row-unfused-fp8", "few-rows-fp8", "few-rows-experts")
_SMALL = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 256, "num_hidden_layers": 1}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(
    "name", [n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_the_kernels_of_a_step(name):
    """Lowered for CUDA; the norm after the last layer is a kernel in every step."""
    case = CASES[name]
    step = lowered_step(case.config, case.rows, case.quantization, case.without)
    assert {_name(module) for _, module in kernels_of(step)} == {
        *KERNELS[name],
        "add_rms_norm_kernel",
    }


def _name(module: bytes) -> str:
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        found = re.search(r"^module @(\w+)", str(ir.Module.parse(module)), re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.fixture
def small(monkeypatch):
    """The cases with small models."""
    cases = [dataclasses.replace(case, config=case.config | _SMALL) for case in CASES.values()]
    monkeypatch.setattr(sanitize, "step_cases", lambda: cases)
    return cases


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("few-rows-fp8", ["few-rows-fp8"]),
        pytest.param("row", list(CASES), marks=pytest.mark.slow),
    ],
)
def test_steps_are_right(small, capsys, only, names):
    assert sanitize.main(["--bare", "--backend=xla", f"--only={only}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": relative error ")[0] for line in lines] == names


@pytest.mark.slow
def test_a_wrong_step_is_found(small, capsys):
    small[:] = [dataclasses.replace(case, bound=1e-9) for case in small]
    assert sanitize.main(["--bare", "--backend=xla", "--only=one-row-unfused-fp8"]) == 1
    assert capsys.readouterr().out.startswith("one-row-unfused-fp8: relative error ")
