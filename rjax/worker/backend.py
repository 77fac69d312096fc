"""The attention backends, chosen once and by name when an engine starts."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from models import ModelConfig
from pallas_kernels import one_row, streamed_product
from pallas_kernels.attention import mosaic as attention_mosaic
from pallas_kernels.attention import xla as attention_xla
from pallas_kernels.attention.mosaic import config as mosaic_config
from pallas_kernels.attention.planner import CostModel
from pallas_kernels.attention.split_policy import SplitPolicy
from pallas_kernels.attention.triton import config as triton_config
from pallas_kernels.gated_activation import mosaic as activation_mosaic
from pallas_kernels.gated_activation import xla as activation_xla
from pallas_kernels.gated_product import mosaic as gated_product_mosaic
from pallas_kernels.kv_write import mosaic as kv_write_mosaic
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.mosaic_emit import multiprocessors
from pallas_kernels.residual_norm import mosaic as norm_mosaic
from pallas_kernels.residual_norm import xla as norm_xla
from pallas_kernels.split_product import mosaic as split_product_mosaic
from rjax.errors import InvalidConfigError

_log = logging.getLogger("rjax")
_MULTIPROCESSORS = 128  # about, of a Hopper GPU: many-row items mostly come in powers of two
_FEW_HEADS = 32  # rows times KV heads that fill them only when cut finely
_WGMMA_ROWS = 128  # of a wide item in the mosaic kernel: two consumer warpgroups of 64


@dataclasses.dataclass(frozen=True, slots=True)
class OneRow:
    """Kernels of steps of one row, each the one before and a product in one launch.

    Attributes:
        unmerged_attention: ``paged_attention`` up to its relay fusion, which is in
        merged_product: that, and ``split_product``.
        normed_product, normed_gated_product: ``add_rms_norm``, and a product of its norm.
    """

    unmerged_attention: Callable[..., Any]
    merged_product: Callable[..., Any]
    normed_product: Callable[..., Any]
    normed_gated_product: Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """The kernels of one backend and how its work is best cut.

    Attributes:
        name: as given in the configuration.
        paged_attention, rotate_and_write, add_rms_norm, gated_silu: see ``pallas_kernels``.
        split_product: products in parts, in steps of few rows (``streams_products``), for
            ``rotate_and_write`` and ``add_rms_norm`` to sum; None where XLA does all products.
        gated_product: the product before ``gated_silu`` and it, in the same steps, or None.
        one_row: for steps of one row, or None where those are padded.
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
    paged_attention: Callable[..., Any]
    rotate_and_write: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    gated_silu: Callable[..., Any]
    split_product: Callable[..., Any] | None
    gated_product: Callable[..., Any] | None
    one_row: OneRow | None
    prepare: Callable[..., Any]
    tile_rows: int
    split_tokens: int
    fine_split_tokens: int
    fine_rows: int
    joining: SplitPolicy | None
    cost_model: CostModel

    def cut_of(self, rows: int) -> int:
        """Tokens at whose multiples the items of a step of so many rows are cut."""
        return self.fine_split_tokens if rows <= self.fine_rows else self.split_tokens

    def item_rows(self, rows: int) -> int:
        """Rows of a many-row item in a step of so many rows: kernels for few have less code."""
        return min(self.tile_rows, rows)

    def streams_products(self, rows: int) -> bool:
        """Whether a step of so many rows has products by ``split_product``."""
        return self.split_product is not None and rows in self._streamed_rows

    def padded_rows(self, rows: int) -> int:
        """Rows of a decode step that has so many: of few, as many as ``split_product`` takes."""
        if self.split_product is None or rows > streamed_product.ROWS[-1]:
            return rows
        return next(count for count in self._streamed_rows if rows <= count)

    @property
    def spare_rows(self) -> int:
        """Rows up to which a step takes little longer than one of a few: it waits for the weights.
        0 where that is not known."""
        return streamed_product.ROWS[-1] if self.split_product is not None else 0

    @property
    def _streamed_rows(self) -> tuple[int, ...]:
        rows = streamed_product.ROWS
        return rows if self.one_row is not None else rows[1:]


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
        return _mosaic(model, fp8)
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
    if group > triton_config.BLOCK_M:
        return f"it takes at most {triton_config.BLOCK_M} query heads a KV head, not {group}"
    try:
        import jax_triton  # noqa: F401
    except ImportError as error:
        return f'jax-triton cannot be imported ({error}); pip install "rjax[triton]"'
    return None


