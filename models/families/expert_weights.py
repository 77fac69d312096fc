"""The checkpoint pieces of experts."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.loading.pieces import Piece, Weights


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the tensors of a layer's experts, after "model.layers.N.".

    Attributes:
        block: the module that holds the router and the experts.
        gate, up, down: the projections of an expert, where each has its own tensors.
        shared: the shared expert; its projections have Llama's names.
        router: the module that scores the experts, in the block.
        correction: the bias of the scores for the choice, in the block.
        rows: its axes; an A of one entry may stand before the experts.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    rows: str = "J"


QWEN_NAMES = ExpertNames()


def expert_weights(config: ModelConfig, names: ExpertNames = QWEN_NAMES) -> Weights:
    """The pieces of routers and experts, where each expert has its own tensors."""
    weights: Weights = {}
    for i in expert_layers(config):
        block = f"model.layers.{i}.{names.block}"
        weights |= _beside(config, i, block, names) | weights_of_each(config, i, block, names)
    return weights


def weights_of_each(
    config: ModelConfig, layer: int, block: str, names: ExpertNames = QWEN_NAMES
) -> Weights:
    """The pieces of the experts of a layer, where each expert has its own tensors.

    block: the module that holds the experts.
    """
    assert config.experts is not None
    each = [f"{block}.experts.{j}" for j in range(config.experts.num_experts)]
    return {
        f"layers.{layer}.mlp.up.weight": tuple(
            Piece(f"{expert}.{name}.weight", "(A I) D", of_expert=True)
            for expert in each
            for name in (names.gate, names.up)
        ),
        f"layers.{layer}.mlp.down.weight": tuple(
            Piece(f"{expert}.{names.down}.weight", "D I", of_expert=True) for expert in each
        ),
    }


def weights_of_all(layer: int, block: str, up: str = "J (A I) D", down: str = "J D I") -> Weights:
    """The pieces of the experts of a layer, where one tensor has all experts.

    block: the module that holds the experts.
    up, down: the axes of the tensors.
    """
    return {
        f"layers.{layer}.mlp.up.weight": (Piece(f"{block}.experts.gate_up_proj", up, a=2),),
        f"layers.{layer}.mlp.down.weight": (Piece(f"{block}.experts.down_proj", down),),
    }


def fused_expert_weights(
    config: ModelConfig, names: ExpertNames = QWEN_NAMES, *, inputs_first: bool = False
) -> Weights:
    """The pieces of routers and experts, where one tensor has all experts, as in transformers 5.

    inputs_first: an expert's matrices are stored transposed, inputs by outputs.
    """
    axes = ("J D (A I)", "J I D") if inputs_first else ("J (A I) D", "J D I")
    weights: Weights = {}
    for i in expert_layers(config):
        block = f"model.layers.{i}.mlp"
        weights |= _beside(config, i, block, names) | weights_of_all(i, block, *axes)
    return weights


def expert_layers(config: ModelConfig) -> list[int]:
    """The layers that have experts."""
    return [i for i in range(config.num_layers) if config.has_experts(i)]


def _beside(config: ModelConfig, layer: int, block: str, names: ExpertNames) -> Weights:
    """The router and the shared expert."""
    experts, ours = config.experts, f"layers.{layer}.mlp."
    assert experts is not None
    weights: Weights = {ours + "router": (Piece(f"{block}.{names.router}.weight", "J D"),)}
    if experts.router.correction_bias:
        bias = Piece(f"{block}.{names.correction}", names.rows)
        weights[ours + "correction"] = (bias,)
    if experts.shared_width is not None:
        shared = f"{block}.{names.shared}"
        weights |= {
            ours + "shared.up.weight": (
                Piece(f"{shared}.gate_proj.weight", "(A U) D"),
                Piece(f"{shared}.up_proj.weight", "(A U) D"),
            ),
            ours + "shared.down.weight": (Piece(f"{shared}.down_proj.weight", "D U"),),
        }
    if experts.shared_gate:
        weights[ours + "shared.gate"] = (Piece(f"{block}.{names.shared}_gate.weight", "A D"),)
    return weights
