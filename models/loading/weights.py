"""Load the weights of a checkpoint folder into an abstract model."""

import dataclasses
import itertools
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder
from rjax.models.families import FAMILIES
from rjax.models.layers.grouped_linear import GroupedLinear
from rjax.models.layers.linear import Linear
from rjax.models.layers.parameter import variable_sharding
from rjax.models.loading.assembly import Assembly
from rjax.models.loading.blocks import Block, split_rows, stack_tensors
from rjax.models.loading.checkpoint_folder import read_tensors
from rjax.models.loading.dequantised_plan import dequantised_plan, head_plan
from rjax.models.loading.expert_groups import common_dtype, experts_of_devices
from rjax.models.loading.expert_plan import expert_plan, stored_experts
from rjax.models.loading.host_buffers import HostBuffers, host_buffers
from rjax.models.loading.kv_scales import kv_scale_tensors
from rjax.models.loading.layout import piece_sharding, read_shape, view
from rjax.models.loading.linear_modules import module_of
from rjax.models.loading.linear_plan import linear_plan, stored_tensors
from rjax.models.loading.match import Expected, match
from rjax.models.loading.piece import Piece
from rjax.models.loading.pipeline import ParameterPlan, Pipeline
from rjax.models.loading.safetensors_header import TensorEntry
from rjax.models.placement import bytes_of_device
from rjax.models.schemes import UNQUANTISED
from rjax.models.sharding import TENSOR_AXIS

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
    dequantised = dict(config.dequantised) if config.format is not None else {}
    quantised = {
        path: (linear, weights.pop(f"{path}.weight"))
        for path, linear in nnx.iter_modules(model)
        if isinstance(linear, Linear)
        for path in [".".join(map(str, path))]
        if linear.scheme != UNQUANTISED or path in dequantised
    }
    grouped = {
        path: (module, weights.pop(f"{path}.weight"))
        for path, module in nnx.iter_modules(model)
        if isinstance(module, GroupedLinear)
        for path in [".".join(map(str, path))]
        if module.scheme != UNQUANTISED or path in dequantised
    }
    head = UNQUANTISED
    if config.format is not None and _HEAD in weights:
        head = config.format.scheme(module_of(weights[_HEAD][0]))
    head_pieces = weights.pop(_HEAD) if head != UNQUANTISED else ()
    stored = tuple(
        tensor
        for _, pieces in grouped.values()
        for tensors in stored_experts(config, pieces)
        for tensor in tensors.values()
    )
    stored += tuple(
        tensor
        for pieces in (head_pieces, *(pieces for _, pieces in quantised.values()))
        if pieces
        for tensors in stored_tensors(config, pieces).values()
        for tensor in tensors.values()
    )
    expected = Expected(weights, (*stored, *kv_scales.values()), family.unused(config))
    entries = match(expected, tensors, config, folder)
    graph, state = nnx.split(model)
    parameters = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    buffers = buffers or host_buffers(mesh)
    plans: dict[tuple[str, ...], ParameterPlan] = {}
    scales = {path: (Piece(tensor.name, "A"),) for path, tensor in kv_scales.items()}
    for path, pieces in (weights | scales).items():
        plans[(path,)] = _plan(parameters[path], pieces, entries, config, mesh, buffers.block_bytes)
    for path, (experts, pieces) in grouped.items():
        names = [name for name, _ in experts.leaf_letters]
        scheme = dequantised.get(path, experts.scheme)
        plans[tuple(f"{path}.{name}" for name in names)] = expert_plan(
            experts, pieces, scheme, entries, config, model.dtype, mesh, buffers.block_bytes
        )
    for path, (linear, pieces) in quantised.items():
        if path in dequantised:
            plans[(f"{path}.weight",)] = dequantised_plan(
                linear,
                pieces,
                dequantised[path],
                entries,
                config,
                model.dtype,
                mesh,
                buffers.block_bytes,
            )
            continue
        leaves = tuple(f"{path}.{leaf}" for leaf, _ in linear.leaf_letters)
        plans[leaves] = linear_plan(linear, pieces, entries, config, mesh, buffers.block_bytes)
    if head_pieces:
        plans[(_HEAD,)] = head_plan(
            head_pieces, head, entries, config, model.dtype, mesh, buffers.block_bytes
        )
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


def _plan(
    parameter: nnx.Variable,
    pieces: tuple[Piece, ...],
    entries: dict[str, TensorEntry],
    config: ModelConfig,
    mesh: Mesh,
    block_bytes: int | None,
) -> ParameterPlan:
    letters: str = parameter.get_metadata("letters")
    parallel: bool = parameter.get_metadata("expert_parallel")
    abstract = parameter.get_value()
    dtype = np.dtype(abstract.dtype)
    sharding = variable_sharding(parameter, mesh)
    of_expert = pieces[0].of_expert
    each = pieces[: len(pieces) // config.axis_sizes["J"]] if of_expert else pieces
    views = tuple(view(piece, letters, config) for piece in each)
    whole_experts = of_expert and parallel and mesh.shape[TENSOR_AXIS] > 1
    if whole_experts:
        groups = experts_of_devices(pieces, config, mesh)
        stacked = NamedSharding(mesh, PartitionSpec(TENSOR_AXIS))
        piece_shardings = (stacked,) * len(groups)
        split = [
            stack_tensors(
                of_group,
                common_dtype(of_group, [entry.stored_dtype(dtype) for entry in of_group]),
                read_shape(group[0], config),
                stacked,
                block_bytes,
            )
            for group in groups
            for of_group in [[entries[piece.tensor] for piece in group]]
        ]
    else:
        piece_shardings = tuple(
            piece_sharding(piece, config, mesh, expert_parallel=parallel) for piece in pieces
        )
        split = [
            split_rows(
                entries[piece.tensor],
                entries[piece.tensor].stored_dtype(dtype),
                piece.first_row,
                read_shape(piece, config),
                of_piece,
                block_bytes,
            )
            for piece, of_piece in zip(pieces, piece_shardings, strict=True)
        ]
    blocks = tuple(itertools.chain(*split))
    offset = pieces[0].offset
    same = blocks[0].dtype == dtype and views[0].is_identity and not offset
    if not of_expert and len(blocks) == 1 and same:
        whole = dataclasses.replace(blocks[0], shape=abstract.shape, sharding=sharding)
        return ParameterPlan((whole,))
    assembly = Assembly(
        blocks=tuple(tuple(block.abstract for block in part) for part in split),
        piece_shardings=piece_shardings,
        views=views,
        axis=letters.split().index("A") if len(each) > 1 else None,
        stacked=int(whole_experts) if of_expert else None,
        dtype=dtype,
        sharding=sharding,
        offset=offset,
    )
    return ParameterPlan(blocks, assembly)
