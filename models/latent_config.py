"""The ranks and dims of multi-head latent attention (DeepSeek-V2, 2024, section 2.1)."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class LatentConfig:
    """The projections of multi-head latent attention; hashable.

    A token's keys and values are made of a latent of few numbers that all heads share, and of one
    more key, which all heads share too and which alone is rotated. A head's query and key are
    ``nope_dim`` dims that do not rotate and ``rope_dim`` that do.

    Attributes:
        q_rank: Q, the size of the latent that queries are made of; None where one projection makes
            them.
        kv_rank: Z, the size of the latent that keys and values are made of.
        nope_dim, rope_dim: number of dims of a query or key head that do not rotate, and that do.
        value_dim: O, the dims of a value head.
        bias: whether the projections to the latents have biases.
        norm_eps: epsilon of the latents' norms.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False
    norm_eps: float = 1e-6

    @property
    def qk_dim(self) -> int:
        """W, the dims of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def head_dim(self) -> int:
        """H of the KV cache: the larger of W and O; the smaller one is padded with zeros."""
        return max(self.qk_dim, self.value_dim)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each axis letter that only latent attention has.

        Y counts the numbers of the KV latent and of the shared key, E those that a head makes of
        the latent: the rest of its key, and its value.
        """
        sizes = {
            "Z": self.kv_rank,
            "Y": self.kv_rank + self.rope_dim,
            "W": self.qk_dim,
            "E": self.nope_dim + self.value_dim,
            "O": self.value_dim,
        }
        return sizes if self.q_rank is None else sizes | {"Q": self.q_rank}
