"""The shape of a model, independent of how any one config.json spells it."""

import dataclasses

from rjax.models.formats.weight_format import WeightFormat
from rjax.models.rope import RopeConfig
from rjax.models.schemes import UNQUANTISED, WeightScheme


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that decides a model's parameters and arithmetic; hashable.

    Attributes:
        architecture: class name in config.json, such as "LlamaForCausalLM".
        vocab_size: V, the width of the logits.
        hidden_size: D.
        num_layers, num_heads, num_kv_heads, head_dim: L, N, K, H.
        intermediate_size: F.
        max_position_embeddings: longest sequence the checkpoint declares, in tokens.
        rope: rotary embedding, or None where positions are learned.
        norm_eps: epsilon of every norm.
        tie_embeddings: the embedding is also the output projection.
        qkv_bias, output_bias, mlp_bias: which projections have a bias.
        qk_norm: RMS norm over H of queries and keys, before the rotary embedding.
        layer_norm: LayerNorm with bias in place of RMSNorm.
        gated_mlp: act(gate) * up in place of act(up).
        learned_positions: positions come from a table; row of position p is p + position_offset.
        position_offset: unused first rows of that table.
        sliding_windows: one entry per layer, the window in tokens or None.
        activation: "silu", "relu", "gelu" or "gelu_tanh".
        dtype: float type the checkpoint declares.
        quant_method: of the checkpoint's ``quantization_config``; None for an unquantised one.
        format: how the checkpoint's weights of the projections become those on the devices; None if
            they are stored plainly and stay so.
        schemes: how they are stored on the devices, by parameter path without the last part
            ("layers.0.mlp.up"); UNQUANTISED where a path is missing.
        dequantised: as ``schemes``, those of the projections that are held in the model's dtype
            instead: a quantised checkpoint's are dequantised while they are loaded.
        kv_scales: the checkpoint has scales for KV in fp8.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rope: RopeConfig | None
    norm_eps: float
    tie_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    activation: str
    dtype: str
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_norm: bool = False
    gated_mlp: bool = True
    learned_positions: bool = False
    position_offset: int = 0
    quant_method: str | None = None
    format: WeightFormat | None = None
    schemes: tuple[tuple[str, WeightScheme], ...] = ()
    dequantised: tuple[tuple[str, WeightScheme], ...] = ()
    kv_scales: bool = False

    def scheme_of(self, path: str) -> WeightScheme:
        """How the weight of a projection is stored on the devices."""
        return dict(self.schemes).get(path, UNQUANTISED)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each axis letter of the parameters; C counts rows of the position table."""
        return {
            "D": self.hidden_size,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "G": self.num_heads // self.num_kv_heads,
            "H": self.head_dim,
            "F": self.intermediate_size,
            "V": self.vocab_size,
            "C": self.max_position_embeddings + self.position_offset,
        }
