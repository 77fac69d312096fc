"""The heads of gated delta net layers (Yang, Kautz and Hatamizadeh, 2024)."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """The layers whose attention is a gated delta net, in place of attention over KV; hashable.

    Attributes:
        key_heads: R, heads that have a query and a key each.
        value_heads: heads that have a value, a gate and a state each; a multiple of R, the heads of
            a key head being neighbours.
        key_dim, value_dim: numbers of a query or key, and Y, those of a value.
        taps: X, tokens that the convolution mixes.
        layers: whether each layer is one.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    layers: tuple[bool, ...]

    @property
    def values_a_key(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def values_dim(self) -> int:
        """E, numbers of all values of a key head."""
        return self.values_a_key * self.value_dim

    @property
    def mixed_dim(self) -> int:
        """Channels of a key head that the convolution mixes: a query, a key and its values."""
        return 2 * self.key_dim + self.values_dim

    @property
    def unit(self) -> int:
        """M, the largest size that divides both the key and the values of a key head."""
        return math.gcd(self.key_dim, self.values_dim)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each axis letter that only these layers have.

        B counts the value heads of a key head, O the input channels of each filter.
        """
        return {
            "R": self.key_heads,
            "B": self.values_a_key,
            "E": self.values_dim,
            "M": self.unit,
            "Y": self.value_dim,
            "X": self.taps,
            "O": 1,
        }
