"""Whole steps of models with linear attention, lowered for Hopper."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rjax.batch.page_groups import one_group, with_states
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import Decoder, config_from_dict
from rjax.models.sharding import single_device_mesh
from rjax.pallas_kernels.gated_delta.states import state_shapes
from rjax.sampling import init_state
from rjax.worker.backend import choose_backend
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.layout import PackedLayout
from rjax.worker.step.program import compile_step
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state import StepState

pytestmark = [pytest.mark.usefixtures("no_annotations_checked"), pytest.mark.thorough]


@pytest.mark.parametrize(("rows", "seqs"), [(1, 1), (64, 64), (64, 40), (256, 64)])
def test_states_have_a_mosaic_kernel(rows, seqs):
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = config_from_dict(SHAPES["qwen3.5-35b-a3b"] | layers)
    dtype = jnp.dtype(jnp.bfloat16)
    backend = choose_backend(
        "auto",
        platform="gpu",
        compute_capability=9.0,
        model=config,
        dtype=dtype,
        page_size=64,
    )
    assert backend.name == "mosaic"
    plan = backend.plan_shape(rows, seqs, 1024, 64, coalesce=True)
    groups = with_states(one_group(1), (True, False))
    shape = StepShape(rows, seqs, 16, 64, groups, (plan,), one_row_each=rows < 256)
    layout = PackedLayout(shape)
    graph, weights = nnx.split(Decoder(config, dtype))
    leaves, tree = jax.tree.flatten(weights)
    features, choices = StepFeatures("greedy"), []
    mesh = single_device_mesh()
    step = compile_step(graph, tree, layout, features, backend, mesh, choices.extend)
    pools = [jax.ShapeDtypeStruct((20, config.num_kv_heads, 64, config.head_dim), dtype)]
    sampling = jax.eval_shape(lambda: init_state(64, config.vocab_size))
    states = state_shapes(
        (16, 128, 2, 128), taps=4, num_states=130, num_slots=64, page_size=64, dtype=dtype
    )
    last_tokens = jax.ShapeDtypeStruct((64,), jnp.int32)
    state = StepState(pools, pools, sampling, last_tokens, None, [states])
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    step.trace(leaves, state, packed).lower(lowering_platforms=("cuda",))
    chosen = {c.problem.operation: c.kernel.name for c in choices if c.kernel is not None}
    assert chosen["gated_delta"] == "mosaic.gated_delta"
    conv = "mosaic.causal_conv_step" if shape.one_row_each else "xla.causal_conv"
    assert chosen["causal_conv"] == conv
