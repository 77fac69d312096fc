"""Checks of a request against this engine."""

import contextlib
import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, no_type_check

import numpy as np
from jaxtyping import Int32

from rjax.config.logprobs_mode import SCORING_TEMPERATURES, LogprobsMode
from rjax.errors import ContextLengthError, InvalidRequestError
from rjax.sampling import SamplingParams, checks

_SALT_CHARS = 128
_NAME_CHARS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class RequestChecks:
    """Checks of user input; each raises an InvalidRequestError that says what is allowed.

    Attributes:
        vocab_size, max_model_len, max_logprobs: the engine's limits.
        logprobs_mode: that of requests that set none.
        eos_token_ids: tokens that end a sequence.
        has_tokenizer: whether the engine has a tokenizer.
    """

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    logprobs_mode: LogprobsMode
    eos_token_ids: frozenset[int]
    has_tokenizer: bool

    @no_type_check
    def prompt(
        self, token_ids: Sequence[Any], room: int = 1
    ) -> tuple[list[int], Int32[np.ndarray, " T"]]:
        """The prompt as plain ints and as an array, checked to be in the vocabulary and to leave
        room for so many output tokens, 0 or 1."""
        if len(token_ids) == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        if len(token_ids) > self.max_model_len - room:
            raise ContextLengthError.of_tokens(len(token_ids), self.max_model_len, room)
        if operator.countOf(map(type, token_ids), int) == len(token_ids):
            with contextlib.suppress(OverflowError):
                array = np.fromiter(token_ids, np.int64, len(token_ids))
                if array.min() >= 0 and array.max() < self.vocab_size:
                    return list(token_ids), array.astype(np.int32)  # faster than token by token
        tokens = []
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise InvalidRequestError(f"{token!r} is not a token id; give whole numbers")
            if not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"token id {token} is out of vocabulary; the model's ids are 0 to "
                    f"{self.vocab_size - 1}"
                )
            tokens.append(int(token))
        return tokens, np.array(tokens, np.int32)

    def params(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters, checked against the model, with the engine's ``logprobs_mode``
        where they have none."""
        params.check_model(self.vocab_size, self.max_logprobs, eos_token_ids=self.eos_token_ids)
        if params.stop_strings and not self.has_tokenizer:
            raise InvalidRequestError(
                "stop strings need a tokenizer, and this engine was made without one; use "
                "stop_token_ids"
            )
        if params.logprobs_mode is None and self.logprobs_mode != "raw_logprobs":
            return dataclasses.replace(params, logprobs_mode=self.logprobs_mode)
        return params  # None is raw

    @no_type_check
    def queueing(self, priority: int, share: str | None) -> None:
        """Check that the priority is a whole number and the share a short text or None."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority is {priority!r}; give a whole number")
        if share is not None and not (isinstance(share, str) and 1 <= len(share) <= _NAME_CHARS):
            raise InvalidRequestError(
                f"share is {share!r:.300}; give a text of 1 to {_NAME_CHARS} characters, or None"
            )

    @no_type_check
    def logprob_start(self, start: int, length: int) -> int:
        """The start, checked to be a position in the prompt."""
        if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start < length:
            raise InvalidRequestError(
                f"logprob_start_len is {start!r}; give a whole number from 0 to {length - 1}"
            )
        return start

    def prompt_temperature(self, temperature: float) -> float:
        """The temperature of the prompt's log-probabilities, checked to be in range."""
        return checks.real("prompt_temperature", temperature, *SCORING_TEMPERATURES)

    @no_type_check
    def timeout(self, timeout: float) -> float:
        """The timeout, checked to be a positive number of seconds."""
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not number or not math.isfinite(timeout) or timeout <= 0:
            raise InvalidRequestError(f"timeout is {timeout!r}; give seconds above 0, or None")
        return float(timeout)

    @no_type_check
    def salt(self, salt: str) -> str:
        """The cache salt, checked to be a short text."""
        if not isinstance(salt, str) or not 1 <= len(salt) <= _SALT_CHARS:
            raise InvalidRequestError(
                f"cache_salt is {salt!r:.200}; give a text of 1 to {_SALT_CHARS} characters"
            )
        return salt

    @no_type_check
    def prefix_name(self, name: str) -> str:
        """The name, checked to be a short text; the engine reserves names that start with NUL."""
        if not isinstance(name, str) or not 1 <= len(name) <= _NAME_CHARS or name[0] == "\0":
            raise InvalidRequestError(
                f"prefix name is {name!r:.300}; give 1 to {_NAME_CHARS} characters"
            )
        return name
