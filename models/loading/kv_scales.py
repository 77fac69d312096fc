"""The scales of KV in fp8 that a checkpoint holds."""

from rjax.models.config import ModelConfig
from rjax.models.families import FAMILIES
from rjax.models.formats.checks import check_positive_scale
from rjax.models.formats.weight_format import FLOATS, StoredTensor
from rjax.models.loading.pieces import module_of


def kv_scale_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """The stored tensor of each scale by parameter path ("layers.0.attention.k_scale").

    Each holds one number, in the shape [1] or []. The result is empty for a checkpoint without
    scales of KV.
    """
    if not config.kv_scales:
        return {}
    weights = FAMILIES[config.architecture].weights(config)
    tensors = {}
    for layer in range(config.num_layers):
        path = f"layers.{layer}.attention"
        attention = module_of(weights[f"{path}.output.weight"][0]).rpartition(".")[0]
        for name in ("k_scale", "v_scale"):
            tensors[f"{path}.{name}"] = StoredTensor(
                f"{attention}.{name}", ((1,), ()), FLOATS, check=check_positive_scale
            )
    return tensors
