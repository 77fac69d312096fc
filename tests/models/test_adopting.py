"""New weights in place of a model's arrays."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import trainers
from field_cases import BASES, of
from flax import nnx

from rjax.models import CheckpointError, Decoder, config_from_dict, config_from_folder
from rjax.models.adopting.adopter import WeightAdopter
from rjax.models.adopting.mapping import NameMap, flat_items
from rjax.models.adopting.mappings import named_mapping
from rjax.models.adopting.staged import staged_tensors
from rjax.models.families import FAMILIES
from rjax.models.loading.pieces import split_parameter
from rjax.models.sharding import single_device_mesh

TINY = of("Llama", head_dim=16, num_hidden_layers=2)
MOE = of("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


class Held:
    """A model whose arrays new weights replace."""

    def __init__(self, config, dtype=jnp.float32):
        self.config = config_from_dict(config) if isinstance(config, dict) else config
        model = Decoder(self.config, dtype)
        state = nnx.state(model)
        self.leaves = [jnp.full(a.shape, 7, a.dtype) for a in jax.tree.leaves(state)]
        found, _ = jax.tree.flatten_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        self.variables = {".".join(str(k.key) for k in keys): leaf for keys, leaf in found}
        self.adopter = WeightAdopter(model, self.config, single_device_mesh())

    def check(self, weights, *, mapping=None, partial=False):
        names = NameMap(named_mapping(mapping, self.config))
        staged = staged_tensors(flat_items(weights), names)
        return self.adopter.check(staged, self.leaves, partial=partial)

    def update(self, weights, **how):
        self.adopter.commit(self.check(weights, **how), self.leaves)

    def values(self):
        return {p: np.asarray(a) for p, a in zip(self.variables, self.leaves, strict=True)}

    def tensors(self, shapes):
        """The tensors of a checkpoint that the arrays hold."""
        found = {}
        weights = FAMILIES[self.config.architecture].weights_of(self.config, shapes)
        for path, value in self.values().items():
            letters = self.variables[path].get_metadata("letters")
            if "J" in letters.split() and weights[path][0].of_expert:
                each = len(weights[path]) // len(value)
                experts = [weights[path][i : i + each] for i in range(0, len(weights[path]), each)]
                parts = [
                    (letters.replace("J ", ""), *pair) for pair in zip(value, experts, strict=True)
                ]
            else:
                parts = [(letters, value, weights[path])]
            for axes, part, pieces in parts:
                pieces = tuple(dataclasses.replace(piece, of_expert=False) for piece in pieces)
                for piece, tensor in split_parameter(part, axes, pieces, self.config):
                    whole = found.setdefault(
                        piece.tensor, np.zeros(shapes[piece.tensor], part.dtype)
                    )
                    rows = slice(piece.first_row, piece.first_row + len(tensor))
                    whole[rows] = tensor - np.float32(piece.offset)
        return found


@pytest.mark.sample(2, 6)
@pytest.mark.parametrize("family", BASES)
def test_the_arrays_are_those_of_the_tensors(family):
    held = Held(BASES[family])
    tensors = trainers.checkpoint(held.config)
    held.update(tensors)
    found = held.tensors({name: tensor.shape for name, tensor in tensors.items()})
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.allclose(found[name], tensor, rtol=0, atol=1e-6), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("mapping", ["maxtext", "tunix"])
def test_arrays_on_the_device_are_read_there(mapping):
    config = config_from_dict(MOE)
    tensors = trainers.checkpoint(config)
    tree = trainers.tunix(tensors, config)
    if mapping == "maxtext":
        tree = trainers.maxtext(tensors, config, scanned=True)
    held, other = Held(config), Held(config)
    held.update(jax.tree.map(jnp.asarray, tree), mapping=mapping)
    other.update(tensors)
    for name, value in held.values().items():
        assert np.array_equal(value, other.values()[name]), name
    # Equal layers share their programs, also where one array holds all of them.
    assert held.adopter.num_programs <= 11


def test_updates_compile_nothing_again_and_keep_no_array():
    held = Held(TINY)
    tensors = trainers.checkpoint(held.config)
    given = {name: jnp.asarray(tensor) for name, tensor in tensors.items()}
    held.update(given)
    programs, live = held.adopter.num_programs, len(jax.live_arrays())
    for count in range(200):
        old = list(held.leaves)
        held.update(given if count % 2 else tensors)
        assert all(leaf.is_deleted() for leaf in old), "the memory is taken over"
        del old
        if count == 0:
            programs = held.adopter.num_programs
    assert held.adopter.num_programs == programs
    assert len(jax.live_arrays()) == live
    assert not any(array.is_deleted() for array in given.values()), "a trainer keeps its own"


def test_dtypes_are_converted_as_in_a_checkpoint():
    held = Held(TINY, jnp.bfloat16)
    tensors = trainers.checkpoint(held.config)
    for dtype in (np.float64, ml_dtypes.bfloat16):
        given = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        held.update(given)
        assert all(leaf.dtype == jnp.bfloat16 for leaf in held.leaves)
        name = "model.embed_tokens.weight"
        right = given[name].astype(np.float32).astype(ml_dtypes.bfloat16)
        assert np.array_equal(held.values()["embedding.weight"], right)


def test_arrays_of_other_libraries_are_shared_and_not_copied():
    class Foreign:
        """What a library offers of an array."""

        def __init__(self, array):
            self._array, self.detached = array, False

        def detach(self):
            self.detached = True
            return self

        def __dlpack__(self, **options):
            assert self.detached, "PyTorch exports no tensor that requires a gradient"
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

    held = Held(TINY)
    tensors = trainers.checkpoint(held.config)
    held.update([(name, Foreign(tensor)) for name, tensor in tensors.items()])
    assert np.array_equal(held.values()["embedding.weight"], tensors["model.embed_tokens.weight"])


def test_a_trainer_may_change_its_arrays_after_an_update():
    held = Held(TINY)
    tensors = trainers.checkpoint(held.config)
    given = {name: tensor.copy() for name, tensor in tensors.items()}
    held.update(given)
    for tensor in given.values():
        tensor[:] = 0
    found = held.tensors({name: tensor.shape for name, tensor in tensors.items()})
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)


def test_a_part_of_a_fused_array_leaves_the_others():
    held = Held(of("Qwen2", num_hidden_layers=2))
    first, second = (trainers.checkpoint(held.config, seed) for seed in (0, 1))
    shapes = {name: tensor.shape for name, tensor in first.items()}
    held.update(first)
    attention, mlp = "model.layers.1.self_attn", "model.layers.0.mlp"
    for some in (
        [f"{attention}.q_proj.weight"],
        [f"{attention}.k_proj.weight", f"{attention}.v_proj.bias"],
        [f"{mlp}.up_proj.weight", "model.norm.weight"],
    ):
        first |= {name: second[name] for name in some}
        held.update({name: jnp.asarray(second[name]) for name in some}, partial=True)
        found = held.tensors(shapes)
        assert all(np.array_equal(found[name], first[name]) for name in first)


def test_a_tied_head_is_the_embedding():
    held = Held({**TINY, "tie_word_embeddings": True})
    tensors = trainers.checkpoint(held.config)
    embedding = tensors["model.embed_tokens.weight"]
    held.update(tensors | {"lm_head.weight": embedding.copy()})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        held.update(tensors | {"lm_head.weight": embedding + 1})
    with pytest.raises(CheckpointError, match="is the embedding in this model, which ties them"):
        held.update({"lm_head.weight": embedding}, partial=True)


def changed(tensors, name, value):
    return {**tensors, name: value}


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


Q = "model.layers.0.self_attn.q_proj.weight"
OUT = "model.layers.1.self_attn.o_proj.weight"
WRONG = {
    "a name": (
        lambda t: {**t, "model.layers.9.mlp.up_proj.weight": t[Q]},
        "model.layers.9.mlp.up_proj.weight is no tensor of LlamaForCausalLM",
    ),
    "a missing tensor": (
        lambda t: without(t, Q),
        f"{Q} is missing; give all tensors, or say partial=True to keep the others",
    ),
    "many missing tensors": (
        lambda t: {Q: t[Q]},
        "more are missing; give all tensors, or say partial=True",
    ),
    "none": (lambda t: {}, "model.embed_tokens.weight, model.norm.weight, "),
    "a shape": (
        lambda t: changed(t, "model.norm.weight", np.zeros(63, np.float32)),
        "model.norm.weight has the shape (63,); this model has (64,)",
    ),
    "a transposed matrix": (
        lambda t: changed(t, "model.layers.0.mlp.up_proj.weight", t[Q][:, :].repeat(2, 1)[:, :96]),
        "(64, 96); this model has (96, 64) ([outputs, inputs]: transpose it, or give a mapping)",
    ),
    "a type": (
        lambda t: changed(t, OUT, t[OUT].astype(np.int32)),
        f"{OUT} has the type I32; the model takes F32 or BF16 or F16 or F64",
    ),
    "NaN": (
        lambda t: changed(t, OUT, np.where(np.eye(64) == 1, np.nan, t[OUT]).astype(np.float32)),
        f"{OUT} holds NaN or infinity",
    ),
    "infinity on the device": (
        lambda t: changed(t, Q, jnp.asarray(t[Q]).at[3, 5].set(jnp.inf)),
        f"{Q} holds NaN or infinity",
    ),
    "a deleted array": (
        lambda t: changed(t, Q, deleted(t[Q])),
        f"{Q} was deleted or donated",
    ),
}


def deleted(array):
    array = jnp.array(array)
    array.delete()
    return array


@pytest.mark.sample(4)
@pytest.mark.parametrize("what", WRONG)
def test_wrong_weights_are_refused_and_change_nothing(what):
    held = Held(TINY)
    change, message = WRONG[what]
    with pytest.raises(CheckpointError) as caught:
        held.update(change(trainers.checkpoint(held.config)))
    assert message in str(caught.value)
    assert str(caught.value).startswith("the weights cannot be used: ")
    assert all((value == 7).all() for value in held.values().values())


@pytest.mark.parametrize(
    ("fields", "quantization", "name", "message"),
    [
        (
            TINY,
            "fp8",
            Q,
            "holds layers.0.attention.qkv.weight as fp8 with scales, which is replaced",
        ),
        (
            MOE,
            None,
            "model.layers.0.mlp.experts.3.up_proj.weight",
            "holds layers.0.mlp.up.weight as one array of all experts, which is replaced",
        ),
    ],
)
def test_arrays_that_are_replaced_as_a_whole_say_what_they_need(
    fields, quantization, name, message, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    held = Held(config_from_folder(tmp_path, quantization))
    tensors = trainers.checkpoint(held.config)
    with pytest.raises(CheckpointError) as caught:
        held.update({name: tensors[name]}, partial=True)
    assert message in str(caught.value)
    assert f"give them together with {name}" in str(caught.value)
