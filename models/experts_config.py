"""The experts of a model: how many, how wide, and how their router chooses."""

import dataclasses

from rjax.pallas_kernels.experts.base import Router


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture-of-experts blocks of a model; hashable.

    Attributes:
        num_experts: J.
        top_k: experts of a row.
        width: I, the feed-forward width of an expert.
        layers: whether each layer's feed-forward block has experts; others are dense.
        router: how they are chosen.
        shared_width: U, the width of an expert that every row takes; None without one.
        bias: whether the projections of the experts have biases.
        clamp, alpha: limit and factor in gpt-oss's SwiGLU, see `Activation`; None and 1 for the
            model's activation.
        shared_gate: the shared expert's output is multiplied by the sigmoid of a projection.
        normed: the shared expert and the others have norms of their own: one before the others (the
            layer's is before the shared one), one behind each, and one before the router, which
            sees the stream itself; each expert has a factor on its weight (Gemma 4).
        parallel: the devices of a mesh hold whole experts, J / devices each (expert parallelism),
            not a share of the width of every expert; see `place`.
    """

    num_experts: int
    top_k: int
    width: int
    layers: tuple[bool, ...]
    router: Router = dataclasses.field(default_factory=Router)
    shared_width: int | None = None
    shared_gate: bool = False
    bias: bool = False
    clamp: float | None = None
    alpha: float = 1.0
    normed: bool = False
    parallel: bool = False

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each axis letter that only experts have."""
        sizes = {"J": self.num_experts, "I": self.width}
        return sizes if self.shared_width is None else sizes | {"U": self.shared_width}
