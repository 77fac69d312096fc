"""Steps of few rows: padded to what the kernels that stream weights take, here in plain forms."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rjax import functional
from rjax.batch.step_limits import step_limits
from rjax.benchmarks.model_shapes import SHAPES
from rjax.build import plan_engine
from rjax.config import SchedulerSettings
from rjax.models import config_from_dict
from rjax.models.formats import OnLoad
from rjax.models.loading.config import with_quantization
from rjax.models.schemes import ON_LOAD
from rjax.pallas_kernels.attention import xla as attention
from rjax.pallas_kernels.gemm.activation import silu_and_mul
from rjax.pallas_kernels.gemm.base import split_k_gemm
from rjax.pallas_kernels.gemm.few_bits.config import FEW_ROWS
from rjax.pallas_kernels.gemm.skinny_gemm import ROWS
from rjax.pallas_kernels.kernel import Kernel
from rjax.pallas_kernels.pending import Partial, UnmergedAttention
from rjax.pallas_kernels.residual.base import add_rms_norm
from rjax.sampling import SamplingParams
from rjax.worker.backend import Backend, choose_backend, streamed_rows
from rjax.worker.kernels import Dispatcher
from tests.functional.programs import prepared, prompts

from .tiny import make_engine, run

DENSE = [name for name, scheme in ON_LOAD.items() if not OnLoad(scheme).experts_only]


class PlainForms:
    """Plain forms of the streaming kernels, and with how many rows each was called.

    Args:
        rows: that they take.
        fused: whether there are the kernels of one row that begin with a norm or a merge.
    """

    def __init__(self, rows: tuple[int, ...], *, fused: bool) -> None:
        self.called: set[tuple[str, int]] = set()
        self._rows = rows
        self._fused = fused

    def taken_by(self, backend: Backend, config: Any) -> Backend:
        """The backend with these kernels."""
        makers = [("linear", self._linear), ("linear_activation", self._activated)]
        if self._fused:
            makers += [
                ("norm_linear", self._norm_linear),
                ("norm_linear_activation", self._norm_activated),
                ("merge_linear", self._merge_linear),
            ]
        kernels = [
            Kernel(
                f"plain.{name}",
                name,
                "xla",
                self._refusal,
                run,
                pads_rows=True,
                gives_partial=not name.endswith("activation"),
            )
            for name, run in makers
        ]
        dispatcher = Dispatcher("xla", (*kernels, *backend.dispatcher.kernels))
        unmerged, merge = (_unmerged_attention, _merge) if self._fused else (None, None)
        attend = dataclasses.replace(backend.attention, unmerged_attention=unmerged, merge=merge)
        return dataclasses.replace(
            backend,
            attention=attend,
            dispatcher=dispatcher,
            streamed_rows=streamed_rows(dispatcher, attend, config, "float32", 1),
        )

    def _refusal(self, problem: Any) -> str | None:
        alone = problem.operation.startswith(("norm", "merge"))
        rows = (1,) if alone else self._rows
        return None if problem.rows in rows else f"{problem.rows} rows"

    def _linear(self, problem, h, leaves):
        self.called.add((problem.operation, problem.rows))
        partial = split_k_gemm(h, _matrix(problem, leaves), 2)
        shape = (*partial.summands.shape[:2], *problem.columns)
        return Partial(partial.summands.reshape(shape), dtype=h.dtype)

    def _activated(self, problem, h, leaves):
        self.called.add((problem.operation, problem.rows))
        return silu_and_mul((h @ _matrix(problem, leaves)).reshape(len(h), 2, -1))

    def _norm_linear(self, problem, x, update, weight, leaves):
        x, h = add_rms_norm(x, update, weight, problem.eps)
        return x, self._linear(problem, h, leaves)

    def _norm_activated(self, problem, x, update, weight, leaves):
        x, h = add_rms_norm(x, update, weight, problem.eps)
        return x, self._activated(problem, h, leaves)

    def _merge_linear(self, problem, unmerged, leaves):
        assert len(unmerged) == 1 and unmerged.merge_indptr.size == 2
        return self._linear(problem, unmerged.out.reshape(1, -1), leaves)


def _matrix(problem, leaves):
    return problem.scheme.dequantise(leaves, problem.depth, jnp.float32).reshape(problem.depth, -1)


def _unmerged_attention(*arguments, **options):
    """Every row has one partial result, so it is in ``out``."""
    out, lse = attention.paged_attention(*arguments, **options)
    return UnmergedAttention(out, jnp.full_like(out, jnp.nan), lse, jnp.arange(len(out) + 1))


def _merge(unmerged):
    return unmerged.out


@pytest.fixture
def use(monkeypatch):
    """Has engines made from here on take such kernels."""

    def patch(forms: PlainForms) -> None:
        def choose(*arguments, **options):
            return forms.taken_by(choose_backend(*arguments, **options), options["model"])

        monkeypatch.setattr(plan_engine, "choose_backend", choose)

    return patch


def answers(folder, count, **options):
    engine = make_engine(folder, max_num_seqs=16, max_num_batched_tokens=48, **options)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    requests = [(str(i), [i + 1, 2, 3 + i, 7], params) for i in range(count)]
    done = run(engine, requests)
    return engine, {name: output.outputs[0].token_ids for name, output in done.items()}


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(
    ("count", "at_once", "kv"), [(3, 4, "auto"), (9, 1, "auto"), (9, 1, "fp8")]
)
def test_an_engine_answers_the_same(tiny, use, monkeypatch, count, at_once, kv):
    forms = PlainForms(ROWS[1:], fused=False)
    use(forms)
    engine, got = answers(tiny, count, num_decode_steps=at_once, kv_cache_dtype=kv)
    worker: Any = engine._worker
    decode = worker.shapes.decode
    assert [(s.rows, s.seqs) for s in decode] == [(8, 4), (16, 16)]  # one sequence is padded too
    rows = 16 if count > 8 else 8
    # Not the chunks of prompts.
    assert forms.called == {("linear", rows), ("linear_activation", rows)}
    monkeypatch.undo()
    assert answers(tiny, count, kv_cache_dtype=kv)[1] == got


@pytest.mark.slow
def test_short_prompts_take_a_decode_shape_where_rows_are_spare(tiny, use, monkeypatch):
    use(PlainForms((8, 16), fused=False))
    engine, got = answers(tiny, 3)
    worker: Any = engine._worker
    shape = worker.shapes.choose(rows=12, seqs=3)
    assert (shape.rows, shape.seqs) == (16, 16)
    made = {key.shape.rows for key in worker._runner.programs._compiled if key.shape is not None}
    assert made == {8, 16}
    monkeypatch.undo()
    assert answers(tiny, 3)[1] == got


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_one_sequence_is_one_row(tiny, use, monkeypatch, kv):
    forms = PlainForms(ROWS, fused=True)
    use(forms)
    engine, got = answers(tiny, 1, kv_cache_dtype=kv)
    worker: Any = engine._worker
    assert [(s.rows, s.seqs) for s in worker.shapes.decode] == [(1, 1), (8, 4), (16, 16)]
    # The first layer's norm has no update before it.
    fused = ("norm_linear", "norm_linear_activation", "merge_linear")
    assert forms.called == {(name, 1) for name in ("linear", *fused)}
    monkeypatch.undo()
    assert answers(tiny, 1, kv_cache_dtype=kv)[1] == got


@pytest.mark.thorough
def test_functional_programs_take_them():
    forms = PlainForms(ROWS[1:], fused=False)
    logits = []
    for taken in (False, True):
        setup, weights = prepared()
        if taken:
            backend = forms.taken_by(setup.backend, setup.config)
            setup = dataclasses.replace(setup, backend=backend)
        state = functional.make_state(setup, batch=8, num_pages=64, dtype=jnp.float32)
        tokens, lengths = prompts(8, longest=20)
        state, _ = functional.prefill(setup, weights, state, tokens, lengths)
        _, found = functional.decode(setup, weights, state, jnp.arange(8))
        logits.append(np.asarray(found))
    assert {("linear", 8), ("linear_activation", 8)} <= forms.called
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def backend_of(model="llama-3-8b", *, dtype="bfloat16", name="mosaic", quantization=None, **change):
    return choose_backend(
        name,
        platform="gpu",
        compute_capability=9.0,
        model=with_quantization(config_from_dict(SHAPES[model] | change), quantization),
        dtype=dtype,
        page_size=64,
    )


def test_which_models_take_them():
    for taken in (backend_of(), backend_of("qwen2.5-3b"), backend_of("qwen2.5-0.5b")):
        assert taken.streamed_rows == ROWS
        assert [taken.padded_rows(T) for T in (1, 4, 8, 9, 33, 65, 129)] == [
            1,
            8,
            8,
            16,
            64,
            128,
            129,
        ]
    wide = backend_of(hidden_size=8192, num_attention_heads=64)  # one row fills too much memory
    assert wide.streamed_rows == ROWS[1:] and wide.padded_rows(1) == 8
    for other in (backend_of(intermediate_size=14344), backend_of(name="xla")):
        assert other.streamed_rows == () and other.padded_rows(1) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_one_layer_of_another_kind_does_not_decide(quantization):
    name = "deepseek-v2-lite"  # whose first layer alone is dense, 10,944 wide
    usual = backend_of(name, quantization=quantization).streamed_rows
    assert {8, 16, 32, 64} <= set(usual)
    dense = backend_of(name, quantization=quantization, num_hidden_layers=1)
    assert set(dense.streamed_rows) < set(usual)
    assert backend_of(name, quantization=quantization, num_hidden_layers=2).streamed_rows == (
        dense.streamed_rows
    )


@pytest.mark.sample(3, 2)
@pytest.mark.parametrize("quantization", DENSE)
@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-3b", "qwen2.5-0.5b"])
def test_quantised_weights_leave_rows_to_prefill_ahead(model, quantization):
    backend = backend_of(model, quantization=quantization)
    few = {rows for rows in ROWS if rows <= FEW_ROWS}
    assert few <= set(backend.streamed_rows) and backend.spare_rows >= FEW_ROWS
    settings = SchedulerSettings(max_num_seqs=FEW_ROWS // 2)
    limits = step_limits(settings, most_tokens=2048, spare_rows=backend.spare_rows)
    assert limits.max_num_prefill_ahead == FEW_ROWS // 2
    assert limits.prefill_ahead_tokens == backend.spare_rows
    assert backend_of(model, quantization=quantization, name="xla").spare_rows == 0
