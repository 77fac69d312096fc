"""Small cases for the sanitizer: attention, and decode steps of one or two layers."""

import dataclasses
from typing import Any

from bench.decode_step.roofline import DecodeCase
from bench.kernels.cases.attention import Case
from rjax.benchmarks.model_shapes import SHAPES

_FEW_TOKENS = {"vocab_size": 4096}
DENSE = SHAPES["qwen3-0.6b"] | _FEW_TOKENS | {"num_hidden_layers": 2}
EXPERTS = SHAPES["qwen3-30b-a3b"] | _FEW_TOKENS
EXPERTS |= {"num_hidden_layers": 1, "num_experts": 16, "num_experts_per_tok": 2}
ONE_ROW, FEW_ROWS = DecodeCase(1, 0, 70), DecodeCase(5, 128, 70)
_BOUND = 2e-2  # plain JAX in bfloat16 has an error of 1.1e-2
_FP8_ROWS_BOUND = 2e-1  # for kernels that quantise rows to fp8, which alone gives 8e-2


def attention_cases(tile_rows: int) -> list[Case]:
    """Small cases with every kind of work item; ``tile_rows`` rows of a prefix tile."""
    lengths = (1, 63, 64, 65, 130)
    return [
        Case("attention-relay", 5, 256, lengths, N=8, K=2, tile_rows=tile_rows, split=128),
        Case("attention-prompt", 2, 0, 140, queries=70, N=8, K=2, tile_rows=tile_rows, split=64),
        Case("attention-fp8", 5, 128, lengths, N=8, K=2, tile_rows=tile_rows, split=128, fp8=True),
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class StepCase:
    """A decode step.

    Attributes:
        name: of the case.
        rows: of the step, and their contexts.
        config: config.json of the model.
        quantization: of the weights.
        without: a kernel that the mosaic backend must do without.
        bound: of `step_error`.
    """

    name: str
    rows: DecodeCase
    config: dict[str, Any]
    quantization: str | None = None
    without: str | None = None
    bound: float = _BOUND


def step_cases() -> list[StepCase]:
    """Steps of one row and of few rows, with each kind of weights."""
    layer = "mosaic.one_row_layer"
    return [
        StepCase("one-row", ONE_ROW, DENSE),
        StepCase("one-row-fp8", ONE_ROW, DENSE, "fp8"),
        StepCase("one-row-int4", ONE_ROW, DENSE, "int4"),
        StepCase("one-row-unfused", ONE_ROW, DENSE, None, layer),
        StepCase("one-row-unfused-fp8", ONE_ROW, DENSE, "fp8", layer, _FP8_ROWS_BOUND),
        StepCase("one-row-unfused-int4", ONE_ROW, DENSE, "int4", layer),
        StepCase("few-rows", FEW_ROWS, DENSE),
        StepCase("few-rows-unfused", FEW_ROWS, DENSE, None, "mosaic.post_attention_block"),
        StepCase("few-rows-fp8", FEW_ROWS, DENSE, "fp8", bound=_FP8_ROWS_BOUND),
        StepCase("few-rows-int4", FEW_ROWS, DENSE, "int4"),
        StepCase("few-rows-experts", FEW_ROWS, EXPERTS),
    ]
