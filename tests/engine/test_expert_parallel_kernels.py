"""Devices with whole experts and copies of KV heads run the kernels of one device; for CUDA."""

import pytest

from .virtual_devices import run_on_virtual_devices

_PROGRAM = """
import collections

import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh

from rjax.batch.page_groups import one_group
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import config_from_dict, place
from rjax.models.decoder import Decoder
from rjax.pallas_kernels.residual.peers import Peers, update_capacity
from rjax.sampling import init_state
from rjax.worker.backend import choose_backend
from rjax.worker.step.state import StepState
from rjax.worker.step.program import compile_step
from rjax.worker.step.layout import PackedLayout
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.shape import StepShape

whole = config_from_dict(SHAPES["qwen3-30b-a3b"] | {"num_hidden_layers": 2})
dtype = jnp.dtype(jnp.bfloat16)
for rows in (1, 8):
    found = []
    for devices in (1, 8):
        config = place(whole, devices, expert_parallel=True)
        mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",))
        backend = choose_backend(
            "mosaic", platform="gpu", compute_capability=9.0, model=config, dtype=dtype,
            page_size=64, devices=devices,
        )
        plan = backend.plan_shape(rows, rows, 1024, 64, coalesce=True)
        shape = StepShape(rows, rows, 16, 64, one_group(config.num_layers), (plan,))
        layout = PackedLayout(shape)
        graph, weights = nnx.split(Decoder(config, dtype))
        leaves, tree = jax.tree.flatten(weights)
        choices = []
        features = StepFeatures("greedy")
        step = compile_step(graph, tree, layout, features, backend, mesh, choices.extend)
        heads = config.num_kv_heads
        assert heads == max(4, devices)
        pools = [jax.ShapeDtypeStruct((20, heads, 64, 128), dtype)] * 2
        sampling = jax.eval_shape(lambda: init_state(8, config.vocab_size))
        peers = None
        if devices > 1:
            shapes = (devices, devices + 1, 2), (devices, 2)
            arrays = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
            peers = Peers(*arrays, update_capacity(devices))
        tokens = jax.ShapeDtypeStruct((8,), jnp.int32)
        state = StepState(pools, pools, sampling, tokens, peers)
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        lowered = step.trace(leaves, state, packed).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" in lowered.as_text()
        names = [c.kernel.name for c in choices if c.kernel is not None]
        assert all(name.startswith("mosaic") for name in names), names
        found.append(collections.Counter(names))
    one, eight = found
    assert "mosaic.grouped_gemm" in eight
    # The kernel that sums the devices' shares computes the norm, so that of a GEMM does not.
    assert eight.pop("mosaic.all_reduce") == 1  # the embedding
    assert eight.pop("mosaic.all_reduce_rms_norm") == 2 * config.num_layers
    assert eight.pop("mosaic.all_reduce_argmax") == 1  # greedy tokens
    one = collections.Counter(name.replace("norm_split_k", "split_k") for name in one.elements())
    one.pop("mosaic.add_rms_norm")
    assert eight == one, (rows, eight, one)
print("same kernels")
"""


@pytest.mark.slow
def test_eight_devices_have_the_kernels_of_one():
    assert run_on_virtual_devices(_PROGRAM, 8).endswith("same kernels\n")
