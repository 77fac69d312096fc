"""The step shapes of an engine, and the KV tokens that fit beside its largest step."""

from collections.abc import Mapping

import jax.numpy as jnp

from rjax.batch.page_groups import PageGroups, pages_held
from rjax.batch.step_limits import StepLimits
from rjax.config import EngineConfig
from rjax.models import ModelConfig
from rjax.pallas_kernels.attention.plan.host import PlanShape
from rjax.worker.backend import Backend
from rjax.worker.kv_cache import page_bytes
from rjax.worker.memory_sizing import gpu_pool_pages
from rjax.worker.step_shape import ShapeTable
from rjax.worker.workspace import workspace_bytes


def shape_table(
    config: EngineConfig,
    *,
    backend: Backend,
    max_model_len: int,
    limits: StepLimits,
    growth: int,
    groups: PageGroups,
) -> ShapeTable:
    """The step shapes of a backend.

    Args:
        config: the engine's configuration.
        backend: kernels of the steps.
        max_model_len: tokens of the longest sequence.
        limits: limits of the steps.
        growth: ratio of one step size to the next smaller one.
        groups: page groups of the model.
    """
    page_size = config.cache.page_size

    def plan_shape(rows: int, seqs: int, unpadded_rows: int, window: int | None) -> PlanShape:
        return backend.plan_shape(
            rows,
            seqs,
            max_model_len,
            page_size,
            unpadded_rows=unpadded_rows,
            coalesce=config.relay.mode == "auto",
            kv_split_size=config.relay.kv_split_size,
            window=window,
        )

    return ShapeTable(
        limits=limits,
        max_model_len=max_model_len,
        page_size=page_size,
        plan_shape=plan_shape,
        padded_rows=backend.padded_rows,
        spare_rows=backend.spare_rows,
        growth=growth,
        groups=groups,
    )


def gpu_pool_tokens(
    config: EngineConfig,
    model: ModelConfig,
    shapes: ShapeTable,
    *,
    limits: StepLimits,
    dtype: jnp.dtype,
    kv_dtype: jnp.dtype,
    memory: Mapping[str, int],
    num_devices: int,
) -> int:
    """Tokens of the KV pool on GPUs whose weights are loaded; nothing is compiled for it.

    It counts the tokens of sequences that keep all their pages, but no fewer than one sequence of
    full length has, if it fits.

    Args:
        config: the engine's configuration; a configured ``num_pages`` that does not fit beside the
            largest step gives 0.
        model: the model's shapes.
        shapes: the engine's step shapes.
        limits: limits of the steps.
        dtype, kv_dtype: dtypes of the weights and of the KV.
        memory: ``memory_stats()`` of one device.
        num_devices: number of devices that the pool is sharded over.
    """
    cache, groups = config.cache, shapes.largest.groups
    workspace = workspace_bytes(
        model,
        shapes.largest,
        itemsize=dtype.itemsize,
        num_slots=limits.num_slots,
        num_devices=num_devices,
    )
    pages = gpu_pool_pages(
        cache,
        page_bytes(model, groups, cache.page_size, kv_dtype),
        memory=memory,
        num_devices=num_devices,
        workspace_bytes=workspace,
    )
    longest = shapes.largest.plans[0].max_context
    fits = pages_held(groups.windows, longest, cache.page_size) <= pages
    # Many short sequences keep all their pages.
    return max(longest if fits else 0, pages // len(groups.windows) * cache.page_size)
