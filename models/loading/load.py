"""Load a model by name, or make one with random weights."""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from tqdm import tqdm

from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder
from rjax.models.layers.parameter import variable_sharding
from rjax.models.loading.blocks import Block, HostBuffers, host_buffers
from rjax.models.loading.config import config_from_folder, with_dequantised_weights, with_format
from rjax.models.loading.hub import resolve_folder
from rjax.models.loading.match import match
from rjax.models.loading.pipeline import Pipeline
from rjax.models.loading.plan import Planner
from rjax.models.loading.stored_model import stored_model
from rjax.models.loading.tensors import read_tensors
from rjax.models.placement import bytes_of_device, copy_kv_heads, place
from rjax.models.schemes.scheme import Initial
from rjax.models.sharding import TENSOR_AXIS, check_mesh, single_device_mesh

_STANDARD_DEVIATION = 0.02
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its config, and the local folder with its tokenizer files."""

    model: Decoder
    config: ModelConfig
    folder: Path


def load_model(
    model: str | Path,
    *,
    dtype: DTypeLike | None,
    load_format: str = "auto",
    quantization: str | None = None,
    dequantize: bool = False,
    revision: str | None = None,
    token: str | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    progress: bool = True,
    max_length: int | None = None,
    expert_parallel: bool = False,
) -> LoadedModel:
    """Load a Hugging Face folder or hub id onto devices.

    Args:
        model: a local folder, else a hub id.
        dtype: dtype of the parameters; None for that of the checkpoint.
        load_format: "auto" reads safetensors; "dummy" uses random weights and needs only
            config.json.
        quantization: "fp8", "int8" or "int4" quantises an unquantised checkpoint while it is
            loaded, rounding to nearest. None, or the ``quant_method`` of a quantised checkpoint,
            takes the weights as they are stored.
        dequantize: hold the weights in ``dtype``: those of a quantised checkpoint are dequantised
            while they are loaded, others are not quantised.
        revision, token: the model's revision and an access token, for the hub.
        mesh: devices, with the axis `tensor`; None for the first device only.
        seed: seed of dummy weights.
        progress: show a bar while loading.
        max_length: tokens of the longest sequence, which the rope types dynamic and longrope depend
            on; None for the context that the checkpoint declares.
        expert_parallel: each device holds whole experts, not a share of each.

    Raises:
        CheckpointError: the folder, its config or its weights cannot be used.
        ValueError: the dtype is not supported, or the mesh cannot divide the parameters.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format is {load_format!r}; it must be 'auto' or 'dummy'")
    folder = resolve_folder(model, revision, token, weights=load_format == "auto")
    config = config_from_folder(folder, quantization)
    if max_length is not None:
        config = config.for_length(max_length)
    if load_format == "dummy":
        config = with_dequantised_weights(config) if dequantize else config
        found = init_model(
            config, dtype=dtype, mesh=mesh, seed=seed, expert_parallel=expert_parallel
        )
        return LoadedModel(found, found.config, folder)
    if config.format is not None:
        stored = read_tensors(folder)
        types = {name: entry.dtype for name, entry in stored.items()}
        config = with_format(config, config.format.with_scale_types(types), stored)
    if dequantize:
        config = with_dequantised_weights(config)
    mesh = _checked(mesh)
    config = place(config, mesh.shape[TENSOR_AXIS], expert_parallel=expert_parallel)
    abstract = Decoder(config, _dtype(dtype, config))
    return LoadedModel(load_weights(abstract, config, folder, mesh, progress), config, folder)


def init_model(
    config: ModelConfig,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    expert_parallel: bool = False,
) -> Decoder:
    """A model with random weights: normal with deviation 0.02, biases 0, norms 1.

    Its config is placed on the mesh; see `place`. Raises ValueError if it cannot be.
    """
    mesh = _checked(mesh)
    config = place(config, mesh.shape[TENSOR_AXIS], expert_parallel=expert_parallel)
    return fill_randomly(Decoder(config, _dtype(dtype, config)), mesh, seed)


def _checked(mesh: Mesh | None) -> Mesh:
    if mesh is None:
        return single_device_mesh()
    check_mesh(mesh)
    return mesh


def _dtype(dtype: DTypeLike | None, config: ModelConfig) -> jnp.dtype:
    found = jnp.dtype(config.dtype if dtype is None else dtype)
    if found.name not in _DTYPES:
        raise ValueError(f"dtype is {found.name}; it must be one of {', '.join(_DTYPES)}")
    return found


