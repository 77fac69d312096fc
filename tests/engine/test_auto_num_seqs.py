"""``max_num_seqs`` that is left open: by memory on a GPU, and the sizes of its steps."""

import jax.numpy as jnp
import pytest

from rjax.batch.page_groups import one_group
from rjax.batch.step_limits import StepLimits, choose_step_limits
from rjax.benchmarks.model_shapes import SHAPES
from rjax.config import EngineConfig, SchedulerSettings
from rjax.errors import InvalidConfigError
from rjax.models import config_from_dict
from rjax.worker.backend import choose_backend
from rjax.worker.pages.sizing import gpu_pool_tokens
from rjax.worker.step.shape import shape_table

from .tiny import make_engine

GIB = 2**30
BFLOAT16 = jnp.dtype(jnp.bfloat16)


def chosen(tokens: int | None, max_model_len: int = 4096, spare: int = 128, **settings):
    """The limits with a pool of ``tokens``; None stands for a CPU, whose memory does not decide."""
    return choose_step_limits(
        SchedulerSettings(**settings),
        most_tokens=2048,
        spare_rows=spare,
        max_model_len=max_model_len,
        pool_tokens=None if tokens is None else lambda _: tokens,
    )


@pytest.mark.parametrize(
    ("tokens", "settings", "expected"),
    [
        (256 * 256, {}, 256),
        (256 * 256 - 1, {}, 128),
        (64 * 256, {}, 64),
        (4_096, {}, 16),
        (0, {}, 16),  # the pool then says what does not fit
        (40_000, {"max_model_len": 50_000}, 16),
        (50_000, {"max_model_len": 50_000}, 128),
        (256 * 100, {"max_model_len": 100}, 256),
        (10**9, {"max_num_batched_tokens": 100}, 100),
        (10**9, {"max_num_batched_tokens": 8}, 8),
        (None, {}, 64),
        (None, {"max_num_batched_tokens": 8}, 8),
        (0, {"max_num_seqs": 77}, 77),
    ],
)
def test_as_many_sequences_as_the_pool_holds_tokens_for(tokens, settings, expected):
    assert chosen(tokens, **settings).max_num_seqs == expected


def test_the_other_limits_follow():
    assert chosen(64 * 256) == StepLimits(64, 2048, 64, 128)
    assert chosen(64 * 256, max_num_prefill_ahead=3) == StepLimits(64, 2048, 3, 128)
    assert chosen(10**9) == StepLimits(256, 2048)


def hopper(name: str, total_gib: int, used_gib: int, **options):
    """The limits and step shapes of a model on a GPU of so much memory."""
    model = config_from_dict(SHAPES[name])
    backend = choose_backend(
        "auto",
        platform="gpu",
        compute_capability=9.0,
        model=model,
        dtype=BFLOAT16,
        page_size=64,
    )
    config = EngineConfig.from_options(options)
    memory = {"bytes_limit": total_gib * GIB, "bytes_in_use": used_gib * GIB}

    def shapes(limits):
        return shape_table(
            config,
            backend=backend,
            max_model_len=4096,
            limits=limits,
            growth=2,
            groups=one_group(model.num_layers),
        )

    def tokens(limits):
        return gpu_pool_tokens(
            config,
            model,
            shapes(limits),
            limits=limits,
            dtype=BFLOAT16,
            kv_dtype=BFLOAT16,
            memory=memory,
            num_devices=1,
        )

    limits = choose_step_limits(
        config.scheduler,
        most_tokens=2048,
        spare_rows=backend.spare_rows,
        max_model_len=4096,
        pool_tokens=tokens,
    )
    return limits, shapes(limits)


@pytest.mark.parametrize(
    ("total", "options", "expected"),
    [
        (138, {}, 256),
        (78, {}, 256),
        (23, {}, 64),
        (20, {}, 16),
        (138, {"gpu_memory_utilization": 0.135}, 16),
        (138, {"num_pages": 1_024}, 256),
        (138, {"num_pages": 200}, 32),
        (23, {"num_pages": 10**6}, 16),  # refused later, with a message
    ],
)
def test_memory_decides_on_a_gpu(total, options, expected):
    limits, _ = hopper("llama-3-8b", total, 16, **options)
    assert limits.max_num_seqs == expected


def test_more_sequences_bring_no_more_sizes():
    _, few = hopper("llama-3-8b", 138, 16, max_num_seqs=64)
    _, many = hopper("llama-3-8b", 138, 16)
    assert [shape.seqs for shape in few.decode] == [1, 8, 16, 32, 64]
    assert [shape.seqs for shape in many.decode] == [1, 8, 16, 32, 64, 128, 256]
    assert len(many.all) <= len(few.all) + 1


def test_sizes_that_gain_nothing_are_left_out():
    _, shapes = hopper("qwen2.5-0.5b", 138, 1)
    assert [(shape.rows, shape.seqs) for shape in shapes.decode[:3]] == [(1, 1), (8, 8), (16, 16)]


def test_a_short_prompt_beside_many_places_takes_a_short_step():
    _, shapes = hopper("llama-3-8b", 138, 16)
    found = [(s.rows, s.seqs) for s in shapes.fitting(rows=100, seqs=3)]
    assert found == [(128, 128), (256, 256), (512, 256), (1024, 256), (2048, 256)]
    assert len(set(shapes.all)) == len(shapes.all)
    _, shapes = hopper("llama-3-8b", 138, 16, max_num_seqs=64)
    assert (shapes.choose(rows=100, seqs=3).rows, shapes.largest.rows) == (128, 2048)


def test_what_an_engine_chose_is_reported(tiny):
    engine = make_engine(tiny, max_num_seqs="auto", max_num_batched_tokens=None)
    stats = engine.stats()
    assert (stats.max_num_seqs, stats.num_decode_steps) == (64, 1)  # of a CPU
    assert "up to 64 sequences of 160 tokens" in repr(engine)
    assert engine.config.scheduler.max_num_seqs == "auto"


@pytest.mark.parametrize("option", ["max_num_seqs", "num_decode_steps"])
def test_a_number_or_auto_is_asked_for(option):
    for value in ("many", "16", 0, 1.5, True, 2**31, None):
        with pytest.raises(InvalidConfigError, match=rf"{option} is .*from 1 .*or auto"):
            SchedulerSettings(**{option: value})
