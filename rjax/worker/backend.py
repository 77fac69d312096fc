"""The attention backends, chosen once and by name when an engine starts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pallas_kernels.attention.xla
import pallas_kernels.kv_write.xla
from pallas_kernels.attention.planner import CostModel
from rjax.errors import InvalidConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """The kernels of one backend and how its work is best cut.

    Attributes:
        name: as given in the configuration.
        paged_attention, write_kv, rotate: see the functions of ``pallas_kernels``.
        tile_rows: rows of a many-row item.
        split_tokens: items are cut at multiples of this many tokens, or of a multiple of it in
            engines for very long sequences.
        cost_model: decides in "auto" mode which groups share their reads.
    """

    name: str
    paged_attention: Callable[..., Any]
    write_kv: Callable[..., Any]
    rotate: Callable[..., Any]
    tile_rows: int
    split_tokens: int
    cost_model: CostModel


def choose_backend(name: str, platform: str) -> Backend:
    """The backend of this name; "auto" is the best one for the platform ("cpu" or "gpu").

    Raises:
        InvalidConfigError: unknown name.
    """
    backends = {"xla": _xla}
    if name == "auto":
        name = "xla"
    if name not in backends:
        raise InvalidConfigError(f"backend is {name!r}; choose one of auto, {', '.join(backends)}")
    return backends[name]()


def _xla() -> Backend:
    return Backend(
        name="xla",
        paged_attention=pallas_kernels.attention.xla.paged_attention,
        write_kv=pallas_kernels.kv_write.xla.write_kv,
        rotate=pallas_kernels.kv_write.xla.rotate,
        tile_rows=16,
        split_tokens=128,
        cost_model=CostModel(narrow_item=1.0, narrow_token=0.05, wide_item=2.0, wide_token=0.15),
    )
