"""A checkpoint's end-of-sequence ids and default sampling values."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from rjax.errors import InvalidConfigError
from rjax.tokenization.json_file import read_object

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationConfig:
    """A checkpoint's defaults for generation.

    Attributes:
        eos_token_ids: tokens that end a sequence.
        sampling: default values that the checkpoint sets, by `SamplingParams` name.
    """

    eos_token_ids: frozenset[int] = frozenset()
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: str | pathlib.Path) -> "GenerationConfig":
        """Read ``generation_config.json`` of a folder; empty if the file is missing.

        As in transformers, ``eos_token_id`` comes from ``config.json`` or its ``text_config`` if
        ``generation_config.json`` does not set it.

        Raises:
            InvalidConfigError: a file is unreadable or ``eos_token_id`` is not a token id.
        """
        path, model_path = (
            pathlib.Path(folder) / name for name in ("generation_config.json", "config.json")
        )
        found = read_object(path)
        ids = _eos_token_ids(found, path)
        if not ids:
            config = read_object(model_path)
            text_config = config.get("text_config")
            ids = _eos_token_ids(config, model_path)
            if not ids and isinstance(text_config, dict):
                ids = _eos_token_ids(text_config, model_path)
        sampling = {key: found[key] for key in _SAMPLING_KEYS if found.get(key) is not None}
        if found.get("max_new_tokens") is not None:
            sampling["max_tokens"] = found["max_new_tokens"]
        return cls(frozenset(ids), sampling)


def _eos_token_ids(config: Mapping[str, Any], path: pathlib.Path) -> list[int]:
    eos = config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos in (None, -1) else [eos]  # -1: none
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise InvalidConfigError(
            f"{path}: eos_token_id is {eos!r}; expected a token id or a list of them"
        )
    return ids
