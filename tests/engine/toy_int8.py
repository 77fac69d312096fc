"""A weight scheme and a kernel from outside the package: int8, one scale for each column."""

import dataclasses

import jax.numpy as jnp

from rjax.models import Leaf, WeightScheme, register_scheme
from rjax.pallas_kernels.partial import Partial
from rjax.worker.kernels import Kernel, Problem, register_kernel

CALLED: set[tuple[str, int]] = set()  # (axes, rows) of what the kernel computed


@dataclasses.dataclass(frozen=True)
class ToyInt8(WeightScheme):
    """``weight`` in int8, and ``weight_scale`` of the shape of the outputs."""

    name: str = "toy_int8"

    def leaves(self, inputs, outputs):
        weight = Leaf(f"{inputs} {outputs}", jnp.int8, "zeros")
        return {"weight": weight, "weight_scale": Leaf(outputs, jnp.float32, "ones")}

    def pieces(self, leaf, weight):
        if leaf == "weight":
            return weight
        return tuple(
            dataclasses.replace(
                piece,
                tensor=piece.tensor.replace(".weight", ".weight_scale"),
                # Output axes come first in a checkpoint: "(K A H) D" has scales "(K A H)".
                pattern=piece.pattern.partition(")")[0] + ")"
                if piece.pattern.startswith("(")
                else piece.pattern.split()[0],
            )
            for piece in weight
        )

    def dequantise(self, leaves, dtype):
        return (leaves["weight"] * leaves["weight_scale"]).astype(dtype)


def refusal(problem: Problem) -> str | None:
    """Takes its own scheme only."""
    return None if problem.scheme == ToyInt8() else "it takes toy_int8"


def run(problem, h, leaves):
    """Scales the product in place of the weight."""
    CALLED.add((problem.label, problem.rows))
    weight = leaves["weight"].reshape(problem.depth, *problem.columns).astype(jnp.float32)
    product = jnp.tensordot(h.astype(jnp.float32), weight, 1) * leaves["weight_scale"]
    return Partial(product[None], dtype=h.dtype)


register_scheme("toy_int8", lambda quantization: ToyInt8())
register_kernel(Kernel("toy.int8", "linear", frozenset({"xla"}), refusal, run))
