"""A checkpoint's generation_config.json: end-of-sequence ids and default sampling values."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from rjax.errors import InvalidConfigError

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

        Raises:
            InvalidConfigError: the file is unreadable or ``eos_token_id`` is not a token id.
        """
        path = pathlib.Path(folder) / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidConfigError(f"{path}: not readable as JSON: {error}") from error
        if not isinstance(found, dict):
            raise InvalidConfigError(f"{path}: holds {type(found).__name__}, expected an object")
        eos = found.get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise InvalidConfigError(
                f"{path}: eos_token_id is {eos!r}; expected a token id or a list of them"
            )
        sampling = {key: found[key] for key in _SAMPLING_KEYS if found.get(key) is not None}
        if found.get("max_new_tokens") is not None:
            sampling["max_tokens"] = found["max_new_tokens"]
        return cls(frozenset(ids), sampling)
