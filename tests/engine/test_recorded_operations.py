"""What is chosen for a layer without computing it is what a step chooses."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rjax.batch.page_groups import page_groups
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import DecoderLayer, Residual, config_from_dict, rotary_tables
from rjax.models.loading.config import with_quantization
from rjax.models.sharding import single_device_mesh
from rjax.worker.backend import choose_backend
from rjax.worker.paged_operations import PagedOperations
from rjax.worker.recorded_operations import layer_choices
from rjax.worker.step.layout import PackedLayout
from rjax.worker.step.shape import StepShape

CASES = [
    ("qwen3-0.6b", None, 1),
    ("qwen3-0.6b", None, 16),
    ("qwen2.5-0.5b", "int4", 16),
    ("llama-3-8b", "fp8", 256),
    ("gpt-oss-20b", "mxfp4", 8),
    ("deepseek-v2-lite", None, 1),
]


def of_step(config, number, rows, backend, groups):
    """The choices for a layer behind itself in a step."""
    S, length = 64, 8192
    shape = StepShape(
        rows,
        rows,
        -(-length // S),
        S,
        groups,
        tuple(
            backend.plan_shape(rows, rows, length, S, coalesce=True, window=kind.window)
            for kind in groups.kinds
        ),
    )
    layout, choices = PackedLayout(shape), []
    graph, state = nnx.split(DecoderLayer(config, number, config.dtype))

    def run(state, x, page, packed):
        step = layout.unpack(packed)
        pages = [page] * config.num_layers
        operations = PagedOperations(
            pages, pages, step, groups, backend, single_device_mesh(), choices.append
        )
        rope = config.rope_of(number)
        rotary = None if rope is None else rotary_tables(rope, jnp.asarray(step.positions))
        layer = nnx.merge(graph, state)
        residual = layer(Residual(x), rotary, operations)
        choices.clear()
        return layer(residual, rotary, operations).x

    x = jax.ShapeDtypeStruct((rows, config.hidden_size), config.dtype)
    page = jax.ShapeDtypeStruct((1, config.num_kv_heads, S, config.head_dim), config.dtype)
    jax.eval_shape(run, state, x, page, jax.ShapeDtypeStruct((layout.size,), jnp.int32))
    return choices


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(("name", "quantization", "rows"), CASES)
def test_the_choices_of_a_layer_are_those_of_a_step(name, quantization, rows):
    config = with_quantization(config_from_dict(SHAPES[name]), quantization)
    backend = choose_backend(
        "auto",
        platform="gpu",
        compute_capability=9.0,
        model=config,
        dtype=config.dtype,
        page_size=64,
    )
    groups = page_groups(config.sliding_windows, page_size=64, max_model_len=8192)
    for number in {0, config.num_layers - 1}:
        found = layer_choices(
            backend.dispatcher,
            backend.attention,
            config,
            number,
            rows=rows,
            dtype=config.dtype,
            page_size=64,
        )
        assert found == of_step(config, number, rows, backend, groups) != []
