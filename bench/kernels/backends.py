"""The attention kernels under test, by name."""

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from rjax.pallas_kernels.attention.backend import AttentionShape
from rjax.pallas_kernels.attention.registry import BACKENDS
from rjax.pallas_kernels.kernel import DeviceInfo

_BACKENDS = {backend.name: backend for backend in BACKENDS}
NAMES = tuple(_BACKENDS)


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One backend.

    Attributes:
        name: on the command line.
        attention: ``paged_attention`` of the backend.
        prepare: (plan, positions, (N, K, H)) to the prepared plan of ``attention``; jittable.
        dtype: of queries and of KV that is not fp8.
    """

    name: str
    attention: Callable[..., Any]
    prepare: Callable[..., Any]
    dtype: jnp.dtype

    def tile_rows(self, group: int, head_dim: int = 128) -> int:
        """Rows of a multi-row item for ``group`` query heads per KV head, as in the engine."""
        shape = AttentionShape(group, 1, head_dim, self.dtype, 64)
        return _BACKENDS[self.name].tuning(shape).tile_rows


def choose_kernel(name: str) -> Kernel:
    """The kernel of this name; "auto" is the first that runs on this device.

    Raises:
        ValueError: an unknown name, or a backend that does not run on this device.
        ImportError: triton is asked for and not installed.
    """
    device = jax.devices()[0]
    capability = float(device.compute_capability) if device.platform == "gpu" else None
    here = DeviceInfo(device.platform, capability)
    if name == "auto":
        has_triton = find_spec("jax_triton") is not None
        usable = (b for b in BACKENDS if b.runs_on(here) and (has_triton or b.name != "triton"))
        name = next(usable).name
    if name not in _BACKENDS:
        raise ValueError(f"backend is {name!r}; choose one of auto, {', '.join(NAMES)}")
    backend = _BACKENDS[name]
    if not backend.runs_on(here):
        raise ValueError(f"{name} does not run on this device, {device.device_kind}")
    if name == "triton":
        import jax_triton  # noqa: F401  # fail before timing if it is not installed
    sixteen_bits = name != "xla" or device.platform == "gpu"
    dtype = jnp.dtype(jnp.bfloat16 if sixteen_bits else jnp.float32)
    return Kernel(name, backend.attention, backend.prepare, dtype)
