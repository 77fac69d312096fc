"""Measures what a token costs, for the choice between swapping and recomputing."""

import time

from rjax.batch.dispatched_step import DispatchedStep
from rjax.engine.preemption import PreemptionCost


class StepTimer:
    """Observes the steps that fill more than half of the token budget.

    Args:
        cost: cost model that is told the times.
        budget: tokens of a step.
    """

    def __init__(self, cost: PreemptionCost, budget: int) -> None:
        self._cost = cost
        self._budget = budget
        self._last_read: float | None = None

    def read(self, step: DispatchedStep, *, alone: bool, last: bool) -> None:
        """Note that a step is read now.

        The time since the last read is the step's own only if it was dispatched before that read,
        and not with decode steps that are read together with it.

        Args:
            step: the step that was read.
            alone: whether no other step is read before the next dispatch.
            last: whether no step is in flight.
        """
        now = time.monotonic()
        own = alone or step.num_tokens > len(step.batch)
        if own and self._last_read is not None and 2 * step.num_tokens > self._budget:
            self._cost.observe(step.num_tokens, now - self._last_read)
        self._last_read = None if last else now
