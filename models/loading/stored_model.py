"""How the checkpoints of a model store its parameters."""

import dataclasses
from collections.abc import Mapping

from flax import nnx

from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder
from rjax.models.families import FAMILIES
from rjax.models.layers.linear import Linear
from rjax.models.loading.match import Expected, kv_scale_tensors
from rjax.models.loading.pieces import Piece, Weights, module_of
from rjax.models.loading.plan import StoredWeight, plain_weight, scheme_weight, stored_tensors
from rjax.models.schemes import UNQUANTISED

_HEAD = "head.weight"
_ROUTER = ".mlp.router"
_SCALES = (".weight_scale", ".weight_scale_inv")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredModel:
    """The parameters of a model, as a checkpoint stores them.

    Attributes:
        parameters: the abstract parameter of each path, such as "layers.0.attention.qkv.weight".
        weights: how the parameters are stored, by their paths: several paths are the arrays of one
            weight.
        expected: the tensors of the checkpoint.
    """

    parameters: Mapping[str, nnx.Variable]
    weights: Mapping[tuple[str, ...], StoredWeight]
    expected: Expected


def stored_model(
    model: Decoder, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> StoredModel:
    """How a checkpoint with tensors of these names and shapes stores a model, which may be
    abstract.

    Raises:
        CheckpointError: the checkpoint's format cannot store the weights so.
    """
    family = FAMILIES[config.architecture]
    weights = family.weights_of(config, shapes)
    kv_scales = kv_scale_tensors(config)
    quantised = _quantised_weights(model, config, weights, shapes)
    stored = [
        tensor
        for weight in quantised.values()
        for piece in weight.pieces
        for tensor in stored_tensors(piece, weight.format, config).values()
    ]
    expected = Expected(weights, (*stored, *kv_scales.values()), family.unused(config))
    parameters = {
        ".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model))
    }
    scales = {path: (Piece(tensor.name, "A"),) for path, tensor in kv_scales.items()}
    plain = {
        (path,): plain_weight(parameters[path], pieces)
        for path, pieces in (weights | scales).items()
    }
    return StoredModel(parameters, plain | quantised, expected)


def _quantised_weights(
    model: Decoder,
    config: ModelConfig,
    weights: Weights,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[tuple[str, ...], StoredWeight]:
    """The weights that the config's format decodes, by their parameters; their pieces are removed
    from ``weights``."""
    if config.format is None:
        return {}
    dequantised = dict(config.dequantised)
    found: dict[tuple[str, ...], StoredWeight] = {}
    for path, module in nnx.iter_modules(model):
        name = ".".join(map(str, path))
        if not isinstance(module, Linear):
            continue
        scheme = dequantised.get(name, module.scheme)
        if scheme != UNQUANTISED:
            leaves = [leaf for leaf, _ in module.leaf_letters]
            stored = scheme_weight(module, scheme, weights.pop(f"{name}.weight"), config)
            found[tuple(f"{name}.{leaf}" for leaf in leaves)] = stored
    beside = {_HEAD: "V"} | {
        path: "J" for path, pieces in weights.items() if _is_quantised_router(path, pieces, shapes)
    }
    for path, outputs in beside.items():
        scheme = config.format.scheme(module_of(weights[path][0])) if path in weights else None
        if scheme not in (None, UNQUANTISED):
            plain = Linear("D", outputs, config, model.dtype, scheme=UNQUANTISED)
            found[(path,)] = scheme_weight(plain, scheme, weights.pop(path), config)
    return found


def _is_quantised_router(
    path: str, pieces: tuple[Piece, ...], shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether a parameter is a router that a checkpoint with these tensors quantises.

    config.json does not say so: a router is a linear module for some tools, and for others not.
    """
    if not path.endswith(_ROUTER):
        return False
    module = module_of(pieces[0])
    return pieces[0].tensor not in shapes or any(module + scale in shapes for scale in _SCALES)
