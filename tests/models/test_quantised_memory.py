"""Weights take the memory that the file says, at the sizes of real models."""

import copy
import math

import jax.numpy as jnp
import pytest
from quantised_files import FORMATS

from rjax import models
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models.families import FAMILIES
from rjax.models.loading.pieces import module_of, tensor_shape

_BYTES = {"I32": 4, "I8": 1, "F8_E4M3": 1, "F32": 2}  # files have 16-bit scales


def real(quantization: dict) -> dict:
    """The quantization_config with groups of 128."""
    found = copy.deepcopy(quantization)
    for fields in (found, found.get("config_groups", {}).get("group_0", {}).get("weights", {})):
        if fields.get("group_size") == 32:
            fields["group_size"] = 128
    return found


def file_bytes(config: models.ModelConfig) -> float:
    """Of a checkpoint."""
    total = 0.0
    for path, pieces in FAMILIES[config.architecture].weights(config).items():
        quantised = config.scheme_of(path.removesuffix(".weight")).name != "unquantised"
        for piece in pieces:
            shape = tensor_shape(piece, config)
            if not quantised:
                total += 2 * math.prod(shape)
                continue
            assert config.format is not None and len(shape) == 2
            for tensor in config.format.tensors(module_of(piece), shape).values():
                if tensor.used:
                    total += math.prod(tensor.shapes[0]) * _BYTES[tensor.types[0]]
    return total


@pytest.mark.sample(4, 4)
@pytest.mark.parametrize("shapes", ["llama-3-8b", "qwen2.5-0.5b"])
@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_that_of_the_file(name, shapes):
    values = SHAPES[shapes] | {"quantization_config": real(FORMATS[name][0])}
    config = models.config_from_dict(values)
    found = models.Decoder(config, jnp.bfloat16).weight_bytes
    assert found == pytest.approx(file_bytes(config), rel=0.02)
