"""Resolve a model name to a local folder."""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from rjax.models.errors import CheckpointError

_SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHTS = ("*.safetensors",)
# Subfolders hold other formats of the same weights; consolidated files duplicate them.
_UNWANTED = ("*/*", "consolidated*")
_MAX_NAME = 4096


def resolve_folder(
    model: str | Path,
    revision: str | None = None,
    token: str | None = None,
    *,
    weights: bool = True,
) -> Path:
    """The local folder of a model: the given folder, or a hub id downloaded to the hub cache.

    HF_HOME, HF_ENDPOINT and the other settings of huggingface_hub apply. Only JSON and tokenizer
    files are downloaded, and with ``weights`` the safetensors files.

    Raises CheckpointError with a one-line message if there is no such model.
    """
    name = str(model)
    if not name or len(name) > _MAX_NAME:
        raise CheckpointError(
            f"the model name has {len(name)} characters; give a model folder or a hub id"
        )
    try:
        path = Path(model).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"model {name!r} cannot be looked up: {error}") from None
    if is_folder:
        if revision is not None:
            raise CheckpointError(
                f"{path} is a local folder, which has no revision {revision!r}; leave it out"
            )
        return path
    if exists:
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json")
    if isinstance(model, Path) or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise CheckpointError(f"{name} does not exist; give a model folder or a hub id")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                token=token,
                allow_patterns=[*_SETTINGS, *(_WEIGHTS if weights else ())],
                ignore_patterns=list(_UNWANTED),
            )
        )
    except HFValidationError:
        reason = "it is neither a folder here nor a valid hub id (owner/name)"
    except GatedRepoError:
        reason = "access is gated: accept its terms on the hub and give a token"
    except RepositoryNotFoundError:
        reason = "it is neither a folder here nor a repository on the hub that you can read"
    except RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        reason = (
            "it is not in the hub cache and the hub cannot be reached: check the network, "
            "HF_ENDPOINT and HF_HUB_OFFLINE, or give a local folder"
        )
    except (HfHubHTTPError, OSError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    raise CheckpointError(f"model {name!r:.200} cannot be loaded: {reason}")
