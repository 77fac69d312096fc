"""The causal convolution of a decode step, on Hopper (Mosaic GPU): one token for each sequence.

A CTA computes one row's channels of one key head, a query, a key or a value at a time: it
multiplies the token's inputs and the X - 1 before it with the filters, applies silu, divides the
query and the key by their lengths, and moves the slot's last inputs on by one; those at the end of
a page are kept with its state. Bytes moved a row and key head: 2 * W * (X + 1) read, of which the
filters come from the L2 cache, and 2 * W * X written.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from rjax.pallas_kernels.gated_delta.base import GatedDeltaProblem
from rjax.pallas_kernels.gated_delta.page_rows import HEAD_DIM
from rjax.pallas_kernels.gated_delta.states import CARRIED, LayerStates, StateRows
from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.mosaic.emit import begin_kernel, store_strided

_LAYOUT = plgpu.Layout.WG_STRIDED((HEAD_DIM,), vec_size=1)


def conv_places(rows: StateRows, T: int) -> Int32[Array, "T 3"]:
    """(slot, page whose end is before, page that the row completes) of each row; slot -1 for
    padding.
    """
    sequence = jnp.asarray(rows.item_sequence)
    row = jnp.where(sequence >= 0, jnp.asarray(rows.item_row), T)
    of = jnp.maximum(sequence, 0)
    slot, before = jnp.asarray(rows.slot)[of], jnp.asarray(rows.conv_page)[of]
    place = jnp.stack([slot, before, jnp.asarray(rows.write_page)], 1)
    return jnp.full((T, 3), -1, jnp.int32).at[row].set(place.astype(jnp.int32), mode="drop")


def causal_conv_step(
    x: Float[Array, "T K W"],
    weight: Float[Array, "K X W"],
    layer: LayerStates,
    rows: StateRows,
) -> tuple[
    tuple[Float[Array, "T K H"], Float[Array, "T K H"], Float[Array, "T K G Y"]], LayerStates
]:
    """The queries, keys and values of rows of one token a sequence, and the states with their
    inputs; see `causal_conv` and `split_mixed` of ``base.py``. Padding rows get 0.

    Args:
        x, weight, layer: bfloat16 or float16, H = Y = 128. The last inputs are updated in place
            when donated.
    """
    (T, K, W), taps, dtype = x.shape, weight.shape[1], x.dtype
    G = W // HEAD_DIM - 2
    held = [jax.new_ref(layer.recent), jax.new_ref(layer.conv_ends)]

    def causal_conv_step_kernel(*refs):
        """GMEM: places [T, 3], x [T, K, W], weight [K, X, W], recent [slots, X - 1, K, W],
        conv_ends [P, X - 1, K, W], q, k [T, K, H], v [T, K, G, Y].
        """
        begin_kernel()
        places_, x_, weight_, recent_, ends_, q_, k_, v_ = refs
        row, head = lax.axis_index("row"), lax.axis_index("head")
        slot, before, page = (places_[row, i] for i in range(3))
        outputs = [q_.at[row, head], k_.at[row, head]]
        outputs += [v_.at[row, head, i] for i in range(G)]
        for i, output in enumerate(outputs):
            part = pl.ds(i * HEAD_DIM, HEAD_DIM)

            def read(ref):
                return plgpu.load(ref, layout=_LAYOUT)

            inputs = []
            for n in range(taps - 1):
                ended = read(ends_.at[jnp.maximum(before, 0), n, head, part])
                carried = read(recent_.at[jnp.maximum(slot, 0), n, head, part])
                known = jnp.where(before == CARRIED, carried, ended)
                inputs.append(jnp.where((before >= 0) | (before == CARRIED), known, 0))
            inputs.append(read(x_.at[row, head, part]))
            mixed = jnp.float32(0)
            for n, each in enumerate(inputs):
                filters = read(weight_.at[head, n, part])
                mixed = mixed + each.astype(jnp.float32) * filters.astype(jnp.float32)
            mixed = (mixed * jax.nn.sigmoid(mixed)).astype(dtype)
            if i < 2:
                wide = mixed.astype(jnp.float32)
                mixed = (wide * lax.rsqrt(jnp.sum(wide * wide) + 1e-6)).astype(dtype)
            store_strided(output, jnp.where(slot >= 0, mixed, 0), _LAYOUT)
            for target, held_ in ((slot, recent_), (page, ends_)):

                @pl.when(target >= 0)
                def _store(target=target, held_=held_, part=part, inputs=inputs):
                    for n, each in enumerate(inputs[1:]):
                        store_strided(held_.at[target, n, head, part], each, _LAYOUT)

    of_head = jax.ShapeDtypeStruct((T, K, HEAD_DIM), dtype)
    found = plgpu.kernel(
        causal_conv_step_kernel,
        out_type=(of_head, of_head, jax.ShapeDtypeStruct((T, K, G, HEAD_DIM), dtype)),
        grid=(T, K),
        grid_names=("row", "head"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(conv_places(rows, T), x, weight, *held)
    recent, ends = (jax.freeze(each) for each in held)
    return found, dataclasses.replace(layer, recent=recent, conv_ends=ends)


def refusal(problem: GatedDeltaProblem) -> str | None:
    """Why the kernel cannot take the problem, or None."""
    if jnp.dtype(problem.dtype).itemsize != 2:
        return f"inputs are {problem.dtype}; the mosaic backend takes bfloat16 and float16"
    if (problem.key_dim, problem.value_dim) != (HEAD_DIM, HEAD_DIM):
        return (
            f"keys of {problem.key_dim} and values of {problem.value_dim} elements; the mosaic "
            f"backend takes {HEAD_DIM} of both"
        )
    if not problem.decodes:
        return "several rows of a sequence; the kernel takes steps of one row each"
    return None


def _run(problem: GatedDeltaProblem, *operands: Any) -> Any:
    del problem
    return causal_conv_step(*operands)


KERNEL = Kernel(
    "mosaic.causal_conv_step", "causal_conv", "mosaic", refusal, _run, compute_capabilities=HOPPER
)
