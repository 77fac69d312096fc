"""What is compiled of a step: each kernel once for all layers, and the same in every process."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rjax.batch.page_groups import one_group
from rjax.batch.step_limits import StepLimits
from rjax.models import config_from_dict
from rjax.models.decoder import Decoder
from rjax.models.sharding import single_device_mesh
from rjax.sampling import SamplerMode, init_state
from rjax.worker.backend import choose_backend
from rjax.worker.programs.cache import keep_compiled
from rjax.worker.programs.keys import StepPrograms, multi_step_key, step_key
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.layout import PackedLayouts
from rjax.worker.step.shape import ShapeTable
from rjax.worker.step.state import StepState


def lowered(
    layers: int,
    mode: SamplerMode = "greedy",
    at_once: int = 1,
    kv_dtype: Any = jnp.bfloat16,
    seqs: int = 4,
) -> str:
    """A decode step of the mosaic backend, lowered for CUDA."""
    config = config_from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 61,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
        }
    )
    dtype = jnp.dtype(jnp.bfloat16)
    backend = choose_backend(
        "mosaic",
        platform="gpu",
        compute_capability=9.0,
        model=config,
        dtype=dtype,
        page_size=64,
        kv_dtype=kv_dtype,
    )
    table = ShapeTable(
        limits=StepLimits(4, 64),
        max_model_len=1024,
        page_size=64,
        plan_shape=lambda rows, seqs, unpadded_rows, _: backend.plan_shape(
            rows, seqs, 1024, 64, coalesce=True, unpadded_rows=unpadded_rows
        ),
        padded_rows=backend.padded_rows,
        growth=2,
        groups=one_group(config.num_layers),
    )
    shape = table.choose(rows=seqs, seqs=seqs)
    layouts = PackedLayouts()
    size = layouts[shape].size
    graph, weights = nnx.split(Decoder(config, dtype))
    leaves, tree = jax.tree.flatten(weights)
    pools = [jnp.zeros((20, 2, 64, 64), kv_dtype)] * layers
    state = StepState(pools, pools, init_state(4, 61), jnp.zeros(4, jnp.int32))
    features = StepFeatures(mode)
    programs = StepPrograms(graph, tree, backend, single_device_mesh(), layouts)
    key = step_key(shape) if at_once == 1 else multi_step_key(shape, features)
    step: Any = programs.get(key)
    shaped = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    traced = step.trace(
        shaped, state, jnp.zeros(size if at_once == 1 else (at_once, size), jnp.int32)
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture(autouse=True)
def kernels_named_by_content():
    keep_compiled(None)


@pytest.mark.slow
@pytest.mark.parametrize("seqs", [1, 4])
def test_more_layers_bring_no_more_kernels(seqs):
    few, many = (lowered(layers, seqs=seqs).count("mosaic_gpu_v2") for layers in (3, 6))
    assert few == many > 3


@pytest.mark.slow
def test_a_step_is_the_same_whatever_was_lowered_before_it():
    first = lowered(2)
    lowered(1, "full")
    assert "20x2x64x64xf8E4M3FN" in lowered(1, kv_dtype=jnp.float8_e4m3fn)
    assert lowered(2) == first


@pytest.mark.slow
def test_several_steps_at_once_have_the_kernels_of_one():
    one, many = lowered(2), lowered(2, at_once=4)
    assert many.count("mosaic_gpu_v2") == one.count("mosaic_gpu_v2")
