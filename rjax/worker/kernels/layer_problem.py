"""The problems that a decoder layer poses to kernels of more than one operation, and its arrays."""

import math
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from rjax.models import DecoderLayer, Linear, Rotary, WeightScheme
from rjax.models.layers.attention import Attention
from rjax.models.layers.gated_delta_net import GatedDeltaNet
from rjax.models.layers.mlp import Mlp
from rjax.models.schemes import UNQUANTISED, Scaled, Unquantised
from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.layer.base import LayerProblem, PostAttentionProblem
from rjax.pallas_kernels.layer.one_row.weights import LayerWeights
from rjax.pallas_kernels.layer.post_attention_block.kernel import PostAttentionWeights


def layer_problem(
    layer: DecoderLayer,
    rotary: Rotary | None,
    k_pages: Array,
    *,
    rows: int,
    dtype: DTypeLike,
    early_weights: bool = False,
    obstacle: str | None = None,
) -> LayerProblem:
    """The problem by which a kernel is chosen.

    Such kernels know RMS norms before attention and feed-forward, a rotary embedding of halves,
    norms and biases of queries and keys, and silu with a gate; all weights of one scheme. Anything
    else of the layer is the problem's obstacle, after the one that is given.
    """
    obstacle = obstacle or _unlike_llama(layer) or _attention_obstacle(layer.attention, rotary)
    if obstacle is not None:
        name = jnp.dtype(dtype).name
        return LayerProblem(operation="decoder_layer", rows=rows, dtype=name, obstacle=obstacle)
    attention, mlp = _llama_parts(layer)
    assert layer.attention_norm is not None and rotary is not None
    (D,), (K, A, H) = attention.qkv.input_shape, attention.qkv.output_shape
    return LayerProblem(
        operation="decoder_layer",
        rows=rows,
        dtype=jnp.dtype(dtype).name,
        depth=D,
        width=mlp.down.depth,
        **_stored_as(attention.qkv.scheme),
        early_weights=early_weights,
        eps=layer.attention_norm.eps,
        head_eps=0.0 if attention.q_norm is None else attention.q_norm.eps,
        score_scale=attention.spec.scale,
        num_heads=K * (A - 2),
        num_kv_heads=K,
        head_dim=H,
        rotary_dim=2 * rotary.cos.shape[-1],
        kv_dtype=jnp.dtype(k_pages.dtype).name,
        page_size=k_pages.shape[2],
    )


def _stored_as(scheme: WeightScheme) -> dict[str, Any]:
    if not isinstance(scheme, Scaled):
        return {}
    return {
        "values": scheme.values,
        "group": scheme.block[1],
        "zero_points": scheme.zero_points,
    }


def _unlike_llama(layer: DecoderLayer) -> str | None:
    """How a layer differs from Llama's; None if it does not.

    Llama's has RMS norms before attention and feed-forward, silu with a gate, all weights of one
    scheme, and a bias of queries, keys and values at most.
    """
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, GatedDeltaNet):
        return "a gated delta net"
    if not isinstance(attention, Attention):
        return "latent attention"
    if not isinstance(mlp, Mlp):
        return "experts"
    projections = (attention.qkv, attention.output, mlp.up, mlp.down)
    norms = (layer.attention_norm, layer.mlp_norm)
    kinds = {
        "attention beside the feed-forward": layer.parallel,
        "a factor of the residual stream": layer.scale != 1,
        "a norm after attention": layer.attention_post_norm is not None,
        "a norm after the feed-forward": layer.mlp_post_norm is not None,
        "inputs or a factor of its own": layer.per_layer is not None or layer.factor is not None,
        "norms that are not RMS norms": not all(n is not None and n.is_rms for n in norms),
        "weights of several schemes": any(p.scheme != attention.qkv.scheme for p in projections),
        "a bias besides that of qkv": any(p.bias is not None for p in projections[1:]),
        "a feed-forward without silu and a gate": not mlp.activation.is_swiglu,
    }
    return next((kind for kind, found in kinds.items() if found), None)


def _attention_obstacle(attention: Any, rotary: Rotary | None) -> str | None:
    """What kernels of a whole layer do not know of attention like Llama's, or None."""
    spec, scheme = attention.spec, attention.qkv.scheme
    kinds = {
        f"weights stored as {scheme.name}": not isinstance(scheme, Scaled | Unquantised),
        "norms of queries and keys apart from the rotary embedding": not attention.norm_joins_rope,
        "norms of values": attention.norms_values,
        "a norm of queries or keys alone": (attention.q_norm is None) != (attention.k_norm is None),
        "an output gate": attention.output_gate,
        "heads unlike those of other layers": attention.has_own_sizes,
        "keys and values that other layers share": attention.keeps_kv,
        "no keys and values of its own": attention.kv_projections != 2,
        "attention sinks": attention.sinks is not None,
        "ALiBi": attention.alibi is not None,
        "a sliding window": spec.sliding_window is not None,
        "a soft cap of scores": spec.soft_cap is not None,
        "no rotary embedding": rotary is None,
        "scaled queries": rotary is not None and rotary.query_scale is not None,
    }
    return next((kind for kind, found in kinds.items() if found), None)


