"""What is compiled in: the model's structure, the kernels and the fixed sizes."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models import Decoder, ModelConfig
from models.sharding import check_mesh, single_device_mesh
from pallas_kernels.attention.planner import PlanShape, Sharing, choose_kv_split_size
from rjax.errors import InvalidConfigError
from rjax.worker.backend import Backend, choose_backend
from rjax.worker.cost_model import fitted_cost_model

_LEAST_CUTS = 8  # items of one sequence at full length, as far as pages allow


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """Static and hashable: close over it, or name it in ``static_argnums``.

    Attributes:
        graph: the model without its weights, as ``nnx.split`` gives it.
        config: shape of the model.
        backend: the attention kernels.
        page_size: S.
        max_context: most tokens of a sequence, prompt and output together.
        split_tokens: attention is cut at multiples of so many tokens; only whole cuts are shared.
        sharing: which shared beginnings are read once.
        mesh: devices that share the KV heads; of one device where the caller maps over devices
            itself.
    """

    graph: nnx.GraphDef
    config: ModelConfig
    backend: Backend
    page_size: int
    max_context: int
    split_tokens: int
    sharing: Sharing
    mesh: Mesh

    @property
    def table_pages(self) -> int:
        """M, pages of the longest sequence."""
        return math.ceil(self.max_context / self.page_size)

    def plan_shape(self, rows: int, seqs: int) -> PlanShape:
        """Shapes of the plan of a step with so many rows."""
        return self.backend.plan_shape(
            rows,
            seqs,
            self.max_context,
            self.page_size,
            coalesce=False,
            kv_split_size=min(self.split_tokens, self._whole),
        )

    @property
    def _whole(self) -> int:
        return self.table_pages * self.page_size


def prepare(
    model: Decoder,
    *,
    max_context: int,
    page_size: int = 64,
    backend: str = "auto",
    sharing: str = "auto",
    split_tokens: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[Setup, Any]:
    """Split a model into what is compiled in and its weights.

    Args:
        model: any model of ``models``; its arrays are not copied.
        max_context: most tokens of a sequence, prompt and output together.
        page_size: tokens a page of the KV pool.
        backend: "auto", "mosaic", "triton" or "xla".
        sharing: "on" reads a beginning that rows share once, "off" never, "auto" where it pays.
        split_tokens: cut of the attention's work, a multiple of ``page_size``; None is the
            backend's best. Shorter prompts than this are not shared.
        mesh: with an axis ``tensor``, over which the model's weights are cut; None for one device,
            or inside the caller's own ``shard_map``.

    Returns:
        The setup, and the weights as a pytree. Any pytree of the same structure may be handed in
        later: ``nnx.split(model)[1]`` of the model as trained so far.

    Raises:
        InvalidConfigError: a size or a backend that cannot serve this model here.
    """
    config = model.config
    if not 2 <= max_context <= config.max_position_embeddings:
        raise InvalidConfigError(
            f"max_context is {max_context}; this model takes from 2 to "
            f"{config.max_position_embeddings} tokens"
        )
    if page_size < 1:
        raise InvalidConfigError(f"page_size is {page_size}; give at least 1 token")
    graph, weights = nnx.split(model)
    if mesh is None:
        mesh = single_device_mesh()
    check_mesh(mesh)
    device = mesh.devices.flat[0]
    dtype = jnp.result_type(*jax.tree.leaves(weights))
    capability = getattr(device, "compute_capability", None)
    chosen = choose_backend(
        backend,
        platform=device.platform,
        compute_capability=None if capability is None else float(capability),
        model=config,
        dtype=dtype,
        page_size=page_size,
        devices=mesh.size,
    )
    fitted = fitted_cost_model(chosen, config, dtype, mesh)
    cost_model = fitted or chosen.tuning.cost_model
    modes: dict[str, Sharing] = {"on": "on", "off": "off", "auto": cost_model}
    if sharing not in modes:
        raise InvalidConfigError(f"sharing is {sharing!r}; choose one of auto, on, off")
    if split_tokens is None:
        # Short contexts are cut finely, so that most of a short prompt is shared.
        unit = page_size * math.ceil(
            min(chosen.tuning.kv_split_size, max_context / _LEAST_CUTS) / page_size
        )
        split_tokens = choose_kv_split_size(max_context, unit, None)
    if split_tokens < 1 or split_tokens % page_size:
        raise InvalidConfigError(
            f"split_tokens is {split_tokens}; it must be a multiple of page_size ({page_size})"
        )
    setup = Setup(
        graph=graph,
        config=config,
        backend=chosen,
        page_size=page_size,
        max_context=max_context,
        split_tokens=split_tokens,
        sharing=modes[sharing],
        mesh=mesh,
    )
    return setup, weights
