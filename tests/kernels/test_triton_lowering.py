"""The triton kernels compile for Ampere, Ada and Hopper, and compute right in the interpreter, on a
machine without a GPU."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import batches
import jax
import jax.numpy as jnp
import pytest

from rjax.pallas_kernels.attention.spec import AttentionSpec

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

from rjax.pallas_kernels.attention.triton import api, pack  # noqa: E402

FP8 = jnp.float8_e4m3fn
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes a block, at most
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "uint8": "u8"}


@pytest.fixture
def compiled(stand_in_for_jax_triton, monkeypatch, tmp_path):
    """Compiles every launch for the targets in the list that it gives; gathers the PTX."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    targets, found = [], []

    def triton_call(
        *args,
        kernel,
        out_shape,
        grid,
        num_warps,
        num_stages,
        input_output_aliases=None,
        **constants,
    ):
        kinds = ["i32" if isinstance(a, int) else "*" + NAMES[a.dtype.name] for a in args]
        kinds += ["*" + NAMES[s.dtype.name] for s in out_shape]
        names = kernel.arg_names
        assert len(kinds) + len(constants) == len(names)
        assert all(1 <= n < 1 << 31 for n in grid)
        signature = dict(zip(names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
        aligned = {
            (i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds) if kind[0] == "*"
        }
        source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        for target in targets:
            result = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
            assert result.metadata.shared <= SHARED_MEMORY[target] - 1024
            found.append((target, result.asm["ptx"]))
        return tuple(jnp.zeros(s.shape, s.dtype) for s in out_shape)

    stand_in_for_jax_triton(triton_call)
    return targets, found


def compile_call(
    compiled,
    targets,
    N=8,
    K=2,
    H=128,
    S=64,
    tile_rows=16,
    dtype=jnp.bfloat16,
    per_head=(),
    kv_dtype=None,
    per_page=False,
    **options,
):
    """PTX of (attention, fusion) for each target; per_head: names of options of ones; options: of
    AttentionSpec."""
    compiled[0][:] = targets
    a = batches.make_arrays(
        batches.RELAY,
        N=N,
        K=K,
        H=H,
        S=S,
        tile_rows=tile_rows,
        split=128,
        sharing="on",
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    numbers = {name: jnp.ones(N) for name in per_head}
    if kv_dtype is not None:
        size = (a.k_pages.shape[0], K) if per_page else (K,)
        numbers |= {name: jnp.ones(size) for name in ("k_scales", "v_scales")}
    run = functools.partial(api.paged_attention, spec=AttentionSpec(0.1, **options), **numbers)
    packed = pack.pack_plan(a.plan, (N, K), 64 if 90 in targets else 16)
    jax.clear_caches()  # a trace that is known launches nothing
    jax.eval_shape(run, a.q, a.k_pages, a.v_pages, a.page_table, a.positions, packed)
    found = compiled[1]
    return list(zip(found[: len(targets)], found[len(targets) :], strict=True))


AMPERE, HOPPER = (80, 89), (90,)


def test_the_usual_shape(compiled):
    [(ampere, fusion)] = compile_call(compiled, (80,))
    assert "mma.sync" in ampere[1] and "wgmma" not in ampere[1]
    assert "cp.async" in ampere[1]
    for _, ptx in (ampere, fusion):
        assert not re.search(r"\s(atom|red)\.", ptx)
    compiled[1].clear()
    [(hopper, _)] = compile_call(compiled, HOPPER)
    assert "wgmma" in hopper[1] and "mma.sync" not in hopper[1]


@pytest.mark.parametrize("targets", [(89,), HOPPER], ids=["ampere", "hopper"])
@pytest.mark.parametrize(
    "change",
    [
        dict(N=14, H=64, S=16, dtype=jnp.float16),
        dict(N=16, K=1, H=256, soft_cap=30.0, sliding_window=9, per_head=("alibi_slopes", "sinks")),
        dict(H=80, kv_dtype=FP8, per_page=True, S=32),
    ],
    ids=["small", "large", "fp8"],
)
def test_some_shapes(compiled, targets, change):
    assert compile_call(compiled, targets, **change)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [AMPERE, HOPPER], ids=["ampere", "hopper"])
@pytest.mark.parametrize("H", [64, 80, 96, 112, 128, 192, 256])
def test_every_head_dim(compiled, targets, H):
    assert compile_call(compiled, targets, 9, 3, H, S=128, tile_rows=21)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [AMPERE, HOPPER], ids=["ampere", "hopper"])
@pytest.mark.parametrize(("N", "K"), [(8, 8), (8, 2), (10, 2), (14, 2), (16, 1)])
def test_every_group(compiled, targets, N, K):
    assert compile_call(compiled, targets, N, K, tile_rows=64 // (N // K))


@pytest.mark.slow
@pytest.mark.parametrize("targets", [AMPERE, HOPPER], ids=["ampere", "hopper"])
@pytest.mark.parametrize(("H", "dtype"), [(64, jnp.float16), (128, jnp.bfloat16)])
@pytest.mark.parametrize("S", [16, 32, 64, 128])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_every_page_size(compiled, targets, kv_dtype, S, H, dtype):
    assert compile_call(compiled, targets, S=S, H=H, dtype=dtype, kv_dtype=kv_dtype, per_page=True)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [AMPERE, HOPPER], ids=["ampere", "hopper"])
@pytest.mark.parametrize(
    "change",
    [
        dict(sliding_window=100),
        dict(soft_cap=30.0),
        dict(per_head=("alibi_slopes", "sinks")),
        dict(H=256, tile_rows=32, dtype=jnp.float16, soft_cap=50.0),
        dict(H=192, soft_cap=30.0, sliding_window=9, per_head=("alibi_slopes",)),
        dict(H=64, kv_dtype=FP8, soft_cap=30.0, sliding_window=9, per_head=("alibi_slopes",)),
    ],
)
def test_every_option(compiled, targets, change):
    assert compile_call(compiled, targets, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_dtype=jnp.float8_e5m2), "both must have"),
        (dict(dtype=jnp.float32), "bfloat16 and float16"),
        (dict(H=72), "head dim"),
        (dict(N=130, K=2, tile_rows=1), "query heads a KV head"),
    ],
)
def test_refusals(compiled, change, message):
    with pytest.raises(ValueError, match=message):
        compile_call(compiled, (80,), **change)


@pytest.mark.parametrize(
    "chosen",
    [
        "triton16 and (sinks or (test_sliding_window and relay-100) or test_soft_cap)",
        pytest.param("triton", marks=pytest.mark.slow),
    ],
)
def test_the_conformance_suite_interpreted(chosen):
    """Triton's own interpreter is chosen when a process starts."""
    suite = Path(__file__).with_name("test_attention_backends.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", chosen, suite],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout
