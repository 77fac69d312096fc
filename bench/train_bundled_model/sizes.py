"""Sizes of the model, and the curriculum of each: stages and their batches."""

import dataclasses
import random

from tokenizers import Tokenizer

from bench.train_bundled_model.data import (
    NOTHING_BESIDE,
    Beside,
    Plan,
    Shape,
)
from bench.train_bundled_model.tokenizer import MAX_LENGTH
from rjax.models.config import ModelConfig
from rjax.models.loading.config import config_from_dict


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Part of the curriculum, up to a share of the steps.

    Attributes:
        until: share of all steps at which the next stage begins.
        shares: how often each of the run's shapes comes.
        key_first: share of tables that begin with id and name.
        all_columns: share of tables with all columns.
        beside: what is asked beside questions about a table.
        plain: see `table.random_table`.
    """

    until: float
    shares: tuple[float, ...]
    key_first: float
    all_columns: float
    beside: Beside = NOTHING_BESIDE
    plain: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A model's size, the shapes it is trained with and the one it is checked with."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    shapes: tuple[Shape, ...]
    check: Shape
    stages: tuple[Stage, ...]

    def of_examples(self, most: int | None) -> "Size":
        """The same size, with batches of at most ``most`` examples; None leaves them."""
        if most is None:
            return self
        shapes, check = (
            tuple(dataclasses.replace(s, batch=min(s.batch, most)) for s in group)
            for group in (self.shapes, (self.check,))
        )
        return dataclasses.replace(self, shapes=shapes, check=check[0])


SIZES = {
    "full": Size(
        hidden=384,
        layers=10,
        heads=6,
        kv_heads=3,
        head_dim=64,
        feed_forward=1024,
        shapes=(
            Shape(144, 640, 1024, (3, 8)),
            Shape(96, 1408, 1536, (5, 20)),
            Shape(48, 2688, 2048, (18, 40)),
        ),
        check=Shape(48, 2688, 2048, (5, 40)),
        stages=(
            Stage(0.10, (1.0, 0.0, 0.0), 0.2, 0.5),
            Stage(0.20, (0.5, 0.5, 0.0), 0.1, 0.6),
            Stage(0.30, (0.2, 0.5, 0.3), 0.0, 0.7),
            Stage(
                1.00,
                (0.1, 0.3, 0.6),
                0.0,
                0.75,
                Beside(tableless=0.1, unrelated=0.05, turns=0.1, mistyped=0.25),
                plain=0.25,
            ),
        ),
    ),
    "tiny": Size(
        hidden=128,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=32,
        feed_forward=256,
        shapes=(Shape(8, 384, 256, (3, 4)),),
        check=Shape(8, 384, 256, (3, 4)),
        stages=(Stage(1.0, (1.0,), 1.0, 0.0),),
    ),
}


def model_config(size: Size, tokenizer: Tokenizer) -> ModelConfig:
    """The Llama configuration of a size."""
    return config_from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": size.hidden,
            "intermediate_size": size.feed_forward,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "head_dim": size.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_LENGTH,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }
    )


def plans(size: Size, steps: int, seed: int, curriculum: bool) -> list[Plan]:
    """What every step's batch is drawn from; without curriculum, as in its last stage."""
    rng = random.Random(seed)
    made = []
    for step in range(steps):
        stage = size.stages[-1]
        if curriculum:
            stage = next(s for s in size.stages if step < s.until * steps)
        (shape,) = rng.choices(size.shapes, stage.shares)
        made.append(
            Plan(
                rng.getrandbits(48),
                shape,
                all_columns=stage.all_columns,
                key_first=stage.key_first,
                beside=stage.beside,
                plain=stage.plain,
            )
        )
    return made
