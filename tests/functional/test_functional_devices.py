"""Group sampling over several devices: prompts split by shard_map, or KV heads cut by a mesh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_PROGRAM = """
import functools
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rjax import functional
from rjax.errors import InvalidConfigError
from tests.functional.programs import prepared, prompts, tiny_model
from tests.functional.test_trainer_weights import tensors

assert jax.device_count() == 4
tokens, lengths = prompts(4)
keys = jax.random.split(jax.random.key(1), 4)

def rollout(setup, rows=None):
    return functools.partial(functional.rollout, setup, samples=4, max_new_tokens=6, rows=rows)

setup, weights = prepared()
one = jax.jit(rollout(setup))(weights, tokens, lengths, keys)

# Each device samples its own prompts; the loops may end at different times.
data = Mesh(np.array(jax.devices()[:2]), ("data",))
own = jax.shard_map(
    rollout(setup), mesh=data, in_specs=(P(), P("data"), P("data"), P("data")),
    out_specs=P("data"), check_vma=False,
)
split = jax.jit(own)(jax.device_put(weights, NamedSharding(data, P())), tokens, lengths, keys)
np.testing.assert_array_equal(one.tokens, split.tokens)
np.testing.assert_allclose(one.logprobs, split.logprobs, atol=1e-5)
assert len(split.tokens.sharding.device_set) == 2

# The same with rows that are refilled on each device.
refilled = jax.shard_map(
    rollout(setup, rows=3), mesh=data, in_specs=(P(), P("data"), P("data"), P("data")),
    out_specs=P("data"), check_vma=False,
)
found = jax.jit(refilled)(jax.device_put(weights, NamedSharding(data, P())), tokens, lengths, keys)
np.testing.assert_array_equal(one.tokens, found.tokens)
np.testing.assert_array_equal(one.lengths, found.lengths)

# A trainer's tree is fused on each device, or over the mesh of the model.
tree = {name: jax.numpy.asarray(array) for name, array in tensors().items()}
fused = jax.jit(jax.shard_map(
    functools.partial(functional.fuse_weights, setup), mesh=data, in_specs=P(), out_specs=P(),
    check_vma=False,
))(tree)
want = functional.fuse_weights(setup, tree)
jax.tree.map(np.testing.assert_array_equal, fused, want)

# The devices share the KV heads of every sequence; with 4 devices, pairs have copies of one head.
for devices in (2, 4):
    tensor = Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    setup, weights = prepared(mesh=tensor)
    assert setup.config.num_kv_heads == devices
    on_mesh = jax.jit(functools.partial(functional.fuse_weights, setup))(tree)
    for found, leaf in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(weights), strict=True):
        assert found.shape == leaf.shape
        assert found.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    np.testing.assert_array_equal(on_mesh.embedding.weight[...], want.embedding.weight[...])
    rows = None if devices == 4 else 6
    cut = jax.jit(rollout(setup, rows))(weights, tokens, lengths, keys)
    np.testing.assert_array_equal(one.tokens, cut.tokens)
    np.testing.assert_allclose(one.logprobs, cut.logprobs, atol=2e-5)

try:
    functional.prepare(tiny_model(), max_context=64, page_size=8, mesh=tensor)
except InvalidConfigError as error:
    assert "2 entries, which 4 devices cannot divide" in str(error), error
    assert "give the mesh to load_model or init_model too" in str(error), error
else:
    raise AssertionError("a model of one device was taken for four")
print("equal")
"""

_FAMILIES = """
import functools
import jax, numpy as np
from jax.sharding import Mesh
from rjax import functional
from rjax.models import load_model
from tests.functional.families import LENGTH, MODELS, TOLERANCE, prompts

keys = jax.random.split(jax.random.key(0), 4)
for name in ("gemma4_g2_h16_inputs_shared_kv", "qwen3_next_r2_g3_tied_fused"):
    found = []
    for devices, rows in ((1, None), (2, 5)):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",))
        options = {"dtype": "float32", "progress": False, "max_length": LENGTH, "mesh": mesh}
        model = load_model(MODELS / name, **options).model
        setup, weights = functional.prepare(
            model, max_context=LENGTH, page_size=8, kv_split_size=16, relay="on", mesh=mesh
        )
        run = functools.partial(functional.rollout, setup, samples=3, max_new_tokens=6, rows=rows)
        out = jax.jit(run)(weights, *prompts(), keys)
        found.append(jax.tree.map(np.asarray, out))
    one, two = found
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=TOLERANCE)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [_PROGRAM, _FAMILIES], ids=["splits", "families"])
def test_several_devices_give_the_tokens_of_one(program):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
