"""The kernel of quantised experts on Hopper."""

from jaxtyping import Array

from rjax.models.schemes import Scaled
from rjax.models.schemes.grouped import is_interleaved
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
    for scheme, block, depth in (
        (problem.scheme, problem.scale_block, problem.depth),
        (problem.down_scheme, problem.down_scale_block, problem.columns[-1]),
    ):
        if not isinstance(scheme, Scaled):
            return "unquantised weights"
        if scheme.zero_points:
            return f"{scheme.name} with zero points; it takes symmetric values"
        if scheme.values != "int8" and not is_interleaved(scheme, (depth,)):
            return f"{depth} inputs of {scheme.name} in plain order"
        if scheme.block[1] is None:
            blocks.append(None)
            continue
        assert block is not None
        of_outputs = block[0] > 1
        if scheme.values == "int8" or of_outputs != (scheme.values == "fp8"):
            return f"scales of {block[0]} x {block[1]} {scheme.name}"
        blocks.append(block)
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
    assert isinstance(problem.scheme, Scaled) and isinstance(problem.down_scheme, Scaled)
    if problem.needs_partial and down_bias is not None:
        down_bias = down_bias[0]
    clamped = activation.clamped if activation.clamp is not None else None
    return mosaic.experts(
        h,
        chosen,
        weights,
        grouped_weight(problem.scheme, up, 2),
        grouped_weight(problem.down_scheme, down, 1),
        up_bias,
        down_bias,
        clamped,
        num_elsewhere=problem.experts_elsewhere,
    )


def grouped_weight(scheme: Scaled, leaves: dict[str, Array], matrices: int) -> GroupedWeight:
    """The kernel operand of the leaves of a `GroupedLinear` with ``matrices`` matrices."""
    values, scale = leaves["weight"], leaves["weight_scale"]
    J, depth = values.shape[0], values.shape[-1]
    of_depth = () if scheme.block[1] is None else scale.shape[1:2]
    return GroupedWeight(
        values.reshape(J, matrices, -1, depth),
        scale.reshape(J, *of_depth, matrices, -1),
        kind=scheme.values,
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
