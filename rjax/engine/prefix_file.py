"""Prefixes on disk: tokens and KV, so that the next start does not compute them again."""

import dataclasses
import pathlib

import numpy as np
from jaxtyping import UInt8
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rjax.errors import InvalidConfigError, InvalidRequestError

_FORMAT = "rjax-prefix-2"
_DTYPES = {"tokens": "I32", "kv": "U8", "state": "U8"}  # of safetensors


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixOrigin:
    """Everything that KV depends on besides the tokens.

    Attributes:
        model: fingerprint of configuration and weights.
        dtype: name of the KV's dtype.
        page_size: tokens per page.
    """

    model: str
    dtype: str
    page_size: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SavedPrefix:
    """The content of a file.

    Attributes:
        name: the name under which the prefix was saved.
        token_ids: the tokens of the prefix.
        kv: KV of its pages, [X, pools, K, S, H].
        text: the text that the tokens were made from, or None.
        state: bytes of the state behind its last full page; None for a model without states.
    """

    name: str
    token_ids: list[int]
    kv: np.ndarray
    text: str | None
    state: UInt8[np.ndarray, " X"] | None = None


def save_prefix_file(path: str | pathlib.Path, prefix: SavedPrefix, origin: PrefixOrigin) -> None:
    """Write a prefix and its origin.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    metadata = {
        "format": _FORMAT,
        "name": prefix.name,
        "model": origin.model,
        "dtype": origin.dtype,
        "page_size": str(origin.page_size),
    }
    if prefix.text is not None:
        metadata["text"] = prefix.text
    # As bytes: NumPy has no bfloat16 of its own.
    tensors = {
        "tokens": np.asarray(prefix.token_ids, np.int32),
        "kv": np.ascontiguousarray(prefix.kv).view(np.uint8),
    }
    if prefix.state is not None:
        tensors["state"] = prefix.state
    try:
        save_file(tensors, str(path), metadata)
    except (OSError, SafetensorError) as error:
        raise InvalidRequestError(f"the prefix cannot be written to {path}: {error}") from error


def load_prefix_file(
    path: str | pathlib.Path, origin: PrefixOrigin, dtype: np.dtype
) -> SavedPrefix:
    """Read a saved prefix whose KV has this dtype.

    Raises:
        InvalidConfigError: the file is no prefix, or belongs to another model, dtype or page size.
    """
    try:
        with safe_open(str(path), "numpy") as file:
            metadata = file.metadata() or {}
            known = _DTYPES.keys() & set(file.keys())
            for name in known:
                found = file.get_slice(name).get_dtype()
                if found != _DTYPES[name]:
                    raise InvalidConfigError(
                        f"{path} holds {name} of dtype {found}, not {_DTYPES[name]}; save the "
                        "prefix again"
                    )
            tensors = {name: file.get_tensor(name) for name in known}
    except (OSError, SafetensorError) as error:
        raise InvalidConfigError(f"{path} cannot be read as a prefix: {error}") from error
    if metadata.get("format") != _FORMAT or not tensors.keys() >= {"tokens", "kv"}:
        raise InvalidConfigError(f"{path} holds no prefix; give a file of save_prefix")
    for field, wanted in dataclasses.asdict(origin).items():
        if metadata.get(field) != str(wanted):
            raise InvalidConfigError(
                f"{path} was saved with {field} {metadata.get(field)!r}; this engine has "
                f"{str(wanted)!r}: save the prefix again"
            )
    tokens, kv = tensors["tokens"], tensors["kv"]
    flat = all(tensors[name].ndim == 1 for name in tensors.keys() - {"kv"})
    if kv.ndim == 0 or kv.shape[-1] % dtype.itemsize or not flat:
        raise InvalidConfigError(f"{path} is damaged; save the prefix again")
    return SavedPrefix(
        metadata.get("name", ""),
        tokens.tolist(),
        kv.view(dtype),
        metadata.get("text"),
        tensors.get("state"),
    )