def _streams_products(model: ModelConfig) -> bool:
    """Whether the kernels take the products of this model, and others what they give."""
    D, H = model.hidden_size, model.head_dim
    if model.rope is None or model.layer_norm or D % 128:
        return False
    queries, projections = model.num_heads * H, (model.num_heads + 2 * model.num_kv_heads) * H
    matrices = ((D, projections), (queries, D), (model.intermediate_size, D))
    rows = streamed_product.ROWS[1]
    return all(streamed_product.refusal(rows, *matrix) is None for matrix in matrices)


_ONE_ROW = OneRow(
    unmerged_attention=attention_mosaic.unmerged_attention,
    merged_product=split_product_mosaic.merged_product,
    normed_product=split_product_mosaic.normed_product,
    normed_gated_product=gated_product_mosaic.normed_gated_product,
)


def _takes_one_row(model: ModelConfig) -> bool:
    """Whether the kernels of one row take a model whose products they take."""
    D, F, E = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    return (
        D <= one_row.MOST_COLUMNS
        and all(depth % one_row.DEPTH_UNIT == 0 for depth in (D, F, E))
        and all(split_product_mosaic.run(depth, D) <= one_row.MOST_COLUMNS for depth in (F, E))
    )


def _mosaic(model: ModelConfig, fp8: bool) -> Backend:
    group, streams = model.num_heads // model.num_kv_heads, _streams_products(model)
    pairs = -(-model.num_kv_heads // 2)  # of KV heads
    # Numbers of 8 bits are written in pairs, of both halves of what rotates.
    own_write = model.rope is not None and not (fp8 and model.rope.rotary_dim % 4)
    return Backend(
        name="mosaic",
        paged_attention=attention_mosaic.paged_attention,
        rotate_and_write=(kv_write_mosaic if own_write else kv_write_xla).rotate_and_write,
        add_rms_norm=(norm_mosaic if model.hidden_size % 128 == 0 else norm_xla).add_rms_norm,
        gated_silu=(
            activation_mosaic if model.intermediate_size % 128 == 0 else activation_xla
        ).gated_silu,
        split_product=split_product_mosaic.split_product if streams else None,
        gated_product=gated_product_mosaic.gated_product if streams else None,
        one_row=_ONE_ROW if streams and _takes_one_row(model) else None,
        prepare=attention_mosaic.pack_plan,
        tile_rows=2 * (_WGMMA_ROWS // 2 // group),
        # On an H200; see bench/kernels/README.md.
        split_tokens=256,
        fine_split_tokens=64,
        fine_rows=_FEW_HEADS // model.num_kv_heads,
        joining=SplitPolicy(
            min_multi_row_items=-(-_MULTIPROCESSORS // model.num_kv_heads),
            # A program takes one-row items two heads at a time.
            single_row_lanes=max(1, multiprocessors() // pairs),
            item_overhead=64,  # about: to begin, to end and to merge
            # And wide ones a head at a time.
            multi_row_lanes=model.num_kv_heads // pairs,
            single_lane_rows=_WGMMA_ROWS // 2 // group,
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
        paged_attention=api.paged_attention,
        rotate_and_write=kv_write_xla.rotate_and_write,
        add_rms_norm=norm_xla.add_rms_norm,
        gated_silu=activation_xla.gated_silu,
        split_product=None,
        gated_product=None,
        one_row=None,
        prepare=lambda plan, positions, heads: pack.pack_plan(plan, heads),
        tile_rows=triton_config.BLOCK_M // (model.num_heads // model.num_kv_heads),
        split_tokens=512,
        fine_split_tokens=512,
        fine_rows=0,
        joining=None,
        cost_model=CostModel(narrow_item=1.0, narrow_token=0.01, wide_item=1.2, wide_token=0.012),
    )


def _xla() -> Backend:
    return Backend(
        name="xla",
        paged_attention=attention_xla.paged_attention,
        rotate_and_write=kv_write_xla.rotate_and_write,
        add_rms_norm=norm_xla.add_rms_norm,
        gated_silu=activation_xla.gated_silu,
        split_product=None,
        gated_product=None,
        one_row=None,
        prepare=lambda plan, positions, heads: plan,
        tile_rows=16,
        split_tokens=128,
        fine_split_tokens=128,
        fine_rows=0,
        joining=None,
        cost_model=CostModel(narrow_item=1.0, narrow_token=0.05, wide_item=2.0, wide_token=0.15),
    )
