"""What the devices of a mesh send each other in a decode step, and that each has its result.

One process with virtual devices runs all of it: its start takes longest.
"""

import pytest

from .virtual_devices import run_on_virtual_devices

_PROGRAM = """
import functools, re

import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.decode_step.step_bench import Bench
from bench.decode_step.roofline import DecodeCase
from rjax.pallas_kernels.kernel import DeviceInfo
from rjax.benchmarks.model_shapes import SHAPES
from rjax.sampling import first_largest
from rjax.worker.device_sums import DeviceSums
from rjax.worker.kernels import Dispatcher
from rjax.worker.kernels.run import run_kernel

config = SHAPES["tiny"] | {"num_key_value_heads": 4, "num_attention_heads": 8}
case = DecodeCase(4, 64, 16)


def step(devices):
    bench = Bench(
        config, backend="xla", page_size=64, relay="auto", mode="greedy", devices=devices
    )
    compiled, state, packed = bench.compiled(case)
    found = re.findall(
        r"\\s(all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\\(",
        compiled.as_text(),
    )
    state, result = compiled(bench.leaves, state, packed)
    return found, np.asarray(result.tokens), np.asarray(result.logits)


_, tokens, logits = step(1)
for devices in (2, 4):
    found, on_mesh, near = step(devices)
    # Two sums a layer, the embedding, and the argmax.
    assert found == ["all-gather"] * (2 * config["num_hidden_layers"] + 2), found
    np.testing.assert_allclose(near, logits, rtol=1e-4, atol=1e-5)
    assert (on_mesh == tokens).all(), (on_mesh, tokens)

mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
x = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
x[0, [3, 60]] = 9.0  # equal ones on two devices
x[1, [17, 18]] = 9.0  # and on one
x[2] = -np.inf
x[3] = -5.0
x[3, 48:] = -4.0
for array, spec in ((x, PartitionSpec(None, "tensor")), (x[:, :63], PartitionSpec())):
    given = jax.device_put(array, NamedSharding(mesh, spec))
    dispatcher = Dispatcher.of("xla", DeviceInfo("cpu", None))
    run = functools.partial(run_kernel, mesh=mesh)
    got = jax.jit(DeviceSums(mesh, dispatcher.choose, run, None).argmax)(given)
    np.testing.assert_array_equal(got, first_largest(jnp.asarray(array)))
print("equal")
"""


@pytest.mark.thorough
def test_a_step_has_one_collective_for_each_sum_and_one_for_the_tokens():
    assert run_on_virtual_devices(_PROGRAM, 4).endswith("equal\n")
