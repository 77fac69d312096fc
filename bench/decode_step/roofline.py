"""The roofline of a decode step: bytes and FLOP of every stage at the device's rates."""

import dataclasses
import math

import numpy as np

from bench.ceilings import Ceilings
from rjax.models import DecoderLayer, Linear, ModelConfig
from rjax.models.layers.experts import Experts

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeCase:
    """B rows with ``shared`` common tokens, followed by ``own`` unique tokens of each row."""

    batch: int
    shared: int
    own: int

    @property
    def context(self) -> int:
        """Tokens of each row, including that of this step."""
        return self.shared + self.own


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a step over all layers.

    Attributes:
        name: what it computes.
        moved: bytes that must be read or written: weights and distinct KV once, and rows.
        flops: FLOP; a multiply-add counts as two.
    """

    name: str
    moved: float
    flops: float


def stages(config: ModelConfig, case: DecodeCase, dtype: np.dtype) -> list[Stage]:
    """The GEMMs, the attention and the states of one step; everything else counts as free.

    Weights are read once, as they are stored; of experts, those that uniform routing is expected to
    take, and of rows each for each of its experts. So is the KV of the shared tokens. Attention to
    shared and to unique tokens are two stages, because they differ in arithmetic intensity. Linear
    attention reads and writes a state of each row.
    """
    itemsize = dtype.itemsize
    D, V, L = config.hidden_size, config.vocab_size, config.num_layers
    N, K, H, B = config.num_heads, config.num_kv_heads, config.head_dim, case.batch

    def gemm(name: str, inner: int, outer: int, weights: int, layers: int = L) -> Stage:
        moved = weights + itemsize * B * (inner + outer)
        return Stage(name, layers * moved, layers * 2 * B * inner * outer)

    def projection(name: str, linear: Linear, layers: int = L) -> Stage:
        outer = math.prod(linear.output_shape)
        return gemm(name, linear.depth, outer, linear.weight_bytes, layers)

    def grouped(name: str, linear: Linear, layers: int) -> Stage:
        experts = config.experts
        assert experts is not None
        share = 1 - (1 - experts.top_k / experts.num_experts) ** B
        inner, outer = linear.depth, math.prod(linear.output_shape)
        weights = share * linear.weight_bytes
        moved = weights + itemsize * B * experts.top_k * (inner + outer)
        return Stage(name, layers * moved, layers * 2 * B * experts.top_k * inner * outer)

    of_linear = [config.is_linear(i) for i in range(L)]
    A = of_linear.count(False)

    def attention(name: str, tokens: int, seen: int) -> Stage:
        moved = itemsize * 2 * tokens * K * H
        return Stage(name, A * moved, A * 4 * B * N * H * seen)

    feed_forward = []
    kinds = [config.has_experts(i) for i in range(L)]
    for kind in dict.fromkeys(kinds):
        mlp, count = DecoderLayer(config, kinds.index(kind), dtype).mlp, kinds.count(kind)
        if isinstance(mlp, Experts):
            feed_forward += [
                grouped("experts, gate and up", mlp.up, count),
                grouped("experts, down", mlp.down, count),
            ]
        else:
            feed_forward += [
                projection("gate and up" if config.gated_mlp else "up", mlp.up, count),
                projection("down", mlp.down, count),
            ]
    projections = []
    for kind in dict.fromkeys(of_linear):
        found = DecoderLayer(config, of_linear.index(kind), dtype)
        count = of_linear.count(kind)
        named = [*_input_projections(found), ("output", found.attention.output)]
        projections += [projection(name, linear, count) for name, linear in named]
    states = []
    if config.linear is not None:
        size = config.linear.value_heads * config.linear.key_dim * config.linear.value_dim
        count = B * sum(of_linear)
        states = [Stage("states", 2 * _FLOAT32 * size * count, 6 * size * count)]
    return [
        *projections,
        attention("attention to shared tokens", case.shared, case.shared),
        attention("attention to unique tokens", B * case.own, case.own),
        *states,
        *feed_forward,
        gemm("logits", D, V, itemsize * D * V, layers=1),
    ]


def _input_projections(layer: DecoderLayer) -> list[tuple[str, Linear]]:
    """The projections before attention with their names."""
    linears = layer.attention.input_projections
    if len(linears) == 1:
        return [("qkv", linears[0])]
    return [(f"{linear.inputs} -> {linear.outputs}", linear) for linear in linears]


def roofline_seconds(
    config: ModelConfig, case: DecodeCase, dtype: np.dtype, ceilings: Ceilings
) -> float:
    """The sum of the rooflines of all stages."""
    return sum(ceilings.seconds(s.moved, s.flops) for s in stages(config, case, dtype))
