"""Relay fusion that quantises the rows it merges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_rows import normal

from rjax.pallas_kernels.attention.relay_fusion.mosaic import merge_rows
from rjax.pallas_kernels.attention.relay_fusion.reference import relay_fusion_reference
from rjax.pallas_kernels.gemm.few_bits import quantised_rows
from rjax.pallas_kernels.gemm.few_bits.merge_quantise import merge_quantise, refusal
from rjax.pallas_kernels.pending import UnmergedAttention

HEADS = [(32, 128), (16, 128), (14, 64), (16, 80)]
ENTRIES = (7, 1, 0, 20, 3)  # partial results of each row


def unmerged(N: int, H: int) -> UnmergedAttention:
    """Rows with one result hold it; other entries and rows hold NaN where nothing may read."""
    T, total = len(ENTRIES), sum(ENTRIES)
    single = jnp.asarray(ENTRIES)[:, None, None] == 1
    return UnmergedAttention(
        jnp.where(single, normal(T, N, H, seed=1), jnp.nan),
        normal(total + 9, N, H, seed=2).at[total:].set(jnp.nan),
        normal(total + 9, N, dtype=jnp.float32, seed=3, scale=3.0).at[total:].set(jnp.nan),
        jnp.asarray(np.cumsum((0, *ENTRIES)), jnp.int32),
    )


def wanted(attention: UnmergedAttention) -> np.ndarray:
    """The merged rows in float32."""
    rows, start = [], 0
    for row, count in enumerate(ENTRIES):
        chosen = slice(start, start + count)
        start += count
        if count < 2:
            rows.append(np.asarray(attention.out[row], np.float32) * count if count else 0.0)
            continue
        outs = attention.partial_out[chosen, None].astype(jnp.float32)
        rows.append(relay_fusion_reference(outs, attention.partial_lse[chosen, None])[0][0])
    return np.stack([np.broadcast_to(row, attention.shape[1:]) for row in rows])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("N", "H"), HEADS)
def test_the_kernel_lowers(N, H):
    shapes = jax.eval_shape(lambda: unmerged(N, H))
    traced = jax.jit(merge_quantise).trace(shapes)
    traced.lower(lowering_platforms=("cuda",))
    assert traced.out_info.shape == (len(ENTRIES), N * H)


@pytest.mark.parametrize(
    ("width", "dtype", "found"),
    [
        (4096, jnp.float32, "float32"),
        (64 * 3, jnp.bfloat16, "multiples of 128"),
        (64 * 128, jnp.bfloat16, "at most 4096"),
    ],
)
def test_what_the_kernel_does_not_take(width, dtype, found):
    assert refusal(4096, jnp.bfloat16) is None
    assert found in (refusal(width, dtype) or "")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("N", "H"), HEADS)
def test_it_has_the_bits_of_separate_kernels(N, H):
    attention = unmerged(N, H)
    merged = jax.jit(merge_rows)(attention)
    error = np.abs(np.asarray(merged, np.float32) - wanted(attention)).max()
    assert error < 0.02  # rounded to bfloat16
    want = jax.jit(quantised_rows.quantise_rows)(merged.reshape(len(ENTRIES), -1))
    found = jax.jit(merge_quantise)(attention)
    for a, b in zip(
        (found.values, found.scale[:, :5]), (want.values, want.scale[:, :5]), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
