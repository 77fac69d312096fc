"""Programs on disk: a start neither traces nor compiles what an earlier one kept."""

import dataclasses
import json
import logging
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from rjax.models.layers.linear import Linear
from rjax.models.schemes import UNQUANTISED, Unquantised
from rjax.models.sharding import single_device_mesh
from rjax.pallas_kernels import kernel as kernels
from rjax.sampling import SamplingParams
from rjax.worker import trusted_files, worker
from rjax.worker.programs import cache, source
from rjax.worker.programs.cache import ProgramStore, keep_compiled, open_store, without_cache
from rjax.worker.trusted_files import distrust

from .tiny import make_engine, run

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=6),
    "random": SamplingParams(temperature=0.8, seed=1, max_tokens=6, logprobs=2),
}
THIS = {"source": "this"}
REQUESTS = [(name, [5, 6, 7], params) for name, params in PARAMS.items()]


@pytest.fixture
def mesh() -> Mesh:
    return single_device_mesh()


@pytest.fixture
def store(tmp_path, mesh) -> ProgramStore:
    return ProgramStore(tmp_path / "programs", THIS, mesh)


def program(value: float) -> jax.stages.Compiled:
    @jax.tree_util.Partial
    def scaled(state: dict[str, jax.Array], x: jax.Array) -> dict[str, Any]:
        return {"state": state["x"] + x * value}

    lowered = jax.jit(scaled, donate_argnums=0).lower({"x": jnp.zeros(3)}, np.ones(3))
    with without_cache():
        return lowered.compile()


def result(found: jax.stages.Compiled | None) -> list[float]:
    assert found is not None
    return found({"x": jnp.zeros(3)}, np.ones(3))["state"].tolist()


def files(store: ProgramStore) -> list[pathlib.Path]:
    return sorted(store.folder.iterdir())


def test_a_program_comes_back_for_its_key_and_identity(store, tmp_path, mesh):
    assert store.load(("step", 2)) is None
    store.save(("step", 2), program(2))
    store.save(("step", 3), program(3))
    assert result(store.load(("step", 2))) == [2] * 3
    assert result(store.load(("step", 3))) == [3] * 3
    assert store.load(("step", 4)) is None
    assert ProgramStore(tmp_path / "programs", {"source": "other"}, mesh).load(("step", 2)) is None
    assert result(ProgramStore(tmp_path / "programs", THIS, mesh).load(("step", 2))) == [2] * 3
    assert (tmp_path / "programs").stat().st_mode & 0o77 == 0  # a program is code


@pytest.mark.parametrize("left", [0, 10, 40, -1])
def test_a_damaged_file_is_deleted(store, left):
    store.save("a", program(2))
    [file] = files(store)
    file.write_bytes(file.read_bytes()[:left])
    assert store.load("a") is None
    assert not files(store)
    store.save("a", program(2))
    assert result(store.load("a")) == [2] * 3


def test_a_program_that_xla_refuses_is_deleted(store, monkeypatch):
    def refuse(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("another driver")

    store.save("a", program(2))
    monkeypatch.setattr(cache, "deserialize_and_load", refuse)
    assert store.load("a") is None
    assert not files(store)


def test_a_folder_that_cannot_be_written_is_named_once(tmp_path, mesh, caplog):
    (tmp_path / "file").write_text("in the way")
    store = ProgramStore(tmp_path / "file" / "programs", THIS, mesh)
    with caplog.at_level(logging.WARNING, "rjax"):
        store.save("a", program(2))
        store.save("b", program(3))
    assert [record.message for record in caplog.records] == [
        f"compiled programs are not kept: [Errno 20] Not a directory: '{store.folder}'"
    ]
    assert store.load("a") is None


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_could_have_written_does_not_run(what, store, monkeypatch, caplog):
    store.save("a", program(2))
    [file] = files(store)
    (store.folder if what == "folder" else file).chmod(0o777)
    monkeypatch.setattr(cache, "deserialize_and_load", _must_not_run)
    kept = file.read_bytes()
    for _ in range(2):
        assert store.load("a") is None
        store.save("b", program(3))
    assert files(store) == [file]
    assert file.read_bytes() == kept
    [record] = caplog.records
    assert record.message.startswith(f"compiled programs in {store.folder} are neither read nor")


def _must_not_run(*_: object) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("owner", "mode", "reason"),
    [
        (4321, 0o40755, None),
        (4321, 0o40775, None),  # of the group that Kubernetes gives a volume
        (0, 0o40755, None),
        (4322, 0o40755, "belongs to user 4322"),
        (4322, 0o100600, "belongs to user 4322"),
        (4321, 0o40777, "every user can write"),
        (0, 0o41777, "every user can write"),
        (4321, 0o100666, "every user can write"),
    ],
)
def test_owners_and_writers_are_trusted(owner, mode, reason, monkeypatch):
    monkeypatch.setattr(trusted_files.os, "geteuid", lambda: 4321)
    found = distrust(os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0)))
    assert found is None if reason is None else reason in str(found)


def test_a_cache_folder_that_others_can_write_is_not_used(tmp_path):
    tmp_path.chmod(0o777)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with pytest.warns(UserWarning, match="every user can write there.*compilation_cache_dir"):
            keep_compiled(str(tmp_path))
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_disk_that_fills_up_leaves_nothing_behind(store, monkeypatch, caplog):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    store.save("a", program(2))
    assert not files(store)
    assert "No space left on device" in caplog.text


