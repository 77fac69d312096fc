"""Annotations of rjax are checked while tests run."""

import jaxtyping
import numpy as np
import pytest
from beartype import roar

from rjax.pallas_kernels.attention.plan.splits import Spans, SplitPolicy
from rjax.worker.step.multi_step_policy import MultiStepPolicy

POLICY = SplitPolicy(1, 1, 1)


def test_a_method_checks_its_arguments():
    with pytest.raises(roar.BeartypeCallHintParamViolation, match="num_steps"):
        MultiStepPolicy().dispatched("key", "4")


def test_a_method_with_arrays_checks_their_types_and_axes():
    assert POLICY.lane_loads(np.array([3, 4]), 1).tolist() == [4, 5]
    for tokens in (np.array([3.0]), np.array([[3]])):
        with pytest.raises(jaxtyping.TypeCheckError, match="tokens"):
            POLICY.lane_loads(tokens, 1)


def test_a_dataclass_checks_its_fields():
    with pytest.raises(roar.BeartypeCallHintParamViolation, match="item_overhead"):
        SplitPolicy(1, 1, "1")
    one, two = np.zeros(1, int), np.zeros(2, int)
    with pytest.raises(jaxtyping.TypeCheckError, match="kv_stop"):
        Spans(one, one, one, one, two)
