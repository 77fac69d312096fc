"""Experts on Hopper: two grouped GEMMs (``stream``) over one work list.

The first has the activation in its epilogue. The second multiplies by the weights of the routing
and stores the result of every pair where the consumer adds it: the experts of a row are the
summands of a Partial, so there is no reduction kernel. Bytes moved besides the weights of the
experts that have rows: 2 * slots * (D + I) written and read, and 4 * X * T * D of summands.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from rjax.pallas_kernels.experts import work_list_mosaic
from rjax.pallas_kernels.experts.base import ExpertsProblem
from rjax.pallas_kernels.experts.config import (
    BLOCK_K,
    WGMMA_M,
    GroupedConfig,
    choose_config,
    choose_tile_rows,
)
from rjax.pallas_kernels.experts.grouped_weight import GroupedWeight, grouped_weight
from rjax.pallas_kernels.experts.left_operand import LeftOperand
from rjax.pallas_kernels.experts.plain_operand import PlainWeights
from rjax.pallas_kernels.experts.stores import load_pairs, store_pairs, store_slots
from rjax.pallas_kernels.experts.stream import grouped_gemm
from rjax.pallas_kernels.experts.widened_operand import WidenedWeights
from rjax.pallas_kernels.experts.work_list import WorkList, make_work_list
from rjax.pallas_kernels.gemm.few_bits.interleaving import INTERLEAVED
from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.weight import ScaledLayout

_MOST_INPUTS = 256  # of a pipeline stage
type Activation = Callable[[Array, Array], Array]
_PER_COLUMN = plgpu.Layout.WGMMA.reduce(1)


def refusal(
    depth: int,
    width: int,
    dtype: DTypeLike,
    blocks: tuple[tuple[int, int] | None, ...] = (),
) -> str | None:
    """Why `experts` cannot take rows of ``depth`` and experts of ``width``, or None.

    Args:
        depth, width: D and I.
        dtype: dtype of the rows.
        blocks: (outputs, inputs) that share a scale, of each weight in few bits; None for channels.
    """
    if jnp.dtype(dtype).itemsize != 2:
        return f"rows of {jnp.dtype(dtype)}; the kernel takes one 16-bit dtype"
    multiple = max(BLOCK_K, WGMMA_M)
    if depth % multiple or width % multiple:
        return f"experts of {depth} x {width}; the kernel takes multiples of {multiple}"
    if blocks and jnp.dtype(dtype) != jnp.bfloat16:
        return f"rows of {jnp.dtype(dtype)} with weights of few bits; the kernel takes bfloat16"
    for block in blocks:
        if block is not None and not _takes_block(*block):
            return (
                f"scales of {block[0]} x {block[1]}; the kernel takes channels, groups of 1 x 32 n "
                "and blocks of 64 m x 64 n"
            )
    return None


def _takes_block(outputs: int, inputs: int) -> bool:
    whole = _MOST_INPUTS % inputs == 0 or inputs % _MOST_INPUTS == 0
    if outputs == 1:
        return inputs % INTERLEAVED == 0 and whole
    return outputs % WGMMA_M == 0 and inputs in (64, 128)


def _weight_refusal(
    dtype: DTypeLike, weight: Float[Array, "J D ..."] | GroupedWeight
) -> str | None:
    if not isinstance(weight, GroupedWeight):
        return None if weight.dtype == dtype else f"h is {dtype} and a weight {weight.dtype}"
    _, D, _, E = weight.shape
    return refusal(D, E, dtype, (weight.block,))


def experts(
    h: Float[Array, "T D"],
    chosen: Int[Array, "T X"],
    weights: Float32[Array, "T X"],
    up: Float[Array, "J D 2 I"] | GroupedWeight,
    down: Float[Array, "J I D"] | GroupedWeight,
    up_bias: Float[Array, "J 2 I"] | None = None,
    down_bias: Float[Array, "J D"] | None = None,
    activation: Activation | None = None,
    num_elsewhere: int = 0,
) -> Partial:
    """The sum over the chosen experts of weight * down(activation(gate, up)), as X summands.

    Sums and activation are float32, and only the activated rows are rounded. Deterministic; a row
    does not depend on the experts of the others. Summands of pairs without an expert are
    unspecified. With experts elsewhere they are left out, and the result is one summand.

    Args:
        h: bfloat16, or float16 as the weights; see ``refusal``.
        chosen: the experts of each row; J for none.
        weights: weights of the chosen experts' results.
        up, down: weights of all experts; entry 0 of the third axis of ``up`` is the gate. In few
            bits, W is 2 and 1.
        up_bias, down_bias: biases of all experts, any float dtype; or None.
        activation: (gate, up), both float32, to the activated rows; None for SwiGLU.
        num_elsewhere: experts of other devices, which compute the rest of the sum.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    J, D, _, width = up.shape
    why = refusal(D, width, h.dtype)
    if why is not None:
        raise ValueError(why)
    for weight in (up, down):
        why = _weight_refusal(h.dtype, weight)
        if why is not None:
            raise ValueError(why)
    promoted = any(isinstance(each, GroupedWeight) and each.promoted for each in (up, down))
    rows = choose_tile_rows(chosen.size, J + num_elsewhere, width, promoted=promoted)
    work = _work_list(chosen, J, rows, num_elsewhere)
    # The first slot of every tile has the row, if it has all its experts here.
    gathered = h if len(h) == 1 and not num_elsewhere else h[work.slot_row]
    hidden = gate_up(gathered, up, work, bias=up_bias, activation=activation)
    summands = weighted_down(hidden, down, weights, work, bias=down_bias)
    if num_elsewhere:
        # The other devices read the sum, so it is added up first; the same pass skips their pairs.
        has_slot = work.pair_slot.T[:, :, None] < len(work.slot_pair)
        summands = jnp.where(has_slot, summands, 0).sum(0, keepdims=True)
    return Partial(summands, dtype=h.dtype)


