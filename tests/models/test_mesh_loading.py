"""Loading on several devices: every byte of a checkpoint is read once, devices get their share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mxfp4_files import write_mxfp4
from plain_checkpoints import LLAMA, write_plain
from quantised_files import FORMATS, write_quantised
from test_gated_delta_net import QWEN3_5, QWEN3_NEXT
from test_model_experts import GPT_OSS
from test_model_quantised_experts import QWEN2_MOE

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import collections, json, sys, threading
from pathlib import Path
import jax, numpy as np
from flax import nnx
from rjax import models
from rjax.models.decoder import Decoder
from rjax.models.layers.parameter import bits
from rjax.models.loading.tensors import read_tensors
from rjax.models.loading.blocks import ReusedBuffers
from rjax.models.loading.load import load_weights
from rjax.models.placement import bytes_of_device, copy_kv_heads, place

class Recorded(ReusedBuffers):
    def __init__(self, size):
        super().__init__(size)
        self.reads, self.received = collections.defaultdict(list), collections.Counter()
        self.lock = threading.Lock()

    def load(self, block, check):
        with self.lock:
            for entry, start, stop in block.ranges:
                self.reads[entry.name].append((start, stop))
        return super().load(block, check)

    def copy(self, host, block):
        array = jax.device_put(host.copy(), block.sharding)
        with self.lock:
            for shard in array.addressable_shards:
                self.received[shard.device.id] += shard.data.nbytes
        return array

def mesh_of(devices):
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("tensor",))

def expected(name, value, model):
    # The leaf as several devices hold it, from that of one.
    copies, letters = model.config.kv_head_copies, name[1]
    if copies == 1 or "K" not in letters.split():
        return value
    if name[0].endswith("q_norm.weight"):
        K, G, H = value.shape
        return value.reshape(K * copies, G // copies, H)
    if name[0].endswith("k_norm.weight"):
        return np.repeat(value, copies, 0)
    return np.asarray(copy_kv_heads(value, letters, copies))

for name, devices, parallel, size, quantization, most in json.loads(sys.argv[1]):
    folder = Path(name)
    options = {"dtype": "float32", "progress": False, "quantization": quantization}
    one = models.load_model(folder, **options).model
    config = place(one.config, devices, expert_parallel=parallel)
    mesh, recorded = mesh_of(devices), Recorded(size)
    model = load_weights(Decoder(config, np.float32), config, folder, mesh, False, recorded)
    leaves = dict(nnx.to_flat_state(nnx.state(model)))
    for path, leaf in nnx.to_flat_state(nnx.state(one)):
        name = ".".join(map(str, path)), leaf.get_metadata("letters")
        found, wanted = np.asarray(leaves[path][...]), expected(name, np.asarray(leaf[...]), model)
        np.testing.assert_array_equal(found, wanted, str(name))
    for name, entry in read_tensors(folder).items():
        if name in recorded.reads:
            ranges = sorted(recorded.reads[name])
            assert ranges[0][0] == 0 and ranges[-1][1] == entry.size, (name, ranges)
            assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:])), (name, ranges)
    assert len(recorded.reads) >= 0.5 * len(read_tensors(folder))
    share = bytes_of_device(model, mesh)
    held = collections.Counter()
    for array in jax.tree.leaves(nnx.state(model)):
        for shard in array.addressable_shards:
            held[shard.device.id] += -(-shard.data.size * bits(array.dtype) // 8)
    assert set(held.values()) == {share}, (held, share)
    stored = models.config_from_folder(folder)  # in the file, not as quantised on load
    stored = place(stored, devices, expert_parallel=parallel)
    share = share if quantization is None else bytes_of_device(Decoder(stored, np.float32), mesh)
    assert len(recorded.received) == devices
    ratio = max(recorded.received.values()) / share
    assert ratio <= most, (name, devices, parallel, ratio)
print("done")
"""


def check(*cases, most=1.0):
    """Compare with one device's parameters.

    Args:
        cases: (folder, devices, expert parallel, bytes of a block, quantization on load).
        most: bytes that a device receives, as a multiple of those that it holds.
    """
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    given = [(str(folder), *case, most) for folder, *case in cases]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(given)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("done\n")


