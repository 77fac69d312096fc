"""Writes quantised checkpoints in the layouts of their libraries, with numpy alone."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from rjax import models
from rjax.models.families import FAMILIES
from rjax.models.loading.pieces import tensor_shape

Tensors = dict[str, np.ndarray]
Encoder = Callable[[str, tuple[int, int], np.random.Generator], tuple[Tensors, np.ndarray]]
"""(module, (outputs, inputs), draw) to (its tensors, the weight that they mean)."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(values: np.ndarray, axis: int, bits: int = 4, order=None) -> np.ndarray:
    """Unsigned integers in words of 32 bits along an axis; ``order[i]`` is what nibble i holds."""
    values = np.moveaxis(values, axis, -1)
    count = 32 // bits
    missing = -values.shape[-1] % count
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    by_word = values.reshape(*values.shape[:-1], -1, count).astype(np.uint32)
    words = np.zeros(by_word.shape[:-1], np.uint32)
    for nibble, offset in enumerate(order or range(count)):
        words |= by_word[..., offset] << np.uint32(bits * nibble)
    return np.ascontiguousarray(np.moveaxis(words.view(np.int32), -1, axis))


def repeated(values: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """One value of each block for every number of the weight, ragged edges cut off."""
    return values.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def scales(draw: np.random.Generator, shape, dtype) -> np.ndarray:
    return draw.uniform(0.002, 0.02, shape).astype(dtype)


def awq(group: int, zero_points: bool = True) -> Encoder:
    def encode(module, shape, draw):
        outputs, inputs = shape
        q = draw.integers(0, 16, shape)
        z = draw.integers(0, 16, (outputs, inputs // group))
        z = z if zero_points else np.full_like(z, 8)
        s = scales(draw, z.shape, np.float16)
        tensors = {
            "qweight": packed(q.T, 1, order=AWQ_ORDER),
            "qzeros": packed(z.T, 1, order=AWQ_ORDER),
            "scales": np.ascontiguousarray(s.T),
        }
        wide = q - repeated(z, (1, group), shape)
        return named(module, tensors), wide * repeated(s.astype(np.float32), (1, group), shape)

    return encode


def gptq(group: int, bits: int = 4, offset: int = 1, symmetric: bool = False) -> Encoder:
    def encode(module, shape, draw):
        outputs, inputs = shape
        size = inputs if group == -1 else group
        q = draw.integers(0, 2**bits, shape)
        z = draw.integers(0, 2**bits, (outputs, inputs // size))
        z = np.full_like(z, 2 ** (bits - 1)) if symmetric else z
        s = scales(draw, z.shape, np.float16)
        tensors = {
            "qweight": packed(q.T, 0, bits),
            "qzeros": packed(z.T, 1, bits) - np.int32(sum(offset << i for i in range(0, 32, bits))),
            "scales": np.ascontiguousarray(s.T),
            "g_idx": (np.arange(inputs) // size).astype(np.int32),
        }
        wide = q - repeated(z, (1, size), shape)
        return named(module, tensors), wide * repeated(s.astype(np.float32), (1, size), shape)

    return encode


def pack_quantized(group: int | None, bits: int = 4, zero_points: bool = False) -> Encoder:
    def encode(module, shape, draw):
        outputs, inputs = shape
        size = group or inputs
        half = 2 ** (bits - 1)
        q = draw.integers(-half, half, shape)
        z = draw.integers(-half, half, (outputs, inputs // size))
        z = z if zero_points else np.zeros_like(z)
        s = scales(draw, z.shape, ml_dtypes.bfloat16)
        tensors = {
            "weight_packed": packed(q + half, 1, bits),
            "weight_scale": s,
            "weight_shape": np.array(shape, np.int64),
        }
        if zero_points:
            tensors["weight_zero_point"] = packed(z + half, 0, bits)
        wide = q - repeated(z, (1, size), shape)
        return named(module, tensors), wide * repeated(s.astype(np.float32), (1, size), shape)

    return encode


def fp8(block: tuple[int, int] | None, scale_name: str, input_name: str = "") -> Encoder:
    """With a block of (1, 0), one scale for each channel; with None, one in all."""

    def encode(module, shape, draw):
        values = draw.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
        size = shape if block is None else (block[0], block[1] or shape[1])
        count = tuple(-(-a // b) for a, b in zip(shape, size, strict=True))
        s = scales(draw, count, np.float32)
        tensors = {"weight": values, scale_name: s.reshape(1) if block is None else s}
        if input_name:
            tensors[input_name] = np.array([0.1], np.float32)
        return named(module, tensors), values.astype(np.float32) * repeated(s, size, shape)

    return encode


def int8() -> Encoder:
    def encode(module, shape, draw):
        values = draw.integers(-127, 128, shape).astype(np.int8)
        s = scales(draw, (shape[0], 1), np.float32)
        return named(module, {"weight": values, "weight_scale": s}), values * s

    return encode


def named(module: str, tensors: Tensors) -> Tensors:
    return {f"{module}.{name}": value for name, value in tensors.items()}


def compressed(layout: str, **weights) -> dict:
    """A quantization_config of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[dict, Encoder]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, awq(32)),
    "awq-symmetric": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False},
        awq(32, zero_points=False),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
        gptq(32),
    ),
    "gptq-symmetric": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
        gptq(32, symmetric=True),
    ),
    "gptq-v2-8bit": (
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": -1,
            "sym": False,
            "checkpoint_format": "gptq_v2",
        },
        gptq(-1, bits=8, offset=0),
    ),
    "w4a16": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        pack_quantized(32),
    ),
    "w4a16-channel": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
        pack_quantized(None),
    ),
    "w4a16-asym": (
        compressed(
            "pack-quantized",
            num_bits=4,
            type="int",
            strategy="group",
            group_size=32,
            symmetric=False,
        ),
        pack_quantized(32, zero_points=True),
    ),
    "w8a16": (
        compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=32),
        pack_quantized(32, bits=8),
    ),
    "w8a8": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        int8(),
    ),
    "fp8-dynamic": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        fp8((1, 0), "weight_scale"),
    ),
    "fp8-tensor": (
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        fp8(None, "weight_scale"),
    ),
    "fp8-block": (
        compressed(
            "float-quantized",
            num_bits=8,
            type="float",
            strategy="block",
            block_structure=[128, 128],
        ),
        fp8((128, 128), "weight_scale"),
    ),
    "deepseek-fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8((128, 128), "weight_scale_inv"),
    ),
    "fp8-static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8(None, "weight_scale", "input_scale"),
    ),
    "fp8-of-transformers": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8(None, "weight_scale_inv", "activation_scale"),
    ),
}
"""(quantization_config, encoder) by name."""


def write_quantised(root: Path, values: dict, name: str, seed: int = 0) -> tuple[Path, Path]:
    """A random checkpoint in a format, and the one with the weights that it means.

    Args:
        root: the two folders are made in it.
        values: config.json without a quantization_config.
        name: of the format.
        seed: of the weights.
    """
    quantization, encode = FORMATS[name]
    config = models.config_from_dict(values)
    draw = np.random.default_rng(seed)
    quantised, plain = {}, {}
    for path, pieces in FAMILIES[config.architecture].weights(config).items():
        of_linear = path.startswith("layers.") and path.endswith(".weight") and "norm" not in path
        for piece in pieces:
            shape = tensor_shape(piece, config)
            if piece.tensor in plain:
                continue
            if of_linear:
                stored, weight = encode(piece.tensor.removesuffix(".weight"), shape, draw)
                quantised |= stored
            else:
                weight = draw.normal(1 if "norm" in path else 0, 0.1, shape)
                quantised[piece.tensor] = weight.astype(np.float32)
            plain[piece.tensor] = weight.astype(np.float32)
    folders = root / "quantised", root / "plain"
    for folder, tensors, config in (
        (folders[0], quantised, values | {"quantization_config": quantization}),
        (folders[1], plain, values),
    ):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
    return folders
