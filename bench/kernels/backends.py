"""The attention kernels under test, by name."""

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import mosaic, xla
from pallas_kernels.attention.triton import config as triton_config
from rjax.worker.backend import backends_on

NAMES = ("mosaic", "triton", "xla")
_MATRIX_ROWS = 128  # of a cooperative work tile in the mosaic kernel
_XLA_ROWS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One backend.

    Attributes:
        name: as given on the command line.
        attention: ``paged_attention`` of the backend.
        prepare: (plan, positions, (N, K)) to what ``attention`` takes as its plan; jittable.
        dtype: of queries and of KV that is not fp8.
    """

    name: str
    attention: Callable[..., Any]
    prepare: Callable[..., Any]
    dtype: jnp.dtype

    def tile_rows(self, group: int) -> int:
        """Rows of a multi-row item, as engines set them, with ``group`` query heads a KV head."""
        match self.name:
            case "mosaic":
                return 2 * (_MATRIX_ROWS // 2 // group)
            case "triton":
                return triton_config.BLOCK_M // group
            case _:
                return _XLA_ROWS


def automatic(capability: float | None, *, has_triton: bool) -> str:
    """The fastest backend on a GPU of this compute capability, None for a CPU, with or without
    Triton: the one that engines take for a model that any backend can run."""
    return next(name for name in backends_on(capability) if has_triton or name != "triton")


def choose_kernel(name: str) -> Kernel:
    """The kernel of this name; "auto" is what engines take here: see ``automatic``.

    Raises:
        ValueError: an unknown name, mosaic without a Hopper GPU, or triton without any.
        ImportError: triton is asked for and not installed.
    """
    device = jax.devices()[0]
    capability = float(device.compute_capability) if device.platform == "gpu" else None
    if name == "auto":
        name = automatic(capability, has_triton=find_spec("jax_triton") is not None)
    if name == "mosaic":
        if "mosaic" not in backends_on(capability):
            raise ValueError(f"mosaic needs a Hopper GPU, and this is {device.device_kind}")
        return Kernel("mosaic", mosaic.paged_attention, mosaic.pack_plan, jnp.dtype(jnp.bfloat16))
    if name == "triton":
        if capability is None:
            raise ValueError(f"triton needs a GPU, and this is {device.device_kind}")
        from pallas_kernels.attention.triton import api, pack  # not installed everywhere

        def prepare(plan, positions, heads):
            return pack.pack_plan(plan, heads)

        return Kernel("triton", api.paged_attention, prepare, jnp.dtype(jnp.bfloat16))
    if name == "xla":
        dtype = jnp.dtype(jnp.bfloat16 if device.platform == "gpu" else jnp.float32)
        return Kernel("xla", xla.paged_attention, lambda plan, positions, heads: plan, dtype)
    raise ValueError(f"backend is {name!r}; choose one of auto, {', '.join(NAMES)}")
