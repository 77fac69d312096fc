"""How a model is divided among devices: the rule, bytes of each device, and refusals."""

import math

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from plain_checkpoints import LLAMA
from quantised_files import FORMATS
from test_model_quantised_experts import QWEN2_MOE

from rjax.models import bytes_of_device, config_from_dict, place
from rjax.models.decoder import Decoder
from rjax.models.layers.experts import Experts


def mesh_of(devices):
    return AbstractMesh((devices,), ("tensor",))


def config_of(N=4, K=2, F=96, **more):
    heads = {"num_attention_heads": N, "num_key_value_heads": K, "intermediate_size": F}
    return config_from_dict(LLAMA | heads | more)


@given(K=st.integers(1, 12), G=st.integers(1, 8), devices=st.integers(1, 16))
def test_every_device_has_the_kv_heads_of_its_query_heads(K, G, devices):
    config = config_of(N=G * K, K=K, F=720720)
    if G * K % devices:
        with pytest.raises(ValueError, match=f"{devices} devices cannot share {G * K} query heads"):
            place(config, devices)
        return
    placed = place(config, devices)
    copies, heads = placed.kv_head_copies, placed.num_kv_heads
    assert heads == copies * K and heads % devices == 0
    assert copies == 1 or K % devices
    assert copies == min(r for r in range(1, devices + 1) if r * K % devices == 0)
    # Query head n reads KV head n // G of the checkpoint, and has the copy of its own device.
    own = placed.axis_sizes["G"]
    for n in range(G * K):
        copy = n // own
        assert copy // copies == n // G
        assert copy // (heads // devices) == n // (G * K // devices)
    assert place(placed, devices) == placed
    assert place(placed, 1) == config


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_bytes_of_a_device(devices):
    config = place(config_of(N=8, K=2, vocab_size=40), devices)
    model = Decoder(config, jnp.float32)
    H, D, F, V, L = 16, 64, 96, 40, 2
    heads = 8 // devices + 2 * math.ceil(2 / devices)
    layer = D * H * heads + H * 8 // devices * D + 3 * D * F // devices + 2 * D
    assert bytes_of_device(model, mesh_of(devices)) == 4 * (L * layer + D + 2 * V * D // devices)


def test_a_vocabulary_that_is_not_divisible_is_whole_on_each_device():
    sizes = [
        bytes_of_device(Decoder(place(config_of(vocab_size=V), 2), jnp.float32), mesh_of(2))
        for V in (40, 41)
    ]
    assert sizes[1] - sizes[0] == 4 * 64 * 2 * (41 - 20)


@pytest.mark.parametrize("parallel", [False, True])
def test_whole_experts_or_a_share_of_each(parallel):
    config = config_from_dict(QWEN2_MOE | {"num_experts": 6, "moe_intermediate_size": 30})
    sizes, experts = [], 0
    for devices in (1, 2):
        placed = place(config, devices, expert_parallel=parallel)
        model = Decoder(placed, jnp.float32)
        sizes.append(bytes_of_device(model, mesh_of(devices)))
        layers = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]
        assert {mlp.up.expert_parallel for mlp in layers} == {parallel}
        experts = sum(mlp.up.weight_bytes + mlp.down.weight_bytes for mlp in layers)
    assert experts == 4 * 2 * 6 * 3 * 64 * 30
    embedding = 2 * 4 * 40 * 64
    heads = 4 * 2 * (64 * 16 * (4 + 2 + 2) + 4 * 16 * 64 + 16 * (4 + 2 + 2))
    shared = 4 * 2 * 3 * 64 * 64
    assert sizes[0] - sizes[1] == (experts + embedding + heads + shared) // 2


@pytest.mark.parametrize(
    ("config", "devices", "parallel", "message"),
    [
        (config_of(), 3, False, "3 devices cannot share 4 query heads .*can use 1, 2, 4"),
        (config_of(N=14, K=2, F=70), 4, False, "14 query heads evenly; this model can use 1, 2, 7"),
        (config_of(F=98), 4, False, "98 units of the feed-forward width evenly; .*can use 1, 2"),
        (config_of(), 2, True, "LlamaForCausalLM has no experts"),
        (config_from_dict(QWEN2_MOE), 2, True, "2 devices cannot share 3 experts"),
        (
            config_from_dict(QWEN2_MOE | {"moe_intermediate_size": 33}),
            2,
            False,
            "33 units of the width of an expert",
        ),
        (
            config_from_dict(QWEN2_MOE | {"shared_expert_intermediate_size": 33}),
            2,
            False,
            "33 units of the width of the shared expert",
        ),
    ],
)
def test_what_cannot_be_shared_is_named(config, devices, parallel, message):
    with pytest.raises(ValueError, match=message):
        place(config, devices, expert_parallel=parallel)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("w4a16-channel", {}, "96 inputs of layers.0.mlp.down, stored as int4"),
        ("w4a16", {"head_dim": 8, "intermediate_size": 128}, "output.weight_scale: axis N"),
    ],
)
def test_values_that_belong_together_stay_on_one_device(name, values, message):
    quantised = LLAMA | values | {"quantization_config": FORMATS[name][0]}
    config = place(config_from_dict(quantised), 2)
    with pytest.raises(ValueError, match=message):
        bytes_of_device(Decoder(config, jnp.bfloat16), mesh_of(2))
