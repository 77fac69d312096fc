"""Experts in plain JAX: one product for each tile of the work list."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from rjax.pallas_kernels.grouped_gemm.work_list import WorkList, make_work_list
from rjax.pallas_kernels.partial import Partial

type _Activation = Callable[[Float[Array, "R A I"]], Float[Array, "R I"]]
type _Widen = Callable[[Any], Float[Array, "E ..."]]


def experts(
    h: Float[Array, "T D"],
    chosen: Int[Array, "T X"],
    weights: Float32[Array, "T X"],
    up: Any,
    down: Any,
    activation: _Activation,
    up_bias: Float[Array, "J A I"] | None = None,
    down_bias: Float[Array, "J D"] | None = None,
    *,
    widen_up: _Widen = lambda up: up,
    widen_down: _Widen = lambda down: down,
    differentiable: bool = False,
    num_elsewhere: int = 0,
) -> Partial:
    """The sum over the chosen experts of weight * down(activation(up(h))), as one summand.

    Products and the sum are float32, the sum in the order of ``chosen``; the activated row is
    rounded to h's dtype. The result of a row does not depend on other rows.

    Args:
        h: rows.
        chosen: the experts of each row; J for none.
        weights: weights of the chosen experts' results.
        up, down: weights of all experts, [J, D, A, I] and [J, I, D]; or what is stored of them,
            arrays with J first.
        activation: function of the float32 products that gives the activated rows.
        up_bias, down_bias: biases of all experts, or None.
        widen_up, widen_down: functions from what is stored of one expert to its weight [D, A, I] or
            [I, D].
        differentiable: compute all tiles, also those without rows, so that gradients can be taken.
        num_elsewhere: experts of other devices, which compute the rest of the sum.
    """
    T, D = h.shape
    num_experts = jax.tree.leaves(up)[0].shape[0]
    work = make_work_list(chosen, num_experts, num_elsewhere=num_elsewhere)
    R = work.tile_rows
    rows = h[work.slot_row]

    def tile(i: Array) -> Float32[Array, "R D"]:
        expert = work.tile_expert[i]
        own = lax.dynamic_slice(rows, (i * R, 0), (R, D))
        of_up = widen_up(_of_expert(up, expert))
        both = _dot(own, of_up.reshape(D, -1)).reshape(R, *of_up.shape[1:])
        if up_bias is not None:
            both = both + lax.dynamic_index_in_dim(up_bias, expert, keepdims=False)
        hidden = activation(both).astype(h.dtype)
        result = _dot(hidden, widen_down(_of_expert(down, expert)))
        if down_bias is not None:
            result = result + lax.dynamic_index_in_dim(down_bias, expert, keepdims=False)
        return result

    def store(i: Array, out: Float32[Array, "S D"]) -> Float32[Array, "S D"]:
        return lax.dynamic_update_slice(out, tile(i), (i * R, 0))

    if differentiable:
        out = lax.map(tile, jnp.arange(work.tile_expert.shape[0])).reshape(-1, D)
    else:
        out = lax.fori_loop(0, _trips(work), store, jnp.zeros((len(rows), D), jnp.float32))
    # Pairs without an expert add zeros.
    each = jnp.take(out, work.pair_slot, axis=0, mode="fill", fill_value=0)
    total = jnp.zeros((T, D), jnp.float32)
    for i in range(chosen.shape[1]):
        total = total + weights[:, i, None] * each[:, i]
    return Partial(total[None], dtype=h.dtype)


def _of_expert(arrays: Any, expert: Array) -> Any:
    return jax.tree.map(
        lambda array: lax.dynamic_index_in_dim(array, expert, keepdims=False), arrays
    )


def _dot(a: Float[Array, "R D"], b: Float[Array, "D F"]) -> Float32[Array, "R F"]:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _trips(work: WorkList) -> Int[Array, ""]:
    """Tiles to compute: those with rows on the CPU; elsewhere all, so that no host waits."""
    most = work.tile_expert.shape[0]
    return jax.lax.platform_dependent(
        work.num_tiles[0], cpu=lambda n: n, default=lambda n: jnp.full_like(n, most)
    )
