"""A step of Gemma 4, whose full layers have heads of 512, traced and lowered for Hopper."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rjax.models import Decoder, config_from_dict
from rjax.models.sharding import single_device_mesh
from rjax.sampling import init_state
from rjax.worker.backend import choose_backend
from rjax.worker.engine_plan import groups_of
from rjax.worker.pages.pools import page_shape
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.layout import PackedLayout
from rjax.worker.step.program import compile_step
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state import StepState

pytestmark = [pytest.mark.usefixtures("no_annotations_checked"), pytest.mark.thorough]
FIELDS = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "sliding_window": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "num_global_key_value_heads": 2,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}


@pytest.mark.parametrize("rows", [1, 64])
def test_all_layers_have_mosaic_kernels(rows):
    config, dtype = config_from_dict(FIELDS), jnp.dtype(jnp.bfloat16)
    backend = choose_backend(
        "auto", platform="gpu", compute_capability=9.0, model=config, dtype=dtype, page_size=64
    )
    assert backend.name == "mosaic"
    groups = groups_of(config, page_size=64, max_model_len=4096)
    plans = tuple(
        backend.plan_shape(rows, rows, 4096, 64, coalesce=True, window=kind.window)
        for kind in groups.kinds
    )
    shape = StepShape(rows, rows, 64, 64, groups, plans)
    layout = PackedLayout(shape)
    graph, weights = nnx.split(Decoder(config, dtype))
    leaves, tree = jax.tree.flatten(weights)
    choices = []
    step = compile_step(
        graph, tree, layout, StepFeatures("greedy"), backend, single_device_mesh(), choices.extend
    )
    page = jax.ShapeDtypeStruct((20, *page_shape(config, groups, 64)), dtype)
    pools = [page] * groups.num_pools
    sampling = jax.eval_shape(lambda: init_state(64, config.vocab_size))
    state = StepState(pools, pools, sampling, jax.ShapeDtypeStruct((64,), jnp.int32), None, [])
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    lowered = step.trace(leaves, state, packed).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("attention_kernel") >= 2
    written = [c for c in choices if c.problem.operation == "norm_rope_and_cache"]
    assert {c.problem.head_dim for c in written} == {256, 512}
    assert all(c.problem.norms_values and c.kernel.backend == "mosaic" for c in written)
