"""On a mesh every operation of a step has a Mosaic kernel, as on one device; lowered for CUDA."""

import pytest

from .virtual_devices import run_on_virtual_devices

_PROGRAM = """
import collections, dataclasses

import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh

from rjax.batch.page_groups import one_group
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import config_from_dict
from rjax.models.decoder import Decoder
from rjax.pallas_kernels.residual.peers import Peers, update_capacity
from rjax.sampling import init_state
from rjax.worker.backend import choose_backend
from rjax.worker.kernels.uses import step_kernels
from rjax.worker.step.state import StepState
from rjax.worker.step.program import compile_step
from rjax.worker.step.layout import PackedLayout
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.shape import StepShape

config = config_from_dict(SHAPES["llama-3-8b"] | {"num_hidden_layers": 2})
dtype = jnp.dtype(jnp.bfloat16)
for rows in (1, 8):
    found = {}
    for devices in (1, 2, 4, 8):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",))
        backend = choose_backend(
            "mosaic", platform="gpu", compute_capability=9.0, model=config, dtype=dtype,
            page_size=64, devices=devices,
        )
        if devices == 1:  # where one kernel computes a layer of one row, or most of one
            dispatcher = backend.dispatcher.without("mosaic.one_row_layer")
            dispatcher = dispatcher.without("mosaic.post_attention_block")
            backend = dataclasses.replace(backend, dispatcher=dispatcher)
        plan = backend.plan_shape(rows, rows, 1024, 64, coalesce=True)
        shape = StepShape(rows, rows, 16, 64, one_group(config.num_layers), (plan,))
        layout = PackedLayout(shape)
        graph, weights = nnx.split(Decoder(config, dtype))
        leaves, tree = jax.tree.flatten(weights)
        choices = []
        features = StepFeatures("greedy")
        step = compile_step(graph, tree, layout, features, backend, mesh, choices.extend)
        pools = [jax.ShapeDtypeStruct((20, 8, 64, 128), dtype)] * 2
        sampling = jax.eval_shape(lambda: init_state(8, config.vocab_size))
        last_tokens, peers = jax.ShapeDtypeStruct((8,), jnp.int32), None
        if devices > 1:
            shapes = (devices, devices + 1, 2), (devices, 2)
            arrays = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
            peers = Peers(*arrays, update_capacity(devices))
        state = StepState(pools, pools, sampling, last_tokens, peers)
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        lowered = step.trace(leaves, state, packed).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" in lowered.as_text()
        kernels = [c.kernel for c in choices if c.kernel is not None]
        assert all(kernel.name.startswith("mosaic") for kernel in kernels), kernels
        reported = step_kernels(
            shape.rows, model=config, dtype=dtype, kv_dtype=dtype, page_size=shape.page_size,
            backend=backend, devices=devices, peers=peers,
        )
        uses = {use.kernel for use in reported if use.operation.startswith("all_reduce")}
        all_sums = {"mosaic.all_reduce", "mosaic.all_reduce_rms_norm", "mosaic.all_reduce_argmax"}
        assert uses == (all_sums if devices > 1 else set()), uses
        found[devices] = collections.Counter(kernel.name for kernel in kernels)
    # The kernel that sums the devices' shares computes the norm, so that of a GEMM does not.
    one = collections.Counter()
    for name, count in found.pop(1).items():
        plain = name.replace("norm_split_k", "split_k").replace("norm_gate_up", "gate_up")
        one[plain] += count if plain != "mosaic.add_rms_norm" else 0
    for devices, kernels in found.items():
        assert kernels.pop("mosaic.all_reduce") == 1  # the embedding
        assert kernels.pop("mosaic.all_reduce_argmax") == 1
        assert kernels.pop("mosaic.all_reduce_rms_norm") == 2 * config.num_layers
        assert kernels == +one, (rows, devices, kernels, one)
print("same kernels")
"""


@pytest.mark.thorough
def test_several_devices_have_the_kernels_of_one():
    assert run_on_virtual_devices(_PROGRAM, 8).endswith("same kernels\n")
