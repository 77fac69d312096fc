"""What a checkpoint must hold, and whether it does."""

import dataclasses
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from rjax.models.config import ModelConfig
from rjax.models.errors import CheckpointError
from rjax.models.families import FAMILIES
from rjax.models.formats.checks import check_positive_scale
from rjax.models.formats.weight_format import FLOATS, StoredTensor
from rjax.models.loading.pieces import Weights, module_of, tensor_shape
from rjax.models.loading.tensors import TensorEntry

IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias")
_MAX_NAMES = 5
_CHECK_THREADS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The tensors of a model.

    Attributes:
        weights: the pieces of parameters that are stored plainly.
        stored: tensors of quantised weights, and scales of KV.
        unused: starts of the names of tensors that may be there and are not loaded.
    """

    weights: Weights
    stored: tuple[StoredTensor, ...]
    unused: tuple[str, ...] = ()

    def shapes(self, config: ModelConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The allowed shapes of each tensor by name."""
        plain = {
            piece.tensor: (tensor_shape(piece, config),)
            for pieces in self.weights.values()
            for piece in pieces
        }
        return plain | {tensor.name: tensor.shapes for tensor in self.stored}


def match(
    expected: Expected, tensors: Mapping[str, TensorEntry], config: ModelConfig, folder: Path
) -> dict[str, TensorEntry]:
    """The entry of every expected tensor.

    Names, shapes, types, and the values of scales are checked.

    Raises:
        CheckpointError: something is missing, unknown or wrong.
    """
    shapes = expected.shapes(config)
    head = f"{config.head_module}.weight"
    optional = {tensor.name for tensor in expected.stored if not tensor.required}
    # A checkpoint of the decoder without a head lacks the prefix ("model.") in its names.
    prefix = expected.weights["embedding.weight"][0].tensor.partition(".")[0] + "."
    if not any(name.startswith(prefix) for name in tensors):
        tensors = {
            name if name == head else prefix + name: entry for name, entry in tensors.items()
        }
    missing = shapes.keys() - tensors.keys() - optional
    if missing:
        reasons = {t.missing for t in expected.stored if t.name in missing and t.missing}
        hint = "; " + " and ".join(sorted(reasons)) if reasons else ""
        hint = hint or (
            "; set tie_word_embeddings to true in config.json if the embedding is also the head"
            if missing == {head}
            else "; the folder is incomplete or config.json describes another model"
        )
        raise CheckpointError(f"{folder} lacks {_listed(missing)}{hint}")
    extra = {
        name
        for name in tensors.keys() - shapes.keys()
        if not name.endswith(IGNORED_SUFFIXES) and not name.startswith(expected.unused)
    } - ({head} if config.tie_embeddings else set())
    if extra:
        raise CheckpointError(
            f"{folder} has {_listed(extra)}, which {config.architecture} does not use; the weights "
            "belong to another architecture or config.json is wrong"
        )
    entries = {name: tensors[name] for name in shapes if name in tensors}
    for name, entry in entries.items():
        if entry.shape not in shapes[name]:
            raise CheckpointError(
                f"tensor {name!r} of {folder} has the shape {entry.shape}; config.json means "
                f"{' or '.join(map(str, shapes[name]))}"
            )
    _check_stored(expected.stored, entries)
    if config.tie_embeddings and head in tensors:
        embedding = expected.weights["embedding.weight"][0].tensor
        _check_tied(tensors[head], tensors[embedding], folder)
    return entries


def _check_stored(stored: Iterable[StoredTensor], entries: Mapping[str, TensorEntry]) -> None:
    present = [(tensor, entries[tensor.name]) for tensor in stored if tensor.name in entries]
    for tensor, entry in present:
        if entry.dtype not in tensor.types:
            raise CheckpointError(
                f"{entry.file.name}: {entry.name} has the type {entry.dtype}; the "
                f"quantization_config means {' or '.join(tensor.types)}"
            )
    with ThreadPoolExecutor(_CHECK_THREADS) as threads:
        checked = [pair for pair in present if pair[0].check is not None]
        for problem in threads.map(_problem, *zip(*checked, strict=True)) if checked else ():
            if problem:
                raise CheckpointError(problem)


def _problem(tensor: StoredTensor, entry: TensorEntry) -> str | None:
    assert tensor.check is not None
    problem = tensor.check(entry.read())
    return problem and f"{entry.file.name}: {entry.name} {problem}"


def _check_tied(head: TensorEntry, embedding: TensorEntry, folder: Path) -> None:
    rows = max(1, (64 << 20) // max(1, embedding.size // max(1, embedding.shape[0])))
    same = head.shape == embedding.shape
    for first in range(0, embedding.shape[0], rows):
        count = min(rows, embedding.shape[0] - first)
        same = same and np.array_equal(
            head.read(first_row=first, rows=count), embedding.read(first_row=first, rows=count)
        )
    if not same:
        raise CheckpointError(
            f"{folder} has an {head.name} that differs from its embedding, though config.json ties "
            "them; set tie_word_embeddings to false, or remove the tensor"
        )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    plural = "tensors" if len(names) > 1 else "the tensor"
    return f"{plural} {', '.join(names[:_MAX_NAMES])}"[:600] + more


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
        if config.is_linear(layer) or config.kv_source(layer) != layer:
            continue
        path = f"layers.{layer}.attention"
        attention = module_of(weights[f"{path}.output.weight"][0]).rpartition(".")[0]
        for name in ("k_scale", "v_scale"):
            tensors[f"{path}.{name}"] = StoredTensor(
                f"{attention}.{name}", ((1,), ()), FLOATS, check=check_positive_scale
            )
    return tensors