def load_weights(
    model: Decoder,
    config: ModelConfig,
    folder: Path,
    mesh: Mesh,
    progress: bool,
    buffers: HostBuffers | None = None,
) -> Decoder:
    """Load the parameters from the safetensors files of the folder.

    Several threads read the tensors in file order, copy them to the devices and assemble the
    parameters there. Names, shapes, types and the values of scales are checked before that.

    Memory: at most the tensors of the next two parameters are in flight (being read, or on the
    devices and not assembled yet). On the CPU that is host memory. Other devices hold up to 512 MiB
    if that is more, and the host one block of 32 MiB for each of 8 threads, whatever the model.

    Args:
        model: the model, with abstract parameters.
        config: the model's config.
        folder: the folder with the safetensors files.
        mesh: the devices.
        progress: show a bar.
        buffers: host memory for the blocks; None for the kind that the devices need.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has the wrong shape or type, or a file is
            malformed or cannot be read; scales are zero or not finite, or scales of KV negative.
        ValueError: the devices cannot divide the parameters.
    """
    bytes_of_device(model, mesh)  # refuses what the devices cannot divide
    tensors = read_tensors(folder)
    stored = stored_model(model, config, {name: entry.shape for name, entry in tensors.items()})
    entries = match(stored.expected, tensors, config, folder)
    graph, state = nnx.split(model)
    buffers = buffers or host_buffers(mesh)
    planner = Planner(entries, config, mesh, buffers.block_bytes)
    plans = {
        paths: planner.plan(weight, [stored.parameters[path] for path in paths])
        for paths, weight in stored.weights.items()
    }
    plans = dict(sorted(plans.items(), key=lambda plan: min(map(_position, plan[1].blocks))))
    assert stored.parameters.keys() == set(itertools.chain(*plans))
    total = sum({entry.name: entry.size for entry in entries.values()}.values())
    values: dict[str, jax.Array] = {}
    with (
        tqdm(
            total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress
        ) as bar,
        Pipeline(
            list(plans.values()), buffers.load, buffers.ahead_bytes, reserves=buffers.reserves
        ) as loaded,
    ):
        for (paths, plan), arrays in zip(plans.items(), loaded, strict=True):
            values |= zip(paths, arrays, strict=True)
            bar.update(plan.size)
    filled = [
        (path, leaf.replace(values[".".join(map(str, path))]))
        for path, leaf in nnx.to_flat_state(state)
    ]
    # A nested state would leave a reference cycle in flax that keeps the weights alive.
    return nnx.merge(graph, nnx.FlatState(filled, sort=True))


def _position(block: Block) -> tuple[str, int]:
    entry = block.ranges[0][0]
    return entry.file.name, entry.offset


def fill_randomly(model: Decoder, mesh: Mesh, seed: int) -> Decoder:
    """The model with normal weights (standard deviation 0.02), zero biases and unit norms.

    The same seed gives the same values on any mesh.

    Raises ValueError if the devices cannot divide the parameters.
    """
    bytes_of_device(model, mesh)
    graph, state = nnx.split(model)
    key = jax.random.key(seed)
    filled = []
    for i, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        abstract = leaf.get_value()
        letters = leaf.get_metadata("letters")
        of_layer = model.config
        if path[0] == "layers":
            of_layer = of_layer.of_layer(int(str(path[1])))
        value = _draw(
            jax.random.fold_in(key, i),
            shape=abstract.shape,
            dtype=np.dtype(abstract.dtype),
            initial=leaf.get_metadata("initial"),
            sharding=variable_sharding(leaf, mesh),
            letters=letters,
            copies=of_layer.kv_head_copies,
            kv_projections=of_layer.kv_projections,
        )
        filled.append((path, leaf.replace(value)))
    # A nested state would leave a reference cycle in flax that keeps the weights alive.
    return nnx.merge(graph, nnx.FlatState(filled, sort=True))


@functools.partial(
    jax.jit,
    static_argnames=(
        *("shape", "dtype", "initial", "sharding", "letters", "copies", "kv_projections"),
    ),
)
def _draw(
    key: jax.Array,
    shape: tuple[int, ...],
    dtype: np.dtype,
    initial: Initial,
    sharding: NamedSharding,
    letters: str,
    copies: int,
    kv_projections: int,
) -> jax.Array:
    # Queries, keys and values are drawn as one device holds them.
    copied = copies > 1 and "K A" in letters and initial in ("normal", "integers")
    if copied:
        k = letters.split().index("K")
        K, A = shape[k] // copies, (shape[k + 1] - kv_projections) * copies + kv_projections
        shape = (*shape[:k], K, A, *shape[k + 2 :])
    match initial:
        case "normal":
            value = _STANDARD_DEVIATION * jax.random.normal(key, shape, jnp.float32)
        case "integers":
            limits = jnp.iinfo(dtype)
            value = jax.random.randint(key, shape, limits.min, limits.max + 1)
        case "ones":
            value = jnp.ones(shape, jnp.float32)
        case "zeros":
            value = jnp.zeros(shape, jnp.float32)
        case constant:
            value = jnp.full(shape, constant, jnp.float32)
    if copied:
        value = copy_kv_heads(value, letters, copies, kv_projections)
    return jax.lax.with_sharding_constraint(value.astype(dtype), sharding)
