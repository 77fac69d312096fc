"""One suite for every attention backend: against float32 attention, with NaN wherever unused."""

import dataclasses
import functools
import itertools
import os

import batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.pallas_kernels.attention import mosaic, xla
from rjax.pallas_kernels.attention.options import check_per_head
from rjax.pallas_kernels.attention.plan.host import Sharing
from rjax.pallas_kernels.attention.reference import paged_attention_reference
from rjax.pallas_kernels.attention.spec import AttentionSpec


def triton_attention(q, k_pages, v_pages, page_table, positions, plan, small_m=None, **options):
    """Also with blocks of 16 rows, as on Ampere and Ada."""
    pytest.importorskip("jax_triton", exc_type=ImportError)
    from rjax.pallas_kernels.attention.triton import api, pack

    packed = pack.pack_plan(plan, (q.shape[1], k_pages.shape[1]), small_m)
    return api.paged_attention(q, k_pages, v_pages, page_table, positions, packed, **options)


triton_as_on_ampere = functools.partial(triton_attention, small_m=16)
BACKENDS = [
    pytest.param((xla.paged_attention, jnp.float32, 2e-5), id="xla"),
    pytest.param((mosaic.paged_attention, jnp.bfloat16, 8e-3), id="mosaic", marks=pytest.mark.gpu),
    pytest.param((triton_attention, jnp.bfloat16, 8e-3), id="triton", marks=pytest.mark.gpu),
    pytest.param((triton_as_on_ampere, jnp.bfloat16, 8e-3), id="triton16", marks=pytest.mark.gpu),
]
BATCHES = {"decode": batches.DECODE, "relay": batches.RELAY, "chunks": batches.CHUNKS}
# (N, K, H, S, tile_rows, split)
SHAPES = [
    (8, 8, 64, 64, 32, 64),
    (6, 2, 128, 32, 16, 128),
    (8, 2, 64, 16, 16, 64),
    (8, 2, 128, 64, 32, 128),
    (14, 2, 64, 64, 9, 64),
    (16, 2, 128, 64, 16, 192),
    (16, 1, 64, 128, 4, 128),
    (9, 3, 128, 64, 8, 64),
]


@pytest.fixture(params=BACKENDS)
def backend(request):
    attention, dtype, tolerance = request.param
    if dtype == jnp.bfloat16 and jax.default_backend() != "gpu":
        if attention is mosaic.paged_attention or not os.environ.get("TRITON_INTERPRET"):
            pytest.skip("needs an NVIDIA GPU")
        request.getfixturevalue("triton_interpreter")
        return attention, jnp.float16, tolerance  # the interpreter has no bfloat16
    return request.param


def into_nan(attention, q):
    """``attention``, compiled, with results that take the memory of arrays of NaN."""

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def into(spare, *args):
        return attention(*args)

    def run(*args):
        spare = (jnp.full(q.shape, jnp.nan, q.dtype), jnp.full(q.shape[:2], jnp.nan, jnp.float32))
        places = [x.unsafe_buffer_pointer() for x in spare]
        results = into(spare, *args)
        assert [x.unsafe_buffer_pointer() for x in results] == places
        return results

    return run


def check(backend, name, shape, spec, sharing: Sharing = "on", fp8=None, **options):
    """``fp8``: "head" or "page" for what has a scale, None for pages of the queries' dtype."""
    attention, dtype, tolerance = backend
    N, K, H, S, tile_rows, split = shape
    if attention in (triton_attention, triton_as_on_ampere) and H > 256:
        pytest.skip("triton takes head dims of up to 256")
    a = batches.make_arrays(
        BATCHES[name],
        N=N,
        K=K,
        H=H,
        S=S,
        tile_rows=tile_rows,
        split=split,
        sharing=sharing,
        dtype=dtype,
        kv_dtype=fp8 and jnp.float8_e4m3fn,
    )
    if fp8:
        size = (K,) if fp8 == "head" else (a.k_pages.shape[0], K)
        scales = np.random.default_rng(5).uniform(0.3, 2, (2, *size)).astype(np.float32)
        options |= dict(k_scales=jnp.asarray(scales[0]), v_scales=jnp.asarray(scales[1]))
    run = into_nan(functools.partial(attention, spec=spec, **options), a.q)
    args = (a.q, a.k_pages, a.v_pages, a.page_table, a.positions, a.plan)
    out, lse = run(*args)
    reference = jax.jit(functools.partial(paged_attention_reference, spec=spec, **options))
    want, want_lse = reference(a.q, a.k_pages, a.v_pages, a.row_table, a.positions)
    assert out.dtype == a.q.dtype
    assert lse.dtype == jnp.float32
    error = jnp.linalg.norm(out.astype(jnp.float32) - want) / jnp.linalg.norm(want)
    assert float(error) < tolerance
    # Sums of float8 products keep about 14 bits on the tensor cores of Hopper.
    close = 2e-5 if dtype == jnp.float32 else 1e-2 if fp8 else 2e-3
    np.testing.assert_allclose(lse, want_lse, atol=close)
    padding = np.asarray(a.positions) < 0
    assert not np.asarray(out, np.float32)[padding].any()
    assert np.isneginf(np.asarray(lse)[padding]).all()
    again, lse_again = run(*args)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(again, np.float32))
    np.testing.assert_array_equal(lse, lse_again)
    return np.asarray(out, np.float32), np.asarray(lse)


