"""Steps of few rows: padded to what the kernels that stream weights take, here in plain forms."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bench.model_shapes import SHAPES
from models import config_from_dict
from pallas_kernels.attention import xla as attention
from pallas_kernels.gated_activation.xla import gated_silu
from pallas_kernels.gated_product.mosaic import gated_product
from pallas_kernels.residual_norm.xla import add_rms_norm
from pallas_kernels.split_product import mosaic, xla
from rjax import engine_builder, functional
from rjax.sampling import SamplingParams
from rjax.worker.backend import OneRow, choose_backend
from tests.functional.programs import prepared, prompts

from .tiny import make_engine, run


@pytest.fixture
def kernels():
    """The plain forms, and what rows they have been asked for."""
    asked = set()

    def split_product(h, w):
        asked.add(("split", h.shape[0]))
        return xla.split_product(h, w, 2)

    def gated(h, w):
        asked.add(("gated", h.shape[0]))
        return gated_silu(jnp.einsum("TD,DAF->TAF", h, w))

    return {"split_product": split_product, "gated_product": gated}, asked


@pytest.fixture
def one_row():
    """Plain forms of the kernels of one row, and which have been asked for."""
    asked = set()

    def unmerged_attention(*arguments, **options):
        out, lse = attention.paged_attention(*arguments, **options)
        part = jnp.stack([out[0], jnp.full_like(out[0], jnp.nan)])
        return out, part, jnp.stack([lse[0], lse[0]]), jnp.asarray([0, 1])

    def merged_product(out, part, part_lse, merge_indptr, w):
        assert out.shape[0] == 1 and part.shape[:2] == part_lse.shape and merge_indptr.size == 2
        asked.add("merged")
        return xla.split_product(out.reshape(1, -1), w, 2)

    def normed_product(x, update, weight, eps, w):
        asked.add("normed")
        x, h = add_rms_norm(x, update, weight, eps)
        return x, xla.split_product(h, w, 2)

    def normed_gated_product(x, update, weight, eps, w):
        asked.add("normed gated")
        x, h = add_rms_norm(x, update, weight, eps)
        return x, gated_silu(jnp.einsum("TD,DAF->TAF", h, w))

    return OneRow(unmerged_attention, merged_product, normed_product, normed_gated_product), asked


@pytest.fixture
def with_kernels(monkeypatch, kernels):
    """Engines made from here on take them."""

    def choose(*arguments, **options):
        return dataclasses.replace(choose_backend(*arguments, **options), **kernels[0])

    monkeypatch.setattr(engine_builder, "choose_backend", choose)


def answers(folder, count, **options):
    engine = make_engine(folder, max_num_seqs=16, max_num_batched_tokens=48, **options)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    requests = [(str(i), [i + 1, 2, 3 + i, 7], params) for i in range(count)]
    done = run(engine, requests)
    return engine, {name: output.outputs[0].token_ids for name, output in done.items()}


@pytest.mark.parametrize(
    ("count", "at_once", "kv"), [(3, 4, "auto"), (9, 1, "auto"), (9, 1, "fp8")]
)
def test_an_engine_answers_the_same(tiny, kernels, with_kernels, monkeypatch, count, at_once, kv):
    engine, got = answers(tiny, count, num_decode_steps=at_once, kv_cache_dtype=kv)
    worker: Any = engine._worker
    decode = worker.shapes.decode
    assert [(s.rows, s.seqs) for s in decode] == [(8, 1), (8, 4), (16, 16)]
    rows = 16 if count > 8 else 8
    assert kernels[1] == {("split", rows), ("gated", rows)}  # not the chunks of prompts
    monkeypatch.undo()
    assert answers(tiny, count, kv_cache_dtype=kv)[1] == got


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_one_sequence_is_one_row(tiny, kernels, one_row, monkeypatch, kv):
    def choose(*arguments, **options):
        taken = kernels[0] | {"one_row": one_row[0]}
        return dataclasses.replace(choose_backend(*arguments, **options), **taken)

    monkeypatch.setattr(engine_builder, "choose_backend", choose)
    engine, got = answers(tiny, 1, kv_cache_dtype=kv)
    worker: Any = engine._worker
    assert [(s.rows, s.seqs) for s in worker.shapes.decode] == [(1, 1), (8, 4), (16, 16)]
    # The first layer's norm has no sum before it; the rest of its products are of given rows.
    assert one_row[1] == {"merged", "normed", "normed gated"}
    assert kernels[1] == {("split", 1)}
    monkeypatch.undo()
    assert answers(tiny, 1, kv_cache_dtype=kv)[1] == got


def test_functional_programs_take_them(kernels):
    logits = []
    for taken in ({}, kernels[0]):
        setup, weights = prepared()
        backend = dataclasses.replace(setup.backend, **taken)
        setup = dataclasses.replace(setup, backend=backend)
        state = functional.make_state(setup, batch=8, num_pages=64, dtype=jnp.float32)
        tokens, lengths = prompts(8, longest=20)
        state, _ = functional.prefill(setup, weights, state, tokens, lengths)
        _, found = functional.decode(setup, weights, state, jnp.arange(8))
        logits.append(np.asarray(found))
    assert {("split", 8), ("gated", 8)} <= kernels[1]
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def backend_of(model="llama-3-8b", *, dtype="bfloat16", name="mosaic", **change):
    return choose_backend(
        name,
        platform="gpu",
        compute_capability=9.0,
        model=config_from_dict(SHAPES[model] | change),
        dtype=dtype,
        page_size=64,
    )


def test_which_models_take_them():
    for taken in (backend_of(), backend_of("qwen2.5-3b"), backend_of("qwen2.5-0.5b")):
        assert taken.split_product is mosaic.split_product
        assert taken.gated_product is gated_product
        assert [taken.padded_rows(T) for T in (1, 4, 8, 9, 33, 65, 129)] == [
            1,
            8,
            8,
            16,
            64,
            128,
            129,
        ]
        assert [T for T in range(129) if taken.streams_products(T)] == [1, 8, 16, 32, 64, 128]
    wide = backend_of(hidden_size=8192, num_attention_heads=64)  # one row fills too much memory
    assert wide.one_row is None and wide.padded_rows(1) == 8 and not wide.streams_products(1)
    for other in (
        backend_of(intermediate_size=14344),
        backend_of(hidden_size=960, num_attention_heads=15, num_key_value_heads=5),
        backend_of(name="xla"),
    ):
        assert other.split_product is None and other.gated_product is None
        assert other.padded_rows(1) == 1
        assert not other.streams_products(8)
