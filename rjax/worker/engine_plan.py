"""What an engine is made with: devices, dtypes, kernels, limits and step shapes."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from rjax.batch.page_groups import PageGroups, page_groups, with_shared_kv, with_states
from rjax.batch.step_limits import StepLimits
from rjax.config import EngineConfig
from rjax.models import ModelConfig
from rjax.worker.backend import Backend
from rjax.worker.step.shape import ShapeTable, shape_table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlatform:
    """The part of an `EnginePlan` that is known before the weights are loaded.

    Attributes:
        config: the engine's options.
        model: its model, placed on the devices.
        max_model_len: tokens of the longest sequence.
        mesh: its devices.
        weight_bytes: bytes of the parameters that one device holds.
        dtype: dtype of the weights.
        kv_dtype: dtype of the KV pool.
        backend: its kernels.
    """

    config: EngineConfig
    model: ModelConfig
    max_model_len: int
    mesh: Mesh
    weight_bytes: int
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    backend: Backend

    @property
    def first_device(self) -> Any:
        """The first of its devices, which are all alike."""
        return self.mesh.devices.flat[0]

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return self.first_device.platform == "cpu"

    @property
    def description(self) -> str:
        """Number and kind of the devices."""
        return f"{self.mesh.size} x {self.first_device.device_kind}"

    def shapes_for(self, limits: StepLimits) -> ShapeTable:
        """The step shapes under these limits."""
        return shape_table(
            self.config,
            backend=self.backend,
            max_model_len=self.max_model_len,
            limits=limits,
            # Padding costs a CPU more to compute, but less than compiling a size.
            growth=4 if self.is_cpu else 2,
            groups=self._page_groups(),
        )

    def _page_groups(self) -> PageGroups:
        page_size = self.config.cache.page_size
        return groups_of(self.model, page_size=page_size, max_model_len=self.max_model_len)


def groups_of(model: ModelConfig, *, page_size: int, max_model_len: int) -> PageGroups:
    """The page groups of a model that is placed on its devices.

    Args:
        model: the model.
        page_size: tokens a page.
        max_model_len: tokens of the longest sequence.
    """
    layers = range(model.num_layers)
    has_state = tuple([model.is_linear(layer) for layer in layers])
    own = [i for i in layers if model.kv_source(i) == i and not has_state[i]]
    found = page_groups(
        tuple([model.sliding_windows[i] for i in own]),
        page_size=page_size,
        max_model_len=max_model_len,
        heads=tuple([model.layer_heads[i] for i in own]),
    )
    if model.kv_sources:
        found = with_shared_kv(found, model.kv_sources)
    return with_states(found, has_state) if any(has_state) else found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan(EnginePlatform):
    """All that is chosen for an engine before its worker is made.

    Attributes:
        limits: limits of a step.
        shapes: shapes of the compiled steps.
    """

    limits: StepLimits
    shapes: ShapeTable
