"""The problem that a whole decoder layer poses."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from rjax.models import DecoderLayer, Linear, Rotary, WeightScheme
from rjax.models.layers.attention import Attention
from rjax.models.layers.mlp import Mlp
from rjax.models.schemes import Scaled, Unquantised
from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.kernel import Problem
from rjax.pallas_kernels.one_row_layer.weights import LayerWeights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerProblem(Problem):
    """A decoder layer like Llama's; with an obstacle, nothing else is known of it.

    decoder_layer: (x, update or None, `LayerWeights`, cos, sin, K pages, V pages, page table,
    positions, slots, `PartialSumBuffer` or None) to (x + the update of attention, the update of the
    feed-forward, K pages, V pages, words for the next layer).

    Attributes:
        depth, width: D and F.
        values: name of the type of values of few bits; None for unquantised weights.
        group: inputs that share a scale; None for all.
        zero_points: whether the weights have zero points.
        early_weights: see `LinearProblem`.
        num_heads, num_kv_heads, head_dim: N, K and H.
        rotary_dim: numbers of a head that rotate.
        kv_dtype, page_size: name of the dtype of the KV, and tokens of a page.
        score_scale: factor of the scores.
        eps, head_eps: epsilon of the layer's norms, and of those of queries and keys.
    """

    depth: int = 0
    width: int = 0
    values: str | None = None
    group: int | None = None
    zero_points: bool = False
    early_weights: bool = False
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rotary_dim: int = 0
    kv_dtype: str = ""
    page_size: int = 0
    score_scale: float = 0.0
    eps: float = 0.0
    head_eps: float = 0.0


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
    obstacle = obstacle or unlike_llama(layer) or _attention_obstacle(layer.attention, rotary)
    if obstacle is not None:
        name = jnp.dtype(dtype).name
        return LayerProblem(operation="decoder_layer", rows=rows, dtype=name, obstacle=obstacle)
    attention, mlp = plain_parts(layer)
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


def unlike_llama(layer: DecoderLayer) -> str | None:
    """How a layer differs from Llama's; None if it does not.

    Llama's has RMS norms before attention and feed-forward, silu with a gate, all weights of one
    scheme, and a bias of queries, keys and values at most.
    """
    attention, mlp = layer.attention, layer.mlp
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
        "a norm of queries or keys alone": (attention.q_norm is None) != (attention.k_norm is None),
        "attention sinks": attention.sinks is not None,
        "ALiBi": attention.alibi is not None,
        "a sliding window": spec.sliding_window is not None,
        "a soft cap of scores": spec.soft_cap is not None,
        "no rotary embedding": rotary is None,
        "scaled queries": rotary is not None and rotary.query_scale is not None,
    }
    return next((kind for kind, found in kinds.items() if found), None)


def plain_parts(layer: DecoderLayer) -> tuple[Attention, Mlp]:
    """Attention and feed-forward of a layer like Llama's."""
    assert isinstance(layer.attention, Attention) and isinstance(layer.mlp, Mlp)
    return layer.attention, layer.mlp


def layer_weights(layer: DecoderLayer) -> LayerWeights:
    """The arrays of a layer that has a `layer_problem`."""
    attention, mlp = plain_parts(layer)
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
        leaves = linear.leaves
        interleaved = linear.scheme.is_interleaved(leaves["weight"].shape)
        return ScaledWeight.of_leaves(
            leaves, linear.output_shape, matrices, interleaved=interleaved
        )
    weight = linear.leaves["weight"]
    return weight if shape is None else weight.reshape(shape)
