"""The problem that a whole decoder layer poses."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from rjax.models import DecoderLayer, Linear, Rotary
from rjax.models.layers.attention import Attention
from rjax.models.layers.mlp import Mlp
from rjax.models.schemes import Scaled, Unquantised
from rjax.pallas_kernels.one_row_layer.weights import LayerWeights
from rjax.pallas_kernels.quantised_gemm.scaled_weight import ScaledWeight
from rjax.worker.kernels.problem import Problem
from rjax.worker.kernels.quantised import scaled_weight


def layer_problem(
    layer: DecoderLayer,
    rotary: Rotary | None,
    k_pages: Array,
    *,
    rows: int,
    dtype: DTypeLike,
    early_weights: bool = False,
) -> Problem | None:
    """The problem by which a kernel is chosen; None for a layer that no kernel takes as a whole.

    Such kernels know RMS norms before attention and feed-forward, a rotary embedding of halves,
    norms and biases of queries and keys, and silu with a gate; all weights of one scheme.
    """
    parts = plain_parts(layer)
    if parts is None:
        return None
    attention, mlp = parts
    spec = attention.spec
    plain = (
        isinstance(attention.qkv.scheme, Scaled | Unquantised)
        and attention.norm_joins_rope
        and (attention.q_norm is None) == (attention.k_norm is None)
        and attention.sinks is None
        and attention.alibi is None
        and spec.sliding_window is None
        and spec.soft_cap is None
        and rotary is not None
        and rotary.query_scale is None
    )
    if not plain:
        return None
    assert layer.attention_norm is not None and rotary is not None
    (D,), (K, A, H) = attention.qkv.input_shape, attention.qkv.output_shape
    return Problem(
        operation="decoder_layer",
        rows=rows,
        dtype=jnp.dtype(dtype).name,
        depth=D,
        columns=(mlp.down.depth,),
        scheme=attention.qkv.scheme,
        early_weights=early_weights,
        eps=layer.attention_norm.eps,
        head_eps=0.0 if attention.q_norm is None else attention.q_norm.eps,
        score_scale=spec.scale,
        num_heads=K * (A - 2),
        num_kv_heads=K,
        head_dim=H,
        rotary_dim=2 * rotary.cos.shape[-1],
        kv_dtype=jnp.dtype(k_pages.dtype).name,
        page_size=k_pages.shape[2],
    )


def plain_parts(layer: DecoderLayer) -> tuple[Attention, Mlp] | None:
    """Attention and feed-forward of a layer such as Llama's, or None for another kind.

    It has RMS norms before both, silu with a gate, all weights of one scheme, and a bias of
    queries, keys and values at most.
    """
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, Mlp):
        return None
    projections = (attention.qkv, attention.output, mlp.up, mlp.down)
    norms = (layer.attention_norm, layer.mlp_norm)
    plain = (
        not layer.parallel
        and layer.scale == 1
        and layer.attention_post_norm is None
        and layer.mlp_post_norm is None
        and all(norm is not None and norm.is_rms for norm in norms)
        and all(projection.scheme == attention.qkv.scheme for projection in projections)
        and all(projection.bias is None for projection in projections[1:])
        and mlp.activation.is_swiglu
    )
    return (attention, mlp) if plain else None


def layer_weights(layer: DecoderLayer) -> LayerWeights:
    """The arrays of a layer that has a `layer_problem`."""
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, Attention) and isinstance(mlp, Mlp)
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


def _stored(
    linear: Linear, matrices: int, shape: tuple[int, int] | None = None
) -> Array | ScaledWeight:
    """The stored weight; ``shape`` is the new shape of one in 16 bits, None keeps its own."""
    if isinstance(linear.scheme, Scaled):
        return scaled_weight(linear.scheme, linear.leaves, linear.output_shape, matrices)
    weight = linear.leaves["weight"]
    return weight if shape is None else weight.reshape(shape)
