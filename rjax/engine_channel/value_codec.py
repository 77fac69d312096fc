"""Parameters, options and results of utilities as plain values."""

import dataclasses
import pathlib
from typing import Any

import msgspec

from rjax.batch.kernel_use import KernelUse
from rjax.engine.protocol import KeepAs, NamedPrefix
from rjax.engine.request_stats import Histogram, RequestStats
from rjax.engine.stats import EngineStats
from rjax.errors import InvalidRequestError
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.structured.mask_request import MaskRequest

_DEFAULTS = SamplingParams()
_FIELDS = [f.name for f in dataclasses.fields(SamplingParams) if f.name != "structured_outputs"]
_RESULTS: dict[str, Any] = {
    **dict.fromkeys(("is_draining", "is_paused", "is_sleeping"), bool),
    "kernels": list[KernelUse],
    "load_prefix": NamedPrefix,
    "prefixes": list[NamedPrefix],
    "startup_seconds": dict[str, float],
    "stats": EngineStats,
}
"""Types of the results of utilities; the others return None."""


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from the defaults, without ``structured_outputs``: see
    `pack_options`."""
    packed: dict[str, Any] = {}
    for name in _FIELDS:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            packed[name] = value
    if "output_kind" in packed:
        packed["output_kind"] = params.output_kind.value
    return packed


def unpack_params(packed: dict[str, Any]) -> SamplingParams:
    """The parameters that `pack_params` packed."""
    if "output_kind" in packed:
        packed["output_kind"] = RequestOutputKind(packed["output_kind"])
    return SamplingParams(**packed)


def pack_options(options: dict[str, Any], params: SamplingParams) -> dict[str, Any]:
    """Options of a request, without the text of its prompt, which the engine does not need.

    ``structured_outputs`` of the parameters become a ``mask_request``.

    Raises:
        InvalidRequestError: they hold token masks, which cannot leave their process.
    """
    packed = {name: value for name, value in options.items() if name not in ("masks", "prompt")}
    if options.get("masks"):
        raise InvalidRequestError(
            "masks cannot be sent to an engine in another process; give structured_outputs"
        )
    wanted = params.structured_outputs
    if wanted is not None and packed.get("mask_request") is None:
        packed["mask_request"] = MaskRequest(wanted.constraint)
    for name in ("keep_as", "mask_request"):
        if packed.get(name) is not None:
            packed[name] = dataclasses.asdict(packed[name])
    return packed


def unpack_options(packed: dict[str, Any]) -> dict[str, Any]:
    """The options that `pack_options` packed."""
    for name, kind in (("keep_as", KeepAs), ("mask_request", MaskRequest)):
        if packed.get(name) is not None:
            packed[name] = msgspec.convert(packed[name], kind)
    return packed


def pack_arguments(value: Any) -> Any:
    """Arguments of a utility as plain values."""
    if isinstance(value, dict):
        return {name: pack_arguments(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [pack_arguments(item) for item in value]
    return str(value) if isinstance(value, pathlib.Path) else value


def pack_result(value: Any) -> Any:
    """The result of a utility as plain values."""
    return msgspec.to_builtins(value, enc_hook=_pack_object)


def unpack_result(name: str, packed: Any) -> Any:
    """The result of the utility of this name."""
    if name not in _RESULTS:
        return packed
    return msgspec.convert(packed, _RESULTS[name], dec_hook=_unpack_object)


def _pack_object(value: Any) -> Any:
    if isinstance(value, RequestStats):
        return {
            "max_model_len": value.max_model_len,
            "prompt_tokens": value.prompt_tokens,
            "finished": value.finished,
            "histograms": value.histograms,
        }
    raise NotImplementedError(type(value).__name__)


def _unpack_object(kind: type, packed: Any) -> Any:
    if kind is not RequestStats:
        raise NotImplementedError(kind.__name__)
    found = RequestStats(packed["max_model_len"])
    found.prompt_tokens = packed["prompt_tokens"]
    found.finished = packed["finished"]
    found.histograms = msgspec.convert(packed["histograms"], dict[str, Histogram])
    return found
