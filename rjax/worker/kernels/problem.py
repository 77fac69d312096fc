"""The problem by which a kernel is chosen."""

import dataclasses
import math
from typing import Literal

from rjax.models import Activation, Router, WeightScheme

type Operation = Literal[
    "linear",
    "linear_activation",
    "norm_linear",
    "norm_linear_activation",
    "merge_linear",
    "add_rms_norm",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_reduce_argmax",
    "activation",
    "norm_rope_and_cache",
    "rope_and_cache",
    "route",
    "experts",
    "decoder_layer",
    "between_attention",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One operation at one size, on one device of the mesh.

    Attributes:
        operation: the operands and the result of each:

            - linear: (h [T, D], leaves) to [T, ...] or a Partial;
            - linear_activation: the same to [T, F];
            - norm_linear, norm_linear_activation: (x, update, norm weight, leaves) to
              (x + update, the result);
            - merge_linear: (UnmergedAttention, leaves) to [T, ...] or a Partial;
            - add_rms_norm: (x, update, norm weight) to (x + update, its norm);
            - all_reduce: (update, peers) to (its sum over the devices, peers), where the update is
              a Partial with a device's summands and peers a `Peers` or None;
            - all_reduce_rms_norm: (x, update, norm weight, peers) to (x + the sum of the update
              over the devices, its norm, peers);
            - all_reduce_argmax: (x [T, W], peers) to (the index of the largest number of each row
              over all devices, peers), where W are the columns of a device, in float32;
            - activation: h [T, A, F] to [T, F];
            - norm_rope_and_cache: (qkv, weights of the norms of a query and a key, and as next);
            - rope_and_cache: (qkv, cos, sin, K pages, V pages, slots, scales) to (q, K pages,
              V pages);
            - route: (h [T, D], weight [D, J], bias [J] or None, correction [J] or None) to Routing;
            - experts: (h [T, D], experts of each row, their weights, the leaves of the weights
              [J, D, A, I] and [J, I, D] of all experts, their biases or None, the second's with an
              axis of one device before it if ``needs_partial``) to [T, D] or a Partial; see
              `Operations.experts`;
            - decoder_layer: (x, update or None, `LayerWeights`, cos, sin, K pages, V pages, page
              table, positions, slots, `LayerWords` or None) to (x + the update of attention, the
              update of the feed-forward, K pages, V pages, words for the next layer);
            - between_attention: (x, attended [T, E], `BetweenWeights`, `Arrivals`) to (the
              stream, the update of the feed-forward or qkv of the next layer as a Partial, counters
              for the next layer).

        label: the axes of a projection, such as "D -> K A H", for reports.
        rows: number of rows, T.
        dtype: name of the float type of the activations.
        depth: entries that are contracted, or the numbers of a row.
        columns: shape of the result after T; of between_attention E, F and the columns of qkv of
            the next layer, if one follows.
        scheme: how the weight is stored; None where there is none.
        scale_block: (outputs, inputs) that share a scale of the weight; None without scales.
        down_scheme, down_scale_block: the same of the second weight of experts.
        activation: activation of the operations that end with one.
        bias: whether a bias is added to the result.
        pending_bias: the update of a norm is a Partial with a bias.
        needs_partial: the depth is sharded over devices, so that the result must be a Partial.
        peer_capacity: numbers of a share that fit the exchange buffers of the devices; 0 without
            such buffers.
        early_weights: no kernel of the program writes the weights, because they are its arguments.
            A kernel may then read them before the kernels that it depends on have ended.
        eps: the norm's epsilon.
        router: the scoring and choice of experts in route.
        num_experts, top_k: J of one device, and the experts of a row.
        experts_elsewhere: experts of the other devices, where devices hold whole experts. Rows may
            then have any number of the device's own, also none.
        obstacle: what keeps every kernel of the operation from it, such as another kind of layer;
            None if nothing does.
        head_dim, rotary_dim, kv_dtype: numbers of a head, how many of them rotate, and name of the
            dtype of the KV, for both rope_and_cache and decoder_layer; rotary_dim is None without
            rotation.
        num_heads, num_kv_heads, page_size, score_scale, head_eps: values of decoder_layer: N, K,
            tokens of a page, factor of the scores, epsilon of the norms of queries and keys.
    """

    operation: Operation
    rows: int
    dtype: str
    label: str = ""
    depth: int = 0
    columns: tuple[int, ...] = ()
    scheme: WeightScheme | None = None
    scale_block: tuple[int, int] | None = None
    down_scheme: WeightScheme | None = None
    down_scale_block: tuple[int, int] | None = None
    activation: Activation | None = None
    bias: bool = False
    pending_bias: bool = False
    needs_partial: bool = False
    peer_capacity: int = 0
    early_weights: bool = False
    eps: float = 0.0
    router: Router | None = None
    num_experts: int = 0
    top_k: int = 0
    experts_elsewhere: int = 0
    obstacle: str | None = None
    head_dim: int = 0
    rotary_dim: int | None = None
    kv_dtype: str = ""
    num_heads: int = 0
    num_kv_heads: int = 0
    page_size: int = 0
    score_scale: float = 0.0
    head_eps: float = 0.0

    @property
    def width(self) -> int:
        """Numbers of a row of the result."""
        return math.prod(self.columns)
