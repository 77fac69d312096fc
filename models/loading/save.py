"""Save a model as a Hugging Face folder."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder
from rjax.models.families import FAMILIES
from rjax.models.loading.pieces import split_parameter, tensor_shape
from rjax.models.loading.shards import ShardWriter


def save_model(
    model: Decoder,
    config: ModelConfig,
    folder: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    shard_bytes: int = 10_000_000,
) -> None:
    """Write config.json and safetensors weights, the inverse of `load_model`.

    It writes one file if everything fits into ``shard_bytes``, else shards of at most that size and
    an index. A larger tensor gets its own shard. Tokenizer files are not written.

    Raises ValueError for families and rotary kinds that cannot be saved, and for quantised weights.
    """
    folder = Path(folder)
    family = FAMILIES[config.architecture]
    if family.write_config is None:
        raise ValueError(f"{config.architecture} cannot be saved, only LlamaForCausalLM")
    if config.schemes:
        raise ValueError(f"weights stored as {config.schemes[0][1].name} cannot be saved")
    dtype = jnp.dtype(dtype)
    written = family.write_config(dataclasses.replace(config, dtype=dtype.name))
    tensors = _tensors(model, config, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    shards = ShardWriter(folder, shard_bytes)
    for name, value in tensors.items():
        shards.add(name, value)
    shards.finish()


def _tensors(model: Decoder, config: ModelConfig, dtype: jnp.dtype) -> dict[str, np.ndarray]:
    weights = FAMILIES[config.architecture].weights(config)
    tensors: dict[str, np.ndarray] = {}
    # The flattening of flax would leave a reference cycle that keeps the weights alive.
    leaves, _ = jax.tree.flatten_with_path(
        nnx.state(model), is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    for keys, leaf in leaves:
        value = np.asarray(jax.device_get(leaf.get_value())).astype(dtype)
        letters = leaf.get_metadata("letters")
        pieces = weights[".".join(str(key.key) for key in keys)]
        for piece, part in split_parameter(value, letters, pieces, config):
            if piece.rows is None:
                tensors[piece.tensor] = part
                continue
            whole = tensors.setdefault(piece.tensor, np.empty(tensor_shape(piece, config), dtype))
            whole[piece.first_row : piece.first_row + part.shape[0]] = part
    return tensors
