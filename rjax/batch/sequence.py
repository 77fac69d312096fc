"""One sequence of tokens: its progress, its pages and its parameters."""

import dataclasses
import enum

import numpy as np
from jaxtyping import Int32

from rjax.batch.page_hash import PageHashes
from rjax.batch.token_mask import TokenMask
from rjax.sampling import SamplerMode, SamplingParams

_QUICK_AGAIN = 8  # quick masks after a late one


class SequenceStatus(enum.Enum):
    """The queue that a sequence is in."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True, slots=True)
class SavedState:
    """What of a swapped sequence's state is on the host.

    Attributes:
        num_computed: tokens that were computed; its state is that of their last full page.
        has_page: whether its state page was saved. Otherwise it stayed cached, or there is none.
        has_tail: whether the tail of its slot was saved: some tokens follow the last full page.
        host_slot: host slot of both; None if there is none.
    """

    num_computed: int
    has_page: bool
    has_tail: bool
    host_slot: int | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, pages and progress of one sequence.

    Attributes:
        request_id: id of its request; a request with n > 1 has n sequences.
        index: index among the sequences of its request.
        prompt_token_ids: token ids of the prompt; never empty.
        prompt_array: ``prompt_token_ids`` as an array.
        params: sampling parameters of the request.
        max_tokens: most output tokens that the request and the model's length allow.
        seed: seed of its random draws.
        order: (priority and arrival, arrival, index); smaller runs first.
        hashes: chain keys of its full pages.
        share: the share to which its row counts; see `rjax.engine.fair_shares.FairShares`.
        siblings: all sequences of the request, this one included; the first computes the prompt,
            the others share its pages.
        mask: restricts the next token; None for no mask.
        mask_pending: whether the mask does not know the last token yet.
        masks_until_quick: quick masks until it is scheduled as any other; 0 unless one was late.
        logprob_start_len: first prompt token whose log-probability is reported.
        prompt_temperature: what divides the logits of the prompt's log-probabilities.
        output_token_ids: tokens read back from the device; ``receive`` adds to them.
        in_flight: tokens sampled on the device and not read back, of at most two dispatches.
        num_known: tokens whose ids the host has.
        num_tokens: ``num_known`` + ``in_flight``.
        num_computed: leading tokens that are computed, by the steps dispatched so far.
        num_stored: leading tokens whose KV is in ``pages``; ``num_computed`` + 1 if the whole
            prompt was cached and only the logits of its last token are computed.
        num_cached: prompt tokens served from the prefix cache at first admission; None before it.
        num_shared: those of ``num_cached`` in pages that other live sequences held.
        num_preemptions: times that it was preempted.
        pages: page ids in order, for each page group; they hold at least ``num_stored`` tokens. -1
            for pages behind the group's window, which it does not hold. Empty unless it runs.
        num_released: leading pages that it does not hold, for each page group.
        next_release_at: value of ``num_computed`` from which it needs a page less.
        capacity: tokens that its pages can hold.
        states: its state at the end of each page, as a state page; -1 where it holds none.
        num_states_released: leading entries of ``states`` that are -1.
        num_states_registered: leading entries of ``states`` that were registered if snapshots.
        state_branch: pages behind which the prefix cache had KV and no state when it started.
        num_borrowed: leading pages that other sequences computed; copied before a write.
        num_registered: leading pages in the prefix cache under the keys of this sequence.
        host_slots: host slots of its saved pages, by (page group, page number), while swapped.
        num_saved: tokens that were stored, while swapped.
        saved_state: its saved state, while swapped; None of a model without states.
        group_pages: pages freed when it was preempted with its siblings; 0 once one has resumed.
        arrival_time: time of its request's arrival, by ``time.monotonic``.
        first_scheduled_time, first_token_time, last_token_time: times of these events, by
            ``time.monotonic``; None before.
        slot: sampler slot while running.
        awaited: key of a pending page that it waits for.
        status: its queue.
        max_length: most tokens, prompt and output.
        sampler_mode: the cheapest sampler mode that serves it.
        wants_logprobs: whether log-probabilities of its tokens or of its prompt are asked for.
        wants_processed_logprobs: whether those of its tokens are of the sampling distribution.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    prompt_array: Int32[np.ndarray, " P"]
    params: SamplingParams
    max_tokens: int
    seed: int
    order: tuple[int, int, int]
    hashes: PageHashes
    share: str | None = None
    siblings: list["Sequence"] = dataclasses.field(default_factory=list)
    mask: TokenMask | None = None
    mask_pending: bool = False
    masks_until_quick: int = 0
    logprob_start_len: int = 0
    prompt_temperature: float = 1.0
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    in_flight: int = 0
    num_known: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    num_stored: int = 0
    num_cached: int | None = None
    num_shared: int = 0
    num_preemptions: int = 0
    pages: list[list[int]] = dataclasses.field(default_factory=list)
    num_released: list[int] = dataclasses.field(default_factory=list)
    next_release_at: int = 0
    capacity: int = 0
    states: list[int] = dataclasses.field(default_factory=list)
    num_states_released: int = 0
    num_states_registered: int = 0
    state_branch: int = 0
    num_borrowed: int = 0
    num_registered: int = 0
    host_slots: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    num_saved: int = 0
    saved_state: SavedState | None = None
    group_pages: int = 0
    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    slot: int | None = None
    awaited: bytes | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    max_length: int = dataclasses.field(init=False)
    sampler_mode: SamplerMode = dataclasses.field(init=False)
    wants_logprobs: bool = dataclasses.field(init=False)
    wants_processed_logprobs: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.num_known = len(self.prompt_token_ids) + len(self.output_token_ids)
        self.num_tokens = self.num_known + self.in_flight
        self.max_length = len(self.prompt_token_ids) + self.max_tokens
        self.sampler_mode = "full" if self.mask is not None else self.params.sampler_mode
        asked = self.params.logprobs, self.params.prompt_logprobs
        self.wants_logprobs = asked != (None, None)
        processed = self.params.processed_logprobs
        self.wants_processed_logprobs = processed and self.params.logprobs is not None

    @property
    def waits_for_mask(self) -> bool:
        """Whether it is not scheduled now: its mask is not ready, or may be late again."""
        return self.mask_pending or (self.masks_until_quick > 0 and self.in_flight > 0)

    @property
    def most_cached(self) -> int:
        """Leading tokens that may be served from the cache: not those whose logits are wanted."""
        if self.index > 0 or self.params.prompt_logprobs is None:
            return self.num_known
        return max(self.logprob_start_len - 1, 0)

    @property
    def num_pages(self) -> int:
        """Pages that it holds, in all page groups."""
        return sum(map(len, self.pages)) - sum(self.num_released)

    @property
    def leader(self) -> "Sequence":
        """The sequence of its request that computes the prompt."""
        return self.siblings[0] if self.siblings else self

    @property
    def has_live_siblings(self) -> bool:
        """Whether another sequence of its request is unfinished."""
        return any(s is not self and s.status is not SequenceStatus.FINISHED for s in self.siblings)

    def is_sibling(self, other: "Sequence") -> bool:
        """Whether both belong to one request; a sequence is its own sibling."""
        return other is self or (bool(self.siblings) and other.siblings is self.siblings)

    def sample(self) -> None:
        """Note that a step that samples its next token is scheduled."""
        self.in_flight += 1
        self.num_tokens += 1

    def retract(self) -> None:
        """Note that its sampled token is not used, because its mask was late."""
        self.in_flight -= 1
        self.num_tokens -= 1
        self.masks_until_quick = _QUICK_AGAIN

    def take_mask(self, *, quick: bool) -> None:
        """Note that its mask is ready."""
        if quick and self.masks_until_quick:
            self.masks_until_quick -= 1
        self.mask_pending = False

    def receive(self, token: int) -> None:
        """Add a sampled token that was read back."""
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

    def token_array(self, start: int, stop: int) -> Int32[np.ndarray, " T"]:
        """Known token ids at positions [start, stop); those of a prompt are not copied."""
        if stop <= len(self.prompt_token_ids):
            return self.prompt_array[start:stop]
        return np.array(self.tokens(start, stop), np.int32)
