"""Names and axes of the parameters of EasyDeL's models (easydel 0.3.0): Llama, Qwen and Gemma.

They are named as in Hugging Face's models; a projection is [inputs, outputs].
"""

from rjax.models.adopting.layers import in_layers
from rjax.models.adopting.mapping import Targets
from rjax.models.config import ModelConfig

_TRANSPOSED = "D F -> F D"
_EXPERTS = "J D F -> F D"

_PROJECTIONS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate"),
)
_NORMS = (
    *("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_LAYER: dict[str, Targets] = {
    **{f"{name}.kernel": (f"{name}.weight", _TRANSPOSED) for name in _PROJECTIONS},
    **{f"{name}.bias": f"{name}.bias" for name in _PROJECTIONS},
    **{f"{name}.kernel": f"{name}.weight" for name in _NORMS},
    **{
        f"mlp.experts.{name}.kernel": (f"mlp.experts.*.{name}.weight", _EXPERTS)
        for name in ("gate_proj", "up_proj", "down_proj")
    },
}


def easydel(config: ModelConfig) -> dict[str, Targets]:
    """The table of a model."""
    del config  # names tell the families apart
    return {
        "model.embed_tokens.embedding": "model.embed_tokens.weight",
        "model.norm.kernel": "model.norm.weight",
        "lm_head.kernel": ("lm_head.weight", "D V -> V D"),
        **in_layers(_LAYER, "model.layers.*."),
    }
