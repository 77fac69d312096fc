"""States at the ends of the pages that a decode step completes, on Hopper (Mosaic GPU).

A CTA handles 64 of the Y columns of one value head of one item: it reads what `intra_chunk_states`
found of the page (TMA) and the state before it, and writes the state after it. Bytes moved per item
and value head: 4 * S * (2 * H + Y) read and 8 * H * Y of states.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from rjax.pallas_kernels.gated_delta.intra_chunk import ChunkOutputs
from rjax.pallas_kernels.gated_delta.state_step import (
    BLOCK_Y,
    PARAMETERS,
    Place,
    copy_page,
    first_state,
    next_state,
    stage_refs,
    stages,
    store_transposed,
)
from rjax.pallas_kernels.gated_delta.states import LayerStates
from rjax.pallas_kernels.mosaic.emit import begin_kernel, num_sms


def states_after_pages(
    items: Int32[Array, "I 6"],
    count: Int32[Array, " 1"],
    chunks: ChunkOutputs,
    layer: LayerStates,
) -> LayerStates:
    """The states with those after the pages of the first ``count`` items, from their own states.

    There is a CTA for each SM; CTAs without an item end at once. The bits are those of
    `inter_chunk`. Arguments as there, with ``chunks`` of `intra_chunk_states`.
    """
    num_items, K, G, _, Y = chunks.own.shape
    blocks = Y // BLOCK_Y
    given = [x for x in chunks if x is not None]
    heads = K * G * blocks
    ctas = min(num_sms(), num_items * heads)
    states_ref = jax.new_ref(layer.states)

    def states_after_pages_kernel(items_, count_, *refs, full, **smem):
        """GMEM: items [I, 6], count [1], the arrays of ``chunks``, states [P, K, G, H, Y]. SMEM as
        `stages`. Barrier: full.
        """
        begin_kernel()
        *given_, states = refs
        chunks_, cta = ChunkOutputs._make([*given_, None, None]), lax.axis_index("cta")

        def compute(i, _):
            unit = cta + i * ctas
            item, rest = lax.div(unit, jnp.int32(heads)), lax.rem(unit, jnp.int32(heads))
            place = Place(lax.div(rest, jnp.int32(blocks)), lax.rem(rest, jnp.int32(blocks)), G)
            copy_page(chunks_, item, place, smem, 0, full)
            of_states = functools.partial(place.of_state, states)
            state = first_state(of_states, items_[item, 4])
            plgpu.barrier_wait(full.at[0])
            state, _ = next_state(stage_refs(smem, 0), state)
            store_transposed(of_states(items_[item, 5]), state)
            plgpu.commit_smem()  # all threads have read it

        units = count_[0] * heads - cta + ctas - 1
        lax.fori_loop(0, lax.div(units, jnp.int32(ctas)), compute, None)

    plgpu.kernel(
        states_after_pages_kernel,
        scratch_types=stages(chunks, 1)
        | dict(full=plgpu.Barrier(num_barriers=1, num_arrivals=len(given))),
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=PARAMETERS,
    )(items, count, *given, states_ref)
    return dataclasses.replace(layer, states=jax.freeze(states_ref))
