"""The worker: compiling ahead, moving pages, refusing what does not fit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from bench import RESULTS
from rjax.batch.page_groups import one_group
from rjax.batch.page_operations import CopyPages, SwapIn, SwapOut
from rjax.batch.step_worker import PoolSize
from rjax.benchmarks.model_shapes import SHAPES
from rjax.errors import OutOfMemoryError
from rjax.models import config_from_dict
from rjax.models.loading.config import with_quantization
from rjax.models.schemes import ON_LOAD
from rjax.pallas_kernels.attention.plan.host import PlanShape
from rjax.sampling import SamplingParams
from rjax.worker.memory import check_weights_fit, workspace_bytes
from rjax.worker.pages import sizing
from rjax.worker.pages.sizing import check_pool_fits, fit_pool
from rjax.worker.programs.cache import keep_compiled
from rjax.worker.step.layout import PackedLayout
from rjax.worker.step.shape import StepShape

from .tiny import make_engine, run

GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.mark.thorough
def test_nothing_is_compiled_after_a_warmup(tiny, capsys, monkeypatch):
    monkeypatch.setattr("rjax.worker.worker.bars_are_seen", lambda: True)
    engine = make_engine(tiny, warmup="on", use_tqdm=True)  # sizes that other tests have
    assert "Compiling steps: 100%" in capsys.readouterr().err
    compiled = engine._worker.num_compiled
    # A step of each size; for each number of sequences the sampling "random" and "full", with
    # logprobs and without; and the prompt logprobs of the largest step.
    shapes = engine._worker.shapes.all
    assert compiled == len(shapes) + 4 * len({shape.seqs for shape in shapes}) + 1
    want = run(make_engine(tiny), [("a", [1, 2, 3], GREEDY)])["a"].outputs[0].token_ids
    random = SamplingParams(max_tokens=3, seed=1, n=2)
    chosen = SamplingParams(max_tokens=3, seed=1, top_p=0.9, presence_penalty=1)
    scored = SamplingParams(max_tokens=2, temperature=0, logprobs=3)
    requests = [("a", [1, 2, 3], GREEDY), ("b", list(range(50)), random), ("c", [4], chosen)]
    requests.append(("d", [5, 6], scored))
    got = run(engine, requests)
    assert got["a"].outputs[0].token_ids == want
    assert engine._worker.num_compiled == compiled


def test_the_host_reads_the_sampled_rows_as_the_step_does():
    layout = PackedLayout(StepShape(8, 4, 6, 8, one_group(2), (PlanShape(8, 4, 48, 8, 16),)))
    packed = np.arange(layout.size, dtype=np.int32)
    batch = layout.unpack(jnp.asarray(packed))
    np.testing.assert_array_equal(layout.sampled_rows(packed), [batch.slots, batch.live])


def test_pages_come_back_as_they_went(tiny):
    worker = make_engine(tiny, num_pages=100, swap_space="4MiB")._worker
    rng = np.random.default_rng(0)
    data = rng.normal(size=(100, *worker.page_shape)).astype(np.float32)
    worker.write_pages(list(range(100)), data)
    away = rng.permutation(100)[:70].tolist()
    back = rng.permutation(100)[:70].tolist()
    slots = rng.permutation(worker.num_host_pages)[:70].tolist()
    worker.move([SwapOut(away[:9], slots[:9]), CopyPages([away[0], 3], [away[1], 3])])
    before = data.copy()
    before[away[1]] = data[away[0]]
    np.testing.assert_array_equal(worker.read_pages(list(range(100))), before)
    worker.move([SwapOut(away[9:], slots[9:]), SwapIn(slots, back)])
    want = before.copy()
    held = np.concatenate([data[away[:9]], before[away[9:]]])
    want[back] = held
    np.testing.assert_array_equal(worker.read_pages(list(range(100))), want)


def test_the_estimated_workspace_covers_what_steps_took_on_a_gpu():
    """The kept results hold the temporary bytes that XLA gave each decode step."""
    checked = 0
    names = "decode_step", "decode_step_long", "decode_step_growth"
    for name in (*names, "decode_step_fp8", "decode_step_int4"):
        found = json.loads((RESULTS / f"{name}.json").read_text())
        for row in found["rows"]:
            weights = row.get("weights")
            model = config_from_dict(SHAPES[row["model"]])
            model = with_quantization(model, weights if weights in ON_LOAD else None)
            plan = PlanShape(row["batch"], row["batch"], 4096, 64, 1024)
            groups = one_group(model.num_layers)
            shape = StepShape(row["batch"], row["batch"], 64, 64, groups, (plan,))
            estimate = workspace_bytes(model, shape, itemsize=2, num_slots=0, num_devices=1)
            # A dequantised copy is counted even where kernels read the weights as they are.
            most = 2.5 if model.schemes else 2
            assert row["temporary_bytes"] < estimate < row["temporary_bytes"] + most * 2**30
            checked += 1
    assert checked > 18


def fit(**changes):
    given = {
        "bytes_per_page": 2**20,
        "page_size": 64,
        "max_model_len": 6400,
        "num_seqs": 8,
        "memory": {"bytes_limit": 1000 * 2**20, "bytes_in_use": 500 * 2**20},
        "num_devices": 1,
        "utilization": 0.9,
        "workspace_bytes": 100 * 2**20,
    }
    return fit_pool(windows=(None,), **(given | changes))


def test_the_pool_takes_what_is_left():
    assert fit().num_pages == 300
    assert fit(num_devices=2).num_pages == 600
    assert fit(num_seqs=1).num_pages == 100


def on_a_cpu(monkeypatch, total: int, free: int, **changes) -> int:
    """Pages on a host with so many MiB, of 1 MiB each."""
    monkeypatch.setattr(sizing, "host_memory", lambda: total * 2**20)
    monkeypatch.setattr(sizing, "available_memory", lambda: free * 2**20)
    return fit(memory=None, num_seqs=10**6, max_model_len=64, **changes).num_pages


def test_the_pool_of_a_cpu_does_not_follow_what_is_free(monkeypatch):
    """Compiled steps hold its size."""
    busy = (9_000, 5_000, 2_001, 1_920)
    assert {on_a_cpu(monkeypatch, 9_600, free) for free in busy} == {960}
    # The host's memory differs a little from kernel to kernel.
    assert {on_a_cpu(monkeypatch, total, 9_000) for total in range(9_600, 10_200, 7)} == {960}
    # Beside something large: half of what is free, on the coarsest grid.
    little = range(1_050, 1_900, 7)
    assert {on_a_cpu(monkeypatch, 9_600, free) for free in little} == {512}
    # A large host gives a GiB, or what one sequence needs.
    assert on_a_cpu(monkeypatch, 240_000, 200_000) == 1024
    assert on_a_cpu(monkeypatch, 240_000, 200_000, page_size=64, bytes_per_page=2**31) == 1
    with pytest.raises(OutOfMemoryError, match="free memory, or set num_pages"):
        on_a_cpu(monkeypatch, 24_000, 1)


def test_the_pool_of_a_gpu_does_not_follow_a_few_mib():
    total = 140_000
    sizes = set()
    for used in range(16_000, 16_100):
        memory = {"bytes_limit": total * 2**20, "bytes_in_use": used * 2**20}
        sizes.add(fit(memory=memory, num_seqs=10**6, max_model_len=64).num_pages)
    assert len(sizes) == 1
    for used in range(16_000, 120_000, 499):
        memory = {"bytes_limit": total * 2**20, "bytes_in_use": used * 2**20}
        left = int(total * 0.9) - used - 100
        pages = fit(memory=memory, num_seqs=10**6, max_model_len=64).num_pages
        assert left * (1 - 1 / 64) < pages <= left


def test_rounding_leaves_what_a_sequence_of_full_length_needs():
    memory = {"bytes_limit": 1000 * 2**20, "bytes_in_use": 193 * 2**20}
    assert fit(memory=memory).num_pages == 600  # of 607
    assert fit(memory=memory, max_model_len=607 * 64).num_pages == 607
    assert fit(memory=memory, max_model_len=74 * 64).num_pages == 592, "eight sequences"


def test_a_pool_that_does_not_fit_says_what_would():
    with pytest.raises(OutOfMemoryError, match=r"max_model_len to 19200 .*utilization to 0.95"):
        fit(max_model_len=22400, num_seqs=1)
    assert fit(max_model_len=19200).num_pages == 300
    assert fit(max_model_len=22400, num_seqs=1, utilization=0.95).num_pages == 350
    with pytest.raises(OutOfMemoryError, match="raise tensor_parallel_size") as found:
        fit(workspace_bytes=2**30)
    assert "max_model_len to" not in str(found.value)


def test_a_pool_of_given_size_that_does_not_fit_is_refused():
    memory = {"bytes_limit": 1000, "bytes_in_use": 400}
    check_pool_fits(PoolSize(60, 10, (None,)), memory=memory, num_devices=1)
    with pytest.raises(OutOfMemoryError, match=r"num_pages is 61.*set num_pages below 60"):
        check_pool_fits(PoolSize(61, 10, (None,)), memory=memory, num_devices=1)
    check_pool_fits(PoolSize(120, 10, (None,)), memory=memory, num_devices=2)
    check_pool_fits(PoolSize(10**9, 10, (None,)), memory=None, num_devices=1)


def test_weights_that_do_not_fit_are_refused_before_loading():
    memory = {"bytes_limit": 800, "bytes_in_use": 100}
    options = {"memory": memory, "utilization": 1.0}
    with pytest.raises(OutOfMemoryError, match="to give: set tensor_parallel_size=4, or choose"):
        check_weights_fit(2000, num_devices=2, **options)
    low = options | {"utilization": 0.1}
    with pytest.raises(OutOfMemoryError) as found:
        check_weights_fit(500, num_devices=1, **low)
    assert str(found.value).endswith(
        "to give: raise gpu_memory_utilization above 0.75, or free device memory, "
        "or choose a 16-bit dtype, quantization fp8 or int4, or a smaller model"
    )
    check_weights_fit(500, num_devices=1, **(low | {"utilization": 0.76}))
    check_weights_fit(2000, num_devices=3, **options)
    check_weights_fit(2000, num_devices=1, **(options | {"memory": None}))


def test_compiled_steps_go_to_the_folder_that_the_process_has_set(tiny, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    make_engine(tiny, compilation_cache_dir=str(tmp_path / "other"))
    assert jax.config.jax_compilation_cache_dir == before
    assert not (tmp_path / "other").exists()


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_damaged_compiled_step_is_compiled_once_more_and_no_oftener(tmp_path, left):
    """Its entry ends after ``left`` bytes: one start warns, the next does not."""
    before = {
        name: getattr(jax.config, name)
        for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    }
    keep_compiled(None)
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()

        def start() -> None:
            jax.clear_caches()
            assert jax.jit(lambda x: x * 3 + left)(2) == 6 + left

        start()
        [entry] = tmp_path.glob("jit__lambda*-cache")
        whole = entry.read_bytes()
        entry.write_bytes(whole[:left])
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
            start()
        assert len(entry.read_bytes()) > len(whole) // 2
        start()  # warnings are errors
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.clear_caches()
