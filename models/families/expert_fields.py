"""The experts of a model, from config.json."""

from rjax.models.config_fields import ConfigFields

NUM_EXPERTS_FIELDS = frozenset({"num_experts", "num_experts_per_tok", "num_local_experts"})
"""Fields that `num_experts` reads."""
SPARSE_LAYER_FIELDS = frozenset({"decoder_sparse_step", "mlp_only_layers"})
"""Fields that `sparse_layers` reads."""
TRAINING_FIELDS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""Fields of routers that do not change the logits."""


def num_experts(fields: ConfigFields, experts: int, top_k: int) -> tuple[int, int]:
    """(experts, experts of a row); the arguments are the family's defaults in transformers."""
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    found: int = fields.integer(name, experts)
    return found, fields.integer("num_experts_per_tok", top_k, maximum=found)


def sparse_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Qwen's rule: every ``decoder_sparse_step``-th layer has experts, but for mlp_only_layers."""
    step: int = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