def _llama_parts(layer: DecoderLayer) -> tuple[Attention, Mlp]:
    """Attention and feed-forward of a layer like Llama's."""
    assert isinstance(layer.attention, Attention) and isinstance(layer.mlp, Mlp)
    return layer.attention, layer.mlp


def layer_weights(layer: DecoderLayer) -> LayerWeights:
    """The arrays of a layer that has a `layer_problem`."""
    attention, mlp = _llama_parts(layer)
    assert layer.attention_norm is not None and layer.mlp_norm is not None

    def of_norm(norm):
        return None if norm is None else norm.weight[...]

    output = attention.output
    return LayerWeights(
        attention_norm=layer.attention_norm.weight[...],
        mlp_norm=layer.mlp_norm.weight[...],
        qkv=_stored(attention.qkv, 1),
        qkv_bias=None if attention.qkv.bias is None else attention.qkv.bias[...],
        q_norm=of_norm(attention.q_norm),
        k_norm=of_norm(attention.k_norm),
        output=_stored(output, 1, (output.depth, -1)),
        gate_up=_stored(mlp.up, 2),
        down=_stored(mlp.down, 1),
    )


def post_attention_problem(
    layer: DecoderLayer,
    following: DecoderLayer | None,
    *,
    rows: int,
    dtype: DTypeLike,
    early_weights: bool = False,
    obstacle: str | None = None,
) -> PostAttentionProblem:
    """The problem by which a kernel is chosen.

    Such kernels know layers like Llama's with unquantised weights. Anything else is the problem's
    obstacle, after the one that is given.
    """
    layers = [layer] if following is None else [layer, following]
    obstacle = obstacle or next(filter(None, map(_block_obstacle, layers)), None)
    norms = [layer.mlp_norm, *(each.attention_norm for each in layers[1:])]
    eps = {norm.eps for norm in norms if norm is not None}
    if obstacle is None and len(eps) != 1:
        obstacle = "norms of different epsilons"
    if obstacle is not None:
        name = jnp.dtype(dtype).name
        return PostAttentionProblem(
            operation="post_attention_block", rows=rows, dtype=name, obstacle=obstacle
        )
    attention, mlp = _llama_parts(layer)
    columns = [attention.output.depth, mlp.down.depth]
    if following is not None:
        columns.append(math.prod(_llama_parts(following)[0].qkv.output_shape))
    return PostAttentionProblem(
        operation="post_attention_block",
        rows=rows,
        dtype=jnp.dtype(dtype).name,
        depth=mlp.up.depth,
        columns=tuple(columns),
        early_weights=early_weights,
        eps=eps.pop(),
    )


def _block_obstacle(layer: DecoderLayer) -> str | None:
    """How a layer differs from Llama's with unquantised weights; None if it does not."""
    why = _unlike_llama(layer)
    if why is not None:
        return why
    scheme = _llama_parts(layer)[0].qkv.scheme
    return None if scheme == UNQUANTISED else f"weights stored as {scheme.name}"


def post_attention_weights(
    layer: DecoderLayer, following: DecoderLayer | None
) -> PostAttentionWeights:
    """The arrays of layers that have a `post_attention_problem` without an obstacle."""
    assert layer.mlp_norm is not None
    attention, mlp = _llama_parts(layer)
    next_norm = next_qkv = None
    if following is not None:
        assert following.attention_norm is not None
        next_norm = following.attention_norm.weight[...]
        next_qkv = _matrix(_llama_parts(following)[0].qkv)
    return PostAttentionWeights(
        output=_matrix(attention.output),
        mlp_norm=layer.mlp_norm.weight[...],
        gate_up=mlp.up.leaves["weight"],
        down=_matrix(mlp.down),
        next_norm=next_norm,
        next_qkv=next_qkv,
    )


def _matrix(linear: Linear) -> Array:
    return linear.leaves["weight"].reshape(linear.depth, -1)


def _stored(
    linear: Linear, matrices: int, shape: tuple[int, int] | None = None
) -> Array | ScaledWeight:
    """The stored weight; ``shape`` is the new shape of one in 16 bits, None keeps its own."""
    if isinstance(linear.scheme, Scaled):
        leaves = linear.leaves
        interleaved = linear.scheme.is_interleaved(leaves["weight"].shape)
        return ScaledWeight.of_leaves(
            leaves, linear.output_shape, matrices, interleaved=interleaved
        )
    weight = linear.leaves["weight"]
    return weight if shape is None else weight.reshape(shape)
