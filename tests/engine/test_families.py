"""Every family through the engine: chunks, shared prefixes and preemption change no token."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.batch.page_groups import pages_held
from rjax.models import DenseAttention, config_from_folder, load_model
from rjax.sampling import SamplingParams
from rjax.worker.engine_plan import groups_of

from .recorded import TESTS
from .tiny import make_engine, run

GOLDENS = TESTS / "golden"
# Of those with experts, the ones whose attention is latent.
LATENT = ("deepseek_v2_j5_k2_lite_fused", "deepseek_v3_j8_k3_groups", "glm4_moe_lite_j7_k3")
MULTIMODAL = tuple(json.loads((GOLDENS / "multimodal" / "cases.json").read_text()))
OTHERS = json.loads((GOLDENS / "families" / "cases.json").read_text())
CASES = sorted([*OTHERS, *LATENT, *MULTIMODAL])
LENGTH, NEW_TOKENS = 64, 8
DEAR = {"gemma4moe", "qwen3_next", "qwen3_5_moe"}

pytestmark = pytest.mark.usefixtures("no_annotations_checked")


def folder_of(name: str) -> Path:
    place = "experts" if name in LATENT else "multimodal" if name in MULTIMODAL else "families"
    return GOLDENS / place / "models" / name


def prompts() -> list[list[int]]:
    """Some that share three pages, one that shares none."""
    draw = np.random.default_rng(3)
    shared = draw.integers(3, 60, 24).tolist()
    return [
        (shared if i < 4 else []) + draw.integers(3, 60, size).tolist()
        for i, size in enumerate((3, 9, 17, 1, 25))
    ]


def greedy(folder) -> list[list[int]]:
    """The tokens of each prompt by plain forward passes, one sequence at a time."""
    loaded = load_model(folder, dtype="float32", progress=False, max_length=LENGTH)

    @jax.jit
    def logits(ids):
        return loaded.model.logits(loaded.model(ids, jnp.arange(LENGTH), DenseAttention()))

    found = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            padded = jnp.asarray(tokens + [0] * (LENGTH - len(tokens)))
            tokens.append(int(logits(padded)[len(tokens) - 1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def few_pages(folder) -> int:
    """Pages of one sequence of full length and one more."""
    groups = groups_of(config_from_folder(folder), page_size=8, max_model_len=LENGTH)
    return 1 + pages_held(groups.windows, LENGTH, 8)


def cases():
    """One of each family and relay attention alone: each compiles programs of its own. The goldens
    of tests/models have all. Those with towers, and some that compile for long, are thorough."""
    families = set()
    for name in CASES:
        family = re.split(r"_[a-z]\d", name)[0]
        dear = folder_of(name).parts[-3] == "multimodal" or family in DEAR
        for relay in ("on", "off", "auto"):
            first = relay == "on" and family not in families
            marks = (
                [] if first and not dear else pytest.mark.thorough if first else pytest.mark.slow
            )
            yield pytest.param(name, relay, marks=marks)
        families.add(family)


@pytest.mark.parametrize(("name", "relay"), [*cases()])
def test_tokens_are_those_of_plain_forward_passes(name, relay):
    engine = make_engine(
        folder_of(name),
        load_format="auto",
        dtype="float32",
        max_model_len=LENGTH,
        num_pages=few_pages(folder_of(name)),
        max_num_seqs=3,
        max_num_batched_tokens=16,
        enable_relay_attention=relay,
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    done = run(engine, [(str(i), prompt, params) for i, prompt in enumerate(prompts())])
    stats = engine.stats()
    if engine._worker.pool.windows == (None,):  # test_windows.py shows this for the others
        assert stats.preemptions > 0 or engine._worker.pool.states  # test_states.py for these
        assert stats.cached_tokens > 0
        assert (stats.kv_tokens_read < stats.kv_tokens_unshared) or relay != "on"
    found = [done[str(i)].outputs[0].token_ids for i in range(len(prompts()))]
    assert found == greedy(folder_of(name))
    engine.close()
