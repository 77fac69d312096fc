"""GPTQ checkpoints (AutoGPTQ, GPTQModel)."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.formats.block_leaves import block_leaves
from rjax.models.formats.checks import check_order, check_scale
from rjax.models.formats.module_names import checked_entries, is_head, is_in
from rjax.models.formats.packing import unpack
from rjax.models.formats.registry import register_format
from rjax.models.formats.scale_types import widest_scale_type
from rjax.models.formats.weight_format import FLOATS, StoredTensor, Target, WeightFormat
from rjax.models.schemes import UNQUANTISED, Scaled, WeightScheme
from rjax.models.schemes.values import ScaleDType

_FIELDS = frozenset(
    {
        *("bits", "checkpoint_format", "desc_act", "dynamic", "format", "group_size"),
        *("is_marlin_format", "lm_head", "method", "modules_in_block_to_quantize"),
        *("quant_method", "sym"),
        # How the values were found, where they came from, and kernels of other engines.
        *("act_group_aware", "backend", "batch_size", "block_name_to_quantize"),
        *("cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset"),
        *("disable_exllama", "exllama_config", "max_input_length", "meta", "model_file_base_name"),
        *("model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "mse"),
        *("pack_dtype", "pad_token_id", "static_groups", "tokenizer", "true_sequential"),
        *("use_cuda_fp16", "use_exllama"),
    }
)
"""Fields of the ``quantization_config`` that are read or do not matter to the values."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How a module is quantised.

    Attributes:
        bits: 4 or 8.
        group_size: inputs that share a scale; -1 for all.
        symmetric: all zero points are half of the range.
        ordered: the inputs are in groups by activation (desc_act), which ``g_idx`` gives.
    """

    bits: int
    group_size: int
    symmetric: bool
    ordered: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Gptq(WeightFormat):
    """4 or 8 bits in groups of inputs, packed along the inputs: (q - z) * s.

    Zero points are packed along the outputs. In the first version of the format they are stored one
    too small.

    Attributes:
        settings: settings of the modules that are no exceptions.
        exceptions: (regular expression for the start of a module's name, its settings); the first
            that matches holds. None is for modules that are not quantised.
        zero_offset: what is added to a stored zero point.
        quantised: modules that are quantised; None for all but the head.
        head: whether the head is quantised.
        scale_dtype: dtype of the scales.
    """

    settings: Settings
    zero_offset: int
    exceptions: tuple[tuple[str, Settings | None], ...] = ()
    quantised: tuple[str, ...] | None = None
    head: bool = False
    scale_dtype: ScaleDType = "float16"

    def scheme(self, module: str) -> WeightScheme:
        """int4 or int8 in groups."""
        own = self._settings(module)
        if own is None:
            return UNQUANTISED
        group = None if own.group_size == -1 else own.group_size
        values = "int4" if own.bits == 4 else "int8"
        return Scaled(values, (1, group), not own.symmetric, self.scale_dtype)

    def _settings(self, module: str) -> Settings | None:
        of_layer = self.quantised is None or is_in(module, self.quantised)
        if not (self.head if is_head(module) else of_layer):
            return None
        found = (own for name, own in self.exceptions if re.match(name, module))
        return next(found, self.settings)

    def tensors(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        """``qweight``, ``scales``, ``qzeros``, and what files have beside them."""
        outputs, inputs = shape
        own = self._settings(module)
        assert own is not None
        group = inputs if own.group_size == -1 else own.group_size
        count = 32 // own.bits
        if inputs % group or inputs % count or outputs % count:
            raise CheckpointError(
                f"{module} has {outputs} outputs and {inputs} inputs; GPTQ with {own.bits} bits "
                f"needs multiples of {count}, and inputs of the group_size {group}"
            )
        axes = ("inputs", "outputs")
        groups = inputs // group
        check_zeros = functools.partial(
            _check_symmetric, bits=own.bits, stored=2 ** (own.bits - 1) - self.zero_offset
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
                check_zeros if own.symmetric else None,
                required=not own.symmetric,
                used=not own.symmetric,
            ),
            "g_idx": StoredTensor(
                f"{module}.g_idx",
                ((inputs,),),
                ("I32",),
                check=functools.partial(check_order, group=group),
                required=own.ordered,
                missing="config.json has desc_act true, which needs the group of each input",
                used=False,
            ),
        }

    def decode(self, stored: Mapping[str, jax.Array], target: Target) -> dict[str, jax.Array]:
        """The arrays transposed, with half of the range subtracted from values and zero points."""
        scheme = target.scheme
        assert isinstance(scheme, Scaled)
        bits = 4 if scheme.values == "int4" else 8
        half = 2 ** (bits - 1)
        zeros = None
        if scheme.zero_points:
            # Added to whole words, as it was subtracted: a zero point of 0 borrows from the next.
            offset = sum(self.zero_offset << shift for shift in range(0, 32, bits))
            zeros = unpack(stored["qzeros"] + jnp.int32(offset), bits, 1).T - half
        values = unpack(stored["qweight"], bits, 0).T - half
        leaves = {"weight": values.astype(scheme.type.dtype)}
        return leaves | block_leaves(stored["scales"].T, zeros, target)

    def with_scale_types(self, types: Mapping[str, str]) -> "Gptq":
        """Scales in groups stay in the file's type."""
        return dataclasses.replace(self, scale_dtype=widest_scale_type(types, self.scale_dtype))


def _check_symmetric(words: np.ndarray, bits: int, stored: int) -> str | None:
    word = sum(stored << shift for shift in range(0, 32, bits))
    plain = bool((words.astype(np.uint32) == word).all())
    return None if plain else "has zero points that differ, but config.json has sym true"


def read_gptq(quantization: dict[str, Any]) -> Gptq:
    """The format of a ``quantization_config``.

    Raises:
        CheckpointError: fields for which there is no code, or that are malformed.
    """
    where = "config.json: quantization_config"
    fields = ConfigFields(quantization, where)
    settings = _read_settings(fields, where)
    version = _read_version(fields, where)
    quantised = fields.raw("modules_in_block_to_quantize")
    if isinstance(quantised, list) and quantised and isinstance(quantised[0], list):
        quantised = [name for group in quantised for name in group]
    return Gptq(
        settings=settings,
        exceptions=_read_exceptions(fields.raw("dynamic"), quantization, f"{where}.dynamic"),
        zero_offset=1 if version == "gptq" else 0,
        quantised=checked_entries(quantised, f"{where}.modules_in_block_to_quantize") or None,
        head=fields.flag("lm_head", False),
    )


def _read_settings(fields: ConfigFields, where: str) -> Settings:
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise CheckpointError(f"{where} has {bits} bits; supported are 4 and 8")
    group_size = fields.integer("group_size", 128, minimum=-1)
    return Settings(bits, group_size, fields.flag("sym", True), fields.flag("desc_act", False))


def _read_version(fields: ConfigFields, where: str) -> str:
    """``checkpoint_format``, which newer files have as ``format`` too."""
    found = {name: fields.raw(name) for name in ("checkpoint_format", "format") if fields.has(name)}
    for name, version in found.items():
        if version not in ("gptq", "gptq_v2"):
            raise CheckpointError(
                f"{where} has the {name} {version!r}; supported are 'gptq' and 'gptq_v2'"
            )
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"{where} has the checkpoint_format {found['checkpoint_format']!r} and the format "
            f"{found['format']!r}; they must be equal"
        )
    if (method := fields.raw("method")) not in (None, "gptq"):
        raise CheckpointError(f"{where} has the method {method!r}; supported is 'gptq'")
    if fields.flag("is_marlin_format", False):
        raise CheckpointError(f"{where} has is_marlin_format true; supported is false")
    return next(iter(found.values()), "gptq")


def _read_exceptions(
    dynamic: Any, quantization: dict[str, Any], where: str
) -> tuple[tuple[str, Settings | None], ...]:
    """GPTQModel's settings by name: "+:" or nothing before a pattern sets them, "-:" skips."""
    if not dynamic:
        return ()
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{where} is {dynamic!r:.200}; expected settings by module name")
    exceptions = []
    for entry, own in dynamic.items():
        pattern = entry.removeprefix("-:").removeprefix("+:")
        checked_entries([f"re:{pattern}"], where)
        if entry.startswith("-:"):
            exceptions.append((pattern, None))
            continue
        if not isinstance(own, dict):
            raise CheckpointError(f"{where}.{entry} is {own!r:.200}; expected an object")
        fields = ConfigFields(quantization | own, f"{where}.{entry}")
        exceptions.append((pattern, _read_settings(fields, f"{where}.{entry}")))
    return tuple(exceptions)


register_format("gptq", read_gptq, lambda quantization: quantization.keys() - _FIELDS)
