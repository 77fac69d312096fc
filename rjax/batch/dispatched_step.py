"""A step that runs on the device and whose result is not read yet."""

import dataclasses
from typing import Any

from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.pallas_kernels.attention.plan.host import PlanStats


@dataclasses.dataclass(frozen=True, slots=True)
class DispatchedStep:
    """A step that runs on the device, or is queued; ``result`` arrives when it is done.

    Attributes:
        batch: the sequences, in the order of the result's rows.
        result: opaque; only the worker that dispatched the step can read it.
        stats: KV tokens that its attention reads.
        num_tokens: rows computed.
        forward_only: whether `StepWorker.sample` has yet to sample it.
        is_queued: whether it waits for further decode steps, to run in one program with them. It
            starts with the last of them, or when the worker is asked for anything else.
    """

    batch: list[ScheduledSequence]
    result: Any
    stats: PlanStats
    num_tokens: int
    forward_only: bool = False
    is_queued: bool = False
