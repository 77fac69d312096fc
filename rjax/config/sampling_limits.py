"""Upper limits on a request's sampling parameters."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Upper limits, checked before anything is allocated; some are shapes of device arrays.

    Attributes:
        n: samples of one prompt.
        stop_strings: stop strings of one request.
        stop_string_chars: characters of a stop string or a bad word.
        bad_words: bad words of one request.
        stop_token_ids: stop token ids of one request.
        eos_token_ids: end-of-sequence ids in the model's configuration.
        logit_bias: tokens with a bias in one request.
        allowed_token_ids: entries of ``allowed_token_ids``.
    """

    n: int = 16384
    stop_strings: int = 16
    stop_string_chars: int = 1024
    bad_words: int = 128
    stop_token_ids: int = 64
    eos_token_ids: int = 16
    logit_bias: int = 1024
    allowed_token_ids: int = 2**20

    @property
    def suppressed(self) -> int:
        """Maximum of ids suppressed until ``min_tokens``: stop and end-of-sequence ids."""
        return self.stop_token_ids + self.eos_token_ids


LIMITS = SamplingLimits()
