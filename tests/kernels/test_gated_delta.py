"""The Mosaic kernels of the gated delta rule against the reference in float32.

Pages and slots that no sequence owns hold NaN, and so do padding rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_cases import Batch, S, reference, relative_error, tails
from interpreted_gated_delta import interpreting_gated_delta

from rjax.pallas_kernels.gated_delta import mosaic
from rjax.pallas_kernels.gated_delta.states import LayerStates, StateRows, max_items

OUTPUT_ERROR, STATE_ERROR = 8e-3, 6e-3


@pytest.fixture
def interpreter(monkeypatch):
    with interpreting_gated_delta(monkeypatch):
        yield


def check(batch: Batch, counts, *, padding=0) -> None:
    """Compare a step with the reference; the batch keeps the reference's states."""
    operands, rows = batch.step(counts, padding=padding)
    want, states = reference(*operands, batch.layer, rows)
    run = jax.jit(lambda *given: mosaic.gated_delta(*given))
    got, found = run(*operands, batch.layer, rows)
    assert relative_error(got, want) < OUTPUT_ERROR
    if padding:
        np.testing.assert_array_equal(np.asarray(got, np.float32)[-padding:], 0)
    for page in range(len(states.states)):
        assert relative_error(found.states[page], states.states[page]) < STATE_ERROR
    found_tails, wanted_tails = tails(batch, found), tails(batch, states)
    for name, arrays in found_tails.items():
        for ours, theirs in zip(arrays, wanted_tails[name], strict=True):
            if name == "updates":
                assert relative_error(ours, theirs) < OUTPUT_ERROR
            else:
                np.testing.assert_array_equal(ours, theirs)
    batch.layer = states


def decode(batch: Batch, *, padding=0) -> None:
    check(batch, [1] * len(batch.sequences), padding=padding)


@pytest.mark.usefixtures("interpreter")
def test_decode():
    """First page with and without a state before it; one sequence completes its page."""
    batch = Batch([1, 63, 64])
    batch.advance([0, 62, 63])
    decode(batch, padding=1)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.slow
def test_decode_at_all_kinds_of_offsets():
    batch = Batch([1, 2, 9, 18, 34, 63], K=2)
    batch.advance([0, 1, 8, 17, 33, 62])
    decode(batch)


@pytest.mark.usefixtures("interpreter")
def test_prompts():
    """A prompt over a page's end, and one that completes its page with a single token."""
    batch = Batch([70, 64], G=1)
    batch.advance([0, 63])
    check(batch, [70, 1], padding=1)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
def test_prompts_from_all_kinds_of_offsets():
    batch = Batch([130, 65, 64, 40, 1, 128], K=2)
    batch.advance([1, 62, 63, 5, 0, 64])
    check(batch, [129, 3, 1, 35, 1, 64], padding=3)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
def test_a_prompt_in_chunks_has_the_bits_of_a_whole_one():
    compare_divisions(64 + 7, [(64 + 7,), (3, 62, 6)])


def compare_divisions(length: int, divisions, **options) -> None:
    """A prompt in one step and in several: outputs, states, and the tail in every bit.

    A step of one token decodes: its outputs are rounded otherwise, states at pages' ends are not.
    """
    found, run = [], jax.jit(lambda *given: mosaic.gated_delta(*given))
    for counts in divisions:
        batch = Batch([length, length], **options)
        outputs, ends = [], []
        for count in counts:
            operands, rows = batch.step([count, count])
            got, batch.layer = run(*operands, batch.layer, rows)
            order = np.argsort(np.asarray(rows.slot))
            each = np.asarray(got, np.float32).reshape(2, count, *got.shape[1:])
            outputs.append(each[order])
            ends.append(count == 1)
        states = np.asarray(batch.layer.states)
        found.append((outputs, ends, states, tails(batch, batch.layer)))
    outputs, _, states, tail = found[0]
    whole = np.concatenate(outputs, 1)
    for others, decodes, other_states, other_tail in found[1:]:
        np.testing.assert_array_equal(other_states, states)
        done = 0
        for part, is_decode in zip(others, decodes, strict=True):
            want = whole[:, done : done + part.shape[1]]
            if is_decode:
                assert relative_error(part, want) < OUTPUT_ERROR
            else:
                np.testing.assert_array_equal(part, want)
            done += part.shape[1]
        for name, arrays in tail.items():
            if name != "updates" or not any(decodes):
                for ours, theirs in zip(other_tail[name], arrays, strict=True):
                    np.testing.assert_array_equal(ours, theirs)


