"""A prefix's KV on disk, so that a long system prompt costs nothing at the next start."""

import dataclasses
import pathlib

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rjax.errors import InvalidConfigError

_FORMAT = "rjax-prefix-1"


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixOrigin:
    """All that KV depends on besides tokens.

    Attributes:
        model: fingerprint of configuration and weights.
        dtype: of the KV.
        page_size: tokens a page.
    """

    model: str
    dtype: str
    page_size: int


def save_prefix_file(
    path: str | pathlib.Path, name: str, tokens: np.ndarray, kv: np.ndarray, origin: PrefixOrigin
) -> None:
    """Write tokens [T] and KV [X, pools, K, S, H] of a prefix's pages."""
    metadata = {
        "format": _FORMAT,
        "name": name,
        "model": origin.model,
        "dtype": origin.dtype,
        "page_size": str(origin.page_size),
    }
    # As bytes: safetensors knows no NumPy bfloat16.
    tensors = {
        "tokens": np.asarray(tokens, np.int32),
        "kv": np.ascontiguousarray(kv).view(np.uint8),
    }
    save_file(tensors, str(path), metadata)


def load_prefix_file(
    path: str | pathlib.Path, origin: PrefixOrigin, dtype: np.dtype
) -> tuple[str, list[int], np.ndarray]:
    """Name, tokens and KV of a saved prefix.

    Raises:
        InvalidConfigError: not such a file, or one of another model, dtype or page size.
    """
    try:
        with safe_open(str(path), "numpy") as file:
            metadata = file.metadata() or {}
            found = {"tokens", "kv"} <= set(file.keys())
            if metadata.get("format") != _FORMAT or not found:
                raise InvalidConfigError(f"{path} holds no prefix; give a file of save_prefix")
            for field, wanted in dataclasses.asdict(origin).items():
                if metadata.get(field) != str(wanted):
                    raise InvalidConfigError(
                        f"{path} was saved with {field} {metadata.get(field)!r}; this engine has "
                        f"{str(wanted)!r}: save the prefix again"
                    )
            tokens, kv = file.get_tensor("tokens"), file.get_tensor("kv").view(dtype)
    except (OSError, SafetensorError) as error:
        raise InvalidConfigError(f"{path} cannot be read as a prefix: {error}") from error
    return metadata.get("name", ""), tokens.tolist(), kv
