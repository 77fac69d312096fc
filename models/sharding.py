"""Shardings on a mesh from axis letters."""

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tensor"
_SHARDED_LETTERS = frozenset("NKFIUR")
_WHOLE_EXPERTS = frozenset("J")


def single_device_mesh() -> Mesh:
    """A mesh of the first device alone."""
    return Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))


def check_mesh(mesh: Mesh) -> None:
    """Raise ValueError unless the mesh has the axis `tensor`, under automatic partitioning."""
    if TENSOR_AXIS not in mesh.axis_names:
        raise ValueError(
            f"the mesh has axes {mesh.axis_names}; one of them must be named {TENSOR_AXIS!r}"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"the mesh has axis types {mesh.axis_types}; all must be AxisType.Auto: "
            "build it with jax.sharding.Mesh(devices, axis_names)"
        )


def partition_spec(
    letters: str,
    shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
    *,
    expert_parallel: bool = False,
) -> PartitionSpec:
    """Shard the first of N, K, F, I, U or R over the mesh axis `tensor`, and V if it is divisible.

    With ``expert_parallel`` it is J instead. All other axes are replicated. Raises ValueError if
    one of these but V is not divisible by the number of devices on that axis.
    """
    devices = mesh.shape[TENSOR_AXIS]
    letters_to_cut = _WHOLE_EXPERTS if expert_parallel else _SHARDED_LETTERS
    spec: list[str | None] = []
    for letter, size in zip(letters.split(), shape, strict=True):
        sharded = devices > 1 and TENSOR_AXIS not in spec
        if sharded and letter in letters_to_cut and size % devices:
            raise ValueError(
                f"axis {letter} of a parameter with axes {letters!r} has {size} entries, which "
                f"{devices} devices cannot divide evenly; use a number of devices that divides it"
            )
        sharded = sharded and (letter in letters_to_cut or (letter == "V" and size % devices == 0))
        spec.append(TENSOR_AXIS if sharded else None)
    return PartitionSpec(*spec)


def parameter_sharding(
    letters: str, shape: tuple[int, ...], mesh: Mesh, *, expert_parallel: bool = False
) -> NamedSharding:
    """The sharding of a parameter with these axis letters."""
    spec = partition_spec(letters, shape, mesh, expert_parallel=expert_parallel)
    return NamedSharding(mesh, spec)


def copies_mesh(mesh: Mesh, copies: int) -> Mesh:
    """The same devices in the same order, ``copies`` neighbours of which hold the same shard."""
    devices = mesh.devices.reshape(-1, copies)
    return Mesh(devices, (TENSOR_AXIS, "copies"))