CASES = [
    *(("relay", shape) for shape in SHAPES),
    *(("chunks", shape) for shape in SHAPES[1::2]),
    *(("decode", shape) for shape in SHAPES[::3]),
]


@pytest.mark.sample(3, 3)
@pytest.mark.parametrize(
    ("name", "shape"), CASES, ids=["{}-N{}K{}H{}S{}R{}C{}".format(n, *s) for n, s in CASES]
)
def test_against_reference(backend, name, shape):
    check(backend, name, shape, AttentionSpec(shape[2] ** -0.5))


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize(
    ("name", "window", "shape"),
    [
        ("relay", 1, SHAPES[3]),
        ("relay", 100, SHAPES[3]),
        ("chunks", 40, SHAPES[3]),
        ("relay", 100, SHAPES[6]),
    ],
)
def test_sliding_window(backend, name, window, shape):
    check(backend, name, shape, AttentionSpec(0.1, sliding_window=window))


def test_soft_cap(backend):
    """A cap well below the largest scores."""
    check(backend, "relay", SHAPES[3], AttentionSpec(0.3, soft_cap=2.0))


def alibi_slopes(N):
    """Those of the paper for a power of two, and one head without."""
    return jnp.asarray(2.0 ** (-8 * np.arange(1, N + 1) / N), jnp.float32).at[0].set(0)


def test_alibi(backend):
    N, H = SHAPES[7][0], SHAPES[7][2]
    check(backend, "relay", SHAPES[7], AttentionSpec(H**-0.5), alibi_slopes=alibi_slopes(N))


def test_sinks(backend):
    """Sinks that take nearly nothing, about half, and nearly all."""
    sinks = jnp.linspace(-20, 20, 8, dtype=jnp.float32)
    check(backend, "relay", SHAPES[3], AttentionSpec(0.1), sinks=sinks)


def test_options_together(backend):
    spec = AttentionSpec(0.3, sliding_window=70, soft_cap=5.0)
    sinks = jnp.linspace(-3, 6, 8, dtype=jnp.float32)
    check(backend, "chunks", SHAPES[3], spec, alibi_slopes=alibi_slopes(8), sinks=sinks)


@pytest.mark.parametrize("attention", [xla.paged_attention, mosaic.paged_attention])
@pytest.mark.parametrize("option", ["alibi_slopes", "sinks"])
def test_options_of_the_wrong_kind(attention, option):
    a = batches.make_arrays(
        batches.DECODE, N=8, K=2, H=64, S=64, tile_rows=8, split=64, sharing="on", dtype=jnp.float16
    )
    args = (a.q, a.k_pages, a.v_pages, a.page_table, a.positions, a.plan, AttentionSpec(0.1))
    with pytest.raises(ValueError, match=option):
        attention(*args, **{option: jnp.zeros(8, jnp.float16)})
    with pytest.raises(ValueError, match=option):
        check_per_head(8, **{option: jnp.zeros(7)})


