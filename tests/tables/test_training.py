"""Training sees exactly what inference sees, and teaches something."""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from bench.train_bundled_model import __main__ as train
from bench.train_bundled_model.data import Batch, Plan, Shape, make_batch
from bench.train_bundled_model.rows import fresh_pointers
from bench.train_bundled_model.sizes import SIZES, model_config
from bench.train_bundled_model.step import (
    Trainer,
    arrays,
    compiled,
    fresh_parameters,
    hidden_states,
    optimizer,
    replicated,
)
from bench.train_bundled_model.tokenizer import NEWLINE
from rjax.models import BUNDLED_MODEL, Decoder, DenseAttention, load_model

TOKENIZER = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
SHAPE = Shape(batch=1, prefix=384, branches=160, rows=(3, 4))
TINY = dataclasses.replace(SIZES["tiny"], hidden=64, layers=2, heads=4, head_dim=16)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(Plan(3, SHAPE, all_columns=0.0), TOKENIZER, keep_questions=True)


@pytest.mark.thorough
def test_a_branch_has_the_hidden_states_of_its_chat_alone(batch):
    config = model_config(TINY, TOKENIZER)
    graph, state = fresh_parameters(config, seed=0)
    model: Decoder = nnx.merge(graph, state)
    hidden, _ = hidden_states(model, {k: jnp.asarray(v) for k, v in arrays(batch).items()}, "xla")
    room = SHAPE.prefix + SHAPE.branches

    @jax.jit
    def dense(tokens):
        return model(tokens, jnp.arange(room), DenseAttention())

    length = int(batch.lengths[0])
    for segment in (1, 2):
        mine = batch.segments[0] == segment
        tokens = np.concatenate([batch.prefix[0, :length], batch.tokens[0, mine]]).astype(np.int32)
        alone = dense(np.pad(tokens, (0, room - len(tokens))))
        np.testing.assert_allclose(hidden[0, :length], alone[:length], atol=2e-4)
        found = hidden[0, SHAPE.prefix :][mine]
        np.testing.assert_allclose(found, alone[length : len(tokens)], atol=2e-4)


@pytest.mark.slow
def test_a_step_lowers_the_loss_of_its_own_batch(batch):
    config = model_config(TINY, TOKENIZER)
    graph, parameters = fresh_parameters(config, seed=0)
    state = {"model": parameters, "pointers": fresh_pointers(config, seed=0)}
    transform = optimizer(3e-3, 100, warm_up=2)
    trainer = Trainer(graph, TOKENIZER.get_vocab()[NEWLINE], transform, "xla", jnp.float32)
    mesh = jax.make_mesh((1,), ("data",))
    state, moments = replicated((state, transform.init(state)), mesh)
    begin = np.float32(0)
    cut = (False, False, True, False, False)
    update = compiled(trainer.update, mesh, cut, (0, 1), state, moments, arrays(batch), begin)
    losses = []
    for _ in range(8):
        state, moments, metrics = update(state, moments, arrays(batch), begin)
        losses.append([float(metrics[name]) for name in ("answer", "row", "pointer", "ordinal")])
    for first, last in zip(losses[0], losses[-1], strict=True):
        assert last < 0.97 * first, losses


@pytest.mark.slow
def test_a_run_is_kept_continued_saved_and_loaded(tmp_path: Path):
    def args(*more: str) -> argparse.Namespace:
        given = "--size tiny --steps 6 --workers 0 --compute-dtype float32 --tables 0"
        paths = ["--out", str(tmp_path), "--state", str(tmp_path / "state.npz")]
        return train.parser().parse_args([*given.split(), *paths, *more])

    whole = train.Run(args())
    whole.train()
    first = train.Run(args("--minutes", "0"))  # stops after one step
    first.train()
    assert first.step == 1
    first.keep(tmp_path / "state.npz")
    second = train.Run(args())
    assert second.step == 1
    second.train()
    for one, other in zip(jax.tree.leaves(whole.state), jax.tree.leaves(second.state), strict=True):
        np.testing.assert_array_equal(one, other)

    second.save(tmp_path)
    loaded = load_model(tmp_path, dtype=None, progress=False)
    for one, other in zip(
        jax.tree.leaves(nnx.state(second.model())),
        jax.tree.leaves(nnx.state(loaded.model)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
