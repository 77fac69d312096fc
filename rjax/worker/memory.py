"""The device memory that the weights take, and that a step needs besides them and the KV pool."""

import math
from collections.abc import Mapping

import numpy as np

from rjax.errors import OutOfMemoryError
from rjax.models import ExpertsConfig, LinearAttentionConfig, ModelConfig
from rjax.pallas_kernels.experts.work_list import max_tiles, tile_rows
from rjax.worker.step.shape import StepShape

MAX_UTILIZATION = 0.98
"""Share of the memory that error messages advise at most."""

_FLOAT32 = np.dtype(np.float32).itemsize
_LOGITS_COPIES = 8  # float32 [B, V] arrays that the sampler in mode "full" holds, sorting included
_PROMPT_ROWS = 512  # whose logits fit: several of the blocks in which a step computes them
_PROGRAM_BYTES = 2**27  # code and constants of all compiled programs


def workspace_bytes(
    model: ModelConfig, shape: StepShape, *, itemsize: int, num_slots: int, num_devices: int
) -> int:
    """An upper bound for the bytes of one device that a step uses at once.

    It adds up what a layer holds as if nothing were reused: the residual stream, the projections
    with float32 summands, the rows of experts, the partial results of attention; then the logits,
    as often as sampling holds them. XLA reuses much of it, so a step takes less: for Llama-3-8B, 64
    rows of 4,096 tokens take 33 MB.

    Args:
        model: the model whose layers run.
        shape: shape of the largest step.
        itemsize: bytes of a weight.
        num_slots: slots of the sampling state, which counts the tokens of each slot.
        num_devices: number of devices over which heads and the feed-forward axis are sharded.
    """
    T, B, D, F, V = (
        shape.rows,
        shape.seqs,
        model.hidden_size,
        model.widest_mlp,
        model.vocab_size,
    )
    heads = model.widest_qkv
    both = itemsize + _FLOAT32
    stream = 3 * T * D * both
    dense = model.experts is None or not all(model.experts.layers)
    sharded = T * (heads + 3 * F * dense) * both
    if model.latent is not None:
        sizes = model.latent.axis_sizes
        stream += T * (sizes.get("Q", 0) + sizes["Y"]) * both
        sharded += T * model.num_heads * (sizes["W"] + sizes["E"]) * both
    if model.per_layer_inputs is not None:  # embedded, projected, and their sum
        stream += 3 * T * model.num_layers * model.per_layer_inputs.width * both
    if model.linear is not None:
        sharded += _states_bytes(model.linear, shape, both)
    if model.experts is not None:
        stream += _experts_bytes(model.experts, T, D, itemsize)
        hidden = _pair_slots(model.experts, T) * 3 * model.experts.width * both
        if model.experts.parallel:  # all rows may go to the experts of one device
            stream += hidden
        else:
            sharded += hidden
        sharded += T * 3 * (model.experts.shared_width or 0) * both
    merges = max(plan.merge_capacity for plan in shape.plans)
    head_dim = max(H for _, H in model.layer_heads)
    partials = merges * model.num_heads * (head_dim + 1) * _FLOAT32
    # XLA may dequantise a whole projection before its product. The float32 sums of an fp8 product
    # are summands as any other.
    dequantised = 2 * D * F * both if model.schemes else 0
    logits = (_LOGITS_COPIES * B + _PROMPT_ROWS + num_slots) * V * _FLOAT32
    return stream + (sharded + partials + dequantised) // num_devices + logits + _PROGRAM_BYTES


def _states_bytes(linear: LinearAttentionConfig, shape: StepShape, both: int) -> int:
    """Bytes of a layer of linear attention: its projections, and a page of each head."""
    S = shape.page_size
    of_row = linear.key_heads * (linear.mixed_dim + linear.values_dim)
    of_page = S * (4 * (2 * linear.value_dim + 4 * linear.key_dim) + 3 * S)
    return shape.rows * of_row * 2 * both + linear.value_heads * of_page * _FLOAT32


def _pair_slots(experts: ExpertsConfig, rows: int) -> int:
    """Rows of the tiles of a grouped GEMM."""
    pairs = rows * experts.top_k
    of_tile = tile_rows(pairs, experts.num_experts)
    return max_tiles(pairs, experts.num_experts, of_tile) * of_tile


def _experts_bytes(experts: ExpertsConfig, rows: int, width: int, itemsize: int) -> int:
    """Bytes that are not sharded: gathered rows, and the results of every pair in float32."""
    slots, pairs = _pair_slots(experts, rows), rows * experts.top_k
    scores = 4 * rows * experts.num_experts * _FLOAT32
    return slots * width * (itemsize + _FLOAT32) + pairs * width * _FLOAT32 + scores


def check_weights_fit(
    weights: int,
    *,
    memory: Mapping[str, int] | None,
    num_devices: int,
    utilization: float,
) -> None:
    """Refuse a model whose weights do not fit, before they are loaded.

    Args:
        weights: bytes of all devices together.
        memory: ``memory_stats()`` of one device; None (a CPU) checks nothing.
        num_devices: number of devices that the weights are sharded over.
        utilization: share of the memory that may be used.

    Raises:
        OutOfMemoryError: they do not fit; the message says on how many devices they would.
    """
    if not memory or "bytes_limit" not in memory:
        return
    available = memory["bytes_limit"] * utilization - memory["bytes_in_use"]
    if weights > available * num_devices:
        share = (weights / num_devices + memory["bytes_in_use"]) / memory["bytes_limit"]
        remedies = []
        if share <= MAX_UTILIZATION:
            remedies.append(f"raise gpu_memory_utilization above {share:.2f}")
        if available > 0:
            devices = 1 << (math.ceil(weights / available) - 1).bit_length()
            remedies.append(f"set tensor_parallel_size={devices}")
        else:
            remedies.append("free device memory")
        remedies.append("choose a 16-bit dtype, quantization fp8 or int4, or a smaller model")
        raise OutOfMemoryError(
            f"the weights take {weights / 2**30:.1f} GiB and {num_devices} device(s) have "
            f"{max(available, 0) * num_devices / 2**30:.1f} GiB to give: {', or '.join(remedies)}"
        )
