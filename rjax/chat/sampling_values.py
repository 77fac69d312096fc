"""Sampling values that a user sets during a chat."""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from rjax.cli.arguments import SAMPLING_KEYS
from rjax.errors import InvalidRequestError

NOT_IN_CHAT = ("n", "best_of", "logprobs", "prompt_logprobs", "detokenize")
"""Sampling values that have no use in a chat."""

_NAMES = tuple(name for name in SAMPLING_KEYS if name not in NOT_IN_CHAT)
_DEFAULT = "default"


def with_value(sampling: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """The sampling values with one changed; the text "default" removes it.

    Args:
        sampling: the sampling values, by their names in `SamplingParams`.
        name: name of the value, such as "temperature" or "max-tokens".
        text: a number, true, false, JSON, or a plain text.

    Raises:
        InvalidRequestError: there is no such value, or it is out of range.
    """
    from rjax.sampling import SamplingParams

    name = name.lstrip("-").replace("-", "_")
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(_NAMES)}"
        raise InvalidRequestError(f"there is no sampling value {name!r}; {hint}")
    changed = dict(sampling)
    if text == _DEFAULT:
        changed.pop(name, None)
        return changed
    changed[name] = _parsed(text)
    if name == "stop" and isinstance(changed[name], str):
        changed[name] = [changed[name]]
    SamplingParams.from_options(changed)
    return changed


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
