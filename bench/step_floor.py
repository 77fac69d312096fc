"""The least time of one decode step: bytes and FLOP of every stage against the device's rates."""

import dataclasses

from bench.ceilings import Ceilings
from models import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeCase:
    """B rows that share their first ``shared`` tokens and have ``own`` more each."""

    batch: int
    shared: int
    own: int

    @property
    def context(self) -> int:
        """Tokens of each row, the one of this step included."""
        return self.shared + self.own


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a step over all layers.

    Attributes:
        name: what it computes.
        moved: bytes that must be read or written: weights and distinct KV once, rows in and out.
        flops: multiply-adds counted twice.
    """

    name: str
    moved: float
    flops: float


def stages(config: ModelConfig, case: DecodeCase, itemsize: int) -> list[Stage]:
    """The products and the attention of one step; all else is counted as free.

    Weights are read once. KV of the shared tokens is read once for all rows; it and the rows' own
    KV are two stages, since the one is a product of matrices and the other is not.
    """
    D, F, V, L = (
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.num_layers,
    )
    N, K, H, B = config.num_heads, config.num_kv_heads, config.head_dim, case.batch

    def product(name: str, inner: int, outer: int, layers: int = L) -> Stage:
        moved = itemsize * (inner * outer + B * (inner + outer))
        return Stage(name, layers * moved, layers * 2 * B * inner * outer)

    def attention(name: str, tokens: int, seen: int) -> Stage:
        moved = itemsize * 2 * tokens * K * H
        return Stage(name, L * moved, L * 4 * B * N * H * seen)

    return [
        product("qkv", D, (N + 2 * K) * H),
        attention("attention to the shared tokens", case.shared, case.shared),
        attention("attention to the own tokens", B * case.own, case.own),
        product("output", N * H, D),
        product("gate and up" if config.gated_mlp else "up", D, (1 + config.gated_mlp) * F),
        product("down", F, D),
        product("logits", D, V, layers=1),
    ]


def floor_seconds(
    config: ModelConfig, case: DecodeCase, itemsize: int, ceilings: Ceilings
) -> float:
    """The sum of the stages' least times."""
    return sum(ceilings.seconds(s.moved, s.flops) for s in stages(config, case, itemsize))