def test_what_was_used_last_is_kept(store, monkeypatch):
    store.save("old", program(1))
    [size] = [file.stat().st_size for file in files(store)]
    monkeypatch.setattr(cache, "_MAX_BYTES", int(2.5 * size))
    store.save("new", program(2))
    for age, key in enumerate(("new", "old")):
        cache.os.utime(store._path(key), (1000 + age, 1000 + age))
    assert result(store.load("new")) == [2] * 3  # now used last
    store.save("newest", program(3))
    assert store.load("old") is None
    assert result(store.load("new")) == [2] * 3
    assert result(store.load("newest")) == [3] * 3


def identity_of(engine: Any, **other: Any) -> str | None:
    programs = engine._worker._runner.programs
    graph, _ = programs._programs._model
    given = {"graph": graph, "backend": engine._worker._backend, "arguments": programs.arguments}
    identity = source.program_identity(**(given | other))
    return None if identity is None else json.dumps(identity)


def test_the_identity_changes_with_what_programs_depend_on(tiny, monkeypatch):
    engine = make_engine(tiny)
    first = identity_of(engine)
    assert first is not None
    assert identity_of(make_engine(tiny)) == first
    found = {first}

    def differs(**other: Any) -> None:
        assert identity_of(engine, **other) not in found
        found.add(identity_of(engine, **other))

    arguments = engine._worker._runner.programs.arguments
    differs(arguments=dataclasses.replace(arguments, num_decode_steps=3))
    differs(arguments=dataclasses.replace(arguments, leaves=arguments.leaves[1:]))
    backend = engine._worker._backend
    for name in {kernel.name for kernel in backend.dispatcher.kernels}:
        rest = backend.dispatcher.without(name)
        differs(backend=dataclasses.replace(backend, dispatcher=rest))
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        differs()
    with jax.default_matmul_precision("highest"):
        assert identity_of(engine) is None  # threads that compile do not see it
    with monkeypatch.context() as patch:
        patch.setattr(source, "_source_digest", lambda: "edited")
        differs()
    assert identity_of(make_engine(tiny, num_pages=31)) not in found
    assert identity_of(engine) == first


def test_code_from_outside_is_never_taken_from_disk(tiny, monkeypatch, tmp_path, mesh):
    engine = make_engine(tiny)

    class Mine(nnx.Module):
        pass

    class Outside(Unquantised):
        pass

    assert identity_of(engine, graph=nnx.graphdef(Mine())) is None
    config = engine._worker._model_config
    for scheme, is_kept in ((UNQUANTISED, True), (Outside(), False)):
        linear = Linear("D", "F", config, jnp.float32, scheme=scheme)
        assert (identity_of(engine, graph=nnx.graphdef(linear)) is not None) == is_kept
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_REGISTERED", [engine._worker._backend.dispatcher.kernels[0]])
        assert identity_of(engine) is None
    assert open_store(None, mesh) is None
    assert open_store(THIS, mesh) is not None  # the tests' own folder
    before = jax.config.jax_compilation_cache_dir
    try:
        for elsewhere in ("gs://bucket/cache", None):
            jax.config.update("jax_compilation_cache_dir", elsewhere)
            assert open_store(THIS, mesh) is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.thorough
def test_a_second_engine_traces_nothing_and_says_the_same(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(worker, "open_store", lambda i, mesh: ProgramStore(tmp_path, i, mesh))
    expected = run(make_engine(tiny), REQUESTS)
    kept = sorted(tmp_path.iterdir())
    assert kept
    traced = []

    def listen(event: str, duration_secs: float, **labels: Any) -> None:
        del duration_secs
        if event == "/jax/core/compile/jaxpr_trace_duration":
            traced.append(labels.get("fun_name"))

    engine = make_engine(tiny)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = run(engine, REQUESTS)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not {"step", "resample"} & set(traced)
    assert sorted(tmp_path.iterdir()) == kept
    for key, output in expected.items():
        assert found[key].outputs == output.outputs
    for file in kept:
        file.write_bytes(b"")
    assert run(make_engine(tiny), REQUESTS)["random"].outputs == expected["random"].outputs
    assert sorted(tmp_path.iterdir()) == kept


_START = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from tiny import make_engine, run
from rjax.sampling import SamplingParams
import jax
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **labels: compiled.append(str(labels.get("fun_name")))
    if event.endswith("backend_compile_duration") else None
)
few = {{"max_num_seqs": 2, "max_num_batched_tokens": 8}}  # sizes to compile
engine = make_engine(Path({folder!r}), compilation_cache_dir={cache!r}, warmup={warmup!r}, **few)
while (progress := engine.compile_progress()).compiled < progress.total:
    time.sleep(0.02)
found = run(engine, [("a", [1, 2], SamplingParams(temperature=0, max_tokens=4))])
print(json.dumps([list(found["a"].outputs[0].token_ids), sum("step" in name for name in compiled)]))
engine.close()
"""


@pytest.mark.slow
def test_another_process_finds_them(tiny, tmp_path):
    """Kept by one that compiled in the background, taken by one that compiles at the first use."""
    quickly = {name: os.environ[name] for name in os.environ if name.startswith(("JAX_", "XLA_"))}
    seen = []
    for warmup in ("background", "off"):
        script = _START.format(
            tests=str(pathlib.Path(__file__).parent),
            folder=str(tiny),
            cache=str(tmp_path / "cache"),
            warmup=warmup,
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=quickly
            | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
            check=True,
            capture_output=True,
            text=True,
        )
        seen.append(json.loads(done.stdout))
    [(tokens, compiled), (same_tokens, compiled_again)] = seen
    assert compiled > 0 == compiled_again
    assert same_tokens == tokens
