"""A weight scheme, its format and a kernel from outside the package: int8, a scale a column."""

import dataclasses

import jax.numpy as jnp

from rjax.models import Leaf, StoredTensor, WeightFormat, WeightScheme, register_format
from rjax.models.schemes import UNQUANTISED
from rjax.pallas_kernels.gemm.base import LinearProblem
from rjax.pallas_kernels.kernel import Kernel, register_kernel
from rjax.pallas_kernels.pending import Partial

CALLED: set[tuple[str, int]] = set()  # (axes, rows) of what the kernel computed


@dataclasses.dataclass(frozen=True)
class ToyInt8(WeightScheme):
    """``weight`` in int8, and ``weight_scale`` of the shape of the outputs."""

    name: str = "toy_int8"

    def leaves(self, inputs, outputs, sizes):
        weight = Leaf(f"{inputs} {outputs}", jnp.int8, "zeros")
        return {"weight": weight, "weight_scale": Leaf(outputs, jnp.float32, "ones")}

    def dequantise(self, leaves, depth, dtype):
        return (leaves["weight"] * leaves["weight_scale"]).astype(dtype).reshape(depth, -1)


class ToyFormat(WeightFormat):
    """The two arrays as they are, outputs first."""

    def scheme(self, module):
        return UNQUANTISED if module == "lm_head" else ToyInt8()

    def tensors(self, module, shape):
        axes = ("outputs", "inputs")
        return {
            "weight": StoredTensor(f"{module}.weight", (shape,), ("I8",), axes),
            "scale": StoredTensor(f"{module}.weight_scale", (shape[:1],), ("F32",), axes[:1]),
        }

    def decode(self, stored, target):
        return {"weight": stored["weight"], "weight_scale": stored["scale"]}


def refusal(problem: LinearProblem) -> str | None:
    """Takes its own scheme only."""
    return None if problem.scheme == ToyInt8() else "it takes toy_int8"


def run(problem, h, leaves):
    """Scales the product in place of the weight."""
    CALLED.add((problem.label, problem.rows))
    weight = leaves["weight"].reshape(problem.depth, *problem.columns).astype(jnp.float32)
    product = jnp.tensordot(h.astype(jnp.float32), weight, 1) * leaves["weight_scale"]
    return Partial(product[None], dtype=h.dtype)


FORMAT = ToyFormat()

register_format("toy_int8", lambda quantization: FORMAT)
register_kernel(Kernel("toy.int8", "linear", "xla", refusal, run))
