"""Sums over the devices of a mesh: their arguments, the expected bits, and programs that run them.

Also a program by itself, on virtual CPU devices: `python -m tests.kernels.sum_cases DEVICES`.
"""

import ctypes
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rjax.pallas_kernels.mosaic.words import EMPTY
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual import all_reduce as mosaic
from rjax.pallas_kernels.residual import base as xla
from rjax.pallas_kernels.residual.base import add_rms_norm
from rjax.pallas_kernels.residual.peers import (
    MAX_PUSHED_BYTES,
    Peers,
    buffer_words,
)
from rjax.worker.peer_memory import PeerMemory

EPS = 1e-5
SHARES, WHOLE = PartitionSpec("tensor"), PartitionSpec()


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("tensor",))


def draw(mesh: Mesh, X: int, T: int, D: int, seed: int, bias: bool, dtype: Any = jnp.bfloat16):
    """x [T, D], summands [devices * X, T, D] and their bias [D] or None, weight [D]."""
    keys = jax.random.split(jax.random.key(seed), 4)
    summands = jax.random.normal(keys[1], (mesh.size * X, T, D))
    summands = jnp.where(jnp.arange(D) % 7 == 3, -0.0, summands)  # which the exchange cannot send
    vector = jax.random.normal(keys[2], (2, D)).astype(dtype)
    whole = NamedSharding(mesh, WHOLE)
    return (
        jax.device_put(jax.random.normal(keys[0], (T, D)).astype(dtype), whole),
        jax.device_put(summands, NamedSharding(mesh, SHARES)),
        jax.device_put(vector[0], whole) if bias else None,
        jax.device_put(vector[1], whole),
    )


def expected(x: Any, summands: Any, bias: Any, weight: Any, devices: int) -> tuple[Any, Any, Any]:
    """(the sum, x + the sum: their very bits; the norm in float64) in the order of the kernels."""
    x, weight = np.asarray(x), np.asarray(weight, np.float64)
    each = np.asarray(summands).reshape(devices, -1, *x.shape)
    shares = [functools.reduce(np.add, list(share)) for share in each]
    total = functools.reduce(np.add, shares).astype(x.dtype)
    if bias is not None:
        total = _added(total, np.asarray(bias))
    residual = _added(x, total)
    y = residual.astype(np.float64)
    normed = y / np.sqrt((y**2).mean(-1, keepdims=True) + EPS) * weight
    return total, residual, normed


def _added(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one.astype(np.float32) + other.astype(np.float32)).astype(one.dtype)


def sums(mesh: Mesh, kernel: str) -> Any:
    """Jitted (x, summands, bias, weight, peers) to (x + sum, norm, sum, peers) of every device.

    The first three have an axis of devices before them. ``kernel`` is "mosaic" or "xla".
    """

    def local(x, summands, bias, weight, peers):
        update = Partial(summands, bias, x.dtype)
        if kernel == "xla":
            total = xla.all_reduce(update, "tensor")
            residual, normed = add_rms_norm(x, total, weight, EPS)
        else:
            residual, normed, peers = mosaic.all_reduce_rms_norm(x, update, weight, EPS, peers)
            total, peers = mosaic.all_reduce(update, peers)
        return residual[None], normed[None], total[None], peers

    @jax.jit
    def run(x, summands, bias, weight, peers):
        of_peers = None if peers is None else Peers(SHARES, SHARES, peers.capacity)  # type: ignore[arg-type]
        of_bias = None if bias is None else WHOLE
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(WHOLE, SHARES, of_bias, WHOLE, of_peers),
            out_specs=(SHARES, SHARES, SHARES, of_peers),
            check_vma=False,
        )(x, summands, bias, weight, peers)

    return run


def check(found: Any, want: Any) -> None:
    """Every device has the expected bits of the sums, and its norm is near and the same."""
    total, residual, normed = want
    for device in range(len(found[0])):
        np.testing.assert_array_equal(np.asarray(found[0][device]), residual)
        np.testing.assert_array_equal(np.asarray(found[2][device]), total)
        np.testing.assert_array_equal(np.asarray(found[1][device]), np.asarray(found[1][0]))
    near = 1e-2 if residual.dtype.itemsize == 2 else 2e-5
    np.testing.assert_allclose(np.asarray(found[1][0], np.float64), normed, rtol=near, atol=near)


def check_buffers(mesh: Mesh) -> None:
    """Each address is that of a device's buffer, whose words are all empty."""
    memory, peers = PeerMemory.allocate(mesh, 1000)
    words = memory.bytes_per_device // 4
    assert words == buffer_words(mesh.size, peers.capacity) and peers.capacity == 1024
    for rank, table in enumerate(np.asarray(peers.table)):
        assert table[-1].tolist() == [rank, 0]
        addresses = table[:-1].astype(np.uint32) @ np.array([1, 1 << 32], np.uint64)
        assert addresses.tolist() == memory.addresses(mesh)
        assert len(set(addresses.tolist())) == mesh.size
        for address in addresses.tolist():
            buffer = (ctypes.c_int32 * words).from_address(address)
            assert (np.ctypeslib.as_array(buffer) == EMPTY).all()


def main() -> None:
    devices = int(sys.argv[1])
    mesh = mesh_of(devices)
    check_buffers(mesh)
    many = MAX_PUSHED_BYTES // 4 // (devices - 1) // 1024 + 8  # rows for the two-shot form
    for X, T, D in ((1, 1, 256), (3, 5, 96), (2, 7, 130), (1, many, 1024)):
        for dtype in (jnp.float32, jnp.bfloat16):
            given = draw(mesh, X, T, D, T, T % 2 == 1, dtype)
            run = sums(mesh, "xla")
            check(run(*given, None)[:3], expected(*given, devices))
            text = run.lower(*given, None).compile().as_text()
            assert ("all-to-all" in text) == (many == T), (devices, T)
    print("equal")


if __name__ == "__main__":
    main()
