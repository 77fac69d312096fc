"""Group sampling over two devices: prompts split by shard_map, or KV heads cut by a mesh."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_PROGRAM = """
import functools
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rjax import functional
from tests.functional.programs import prepared, prompts

assert jax.device_count() == 2
tokens, lengths = prompts(4)
keys = jax.random.split(jax.random.key(1), 4)

def rollout(setup):
    return functools.partial(functional.rollout, setup, samples=4, max_new_tokens=6)

setup, weights = prepared()
one = jax.jit(rollout(setup))(weights, tokens, lengths, keys)

# Each device samples its own prompts; the loops may end at different times.
data = Mesh(np.array(jax.devices()), ("data",))
own = jax.shard_map(
    rollout(setup), mesh=data, in_specs=(P(), P("data"), P("data"), P("data")),
    out_specs=P("data"), check_vma=False,
)
split = jax.jit(own)(jax.device_put(weights, NamedSharding(data, P())), tokens, lengths, keys)
np.testing.assert_array_equal(one.tokens, split.tokens)
np.testing.assert_allclose(one.logprobs, split.logprobs, atol=1e-5)
assert len(split.tokens.sharding.device_set) == 2

# Both devices share the KV heads of every sequence.
tensor = Mesh(np.array(jax.devices()), ("tensor",))
setup, weights = prepared(mesh=tensor)
cut = jax.jit(rollout(setup))(weights, tokens, lengths, keys)
np.testing.assert_array_equal(one.tokens, cut.tokens)
np.testing.assert_allclose(one.logprobs, cut.logprobs, atol=2e-5)
print("equal")
"""


def test_two_devices_give_the_tokens_of_one():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
