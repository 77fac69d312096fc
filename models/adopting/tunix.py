"""Names and axes of the parameters of Tunix's models (google-tunix 0.1.7): Llama, Qwen and Gemma.

A projection is [inputs, outputs], where heads have an axis of their own.
"""

from rjax.models.adopting.layers import in_layers
from rjax.models.adopting.mapping import Targets
from rjax.models.adopting.reading import Reading
from rjax.models.config import ModelConfig

_HEADS = "D N H -> (N H) D"
_ALL_HEADS = "N D H -> (N H) D"
_TRANSPOSED = "D F -> F D"
_EXPERTS = "J D F -> F D"
_FUSED = "A N D H -> (N H) D"

_MODEL: dict[str, Targets] = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "final_norm.scale": "model.norm.weight",
    "lm_head.w": ("lm_head.weight", "D V -> V D"),
}
_LAYER: dict[str, Targets] = {
    "attn.q_proj.w": ("self_attn.q_proj.weight", _HEADS),
    "attn.k_proj.w": ("self_attn.k_proj.weight", _HEADS),
    "attn.v_proj.w": ("self_attn.v_proj.weight", _HEADS),
    "attn.o_proj.w": ("self_attn.o_proj.weight", "N H D -> D (N H)"),
    "attn.q_bias": "self_attn.q_proj.bias",
    "attn.k_bias": "self_attn.k_proj.bias",
    "attn.v_bias": "self_attn.v_proj.bias",
    "attn.q_norm.w": "self_attn.q_norm.weight",
    "attn.k_norm.w": "self_attn.k_norm.weight",
    "mlp.gate_proj.kernel": ("mlp.gate_proj.weight", _TRANSPOSED),
    "mlp.up_proj.kernel": ("mlp.up_proj.weight", _TRANSPOSED),
    "mlp.down_proj.kernel": ("mlp.down_proj.weight", _TRANSPOSED),
    "mlp.router.kernel": ("mlp.gate.weight", _TRANSPOSED),
    "mlp.gate_proj": ("mlp.experts.*.gate_proj.weight", _EXPERTS),
    "mlp.up_proj": ("mlp.experts.*.up_proj.weight", _EXPERTS),
    "mlp.down_proj": ("mlp.experts.*.down_proj.weight", _EXPERTS),
    "input_layernorm.w": "input_layernorm.weight",
    "post_attention_layernorm.w": "post_attention_layernorm.weight",
}
_GEMMA_LAYER: dict[str, Targets] = {
    "attn.q_einsum.w": ("self_attn.q_proj.weight", _ALL_HEADS),
    "attn.kv_einsum.w": [
        ("self_attn.k_proj.weight", Reading(_FUSED, at=(("A", 0),))),
        ("self_attn.v_proj.weight", Reading(_FUSED, at=(("A", 1),))),
    ],
    "attn.qkv_einsum.w": [
        ("self_attn.q_proj.weight", Reading(_FUSED, at=(("A", 0),))),
        ("self_attn.k_proj.weight", Reading(_FUSED, at=(("A", 1),))),
        ("self_attn.v_proj.weight", Reading(_FUSED, at=(("A", 2),))),
    ],
    "attn.attn_vec_einsum.w": ("self_attn.o_proj.weight", "N H D -> D (N H)"),
    "attn._query_norm.scale": "self_attn.q_norm.weight",
    "attn._key_norm.scale": "self_attn.k_norm.weight",
    "pre_attention_norm.scale": "input_layernorm.weight",
    "post_attn_norm.scale": "post_attention_layernorm.weight",
    "post_attention_norm.scale": "post_attention_layernorm.weight",
    "pre_ffw_norm.scale": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.scale": "post_feedforward_layernorm.weight",
}


def tunix(config: ModelConfig) -> dict[str, Targets]:
    """The table of a model."""
    del config  # names tell the families apart
    return _MODEL | in_layers(_LAYER | _GEMMA_LAYER, "layers.*.")
