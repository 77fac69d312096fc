"""The engine's check mode: silent over real steps, loud over one whose values do not fit."""

import dataclasses

import numpy as np
import pytest

from rjax.sampling import SamplingParams
from rjax.worker.step import builder as step_input_builder

from .tiny import make_engine, run

pytestmark = pytest.mark.usefixtures("kept")

REQUESTS = [
    (str(i), [*range(1, 40), 50 + i], SamplingParams(temperature=0, max_tokens=6)) for i in range(3)
]


def test_real_steps_pass_and_answer_the_same(tiny):
    answers = []
    for check in (True, False):
        done = run(make_engine(tiny, check_values=check), REQUESTS)
        answers.append({name: done[name].outputs[0].token_ids for name in done})
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("pages", lambda x: x + 64, "the pool has pages 0 to 23"),
        ("positions", lambda x: x + (x >= 0), "no item covers"),
        ("kv_slots", lambda x: np.where(x >= 0, x[0], x), "both write to slot"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(tiny, monkeypatch, field, change, message):
    build = step_input_builder.build_step_input

    def wrong(*args):
        made, stats = build(*args)
        if field == "positions":
            return dataclasses.replace(made, positions=change(made.positions)), stats
        [group] = made.groups
        [value] = getattr(group, field)
        group = group._replace(**{field: (change(value).astype(np.int32),)})
        return dataclasses.replace(made, groups=(group,)), stats

    engine = make_engine(tiny, check_values=True)
    monkeypatch.setattr(step_input_builder, "build_step_input", wrong)
    engine.add_request(*REQUESTS[0])
    with pytest.raises(ValueError, match=message):
        engine.step()
