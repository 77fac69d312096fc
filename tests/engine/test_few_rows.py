"""Steps of few rows: padded to what the streaming products take, which stand in for XLA's."""

import dataclasses
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from models import config_from_dict
from pallas_kernels.products import mosaic, xla
from rjax.engine import parts
from rjax.sampling import SamplingParams
from rjax.worker.backend import choose_backend
from tests.functional.programs import prepared, prompts

from .tiny import CONFIG, make_engine, run

BIG = CONFIG | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}


@pytest.fixture
def products():
    """The plain forms behind the kernels' signatures, and what has been asked of them."""
    calls = []

    def stand_in(name):
        def run(*arguments, weights_ready, **options):
            calls.append((name, arguments[0].shape[0], weights_ready))
            return getattr(xla, name)(*arguments, **options)

        return run

    module = types.ModuleType("products")
    for name in ("product", "gated_product", "add_product"):
        setattr(module, name, stand_in(name))
    return module, calls


@pytest.fixture
def with_products(monkeypatch, products):
    """Engines made from here on take them."""
    module, _ = products

    def choose(*arguments, **options):
        return dataclasses.replace(choose_backend(*arguments, **options), products=module)

    monkeypatch.setattr(parts, "choose_backend", choose)


def answers(folder, count):
    engine = make_engine(folder)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    requests = [(str(i), [i + 1, 2, 3 + i, 7], params) for i in range(count)]
    done = run(engine, requests)
    return engine, {name: output.outputs[0].token_ids for name, output in done.items()}


@pytest.mark.parametrize("count", [1, 8])
def test_an_engine_answers_the_same(tiny, products, with_products, monkeypatch, count):
    engine, got = answers(tiny, count)
    worker: Any = engine._worker
    shapes = worker.shapes.decode
    assert {s.rows for s in shapes} == {8}
    assert min(s.seqs for s in shapes) == 1
    _, calls = products
    assert ("add_product", 8, True) in calls
    assert all(rows == 8 for _, rows, _ in calls)  # not the chunks of prompts
    monkeypatch.undo()
    assert answers(tiny, count)[1] == got


def test_functional_programs_may_compute_their_weights(products):
    """There the products wait for the kernels before them."""
    from rjax import functional

    module, calls = products
    logits = []
    for kernels in (None, module):
        setup, weights = prepared()
        setup = dataclasses.replace(
            setup, backend=dataclasses.replace(setup.backend, products=kernels)
        )
        state = functional.make_state(setup, batch=8, num_pages=64, dtype=jnp.float32)
        tokens, lengths = prompts(8, longest=20)
        state, _ = functional.prefill(setup, weights, state, tokens, lengths)
        _, found = functional.decode(setup, weights, state, jnp.arange(8))
        logits.append(np.asarray(found))
    assert {name for name, *_ in calls} == {"product", "gated_product", "add_product"}
    assert not any(ready for *_, ready in calls)
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def backend_of(dtype="bfloat16", name="mosaic", **change):
    return choose_backend(
        name,
        platform="gpu",
        compute_capability=9.0,
        model=config_from_dict(BIG | change),
        dtype=dtype,
        page_size=64,
    )


def test_which_models_take_them():
    taken = backend_of()
    assert taken.products is mosaic
    assert [taken.padded_rows(T) for T in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 17]
    assert [taken.takes_products(T) for T in (1, 8, 16, 17)] == [False, True, True, False]
    for other in (
        backend_of("float16"),
        backend_of(hidden_act="gelu"),
        backend_of(intermediate_size=200),
        backend_of(name="xla"),
    ):
        assert other.products is None
        assert other.padded_rows(1) == 1
        assert not other.takes_products(8)
