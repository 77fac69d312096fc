"""The products of a projection: their problem, and each in plain JAX."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm.activation import Activation
from rjax.pallas_kernels.kernel import HOPPER, Kernel, Problem, takes_all
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.weight import ScaledLayout, WeightStorage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearProblem(Problem):
    """A projection, perhaps with the norm before it or the activation behind it.

    Attributes:
        operation: the operands and the result of each:

            - linear: (h [T, D], leaves) to [T, ...] or a Partial;
            - linear_activation: the same to [T, F];
            - norm_linear, norm_linear_activation: (x, update, norm weight, leaves) to
              (x + update, the result);
            - merge_linear: (UnmergedAttention, leaves) to [T, ...] or a Partial;
            - activation: h [T, A, F] to [T, F].

        depth: entries that are contracted.
        columns: shape of the result after T, before the activation.
        scheme: how the weight is stored; None where there is none.
        layout: the weight's values and scales; None unless it has few bits.
        activation: activation of the operations that end with one.
        bias: whether a bias is added to the result.
        pending_bias: the update of a norm is a Partial with a bias.
        needs_partial: the depth is sharded over devices, so that the result must be a Partial.
        early_weights: no kernel of the program writes the weights, because they are its arguments.
            A kernel may then read them before the kernels that it depends on have ended.
        eps: the norm's epsilon.
    """

    depth: int = 0
    columns: tuple[int, ...] = ()
    scheme: WeightStorage | None = None
    layout: ScaledLayout | None = None
    activation: Activation | None = None
    bias: bool = False
    pending_bias: bool = False
    needs_partial: bool = False
    early_weights: bool = False
    eps: float = 0.0

    @property
    def schemes(self) -> tuple[WeightStorage, ...]:
        """The scheme, if there is a weight."""
        return () if self.scheme is None else (self.scheme,)

    @property
    def width(self) -> int:
        """Numbers of a row of the result."""
        return math.prod(self.columns)

    def shaped(self, product: Partial) -> Partial:
        """A product of ``width`` columns with the axes of ``columns``."""
        summands = product.summands
        return Partial(summands.reshape(*summands.shape[:2], *self.columns), dtype=product.dtype)


def split_k_gemm(h: Float[Array, "T D"], w: Float[Array, "D E"], splits: int) -> Partial:
    """h @ w as ``splits`` summands; summand i is the product of the i-th split of the depth.

    ``splits`` divides the depth.
    """
    T, D = h.shape
    rows, weights = h.reshape(T, splits, -1), w.reshape(splits, D // splits, -1)
    summands = jnp.einsum("TXD,XDE->XTE", rows, weights, preferred_element_type=jnp.float32)
    return Partial(summands, dtype=h.dtype)


def only_unquantised(problem: LinearProblem) -> str | None:
    """The refusal of kernels that take weights in 16 bits."""
    assert problem.scheme is not None
    if problem.scheme.name != "unquantised":
        return f"weights stored as {problem.scheme.name}; it takes unquantised ones"
    return None


def only_swiglu(problem: LinearProblem) -> str | None:
    """The refusal of kernels that compute SwiGLU."""
    if problem.activation is None or not problem.activation.is_swiglu:
        return "it takes silu with a gate"
    return "a bias before the activation" if problem.bias else None


def only_norm_of_one_row(problem: LinearProblem) -> str | None:
    """The refusal of kernels whose every CTA computes the norm before the product."""
    if problem.rows != 1:
        return f"{problem.rows} rows; the norm is fused for one row only"
    if problem.pending_bias:
        return "a pending bias; the kernel takes updates without one"
    return None


def streaming_kernel(
    name: str, operation: str, refusal: Callable[[Any], str | None], run: Callable[..., Any]
) -> Kernel:
    """A kernel on Hopper that streams the weight, so that steps of few rows are padded for it."""
    return Kernel(
        f"mosaic.{name}",
        operation,
        "mosaic",
        refusal,
        run,
        pads_rows=True,
        gives_partial=not operation.endswith("activation"),
        compute_capabilities=HOPPER,
    )


def _linear(
    problem: LinearProblem, h: Float[Array, "T D"], leaves: dict[str, Array]
) -> Float[Array, "T ..."] | Partial:
    assert problem.scheme is not None
    weight = problem.scheme.dequantise(leaves, problem.depth, h.dtype)
    weight = weight.reshape(problem.depth, *problem.columns)
    if not problem.needs_partial:
        return jnp.tensordot(h, weight, 1)
    product = jnp.tensordot(h, weight, 1, preferred_element_type=jnp.float32)
    return Partial(product[None], dtype=h.dtype)


def _activation(problem: LinearProblem, h: Float[Array, "T A F"]) -> Float[Array, "T F"]:
    assert problem.activation is not None
    return problem.activation(h)


PLAIN_KERNELS = (
    Kernel("xla.linear", "linear", "xla", takes_all, _linear, dequantises=True),
    Kernel("xla.activation", "activation", "xla", takes_all, _activation),
)
