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

from models import BUNDLED_MODEL, Decoder, DenseAttention, load_model
from models.tables import train
from models.tables.data import Batch, Plan, Shape, make_batch
from models.tables.decode import answer_questions
from models.tables.scoring import held_out_sheets
from models.tables.step import Trainer, _hidden, arrays, fresh_parameters, optimizer

TOKENIZER = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
SHAPE = Shape(batch=2, prefix=240, branches=160, rows=(3, 4))
TINY = dataclasses.replace(train.SIZES["tiny"], hidden=64, layers=2, heads=4, head_dim=16)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(Plan(3, SHAPE, all_columns=0.0), TOKENIZER, keep_questions=True)


def test_a_branch_has_the_hidden_states_of_its_chat_alone(batch):
    config = train.model_config(TINY, TOKENIZER)
    graph, state = fresh_parameters(config, seed=0)
    model: Decoder = nnx.merge(graph, state)
    hidden = _hidden(model, {k: jnp.asarray(v) for k, v in arrays(batch).items()}, "xla")
    for b in range(SHAPE.batch):
        length = int(batch.lengths[b])
        for segment in (1, 2):
            mine = batch.segments[b] == segment
            tokens = np.concatenate([batch.prefix[b, :length], batch.tokens[b, mine]])
            alone = model(jnp.asarray(tokens, jnp.int32), jnp.arange(len(tokens)), DenseAttention())
            np.testing.assert_allclose(hidden[b, :length], alone[:length], atol=2e-4)
            found = hidden[b, SHAPE.prefix :][mine]
            np.testing.assert_allclose(found, alone[length:], atol=2e-4)


def test_a_step_lowers_the_loss_of_its_own_batch(batch):
    graph, state = fresh_parameters(train.model_config(TINY, TOKENIZER), seed=0)
    transform = optimizer(3e-3, 100, warm_up=2)
    trainer = Trainer(graph, transform, "xla", jnp.float32)
    update = jax.jit(trainer.update)
    moments = transform.init(state)
    losses = []
    for _ in range(8):
        state, moments, metrics = update(state, moments, arrays(batch))
        losses.append(float(metrics["answer"]))
    assert losses[-1] < 0.7 * losses[0]
