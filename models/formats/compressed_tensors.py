"""Checkpoints of compressed-tensors (llm-compressor)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from rjax.models.errors import CheckpointError
from rjax.models.formats.block_leaves import block_leaves
from rjax.models.formats.checks import check_order, check_scale
from rjax.models.formats.module_names import is_in
from rjax.models.formats.packing import unpack
from rjax.models.formats.scale_types import widest_scale_type
from rjax.models.formats.weight_format import FLOATS, StoredTensor, Target, WeightFormat
from rjax.models.schemes import UNQUANTISED, Scaled, WeightScheme
from rjax.models.schemes.values import ScaleDType

type Strategy = Literal["tensor", "channel", "group", "block"]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """How some modules are quantised.

    Attributes:
        targets: the modules.
        values: type of the values.
        packed: whether integers are packed into 32-bit words along the inputs.
        strategy: what shares a scale.
        block: (outputs, inputs) of a block, (1, inputs) of a group; (1, None) for others.
        zero_points: whether there are zero points.
        static: whether there are scales for activations, which weights alone do not need.
        ordered: the inputs are in groups by activation (actorder), which ``weight_g_idx`` gives.
    """

    targets: tuple[str, ...]
    values: str
    packed: bool
    strategy: Strategy
    block: tuple[int, int | None]
    zero_points: bool
    static: bool
    ordered: bool = False

    @property
    def bits(self) -> int:
        """Number of bits of a value."""
        return 4 if self.values == "int4" else 8


@dataclasses.dataclass(frozen=True, slots=True)
class CompressedTensors(WeightFormat):
    """Groups of modules, each with values of a type and scales by some strategy.

    Attributes:
        groups: the first whose targets mean a module is the module's.
        ignored: modules that are not quantised.
        kv_scales: whether there are scales for KV in fp8.
        scale_dtype: dtype of the scales of groups.
    """

    groups: tuple[Group, ...]
    ignored: tuple[str, ...]
    kv_scales: bool = False
    scale_dtype: ScaleDType = "bfloat16"

    def scheme(self, module: str) -> WeightScheme:
        """Weight scheme of the module's group."""
        group = self._group(module)
        if group is None:
            return UNQUANTISED
        dtype = self.scale_dtype if group.strategy == "group" else "float32"
        return Scaled(group.values, group.block, group.zero_points, dtype)

    def tensors(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        """``weight`` or ``weight_packed``, ``weight_scale``, and what the group has beside them."""
        group = self._group(module)
        assert group is not None
        outputs, inputs = shape
        both = ("outputs", "inputs")
        per_word = 32 // group.bits
        if group.packed:
            words = -(-inputs // per_word)
            weight = StoredTensor(f"{module}.weight_packed", ((outputs, words),), ("I32",), both)
        else:
            kind = "F8_E4M3" if group.values == "fp8" else "I8"
            weight = StoredTensor(f"{module}.weight", (shape,), (kind,), both)
        scales = _scale_shapes(group, module, shape)
        tensors = {
            "weight": weight,
            "scale": StoredTensor(
                f"{module}.weight_scale",
                scales,
                FLOATS,
                both if len(scales[0]) == 2 else (None,),
                check_scale,
            ),
        }
        if group.zero_points:
            count, *rest = scales[0]
            stored = (-(-count // per_word), *rest) if group.packed else scales[0]
            kind = "I32" if group.packed else "I8"
            tensors["zero_point"] = StoredTensor(
                f"{module}.weight_zero_point", (stored,), (kind,), both
            )
        if group.packed:
            tensors["shape"] = StoredTensor(
                f"{module}.weight_shape",
                ((2,),),
                ("I64", "I32"),
                check=functools.partial(_check_shape, shape=shape),
                required=False,
                used=False,
            )
            tensors["order"] = StoredTensor(
                f"{module}.weight_g_idx",
                ((inputs,),),
                ("I32", "I64"),
                check=functools.partial(check_order, group=group.block[1] or inputs),
                required=group.ordered,
                missing="config.json has an actorder that needs the group of each input",
                used=False,
            )
        if group.static:
            tensors["input_scale"] = StoredTensor(
                f"{module}.input_scale", ((1,), ()), FLOATS, check=check_scale, used=False
            )
        return tensors

    def decode(self, stored: Mapping[str, jax.Array], target: Target) -> dict[str, jax.Array]:
        """The values without their offset, and scales of channels, groups or blocks."""
        scheme = target.scheme
        assert isinstance(scheme, Scaled)
        outputs, inputs = target.shape
        bits = 4 if scheme.values == "int4" else 8
        half = 2 ** (bits - 1)
        values, zeros = stored["weight"], stored.get("zero_point")
        if values.dtype == jnp.int32:  # packed
            values = unpack(values, bits, 1)[:, :inputs] - half
            if zeros is not None:
                zeros = unpack(zeros, bits, 0)[:outputs] - half
        leaves = {"weight": values.astype(scheme.type.dtype)}
        return leaves | block_leaves(stored["scale"], zeros, target)

    def with_scale_types(self, types: Mapping[str, str]) -> "CompressedTensors":
        """Scales of groups stay in the file's type."""
        return dataclasses.replace(self, scale_dtype=widest_scale_type(types, self.scale_dtype))

    def _group(self, module: str) -> Group | None:
        if is_in(module, self.ignored):
            return None
        return next((group for group in self.groups if is_in(module, group.targets)), None)


def _scale_shapes(group: Group, module: str, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    outputs, inputs = shape
    rows, columns = group.block
    match group.strategy:
        case "tensor":
            return ((1,), ())
        case "channel":
            return ((outputs, 1),)
        case "group":
            assert columns is not None
            if inputs % columns:
                raise CheckpointError(
                    f"{module} has {inputs} inputs, which groups of {columns} do not divide"
                )
            return ((outputs, inputs // columns),)
        case "block":
            assert columns is not None
            return ((-(-outputs // rows), -(-inputs // columns)),)


def _check_shape(values: np.ndarray, shape: tuple[int, int]) -> str | None:
    found = tuple(values.tolist())
    return None if found == shape else f"says {found}; config.json means {shape}"
