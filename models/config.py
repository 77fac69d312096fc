"""The shape of a model, independent of how any one config.json spells it."""

import dataclasses
from typing import Literal

from rjax.models.experts_config import ExpertsConfig
from rjax.models.formats.weight_format import WeightFormat
from rjax.models.latent_config import LatentConfig
from rjax.models.layer_config import LayerConfig, PerLayerInputs
from rjax.models.linear_config import LinearAttentionConfig
from rjax.models.rope import RopeConfig
from rjax.models.schemes import UNQUANTISED, WeightScheme

type NormPlacement = Literal["pre", "post", "sandwich", "parallel"]


@dataclasses.dataclass(frozen=True, slots=True)
class NormConfig:
    """Where the norms of a model are and what they compute.

    Attributes:
        placement: place of a layer's norms. "pre": on the inputs of attention and feed-forward;
            "post": on their outputs, before the residual sum; "sandwich": on both; "parallel": one
            norm whose result is the input of both.
        bias: LayerNorms have a bias.
        unit_offset: checkpoints hold the weight minus 1 (Gemma); loading adds it in float32.
        whole_qk: the norms of queries and keys are over all heads (N H and K H), not over H.
        qk_behind_rope: queries and keys are normed behind the rotary embedding (HunYuan).
        on_embedding: a norm of the token embeddings (BLOOM).
        on_values: the values of each head are normed too, without a weight (Gemma 4).
    """

    placement: NormPlacement = "pre"
    bias: bool = True
    unit_offset: bool = False
    whole_qk: bool = False
    qk_behind_rope: bool = False
    on_embedding: bool = False
    on_values: bool = False

    @property
    def on_inputs(self) -> bool:
        """Whether attention and feed-forward have a norm before them."""
        return self.placement != "post"

    @property
    def on_outputs(self) -> bool:
        """Whether attention and feed-forward have a norm behind them."""
        return self.placement in ("post", "sandwich")


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleConfig:
    """Factors and soft caps; a soft cap c makes x to c * tanh(x / c).

    Attributes:
        attention: factor on the attention scores; None for 1 / sqrt(H).
        attention_soft_cap: soft cap of the scaled attention scores.
        embedding: factor on the token embeddings, rounded to their dtype.
        residual: factor on the outputs of attention and feed-forward before the residual sum.
        learned: the stream behind each layer is multiplied by a parameter of the layer.
        logits: factor on the logits.
        logit_soft_cap: soft cap of the logits.
    """

    attention: float | None = None
    attention_soft_cap: float | None = None
    embedding: float = 1.0
    residual: float = 1.0
    learned: bool = False
    logits: float = 1.0
    logit_soft_cap: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TextModel:
    """The text model of an architecture that has towers for other media beside it.

    Attributes:
        architecture: family of the text model, such as "Gemma3ForCausalLM".
        media: what the towers take, such as "images".
        decoder: start of the names of the decoder's tensors, in place of "model.".
        head: module of the output projection, in place of "lm_head".
    """

    architecture: str
    media: str
    decoder: str
    head: str


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that decides a model's parameters and arithmetic; hashable.

    Attributes:
        architecture: class name in config.json, such as "LlamaForCausalLM".
        vocab_size: V, the width of the logits.
        hidden_size: D.
        num_layers, num_heads, num_kv_heads, head_dim: L, N, K, H.
        intermediate_size: F.
        max_position_embeddings: longest sequence the checkpoint declares, in tokens; see
            `longest_sequence`.
        rope: rotary embedding; None for a model without.
        norm_eps: epsilon of every norm.
        tie_embeddings: the embedding is also the output projection.
        qkv_bias, output_bias, mlp_bias: which projections have a bias.
        qk_norm: RMS norm of queries and keys, before the rotary embedding.
        layer_norm: LayerNorm in place of RMSNorm.
        gated_mlp: act(gate) * up in place of act(up).
        learned_positions: positions come from a table; row of position p is p + position_offset.
        position_offset: unused first rows of that table.
        sliding_windows: one entry per layer, the window in tokens or None.
        activation: "silu", "relu", "gelu" or "gelu_tanh".
        dtype: float type the checkpoint declares.
        quant_method: the method that the checkpoint's ``quantization_config`` names; None for an
            unquantised one.
        format: how the checkpoint's weights of the projections become those on the devices; None if
            they are stored plainly and stay so.
        schemes: how they are stored on the devices, by parameter path without the last part
            ("layers.0.mlp.up"); UNQUANTISED where a path is missing.
        dequantised: schemes by path, like ``schemes``, of the projections that are held in the
            model's dtype instead: a quantised checkpoint's are dequantised while they are loaded.
        kv_scales: the checkpoint has scales for KV in fp8.
        sinks: each query head has one more attention logit, without a value.
        alibi: attention scores have linear biases (`alibi_slopes`).
        latent: config of multi-head latent attention, whose heads each have a KV head; None for
            projections of queries, keys and values.
        linear: config of the layers whose attention is a gated delta net; None without any.
        output_gate: each query head has a gate, whose sigmoid its attention output is multiplied
            by.
        experts: config of feed-forward blocks that are mixtures of experts; None without any.
        norms: placement and kind of the norms.
        scales: factors and soft caps.
        layer_ropes: one entry per layer, its rotary embedding or None; empty where all layers have
            ``rope``.
        declares_stretched: ``max_position_embeddings`` counts the stretch of ``rope`` (Gemma 3).
        kv_head_copies: how often each KV head of the checkpoint is held, so that the devices of a
            mesh can share ``num_kv_heads`` evenly, which counts the copies; see `place`.
        kv_projections: see `LayerConfig`.
        layers: one entry per layer where layers have different sizes, which `of_layer` gives; empty
            where all have those above.
        kv_sources: one entry per layer, the layer whose keys and values it attends over; empty
            where that is each layer itself.
        per_layer_inputs: inputs that each layer has of its own; None without.
        text_model: the part that is loaded of an architecture with several; None for one that is
            only a text model.
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
    sinks: bool = False
    alibi: bool = False
    latent: LatentConfig | None = None
    linear: LinearAttentionConfig | None = None
    output_gate: bool = False
    experts: ExpertsConfig | None = None
    norms: NormConfig = NormConfig()
    scales: ScaleConfig = ScaleConfig()
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    declares_stretched: bool = False
    kv_head_copies: int = 1
    kv_projections: int = 2
    layers: tuple[LayerConfig, ...] = ()
    kv_sources: tuple[int, ...] = ()
    per_layer_inputs: PerLayerInputs | None = None
    text_model: TextModel | None = None

    def scheme_of(self, path: str) -> WeightScheme:
        """How the weight of a projection is stored on the devices."""
        return dict(self.schemes).get(path, UNQUANTISED)

    def of_layer(self, layer: int) -> "ModelConfig":
        """The config with the sizes of one layer."""
        if not self.layers:
            return self
        own = self.layers[layer]
        sizes = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
        return dataclasses.replace(self, **sizes, layers=())

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends over: itself, or one before it."""
        return self.kv_sources[layer] if self.kv_sources else layer

    @property
    def layer_heads(self) -> tuple[tuple[int, int], ...]:
        """(K, H) of each layer."""
        if not self.layers:
            return ((self.num_kv_heads, self.head_dim),) * self.num_layers
        return tuple((layer.num_kv_heads, layer.head_dim) for layer in self.layers)

    @property
    def widest_qkv(self) -> int:
        """Numbers of the queries, keys and values of a token in the layer with the most."""
        return max((self.num_heads + 2 * K) * H for K, H in self.layer_heads)

    @property
    def widest_mlp(self) -> int:
        """F of the layer with the largest one."""
        widths = (layer.intermediate_size for layer in self.layers)
        return max(widths, default=self.intermediate_size)

    def is_linear(self, layer: int) -> bool:
        """Whether the attention of a layer is a gated delta net, which has states and no KV."""
        return self.linear is not None and self.linear.layers[layer]

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward block of a layer is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of a layer."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def for_length(self, tokens: int) -> "ModelConfig":
        """The config for sequences of up to ``tokens``, which some kinds of rope depend on."""

        def of(rope: RopeConfig | None) -> RopeConfig | None:
            if rope is None or not rope.depends_on_length:
                return rope
            return dataclasses.replace(rope, max_length=tokens)

        layer_ropes = tuple(map(of, self.layer_ropes))
        return dataclasses.replace(self, rope=of(self.rope), layer_ropes=layer_ropes)

    @property
    def head_module(self) -> str:
        """Name of the output projection in the checkpoint."""
        return "lm_head" if self.text_model is None else self.text_model.head

    @property
    def depends_on_length(self) -> bool:
        """Whether `for_length` changes the arithmetic."""
        return any(rope.depends_on_length for rope in self.ropes)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence: the declared context, or what its rope makes of it."""
        declared = self.max_position_embeddings
        if self.declares_stretched:
            return declared
        scaled = [rope for rope in self.ropes if rope.kind != "default"]
        return max((rope.stretched(declared) for rope in scaled), default=declared)

    @property
    def default_length(self) -> int:
        """Tokens of the longest sequence where no other length is chosen.

        For ropes that depend on a length, it is the one that their angles are for; see
        `for_length`.
        """
        chosen = [rope.max_length for rope in self.ropes if rope.depends_on_length]
        return max(chosen, default=self.longest_sequence)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings of all layers."""
        found = self.layer_ropes or (self.rope,)
        return tuple(rope for rope in dict.fromkeys(found) if rope is not None)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each axis letter of the parameters.

        C counts rows of the position table, J experts; I is the feed-forward width of an expert and
        U that of the shared ones. Other letters are those of `LatentConfig` or of
        `LinearAttentionConfig`.
        """
        of_experts = {} if self.experts is None else self.experts.axis_sizes
        of_latent = {} if self.latent is None else self.latent.axis_sizes
        of_linear = {} if self.linear is None else self.linear.axis_sizes
        inputs = self.per_layer_inputs
        of_inputs = {}
        if inputs is not None:
            of_inputs = {"L": self.num_layers, "p": inputs.width, "v": inputs.vocab_size}
        return (
            of_experts
            | of_latent
            | of_linear
            | of_inputs
            | {
                "D": self.hidden_size,
                "N": self.num_heads,
                "K": self.num_kv_heads,
                "G": self.num_heads // self.num_kv_heads,
                "H": self.head_dim,
                "F": self.intermediate_size,
                "V": self.vocab_size,
                "C": self.max_position_embeddings + self.position_offset,
            }
        )
