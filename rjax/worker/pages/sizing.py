"""How many pages the KV pool gets, and how many tokens they hold."""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
from jax.sharding import Mesh

from rjax.batch.page_groups import pages_held, tokens_held
from rjax.batch.step_limits import StepLimits
from rjax.batch.step_worker import PoolSize, StatePoolSize
from rjax.config import CacheSettings, EngineConfig
from rjax.config.memory_sizes import available_memory, host_memory
from rjax.errors import OutOfMemoryError
from rjax.models import ModelConfig
from rjax.worker.memory import MAX_UTILIZATION, workspace_bytes
from rjax.worker.pages.pools import page_bytes
from rjax.worker.pages.states import state_bytes
from rjax.worker.step.shape import ShapeTable, StepShape

_CPU_SHARE = 0.1  # of the host's memory: other programs need the rest
_CPU_BYTES = 2**30  # unless a sequence of full length needs more
_FREE_SHARE = 0.5  # of the free part of it
_GPU_STEPS = 64  # sizes between two powers of two: rounding loses 1/64 at most
_CPU_STEPS = 8
_STATES_SHARE = 0.5  # of a GPU's memory for KV and states, and of the host's
_CPU_STATE_BYTES = 2**28
_MAX_HOST_POOLS = 8  # host pages or states, as a multiple of those on the device


def size_pool(
    settings: CacheSettings,
    model: ModelConfig,
    *,
    largest: StepShape,
    itemsize: int,
    max_model_len: int,
    limits: StepLimits,
    dtype: jnp.dtype,
    kv_dtype: jnp.dtype,
    mesh: Mesh,
) -> PoolSize:
    """The pool of ``settings.num_pages`` pages, or the largest that fits.

    Raises:
        OutOfMemoryError: it does not fit, or cannot hold a sequence of full length.
    """
    bytes_per_page = page_bytes(model, largest.groups, settings.page_size, kv_dtype)
    windows = largest.groups.windows
    device = mesh.devices.flat[0]
    workspace = workspace_bytes(
        model, largest, itemsize=itemsize, num_slots=limits.num_slots, num_devices=mesh.size
    )
    states, of_slots = None, 0
    if model.linear is not None:
        states, of_slots = _size_states(
            settings,
            model,
            largest=largest,
            num_slots=limits.num_slots,
            dtype=dtype,
            memory=device.memory_stats(),
            num_devices=mesh.size,
            workspace_bytes=workspace,
        )
        workspace += (states.num_states * states.state_bytes + of_slots) // mesh.size
    if settings.num_pages is not None:
        pool = PoolSize(settings.num_pages, bytes_per_page, windows, states)
        check_pool_fits(pool, memory=device.memory_stats(), num_devices=mesh.size)
        return pool
    pool = fit_pool(
        bytes_per_page=bytes_per_page,
        page_size=settings.page_size,
        max_model_len=max_model_len,
        num_seqs=limits.num_slots,
        memory=device.memory_stats(),
        num_devices=mesh.size,
        utilization=settings.gpu_memory_utilization,
        workspace_bytes=workspace,
        windows=windows,
    )
    return dataclasses.replace(pool, states=states)


