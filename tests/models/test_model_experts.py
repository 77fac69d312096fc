"""Mixtures of experts: routing, the operation beside a float32 reference, goldens, loading."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from forward import logits_of
from golden import compare
from plain_checkpoints import LLAMA, write_plain, write_tensors
from safetensors.numpy import load_file

from rjax import models
from rjax.pallas_kernels.experts.base import Router, experts, route
from rjax.pallas_kernels.experts.work_list import make_work_list, max_tiles, tile_rows
from rjax.pallas_kernels.gemm.activation import Activation

GOLDENS = Path(__file__).parent.parent / "golden" / "experts"
CASES = sorted(json.loads((GOLDENS / "cases.json").read_text()))
SWIGLU = Activation("silu", gated=True)


def reference(h, chosen, weights, up, down):
    """Every expert on every row, in float32; then those that were not chosen are masked."""
    both = np.einsum("TD,JDAI->TJAI", h, up)
    gate, up_ = both[:, :, 0], both[:, :, 1]
    each = np.einsum("TJI,JID->TJD", gate / (1 + np.exp(-gate)) * up_, down)
    mask = np.zeros((len(h), len(up)), np.float32)
    for x in range(chosen.shape[1]):
        for t in range(len(h)):
            if chosen[t, x] < len(up):
                mask[t, chosen[t, x]] += weights[t, x]
    return np.einsum("TJD,TJ->TD", each, mask)


def problem(T, J, X, D, F, seed=0):
    draw = np.random.default_rng(seed)
    h = draw.normal(size=(T, D)).astype(np.float32)
    up = (draw.normal(size=(J, D, 2, F)) / D**0.5).astype(np.float32)
    down = (draw.normal(size=(J, F, D)) / F**0.5).astype(np.float32)
    chosen = np.stack([draw.permutation(J)[:X] for _ in range(T)]).astype(np.int32)
    weights = draw.random((T, X)).astype(np.float32)
    return h, chosen, weights, up, down


@jax.jit
def run(h, chosen, weights, up, down):
    return experts(h, chosen, weights, up, down, SWIGLU).reduce()


@pytest.mark.parametrize(
    ("T", "J", "X", "D", "F"),
    [(1, 8, 2, 32, 24), (3, 5, 5, 40, 7), (64, 16, 4, 24, 16), (33, 7, 3, 56, 33)],
)
def test_experts_equal_the_reference(T, J, X, D, F):
    arrays = problem(T, J, X, D, F)
    np.testing.assert_allclose(run(*arrays), reference(*arrays), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["one expert", "two experts", "rows without experts"])
def test_skewed_routing_drops_no_row(kind):
    h, chosen, weights, up, down = problem(96, 12, 2, 16, 24)
    if kind == "one expert":
        chosen = np.stack([np.full(96, 3), np.full(96, 11)], 1).astype(np.int32)
        weights[:, 1] = 0
    elif kind == "two experts":
        chosen = np.tile(np.array([[11, 0]], np.int32), (96, 1))
    else:
        chosen[10:90] = 12
    found = run(h, chosen, weights, up, down)
    np.testing.assert_allclose(found, reference(h, chosen, weights, up, down), rtol=2e-5, atol=2e-5)
    if kind == "rows without experts":
        assert not np.asarray(found)[10:90].any()


@pytest.mark.thorough
def test_gradients_are_those_of_the_reference():
    h, chosen, weights, up, down = problem(12, 5, 2, 16, 8)

    def loss(h, weights, up, down):
        found = experts(h, jnp.asarray(chosen), weights, up, down, SWIGLU, differentiable=True)
        return jnp.sin(found.reduce()).sum()

    def wanted(h, weights, up, down):
        both = jnp.einsum("TD,TXDAI->TXAI", h, up[chosen])
        hidden = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
        each = jnp.einsum("TXI,TXID->TXD", hidden, down[chosen])
        return jnp.sin((each * weights[..., None]).sum(1)).sum()

    arrays = tuple(map(jnp.asarray, (h, weights, up, down)))
    for ours, theirs in zip(
        jax.grad(loss, (0, 1, 2, 3))(*arrays),
        jax.grad(wanted, (0, 1, 2, 3))(*arrays),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def test_thousands_of_rows():
    arrays = problem(3000, 8, 2, 16, 8)
    np.testing.assert_allclose(run(*arrays), reference(*arrays), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("T", [8, 40])
def test_a_row_does_not_depend_on_the_experts_of_others(dtype, T):
    h, chosen, weights, up, down = problem(T, 6, 2, 64, 48)
    draw = np.random.default_rng(1)

    def bits(h, chosen, weights):
        arrays = [jnp.asarray(a, dtype) for a in (h, up, down)]
        return np.asarray(run(arrays[0], chosen, weights, *arrays[1:]).astype(jnp.float32))

    found = bits(h, chosen, weights)
    for _ in range(4):
        others = draw.permutation(T)
        kept, moved = others[: T // 2], draw.permutation(T)[: T // 2]
        h2, c2, w2 = (
            np.array(a) for a in problem(T, 6, 2, 64, 48, seed=int(draw.integers(99)))[:3]
        )
        h2[moved], c2[moved], w2[moved] = h[kept], chosen[kept], weights[kept]
        np.testing.assert_array_equal(bits(h2, c2, w2)[moved], found[kept])


@pytest.mark.sample(2, 0)
@pytest.mark.parametrize(
    ("T", "X", "J", "R"),
    [(1, 1, 1, None), (1, 8, 128, None), (64, 8, 128, None), (50, 3, 7, 16), (700, 4, 7, None)],
)
def test_the_work_list_holds_every_pair_once(T, X, J, R):
    draw = np.random.default_rng(T)
    for skew in (False, True):
        if skew and T == 1:
            continue
        chosen = draw.integers(0, 1 if skew else J + 1, (T, X)).astype(np.int32)
        if T == 1:
            chosen = draw.permutation(J)[None, :X].astype(np.int32)
        work = jax.jit(make_work_list, static_argnums=(1, 2))(chosen, J, R)
        rows = work.tile_rows
        assert rows == (R or tile_rows(T * X, J))
        assert work.tile_expert.shape == (max_tiles(T * X, J, rows),)
        slots = np.asarray(work.slot_pair)
        found = np.sort(slots[slots >= 0])
        np.testing.assert_array_equal(found, np.flatnonzero(chosen.reshape(-1) < J))
        for slot, pair in enumerate(slots):
            if pair >= 0:
                assert slot // rows < work.num_tiles[0]
                assert work.tile_expert[slot // rows] == chosen.reshape(-1)[pair]
                assert work.pair_slot.reshape(-1)[pair] == slot
        lost = np.asarray(work.pair_slot)[chosen >= J]
        assert (lost == len(slots)).all()
        assert np.asarray(work.num_tiles)[0] == len({s // rows for s in np.flatnonzero(slots >= 0)})


@pytest.mark.parametrize("T", [1, 6, 300])
def test_pairs_of_experts_elsewhere_have_no_slot(T):
    J, X, held, first = 12, 3, 4, 4
    draw = np.random.default_rng(T)
    for skew in ("none", "all", "any"):
        span = {"none": (8, 12), "all": (4, 8), "any": (0, 12)}[skew]
        chosen = np.stack([draw.permutation(np.arange(*span))[:X] for _ in range(T)])
        own = np.where((chosen >= first) & (chosen < first + held), chosen - first, held)
        make = functools.partial(make_work_list, num_experts=held, num_elsewhere=J - held)
        work = jax.jit(make)(own.astype(np.int32))
        assert work.tile_rows == tile_rows(T * X, J)  # as on one device
        slots = np.asarray(work.slot_pair)
        np.testing.assert_array_equal(np.sort(slots[slots >= 0]), np.flatnonzero(own < held))
        for slot in np.flatnonzero(slots >= 0):
            tile = slot // work.tile_rows
            assert tile < work.num_tiles[0]
            assert work.tile_expert[tile] == own.reshape(-1)[slots[slot]]
        assert (np.asarray(work.pair_slot)[own == held] == len(slots)).all()
        assert (work.num_tiles[0] == 0) == (own == held).all()


def test_of_equal_scores_the_lower_index_wins():
    logits = jnp.asarray([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    for router in (Router(), Router("sigmoid"), Router("softmax_of_topk")):
        assert route(logits, router, 2).experts.tolist() == [[1, 2], [0, 1]]


def test_router_options():
    logits = jnp.asarray([[0.0, 2.0, 1.0, -1.0, 0.5, 0.4, 3.0, -9.0]])
    probs = np.asarray(jax.nn.softmax(logits))[0]
    plain = route(logits, Router(), 2)
    assert plain.experts.tolist() == [[6, 1]]
    np.testing.assert_allclose(plain.weights[0], probs[[6, 1]], rtol=1e-6)
    normed = route(logits, Router(renormalise=True, scale=2.5), 2)
    np.testing.assert_allclose(normed.weights.sum(), 2.5, rtol=1e-6)
    chosen = route(logits, Router("softmax_of_topk"), 2)
    np.testing.assert_allclose(chosen.weights, normed.weights / 2.5, rtol=1e-6)
    sigmoid = jax.nn.sigmoid(logits)[0]
    biased = route(logits, Router("sigmoid", correction_bias=True), 2, jnp.eye(8)[7] * 4)
    assert biased.experts.tolist() == [[7, 6]]
    np.testing.assert_allclose(biased.weights[0], sigmoid[jnp.asarray([7, 6])], rtol=1e-6)
    grouped = route(logits, Router("sigmoid", num_groups=4, top_groups=1), 2)
    assert grouped.experts.tolist() == [[1, 0]]  # 6 is better, but its group is not


@pytest.mark.parametrize("name", CASES)
def test_equals_goldens(name):
    compare(GOLDENS, name)


def _router(**changes):
    def change(config):
        experts = dataclasses.replace(
            config.experts, router=dataclasses.replace(config.experts.router, **changes)
        )
        return dataclasses.replace(config, experts=experts)

    return change


def _fewer(config):
    experts = dataclasses.replace(config.experts, top_k=config.experts.top_k - 1)
    return dataclasses.replace(config, experts=experts)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3_moe_j7_k3_some_layers", _router(renormalise=False)),
        ("qwen3_moe_j16_k8_fused", _router(renormalise=True)),
        ("mixtral_j5_k2_window", _fewer),
    ],
)
def test_goldens_would_show_a_lost_option(name, change):
    loaded = models.load_model(GOLDENS / "models" / name, dtype="float32", progress=False)
    expected = load_file(GOLDENS / "expected" / f"{name}.safetensors")
    graph, _ = nnx.split(models.Decoder(change(loaded.config), jnp.float32))
    model = nnx.merge(graph, nnx.state(loaded.model))
    found = logits_of(model, expected["tokens"], expected["positions"])
    difference = np.linalg.norm(found - expected["logits"])
    assert difference > 0.01 * np.linalg.norm(expected["logits"])


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def test_formats_and_experts_that_do_not_go_together():
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(models.CheckpointError, match="all experts of a layer in one tensor"):
        models.config_from_dict(GPT_OSS | {"quantization_config": fp8})
    mxfp4 = {"quant_method": "mxfp4"}
    with pytest.raises(models.CheckpointError, match="for the experts of gpt-oss"):
        models.config_from_dict(LLAMA | {"quantization_config": mxfp4})


GLM4_MOE = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path):
    plain = write_plain(tmp_path / "plain", GLM4_MOE)
    tensors = load_file(plain / "model.safetensors")
    more = {"model.layers.2.eh_proj.weight": np.ones((2, 2), np.float32)}
    folder = write_tensors(tmp_path / "more", GLM4_MOE, tensors | more)
    wanted = models.load_model(plain, dtype=None, progress=False).model
    found = models.load_model(folder, dtype=None, progress=False).model
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    unknown = write_tensors(tmp_path / "unknown", GLM4_MOE, tensors | {"model.x": np.ones(1)})
    with pytest.raises(models.CheckpointError, match=r"model\.x"):
        models.load_model(unknown, dtype=None, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({"n_group": 3}, "n_group is 3 and n_routed_experts 4"),
        ({"n_group": 4}, "at least 2"),
        ({"topk_group": 2}, "topk_group is 2"),
    ],
)
def test_experts_that_cannot_be_chosen_are_refused(changes, message):
    with pytest.raises(models.CheckpointError, match=message):
        models.config_from_dict(GLM4_MOE | changes)
