"""Checks an update of the weights as a whole, and then carries it out."""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool

from rjax.models.adopting.plan import PlannedWeight, UpdatePlan, plan_update
from rjax.models.adopting.program import AdoptProgram
from rjax.models.adopting.staged import StagedTensor, raise_problems
from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder

_CHECKED_BYTES = 256 << 20  # of an array on the host, copied to a device at once
_WEIGHTS_AHEAD = 2  # whose tensors are copied from the host before the one before is done


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CheckedUpdate:
    """An update that fits the model, with its programs compiled.

    Attributes:
        plan: how it is carried out.
        staged: its tensors by name.
        programs: the compiled program of each weight.
    """

    plan: UpdatePlan
    staged: dict[str, StagedTensor]
    programs: tuple[jax.stages.Compiled, ...]


class WeightAdopter:
    """Replaces the arrays of a model by those of a trainer, without a new compilation of its steps.

    New arrays have the shapes, dtypes and shardings of the old ones, whose memory they take. An
    update may hold all tensors of a checkpoint or some of them, on the host or on any devices.

    Args:
        model: the model; it may be abstract.
        config: its config.
        mesh: its devices.
    """

    def __init__(self, model: Decoder, config: ModelConfig, mesh: Mesh) -> None:
        self._model, self._config, self._mesh = model, config, mesh
        # Collectives of several programs wait for the threads of each other on a CPU.
        self._in_turn = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._memory_kind: str = mesh.devices.flat[0].default_memory().kind
        paths, _ = jax.tree.flatten_with_path(
            nnx.state(model), is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
        self._places = {
            ".".join(str(key.key) for key in keys): place for place, (keys, _) in enumerate(paths)
        }
        self._plans: dict[Hashable, UpdatePlan] = {}
        self._programs: dict[Hashable, jax.stages.Compiled] = {}

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self._programs)

    def check(
        self, staged: Mapping[str, StagedTensor], leaves: list[Array], *, partial: bool
    ) -> CheckedUpdate:
        """Check an update; nothing is changed.

        Args:
            staged: its tensors by name.
            leaves: the model's arrays, in the order of its flattened state.
            partial: whether tensors may be missing, whose parameters stay.

        Raises:
            CheckpointError: a tensor is unknown, missing, of the wrong shape or type, or not
                finite.
        """
        deleted = [t.source for t in staged.values() if _is_deleted(t.array)]
        raise_problems(
            [
                f"{source} was deleted or donated; keep it until the update is finished"
                for source in dict.fromkeys(deleted)
            ]
        )
        plan = self._plan(staged, partial=partial)
        self._check_values(plan, staged)
        programs = tuple(self._compiled(weight, staged, leaves) for weight in plan.weights)
        return CheckedUpdate(plan, dict(staged), programs)

    def commit(self, update: CheckedUpdate, leaves: list[Array]) -> None:
        """Replace the arrays in ``leaves``, whose memory is donated.

        Beside the old arrays and those of the update, the devices hold the temporary arrays of one
        program, and the tensors of at most three weights that come from the host. An update is
        carried out once.
        """
        waiting: list[tuple[Array, ...]] = []
        weights = update.plan.weights
        last_use = {name: w for w in weights for names in w.tensors for name in names}
        for weight, program in zip(weights, update.programs, strict=True):
            places = [self._places[path] for path in weight.paths]
            arrays, indices, from_host = self._inputs(weight, update.staged)
            new = program(tuple(arrays), indices, tuple(leaves[place] for place in places))
            del arrays
            for place, leaf in zip(places, new, strict=True):
                leaves[place] = leaf
            for name in {name for names in weight.tensors for name in names}:
                if last_use[name] is weight:
                    del update.staged[name]
            if self._in_turn:
                jax.block_until_ready(new)
            elif from_host:
                waiting.append(new)
                if len(waiting) > _WEIGHTS_AHEAD:
                    jax.block_until_ready(waiting.pop(0))
        # Only now may a trainer change arrays whose memory is shared.
        jax.block_until_ready(leaves)

    def _plan(self, staged: Mapping[str, StagedTensor], *, partial: bool) -> UpdatePlan:
        """The plan of an update; a trainer's updates are alike."""
        resident = {name: self._is_resident(tensor.array) for name, tensor in staged.items()}
        key = (
            partial,
            tuple(
                (name, t.source, t.shape, t.type, t.reading, t.index, resident[name])
                for name, t in sorted(staged.items())
            ),
        )
        if key not in self._plans:
            plan = plan_update(
                self._model, self._config, self._mesh, staged, resident, partial=partial
            )
            if len(self._plans) >= 8:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return self._plans[key]

    def _is_resident(self, array: Any) -> bool:
        """Whether programs on the mesh can take an array as it is."""
        if not isinstance(array, jax.Array):
            return False
        sharding, devices = array.sharding, list(self._mesh.devices.flat)
        if sharding.memory_kind not in (None, self._memory_kind):
            return False
        if len(devices) == 1:
            return sharding.device_set == set(devices)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            return False
        return sharding.mesh.devices is not None and devices == [*sharding.mesh.devices.flat]

    def _compiled(
        self, weight: PlannedWeight, staged: Mapping[str, StagedTensor], leaves: list[Array]
    ) -> jax.stages.Compiled:
        program = weight.program
        arrays = [
            jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for array in _program_arrays(weight, staged)
        ]
        key = program, tuple((array.shape, array.dtype, array.sharding) for array in arrays)
        if key not in self._programs:
            old = [leaves[self._places[path]] for path in weight.paths]
            self._programs[key] = program.compile(arrays, old)
        return self._programs[key]

    def _inputs(
        self, weight: PlannedWeight, staged: Mapping[str, StagedTensor]
    ) -> tuple[list[Any], np.ndarray, bool]:
        """(arrays, their entries, whether some came from elsewhere) for a weight's program."""
        arrays: list[Any] = []
        indices: list[tuple[int, ...]] = []
        elsewhere = False
        program = weight.program
        for source, block, names, parts in zip(
            program.sources, program.blocks, weight.tensors, weight.parts, strict=True
        ):
            tensors = [staged[name] for name in names]
            if source is None:
                read = [
                    part.read(tensor.array, tensor.index)
                    for part, tensor in zip(parts, tensors, strict=True)
                ]
                whole = read[0] if len(read) == 1 else np.concatenate(list(map(np.asarray, read)))
                whole = whole.reshape(block.shape)
                arrays.append(jax.device_put(whole, block.sharding))
                indices.append((0, 0))
                elsewhere = True
            else:
                arrays += [tensor.array for tensor in tensors]
                indices += [(*tensor.index, 0, 0)[:2] for tensor in tensors]
        return arrays, np.asarray(indices, np.int32).reshape(-1, 2), elsewhere

    def _check_values(self, plan: UpdatePlan, staged: Mapping[str, StagedTensor]) -> None:
        """Raise CheckpointError if a value is not finite, a scale is wrong, or a tied head differs
        from its embedding."""
        arrays = {id(tensor.array): tensor for tensor in staged.values()}
        finite = {
            tensor.source: self._finite(tensor.array)
            for tensor in arrays.values()
            if jnp.issubdtype(tensor.array.dtype, jnp.floating)
        }
        raise_problems(
            [
                f"{source} holds NaN or infinity; look at the trainer's loss and step"
                for source, each in finite.items()
                if not all(map(bool, each))
            ]
        )
        problems = []
        for stored in plan.stored:
            if stored.check is not None and stored.name in staged:
                tensor = staged[stored.name]
                if problem := stored.check(np.asarray(_tensor(tensor))):
                    problems.append(f"{tensor.source} {problem}")
        if plan.tied is not None:
            head, embedding = (staged[name] for name in plan.tied)
            if head.shape != embedding.shape or not np.array_equal(
                np.asarray(_tensor(head)), np.asarray(_tensor(embedding))
            ):
                problems.append(
                    f"{head.source} differs from {embedding.source}, though config.json ties them; "
                    "leave it out, or start the engine with tie_word_embeddings set to false"
                )
        raise_problems(problems)

    def _finite(self, array: Any) -> list[Bool[Array, ""]]:
        """Whether the parts of an array are finite, computed on its devices or on the engine's."""
        if isinstance(array, jax.Array):  # by device, without a sum over all of them
            return [_all_finite(shard.data) for shard in array.addressable_shards]
        rows = max(1, _CHECKED_BYTES * len(array) // max(1, array.nbytes)) if array.ndim else 1
        parts = [array[i : i + rows] for i in range(0, len(array), rows)] if array.ndim else [array]
        device = self._mesh.devices.flat[0]
        found: list[Bool[Array, ""]] = []
        for part in parts:
            found.append(_all_finite(jax.device_put(part, device)))
            if len(found) > 1:
                found[-2].block_until_ready()
        return found


@jax.jit
def _all_finite(array: Array) -> Bool[Array, ""]:
    return jnp.isfinite(array).all()


def _is_deleted(array: Any) -> bool:
    return isinstance(array, jax.Array) and array.is_deleted()


def _tensor(tensor: StagedTensor) -> Any:
    return tensor.array if tensor.reading is None else tensor.reading(tensor.array, tensor.index)


def _program_arrays(weight: PlannedWeight, staged: Mapping[str, StagedTensor]) -> list[Any]:
    """The arrays that a weight's program gets, or descriptions of them."""
    arrays: list[Any] = []
    program: AdoptProgram = weight.program
    for source, block, names in zip(program.sources, program.blocks, weight.tensors, strict=True):
        if source is None:
            arrays.append(block)
        else:
            arrays += [staged[name].array for name in names]
    return arrays