def _work_list(
    chosen: Int[Array, "T X"], num_experts: int, rows: int, num_elsewhere: int
) -> WorkList:
    """The work list, by one kernel for few pairs; a single row with all its experts takes none."""
    several = len(chosen) > 1 or num_elsewhere > 0
    if several and work_list_mosaic.refusal(chosen.size, num_experts) is None:
        return work_list_mosaic.make_work_list_mosaic(chosen, num_experts, rows)
    return make_work_list(chosen, num_experts, rows, num_elsewhere=num_elsewhere)


def gate_up(
    rows: Float[Array, "Z D"],
    up: Float[Array, "J D 2 I"] | GroupedWeight,
    work: WorkList,
    config: GroupedConfig | None = None,
    *,
    bias: Float[Array, "J 2 I"] | None = None,
    activation: Activation | None = None,
) -> Float[Array, "slots I"]:
    """activation(rows @ up[expert, :, 0], rows @ up[expert, :, 1]) in the dtype of the rows.

    The rows are those of all slots, or one that is in the first slot of every tile.
    """

    def epilogue(operands, out, sums, expert, slot, column):
        biases = [operands[0].at[expert, which] if operands else None for which in range(2)]
        gate, up = (_biased(sum_, of, column) for sum_, of in zip(sums, biases, strict=True))
        hidden = (activation or _swiglu)(gate, up)
        store_slots(out, hidden.astype(out.dtype), slot, column)

    weights = _left_operand(up)
    config = config or _config(weights, work)
    shape = jax.ShapeDtypeStruct((len(work.slot_pair), up.shape[3]), rows.dtype)
    operands = () if bias is None else (bias,)
    name = f"grouped_gate_up{_suffix(up)}"
    return grouped_gemm(name, rows, weights, work, config, shape, epilogue, operands)


