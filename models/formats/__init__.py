"""Weight formats: how checkpoints store quantised weights."""

from rjax.models.formats import (  # noqa: F401 - they register themselves
    awq,
    compressed_tensors_config,
    fp8,
    gptq,
    mxfp4,
)
from rjax.models.formats.plain import FloatWeights, OnLoad, Plain
from rjax.models.formats.registry import (
    format_names,
    read_format,
    register_format,
    unknown_quantization_fields,
)
from rjax.models.formats.weight_format import StoredTensor, WeightFormat

__all__ = [
    "FloatWeights",
    "OnLoad",
    "Plain",
    "StoredTensor",
    "WeightFormat",
    "format_names",
    "read_format",
    "register_format",
    "unknown_quantization_fields",
]
