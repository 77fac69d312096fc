"""Flax models, checkpoint loading and the bundled model."""

from pathlib import Path

from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder, DecoderLayer
from rjax.models.dense import DenseAttention
from rjax.models.errors import CheckpointError
from rjax.models.experts_config import ExpertsConfig
from rjax.models.formats import StoredTensor, WeightFormat, register_format
from rjax.models.layers.embedding import Embedding
from rjax.models.layers.linear import Linear
from rjax.models.layers.norm import Norm
from rjax.models.linear_config import LinearAttentionConfig
from rjax.models.loading.config import (
    config_from_dict,
    config_from_folder,
    with_dequantised_weights,
)
from rjax.models.loading.hub import resolve_folder
from rjax.models.loading.load import LoadedModel, init_model, load_model
from rjax.models.loading.save import save_model
from rjax.models.loading.tensors import weights_digest
from rjax.models.operations import (
    HeadNorms,
    HeadOptions,
    HeadsOperations,
    KvScales,
    Operations,
    Residual,
)
from rjax.models.placement import bytes_of_device, place
from rjax.models.rope import Rotary, rotary_tables
from rjax.models.schemes import Leaf, WeightScheme
from rjax.pallas_kernels.experts.base import Router, Routing
from rjax.pallas_kernels.gemm.activation import Activation

BUNDLED_MODEL: Path = Path(__file__).parent / "tables" / "checkpoint"
"""Folder of the small model that ships with the package."""

__all__ = [
    "BUNDLED_MODEL",
    "Activation",
    "CheckpointError",
    "Decoder",
    "DecoderLayer",
    "DenseAttention",
    "Embedding",
    "ExpertsConfig",
    "HeadNorms",
    "HeadOptions",
    "HeadsOperations",
    "KvScales",
    "Leaf",
    "Linear",
    "LinearAttentionConfig",
    "LoadedModel",
    "ModelConfig",
    "Norm",
    "Operations",
    "Residual",
    "Rotary",
    "Router",
    "Routing",
    "StoredTensor",
    "WeightFormat",
    "WeightScheme",
    "bytes_of_device",
    "config_from_dict",
    "config_from_folder",
    "init_model",
    "load_model",
    "place",
    "register_format",
    "resolve_folder",
    "rotary_tables",
    "save_model",
    "weights_digest",
    "with_dequantised_weights",
]