WIDE = LLAMA | {"num_attention_heads": 8}
EXPERTS = QWEN2_MOE | {
    "num_experts": 8,
    "num_attention_heads": 8,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 256,
}
OSS = GPT_OSS | {"num_local_experts": 8, "num_attention_heads": 8, "intermediate_size": 64}
SMALL, LARGE = 300, 1 << 20  # bytes of a block


@pytest.mark.thorough
def test_kv_heads_are_copied(tmp_path):
    biased = WIDE | {"attention_bias": True}
    uneven = WIDE | {"num_attention_heads": 12, "num_key_value_heads": 6}
    phi3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
    olmo2 = WIDE | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    del olmo2["head_dim"]
    llama, uneven, phi3, olmo2 = (
        write_plain(tmp_path / str(i), values)
        for i, values in enumerate((biased, uneven, WIDE | phi3, olmo2))
    )
    check(
        (llama, 2, False, SMALL, None),
        (llama, 4, False, SMALL, None),
        (llama, 8, False, LARGE, None),
        (uneven, 4, False, SMALL, None),
        (phi3, 4, False, SMALL, None),
        (olmo2, 4, False, SMALL, None),
    )


@pytest.mark.slow
def test_quantised_kv_heads_are_copied(tmp_path):
    wide = WIDE | {"head_dim": 32, "intermediate_size": 128}
    values = wide | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    folders = [write_quantised(tmp_path / n, values, n)[0] for n in ("fp8-dynamic", "w4a16")]
    plain = write_plain(tmp_path / "plain", values)
    check(*((folder, 4, False, SMALL, None) for folder in folders), (plain, 8, False, LARGE, "fp8"))
    # A fused tensor of few bits goes to every device, which takes its part.
    phi3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
    phi3, _ = write_quantised(tmp_path / "phi3", wide | phi3, "fp8-dynamic")
    check((phi3, 4, False, SMALL, None), most=4)


@pytest.mark.thorough
def test_experts_are_spread_or_cut(tmp_path):
    each = write_plain(tmp_path / "each", EXPERTS)
    fused = write_plain(tmp_path / "fused", OSS)
    check(
        (each, 2, True, SMALL, None),
        (each, 8, True, LARGE, None),
        (each, 4, False, SMALL, None),
        (each, 4, True, SMALL, "int8"),
        (fused, 4, True, SMALL, None),
        (fused, 2, False, SMALL, None),
        (fused, 4, True, LARGE, "fp8"),
        (fused, 2, False, SMALL, "fp8"),
    )


@pytest.mark.thorough
def test_key_heads_of_linear_attention_are_shared(tmp_path):
    """KV heads of attention with a gate are copied beside them."""
    wide = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_attention_heads": 8}
    wide |= {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "head_dim": 32}
    wide |= {"intermediate_size": 512, "num_hidden_layers": 2}
    wide |= {"layer_types": ["linear_attention", "full_attention"]}
    widths = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4}
    dense = QWEN3_5 | wide | {"attention_bias": True}
    dense, experts = (
        write_plain(tmp_path / str(i), values)
        for i, values in enumerate((dense, QWEN3_NEXT | wide | widths))
    )
    quantised, _ = write_quantised(tmp_path / "fp8", QWEN3_NEXT | wide | widths, "fp8-dynamic")
    check(
        (dense, 8, False, SMALL, None),
        (dense, 2, False, LARGE, "int4"),
        (experts, 4, True, SMALL, None),
        (quantised, 2, False, SMALL, None),
    )
    # Queries, keys and values in one tensor of few bits go to every device, which takes its part.
    quantised, _ = write_quantised(tmp_path / "rows", QWEN3_5 | wide, "fp8-dynamic")
    check((quantised, 4, False, SMALL, None), most=4)


_DEFAULT = ["w4a16", "mxfp4"]
_MORE = [name for name in FORMATS if name not in (*_DEFAULT, "deepseek-fp8")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*_DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in _MORE)]
)
def test_quantised_experts_are_spread_or_cut(tmp_path, name):
    if name == "mxfp4":
        folder, _ = write_mxfp4(tmp_path, OSS)
    else:
        folder, _ = write_quantised(tmp_path, EXPERTS, name)
    cases = [(folder, 2, True, SMALL, None)]
    if name != "fp8-block":  # its blocks of 128 x 128 divide over two devices, and in no expert
        cases += [(folder, 4, True, LARGE, None), (folder, 2, False, SMALL, None)]
    check(*cases)
