"""Weights of the decode steps of torch_side, perhaps in few bits, with torch's own operations.

Quantised weights are rounded as rjax rounds them while it loads: "fp8" has a float32 scale for each
output channel, "int4" a bfloat16 scale for each group of 128 inputs. fp8 weights multiply fp8
activations with a scale for each token.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""[outputs, inputs], or (values, scales) as torch's operations take them."""

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_INT4_MAX = 7
_GROUP = 128
_PROJECTIONS = "qkv", "out", "up", "down"
_INNER_K_TILES = 8  # of the order in which torch packs int4 for CUDA


def _rounded(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [outputs, inputs] of few bits (int4 as int8), and scales [outputs, groups]."""
    wide = weight.float()
    if scheme == "fp8":
        scale = _scale(wide, _FP8_MAX)
        return (wide / scale).to(_FP8), scale
    groups = wide.view(len(wide), -1, math.gcd(_GROUP, wide.shape[1]))
    scale = _scale(groups, _INT4_MAX).to(torch.bfloat16)
    values = (groups / scale.float()).round().clamp(-_INT4_MAX, _INT4_MAX)
    return values.to(torch.int8).view(wide.shape), scale[..., 0]


def _dequantised(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight that they mean, in float32."""
    groups = values.float().view(*scale.shape, -1) * scale.float()[..., None]
    return groups.view(values.shape)


def _packed(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Weight:
    """As torch's operations take them.

    Args:
        values, scale: from ``_rounded``.
        dtype: of the activations.

    Raises:
        RuntimeError: torch has no such operation for the device or the shape.
    """
    if values.dtype == _FP8:
        return values, scale.t().contiguous()
    scale = scale.t().to(dtype)
    scales = torch.stack([scale, torch.zeros_like(scale)], -1).contiguous()  # and zero points
    nibbles = values.int() + 8
    if not values.is_cuda:
        return torch._convert_weight_to_int4pack_for_cpu(nibbles, 1), scales
    pairs = (nibbles[:, ::2] << 4 | nibbles[:, 1::2]).to(torch.uint8)
    return torch._convert_weight_to_int4pack(pairs, _INNER_K_TILES), scales


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, inputs] by a weight."""
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight, bias)
    values, scale = weight
    if values.dtype == _FP8:
        of_tokens = _scale(x.float(), _FP8_MAX)
        rows = (x.float() / of_tokens).to(_FP8)
        product = torch._scaled_mm(
            rows,
            values.t(),
            scale_a=of_tokens,
            scale_b=scale,
            out_dtype=x.dtype,
            use_fast_accum=x.is_cuda,
        )
    else:
        multiply = torch._weight_int4pack_mm if x.is_cuda else torch._weight_int4pack_mm_for_cpu
        group = x.shape[1] // scale.shape[0]
        product = multiply(x.contiguous(), values, group, scale)
    return product if bias is None else product + bias


def _scale(values: torch.Tensor, largest: float) -> torch.Tensor:
    """What makes the largest value along the last axis ``largest``."""
    found = values.abs().amax(-1, keepdim=True) / largest
    return torch.where(found == 0, 1.0, found)


def fused_layer(layer) -> dict[str, Any]:
    """The weights of a layer as the decode steps take them."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    biased = parts[0].bias is not None
    normed = getattr(attention, "q_norm", None) is not None
    return {
        "norm": layer.input_layernorm.weight,
        "qkv": torch.cat([p.weight for p in parts]),
        "bias": torch.cat([p.bias for p in parts]) if biased else None,
        "head_norms": (attention.q_norm.weight, attention.k_norm.weight) if normed else None,
        "out": attention.o_proj.weight,
        "mlp_norm": layer.post_attention_layernorm.weight,
        "up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "down": mlp.down_proj.weight,
    }


def quantised_layers(model, scheme: str) -> list[dict]:
    """The fused weights of all layers, quantised; the model keeps the dequantised ones.

    Raises:
        RuntimeError: torch has no operation for them; the model is changed nevertheless.
    """
    found = [_round_layer(layer, scheme) for layer in model.model.layers]
    for layer in found:
        for name in _PROJECTIONS:
            values, scale = layer[name]
            layer[name] = _packed(values, scale, model.dtype)
    return found


def _round_layer(layer, scheme: str) -> dict[str, Any]:
    attention, mlp = layer.self_attn, layer.mlp
    parts = (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )
    found = fused_layer(layer)
    for name, modules in zip(_PROJECTIONS, parts, strict=True):
        found[name] = _rounded(found[name], scheme)
        meant = _dequantised(*found[name]).split([module.out_features for module in modules])
        for module, weight in zip(modules, meant, strict=True):
            module.weight.copy_(weight)
    return found
