"""GPTQ checkpoints (AutoGPTQ, GPTQModel)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.formats.module_names import checked_entries, is_in
from rjax.models.formats.packing import regroup, unpack
from rjax.models.formats.scale_types import widest_scale_type
from rjax.models.formats.weight_format import FLOATS, StoredTensor, WeightFormat, check_scale
from rjax.models.schemes import UNQUANTISED, Scaled, WeightScheme
from rjax.models.schemes.scaled import ScaleDType

_HEAD = "lm_head"


@dataclasses.dataclass(frozen=True, slots=True)
class Gptq(WeightFormat):
    """4 or 8 bits in groups of inputs, packed along the inputs: (q - z) * s.

    Zero points are packed along the outputs. In the first version of the format they are stored one
    too small.

    Attributes:
        bits: 4 or 8.
        group_size: inputs that share a scale; -1 for all.
        symmetric: all zero points are half of the range.
        zero_offset: what is added to a stored zero point.
        quantised: modules that are quantised; None for all but the head.
        head: whether the head is quantised.
        scale_dtype: of the scales.
    """

    method: ClassVar[str] = "gptq"

    bits: int
    group_size: int
    symmetric: bool
    zero_offset: int
    quantised: tuple[str, ...] | None = None
    head: bool = False
    scale_dtype: ScaleDType = "float16"

    def scheme(self, module: str) -> WeightScheme:
        """int4 or int8 in groups."""
        of_layer = self.quantised is None or is_in(module, self.quantised)
        if not (self.head if module == _HEAD else of_layer):
            return UNQUANTISED
        group = None if self.group_size == -1 else self.group_size
        values = "int4" if self.bits == 4 else "int8"
        return Scaled(values, (1, group), not self.symmetric, self.scale_dtype)

    def tensors(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        """``qweight``, ``scales``, ``qzeros``, and what files have beside them."""
        outputs, inputs = shape
        group = inputs if self.group_size == -1 else self.group_size
        count = 32 // self.bits
        if inputs % group or inputs % count or outputs % count:
            raise CheckpointError(
                f"{module} has {outputs} outputs and {inputs} inputs; GPTQ with {self.bits} bits "
                f"needs multiples of {count}, and inputs of the group_size {group}"
            )
        axes = ("inputs", "outputs")
        groups = inputs // group
        check_zeros = functools.partial(
            _check_symmetric, bits=self.bits, stored=2 ** (self.bits - 1) - self.zero_offset
        )
        return {
            "qweight": StoredTensor(
                f"{module}.qweight", ((inputs // count, outputs),), ("I32",), axes
            ),
            "scales": StoredTensor(
                f"{module}.scales", ((groups, outputs),), FLOATS, axes, check_scale
            ),
            "qzeros": StoredTensor(
                f"{module}.qzeros",
                ((groups, outputs // count),),
                ("I32",),
                axes,
                check_zeros if self.symmetric else None,
                required=not self.symmetric,
                used=not self.symmetric,
            ),
            "g_idx": StoredTensor(
                f"{module}.g_idx",
                ((inputs,),),
                ("I32",),
                check=functools.partial(_check_order, group=group),
                required=False,
                used=False,
            ),
        }

    def decode(
        self,
        scheme: WeightScheme,
        stored: Mapping[str, jax.Array],
        shape: tuple[int, int],
        blocks: Mapping[str, tuple[int, int]],
    ) -> Mapping[str, jax.Array]:
        """Transposed, with half of the range subtracted from values and zero points."""
        assert isinstance(scheme, Scaled)
        half = 2 ** (self.bits - 1)
        values = unpack(stored["qweight"], self.bits, 0).T - half
        leaves = {"weight": values.astype(jnp.int4 if self.bits == 4 else jnp.int8)}
        grouped = {"weight_scale": stored["scales"].T.astype(scheme.scale_dtype)}
        if not self.symmetric:
            # Added to whole words, as it was subtracted: a zero point of 0 borrows from the next.
            offset = sum(self.zero_offset << shift for shift in range(0, 32, self.bits))
            zeros = unpack(stored["qzeros"] + jnp.int32(offset), self.bits, 1).T - half
            grouped["weight_zero_point"] = zeros.astype(jnp.int8)
        for name, leaf in grouped.items():
            whole = scheme.block[1] is None
            leaves[name] = (
                leaf[:, 0] if whole else regroup(leaf, (1, self.group_size), blocks[name], shape)
            )
        return leaves

    def with_scale_types(self, types: Mapping[str, str]) -> "Gptq":
        """Scales in groups stay in the file's type."""
        return dataclasses.replace(self, scale_dtype=widest_scale_type(types, self.scale_dtype))


def _check_symmetric(words: np.ndarray, bits: int, stored: int) -> str | None:
    word = sum(stored << shift for shift in range(0, 32, bits))
    plain = bool((words.astype(np.uint32) == word).all())
    return None if plain else "has zero points that differ, but config.json has sym true"


def _check_order(groups: np.ndarray, group: int) -> str | None:
    plain = np.array_equal(groups, np.arange(len(groups)) // group)
    return (
        None
        if plain
        else (
            "orders the inputs by activation (desc_act), which is not supported; use a checkpoint "
            "quantised with desc_act false"
        )
    )


def read_gptq(quantization: dict[str, Any]) -> Gptq:
    """The format of a ``quantization_config``.

    Raises:
        CheckpointError: fields for which there is no code, or that are malformed.
    """
    where = "config.json: quantization_config"
    fields = ConfigFields(quantization, where)
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise CheckpointError(
            f"{where} has {bits} bits; GPTQ checkpoints with 4 or 8 are supported"
        )
    if fields.raw("dynamic"):
        raise CheckpointError(f"{where} has 'dynamic' settings by module, which are not supported")
    version = str(fields.raw("checkpoint_format") or "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"{where} has the checkpoint_format {version!r}; supported are 'gptq' and 'gptq_v2'"
        )
    quantised = fields.raw("modules_in_block_to_quantize")
    if isinstance(quantised, list) and quantised and isinstance(quantised[0], list):
        quantised = [name for group in quantised for name in group]
    return Gptq(
        bits=bits,
        group_size=fields.integer("group_size", 128, minimum=-1),
        symmetric=fields.flag("sym", True),
        zero_offset=1 if version == "gptq" else 0,
        quantised=checked_entries(quantised, f"{where}.modules_in_block_to_quantize") or None,
        head=fields.flag("lm_head", False),
    )
