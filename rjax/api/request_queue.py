"""The front end's queue of unfinished requests: its limits, and what each tenant holds of it."""

import dataclasses
from collections import Counter

from rjax.errors import OverloadedError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits on unfinished requests.

    Attributes:
        sequences: maximum of running and waiting sequences; every sample of a request counts.
        prompt_tokens: maximum of their prompt tokens, in total.
        tenant_share: one tenant holds at most this share of what the other tenants leave of both,
            so that there is room for a tenant that comes later. With 0.5 a tenant alone holds half,
            and each of k tenants can hold 1/(k + 1).
        heartbeat_seconds: time without a heartbeat after which the engine thread counts as hung,
            unless its step waits for a program to compile.
        unread_tokens: maximum of unread tokens of one request; every alternative in their logprobs
            counts as a token. Beyond it the request is aborted and its reader gets an
            OverloadedError.
    """

    sequences: int = 1024
    prompt_tokens: int = 4_194_304
    tenant_share: float = 1.0
    heartbeat_seconds: float = 120.0
    unread_tokens: int = 262_144


class RequestQueue:
    """Counts the sequences and prompt tokens of unfinished requests.

    Args:
        limits: limits on unfinished requests.

    Attributes:
        sequences, prompt_tokens: sequences and prompt tokens counted for each tenant.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self.sequences: Counter[str | None] = Counter()
        self.prompt_tokens: Counter[str | None] = Counter()

    def check(self, sequences: int, prompt_tokens: int, tenant: str | None) -> None:
        """Check that there is room for a request of a tenant.

        Raises:
            OverloadedError: there is none, or only in the share of other tenants.
        """
        limits = self._limits
        parts = (
            ("queued_sequences", "sequences", self.sequences, limits.sequences, sequences),
            (
                "queued_tokens",
                "prompt tokens",
                self.prompt_tokens,
                limits.prompt_tokens,
                prompt_tokens,
            ),
        )
        # The messages do not say how full the queue is: that would reveal other tenants' prompt
        # lengths.
        for name, what, held, most, more in parts:
            if held.total() + more > most:
                raise OverloadedError(
                    f"the queue, of at most {most} {what}, has no room for the {more} of this "
                    "request; try again later",
                    name,
                )
        for _, what, held, most, more in parts:
            own = held[tenant]
            if own + more > limits.tenant_share * (most - held.total() + own):
                raise OverloadedError(
                    f"your share of the queue, of at most {most} {what}, has no room for the "
                    f"{more} of this request: the rest is kept for other API keys; try again when "
                    "requests of yours have finished, or send smaller ones",
                    "key_share",
                )

    def add(self, sequences: int, prompt_tokens: int, tenant: str | None) -> None:
        """Count a request."""
        self.sequences[tenant] += sequences
        self.prompt_tokens[tenant] += prompt_tokens

    def remove(self, sequences: int, prompt_tokens: int, tenant: str | None) -> None:
        """Stop counting a request."""
        for held, less in ((self.sequences, sequences), (self.prompt_tokens, prompt_tokens)):
            held[tenant] -= less
            if not held[tenant]:
                del held[tenant]