@pytest.mark.sample(2, 2)
@pytest.mark.parametrize(
    ("name", "shape", "fp8"),
    [
        ("relay", SHAPES[3], "head"),
        ("chunks", SHAPES[4], "page"),
        ("decode", SHAPES[6], "head"),
        ("decode", (8, 2, 128, 64, 16, 128), "head"),
        ("relay", (6, 2, 96, 32, 16, 128), "page"),
        ("relay", (8, 2, 256, 64, 32, 128), "head"),
        ("relay", (16, 2, 512, 64, 8, 128), "head"),
        ("chunks", (16, 1, 512, 32, 4, 128), "page"),
        ("relay", (16, 1, 192, 64, 4, 128), "page"),
    ],
)
def test_fp8_pages(backend, name, shape, fp8):
    """On mosaic, pages of 32 and of 64 tokens read their scales differently, and a head dim of 96
    has no swap-AB decode."""
    check(backend, name, shape, AttentionSpec(0.1), fp8=fp8)


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("relay", (9, 3, 80, 32, 42, 128)),
        ("decode", (4, 4, 96, 64, 8, 192)),
        ("chunks", (8, 2, 112, 64, 32, 128)),
        ("relay", (8, 2, 192, 16, 32, 128)),
        ("chunks", (8, 2, 256, 64, 32, 128)),
        ("relay", (16, 2, 512, 64, 8, 128)),
        ("chunks", (16, 2, 512, 64, 8, 128)),
        ("decode", (16, 1, 512, 16, 4, 128)),
        ("chunks", (34, 2, 512, 128, 3, 128)),
    ],
)
def test_other_head_dims(backend, name, shape):
    """On mosaic: narrow swizzles for 80, 96 and 112, one KV tile at a time for 192 and 256, split
    heads for 512."""
    check(backend, name, shape, AttentionSpec(shape[2] ** -0.5))


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize(
    ("shape", "fp8", "options"),
    [
        ((8, 2, 128, 64, 16, 128), None, {}),
        ((8, 2, 128, 64, 32, 128), None, {}),
        ((14, 2, 64, 16, 16, 64), None, {"soft_cap": 30.0, "sliding_window": 100}),
        ((8, 2, 128, 64, 16, 128), "head", {}),
        ((8, 2, 128, 32, 32, 128), "page", {}),
        ((8, 2, 256, 64, 32, 128), "page", {}),
        ((16, 2, 512, 64, 8, 128), None, {}),
        ((16, 1, 512, 16, 4, 128), None, {"soft_cap": 30.0, "sliding_window": 100}),
        ((16, 2, 512, 64, 8, 128), "page", {}),
    ],
)
def test_sharing_changes_no_bit(backend, shape, fp8, options):
    """KV splits are the same with sharing on and off, and so is the arithmetic of a row.

    On mosaic, 32 rows of 4 heads are cooperative work tiles, of 512 dims split heads; single rows
    run swap-AB decode.
    """
    spec = AttentionSpec(min(0.1, shape[2] ** -0.5), **options)
    on = check(backend, "relay", shape, spec, fp8=fp8)
    off = check(backend, "relay", shape, spec, sharing="off", fp8=fp8)
    if backend[0] is triton_as_on_ampere and not os.environ.get("DISABLE_MMA_V3"):
        np.testing.assert_allclose(on[0], off[0], atol=2e-2)  # Hopper's wide blocks: wgmma
    elif backend[1] != jnp.float32:
        np.testing.assert_array_equal(on[0], off[0])
        np.testing.assert_array_equal(on[1], off[1])
    else:  # XLA on a CPU picks its own order of summation by shape
        np.testing.assert_allclose(on[0], off[0], atol=2e-6)


@pytest.mark.parametrize("num_ctas", [1, 5])
@pytest.mark.parametrize(("H", "tile_rows"), [(128, 16), (128, 32), (512, 16)])
@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
def test_many_work_tiles_a_cta(backend, H, tile_rows, num_ctas):
    """Few CTAs compute all work tiles, so that short and long ones follow each other directly:
    stale data in shared memory must not reach the next work tile, on any of several runs."""
    attention, dtype, tolerance = backend
    if attention is not mosaic.paged_attention and H > 256:
        pytest.skip("triton takes head dims of up to 256")
    own = tuple(int(x) for x in np.random.default_rng(0).integers(1, 200, 48))
    batch = batches.Batch(shared=1024, members=(32, 16), own=own, queries=(1,) * 48)
    a = batches.make_arrays(
        batch,
        N=8,
        K=2,
        H=H,
        S=64,
        tile_rows=tile_rows,
        split=128,
        sharing="on",
        dtype=dtype,
    )
    spec = AttentionSpec(0.1)
    run = jax.jit(functools.partial(attention, spec=spec, num_ctas=num_ctas))
    args = (a.q, a.k_pages, a.v_pages, a.page_table, a.positions, a.plan)
    results = [jax.device_get(run(*args)) for _ in range(8)]
    want, _ = paged_attention_reference(a.q, a.k_pages, a.v_pages, a.row_table, a.positions, spec)
    for out, lse in results:
        out = np.asarray(out, np.float32)
        assert np.linalg.norm(out - want) / np.linalg.norm(want) < tolerance
        np.testing.assert_array_equal(out, np.asarray(results[0][0], np.float32))
        np.testing.assert_array_equal(lse, results[0][1])


@pytest.mark.gpu
@pytest.mark.parametrize("S", [16, 64, 128])
def test_the_tile_schedule_changes_no_bit(S):
    """Odd CTAs backwards, and a last round that starts from either end."""
    own = tuple(int(x) for x in np.random.default_rng(1).integers(1, 200, 24))
    batch = batches.Batch(shared=512, members=(20, 4), own=own, queries=(1,) * 24)
    a = batches.make_arrays(
        batch, N=8, K=2, H=128, S=S, tile_rows=32, split=128, sharing="on", dtype=jnp.bfloat16
    )
    packed = mosaic.pack_plan(a.plan, a.positions, (8, 2, 128))
    assert isinstance(packed, mosaic.PackedPlan)
    run = jax.jit(functools.partial(mosaic.paged_attention, spec=AttentionSpec(0.1), num_ctas=7))
    results = []
    assert int(packed.num_tiles) % 7
    for reverse, cooperative in itertools.product(range(2), (0, packed.num_tiles)):
        schedule = {"reverse_odd_ctas": reverse, "num_cooperative": cooperative}
        plan = dataclasses.replace(packed, **{k: jnp.int32(v) for k, v in schedule.items()})
        results.append(run(a.q, a.k_pages, a.v_pages, a.page_table, a.positions, plan))
    assert not int(packed.reverse_odd_ctas)
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(same, np.float32))
