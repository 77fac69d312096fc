"""Devices with whole experts and copies of KV heads run the kernels of one device; for CUDA."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh

from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import config_from_dict, place
from rjax.models.decoder import Decoder
from rjax.sampling import init_state
from rjax.worker.backend import choose_backend
from rjax.worker.step import StepState, compile_step
from rjax.worker.step_input import PackedLayout
from rjax.worker.step_shape import StepFeatures, StepShape

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
        shape = StepShape(rows, rows, 16, 64, plan)
        layout = PackedLayout(shape)
        graph, weights = nnx.split(Decoder(config, dtype))
        leaves, tree = jax.tree.flatten(weights)
        choices = []
        features = StepFeatures("greedy", 0, False)
        step = compile_step(graph, tree, layout, features, backend, mesh, choices.extend)
        heads = config.num_kv_heads
        assert heads == max(4, devices)
        pools = [jax.ShapeDtypeStruct((20, heads, 64, 128), dtype)] * 2
        sampling = jax.eval_shape(lambda: init_state(8, config.vocab_size))
        state = StepState(pools, pools, sampling, jax.ShapeDtypeStruct((8,), jnp.int32))
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        lowered = step.trace(leaves, state, packed).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" in lowered.as_text()
        found.append([(c.problem.operation, c.problem.label, c.kernel) for c in choices])
    one, two = found
    assert one == two, (one, two)
    assert all(kernel.name.startswith("mosaic") for _, _, kernel in one if kernel is not None)
assert "mosaic.grouped_gemm" in {kernel.name for _, _, kernel in two if kernel is not None}
print("same kernels")
"""


def test_eight_devices_have_the_kernels_of_one():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.endswith("same kernels\n")
