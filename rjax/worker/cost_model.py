"""Cost models fitted to a device and kept on disk, so that every engine there can use them.

``python -m bench.kernels.cost_model`` times the kernels and writes them.
"""

import dataclasses
import json
import logging
import math
import pathlib
import re
import warnings
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from rjax.models import ModelConfig
from rjax.pallas_kernels.attention.plan.host import CostModel
from rjax.worker.backend import Backend

FOLDER = "~/.cache/rjax/cost_models"
_FIT = "python -m bench.kernels.cost_model"
_log = logging.getLogger("rjax")


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """What a fit holds for: one kind of device, and the kernels that run on it.

    Attributes:
        device: name of the device, as JAX gives it.
        backend: name of the attention backend.
        N, K, H: query heads and KV heads of one device, head dim.
        dtype: name of the KV's dtype.
        tile_rows: rows of a multi-row item.
    """

    device: str
    backend: str
    N: int
    K: int
    H: int
    dtype: str
    tile_rows: int

    @property
    def file_name(self) -> str:
        """Name of the fit's own file; ``tile_rows`` follows from the rest."""
        words = (self.device, self.backend, f"N{self.N}", f"K{self.K}", f"H{self.H}", self.dtype)
        return re.sub(r"[^a-z0-9]+", "-", "_".join(words).lower(), flags=re.ASCII) + ".json"


def fitted_cost_model(
    backend: Backend, model: ModelConfig, dtype: DTypeLike, mesh: Mesh
) -> CostModel | None:
    """The cost model fitted to these devices and heads, or None where none is kept.

    A file that is no such fit, or another device's, is left alone with a warning.

    Args:
        backend: the attention backend and its tuning.
        model: the model whose heads the devices of the mesh share out.
        dtype: dtype of the KV.
        mesh: the devices.
    """
    key = Fitted(
        device=mesh.devices.flat[0].device_kind,
        backend=backend.name,
        N=model.num_heads // mesh.size,
        K=model.num_kv_heads // mesh.size,
        H=model.head_dim,
        dtype=jnp.dtype(dtype).name,
        tile_rows=backend.tuning.tile_rows,
    )
    path = pathlib.Path(FOLDER).expanduser() / key.file_name
    try:
        found = read_cost_model(path, key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the cost model in {path} is not used: {error}; fit it again by {_FIT}, or delete it",
            stacklevel=2,
        )
        return None
    _log.info("sharing is decided by the cost model in %s", path)
    return found


def read_cost_model(path: pathlib.Path, key: Fitted) -> CostModel:
    """Read a fit.

    Raises:
        OSError: no file, or one that cannot be read.
        ValueError: the file is no fit, or one for something else.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    for name, wanted in dataclasses.asdict(key).items():
        if found.get(name) != wanted:
            raise ValueError(f"it is for {name} {found.get(name)!r}, and this is {wanted!r}")
    costs: dict[str, float] = {}
    for field in dataclasses.fields(CostModel):
        value = found.get(field.name)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{field.name} is {value!r}, and must be a number of at least 0")
        costs[field.name] = float(value)
    if costs["single_row_item"] + costs["single_row_token"] == 0:
        raise ValueError("single-row items in it cost nothing")
    return CostModel(**costs)


def keep_cost_model(key: Fitted, model: CostModel, **more: Any) -> pathlib.Path:
    """Write a fit where engines look for it; ``more`` tells how it was made. Returns the file."""
    folder = pathlib.Path(FOLDER).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / key.file_name
    found = dataclasses.asdict(key) | dataclasses.asdict(model) | more
    # Written aside first: an engine that starts meanwhile reads the old one or the new one.
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
    return path
