"""Sums over devices: one documented order of additions, whatever computes them."""

import functools
import operator
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sum_cases
from jax import lax

from rjax.pallas_kernels.kernel import DeviceInfo
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual import all_reduce as mosaic
from rjax.pallas_kernels.residual import peers as peers_module
from rjax.pallas_kernels.residual.base import ResidualProblem
from rjax.pallas_kernels.residual.peers import Peers
from rjax.worker.kernels import Dispatcher
from rjax.worker.peer_memory import PeerMemory

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_plain_sums_have_the_documented_order(devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    found = subprocess.run(
        [sys.executable, "-m", "tests.kernels.sum_cases", str(devices)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.endswith("equal\n")


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "capacity", "reason"),
    [
        (64, 4096, "bfloat16", 0, "no exchange buffers"),
        (600, 4096, "bfloat16", 2**21, "more than 2097152 numbers"),
        (8, 576, "bfloat16", 2**21, "multiples of 128"),
        (8, 4096, "float32", 2**21, "16-bit"),
        (512, 4096, "bfloat16", 2**21, None),
    ],
)
def test_the_dispatcher_says_why_xla_adds(rows, columns, dtype, capacity, reason):
    problem = ResidualProblem(
        operation="all_reduce",
        rows=rows,
        dtype=dtype,
        depth=columns,
        columns=(columns,),
        peer_capacity=capacity,
    )
    choice = Dispatcher.of("mosaic", DeviceInfo("gpu", 9.0)).choose(problem)
    assert choice.kernel is not None
    assert choice.kernel.name == ("mosaic.all_reduce" if reason is None else "xla.all_reduce")
    assert reason is None or reason in dict(choice.refused)["mosaic.all_reduce"]


GPU_CASES = [  # X, T, D: odd sizes; rows of one, two and four warpgroups; rows beyond one a CTA
    (8, 1, 4096),
    (2, 64, 4096),
    (1, 256, 4096),
    (3, 5, 384),
    (1, 131, 896),
    (2, 133, 3584),
    (1, 64, 8192),
    (4, 7, 2048),
    (1, 33, 4096),  # as many clusters of four CTAs as there may be, and of two
    (2, 66, 8192),
]


@pytest.fixture(scope="module")
def memory():
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    return PeerMemory.allocate(sum_cases.mesh_of(jax.device_count()), 1 << 20)


@pytest.mark.gpu
def test_every_device_has_the_expected_bits(memory):
    """Calls of many sizes in a row, so that each restores the words of another size."""
    mesh, (_, peers) = sum_cases.mesh_of(jax.device_count()), memory
    for round_ in range(2):
        for X, T, D in GPU_CASES:
            given = sum_cases.draw(mesh, X, T, D, 10 * round_ + T, bias=T % 2 == 1)
            *found, peers = sum_cases.sums(mesh, "mosaic")(*given, peers)
            sum_cases.check(found, sum_cases.expected(*given, mesh.size))


@pytest.mark.gpu
def test_two_shots_have_the_bits_of_one(memory, monkeypatch):
    """On two devices, for which one shot is the choice elsewhere."""
    del memory  # which skips where there is one GPU
    mesh = sum_cases.mesh_of(jax.device_count())
    calls = [(2, 64, 4096, True), (1, 131, 896, True), (3, 5, 384, False), (1, 301, 2048, True)]
    owner, peers = PeerMemory.allocate(mesh, 1 << 20)
    for X, T, D, two_shot in calls:
        for module in (peers_module, mosaic):
            monkeypatch.setattr(module, "is_two_shot", lambda *_, found=two_shot: found)
        given = sum_cases.draw(mesh, X, T, D, T, bias=T % 2 == 1)
        *found, peers = sum_cases.sums(mesh, "mosaic")(*given, peers)
        sum_cases.check(found, sum_cases.expected(*given, mesh.size))
    del owner  # not before the last program has ended


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "D"), [(1, 4096), (150, 1024)])
def test_thousands_of_calls_with_uneven_devices(memory, T, D):
    """Each call has other shares, and each device starts it at another time."""
    mesh, calls = sum_cases.mesh_of(jax.device_count()), 1000

    def local(summands, peers):
        rank = lax.axis_index("tensor")
        shares = lax.all_gather(summands[0], "tensor")
        want = functools.reduce(operator.add, list(shares))

        def call(i, carried):
            peers, wrong, chain = carried
            # Up to tens of microseconds of work, which differs by device and call.
            delay = (i * (7 * rank + 3)) % 13
            chain = lax.fori_loop(0, delay, lambda _, c: c @ c * 1e-3, chain)
            power = jnp.left_shift(1, i % 11).astype(jnp.float32)  # which rounds nothing
            scale = jnp.where(i % 2 == 0, power, -power) + 0 * chain[0, 0]
            update = Partial(summands * scale, dtype=jnp.bfloat16)
            total, peers = mosaic.all_reduce(update, peers)
            return peers, wrong + jnp.sum(total != (want * scale).astype(total.dtype)), chain

        chain = jnp.eye(256, dtype=jnp.float32)
        peers, wrong, _ = lax.fori_loop(0, calls, call, (peers, jnp.int32(0), chain))
        return wrong[None], peers

    owner, peers = PeerMemory.allocate(mesh, T * D)
    specs = Peers(sum_cases.SHARES, sum_cases.SHARES, peers.capacity)  # type: ignore[arg-type]
    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(sum_cases.SHARES, specs),
            out_specs=(sum_cases.SHARES, specs),
            check_vma=False,
        )
    )
    _, summands, _, _ = sum_cases.draw(mesh, 1, T, D, 3, bias=False)
    wrong, _ = run(summands, peers)
    assert np.asarray(wrong).tolist() == [0] * mesh.size
    del owner  # not before the last program has ended
