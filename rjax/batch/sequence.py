"""One sequence of tokens on its way through the engine."""

import dataclasses
import enum

from rjax.batch.page_hash import PageHashes
from rjax.batch.token_mask import TokenMask
from rjax.sampling import SamplerMode, SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence is; it is in exactly one of these."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, pages and progress of one sequence.

    Attributes:
        request_id: of the request it belongs to; a request with n > 1 has n sequences.
        index: its place among them.
        prompt_token_ids: never empty.
        params: of the request.
        max_tokens: most output tokens, the model's length counted in.
        seed: of its random draws.
        order: smaller goes first.
        hashes: chain keys of its full pages.
        siblings: all sequences of the request, this one included; the first computes the prompt,
            the others share its pages.
        mask: restricts each next token; None allows all that the parameters do.
        output_token_ids: tokens read back from the device; ``receive`` adds to them.
        in_flight: tokens sampled on the device and not yet read back, of at most two dispatches.
        num_known: tokens whose ids the host knows.
        num_tokens: the same and the ones in flight.
        num_computed: leading tokens that need no further computing, by the steps dispatched so far.
        num_stored: leading tokens whose KV is in ``pages``; may be ``num_computed`` + 1 where a
            whole prompt was found and only its last token's logits are wanted.
        num_cached: prompt tokens not computed, at first admission; None before it.
        num_shared: of those, in pages that other live sequences held too.
        num_preemptions: times that it gave up its pages.
        pages: page ids in order; they hold at least ``num_stored`` tokens.
        capacity: tokens that ``pages`` can hold.
        num_borrowed: leading pages that it may not write into: others filled them.
        num_registered: leading pages known to the prefix tree under this sequence's keys.
        host_slots: while swapped, page number to host slot of the pages saved for it.
        num_saved: while swapped, tokens that had been stored.
        group_pages: pages that it and its siblings gave up together; 0 once one of them is back.
        slot: row of the device's sampling state while running.
        awaited: key of a page that another sequence is computing for it.
        max_length: most tokens, prompt and output.
        sampler_mode: the cheapest that serves it.
        wants_logprobs: of its tokens or of its prompt's.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    order: tuple[int, int, int]
    hashes: PageHashes
    siblings: list["Sequence"] = dataclasses.field(default_factory=list)
    mask: TokenMask | None = None
    logprob_start_len: int = 0
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    in_flight: int = 0
    num_known: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    num_stored: int = 0
    num_cached: int | None = None
    num_shared: int = 0
    num_preemptions: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    capacity: int = 0
    num_borrowed: int = 0
    num_registered: int = 0
    host_slots: dict[int, int] = dataclasses.field(default_factory=dict)
    num_saved: int = 0
    group_pages: int = 0
    slot: int | None = None
    awaited: bytes | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    max_length: int = dataclasses.field(init=False)
    sampler_mode: SamplerMode = dataclasses.field(init=False)
    wants_logprobs: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.num_known = len(self.prompt_token_ids) + len(self.output_token_ids)
        self.num_tokens = self.num_known + self.in_flight
        self.max_length = len(self.prompt_token_ids) + self.max_tokens
        self.sampler_mode = "full" if self.mask is not None else self.params.sampler_mode
        asked = self.params.logprobs, self.params.prompt_logprobs
        self.wants_logprobs = asked != (None, None)

    @property
    def most_cached(self) -> int:
        """Leading tokens for which cached KV may stand: not those whose logits are wanted."""
        if self.index > 0 or self.params.prompt_logprobs is None:
            return self.num_known
        return max(self.logprob_start_len - 1, 0)

    @property
    def leader(self) -> "Sequence":
        """The sequence of its request that computes the prompt."""
        return self.siblings[0] if self.siblings else self

    @property
    def has_live_siblings(self) -> bool:
        """Whether another sequence of its request is unfinished."""
        return any(s is not self and s.status is not SequenceStatus.FINISHED for s in self.siblings)

    def is_sibling(self, other: "Sequence") -> bool:
        """Whether both are of one request; a sequence is its own sibling."""
        return other is self or (bool(self.siblings) and other.siblings is self.siblings)

    def sample(self) -> None:
        """A step that samples its next token is scheduled."""
        self.in_flight += 1
        self.num_tokens += 1

    def receive(self, token: int) -> None:
        """A sampled token is read back."""
        self.in_flight -= 1
        self.output_token_ids.append(token)
        self.num_known += 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known token ids at positions [start, stop)."""
        P = len(self.prompt_token_ids)
        if stop <= P:
            return self.prompt_token_ids[start:stop]
        if start >= P:
            return self.output_token_ids[start - P : stop - P]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - P]
