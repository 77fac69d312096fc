"""The summary of a start says which kernels read the weights, as the dispatcher chooses them."""

import dataclasses

import jax.numpy as jnp
import pytest

from rjax.benchmarks.model_shapes import SHAPES
from rjax.build.summary import gpu_kernels
from rjax.models import ModelConfig, config_from_dict
from rjax.models.formats import OnLoad
from rjax.models.loading.config import with_quantization
from rjax.models.schemes import ON_LOAD, Scaled
from rjax.pallas_kernels.gemm.few_bits.config import FEW_ROWS
from rjax.worker.backend import Backend, choose_backend
from rjax.worker.kernels.uses import dequantised_projections

ROWS = (8, 16, 32, 64, 128, 256, 2048)
DENSE = [name for name, scheme in ON_LOAD.items() if not OnLoad(scheme).experts_only]


def llama(quantization: str | None = None, **schemes: Scaled) -> ModelConfig:
    """Llama-3-8B with two layers; ``mlp_up`` names the projection "mlp.up" of both."""
    shapes = SHAPES["llama-3-8b"] | {"num_hidden_layers": 2}
    config = with_quantization(config_from_dict(shapes), quantization)
    changed = {
        f"layers.{layer}.{name.replace('_', '.')}": scheme
        for layer in range(2)
        for name, scheme in schemes.items()
    }
    return dataclasses.replace(config, schemes=tuple((dict(config.schemes) | changed).items()))


def backend_of(model: ModelConfig, name: str = "mosaic") -> Backend:
    return choose_backend(
        name,
        platform="gpu",
        compute_capability=9.0,
        model=model,
        dtype=jnp.bfloat16,
        page_size=64,
    )


def kernels(model: ModelConfig, name: str = "mosaic", rows: tuple[int, ...] = ROWS) -> str:
    return gpu_kernels(backend_of(model, name), model, jnp.bfloat16, devices=1, step_rows=rows)


def direct_rows(model: ModelConfig) -> dict[str, set[int]]:
    """The step sizes in which kernels read each quantised projection."""
    found = dequantised_projections(backend_of(model), model, jnp.bfloat16, devices=1, rows=ROWS)
    return {
        name: {rows for rows, why in reasons.items() if why is None}
        for name, reasons in found.items()
    }


def test_unquantised_weights():
    assert kernels(llama()) == ("mosaic attention; weights are streamed in steps of up to 128 rows")


@pytest.mark.sample(1)
@pytest.mark.parametrize("quantization", DENSE)
def test_few_rows_are_read_by_kernels(quantization):
    found = direct_rows(llama(quantization))
    assert set(found) == {"D -> K A H", "N H -> D", "D -> A F", "F -> D"}
    for rows in found.values():
        assert rows >= {count for count in ROWS if count <= FEW_ROWS}
    [rows] = {frozenset(rows) for rows in found.values()}
    said = f"up to {max(rows)} rows, XLA dequantises them in larger ones"
    assert kernels(llama(quantization)) == (
        "mosaic attention; kernels read quantised weights as they are in "
        + ("all steps" if rows == set(ROWS) else f"steps of {said}")
    )


def test_fp8_of_channels_stays_fp8_at_any_size():
    assert kernels(llama("fp8")).endswith("as they are in all steps")


def test_groups_without_a_kernel():
    model = llama(
        **dict.fromkeys(
            ("attention_qkv", "attention_output", "mlp_up", "mlp_down"), Scaled("int4", (1, 32))
        )
    )
    assert kernels(model) == (
        "mosaic attention; XLA dequantises quantised weights in all steps "
        "(scales of 1 x 32 int4; the kernel takes 1 x 64 and 1 x 128 n)"
    )


def test_a_projection_of_its_own():
    found = kernels(llama("fp8", mlp_up=Scaled("int4", (1, 32))))
    assert "those of D -> K A H, N H -> D, F -> D as they are in all steps" in found
    assert "XLA dequantises those of D -> A F in all steps (scales of 1 x 32 int4" in found


def test_layers_may_differ():
    model = llama("fp8")
    changed = dict(model.schemes) | {"layers.1.mlp.down": Scaled("int4", (1, 32))}
    model = dataclasses.replace(model, schemes=tuple(changed.items()))
    assert direct_rows(model)["F -> D"] == set()
    assert direct_rows(model)["D -> A F"] == set(ROWS)


def test_sizes_between_are_named():
    found = kernels(llama("int4"), rows=(8, 50, 64))
    assert "as they are in steps of 8, 64 rows, XLA dequantises them in others" in found


def test_other_backends():
    assert kernels(llama("int4"), "xla") == (
        "xla attention; XLA dequantises quantised weights in all steps"
    )
