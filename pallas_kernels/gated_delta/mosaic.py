"""The gated delta rule on Hopper (Mosaic GPU): steps that decode, and all others page by page.

A decode step is one launch over the states, and two whose CTAs end at once unless a token completes
a page whose state is wanted. Other steps are two launches, `gated_delta_chunks`.
"""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from rjax.pallas_kernels.gated_delta.base import GatedDeltaProblem
from rjax.pallas_kernels.gated_delta.chunks import gated_delta_chunks, states_at_page_ends
from rjax.pallas_kernels.gated_delta.decode import gated_delta_decode
from rjax.pallas_kernels.gated_delta.page_rows import HEAD_DIM, PAGE_SIZE
from rjax.pallas_kernels.gated_delta.states import LayerStates, StateRows
from rjax.pallas_kernels.kernel import HOPPER, Kernel


def refusal(key_dim: int, value_dim: int, page_size: int, dtype: DTypeLike) -> str | None:
    """Why the kernels cannot take heads of these dims and pages of this size, or None."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"queries are {jnp.dtype(dtype)}; the mosaic backend takes bfloat16 and float16"
    if (key_dim, value_dim) != (HEAD_DIM, HEAD_DIM):
        return (
            f"keys of {key_dim} and values of {value_dim} elements; the mosaic backend takes "
            f"{HEAD_DIM} of both"
        )
    if page_size != PAGE_SIZE:
        return f"pages of {page_size} tokens; the mosaic backend takes {PAGE_SIZE}"
    return None


def gated_delta(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K G Y"],
    decay: Float32[Array, "T K G"],
    beta: Float32[Array, "T K G"],
    layer: LayerStates,
    rows: StateRows,
) -> tuple[Float[Array, "T K G Y"], LayerStates]:
    """Outputs of the rows, 0 for padding, and the states and tails with the rows added.

    Products are of 16-bit numbers, summed in float32. A step of as many items as sequences decodes;
    its outputs differ by rounding from those of the same tokens in a prompt, while the states at
    the ends of pages have the same bits.

    Args:
        q, k, v, layer: bfloat16 or float16, H = Y = 128 and pages of 64 tokens. States, tails and
            gates are updated in place when donated.

    Raises:
        ValueError: a shape or dtype the kernels do not take.
    """
    dtype, S = q.dtype, layer.keys.shape[2]
    why = refusal(q.shape[-1], v.shape[-1], S, dtype)
    if why is not None:
        raise ValueError(why)
    others = k, v, layer.keys, layer.values, layer.updates
    if any(x.dtype != dtype for x in others) or layer.states.dtype != jnp.float32:
        found = ", ".join(str(x.dtype) for x in (q, *others, layer.states))
        raise ValueError(
            f"q, k, v, tails (keys, values, updates) and states are {found}; the mosaic backend "
            "needs one dtype for all but the states, which are float32"
        )
    if len(rows.item_row) != len(rows.slot):
        return gated_delta_chunks(q, k, v, decay, beta, layer, rows)
    out, layer = gated_delta_decode(q, k, v, decay, beta, layer, rows)
    return out, states_at_page_ends(k, v, decay, beta, layer, rows)


def _refusal(problem: GatedDeltaProblem) -> str | None:
    return refusal(problem.key_dim, problem.value_dim, problem.page_size, problem.dtype)


def _run(problem: GatedDeltaProblem, *operands: Any) -> Any:
    del problem
    return gated_delta(*operands)


KERNEL = Kernel(
    "mosaic.gated_delta", "gated_delta", "mosaic", _refusal, _run, compute_capabilities=HOPPER
)
