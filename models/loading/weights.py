"""Load the weights of a checkpoint folder into an abstract model."""

import itertools
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder
from rjax.models.families import FAMILIES
from rjax.models.layers.grouped_linear import GroupedLinear
from rjax.models.layers.linear import Linear
from rjax.models.loading.blocks import Block
from rjax.models.loading.checkpoint_folder import read_tensors
from rjax.models.loading.host_buffers import HostBuffers, host_buffers
from rjax.models.loading.kv_scales import kv_scale_tensors
from rjax.models.loading.match import Expected, match
from rjax.models.loading.pieces import Piece, Weights, module_of
from rjax.models.loading.pipeline import Pipeline
from rjax.models.loading.plan import (
    Planner,
    StoredWeight,
    plain_weight,
    scheme_weight,
    stored_tensors,
)
from rjax.models.placement import bytes_of_device
from rjax.models.schemes import UNQUANTISED

_HEAD = "head.weight"


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
    family = FAMILIES[config.architecture]
    weights = family.weights_of(config, tensors)
    kv_scales = kv_scale_tensors(config)
    quantised = _quantised_weights(model, config, weights)
    stored = [
        tensor
        for weight in quantised.values()
        for piece in weight.pieces
        for tensor in stored_tensors(piece, weight.format, config).values()
    ]
    expected = Expected(weights, (*stored, *kv_scales.values()), family.unused(config))
    entries = match(expected, tensors, config, folder)
    graph, state = nnx.split(model)
    parameters = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    buffers = buffers or host_buffers(mesh)
    scales = {path: (Piece(tensor.name, "A"),) for path, tensor in kv_scales.items()}
    plain = {
        (path,): plain_weight(parameters[path], pieces)
        for path, pieces in (weights | scales).items()
    }
    planner = Planner(entries, config, mesh, buffers.block_bytes)
    plans = {
        paths: planner.plan(weight, [parameters[path] for path in paths])
        for paths, weight in (plain | quantised).items()
    }
    plans = dict(sorted(plans.items(), key=lambda plan: min(map(_position, plan[1].blocks))))
    assert parameters.keys() == set(itertools.chain(*plans))
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


def _quantised_weights(
    model: Decoder, config: ModelConfig, weights: Weights
) -> dict[tuple[str, ...], StoredWeight]:
    """The weights that the config's format decodes, by their parameters; their pieces are removed
    from ``weights``."""
    if config.format is None:
        return {}
    dequantised = dict(config.dequantised)
    found: dict[tuple[str, ...], StoredWeight] = {}
    for path, module in nnx.iter_modules(model):
        name = ".".join(map(str, path))
        if not isinstance(module, Linear | GroupedLinear):
            continue
        scheme = dequantised.get(name, module.scheme)
        if scheme != UNQUANTISED:
            leaves = [leaf for leaf, _ in module.leaf_letters]
            stored = scheme_weight(module, scheme, weights.pop(f"{name}.weight"), config)
            found[tuple(f"{name}.{leaf}" for leaf in leaves)] = stored
    if _HEAD in weights:
        scheme = config.format.scheme(module_of(weights[_HEAD][0]))
        if scheme != UNQUANTISED:
            head = Linear("D", "V", config, model.dtype, scheme=UNQUANTISED)
            found[(_HEAD,)] = scheme_weight(head, scheme, weights.pop(_HEAD), config)
    return found
