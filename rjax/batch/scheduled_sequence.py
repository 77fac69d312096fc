"""The part of one sequence that one step computes."""

from typing import NamedTuple

from rjax.batch.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A run of tokens of one sequence: positions [start, stop) are computed in this step.

    ``samples`` says whether the run reaches the sequence's end, so that a token is sampled. The KV
    of positions before ``stored`` is in the pages already, and is not written again.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    stored: int = 0
