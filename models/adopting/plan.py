"""Which tensors of an update make which parameters; names, shapes and types are checked."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from rjax.models.adopting.program import AdoptProgram, BlockSource, KeptPart, Part
from rjax.models.adopting.staged import StagedTensor, raise_problems
from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder
from rjax.models.errors import CheckpointError
from rjax.models.formats import FloatWeights, Plain
from rjax.models.formats.weight_format import FLOATS, StoredTensor
from rjax.models.layers.parameter import variable_sharding
from rjax.models.loading.blocks import Block
from rjax.models.loading.match import IGNORED_SUFFIXES, kv_scale_tensors
from rjax.models.loading.pieces import Piece, view
from rjax.models.loading.pipeline import ParameterPlan
from rjax.models.loading.plan import Planner, StoredWeight, stored_tensors
from rjax.models.loading.stored_model import StoredModel, stored_model
from rjax.models.loading.tensors import TensorEntry, type_name

_NOWHERE = Path("the update")


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedWeight:
    """How the arrays of one weight are made.

    Attributes:
        paths: its parameters.
        program: makes their arrays.
        tensors: the tensors of each block; none of a block that is kept.
        parts: their rows.
    """

    paths: tuple[str, ...]
    program: AdoptProgram
    tensors: tuple[tuple[str, ...], ...]
    parts: tuple[tuple[Part, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How an update is carried out.

    Attributes:
        weights: the weights that it replaces, in the order of the model.
        stored: tensors of quantised weights, whose values are to be checked.
        tied: (head, embedding), which must be equal; None without a head that is tied.
    """

    weights: tuple[PlannedWeight, ...]
    stored: tuple[StoredTensor, ...]
    tied: tuple[str, str] | None


def plan_update(
    model: Decoder,
    config: ModelConfig,
    mesh: Mesh,
    staged: Mapping[str, StagedTensor],
    resident: Mapping[str, bool],
    *,
    partial: bool,
) -> UpdatePlan:
    """The plan of an update.

    Args:
        model: the model; it may be abstract.
        config: its config.
        mesh: the engine's devices.
        staged: the tensors by name.
        resident: whether the array of a tensor is on the devices of the mesh.
        partial: whether tensors may be missing.

    Raises:
        CheckpointError: a tensor is unknown, missing, or has the wrong shape or type.
    """
    shapes = {name: tensor.shape for name, tensor in staged.items()}
    stored = stored_model(model, config, shapes)
    allowed = stored.expected.shapes(config)
    head = f"{config.head_module}.weight"
    known = {name: tensor for name, tensor in staged.items() if name in allowed}
    others = [
        name
        for name in staged.keys() - known.keys()
        if not name.endswith(IGNORED_SUFFIXES) and not name.startswith(stored.expected.unused)
    ]
    tied = None
    if config.tie_embeddings and head in others:
        others.remove(head)
        embedding = stored.expected.weights["embedding.weight"][0].tensor
        if embedding not in known:
            raise CheckpointError(
                f"the weights cannot be used: {head} is the embedding in this model, which ties "
                f"them; give {embedding} too, or instead"
            )
        tied = head, embedding
    raise_problems(
        [
            f"{staged[name].named(name)} is no tensor of {config.architecture}, or not of this size"
            for name in sorted(others)
        ]
    )
    types = _types(stored, config)
    raise_problems(
        [
            *_wrong_shapes(known, allowed),
            *(
                f"{tensor.named(name)} has the type {tensor.type}; the model takes "
                f"{' or '.join(types[name])}"
                for name, tensor in known.items()
                if tensor.type not in types[name]
            ),
        ]
    )
    planner = _planner(stored, known, config, mesh)
    kept = set(kv_scale_tensors(config))
    planned: list[PlannedWeight] = []
    absent: list[str] = []
    problems: list[str] = []
    for paths, weight in stored.weights.items():
        names, optional = _names(weight, config)
        missing = [name for name in names if name not in known and name not in optional]
        if len(missing) == len(names) or not any(name in known for name in names):
            if not partial and not kept.issuperset(paths):
                absent += missing
            continue
        if missing and not partial:
            absent += missing
        elif missing and not _can_keep(weight):
            given = [name for name in names if name in known]
            problems.append(
                f"{_listed(missing)} missing: this engine holds {paths[0]} as "
                f"{_held(weight)}, which is replaced as a whole; give them together with "
                f"{_listed(given, '')}"
            )
        else:
            targets = [stored.parameters[path] for path in paths]
            plan = planner.plan(weight, targets)
            results = tuple(
                jax.ShapeDtypeStruct(
                    target.get_value().shape,
                    target.get_value().dtype,
                    sharding=variable_sharding(target, mesh),
                )
                for target in targets
            )
            planned.append(_planned(paths, plan, weight, results, known, resident, config))
    if absent:
        all_or_some = "give all tensors, or say partial=True to keep the others"
        problems.insert(0, f"{_listed(absent)} missing; {all_or_some}")
    raise_problems(problems)
    if not planned:
        raise CheckpointError("the weights cannot be used: there are none for this model")
    return UpdatePlan(tuple(planned), stored.expected.stored, tied)


