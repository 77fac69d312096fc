"""Parameters over several devices: axis letters decide the sharding, and logits stay the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from rjax.models.sharding import partition_spec

ROOT = Path(__file__).parent.parent.parent
GOLDENS = ROOT / "tests" / "golden"


def mesh_of(devices):
    return AbstractMesh((devices,), ("tensor",))


@pytest.mark.parametrize(
    ("letters", "shape", "spec"),
    [
        ("D K A H", (32, 4, 6, 8), (None, "tensor", None, None)),
        ("K A H", (4, 6, 8), ("tensor", None, None)),
        ("N H D", (16, 8, 32), ("tensor", None, None)),
        ("D A F", (32, 2, 64), (None, None, "tensor")),
        ("F D", (64, 32), ("tensor", None)),
        ("V D", (100, 32), ("tensor", None)),
        ("V D", (101, 32), (None, None)),
        ("C D", (64, 32), (None, None)),
        ("D", (32,), (None,)),
        ("H", (8,), (None,)),
        ("D R A M", (32, 4, 6, 8), (None, "tensor", None, None)),
        ("R E D", (4, 16, 32), ("tensor", None, None)),
    ],
)
def test_letters_decide_the_cut(letters, shape, spec):
    assert tuple(partition_spec(letters, shape, mesh_of(4))) == spec
    assert all(axis is None for axis in partition_spec(letters, shape, mesh_of(1)))


def test_axes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"axis K .* 'D K A H' has 2 entries, which 4 devices"):
        partition_spec("D K A H", (32, 2, 6, 8), mesh_of(4))


_PROGRAM = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from safetensors.numpy import load_file
from rjax import models
from rjax.models.decoder import Decoder
from rjax.models.loading.blocks import ReusedBuffers
from rjax.models.loading.load import load_weights

assert jax.device_count() == 4

def run(mesh, folder, tokens, positions, **options):
    loaded = models.load_model(folder, dtype="float32", mesh=mesh, progress=False, **options)
    graph, state = nnx.split(loaded.model)
    @jax.jit
    def logits(state):
        model = nnx.merge(graph, state)
        return model.logits(model(tokens, positions, models.DenseAttention()))
    return np.asarray(logits(state)), loaded.model

def mesh_of(n):
    return jax.sharding.Mesh(np.array(jax.devices()[:n]), ("tensor",))

goldens = Path(sys.argv[1])
for name, n in [("phi3_g1_h96", 2), ("opt_h64_tied", 2)]:
    expected = load_file(goldens / "expected" / f"{name}.safetensors")
    tokens, positions = jnp.asarray(expected["tokens"]), jnp.asarray(expected["positions"])
    for options in ({}, {"load_format": "dummy"}) if name.startswith("phi3") else ({},):
        folder = goldens / "models" / name
        one, _ = run(mesh_of(1), folder, tokens, positions, **options)
        many, model = run(mesh_of(n), folder, tokens, positions, **options)
        np.testing.assert_allclose(many, one, rtol=1e-4, atol=1e-5 * np.abs(one).max())
        qkv = model.layers[0].attention.qkv.weight[...]
        assert qkv.sharding.is_equivalent_to(
            jax.sharding.NamedSharding(mesh_of(n), jax.P(None, "tensor")), 4
        ), qkv.sharding
        assert qkv.addressable_shards[0].data.shape[1] * n == qkv.shape[1]
        down = model.layers[0].mlp.down.weight[...]
        assert down.addressable_shards[0].data.shape[0] * n == model.config.intermediate_size

# Norms of outputs, of all heads at once, with an offset; windows and ropes a layer; states.
for name in (
    "gemma2_g3_h16_caps_windows", "olmo3_g1_h24_yarn_windows", "qwen3_next_r2_g3_tied_fused",
):
    expected = load_file(goldens / "families" / "expected" / f"{name}.safetensors")
    batch = jnp.asarray(expected["tokens"]), jnp.asarray(expected["positions"])
    folder = goldens / "families" / "models" / name
    one, many = (run(mesh_of(n), folder, *batch)[0] for n in (1, 2))
    np.testing.assert_allclose(many, one, rtol=1e-4, atol=1e-5 * np.abs(one).max())

# Large tensors in blocks of rows: every device gets its shard of each block.
class SmallBlocks(ReusedBuffers):
    def copy(self, host, block):
        return jax.device_put(host.copy(), block.sharding)  # the CPU would use the buffer in place

tiny = models.config_from_dict(dict(
    architectures=["LlamaForCausalLM"], vocab_size=40, hidden_size=32, intermediate_size=24,
    num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    max_position_embeddings=64, attention_bias=True, dtype="float32",
))
saved = Path(sys.argv[2])
models.save_model(models.init_model(tiny), tiny, saved, dtype="float32")
experts = goldens / "experts" / "models"
for folder, config in ((saved, tiny), *(
    (goldens / "models" / name, None) for name in ("phi3_g1_h96", "opt_h64_tied")
), *(
    (experts / name, None) for name in (
        "qwen3_moe_j7_k3_some_layers", "olmoe_j9_k4_fused", "gpt_oss_j6_k2_yarn",
        "glm4_moe_j8_k3_groups", "deepseek_v3_j8_k3_groups",
    )
)):
    config = config or models.config_from_folder(folder)
    for n in (2, 4) if config is tiny else (2,):
        whole = models.load_model(folder, dtype="float32", mesh=mesh_of(n), progress=False).model
        model = Decoder(config, jnp.float32)
        model = load_weights(model, config, folder, mesh_of(n), False, SmallBlocks(300))
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(model), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)

folder = goldens / "models" / "opt_h64_tied"
try:
    models.load_model(folder, dtype=None, mesh=mesh_of(4), progress=False)
except ValueError as error:
    assert "4 devices cannot share 2 query heads evenly; this model can use 1, 2" in str(error)
else:
    raise AssertionError("2 heads were cut over 4 devices")
print("same")
"""


@pytest.mark.thorough
def test_same_logits_on_several_devices(tmp_path):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(GOLDENS), str(tmp_path)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("same\n")
