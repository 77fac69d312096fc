"""What single layers of a model have unlike the others."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class LayerConfig:
    """The sizes of one layer; hashable.

    Attributes:
        num_kv_heads, head_dim, intermediate_size: K, H and F.
        kv_projections: projections of keys and values: 2; 1 where the values are the keys before
            these are normed and rotated; 0 where the keys and values are those of another layer.
        kv_head_copies: see `ModelConfig`.
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_projections: int = 2
    kv_head_copies: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """The inputs that each layer has of its own beside the residual stream; hashable.

    Attributes:
        width: p, numbers of a token's input to a layer.
        vocab_size: v, tokens of their embedding.
    """

    width: int
    vocab_size: int
