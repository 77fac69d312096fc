"""The problems that a decoder layer, or what is between one attention and the next, poses."""

import dataclasses

from rjax.pallas_kernels.kernel import Problem


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PostAttentionProblem(Problem):
    """What is between one attention and the next; with an obstacle, nothing else is known of it.

    post_attention_block: (x, attended [T, E], `PostAttentionWeights`, `GridBarrier`) to (the
    stream, the update of the feed-forward or qkv of the next layer as a Partial, counters for the
    next layer).

    Attributes:
        depth: D.
        columns: E, F and the columns of qkv of the next layer, if one follows.
        early_weights: see `LinearProblem`.
        eps: epsilon of the norms.
    """

    depth: int = 0
    columns: tuple[int, ...] = ()
    early_weights: bool = False
    eps: float = 0.0
