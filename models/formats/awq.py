"""AWQ checkpoints, version "gemm" (AutoAWQ)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.formats.block_leaves import block_leaves
from rjax.models.formats.checks import check_scale
from rjax.models.formats.module_names import checked_entries, is_head, is_in
from rjax.models.formats.packing import unpack
from rjax.models.formats.registry import register_format
from rjax.models.formats.scale_types import widest_scale_type
from rjax.models.formats.weight_format import FLOATS, StoredTensor, Target, WeightFormat
from rjax.models.schemes import UNQUANTISED, Scaled, WeightScheme
from rjax.models.schemes.values import ScaleDType

# The place of column j of 8 in its word; AutoAWQ packs the columns 0, 2, 4, 6, 1, 3, 5, 7.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

_FIELDS = frozenset(
    {
        *("bits", "group_size", "modules_to_not_convert", "q_group_size", "quant_method"),
        *("version", "w_bit", "zero_point"),
        # Kernels of other engines.
        *("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"),
    }
)
"""Fields of the ``quantization_config`` that are read or do not matter to the values."""


@dataclasses.dataclass(frozen=True, slots=True)
class Awq(WeightFormat):
    """4 bits in groups of inputs, packed along the outputs: (q - z) * s with q and z in 0..15.

    Attributes:
        group_size: inputs that share a scale; -1 for all.
        zero_points: whether groups have zero points; without, they are 8.
        ignored: modules that are not quantised.
        scale_dtype: dtype of the scales.
    """

    group_size: int
    zero_points: bool
    ignored: tuple[str, ...] = ()
    scale_dtype: ScaleDType = "float16"

    def scheme(self, module: str) -> WeightScheme:
        """int4 in groups."""
        if is_head(module) or is_in(module, self.ignored):
            return UNQUANTISED
        group = None if self.group_size == -1 else self.group_size
        return Scaled("int4", (1, group), self.zero_points, self.scale_dtype)

    def tensors(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        """``qweight``, ``scales`` and ``qzeros``."""
        outputs, inputs = shape
        group = inputs if self.group_size == -1 else self.group_size
        if inputs % group or outputs % 8:
            raise CheckpointError(
                f"{module} has {outputs} outputs and {inputs} inputs; AWQ needs multiples of 8 and "
                f"of the group_size {group}"
            )
        axes = ("inputs", "outputs")
        packed, groups = outputs // 8, inputs // group
        return {
            "qweight": StoredTensor(f"{module}.qweight", ((inputs, packed),), ("I32",), axes),
            "scales": StoredTensor(
                f"{module}.scales", ((groups, outputs),), FLOATS, axes, check_scale
            ),
            # A symmetric file may have them too: they are all 8 then.
            "qzeros": StoredTensor(
                f"{module}.qzeros",
                ((groups, packed),),
                ("I32",),
                axes,
                None if self.zero_points else _check_symmetric,
                required=self.zero_points,
                used=self.zero_points,
            ),
        }

    def decode(self, stored: Mapping[str, jax.Array], target: Target) -> dict[str, jax.Array]:
        """The arrays transposed, with 8 subtracted from values and zero points."""
        zeros = unpack(stored["qzeros"], 4, 1, _PLACES).T - 8 if self.zero_points else None
        values = unpack(stored["qweight"], 4, 1, _PLACES).T - 8
        return {"weight": values.astype(jnp.int4)} | block_leaves(stored["scales"].T, zeros, target)

    def with_scale_types(self, types: Mapping[str, str]) -> "Awq":
        """Scales in groups stay in the file's type."""
        return dataclasses.replace(self, scale_dtype=widest_scale_type(types, self.scale_dtype))


def _check_symmetric(words: Any) -> str | None:
    plain = bool((words.astype("uint32") == 0x88888888).all())
    return None if plain else "has zero points other than 8, but config.json has zero_point false"


def read_awq(quantization: dict[str, Any]) -> Awq:
    """The format of a ``quantization_config``.

    Raises:
        CheckpointError: another version or number of bits, or a field that is malformed.
    """
    fields = ConfigFields(quantization, "config.json: quantization_config")
    version = str(fields.raw("version") or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(
            f"config.json: quantization_config has the AWQ version {version!r}; only 'gemm' is "
            "supported"
        )
    bits = fields.integer("bits" if fields.has("bits") else "w_bit")
    if bits != 4:
        raise CheckpointError(f"config.json: quantization_config has {bits} bits; AWQ has 4")
    name = "group_size" if fields.has("group_size") else "q_group_size"
    return Awq(
        group_size=fields.integer(name, 128, minimum=-1),
        zero_points=fields.flag("zero_point", True),
        ignored=checked_entries(
            fields.raw("modules_to_not_convert"),
            "config.json: quantization_config.modules_to_not_convert",
        ),
    )


register_format("awq", read_awq, lambda quantization: quantization.keys() - _FIELDS)
