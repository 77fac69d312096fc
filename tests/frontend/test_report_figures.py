"""The figures that the command prints after its answers."""

import pytest

from rjax.cli.report import figure_lines, figures
from rjax.outputs import RequestMetrics, RequestOutput

from .fake_engine import FakeEngine


def test_speeds_leave_out_the_compile_time() -> None:
    output = RequestOutput(
        "0",
        None,
        [1] * 30,
        outputs=[],
        finished=True,
        metrics=RequestMetrics(1.0, 1.0, 3.0, 5.0, 3),
    )
    found = figures(
        [output],
        FakeEngine(None).stats(),
        seconds=10.0,
        prefix_seconds=2.0,
        compile_wait_seconds=4.0,
        startup_seconds={"imports": 1.2, "weights": 0.3},
    )
    assert found["input_tokens_per_second"] == pytest.approx(30 / 6)
    lines = figure_lines(found)
    assert lines[2].endswith("(2.00 s of it for the shared prefix, including compilation)")
    assert lines[3].endswith("(including compilation)")
    assert lines[-2] == "compilation: 4.0 s waited for, not in the speeds"
    assert lines[-1] == "started in 1.5 s: imports 1.2, weights 0.3; up to 2 sequences at once"
