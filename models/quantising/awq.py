"""Activation-aware scales of the inputs of projections (AWQ).

Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and
Acceleration", MLSys 2024. Inputs with large activations are divided by a scale, and the weights
that they meet are multiplied by it, so that these weights are rounded with a smaller error. The
division is folded into the tensors before the projection.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rjax.models.quantising.calibration import InputStatistics
from rjax.models.quantising.projections import SharedInput
from rjax.models.quantising.rounding import round_groups, scale_type
from rjax.models.quantising.settings import QuantisingSettings
from rjax.models.schemes.values import ScaleDType

_STEPS = 20
_SMALLEST = 1e-4


def scale_inputs(
    groups: Sequence[SharedInput],
    tensors: dict[str, np.ndarray],
    dtypes: Mapping[str, np.dtype],
    inputs: Mapping[str, InputStatistics],
    settings: QuantisingSettings,
) -> dict[str, InputStatistics]:
    """Search and fold the scales of a layer; returns the statistics of the scaled inputs.

    Args:
        groups: the projections of the layer.
        tensors: tensors of the layer by name, in which the changed ones are replaced.
        dtypes: dtypes of the tensors in the checkpoint.
        inputs: statistics by projection, as `Calibration.advance` gives them.
        settings: how weights are rounded.
    """
    scaled = dict(inputs)
    for group in groups:
        if not (group.norm or group.rows):
            continue
        statistics = inputs[group.linear]
        weights = [tensors[name] for name in group.tensors]
        found = search_scale(weights, statistics, settings, scale_type(dtypes[group.tensors[0]]))
        scale = jnp.asarray(fold_scale(group, found, tensors, dtypes))
        scaled[group.linear] = InputStatistics(
            statistics.magnitudes / scale, statistics.products / jnp.outer(scale, scale)
        )
    return scaled


def search_scale(
    weights: list[np.ndarray],
    statistics: InputStatistics,
    settings: QuantisingSettings,
    scale_dtype: ScaleDType,
) -> Float[np.ndarray, " E"]:
    """The scale of each input of some projections that gives the least squared error of outputs.

    The scales are the mean magnitudes of the inputs to the power of alpha, for alpha on a grid from
    0 (all scales are 1) to 1.

    Args:
        weights: [outputs, inputs] of the projections.
        statistics: statistics of the inputs.
        settings: how weights are rounded.
        scale_dtype: dtype of the scales of groups.
    """
    assert settings.group_size is not None
    weight = jnp.concatenate([jnp.asarray(one.astype(np.float32)) for one in weights])
    scale = _searched(weight, statistics, settings.group_size, settings.symmetric, scale_dtype)
    return np.asarray(scale)


@functools.partial(jax.jit, static_argnames=("group_size", "symmetric", "scale_dtype"))
def _searched(
    weight: Float[Array, "X E"],
    statistics: InputStatistics,
    group_size: int,
    symmetric: bool,
    scale_dtype: ScaleDType,
) -> Float[Array, " E"]:
    def scale_of(alpha: Array) -> Array:
        scale = jnp.maximum(statistics.magnitudes**alpha, _SMALLEST)
        return scale / jnp.sqrt(scale.max() * scale.min())

    def loss_of(alpha: Array) -> Array:
        scale = scale_of(alpha)
        values, group_scale, zero = round_groups(weight * scale, group_size, symmetric, scale_dtype)
        rounded = (values - zero[..., None]) * group_scale[..., None]
        error = rounded.reshape(weight.shape) / scale - weight
        return squared_outputs(error, statistics.products)

    alphas = jnp.arange(_STEPS + 1) / _STEPS
    return scale_of(alphas[jnp.argmin(jax.lax.map(loss_of, alphas))])


def squared_outputs(weight: Float[Array, "X E"], products: Float[Array, "E E"]) -> Float[Array, ""]:
    """Mean squared norm of a projection's output, from the mean products of two inputs."""
    return (jnp.matmul(weight, products, precision="highest") * weight).sum()


def fold_scale(
    group: SharedInput,
    scale: Float[np.ndarray, " E"],
    tensors: dict[str, np.ndarray],
    dtypes: Mapping[str, np.dtype],
) -> Float[np.ndarray, " E"]:
    """Divide the input of some projections by a scale, and multiply their weights by it.

    The function of the layer stays the same. Weights become float32; norms and biases stay in
    their dtype. The scale that is returned allows for the rounding of the norm's weight.

    Args:
        group: the projections, with something before them that the scale can be folded into.
        scale: scale of each input.
        tensors: tensors of the layer by name, in which the changed ones are replaced.
        dtypes: dtypes of the tensors in the checkpoint.

    Returns:
        The scale by which the weights were multiplied.
    """
    assert group.norm or group.rows
    if group.norm:
        weight, *biases = group.norm
        old = tensors[weight].astype(np.float32)
        new = (old / scale).astype(dtypes[weight])
        new = np.where(new == 0, tensors[weight], new)
        wide = new.astype(np.float32)
        scale = np.divide(old, wide, out=np.ones_like(old), where=wide != 0)
        tensors[weight] = new
        for bias in biases:
            tensors[bias] = (tensors[bias].astype(np.float32) / scale).astype(dtypes[bias])
    for place, rows in enumerate(group.rows):
        name = rows.tensor
        changed = tensors[name].astype(np.float32)
        part = changed[rows.first : rows.first + rows.count]
        part /= scale[:, None] if part.ndim == 2 else scale
        tensors[name] = changed if place == 0 else changed.astype(dtypes[name])
    for name in group.tensors:
        tensors[name] = tensors[name].astype(np.float32) * scale
    return scale
