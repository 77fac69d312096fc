"""The experts of a model, from config.json."""

from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.experts_config import ExpertsConfig
from rjax.pallas_kernels.experts.base import Router

NUM_EXPERTS_FIELDS = frozenset({"num_experts", "num_experts_per_tok", "num_local_experts"})
"""Fields that `num_experts` reads with two names of the number of experts."""
LOCAL_EXPERTS = ("num_experts", "num_local_experts")
EXPERTS = ("num_local_experts", "num_experts")
"""Both names of the number of experts: the family's own stands last, as another name wins."""
SPARSE_LAYER_FIELDS = frozenset({"decoder_sparse_step", "mlp_only_layers"})
"""Fields that `sparse_layers` reads."""
SIGMOID_ROUTER_FIELDS = frozenset(
    {"n_group", "norm_topk_prob", "routed_scaling_factor", "topk_group"}
)
"""Fields that `read_sigmoid_router` reads."""
ROUTED_EXPERT_FIELDS = frozenset(
    {"moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"}
)
"""Fields that `read_routed_experts` reads, beside the other name of n_routed_experts."""
TRAINING_FIELDS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""Fields of routers that do not change the logits."""


def num_experts(
    fields: ConfigFields,
    names: tuple[str, ...],
    experts: int,
    top_k: int,
    of_row: tuple[str, ...] = ("num_experts_per_tok",),
) -> tuple[int, int]:
    """(experts, experts of a row).

    Args:
        fields: the fields of config.json.
        names: names of the field with the number of experts, in the order of precedence.
        experts, top_k: the family's defaults in transformers.
        of_row: names of the field with the number of experts of a row.
    """
    name = next((name for name in names if fields.has(name)), names[-1])
    found: int = fields.integer(name, experts)
    name = next((name for name in of_row if fields.has(name)), of_row[-1])
    return found, fields.integer(name, top_k, maximum=found)


def sparse_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Qwen's rule: every ``decoder_sparse_step``-th layer has experts, but for mlp_only_layers."""
    step: int = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def layers_after_dense(fields: ConfigFields, num_layers: int, dense: int) -> tuple[bool, ...]:
    """The layers behind the first ``first_k_dense_replace`` have experts.

    dense: the family's default in transformers.
    """
    dense = fields.integer("first_k_dense_replace", dense, minimum=0)
    return tuple(i >= dense for i in range(num_layers))


def read_sigmoid_router(
    fields: ConfigFields, scale: float, num_groups: int = 1, top_groups: int = 1
) -> Router:
    """DeepSeek-V3's router: sigmoid scores, a bias for the choice, groups of experts.

    The arguments are the family's defaults in transformers.
    """
    groups: int = fields.integer("n_group", num_groups)
    return Router(
        score="sigmoid",
        renormalise=fields.flag("norm_topk_prob", True, null=False),
        scale=fields.number("routed_scaling_factor", scale),
        correction_bias=True,
        num_groups=groups,
        top_groups=fields.integer("topk_group", top_groups, maximum=groups),
    )


def read_routed_experts(
    fields: ConfigFields,
    layers: tuple[bool, ...],
    router: Router,
    *,
    experts: int,
    top_k: int,
    width: int,
    shared: int,
    other_name: str = "num_local_experts",
) -> ExpertsConfig:
    """The experts of DeepSeek and GLM, with shared ones as one expert of their width together.

    Args:
        fields: the fields of config.json.
        layers: whether each layer has experts.
        router: the family's router.
        experts, top_k, width, shared: the family's defaults in transformers.
        other_name: other name of n_routed_experts, which transformers takes too.
    """
    name = other_name if fields.has(other_name) else "n_routed_experts"
    experts = fields.integer(name, experts)
    groups, best = router.num_groups, router.group_best
    if experts % groups or experts // groups < best:
        raise CheckpointError(
            f"config.json: n_group is {groups} and {name} {experts}; each group must have the same "
            f"number of experts, at least {best}"
        )
    in_reach = experts // groups * router.top_groups
    width = fields.integer("moe_intermediate_size", width)
    return ExpertsConfig(
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok", top_k, maximum=in_reach),
        width=width,
        layers=layers,
        router=router,
        shared_width=width * fields.integer("n_shared_experts", shared),
    )
