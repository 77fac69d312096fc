"""How large a request's sampling parameters may be."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Upper bounds that hold before anything is allocated; some are shapes of device arrays.

    Attributes:
        n: samples of one prompt.
        stop_strings: stop strings of one request.
        stop_string_chars: characters in one stop string.
        bad_words: bad words of one request, of as many characters as a stop string.
        stop_token_ids: stop token ids of one request.
        eos_token_ids: ids that end a sequence by the model's own configuration.
        logit_bias: tokens with a bias in one request.
        allowed_token_ids: entries of an allow-list.
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
        """Ids that can be held back until ``min_tokens``: stop ids and end-of-sequence ids."""
        return self.stop_token_ids + self.eos_token_ids


LIMITS = SamplingLimits()
