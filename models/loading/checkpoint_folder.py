"""The safetensors files of a model folder."""

from pathlib import Path

from rjax.models.errors import CheckpointError
from rjax.models.loading.config_file import read_json
from rjax.models.loading.safetensors_header import TensorEntry, read_header

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Read the headers of the folder's safetensors files; return all tensors by name.

    Raises CheckpointError if there are no safetensors weights, if a shard is missing, malformed or
    outside the folder, or if a tensor appears twice or contradicts the index.
    """
    index = folder / _INDEX
    weight_map = _read_index(index) if index.is_file() else None
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
    else:
        names = _files_without_index(folder)
    tensors: dict[str, TensorEntry] = {}
    for name in names:
        for entry in read_header(_inside(folder, name)).values():
            if entry.name in tensors:
                raise CheckpointError(
                    f"tensor {entry.name!r} is in both {tensors[entry.name].file.name} and {name} "
                    f"of {folder}; remove the file that does not belong there"
                )
            tensors[entry.name] = entry
    for tensor, name in (weight_map or {}).items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise CheckpointError(
                f"{index} places tensor {tensor!r:.200} in {name}, which does not hold it; "
                "download the folder again"
            )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; expected tensor names to file names")
    for name in weight_map.values():
        plain = isinstance(name, str) and name.endswith(".safetensors")
        if not plain or Path(name).name != name or "\\" in name or "\0" in name:
            raise CheckpointError(
                f"{index} names the shard {name!r:.200}; expected the plain name of a .safetensors "
                "file in the same folder"
            )
    return weight_map


def _files_without_index(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in found:
        return ["model.safetensors"]
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(
            f"{folder} has {len(found)} safetensors files and no {_INDEX}; add the index"
        )
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights only as {pickles[0]}, a pickle, which can run code and is "
            "never opened; convert it to safetensors or use a repository that has them"
        )
    raise CheckpointError(f"{folder} has no *.safetensors weights; download the whole model")


def _inside(folder: Path, name: str) -> Path:
    """Path of the file; a symlink may only point into the blobs folder of the hub cache."""
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{folder} lacks the shard {name}; download the folder again")
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    target = path.resolve()
    if target.parent not in allowed:
        raise CheckpointError(
            f"{path} is a link to {target}, outside the model folder; put the file itself there"
        )
    return path