def described(
    T: int, seqs: int, *, K=16, G=2, dtype: Any = jnp.bfloat16, dim=128, page_size=S
) -> Any:
    """Descriptions of the operands of a step."""
    kind: Any = jax.ShapeDtypeStruct
    rows = kind((T, K, dim), dtype), kind((T, K, dim), dtype), kind((T, K, G, dim), dtype)
    gates = kind((T, K, G), jnp.float32)
    layer = LayerStates(
        states=kind((9, K, G, dim, dim), jnp.float32),
        conv_ends=kind((9, 3, K, 512), dtype),
        keys=kind((7, K, page_size, dim), dtype),
        values=kind((7, K, G, page_size, dim), dtype),
        updates=kind((7, K, G, page_size, dim), dtype),
        gates=kind((7, K, G, 2, page_size), jnp.float32),
        recent=kind((7, 3, K, 512), dtype),
    )
    items = max_items(T, seqs, page_size)
    sizes = (T, *[seqs] * 4, *[items] * 6, 1)
    described_rows: Any = [kind((n,), jnp.int32) for n in sizes]
    return *rows, gates, gates, layer, StateRows(*described_rows)


@pytest.mark.parametrize(
    ("T", "seqs", "heads"),
    [(1, 1, (16, 2)), (64, 64, (16, 2)), (2048, 8, (16, 2)), (100, 3, (4, 3)), (16, 4, (2, 1))],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_kernels_lower(T, seqs, heads, dtype):
    operands = described(T, seqs, K=heads[0], G=heads[1], dtype=dtype)
    traced = jax.jit(mosaic.gated_delta).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= (3 if seqs == T else 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype=jnp.float32), "bfloat16 and float16"),
        (dict(dim=64), "keys of 64"),
        (dict(page_size=32), "pages of 32 tokens"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mosaic.gated_delta, *described(64, 64, **change))


def test_dtypes_must_be_equal():
    q, *others = described(64, 64)
    with pytest.raises(ValueError, match="one dtype"):
        jax.eval_shape(mosaic.gated_delta, jax.ShapeDtypeStruct(q.shape, jnp.float16), *others)


gpu = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


class TestOnGpu:
    """Conformance, and equal bits however a prompt is divided."""

    pytestmark = gpu

    @pytest.mark.parametrize(
        ("G", "dtype"), [(1, jnp.float16), (2, jnp.bfloat16), (3, jnp.bfloat16)]
    )
    def test_decode(self, G, dtype):
        done = [0, 1, 7, 8, 9, 31, 62, 63, 64, 100, 126, 127, 63]
        batch = Batch([n + 1 for n in done], K=2, G=G, dtype=dtype)
        batch.advance(done)
        decode(batch, padding=3)

    def test_decode_at_every_offset(self):
        done = list(range(64)) * 3
        batch = Batch([n + 1 for n in done], K=4)
        batch.advance(done)
        decode(batch)

    @pytest.mark.parametrize(
        ("G", "dtype"), [(1, jnp.float16), (2, jnp.bfloat16), (3, jnp.bfloat16)]
    )
    def test_prompts(self, G, dtype):
        done = [0, 1, 62, 63, 64, 5, 0, 0, 64]
        new = [200, 63, 3, 1, 64, 20, 1, 64, 130]
        batch = Batch([a + b for a, b in zip(done, new, strict=True)], K=2, G=G, dtype=dtype)
        batch.advance(done)
        check(batch, new, padding=5)

    def test_long_prompts(self):
        batch = Batch([2048, 1000], K=16)
        check(batch, [2048, 1000])

    def test_states_that_nobody_wants(self):
        batch = Batch([300, 128], K=2, wanted=False)
        check(batch, [300, 128])

    def test_bits_do_not_depend_on_the_division(self):
        decoded = (60, *[1] * 9, 70)
        compare_divisions(139, [(139,), (64, 75), (3, 62, 63, 11), decoded], K=2)
