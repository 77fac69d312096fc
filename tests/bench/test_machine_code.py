"""Machine code of a step's kernels: found in lowered programs, told by the assembler."""

import functools
import struct

import jax
import jax.numpy as jnp
import pytest

from bench.machine_code import __main__ as machine_code
from bench.machine_code import assembler
from rjax.benchmarks.records import command, load
from rjax.pallas_kernels.gemm.split_k_gemm import split_k_gemm
from rjax.pallas_kernels.residual import add_rms_norm as norm

SAID = """\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 415 by compiler
ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'merge_kernel_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for merge_kernel_mosaic_gpu_kernel
    8 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
"""


def test_what_ptxas_says():
    assert assembler.what_ptxas_says(SAID) == {
        "kernel": "merge",
        "registers": 128,
        "spilled_bytes": 12,
        "notes": "C7513",
    }
    with pytest.raises(RuntimeError, match="no such file"):
        assembler.what_ptxas_says("ptxas fatal: no such file")


def test_the_size_of_code():
    """Sections of code count, others and their names do not."""
    sections = [("", 0), (".text.a", 640), (".data.text.", 99), (".text.b", 128), (".strtab", 0)]
    names, places = b"", []
    for name, _ in sections:
        places.append(len(names))
        names += name.encode() + b"\0"
    headers = [
        struct.pack("<IIQQQQ24x", place, 1, 0, 0, 64, size)
        for place, (_, size) in zip(places, sections, strict=True)
    ]
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64 + len(names))
    struct.pack_into("<HHH", header, 0x3A, len(headers[0]), len(headers), len(headers) - 1)
    assert assembler.code_bytes(bytes(header) + names + b"".join(headers)) == 768


def test_kernels_are_found_and_their_calls_counted():
    w = jnp.zeros((256, 256), jnp.bfloat16)
    add = jax.jit(functools.partial(norm.add_rms_norm, eps=1e-5))

    @jax.jit
    def layer(x):
        return add(x, split_k_gemm(x, w), jnp.ones(256, jnp.bfloat16))[0]

    def step(x):
        return add(layer(layer(x)), x, jnp.ones(256, jnp.bfloat16))

    x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    lowered = jax.jit(step).trace(x).lower(lowering_platforms=("cuda",))
    found = machine_code.kernels_of(lowered)
    # The norm of parts and the norm of a whole update are two kernels.
    assert sorted(calls for calls, _ in found) == [1, 2, 2]
    assert all(module.startswith(b"ML\xefR") for _, module in found)


def test_what_is_missing_is_said_in_one_line(tmp_path, capsys):
    assert machine_code.main([f"--plugin={tmp_path / 'none.so'}"]) == 1
    assert capsys.readouterr().err.startswith("bench.machine_code: JAX's CUDA plugin")


@pytest.mark.slow
def test_a_step_is_assembled(tmp_path):
    try:
        assembler.find_tools()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    path = tmp_path / "code.json"
    assert machine_code.main(["--shapes=qwen2.5-0.5b", "--batch=16", f"--json={path}"]) == 0
    rows = {row["kernel"]: row for row in load(path)["rows"]}
    assert rows["attention"]["calls"] == 24 and rows["attention"]["code_bytes"] > 10_000
    assert all(row["registers"] <= 255 for row in rows.values())
    assert all(row["lost_operands"] in (0, None) for row in rows.values())


def test_kept_commands_name_no_files_of_this_machine(monkeypatch):
    given = [
        "--batch=1",
        "--plugin",
        "/a/p.so",
        "--nvdisasm=/b/nvdisasm",
        "--ptxas",
        "/c",
        "--quiet",
    ]
    monkeypatch.setattr("sys.argv", ["machine_code.py", *given])
    kept = command("bench.machine_code")
    assert kept == "python -m bench.machine_code --batch=1 --quiet"