def weighted_down(
    hidden: Float[Array, "slots I"],
    down: Float[Array, "J I D"] | GroupedWeight,
    weights: Float32[Array, "T X"],
    work: WorkList,
    config: GroupedConfig | None = None,
    *,
    bias: Float[Array, "J D"] | None = None,
) -> Float32[Array, "X T D"]:
    """weights * (hidden @ down[expert] + bias[expert]) of every pair, as a summand of its row."""
    (T, X), D = weights.shape, down.shape[-1]
    left = _left_operand(down)
    halves = left.shape[2]

    def prologue(operands, slot):
        pairs, weights, *biases = operands
        return *load_pairs(pairs, weights, slot, work.tile_rows), *biases

    def epilogue(operands, out, sums, expert, slot, column):
        del slot
        pairs, weights, *biases = operands
        for half, value in enumerate(sums):
            first = pl.multiple_of(column + half * (D // halves), WGMMA_M)
            value = _biased(value, biases[0].at[expert] if biases else None, first)
            store_pairs(out, value, pairs, weights, first)

    config = config or _config(left, work)
    shape = jax.ShapeDtypeStruct((X, T, D), jnp.float32)
    biases = () if bias is None else (bias,)
    operands = work.slot_pair, weights.reshape(-1), *biases
    name = f"grouped_down{_suffix(down)}"
    return grouped_gemm(name, hidden, left, work, config, shape, epilogue, operands, prologue)


def _left_operand(weight: Float[Array, "J D ..."] | GroupedWeight) -> LeftOperand:
    """[J, D, W, E]; a single matrix as two halves of its columns, which a CTA computes both."""
    if isinstance(weight, GroupedWeight):
        return WidenedWeights(weight.split(2) if weight.can_split(2, WGMMA_M) else weight)
    if weight.ndim == 3:
        J, D, E = weight.shape
        weight = weight.reshape(J, D, 2 if E % (2 * WGMMA_M) == 0 else 1, -1)
    return PlainWeights(weight)


def _suffix(weight: Float[Array, "J D ..."] | GroupedWeight) -> str:
    return f"_{weight.kind}" if isinstance(weight, GroupedWeight) else ""


def _swiglu(gate, up):
    return gate / (1.0 + jnp.exp(-gate)) * up


def _biased(value, bias, column):
    """float32 [64, R] plus the bias [E] (GMEM) of columns from ``column`` on, or as it is."""
    if bias is None:
        return value
    found = plgpu.load(bias.at[pl.ds(column, WGMMA_M)], layout=_PER_COLUMN, optimized=False)
    return value + lax.broadcast_in_dim(found.astype(jnp.float32), value.shape, [0])


def _config(weights: LeftOperand, work: WorkList) -> GroupedConfig:
    J, D, W, E = weights.shape
    of_bits = {}
    if isinstance(weights, WidenedWeights):
        of_bits = {"bits": weights.weight.bits, "scale_bytes": weights.scale_bytes}
    return choose_config(
        tile_rows=work.tile_rows,
        tiles=work.tile_expert.shape[0],
        num_experts=J,
        matrices=W,
        columns=E,
        depth=D,
        **of_bits,
    )


def activation_refusal(problem: ExpertsProblem) -> str | None:
    """Why the kernel cannot take the activation of a problem, or None."""
    activation = problem.activation
    if activation.is_swiglu or activation.clamp is not None:
        return None
    return "it takes silu with a gate"


def _refusal(problem: ExpertsProblem) -> str | None:
    why = activation_refusal(problem)
    if why is not None:
        return why
    for scheme in problem.schemes:
        if scheme.name != "unquantised":
            return f"weights stored as {scheme.name}; it takes unquantised ones"
    return refusal(problem.depth, problem.columns[-1], problem.dtype)


def run(
    problem: ExpertsProblem,
    h: Array,
    chosen: Array,
    weights: Array,
    up: dict[str, Array],
    down: dict[str, Array],
    up_bias: Array | None,
    down_bias: Array | None,
) -> Partial:
    """The result of a problem, of weights as they are or in few bits."""
    activation = problem.activation
    if problem.needs_partial and down_bias is not None:
        down_bias = down_bias[0]
    return experts(
        h,
        chosen,
        weights,
        _operand(problem.layout, up, 2),
        _operand(problem.down_layout, down, 1),
        up_bias,
        down_bias,
        None if activation.clamp is None else activation.clamped,
        num_elsewhere=problem.experts_elsewhere,
    )


def _operand(
    layout: ScaledLayout | None, leaves: dict[str, Array], matrices: int
) -> Array | GroupedWeight:
    if layout is None:
        return leaves["weight"]
    return grouped_weight(layout.values, leaves, matrices)


KERNEL = Kernel(
    "mosaic.grouped_gemm",
    "experts",
    "mosaic",
    _refusal,
    run,
    pads_rows=True,
    compute_capabilities=HOPPER,
)
