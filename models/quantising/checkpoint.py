"""Quantise a checkpoint folder into another, layer by layer."""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from rjax.models.errors import CheckpointError
from rjax.models.families import FAMILIES
from rjax.models.families.multimodal import Multimodal
from rjax.models.loading.config import config_from_folder
from rjax.models.loading.json_files import read_json
from rjax.models.loading.save import ShardWriter
from rjax.models.loading.tensors import read_tensors
from rjax.models.quantising.awq import scale_inputs, squared_outputs
from rjax.models.quantising.calibration import Calibration, InputStatistics
from rjax.models.quantising.experts import quantise_experts
from rjax.models.quantising.projections import (
    EXPERTS,
    SharedInput,
    shared_inputs,
    unquantised_modules,
)
from rjax.models.quantising.rounding import quantise_weight, scale_type
from rjax.models.quantising.settings import QuantisingSettings
from rjax.models.quantising.source import read_source

_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_NOT_COPIED = ("config.json", "quantize_config.json")
_MAX_CONFIG_BYTES = 16 << 20
_SHARD_BYTES = 2_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleError:
    """How much a projection changed.

    Attributes:
        module: its name in the checkpoint.
        relative_error: norm of the difference divided by the norm: of the outputs on the prompts
            if there are any, else of the weight.
    """

    module: str
    relative_error: float


@dataclasses.dataclass(frozen=True, slots=True)
class QuantisedCheckpoint:
    """What was written.

    Attributes:
        settings: how the projections are quantised.
        bytes_before, bytes_after: bytes of all tensors before and after.
        modules: the quantised ones, in the order of the layers.
        prompt_tokens: number of prompt tokens on which scales were searched; 0 without.
    """

    settings: QuantisingSettings
    bytes_before: int
    bytes_after: int
    modules: tuple[ModuleError, ...]
    prompt_tokens: int

    def worst(self, count: int) -> list[ModuleError]:
        """The modules with the largest errors, the largest first."""
        return sorted(self.modules, key=lambda module: -module.relative_error)[:count]


