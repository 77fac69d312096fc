"""The index of the largest number over the devices: ``jnp.argmax`` of all columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sum_cases
from jax.sharding import NamedSharding, PartitionSpec

from rjax.pallas_kernels.kernel import DeviceInfo
from rjax.pallas_kernels.residual import all_reduce_argmax as mosaic
from rjax.pallas_kernels.residual.base import ResidualProblem, all_reduce_argmax, local_argmax
from rjax.pallas_kernels.residual.peers import Peers
from rjax.worker.kernels import Dispatcher
from rjax.worker.peer_memory import PeerMemory

COLUMNS = PartitionSpec(None, "tensor")
CASES = [1, 5, 64, 128, 300]


def numbers(rows: int, columns: int) -> np.ndarray:
    """Rows of random numbers, of equal ones, of zeros with either sign and of infinities."""
    x = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    x[1::6] = 2.5
    x[2::6] = np.where(np.arange(columns) % 3, -0.0, 0.0)
    x[3::6] = -np.inf
    x[4::6, [3, columns - 2]] = 9.0  # on the first device and on the last
    x[5::6] = -np.abs(x[5::6])
    return x


@pytest.mark.parametrize(
    ("rows", "capacity", "reason"),
    [(64, 0, "no exchange buffers"), (65, 128, "at most 64"), (64, 128, None)],
)
def test_the_dispatcher_says_why_xla_compares(rows, capacity, reason):
    problem = ResidualProblem(
        operation="all_reduce_argmax", rows=rows, dtype="float32", depth=64, peer_capacity=capacity
    )
    choice = Dispatcher.of("mosaic", DeviceInfo("gpu", 9.0)).choose(problem)
    assert choice.kernel is not None
    place = "mosaic" if reason is None else "xla"
    assert choice.kernel.name == f"{place}.all_reduce_argmax"
    assert reason is None or reason in dict(choice.refused)["mosaic.all_reduce_argmax"]


@pytest.mark.gpu
def test_tokens_are_those_of_all_columns():
    """Several calls after each other, with a sum between them, so that each restores the others'
    words."""
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    mesh = sum_cases.mesh_of(jax.device_count())
    memory, peers = PeerMemory.allocate(mesh, 1 << 18)
    of_peers = Peers(sum_cases.SHARES, sum_cases.SHARES, peers.capacity)  # type: ignore[arg-type]

    def local(x, peers):
        plain = all_reduce_argmax(x, "tensor")
        found, peers = mosaic.all_reduce_argmax(*local_argmax(x, "tensor"), peers)
        return plain[None], found[None], peers

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(COLUMNS, of_peers),
            out_specs=(sum_cases.SHARES, sum_cases.SHARES, of_peers),
            check_vma=False,
        )
    )
    for rows in 4 * CASES:
        x = numbers(rows, 64 * mesh.size)
        sharded = jax.device_put(x, NamedSharding(mesh, COLUMNS))
        plain, found, peers = run(sharded, peers)
        expected = np.argmax(x, axis=-1)
        for tokens in (*np.asarray(plain), *np.asarray(found)):
            np.testing.assert_array_equal(tokens, expected)
        given = sum_cases.draw(mesh, 1, 3, 512, rows, bias=False)
        *summed, peers = sum_cases.sums(mesh, "mosaic")(*given, peers)
        sum_cases.check(summed, sum_cases.expected(*given, mesh.size))
    jax.block_until_ready(peers.state)
    del memory  # not before the last program has ended


def test_plain_comparison_of_one_device():
    x = jnp.asarray(numbers(12, 64))
    run = jax.shard_map(
        lambda x: all_reduce_argmax(x, "tensor"),
        mesh=sum_cases.mesh_of(1),
        in_specs=COLUMNS,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    np.testing.assert_array_equal(run(x), np.argmax(x, axis=-1))
