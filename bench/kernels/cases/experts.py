"""Cases of the grouped GEMMs of experts: the experts of a layer, by number of rows."""

import dataclasses

import jax
import numpy as np

from rjax.models.layers.parameter import array_bytes
from rjax.models.schemes import ON_LOAD, Scaled

SCHEMES: dict[str, Scaled] = {
    **ON_LOAD,
    "fp8-block": Scaled("fp8", (128, 128)),
}
"""Schemes of weights in few bits, by the name of an option."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsCase:
    """One layer's experts at one number of rows.

    Attributes:
        layer: name of the shapes.
        shape: (J, X, D, I): experts, experts of a row, model width, width of an expert.
        rows: T.
        quantization: of `SCHEMES`; None for bfloat16.
    """

    layer: str
    shape: tuple[int, int, int, int]
    rows: int
    quantization: str | None = None

    @property
    def name(self) -> str:
        kind = "" if self.quantization is None else f", {self.quantization}"
        return f"{self.layer}{kind}, {self.rows} rows"

    def routings(self, count: int) -> np.ndarray:
        """int32 [count, T, X]."""
        J, X, _, _ = self.shape
        draw = np.random.default_rng(self.rows)
        order = draw.random((count, self.rows, J)).argsort(-1)
        return order[..., :X].astype(np.int32)

    def moved(self, routing: np.ndarray) -> float:
        """Bytes of the weights of the experts that a routing takes."""
        J, _, D, width = self.shape
        taken = len(np.unique(routing))
        if self.quantization is None:
            return taken * 3 * D * width * 2
        return taken * sum(array_bytes(leaves) for leaves in self.leaves()) / J

    def leaves(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """What is stored of both weights in few bits."""
        J, _, D, width = self.shape
        assert self.quantization is not None
        scheme, sizes = SCHEMES[self.quantization], {"J": J, "D": D, "A": 2, "I": width}
        found = []
        for inputs, outputs in (("D", "A I"), ("I", "D")):
            shapes = {}
            for name, leaf in scheme.for_experts.leaves(inputs, outputs, sizes).items():
                shared = dict(leaf.blocks)
                shape = [sizes[k] // shared.get(k, 1) for k in leaf.of_experts.letters.split()]
                shapes[name] = jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
            found.append(shapes)
        return found

    @property
    def flops(self) -> int:
        """FLOP of all products."""
        _, X, D, width = self.shape
        return 6 * self.rows * X * D * width


def expert_cases(*, small: bool, quantization: str | None = None) -> list[ExpertsCase]:
    """Qwen3-30B-A3B and gpt-oss-20b, or a layer for a CPU."""
    if small:
        shape = (4, 2, 64, 64)
        return [ExpertsCase("small", shape, rows, quantization) for rows in (1, 24)]
    layers = {"qwen3-30b-a3b": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880)}
    return [
        ExpertsCase(layer, shape, rows, quantization)
        for layer, shape in layers.items()
        for rows in (1, 16, 64, 8192)
    ]