def _size_states(
    settings: CacheSettings,
    model: ModelConfig,
    *,
    largest: StepShape,
    num_slots: int,
    dtype: jnp.dtype,
    memory: Mapping[str, int] | None,
    num_devices: int,
    workspace_bytes: int,
) -> tuple[StatePoolSize, int]:
    """(the pool of states, bytes of the slots' tails over all devices).

    On a GPU, states get half of what the KV pool would get without them, on a CPU a quarter of a
    GiB. They never get more than two for each slot and a snapshot at every ``kv_split_size`` tokens
    of one sequence of full length a slot, nor less than two for each slot that fit at least once.

    Raises:
        OutOfMemoryError: not even one sequence fits.
    """
    S = settings.page_size
    of_page, of_slot = state_bytes(model, page_size=S, dtype=dtype)
    of_slots = num_slots * of_slot
    split = largest.kv_split_size
    longest = largest.table_pages * S
    most = num_slots * (2 + longest // split)
    if settings.num_states is not None:
        return StatePoolSize(settings.num_states, of_page, split // S, of_slot), of_slots
    if memory and "bytes_limit" in memory:
        utilization = settings.gpu_memory_utilization
        budget = _gpu_budget(memory, num_devices, utilization, workspace_bytes) - of_slots
        budget = int(budget * _STATES_SHARE)
    else:
        budget = _CPU_STATE_BYTES
    count = min(most, max(0, budget // of_page))
    if not (memory and "bytes_limit" in memory):
        count = max(count, min(most, 2 * num_slots + 2))
    if count < 2:
        raise OutOfMemoryError(
            f"{max(budget, 0) / 2**20:.0f} MiB are left for states, of which a sequence needs 2 of "
            f"{of_page / 2**20:.0f} MiB: lower max_num_seqs or max_num_batched_tokens, raise "
            "gpu_memory_utilization or tensor_parallel_size"
        )
    return StatePoolSize(round_down(count, _GPU_STEPS), of_page, split // S, of_slot), of_slots


def host_room(settings: CacheSettings, pool: PoolSize) -> tuple[int, int]:
    """(pages, states) of host memory that preempted sequences can be swapped to.

    States get half of it at most; neither gets more than a multiple of what the device holds.
    """
    left, states = settings.swap_bytes, 0
    if pool.states is not None:
        states = int(left * _STATES_SHARE) // pool.states.host_bytes
        states = min(states, _MAX_HOST_POOLS * pool.states.num_states)
        left -= states * pool.states.host_bytes
    return min(left // pool.page_bytes, _MAX_HOST_POOLS * pool.num_pages), states


def fit_pool(
    *,
    bytes_per_page: int,
    page_size: int,
    max_model_len: int,
    num_seqs: int,
    memory: Mapping[str, int] | None,
    num_devices: int,
    utilization: float,
    workspace_bytes: int,
    windows: tuple[int | None, ...],
) -> PoolSize:
    """Size the pool by the memory that the weights and the largest step leave.

    On a GPU, the pool gets ``utilization`` of the device's memory, less the memory in use, less
    ``workspace_bytes``. On a CPU, which has no ``memory`` statistics, it gets 1 GiB, or what a
    sequence of full length needs, within a tenth of the host's memory and half of the free memory.
    It never gets more than ``num_seqs`` sequences of full length need.

    The number of pages is part of the shapes of every compiled step, so a later start finds its
    programs in the compilation cache only if it computes the same number. The number is therefore
    rounded down: on a GPU, where memory in use differs by a few MiB between starts, to one of 64
    numbers between two powers of two; on a CPU to one of 8, and to a power of two if little of the
    host's memory is free.

    Args:
        bytes_per_page: bytes of a page over all layers of a page group, and all devices.
        page_size: tokens a page.
        max_model_len: tokens of the longest sequence.
        num_seqs: sequences that hold pages at once.
        memory: ``memory_stats()`` of one device, weights loaded; None on a CPU.
        num_devices: number of devices that the pool is sharded over.
        utilization: share of the memory that may be used.
        workspace_bytes: workspace of the largest step on one device, in bytes.
        windows: sliding window of each page group, in tokens; None without end.

    Raises:
        OutOfMemoryError: not even one sequence of ``max_model_len`` tokens fits.
    """
    one = pages_held(windows, max_model_len, page_size)
    if memory and "bytes_limit" in memory:
        taken = memory["bytes_in_use"] + workspace_bytes
        budget = _gpu_budget(memory, num_devices, utilization, workspace_bytes)
        steps = _GPU_STEPS
    else:
        taken = 0
        budget, free = int(host_memory() * _CPU_SHARE), int(available_memory() * _FREE_SHARE)
        steps = _CPU_STEPS if budget <= free else 1
        # The pool is cleared at the start, which takes a CPU half a second a GiB.
        budget = min(budget, free, max(_CPU_BYTES, one * bytes_per_page))
    pages = max(0, budget // bytes_per_page)
    pages = min(max(round_down(pages, steps), min(pages, one)), num_seqs * one)
    if pages < one:
        tokens = tokens_held(windows, pages, page_size)
        needed = one * bytes_per_page
        remedies = []
        if tokens:
            remedies.append(f"lower max_model_len to {tokens} or less")
        if memory and "bytes_limit" in memory:
            share = (needed / num_devices + taken) / memory["bytes_limit"]
            if share <= MAX_UTILIZATION:
                remedies.append(f"raise gpu_memory_utilization to {math.ceil(share * 100) / 100}")
            remedies.append("lower max_num_batched_tokens, or raise tensor_parallel_size")
        else:
            remedies.append("free memory, or set num_pages")
        raise OutOfMemoryError(
            f"{max(budget, 0) / 2**20:.0f} MiB are left for KV, which holds {tokens} "
            f"tokens; one sequence of max_model_len = {max_model_len} needs "
            f"{needed / 2**20:.0f} MiB: {'; '.join(remedies)}"
        )
    return PoolSize(pages, bytes_per_page, windows)


def gpu_pool_pages(
    settings: CacheSettings,
    bytes_per_page: int,
    *,
    memory: Mapping[str, int],
    num_devices: int,
    workspace_bytes: int,
) -> int:
    """Pages that fit on a GPU beside the weights and the largest step, without a limit by the
    number of sequences; 0 if ``settings.num_pages`` do not.

    Args:
        settings: settings of the pool.
        bytes_per_page: bytes of a page over all layers and devices.
        memory: ``memory_stats()`` of one device, weights loaded.
        num_devices: number of devices that the pool is sharded over.
        workspace_bytes: workspace of the largest step on one device, in bytes.
    """
    if settings.num_pages is None:
        utilization = settings.gpu_memory_utilization
        budget = _gpu_budget(memory, num_devices, utilization, workspace_bytes)
        return round_down(max(0, budget // bytes_per_page), _GPU_STEPS)
    budget = _gpu_budget(memory, num_devices, MAX_UTILIZATION, workspace_bytes)
    return settings.num_pages if settings.num_pages * bytes_per_page <= budget else 0


def _gpu_budget(
    memory: Mapping[str, int], num_devices: int, utilization: float, workspace_bytes: int
) -> int:
    """Bytes for the KV pool, over all devices."""
    free = int(memory["bytes_limit"] * utilization) - memory["bytes_in_use"]
    return (free - workspace_bytes) * num_devices


def round_down(pages: int, steps: int) -> int:
    """``pages`` rounded down to one of ``steps`` numbers between two powers of two."""
    unit = max(1, (1 << max(pages, 1).bit_length() - 1) // steps)
    return pages // unit * unit


def check_pool_fits(pool: PoolSize, *, memory: Mapping[str, int] | None, num_devices: int) -> None:
    """Refuse a pool of a configured size before it is allocated.

    Args:
        pool: size of the pool.
        memory: ``memory_stats()`` of one device, weights loaded; None (a CPU) checks nothing.
        num_devices: number of devices that the pool is sharded over.

    Raises:
        OutOfMemoryError: it does not fit; the message says how many pages do.
    """
    if not memory or "bytes_limit" not in memory:
        return
    available = (memory["bytes_limit"] - memory["bytes_in_use"]) * num_devices
    if pool.num_pages * pool.page_bytes > available:
        raise OutOfMemoryError(
            f"num_pages is {pool.num_pages}, which takes "
            f"{pool.num_pages * pool.page_bytes / 2**30:.1f} GiB, and {num_devices} device(s) have "
            f"{available / 2**30:.1f} GiB to give: set num_pages below "
            f"{available // pool.page_bytes}, since a step needs memory too, or leave it out, and "
            "the pool takes what is left"
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
    if model.linear is not None:
        try:
            states, of_slots = _size_states(
                cache,
                model,
                largest=shapes.largest,
                num_slots=limits.num_slots,
                dtype=dtype,
                memory=memory,
                num_devices=num_devices,
                workspace_bytes=workspace,
            )
        except OutOfMemoryError:
            return 0
        workspace += (states.num_states * states.state_bytes + of_slots) // num_devices
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