def _types(stored: StoredModel, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The allowed types of each tensor."""
    types: dict[str, tuple[str, ...]] = {
        tensor.name: tensor.types for tensor in stored.expected.stored
    }
    for path, pieces in stored.expected.weights.items():
        own = type_name(np.dtype(stored.parameters[path].get_value().dtype))
        types |= {piece.tensor: FLOATS if own in FLOATS else (own,) for piece in pieces}
    return types


def _wrong_shapes(
    known: Mapping[str, StagedTensor], allowed: Mapping[str, tuple[tuple[int, ...], ...]]
) -> list[str]:
    problems = []
    for name, tensor in known.items():
        if tensor.shape in allowed[name]:
            continue
        problem = (
            f"{tensor.named(name)} has the shape {tensor.shape}; this model has "
            f"{' or '.join(map(str, allowed[name]))}"
        )
        if tensor.shape[::-1] in allowed[name]:
            problem += " ([outputs, inputs]: transpose it, or give a mapping)"
        problems.append(problem)
    return problems


def _planner(
    stored: StoredModel, known: Mapping[str, StagedTensor], config: ModelConfig, mesh: Mesh
) -> Planner:
    """The planner of a checkpoint with the tensors of the update, and with the others as the
    parameters hold them."""
    entries = {
        name: TensorEntry(name, _NOWHERE, tensor.type, tensor.shape, 0, tensor.size)
        for name, tensor in known.items()
    }
    shapes = stored.expected.shapes(config)
    for path, pieces in stored.expected.weights.items():
        dtype = np.dtype(stored.parameters[path].get_value().dtype)
        for name in (piece.tensor for piece in pieces):
            if name not in entries:
                (shape,) = shapes[name]
                size = math.prod(shape) * dtype.itemsize
                entries[name] = TensorEntry(name, _NOWHERE, type_name(dtype), shape, 0, size)
    return Planner(entries, config, mesh, None)


def _names(weight: StoredWeight, config: ModelConfig) -> tuple[list[str], set[str]]:
    """The tensors of a weight, each once, and those of them that need not be there."""
    if isinstance(weight.format, FloatWeights):
        return list(dict.fromkeys(piece.tensor for piece in weight.pieces)), set()
    tensors = [
        tensor
        for piece in weight.pieces
        for tensor in stored_tensors(piece, weight.format, config).values()
    ]
    optional = {tensor.name for tensor in tensors if not tensor.required}
    return list(dict.fromkeys(tensor.name for tensor in tensors)), optional


def _can_keep(weight: StoredWeight) -> bool:
    """Whether parts of the weight can be replaced alone."""
    return isinstance(weight.format, Plain) and not weight.pieces[0].of_expert


def _held(weight: StoredWeight) -> str:
    if isinstance(weight.format, Plain):
        return "one array of all experts"
    return f"{weight.scheme.name} with scales"


def _listed(names: Sequence[str], end: str | None = None) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if end is None:
        end = " is" if len(names) == 1 else " are"
    return shown + end


def _planned(
    paths: tuple[str, ...],
    plan: ParameterPlan,
    weight: StoredWeight,
    results: tuple[jax.ShapeDtypeStruct, ...],
    known: Mapping[str, StagedTensor],
    resident: Mapping[str, bool],
    config: ModelConfig,
) -> PlannedWeight:
    """A weight with the plan by which a checkpoint of these tensors would be loaded."""
    sources: list[BlockSource] = []
    tensors: list[tuple[str, ...]] = []
    parts: list[tuple[Part, ...]] = []
    for block in plan.blocks:
        names = tuple(entry.name for entry, _, _ in block.ranges)
        if not all(name in known for name in names):
            sources.append(_kept(weight, names[0], config))
            tensors.append(())
            parts.append(())
            continue
        tensors.append(names)
        parts.append(tuple(_parts(block, known)))
        sources.append(parts[-1] if all(resident[name] for name in names) else None)
    blocks = tuple(block.abstract for block in plan.blocks)
    program = AdoptProgram(tuple(sources), blocks, plan.assembly, results)
    return PlannedWeight(paths, program, tuple(tensors), tuple(parts))


def _parts(block: Block, known: Mapping[str, StagedTensor]) -> list[Part]:
    """The parts of a block."""
    parts = []
    for entry, start, stop in block.ranges:
        reading = known[entry.name].reading
        if start == 0 and stop == entry.size:
            parts.append(Part(reading))
        else:
            row = entry.size // entry.shape[0]
            parts.append(Part(reading, start // row, (stop - start) // row))
    return parts


def _kept(weight: StoredWeight, name: str, config: ModelConfig) -> KeptPart:
    letters = weight.leaves["weight"].letters
    axis = letters.split().index("A")
    starts = itertools.accumulate((piece.a for piece in weight.pieces), initial=0)
    piece: Piece
    for piece, start in zip(weight.pieces, starts, strict=False):
        if piece.tensor == name:
            return KeptPart(axis, start, piece.a, view(piece, letters, config))
    raise AssertionError(name)
