"""The contract of an attention backend: what it refuses, its tuning and its functions.

``registry`` lists the backends. Each one is a folder with a ``backend.py`` that builds its
``AttentionBackend``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from rjax.pallas_kernels.attention.plan.host import CostModel
from rjax.pallas_kernels.attention.plan.splits import SplitPolicy
from rjax.pallas_kernels.kernel import DeviceInfo, supports
from rjax.pallas_kernels.pending import UnmergedAttention


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionShape:
    """The static shapes and dtypes of one model's attention, on one device.

    Attributes:
        num_heads: N, query heads.
        num_kv_heads: K, KV heads; N is a multiple of K.
        head_dim: H.
        dtype: dtype of queries and outputs, and of the weights that make them.
        page_size: S, tokens a page.
        kv_dtype: dtype of the KV pages; None for ``dtype``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: DTypeLike
    page_size: int
    kv_dtype: DTypeLike | None = None

    @property
    def group_size(self) -> int:
        """G, query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def has_fp8_kv(self) -> bool:
        """Whether the KV pages are float8_e4m3fn."""
        return self.kv_dtype is not None and jnp.dtype(self.kv_dtype) == jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionTuning:
    """How a backend's work is tiled and split.

    Attributes:
        tile_rows: most query rows of a multi-row item.
        kv_split_size: items are split at multiples of this many KV tokens.
        fine_kv_split_size: split size that replaces ``kv_split_size`` in steps of at most
            ``fine_rows`` rows, which would otherwise leave SMs without work.
        fine_rows: most rows of a step that is split finely; 0 if no step is.
        split_policy: merges neighbouring splits of an item where the device stays busy; None keeps
            every split.
        cost_model: decides which shared prefixes are read once, on devices without a fitted model.
    """

    tile_rows: int
    kv_split_size: int
    fine_kv_split_size: int
    fine_rows: int
    split_policy: SplitPolicy | None
    cost_model: CostModel


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionBackend:
    """One implementation of attention over paged KV.

    Attributes:
        name: the backend's name in the configuration.
        compute_capabilities: major versions of the GPUs that run the kernels; None for any device.
        refusal: why the backend cannot serve a shape on a device, or None if it can. This is the
            only place that states these conditions.
        tuning: tile and split sizes for a shape that the backend does not refuse.
        prepare: (plan, positions, (N, K, H) of a device) to the plan that ``attention`` takes. Call
            it once a step, outside the layers.
        attention: ``paged_attention`` with the signature of ``xla.paged_attention``.
        unmerged_attention: ``attention`` without the merge of the partial results, for a kernel
            that merges them itself; None where the backend has none.
        merge: merges the results of ``unmerged_attention``; None if that is None.
    """

    name: str
    compute_capabilities: tuple[int, ...] | None
    refusal: Callable[[AttentionShape, DeviceInfo], str | None]
    tuning: Callable[[AttentionShape], AttentionTuning]
    prepare: Callable[..., Any]
    attention: Callable[..., Any]
    unmerged_attention: Callable[..., UnmergedAttention] | None = None
    merge: Callable[[UnmergedAttention], Array] | None = None

    def runs_on(self, device: DeviceInfo) -> bool:
        """Whether the device can run the kernels, for shapes that they take."""
        return self.compute_capabilities is None or supports(device, self.compute_capabilities)
