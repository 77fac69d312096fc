"""Writes checkpoints of gpt-oss whose experts are in MXFP4, with numpy alone."""

import numpy as np
from safetensors.numpy import load_file

from tests.models.plain_checkpoints import write_plain, write_tensors

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed(weight):
    """(blocks, scales, what they mean) of [J, outputs, inputs] in MXFP4."""
    J, outputs, inputs = weight.shape
    groups = weight.reshape(J, outputs, inputs // 32, 32)
    exponent = np.floor(np.log2(np.maximum(np.abs(groups).max(-1), 2.0**-20))) - 2
    codes = np.array([*FP4, *(-v for v in FP4)])
    index = np.abs((groups / 2.0 ** exponent[..., None])[..., None] - codes).argmin(-1)
    exact = codes[index] * 2.0 ** exponent[..., None]
    index = index.astype(np.uint8)
    blocks = np.ascontiguousarray(index[..., 0::2] | (index[..., 1::2] << 4))
    return blocks, (exponent + 127).astype(np.uint8), exact.reshape(weight.shape)


def write_mxfp4(root, values, change=lambda tensors: None):
    """(the folder of gpt-oss in MXFP4, the plain one of the same weights)."""
    tensors = load_file(write_plain(root / "random", values) / "model.safetensors")
    stored = {}
    for name, value in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = value
            continue
        blocks, scales, exact = packed(value.swapaxes(1, 2))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": np.ascontiguousarray(scales)}
        tensors[name] = np.ascontiguousarray(exact.swapaxes(1, 2)).astype(np.float32)
    change(stored)
    quantised = values | {"quantization_config": {"quant_method": "mxfp4"}}
    return (
        write_tensors(root / "packed", quantised, stored),
        write_tensors(root / "exact", values, tensors),
    )
