"""More devices than KV heads, or a number that they do not divide: each KV head is held by several
devices, and the tokens are those of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from rjax.errors import InvalidConfigError

from .tiny import CONFIG, make_engine

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from tests.engine.test_experts_engine import golden, golden_tokens, requests, tokens
from tests.engine.tiny import make_engine, run

two, uneven = map(Path, sys.argv[1:3])
sizes = [int(number) for number in sys.argv[3].split()]

def answers(folder, devices, **options):
    engine = make_engine(folder, tensor_parallel_size=devices, **options)
    return tokens(run(engine, requests(16))), engine

# Preemption swaps pages to the host and back; chunks and shared prefixes as on one device.
swapping = {"num_pages": 20, "preemption": "swap", "enable_relay_attention": "on"}
swapping |= {"kv_cache_dtype": "fp8"}
wanted, one = answers(two, 1, **swapping)
page = one._worker.pool.page_bytes
for devices in sizes:
    copies = devices // 2
    found, engine = answers(two, devices, **swapping)
    assert found == wanted, devices
    stats = engine.stats()
    assert stats.pages_swapped_out > 0 and stats.pages_swapped_in > 0
    worker = engine._worker
    assert worker.page_shape[1] == 2 * copies and worker.pool.page_bytes == copies * page
    pools = worker._state.pools
    for pool in pools:
        shards = pool.addressable_shards
        assert len(shards) == devices and {s.data.shape[1] for s in shards} == {1}
    # Copies of a head are equal, wherever a page was moved.
    content = np.stack([np.asarray(pool).astype(np.float32) for pool in pools])
    grouped = content.reshape(*content.shape[:2], 2, copies, *content.shape[3:])
    assert np.abs(content).sum() > 0
    assert (grouped == grouped[:, :, :, :1]).all()
    said = f"with {copies} copies of each KV head" in engine.summary["KV pool"]
    assert said == (copies > 1)
    assert f"GiB on each of {devices} devices" in engine.summary["weights"]

assert answers(uneven, 4)[0] == answers(uneven, 1)[0]  # 6 heads, 2 copies of each

# Checkpoints with sinks of each head, and with norms over all heads.
for name, devices in (("gpt_oss_j6_k2_yarn", 3), ("olmoe_j9_k4_fused", 4)):
    assert set(golden_tokens(name, tensor_parallel_size=devices)) == {golden(name)}, name
print("same")
"""


def write(folder: Path, **values) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | values))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["4", "2 8"])
def test_tokens_are_those_of_one_device(tmp_path, sizes):
    two = write(tmp_path / "two", num_attention_heads=8)
    uneven = write(tmp_path / "uneven", num_attention_heads=12, num_key_value_heads=6)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(two), str(uneven), sizes],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("same\n")


_REFUSED = """
import sys
import jax
from rjax.errors import InvalidConfigError
from tests.engine.tiny import make_engine
before = len(jax.live_arrays())
for options in ({}, {"enable_expert_parallel": True}):
    try:
        make_engine(sys.argv[1], tensor_parallel_size=4, **options)
    except InvalidConfigError as error:
        print(error)
assert len(jax.live_arrays()) == before
"""


@pytest.mark.thorough
def test_what_devices_cannot_share_is_refused_before_anything_is_allocated(tmp_path):
    folder = write(tmp_path / "odd", num_attention_heads=14, intermediate_size=70)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", _REFUSED, str(folder)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    heads, experts = done.stdout.splitlines()
    assert heads == (
        "tensor_parallel_size is 4: 4 devices cannot share 14 query heads evenly; this model can "
        "use 1, 2, 7, 14"
    )
    assert experts == (
        "enable_expert_parallel is set, and tensor_parallel_size is 4: LlamaForCausalLM has no "
        "experts to spread over devices; leave expert parallelism out"
    )


def test_expert_parallelism_of_one_device_needs_experts_too(tmp_path):
    folder = write(tmp_path / "dense")
    with pytest.raises(InvalidConfigError, match="LlamaForCausalLM has no experts"):
        make_engine(folder, enable_expert_parallel=True)


def test_an_engine_of_several_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        InvalidConfigError, match=r"has started 2 processes; .* one server for each"
    ):
        make_engine(write(tmp_path / "dense"))
