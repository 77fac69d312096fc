"""Every shipped shape of the mosaic kernels lowers for CUDA on a machine without a GPU."""

import functools

import batches
import jax
import jax.numpy as jnp
import pytest

from rjax.pallas_kernels.attention import mosaic
from rjax.pallas_kernels.attention.mosaic import config
from rjax.pallas_kernels.attention.spec import AttentionSpec
from tests.crossed import crossed

FP8 = jnp.float8_e4m3fn


def lower(
    N=8,
    K=2,
    H=128,
    S=64,
    tile_rows=16,
    split=128,
    dtype=jnp.bfloat16,
    per_head=(),
    kv_dtype=None,
    per_page=False,
    batch=batches.RELAY,
    **options,
):
    """Text of the lowered call; per_head: names of options of ones; options: of AttentionSpec."""
    a = batches.make_arrays(
        batch,
        N=N,
        K=K,
        H=H,
        S=S,
        tile_rows=tile_rows,
        split=split,
        sharing="on",
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    run = functools.partial(mosaic.paged_attention, spec=AttentionSpec(0.1, **options))
    numbers = {name: jnp.ones(N) for name in per_head}
    if kv_dtype is not None:
        size = (a.k_pages.shape[0], K) if per_page else (K,)
        numbers |= {name: jnp.ones(size) for name in ("k_scales", "v_scales")}
    # Leaves, not the plan: the checked dataclass refuses the tracing API's stand-ins.
    leaves, tree = jax.tree.flatten((a.q, a.k_pages, a.v_pages, a.page_table, a.positions, a.plan))
    traced = jax.jit(lambda *leaves: run(*tree.unflatten(leaves), **numbers)).trace(*leaves)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


GROUPS = [(8, 8, 64), (8, 8, 128), (8, 2, 16), (8, 2, 32), (14, 2, 9), (16, 2, 16), (16, 1, 8)]


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize(("group", "H"), crossed(GROUPS, [64, 128], 2))
def test_group_sizes(group, H):
    N, K, tile_rows = group
    assert "mosaic_gpu" in lower(N, K, H, tile_rows=tile_rows)


ODD_GROUPS = [(4, 4, 1), (8, 8, 128), (9, 3, 42), (8, 2, 16), (14, 2, 18)]


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize(("group", "H"), crossed(ODD_GROUPS, [80, 96, 112, 192, 256], 5))
def test_other_head_dims(group, H):
    """With groups of 1, 3 and 7 the queries of an item are no multiple of 128 bytes."""
    N, K, tile_rows = group
    assert "mosaic_gpu" in lower(N, K, H, tile_rows=tile_rows)


SPLIT_HEADS = [(8, 1, 8), (16, 1, 4), (16, 2, 8), (6, 2, 21), (64, 1, 1)]


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize(("group", "S"), crossed(SPLIT_HEADS, [64, 16, 128], 2))
def test_split_heads(group, S):
    """Heads of 512 dims; a group of 64 heads has no swap-AB decode."""
    N, K, tile_rows = group
    assert "mosaic_gpu" in lower(N, K, 512, S, tile_rows=tile_rows)


@pytest.mark.thorough
def test_long_prompts():
    """Of more than a thousand rows."""
    prompt = batches.Batch(shared=0, members=(1,), own=(1100,), queries=(1100,))
    assert "mosaic_gpu" in lower(tile_rows=32, batch=prompt)


def test_stages_in_shared_memory():
    assert [config.num_q_stages(H) for H in (64, 128, 192)] == [2, 2, 1]
    assert [config.num_kv_stages(128, 64, q_stages, 2) for q_stages in (1, 2)] == [6, 5]
    assert config.num_kv_stages(128, 64, 2, 1) == 8  # beside two converted V tiles
    # K and V of a step take four.
    assert [config.num_kv_stages(512, 64, 1, itemsize) for itemsize in (2, 1)] == [5, 6]


@pytest.mark.thorough
def test_where_swap_ab_applies():
    assert [config.swap_ab_columns(G, 128) for G in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 0]
    without = [H for H in config.HEAD_DIMS if not config.swap_ab_columns(4, H)]
    assert without == [80, 96, 112]
    # Sixteen columns, and a group of one head more.
    assert "mosaic_gpu" in lower(16, 1, 256, tile_rows=4)
    assert "mosaic_gpu" in lower(16, 1, 64, tile_rows=4, kv_dtype=FP8)
    assert "mosaic_gpu" in lower(17, 1, 64, tile_rows=3)


@pytest.mark.sample(1, 0)
@pytest.mark.parametrize("S", [16, 32, 128])
def test_page_sizes(S):
    assert "mosaic_gpu" in lower(S=S, H=128)


@pytest.mark.thorough
def test_options_and_float16():
    assert "mosaic_gpu" in lower(sliding_window=100)
    assert "mosaic_gpu" in lower(soft_cap=30.0)
    assert "mosaic_gpu" in lower(per_head=("alibi_slopes", "sinks"))
    assert "mosaic_gpu" in lower(H=256, tile_rows=32, dtype=jnp.float16, soft_cap=50.0)
    assert "mosaic_gpu" in lower(soft_cap=30.0, sliding_window=9, per_head=("alibi_slopes",))
    assert "mosaic_gpu" in lower(dtype=jnp.float16)


FP8_FORMS = [
    dict(tile_rows=32, S=16, dtype=jnp.float16),
    dict(per_page=True),
    dict(per_page=True, tile_rows=32, S=32),
]


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize(("form", "H"), crossed(FP8_FORMS, [64, 96, 128, 192, 256, 512], 3))
def test_fp8_pages(form, H):
    rows = 16 if H == 512 else form.get("tile_rows", 16)
    assert "mosaic_gpu" in lower(H=H, kv_dtype=FP8, **form | dict(tile_rows=rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_dtype=FP8, H=80), "head dim"),
        (dict(kv_dtype=jnp.float8_e5m2), "both must have"),
        (dict(dtype=jnp.float32), "bfloat16 and float16"),
        (dict(tile_rows=64), "matrix rows"),
        (dict(tile_rows=17, H=512), "64 for split heads"),
        (dict(H=32), "head dim"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        lower(**change)
