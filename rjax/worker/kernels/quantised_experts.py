"""The kernel of quantised experts on Hopper."""

from jaxtyping import Array

from rjax.pallas_kernels.grouped_gemm import mosaic
from rjax.pallas_kernels.grouped_gemm.grouped_weight import GroupedWeight
from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.partial import Partial
from rjax.worker.kernels.experts_problem import ExpertsProblem


def _refusal(problem: ExpertsProblem) -> str | None:
    activation = problem.activation
    if not (activation.is_swiglu or activation.clamp is not None):
        return "it takes silu with a gate"
    blocks = []
    for layout, depth in (
        (problem.layout, problem.depth),
        (problem.down_layout, problem.columns[-1]),
    ):
        if layout is None:
            return "unquantised weights"
        if layout.zero_points:
            return f"{layout.values} with zero points; it takes symmetric values"
        if layout.values != "int8" and not layout.is_interleaved(depth):
            return f"{depth} inputs of {layout.values} in plain order"
        if layout.channels:
            blocks.append(None)
            continue
        outputs, inputs = layout.block
        if layout.values == "int8" or (outputs > 1) != (layout.values == "fp8"):
            return f"scales of {outputs} x {inputs} {layout.values}"
        blocks.append(layout.block)
    return mosaic.refusal(problem.depth, problem.columns[-1], problem.dtype, tuple(blocks))


def _run(
    problem: ExpertsProblem,
    h: Array,
    chosen: Array,
    weights: Array,
    up: dict[str, Array],
    down: dict[str, Array],
    up_bias: Array | None,
    down_bias: Array | None,
) -> Partial:
    activation = problem.activation
    assert problem.layout is not None and problem.down_layout is not None
    if problem.needs_partial and down_bias is not None:
        down_bias = down_bias[0]
    clamped = activation.clamped if activation.clamp is not None else None
    return mosaic.experts(
        h,
        chosen,
        weights,
        grouped_weight(problem.layout.values, up, 2),
        grouped_weight(problem.down_layout.values, down, 1),
        up_bias,
        down_bias,
        clamped,
        num_elsewhere=problem.experts_elsewhere,
    )


def grouped_weight(kind: str, leaves: dict[str, Array], matrices: int) -> GroupedWeight:
    """The kernel operand of the leaves of experts with ``matrices`` matrices of values ``kind``."""
    values, scale = leaves["weight"], leaves["weight_scale"]
    J, depth = values.shape[0], values.shape[-1]
    of_depth = scale.shape[1:2] if scale.ndim == values.ndim else ()
    return GroupedWeight(
        values.reshape(J, matrices, -1, depth),
        scale.reshape(J, *of_depth, matrices, -1),
        kind=kind,
    )


QUANTISED_EXPERTS = Kernel(
    "mosaic.quantised_experts",
    "experts",
    "mosaic",
    _refusal,
    _run,
    pads_rows=True,
    compute_capabilities=HOPPER,
)
