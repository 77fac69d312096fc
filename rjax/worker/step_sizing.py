"""The step shapes of an engine."""

from rjax.batch.page_groups import PageGroups
from rjax.batch.step_limits import StepLimits
from rjax.config import EngineConfig
from rjax.pallas_kernels.attention.plan.host import PlanShape
from rjax.worker.backend import Backend
from rjax.worker.step_shape import ShapeTable


def shape_table(
    config: EngineConfig,
    *,
    backend: Backend,
    max_model_len: int,
    limits: StepLimits,
    growth: int,
    groups: PageGroups,
) -> ShapeTable:
    """The step shapes of a backend.

    Args:
        config: the engine's configuration.
        backend: kernels of the steps.
        max_model_len: tokens of the longest sequence.
        limits: limits of the steps.
        growth: ratio of one step size to the next smaller one.
        groups: page groups of the model.
    """
    page_size = config.cache.page_size

    def plan_shape(rows: int, seqs: int, unpadded_rows: int, window: int | None) -> PlanShape:
        return backend.plan_shape(
            rows,
            seqs,
            max_model_len,
            page_size,
            unpadded_rows=unpadded_rows,
            coalesce=config.relay.mode == "auto",
            kv_split_size=config.relay.kv_split_size,
            window=window,
        )

    return ShapeTable(
        limits=limits,
        max_model_len=max_model_len,
        page_size=page_size,
        plan_shape=plan_shape,
        padded_rows=backend.padded_rows,
        spare_rows=backend.spare_rows,
        growth=growth,
        groups=groups,
    )
