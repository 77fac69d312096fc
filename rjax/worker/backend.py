"""The attention backends, chosen once and by name when an engine starts."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from models import ModelConfig
from pallas_kernels.attention import mosaic as attention_mosaic
from pallas_kernels.attention import xla as attention_xla
from pallas_kernels.attention.joining import Joining
from pallas_kernels.attention.mosaic import config as mosaic_config
from pallas_kernels.attention.planner import CostModel
from pallas_kernels.attention.triton import config as triton_config
from pallas_kernels.mosaic_emit import multiprocessors
from pallas_kernels.relay_fusion.mosaic import merge_in_place
from pallas_kernels.unmerged_attention import UnmergedAttention
from rjax.errors import InvalidConfigError
from rjax.worker.kernels import Dispatcher
from rjax.worker.kernels.row_counts import streamed_rows

_log = logging.getLogger("rjax")
_MULTIPROCESSORS = 128  # about, of a Hopper GPU: many-row items mostly come in powers of two
_FEW_HEADS = 32  # rows times KV heads that fill them only when cut finely
_WGMMA_ROWS = 128  # of a wide item in the mosaic kernel: two consumer warpgroups of 64


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """The kernels of one backend and how its work is best cut.

    Attributes:
        name: as given in the configuration.
        dispatcher: chooses the other kernels.
        streamed_rows: numbers of rows at which kernels that stream weights take every projection.
        paged_attention: see ``pallas_kernels``.
        unmerged_attention: the same before its partial results are merged, or None.
        merge: merges those.
        prepare: (plan, positions, (N, K) of a device) to what ``paged_attention`` takes as its
            plan, once a step.
        tile_rows: rows of a many-row item at most; see ``item_rows``.
        split_tokens: items are cut at multiples of this many tokens, or of a multiple of it in
            engines for very long sequences that join no cuts.
        fine_split_tokens, fine_rows: steps of at most so many rows are cut at so many tokens
            instead, or they would leave multiprocessors without work.
        joining: of the ``PlanShape``: whether and how far cuts are joined.
        cost_model: decides in "auto" mode which groups share their reads, where none has been
            fitted to the device and its heads.
    """

    name: str
    dispatcher: Dispatcher
    streamed_rows: tuple[int, ...]
    paged_attention: Callable[..., Any]
    unmerged_attention: Callable[..., UnmergedAttention] | None
    merge: Callable[[UnmergedAttention], Any] | None
    prepare: Callable[..., Any]
    tile_rows: int
    split_tokens: int
    fine_split_tokens: int
    fine_rows: int
    joining: Joining | None
    cost_model: CostModel

    def cut_of(self, rows: int) -> int:
        """Tokens at whose multiples the items of a step of so many rows are cut."""
        return self.fine_split_tokens if rows <= self.fine_rows else self.split_tokens

    def item_rows(self, rows: int) -> int:
        """Rows of a many-row item in a step of so many rows: kernels for few have less code."""
        return min(self.tile_rows, rows)

    def padded_rows(self, rows: int) -> int:
        """Rows of a decode step that has so many: of few, as many as the kernels take."""
        return next((count for count in self.streamed_rows if rows <= count), rows)

    @property
    def spare_rows(self) -> int:
        """Rows up to which a step takes little longer than one of a few: it waits for the weights.
        0 where that is not known."""
        return max(self.streamed_rows, default=0)


def backends_on(compute_capability: float | None) -> tuple[str, ...]:
    """Names of the backends whose kernels a GPU of this capability runs, the fastest first.

    None is any other device. That a model or an installation suits them is not said.
    """
    match None if compute_capability is None else int(compute_capability):
        case 9:
            return ("mosaic", "triton", "xla")
        case 8:
            return ("triton", "xla")
        case _:
            return ("xla",)


def choose_backend(
    name: str,
    *,
    platform: str,
    compute_capability: float | None,
    model: ModelConfig,
    dtype: DTypeLike,
    page_size: int,
    kv_dtype: DTypeLike | None = None,
    devices: int = 1,
) -> Backend:
    """The backend of this name; "auto" is the fastest that runs this model here.

    Args:
        name: "auto", "mosaic", "triton" or "xla". "auto" is mosaic where it can run, else triton
            where it can, else xla; on a GPU the log then says why the others cannot.
        platform: of the devices, "cpu" or "gpu".
        compute_capability: of a GPU; 9.0 is Hopper, whose instructions the mosaic kernels use, 8.x
            Ampere and Ada.
        model: whose shapes the kernels must take.
        dtype: of weights.
        page_size: tokens a page.
        kv_dtype: of KV: float8_e4m3fn, or None for ``dtype``.
        devices: that share the model.

    Raises:
        InvalidConfigError: an unknown name, or a backend that cannot run this, and why.
    """
    if name not in ("auto", "mosaic", "triton", "xla"):
        raise InvalidConfigError(f"backend is {name!r}; choose one of auto, mosaic, triton, xla")
    if name == "xla" or (name == "auto" and platform != "gpu"):
        return _xla()
    fp8 = kv_dtype is not None and jnp.dtype(kv_dtype) == jnp.float8_e4m3fn
    no_mosaic = _mosaic_cannot(platform, compute_capability, model, dtype, page_size, fp8)
    if name != "triton" and no_mosaic is None:
        return _mosaic(model, dtype, devices)
    if name == "mosaic":
        raise InvalidConfigError(f"the mosaic backend cannot run this: {no_mosaic}; use auto")
    no_triton = _triton_cannot(platform, compute_capability, model, dtype)
    if no_triton is None:
        if name == "auto":
            _log.info("attention by the triton backend: mosaic cannot: %s", no_mosaic)
        return _triton(model)
    if name == "triton":
        raise InvalidConfigError(f"the triton backend cannot run this: {no_triton}; use auto")
    _log.warning(
        "attention by the slower xla backend: the mosaic backend cannot: %s; triton cannot: %s",
        no_mosaic,
        no_triton,
    )
    return _xla()


def _mosaic_cannot(
    platform: str,
    compute_capability: float | None,
    model: ModelConfig,
    dtype: DTypeLike,
    page_size: int,
    fp8: bool,
) -> str | None:
    """Why the mosaic kernels cannot serve this, or None."""
    if platform != "gpu" or "mosaic" not in backends_on(compute_capability):
        return "it needs a Hopper GPU (compute capability 9.0)"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it takes dtype bfloat16 and float16, not {jnp.dtype(dtype).name}"
    dims = mosaic_config.FP8_HEAD_DIMS if fp8 else mosaic_config.HEAD_DIMS
    if model.head_dim not in dims:
        allowed, given = ", ".join(map(str, dims)), ", with KV in fp8," if fp8 else ""
        return f"it takes{given} head dims {allowed}, not {model.head_dim}"
    if page_size not in (16, 32) and page_size % 64:
        return f"it takes pages of 16, 32 and multiples of 64 tokens, not {page_size}"
    group = model.num_heads // model.num_kv_heads
    if group > _WGMMA_ROWS // 2:
        return f"it takes at most {_WGMMA_ROWS // 2} query heads a KV head, not {group}"
    return None


def _triton_cannot(
    platform: str,
    compute_capability: float | None,
    model: ModelConfig,
    dtype: DTypeLike,
) -> str | None:
    """Why the Triton kernels cannot serve this, or None. They take pages of any size."""
    if platform != "gpu" or "triton" not in backends_on(compute_capability):
        return "it needs an Ampere, Ada or Hopper GPU (compute capability 8.0 to 9.0)"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it takes dtype bfloat16 and float16, not {jnp.dtype(dtype).name}"
    dims = triton_config.HEAD_DIMS
    if model.head_dim not in dims:
        return (
            f"it takes head dims from {dims[0]} to {dims[-1]} in steps of {dims.step}, "
            f"not {model.head_dim}"
        )
    group = model.num_heads // model.num_kv_heads
    if group > triton_config.WIDE_ROWS:
        return f"it takes at most {triton_config.WIDE_ROWS} query heads a KV head, not {group}"
    try:
        import jax_triton  # noqa: F401
    except ImportError as error:
        return f'jax-triton cannot be imported ({error}); pip install "rjax[triton]"'
    return None


def _unmerged_attention(*operands: Any, **options: Any) -> UnmergedAttention:
    out, part, part_lse, merge_indptr = attention_mosaic.unmerged_attention(*operands, **options)
    return UnmergedAttention(out, part, part_lse, merge_indptr)


def _merge(attention: UnmergedAttention) -> Any:
    lse = jnp.zeros(attention.shape[:2], jnp.float32)  # of rows that are in place: nobody reads it
    rest = attention.part, attention.part_lse, attention.merge_indptr
    return merge_in_place(attention.out, lse, *rest)[0]


def _mosaic(model: ModelConfig, dtype: DTypeLike, devices: int) -> Backend:
    group = model.num_heads // model.num_kv_heads
    pairs = -(-model.num_kv_heads // 2)  # of KV heads
    dispatcher = Dispatcher.of("mosaic")
    return Backend(
        name="mosaic",
        dispatcher=dispatcher,
        streamed_rows=streamed_rows(dispatcher, model, dtype, devices),
        paged_attention=attention_mosaic.paged_attention,
        unmerged_attention=_unmerged_attention,
        merge=_merge,
        prepare=attention_mosaic.pack_plan,
        tile_rows=2 * (_WGMMA_ROWS // 2 // group),
        # On an H200; see bench/kernels/README.md.
        split_tokens=256,
        fine_split_tokens=64,
        fine_rows=_FEW_HEADS // model.num_kv_heads,
        joining=Joining(
            least_wide_items=-(-_MULTIPROCESSORS // model.num_kv_heads),
            # A program takes one-row items two heads at a time.
            narrow_lanes=max(1, multiprocessors() // pairs),
            item_tokens=64,  # about: to begin, to end and to merge
            # And wide ones a head at a time.
            wide_lanes=model.num_kv_heads // pairs,
            paired_rows=_WGMMA_ROWS // 2 // group,
        ),
        # Microseconds: `python -m bench.kernels.cost_model` on an H200, 32 heads over 8 KV heads of
        # 128 dims. Other heads change all four alike.
        cost_model=CostModel(
            narrow_item=0.055, narrow_token=0.00048, wide_item=0.28, wide_token=0.00097
        ),
    )


def _triton(model: ModelConfig) -> Backend:
    # Imports Triton, which is not installed everywhere.
    from pallas_kernels.attention.triton import api, pack

    return Backend(
        name="triton",
        dispatcher=Dispatcher.of("triton"),
        streamed_rows=(),
        paged_attention=api.paged_attention,
        unmerged_attention=None,
        merge=None,
        prepare=lambda plan, positions, heads: pack.pack_plan(plan, heads),
        tile_rows=triton_config.WIDE_ROWS // (model.num_heads // model.num_kv_heads),
        split_tokens=512,
        fine_split_tokens=512,
        fine_rows=0,
        joining=None,
        cost_model=CostModel(narrow_item=1.0, narrow_token=0.01, wide_item=1.2, wide_token=0.012),
    )


def _xla() -> Backend:
    return Backend(
        name="xla",
        dispatcher=Dispatcher.of("xla"),
        streamed_rows=(),
        paged_attention=attention_xla.paged_attention,
        unmerged_attention=None,
        merge=None,
        prepare=lambda plan, positions, heads: plan,
        tile_rows=16,
        split_tokens=128,
        fine_split_tokens=128,
        fine_rows=0,
        joining=None,
        cost_model=CostModel(narrow_item=1.0, narrow_token=0.05, wide_item=2.0, wide_token=0.15),
    )
