"""Tensors of single experts, grouped so that each device gets those of its own experts."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from rjax.models.config import ModelConfig
from rjax.models.errors import CheckpointError
from rjax.models.loading.piece import Piece
from rjax.models.loading.safetensors_header import TensorEntry
from rjax.models.sharding import TENSOR_AXIS


def experts_of_devices(
    pieces: tuple[Piece, ...], config: ModelConfig, mesh: Mesh
) -> list[tuple[Piece, ...]]:
    """Pieces of single experts, those together that the devices hold in the same place.

    Device d of n holds experts d * J / n and following. A group has one piece of each device, in
    the order of the devices; the groups are in the order of a device's experts.
    """
    J, devices = config.axis_sizes["J"], mesh.shape[TENSOR_AXIS]
    each, local = len(pieces) // J, J // devices
    return [
        tuple(pieces[(device * local + expert) * each + i] for device in range(devices))
        for expert in range(local)
        for i in range(each)
    ]


def common_dtype(entries: Sequence[TensorEntry], dtypes: Sequence[np.dtype]) -> np.dtype:
    """The dtype of tensors that are loaded together.

    Raises CheckpointError if they differ.
    """
    for entry, dtype in zip(entries, dtypes, strict=True):
        if dtype != dtypes[0]:
            raise CheckpointError(
                f"{entry.file.name}: {entry.name} has the type {entry.dtype}, and {entries[0].name}"
                f" has {entries[0].dtype}; with expert parallelism, the experts of a layer must "
                "have one type"
            )
    return dtypes[0]
