"""The kernel of `grouped_gemm` for experts that are stored in few bits."""

from rjax.pallas_kernels.experts import grouped_gemm
from rjax.pallas_kernels.experts.base import ExpertsProblem
from rjax.pallas_kernels.kernel import HOPPER, Kernel


def _refusal(problem: ExpertsProblem) -> str | None:
    why = grouped_gemm.activation_refusal(problem)
    if why is not None:
        return why
    depth, width = problem.depth, problem.columns[-1]
    blocks = []
    for layout, inputs in ((problem.layout, depth), (problem.down_layout, width)):
        if layout is None:
            return "unquantised weights"
        if layout.zero_points:
            return f"{layout.values} with zero points; it takes symmetric values"
        if layout.values != "int8" and not layout.is_interleaved(inputs):
            return f"{inputs} inputs of {layout.values} in plain order"
        if layout.channels:
            blocks.append(None)
            continue
        rows, columns = layout.block
        if layout.values == "int8" or (rows > 1) != (layout.values == "fp8"):
            return f"scales of {rows} x {columns} {layout.values}"
        blocks.append(layout.block)
    return grouped_gemm.refusal(depth, width, problem.dtype, tuple(blocks))


KERNEL = Kernel(
    "mosaic.quantised_experts",
    "experts",
    "mosaic",
    _refusal,
    grouped_gemm.run,
    pads_rows=True,
    compute_capabilities=HOPPER,
)
