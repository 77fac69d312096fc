"""The weights of a trainer's own model, as the functions of this package take them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rjax.functional.setup import Setup
from rjax.models.adopting.mapping import NameMap, WeightMapping, flat_items
from rjax.models.adopting.mappings import named_mapping
from rjax.models.adopting.plan import plan_update
from rjax.models.adopting.staged import staged_tensors
from rjax.models.errors import CheckpointError


def fuse_weights(setup: Setup, weights: Any, mapping: str | WeightMapping | None = None) -> Any:
    """Make the pytree of ``prepare`` from a trainer's weights.

    The function is pure: call it inside ``jax.jit``. Fused projections and arrays with other axes
    or dtypes are copied. Names and shapes are checked when it is traced, and values are not.

    Args:
        setup: the model's static part, from ``prepare``.
        weights: a nested mapping of arrays, such as ``flax.nnx.State`` or a dictionary; all of the
            model's tensors.
        mapping: the tensors that each array holds, see ``LLM.update_weights``; None where arrays
            have the names and axes of a Hugging Face checkpoint.

    Raises:
        CheckpointError: a tensor is unknown, missing, or has the wrong shape or type.
    """
    staged = staged_tensors(flat_items(weights), NameMap(named_mapping(mapping, setup.config)))
    abstract = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in setup.leaves]
    state = jax.tree.unflatten(setup.treedef, abstract)
    plan = plan_update(
        nnx.merge(setup.graph, state),
        setup.config,
        setup.mesh,
        staged,
        dict.fromkeys(staged, True),
        partial=False,
    )
    made: dict[str, jax.Array] = {}
    for weight in plan.weights:
        tensors = [staged[name] for names in weight.tensors for name in names]
        arrays = tuple(jnp.asarray(tensor.array) for tensor in tensors)
        indices = jnp.asarray([(*tensor.index, 0, 0)[:2] for tensor in tensors], jnp.int32)
        made |= zip(weight.paths, weight.program.trace(arrays, indices, ()), strict=True)
    paths = _paths(state)
    missing = [path for path in paths if path not in made]
    if missing:
        raise CheckpointError(f"the weights cannot be used: they lack {', '.join(missing[:3])}")
    leaves = [
        made[path].astype(dtype) for path, (_, dtype) in zip(paths, setup.leaves, strict=True)
    ]
    return jax.tree.unflatten(setup.treedef, leaves)


def prepared_weights(setup: Setup, weights: Any, mapping: str | WeightMapping | None) -> Any:
    """The weights as they are, if they have the paths of ``prepare``; else ``fuse_weights``."""
    if jax.tree.structure(weights) == setup.treedef:
        return weights
    if isinstance(weights, nnx.State):
        state = jax.tree.unflatten(setup.treedef, setup.leaves)
        if _paths(weights) == _paths(state):  # with other metadata
            return weights
    return fuse_weights(setup, weights, mapping)


def _paths(state: Any) -> list[str]:
    """The path of each variable, such as "layers.0.attention.qkv.weight"."""
    variables, _ = jax.tree.flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    return [".".join(str(key.key) for key in keys) for keys, _ in variables]
