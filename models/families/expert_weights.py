"""The checkpoint pieces of experts."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.loading.piece import Piece, Weights


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the tensors of a layer's experts, after "model.layers.N.".

    Attributes:
        block: the module that holds the router and the experts.
        gate, up, down: the projections of an expert.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def expert_weights(config: ModelConfig, names: ExpertNames) -> Weights:
    """The pieces of routers and experts, where each expert has its own tensors."""
    assert config.experts is not None
    weights: Weights = {}
    for i in _layers(config):
        block = f"model.layers.{i}.{names.block}"
        each = [f"{block}.experts.{j}" for j in range(config.experts.num_experts)]
        weights |= _router(i, block) | {
            f"layers.{i}.mlp.up.weight": tuple(
                Piece(f"{expert}.{name}.weight", "(A I) D", of_expert=True)
                for expert in each
                for name in (names.gate, names.up)
            ),
            f"layers.{i}.mlp.down.weight": tuple(
                Piece(f"{expert}.{names.down}.weight", "D I", of_expert=True) for expert in each
            ),
        }
    return weights


def fused_expert_weights(config: ModelConfig) -> Weights:
    """The pieces of routers and experts, where one tensor has all experts, as in transformers 5."""
    weights: Weights = {}
    for i in _layers(config):
        block = f"model.layers.{i}.mlp"
        weights |= _router(i, block) | {
            f"layers.{i}.mlp.up.weight": (
                Piece(f"{block}.experts.gate_up_proj", "J (A I) D", a=2),
            ),
            f"layers.{i}.mlp.down.weight": (Piece(f"{block}.experts.down_proj", "J D I"),),
        }
    return weights


def _layers(config: ModelConfig) -> list[int]:
    return [i for i in range(config.num_layers) if config.has_experts(i)]


def _router(layer: int, block: str) -> Weights:
    return {f"layers.{layer}.mlp.router": (Piece(f"{block}.gate.weight", "J D"),)}