def check_output(out: Path) -> None:
    """Raise CheckpointError unless a folder is new or empty and can be written; creates nothing."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            kind = "is not empty" if out.is_dir() else "is a file"
            raise CheckpointError(f"{out} {kind}; give a new folder for the quantised model")
        nearest = next(path for path in (out, *out.parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from None


def quantise_checkpoint(
    folder: Path,
    out: Path,
    settings: QuantisingSettings,
    *,
    prompts: Sequence[Sequence[int]] = (),
    shard_bytes: int = _SHARD_BYTES,
    progress: bool = True,
) -> QuantisedCheckpoint:
    """Write a model folder with quantised projections, in the format of compressed-tensors, or with
    quantised experts in that of gpt-oss.

    Embeddings, norms, biases, routers, the output projection and towers for other media stay as
    they are. The files of the
    tokenizer and the generation settings are copied. config.json is written last, so that a folder
    that is not complete is not taken for a model.

    Memory: one layer in float32 and one shard; with prompts also their residual streams and, for
    each projection of a layer, the products of its inputs.

    Args:
        folder: the folder of an unquantised model.
        out: a new or empty folder.
        settings: the settings, from `choose_settings`.
        prompts: token ids, for settings that are calibrated.
        shard_bytes: size of the files.
        progress: show a bar.

    Raises:
        CheckpointError: the checkpoint is not usable, or the folder ``out`` is not empty or cannot
            be written.
        OSError: a file cannot be written, for example because the disk is full.
    """
    check_output(out)
    try:
        return _quantise(folder, out, settings, prompts, shard_bytes, progress)
    except BaseException:
        for path in out.glob("*"):
            path.unlink()
        raise


def _quantise(
    folder: Path,
    out: Path,
    settings: QuantisingSettings,
    prompts: Sequence[Sequence[int]],
    shard_bytes: int,
    progress: bool,
) -> QuantisedCheckpoint:
    config = config_from_folder(folder)
    family, source = FAMILIES[config.architecture], read_source(config, folder)
    towers = family.towers if isinstance(family, Multimodal) else ()
    starts = family.tower_names if isinstance(family, Multimodal) else ()
    entries, dtypes = source.entries, source.dtypes
    beside = [entry for name, entry in read_tensors(folder).items() if name.startswith(starts)]
    writer = ShardWriter(out, shard_bytes)
    outside = source.read(None)
    for name, value in outside.items():
        writer.add(name, value)
    calibration = Calibration(config, prompts, outside) if settings.calibrated else None
    del outside
    errors: list[ModuleError] = []
    layers = range(config.num_layers)
    for layer in tqdm(layers, desc="Quantising layers", disable=not progress):
        tensors = source.read(layer)
        groups = shared_inputs(config, layer)
        if settings.experts_only:
            has_experts = config.has_experts(layer)
            groups = [group for group in groups if has_experts and group.linear in EXPERTS]
        inputs: dict[str, InputStatistics] = {}
        if calibration is not None:
            inputs = scale_inputs(
                groups, tensors, dtypes, calibration.advance(layer, tensors), settings
            )
        quantised, found = _quantise_layer(groups, tensors, dtypes, inputs, settings)
        errors += found
        replaced = {name for group in groups for name in group.tensors}
        plain = {name: tensors[name] for name in tensors if name not in replaced}
        for name, value in (plain | quantised).items():
            writer.add(name, value)
    for entry in beside:
        writer.add(entry.name, entry.read())
    total = writer.finish()
    _copy_files(folder, out)
    values = read_json(folder / "config.json", _MAX_CONFIG_BYTES)
    ignored = [*unquantised_modules(config), *(f"re:(model[.])?{tower}[.].*" for tower in towers)]
    values["quantization_config"] = settings.quantization_config(ignored)
    (out / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    return QuantisedCheckpoint(
        settings=settings,
        bytes_before=sum(entry.size for entry in (*entries.values(), *beside)),
        bytes_after=total,
        modules=tuple(errors),
        prompt_tokens=calibration.num_tokens if calibration else 0,
    )


def _quantise_layer(
    groups: Sequence[SharedInput],
    tensors: Mapping[str, np.ndarray],
    dtypes: Mapping[str, np.dtype],
    inputs: Mapping[str, InputStatistics],
    settings: QuantisingSettings,
) -> tuple[dict[str, np.ndarray], list[ModuleError]]:
    """The tensors of the quantised projections of a layer, and their errors."""
    stored: dict[str, np.ndarray] = {}
    errors = []
    for group in groups:
        statistics = inputs.get(group.linear)
        products = None if statistics is None else statistics.products
        for name in group.tensors:
            module = name.removesuffix(".weight")
            if settings.experts_only:
                quantised, error = quantise_experts(name, tensors[name])
                stored |= quantised
                errors.append(ModuleError(module, error))
                continue
            weight = tensors[name].astype(np.float32)
            if not np.isfinite(weight).all():
                raise CheckpointError(f"tensor {name!r} has values that are not finite")
            quantised = quantise_weight(weight, settings, scale_type(dtypes[name]), products)
            stored |= quantised.tensors(module)
            errors.append(ModuleError(module, _error(weight, quantised.dequantised(), products)))
    return stored, errors


def _error(weight: np.ndarray, found: np.ndarray, products: Any) -> float:
    difference = found - weight
    if products is None:
        squares = float(np.square(difference).sum()), float(np.square(weight).sum())
    else:
        squares = (
            float(squared_outputs(jnp.asarray(difference), products)),
            float(squared_outputs(jnp.asarray(weight), products)),
        )
    return (max(squares[0], 0.0) / squares[1]) ** 0.5 if squares[1] > 0 else 0.0


def _copy_files(folder: Path, out: Path) -> None:
    """Copy the files of the tokenizer, the chat template and the generation settings."""
    for path in sorted({path for pattern in _COPIED for path in folder.glob(pattern)}):
        wanted = path.name not in _NOT_COPIED and not path.name.endswith(".index.json")
        if wanted and path.is_file():
            shutil.copyfile(path, out / path.name)
