"""The distributions whose log-probabilities are reported, by vLLM's names."""

from typing import Any, Literal, get_args

from rjax.errors import RjaxError

type LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

LOGPROBS_MODES: tuple[str, ...] = get_args(LogprobsMode.__value__)
SCORING_TEMPERATURES = 0.01, 100.0
"""Range of what may divide the logits of given tokens."""


def check_logprobs_mode(value: Any, error: type[RjaxError]) -> None:
    """Raise ``error`` unless the value is a `LogprobsMode`; vLLM has two more."""
    if value in LOGPROBS_MODES:
        return
    choices = " or ".join(map(repr, LOGPROBS_MODES))
    why = ""
    if value in ("raw_logits", "processed_logits"):
        why = ": logits would be reported in fields that hold log-probabilities"
    raise error(f"logprobs_mode is {value!r:.100}; give {choices}{why}")
