"""Load a model by name."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder
from rjax.models.loading.checkpoint_folder import read_tensors
from rjax.models.loading.config_file import config_from_folder
from rjax.models.loading.dummy import fill_randomly
from rjax.models.loading.hub import resolve_folder
from rjax.models.loading.linear_modules import with_dequantised_weights, with_format
from rjax.models.loading.weights import load_weights
from rjax.models.placement import place
from rjax.models.sharding import TENSOR_AXIS, check_mesh, single_device_mesh

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its config, and the local folder with its tokenizer files."""

    model: Decoder
    config: ModelConfig
    folder: Path


def load_model(
    model: str | Path,
    *,
    dtype: DTypeLike | None,
    load_format: str = "auto",
    quantization: str | None = None,
    dequantize: bool = False,
    revision: str | None = None,
    token: str | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    progress: bool = True,
    max_length: int | None = None,
    expert_parallel: bool = False,
) -> LoadedModel:
    """Load a Hugging Face folder or hub id onto devices.

    Args:
        model: a local folder, else a hub id.
        dtype: dtype of the parameters; None for that of the checkpoint.
        load_format: "auto" reads safetensors; "dummy" uses random weights and needs only
            config.json.
        quantization: "fp8", "int8" or "int4" quantises an unquantised checkpoint while it is
            loaded, rounding to nearest. None, or the ``quant_method`` of a quantised checkpoint,
            takes the weights as they are stored.
        dequantize: hold the weights in ``dtype``: those of a quantised checkpoint are dequantised
            while they are loaded, others are not quantised.
        revision, token: the model's revision and an access token, for the hub.
        mesh: devices, with the axis `tensor`; None for the first device only.
        seed: seed of dummy weights.
        progress: show a bar while loading.
        max_length: tokens of the longest sequence, which the rope types dynamic and longrope depend
            on; None for the context that the checkpoint declares.
        expert_parallel: each device holds whole experts, not a share of each.

    Raises:
        CheckpointError: the folder, its config or its weights cannot be used.
        ValueError: the dtype is not supported, or the mesh cannot divide the parameters.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format is {load_format!r}; it must be 'auto' or 'dummy'")
    folder = resolve_folder(model, revision, token, weights=load_format == "auto")
    config = config_from_folder(folder, quantization)
    if max_length is not None:
        config = config.for_length(max_length)
    if load_format == "dummy":
        config = with_dequantised_weights(config) if dequantize else config
        found = init_model(
            config, dtype=dtype, mesh=mesh, seed=seed, expert_parallel=expert_parallel
        )
        return LoadedModel(found, found.config, folder)
    if config.format is not None:
        types = {name: entry.dtype for name, entry in read_tensors(folder).items()}
        config = with_format(config, config.format.with_scale_types(types))
    if dequantize:
        config = with_dequantised_weights(config)
    mesh = _checked(mesh)
    config = place(config, mesh.shape[TENSOR_AXIS], expert_parallel=expert_parallel)
    abstract = Decoder(config, _dtype(dtype, config))
    return LoadedModel(load_weights(abstract, config, folder, mesh, progress), config, folder)


def init_model(
    config: ModelConfig,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    expert_parallel: bool = False,
) -> Decoder:
    """A model with random weights: normal with deviation 0.02, biases 0, norms 1.

    Its config is placed on the mesh; see `place`. Raises ValueError if it cannot be.
    """
    mesh = _checked(mesh)
    config = place(config, mesh.shape[TENSOR_AXIS], expert_parallel=expert_parallel)
    return fill_randomly(Decoder(config, _dtype(dtype, config)), mesh, seed)


def _checked(mesh: Mesh | None) -> Mesh:
    if mesh is None:
        return single_device_mesh()
    check_mesh(mesh)
    return mesh


def _dtype(dtype: DTypeLike | None, config: ModelConfig) -> jnp.dtype:
    found = jnp.dtype(config.dtype if dtype is None else dtype)
    if found.name not in _DTYPES:
        raise ValueError(f"dtype is {found.name}; it must be one of {', '.join(_DTYPES)}")
    return found
