"""The figures that the command prints after its answers."""

import pytest

from rjax.batch.compile_progress import CompileProgress
from rjax.cli.report import figure_lines, figures
from rjax.outputs import CompletionOutput, RequestMetrics, RequestOutput

from .fake_engine import FakeEngine


def output(arrival: float, first: float, last: float, *counts: int) -> RequestOutput:
    """A finished request with a sample of each count of tokens."""
    return RequestOutput(
        "0",
        None,
        [1] * 30,
        outputs=[CompletionOutput(i, "", [7] * count) for i, count in enumerate(counts)],
        finished=True,
        metrics=RequestMetrics(arrival, arrival, first, last, max(counts)),
    )


def figures_of(*outputs: RequestOutput, prefix: float = 0.0, compiling: CompileProgress) -> dict:
    return figures(
        outputs,
        FakeEngine(None).stats(),
        begin=0.0,
        end=12.0,
        prefix_seconds=prefix,
        compiling=compiling,
        startup_seconds={"imports": 1.2, "weights": 0.3},
    )


def test_speeds_and_times_leave_out_what_compiles() -> None:
    # 2 s before the first token, 1 s of them before the request came; 3 s during generation
    waits = ((0.0, 2.0), (6.0, 9.0))
    one = output(1.0, 4.0, 10.0, 4)
    found = figures_of(one, prefix=1.0, compiling=CompileProgress(3, 3, waits))
    assert found["compile_wait_seconds"] == 5
    assert found["input_tokens_per_second"] == pytest.approx(30 / 2)
    assert found["output_tokens_per_second"] == pytest.approx(3 / 3)
    assert found["mean_time_per_output_token"] == pytest.approx(3 / 3)
    assert found["mean_time_to_first_token"] == pytest.approx(1 + 2)
    assert figure_lines(found)[1:4] == [
        "speed: 15.0 prompt tokens/s, 1.0 generated tokens/s",
        "time to first token: 3.00 s (1.00 s of it for the shared prefix)",
        "time per output token: 1.00 s",
    ]
    assert figure_lines(found)[-2:] == [
        "compilation: 5.0 s waited for, not in the speeds and times above",
        "started in 1.5 s: imports 1.2, weights 0.3; up to 2 sequences at once",
    ]


def test_the_speed_of_generation_agrees_with_the_time_of_a_token() -> None:
    """Two samples and a request that began with them get their tokens in the same steps."""
    found = figures_of(output(0, 2, 6, 5, 5), output(0, 2, 6, 5), compiling=CompileProgress(0, 0))
    assert found["output_tokens_per_second"] == pytest.approx(
        3 / found["mean_time_per_output_token"]
    )


def test_a_later_first_token_is_part_of_generation() -> None:
    found = figures_of(output(0, 2, 6, 5), output(0, 4, 6, 3), compiling=CompileProgress(0, 0))
    assert found["output_tokens_per_second"] == pytest.approx((4 + 3) / 4)
    assert found["input_tokens_per_second"] == pytest.approx(60 / 4)


def test_one_token_has_no_speed_of_generation() -> None:
    found = figures_of(output(0, 2, 2, 1), compiling=CompileProgress(0, 0))
    assert found["output_tokens_per_second"] is found["mean_time_per_output_token"] is None
    assert figure_lines(found)[1] == "speed: 15.0 prompt tokens/s"


def test_a_refused_prompt_changes_nothing() -> None:
    refused = output(0, 2, 6, 5)
    refused.metrics, refused.error = None, ValueError("refused")
    refused.outputs[0].token_ids.clear()
    good, none = output(0, 2, 6, 5), CompileProgress(0, 0)
    both, alone = figures_of(good, refused, compiling=none), figures_of(good, compiling=none)
    assert both == {**alone, "requests": 2}
