"""The ``quantization_config`` of compressed-tensors."""

from typing import Any

from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.formats.compressed_tensors import CompressedTensors, Group
from rjax.models.formats.fp8 import checked_block
from rjax.models.formats.module_names import checked_entries
from rjax.models.formats.registry import register_format

_WHERE = "config.json: quantization_config"
_FIELDS = frozenset(
    {
        *("config_groups", "format", "ignore", "kv_cache_scheme", "quant_method"),
        *("quantization_status", "sparsity_config", "transform_config"),
        # Facts about the file.
        *("global_compression_ratio", "version"),
    }
)
"""Fields of the ``quantization_config`` that are read or do not matter to the values."""
_GROUP_FIELDS = {"format", "input_activations", "output_activations", "targets", "weights"}
_WEIGHT_FIELDS = {
    *("actorder", "block_structure", "group_size", "num_bits", "strategy", "symmetric", "type"),
    # How the values were found, and types that the file's tensors have anyway.
    *("dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
}
_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
_VALUES: dict[tuple[str, int], str] = {
    ("float", 8): "fp8",
    ("int", 8): "int8",
    ("int", 4): "int4",
}


def read_compressed_tensors(quantization: dict[str, Any]) -> CompressedTensors:
    """The format of a ``quantization_config``.

    Raises:
        CheckpointError: fields for which there is no code, or that are malformed.
    """
    fields = ConfigFields(quantization, _WHERE)
    groups = fields.raw("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{_WHERE} has no config_groups; expected at least one group")
    for name in ("sparsity_config", "transform_config"):
        if fields.raw(name):
            raise CheckpointError(f"{_WHERE} has a {name}, which is not supported")
    status = fields.raw("quantization_status")
    if status not in (None, "compressed"):
        raise CheckpointError(f"{_WHERE} has the status {status!r}; only 'compressed' is supported")
    return CompressedTensors(
        groups=tuple(_read_group(name, group, fields) for name, group in groups.items()),
        ignored=checked_entries(fields.raw("ignore"), f"{_WHERE}.ignore"),
        kv_scales=_has_kv_scales(fields),
    )


def _unknown_fields(quantization: dict[str, Any]) -> set[str]:
    """Fields that nothing here knows, with those inside the groups."""
    unknown = quantization.keys() - _FIELDS
    for name, group in ConfigFields(quantization, _WHERE).inner("config_groups").values().items():
        weights = group["weights"]
        unknown |= {f"config_groups.{name}.{key}" for key in group.keys() - _GROUP_FIELDS}
        unknown |= {
            f"config_groups.{name}.weights.{key}" for key in weights.keys() - _WEIGHT_FIELDS
        }
    return unknown


def _has_kv_scales(fields: ConfigFields) -> bool:
    if not fields.has("kv_cache_scheme"):
        return False
    scheme = fields.inner("kv_cache_scheme")
    kind = scheme.raw("type"), scheme.raw("num_bits"), scheme.raw("strategy") or "tensor"
    if kind != ("float", 8, "tensor") or scheme.raw("dynamic"):
        raise CheckpointError(
            f"{_WHERE}.kv_cache_scheme means {kind}; only static scales of 8-bit floats, one for "
            "each tensor, are supported"
        )
    return True


def _read_group(name: str, group: Any, whole: ConfigFields) -> Group:
    where = f"{_WHERE}.config_groups.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise CheckpointError(f"{where} is {group!r:.100}; expected an object with 'weights'")
    fields = ConfigFields(group, where)
    layout = fields.raw("format") or whole.raw("format")
    if layout not in _FORMATS:
        raise CheckpointError(
            f"{where} has the format {layout!r}; supported are {', '.join(_FORMATS)}"
        )
    weights = fields.inner("weights")
    kind = (str(weights.raw("type") or "int"), weights.integer("num_bits"))
    values = _VALUES.get(kind)
    if values is None or (layout == "pack-quantized") > (values != "fp8"):
        raise CheckpointError(
            f"{where} has weights of {kind[1]} bits of the type {kind[0]!r} in the format "
            f"{layout!r}; supported are fp8, int8 and int4"
        )
    if values == "int4" and layout != "pack-quantized":
        raise CheckpointError(
            f"{where} has int4 weights in the format {layout!r}; supported is 'pack-quantized'"
        )
    strategy = weights.raw("strategy") or "tensor"
    if strategy not in ("tensor", "channel", "group", "block"):
        raise CheckpointError(
            f"{where} has the strategy {strategy!r} for weights; supported are tensor, channel, "
            "group and block"
        )
    activations = group.get("input_activations")
    return Group(
        targets=checked_entries(fields.raw("targets"), f"{where}.targets"),
        values=values,
        packed=layout == "pack-quantized",
        strategy=strategy,
        block=_block(strategy, weights, where),
        zero_points=not weights.flag("symmetric", True),
        ordered=weights.raw("actorder") in ("group", "dynamic", True),
        static=isinstance(activations, dict) and not activations.get("dynamic"),
    )


def _block(strategy: str, weights: ConfigFields, where: str) -> tuple[int, int | None]:
    if strategy == "group":
        return 1, weights.integer("group_size")
    if strategy == "block":
        block = checked_block(weights.raw("block_structure"), f"{where}.weights.block_structure")
        if block is None:
            raise CheckpointError(f"{where} has the strategy 'block' and no block_structure")
        return block
    return 1, None


register_format("compressed-tensors", read_compressed_tensors, _unknown_fields)
