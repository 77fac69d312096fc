"""How a model is divided among the devices of a mesh."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder
from rjax.models.layer_config import LayerConfig
from rjax.models.layers.linear import Linear
from rjax.models.layers.parameter import bits, variable_spec
from rjax.models.sharding import TENSOR_AXIS


def place(config: ModelConfig, devices: int, *, expert_parallel: bool = False) -> ModelConfig:
    """The config of a model that is divided over devices.

    The devices must divide the query heads. KV heads that they do not divide are copied: each is
    held ``kv_head_copies`` times, by neighbouring devices, and the copies share its query heads.
    Query heads keep their order. The devices must also divide the key heads of linear attention,
    whose value heads and states follow them, and the feed-forward widths; with
    ``expert_parallel`` they divide the number of experts instead of the width of each.

    Args:
        config: the model's config, placed or not.
        devices: number of devices on the mesh axis `tensor`.
        expert_parallel: each device holds whole experts.

    Raises:
        ValueError: it cannot be divided so; the message says what can.
    """
    if expert_parallel and config.experts is None:
        raise ValueError(
            f"{config.architecture} has no experts to spread over devices; leave expert "
            "parallelism out"
        )
    shared = _shared_sizes(config, expert_parallel)
    for what, size in shared.items():
        if size % devices:
            most = min(shared.values())
            works = [n for n in range(1, most + 1) if all(s % n == 0 for s in shared.values())]
            raise ValueError(
                f"{devices} devices cannot share {size} {what} evenly; this model can use "
                f"{', '.join(map(str, works))}"
            )
    experts = config.experts
    return dataclasses.replace(
        config,
        **_copied_heads(config, devices),
        layers=tuple(
            dataclasses.replace(layer, **_copied_heads(layer, devices)) for layer in config.layers
        ),
        experts=experts and dataclasses.replace(experts, parallel=expert_parallel),
    )


def _copied_heads(sizes: ModelConfig | LayerConfig, devices: int) -> dict[str, int]:
    """The KV heads with copies, as many as the devices need, and how often each is held."""
    num_kv_heads = sizes.num_kv_heads // sizes.kv_head_copies
    copies = devices // math.gcd(num_kv_heads, devices)
    return {"num_kv_heads": copies * num_kv_heads, "kv_head_copies": copies}


def _shared_sizes(config: ModelConfig, expert_parallel: bool) -> dict[str, int]:
    """What the devices of a mesh share out evenly."""
    sizes = {"query heads": config.num_heads}
    if config.linear is not None:
        sizes["key heads of linear attention"] = config.linear.key_heads
    experts = config.experts
    if experts is None or not all(experts.layers):
        sizes["units of the feed-forward width"] = config.intermediate_size
    if experts is not None:
        if expert_parallel:
            sizes["experts"] = experts.num_experts
        else:
            sizes["units of the width of an expert"] = experts.width
        if experts.shared_width is not None:
            sizes["units of the width of the shared expert"] = experts.shared_width
    return sizes


def bytes_of_device(model: Decoder, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of the parameters that one device of a mesh holds; the model may be abstract.

    Raises:
        ValueError: the devices cannot divide a parameter, or would share values that are
            interleaved with each other.
    """
    devices = mesh.shape[TENSOR_AXIS]
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            _check_interleaved(".".join(map(str, path)), module, mesh)
    total = 0
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        array = leaf.get_value()
        try:
            spec = variable_spec(leaf, mesh)
        except ValueError as error:
            raise ValueError(f"{'.'.join(map(str, path))}: {error}") from None
        size = array.size // (devices if any(spec) else 1)
        total += math.ceil(size * bits(array.dtype) / 8)
    return total


def _check_interleaved(path: str, module: Linear, mesh: Mesh | AbstractMesh) -> None:
    """Raise ValueError if devices would share values that are interleaved with each other."""
    devices = mesh.shape[TENSOR_AXIS]
    weight: nnx.Variable = getattr(module, "weight")  # noqa: B009 - made by the scheme
    spec = variable_spec(weight, mesh)
    size = weight.get_value().shape[-1]
    is_interleaved = module.storage.is_interleaved
    if any(spec[-1:]) and is_interleaved((size,)) and not is_interleaved((size // devices,)):
        raise ValueError(
            f"{devices} devices cannot share the {size} inputs of {path}, stored as "
            f"{module.scheme.name}, evenly; use fewer"
        )


def copy_kv_heads(
    value: Array | np.ndarray, letters: str, copies: int, kv_projections: int = 2
) -> Array:
    """A projection of queries, keys and values with each KV head copied.

    Args:
        value: an array with axes K and A next to each other; A ends with a key and a value.
        letters: the axis letters of ``value``.
        copies: number of copies of each KV head.
        kv_projections: entries at the end of A, two for a key and a value; see `LayerConfig`.

    Returns:
        The same with K * copies KV heads, which share the other entries of A.
    """
    axis = letters.split().index("K")
    assert letters.split()[axis + 1] == "A"
    K, A = value.shape[axis : axis + 2]
    queries, kv = jnp.split(jnp.asarray(value), [A - kv_projections], axis + 1)
    before, after = value.shape[:axis], value.shape[axis + 2 :]
    queries = queries.reshape(*before, K * copies, (A - kv_projections) // copies, *after)
    return jnp.concatenate([queries, jnp.repeat(kv, copies, axis)], axis + 1)
