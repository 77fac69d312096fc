"""fp8 checkpoints with ``quant_method`` "fp8", as DeepSeek and Qwen publish them."""

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
from rjax.models.formats.registry import register_format
from rjax.models.formats.weight_format import FLOATS, StoredTensor, Target, WeightFormat
from rjax.models.schemes import UNQUANTISED, Scaled, WeightScheme

_FIELDS = frozenset(
    {
        *("activation_scheme", "fmt", "ignored_layers", "modules_to_not_convert"),
        *("quant_method", "weight_block_size"),
        # Scales of activations, and a choice of transformers.
        *("dequantize", "scale_fmt"),
    }
)
"""Fields of the ``quantization_config`` that are read or do not matter to the values."""


_NAMES = ("weight_scale", "input_scale")
_TRANSFORMERS_NAMES = ("weight_scale_inv", "activation_scale")


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8(WeightFormat):
    """float8_e4m3fn weights with one scale, or with one for each block.

    Attributes:
        block: (outputs, inputs) of a block; None for one scale of the whole weight.
        static: whether the checkpoint has scales for activations, which weights alone do not need.
        ignored: modules that are not quantised.
        names: the tensors with the scale of a whole weight, and with that of its input.
    """

    block: tuple[int, int] | None
    static: bool
    ignored: tuple[str, ...] = ()
    names: tuple[str, str] = _NAMES

    def scheme(self, module: str) -> WeightScheme:
        """fp8 for each channel or block."""
        if is_head(module) or is_in(module, self.ignored):
            return UNQUANTISED
        return Scaled("fp8", self.block or (1, None))

    def tensors(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        """``weight``, its scale (``weight_scale_inv`` of blocks), and perhaps that of its input."""
        of_weight, of_input = self.names
        if self.block is None:
            scale = StoredTensor(f"{module}.{of_weight}", ((), (1,)), FLOATS, check=check_scale)
        else:
            counts = tuple(-(-size // one) for size, one in zip(shape, self.block, strict=True))
            scale = StoredTensor(
                f"{module}.weight_scale_inv",
                (counts,),
                FLOATS,
                ("outputs", "inputs"),
                check_scale,
            )
        tensors = {
            "weight": StoredTensor(
                f"{module}.weight", (shape,), ("F8_E4M3",), ("outputs", "inputs")
            ),
            "scale": scale,
        }
        if self.static:
            tensors["input_scale"] = StoredTensor(
                f"{module}.{of_input}", ((), (1,)), FLOATS, check=check_scale, used=False
            )
        return tensors

    def decode(self, stored: Mapping[str, jax.Array], target: Target) -> dict[str, jax.Array]:
        """The values as they are, and scales of channels or blocks."""
        scale = stored["scale"]
        if self.block is None:  # the gates and the other half of the outputs may have one each
            scale = jnp.repeat(scale.reshape(-1), target.shape[0] // scale.size)
        return {"weight": stored["weight"]} | block_leaves(scale, None, target)

    def expert_tensors(
        self, tensor: str, shape: tuple[int, int, int]
    ) -> Mapping[str, StoredTensor]:
        """``NAME`` and ``NAME_scale_inv``, as transformers writes them, and perhaps the scales of
        the inputs."""
        J, outputs, inputs = shape
        axes = (None, "outputs", "inputs")
        if self.block is None:
            counts, axes_of_scale = ((J, 1, 1), (J, 2, 1)), (None,) * 3
        else:
            rows, columns = self.block
            counts, axes_of_scale = ((J, -(-outputs // rows), -(-inputs // columns)),), axes
        tensors = {
            "weight": StoredTensor(tensor, (shape,), ("F8_E4M3",), axes),
            "scale": StoredTensor(
                f"{tensor}_scale_inv", counts, FLOATS, axes_of_scale, check=check_scale
            ),
        }
        if self.static:
            tensors["input_scale"] = StoredTensor(
                f"{tensor}_activation_scale", ((J,),), FLOATS, check=check_scale, used=False
            )
        return tensors

    def with_scale_types(self, types: Mapping[str, str]) -> "Fp8":
        """The format with the names that the checkpoint has for its scales."""
        ends = {name.rpartition(".")[2] for name in types}
        pairs = zip(_NAMES, _TRANSFORMERS_NAMES, strict=True)
        of_weight, of_input = (theirs if theirs in ends else ours for ours, theirs in pairs)
        return dataclasses.replace(self, names=(of_weight, of_input))


def read_fp8(quantization: dict[str, Any]) -> Fp8:
    """The format of a ``quantization_config``.

    Raises:
        CheckpointError: another float format, or a field that is malformed.
    """
    where = "config.json: quantization_config"
    fields = ConfigFields(quantization, where)
    kind = str(fields.raw("fmt") or "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"{where} has the fmt {kind!r}; only e4m3 is supported")
    activations = fields.raw("activation_scheme") or "dynamic"
    if activations not in ("dynamic", "static"):
        raise CheckpointError(
            f"{where} has the activation_scheme {activations!r}; it is 'dynamic' or 'static'"
        )
    ignored = (
        *checked_entries(fields.raw("ignored_layers"), f"{where}.ignored_layers"),
        *checked_entries(fields.raw("modules_to_not_convert"), f"{where}.modules_to_not_convert"),
    )
    block = checked_block(fields.raw("weight_block_size"), f"{where}.weight_block_size")
    return Fp8(block, activations == "static", ignored)


def checked_block(block: Any, where: str) -> tuple[int, int] | None:
    """(outputs, inputs) of a block, or None for null.

    Raises:
        CheckpointError: it is no pair of positive whole numbers.
    """
    if block is None:
        return None
    whole = isinstance(block, list) and all(type(size) is int and size > 0 for size in block)
    if not whole or len(block) != 2:
        raise CheckpointError(f"{where} is {block!r:.100}; expected two positive whole numbers")
    return block[0], block[1]


register_format("fp8", read_fp8, lambda quantization: quantization.keys() - _FIELDS)
