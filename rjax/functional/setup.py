"""The static part of a program: the model's structure, the kernels and the fixed sizes."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rjax.batch.page_groups import PageGroups, with_states
from rjax.errors import InvalidConfigError
from rjax.models import Decoder, ModelConfig, bytes_of_device
from rjax.models.sharding import check_mesh, single_device_mesh
from rjax.pallas_kernels.attention.plan.host import PlanShape, Sharing, choose_kv_split_size
from rjax.pallas_kernels.attention.plan.splits import prefix_split_size
from rjax.worker.backend import Backend, choose_backend, compute_capability
from rjax.worker.cost_model import fitted_cost_model

_MIN_KV_SPLITS = 8  # KV splits of one sequence of full length, if the page size allows


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """Static, hashable settings of a program: close over them or pass them by ``static_argnums``.

    Attributes:
        graph: the model without its weights, as ``nnx.split`` gives it.
        treedef: structure of the weights.
        leaves: shape and dtype of each array of the weights, in order.
        config: shape of the model.
        groups: where each layer has its KV. All groups have the same pages; there are several only
            where layers differ in their heads, which then have attention plans of their own.
        backend: the attention kernels.
        page_size: tokens per page, S.
        max_context: most tokens of a sequence, prompt and output together.
        kv_split_size: tokens of a KV split. ``decode`` shares whole KV splits of a prefix, and
            ``rollout`` all whole pages of a prompt.
        relay: which shared prefixes are read once (RelayAttention).
        mesh: devices over which the KV heads are sharded; a single device if the caller uses its
            own ``shard_map``.
    """

    graph: nnx.GraphDef
    treedef: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]
    config: ModelConfig
    groups: PageGroups
    backend: Backend
    page_size: int
    max_context: int
    kv_split_size: int
    relay: Sharing
    mesh: Mesh

    @property
    def table_pages(self) -> int:
        """Pages of the longest sequence, M."""
        return math.ceil(self.max_context / self.page_size)

    @property
    def pool_heads(self) -> tuple[tuple[int, int], ...]:
        """(K, H) of each layer with KV of its own."""
        return tuple([self.config.layer_heads[i] for i in _layers_with_kv(self.config)])

    def plan_shape(
        self, rows: int, seqs: int, window: int | None = None, *, prefixes: bool = False
    ) -> PlanShape:
        """Shapes of the attention plan of a step with ``rows`` rows of ``seqs`` sequences.

        window: of the layers whose tuning it takes; the plan is of the whole context.
        prefixes: whether the step says where the prefixes of its sequences end.
        """
        whole, tuned = (
            self.backend.plan_shape(
                rows,
                seqs,
                self.max_context,
                self.page_size,
                coalesce=False,
                kv_split_size=min(self.kv_split_size, self._whole),
                window=of,
            )
            for of in (None, window)
        )
        shape = dataclasses.replace(whole, tile_rows=tuned.tile_rows)
        if not prefixes:
            return shape
        tokens = prefix_split_size(
            rows,
            self.max_context,
            shape.tile_rows,
            shape.kv_split_size,
            self.backend.tuning.split_policy,
        )
        return dataclasses.replace(shape, prefix_split_size=tokens)

    @property
    def _whole(self) -> int:
        return self.table_pages * self.page_size


def prepare(
    model: Decoder,
    *,
    max_context: int,
    page_size: int = 64,
    backend: str = "auto",
    relay: str = "auto",
    kv_split_size: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[Setup, Any]:
    """Split a model into its static setup and its weights.

    Args:
        model: any model of ``rjax.models``; its arrays are not copied.
        max_context: most tokens of a sequence, prompt and output together.
        page_size: tokens per page of the KV pool. Hopper's kernels of gated delta nets take 64;
            with other sizes those layers run in plain JAX.
        backend: "auto", "mosaic", "triton" or "xla".
        relay: "on" reads every shared prefix once per step, "off" once per row, "auto" once where
            the cost model expects a gain.
        kv_split_size: tokens of a KV split, a multiple of ``page_size``; None takes the backend's
            tuned size. ``decode`` shares whole KV splits only.
        mesh: mesh with an axis ``tensor``, over which the weights are sharded; None for one device,
            or inside the caller's own ``shard_map``.

    Returns:
        The setup, and the weights as a pytree. Any pytree of the same structure may be passed
        later, for example ``nnx.split(model)[1]`` of the partly trained model.

    Raises:
        InvalidConfigError: this model or device does not support a size or the backend, or the
            devices cannot share the model.
    """
    config = model.config
    if not 2 <= max_context <= config.default_length:
        raise InvalidConfigError(
            f"max_context is {max_context}; this model takes from 2 to "
            f"{config.default_length} tokens"
        )
    if page_size < 1:
        raise InvalidConfigError(f"page_size is {page_size}; give at least 1 token")
    graph, weights = nnx.split(model)
    if mesh is None:
        mesh = single_device_mesh()
    check_mesh(mesh)
    try:
        bytes_of_device(model, mesh)
    except ValueError as error:
        raise InvalidConfigError(
            f"{error}; give the mesh to load_model or init_model too, which copy KV heads that the "
            "devices do not divide"
        ) from error
    device = mesh.devices.flat[0]
    dtype = model.dtype
    chosen = choose_backend(
        backend,
        platform=device.platform,
        compute_capability=compute_capability(device),
        model=config,
        dtype=dtype,
        page_size=page_size,
        devices=mesh.size,
    )
    fitted = fitted_cost_model(chosen, config, dtype, mesh)
    cost_model = fitted or chosen.tuning.cost_model
    modes: dict[str, Sharing] = {"on": "on", "off": "off", "auto": cost_model}
    if relay not in modes:
        raise InvalidConfigError(f"relay is {relay!r}; choose one of auto, on, off")
    if kv_split_size is None:
        # Short contexts get small KV splits, so that most of a short prompt is shared.
        unit = page_size * math.ceil(
            min(chosen.tuning.kv_split_size, max_context / _MIN_KV_SPLITS) / page_size
        )
        kv_split_size = choose_kv_split_size(max_context, unit, None)
    if kv_split_size < 1 or kv_split_size % page_size:
        raise InvalidConfigError(
            f"kv_split_size is {kv_split_size}; it must be a multiple of page_size ({page_size})"
        )
    leaves, treedef = jax.tree.flatten(weights)
    setup = Setup(
        graph=graph,
        treedef=treedef,
        leaves=tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves),
        config=config,
        groups=_groups(config),
        backend=chosen,
        page_size=page_size,
        max_context=max_context,
        kv_split_size=kv_split_size,
        relay=modes[relay],
        mesh=mesh,
    )
    return setup, weights


def _layers_with_kv(config: ModelConfig) -> list[int]:
    """The layers with KV of their own."""
    layers = range(config.num_layers)
    return [i for i in layers if config.kv_source(i) == i and not config.is_linear(i)]


def _groups(config: ModelConfig) -> PageGroups:
    """Where each layer has its KV: in the same pages of an array of its own, or of its source's."""
    own, layers = _layers_with_kv(config), range(config.num_layers)
    differ = len({config.layer_heads[i] for i in own}) > 1
    window_of = config.sliding_windows if differ else (None,) * config.num_layers
    windows = tuple(dict.fromkeys(window_of[i] for i in own))
    places = {layer: (windows.index(window_of[layer]), pool) for pool, layer in enumerate(own)}
    with_kv = [places[config.kv_source(i)] for i in layers if not config.is_linear(i)]
    groups = PageGroups(windows, tuple(with_kv))
    if config.linear is None:
        return groups
    return with_states(groups, config.linear.layers)
