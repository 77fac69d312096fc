"""Tunix: its GRPO learner with rjax as the engine of the rollouts, in one process on the CPU."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tasks import Asked, run
from transformers import AutoTokenizer
from tunix import ClusterConfig, GRPOConfig, GRPOLearner, RLCluster, RLTrainingConfig, Role
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common
from tunix.rl.rollout.base_rollout import RolloutConfig

from rjax.integrations.tunix import RjaxRollout

SAMPLES, NEW = 4, 8
ROLLOUT = RolloutConfig(
    max_tokens_to_generate=NEW,
    max_prompt_length=32,
    kv_cache_size=64,
    temperature=1.0,
    return_logprobs=True,
)
PROMPTS = ["Who lives in Peru?", "How old is Ada?"]


def make_model(given: Asked, seed: int) -> tuple[qwen3.Qwen3, str]:
    """A tiny random Qwen3 of Tunix, and a folder with its configuration for rjax."""
    source = Path(given.model_folder)
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    config["rope_theta"] = 1_000_000  # Tunix's model has this one, whatever its configuration says
    folder = Path(tempfile.mkdtemp())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((source / name).read_text())
    (folder / "config.json").write_text(json.dumps(config))
    sizes = qwen3.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    model = qwen3.Qwen3(sizes, rngs=nnx.Rngs(seed))
    random = np.random.default_rng(seed)
    drawn = jax.tree.map(
        lambda leaf: leaf + 0.1 * random.normal(size=leaf.shape).astype(np.float32),
        nnx.state(model, nnx.Param),
    )
    nnx.update(model, drawn)
    return model, str(folder)


def make_engine(folder: str) -> Any:
    return functools.partial(
        RjaxRollout,
        checkpoint=folder,
        dtype="float32",
        page_size=8,
        num_pages=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )


def actor_logps(model: nnx.Module, rollout: Any, output: Any) -> np.ndarray:
    """Tunix's own logprobs of sampled answers."""
    answers = np.full((len(output.tokens), NEW), rollout.pad_id(), np.int32)
    for row, tokens in zip(answers, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    prompts = jax.numpy.asarray(output.left_padded_prompt_tokens)
    answers = jax.numpy.asarray(answers)
    graph, state = nnx.split(model)
    wanted = common.compute_per_token_logps(
        graph,
        state,
        prompt_tokens=prompts,
        completion_tokens=answers,
        pad_id=rollout.pad_id(),
        eos_id=rollout.eos_id(),
        stop_gradient=True,
        return_logits=False,
    )
    scored = np.asarray(rollout.get_per_token_logps(prompts, answers))
    wanted = np.asarray(wanted[0] if isinstance(wanted, tuple) else wanted)
    for i, tokens in enumerate(output.tokens):
        np.testing.assert_allclose(scored[i, : len(tokens)], wanted[i, : len(tokens)], atol=1e-4)
    return wanted


def check_rollout(model: nnx.Module, rollout: Any) -> list[np.ndarray]:
    """The rollout samples from the model: its logprobs are those of the model."""
    output = rollout.generate([p for p in PROMPTS for _ in range(SAMPLES)], ROLLOUT)
    wanted = actor_logps(model, rollout, output)
    for found, row in zip(output.logprobs, wanted, strict=True):
        np.testing.assert_allclose(found, row[: len(found)], atol=1e-4)
    assert len({tuple(tokens) for tokens in output.tokens}) > len(PROMPTS)
    return output.logprobs


def rollout(given: Asked) -> None:
    """A rollout follows its model's parameters."""
    model, folder = make_model(given, 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = make_engine(folder)(model, tokenizer, None, ROLLOUT)
    first = check_rollout(model, found)
    other, _ = make_model(given, 1)
    found.update_params(nnx.state(other, nnx.Param), (nnx.Param,))
    second = check_rollout(other, found)
    assert not np.allclose(np.concatenate(first).mean(), np.concatenate(second).mean(), atol=1e-3)
    again = [found.generate(PROMPTS, ROLLOUT, seed=3).text for _ in range(2)]
    assert again[0] == again[1]
    found.close()


def grpo(given: Asked) -> None:
    """Tunix's GRPO learner trains with it."""
    model, folder = make_model(given, 2)
    reference, _ = make_model(given, 2)
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    seen: list[float] = []

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        found = [len(text) % 7 / 6 for text in completions]
        seen.extend(found)
        return found

    cluster = RLCluster(
        actor=model,
        reference=reference,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        cluster_config=ClusterConfig(
            role_to_mesh={role: mesh for role in (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)},
            rollout_engine=make_engine(folder),
            offload_to_cpu=False,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.sgd(0.1), eval_every_n_steps=100, max_steps=4
            ),
            rollout_config=ROLLOUT,
        ),
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=reward,
        algo_config=GRPOConfig(num_generations=SAMPLES, num_iterations=2, beta=0.04),
    )
    learner.train([{"prompts": np.array(PROMPTS)} for _ in range(2)])
    assert len(seen) == 2 * SAMPLES * len(PROMPTS)
    trained = nnx.state(cluster.actor_trainer.model, nnx.Param)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, trained)
    assert all(jax.tree.leaves(changed))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trained))
    check_rollout(cluster.actor_trainer.model, cluster.rollout)


run(rollout, grpo)
