"""The arrays of an update, until it is complete."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from rjax.models.adopting.mapping import NameMap, apply_transform
from rjax.models.adopting.reading import Reading
from rjax.models.errors import CheckpointError
from rjax.models.loading.tensors import type_name

_MAX_PROBLEMS = 5


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StagedTensor:
    """A checkpoint tensor that an array of a trainer holds; the array is referred to, not copied.

    Attributes:
        source: the trainer's name of the array.
        array: the array, on the host or on devices.
        reading: how the tensor is read from it; None for the array itself.
        index: the entries that are read of an array of all layers or experts.
        shape: shape of the tensor.
        type: its type, as safetensors names it.
    """

    source: str
    array: jax.Array | np.ndarray
    reading: Reading | None
    index: tuple[int, ...]
    shape: tuple[int, ...]
    type: str

    def named(self, name: str) -> str:
        """The trainer's name of the array, and that of the tensor if it is another."""
        return name if name == self.source else f"{self.source} ({name})"

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        dtype = np.dtype(self.array.dtype)
        dtype = dtype if self.reading is None else self.reading.dtype(dtype)
        return math.prod(self.shape) * dtype.itemsize


def staged_tensors(items: Any, names: NameMap) -> dict[str, StagedTensor]:
    """The tensors of (name, array) items by their names in a checkpoint.

    Args:
        items: pairs of a name and a NumPy, JAX or DLPack array.
        names: the names of the tensors.

    Raises:
        CheckpointError: an array cannot be used, the mapping does not know it, or two arrays hold
            one tensor. The message lists the first problems.
    """
    found: dict[str, StagedTensor] = {}
    problems: list[str] = []
    for source, given in items:
        try:
            array = as_array(given)
            for name, reading, index in names.tensors(source, array.shape):
                tensor = _staged(source, array, reading, index)
                if name in found:
                    raise CheckpointError(f"holds {name}, and so does {found[name].source}")
                found[name] = tensor
        except CheckpointError as error:
            problems.append(f"{source} {error}")
    raise_problems(problems)
    return found


def tensors_on_host(staged: Mapping[str, StagedTensor]) -> list[tuple[str, np.ndarray]]:
    """Each tensor by name, on the host."""
    found = []
    for name, tensor in staged.items():
        array = np.asarray(tensor.array)
        read = tensor.reading
        found.append((name, array if read is None else read(array, tensor.index)))
    return found


def raise_problems(problems: list[str]) -> None:
    """Raise one CheckpointError of all problems, if there are any."""
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        listed = "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointError(f"the weights cannot be used: {listed}")


def _staged(
    source: str, array: jax.Array | np.ndarray, reading: Any, index: tuple[int, ...]
) -> StagedTensor:
    if reading is not None and not isinstance(reading, Reading):
        array, reading = as_array(apply_transform(reading, array)), None
    shape = array.shape if reading is None else reading.shape(array.shape)
    dtype = np.dtype(array.dtype)
    type_ = type_name(dtype if reading is None else reading.dtype(dtype))
    return StagedTensor(source, array, reading, index, shape, type_)


def as_array(given: Any) -> jax.Array | np.ndarray:
    """An array of a trainer as one of JAX or NumPy, without a copy.

    Raises:
        CheckpointError: it is no array, or its memory cannot be shared.
    """
    if isinstance(given, jax.Array):
        if not isinstance(given, Tracer) and given.is_deleted():
            raise CheckpointError("was deleted or donated; keep it until the update is finished")
        return given
    if isinstance(given, np.ndarray | np.generic):
        return np.asarray(given)
    if not hasattr(given, "__dlpack__"):
        raise CheckpointError(
            f"is {type(given).__name__}; give a NumPy or JAX array, or one with __dlpack__"
        )
    if hasattr(given, "detach"):  # PyTorch exports no tensor that requires a gradient
        given = given.detach()
    try:
        return jax.dlpack.from_dlpack(given)
    except Exception as error:  # of the library that the array belongs to, or of JAX
        raise CheckpointError(
            f"cannot be shared by DLPack: {error}; make it contiguous, of a type that JAX has"
        ) from error
