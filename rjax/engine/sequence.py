"""One sequence of tokens on its way through the engine."""

import dataclasses
import enum

from rjax.engine.page_hash import PageHashes
from rjax.engine.token_mask import TokenMask
from rjax.sampling import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence is; it is in exactly one of these."""

    WAITING = "waiting"
    RUNNING = "running"
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
        order: (priority, arrival): smaller goes first.
        hashes: chain keys of its full pages.
        output_token_ids: tokens read back from the device.
        in_flight: tokens sampled on the device and not yet read back, at most 2.
        num_computed: leading tokens whose KV is written, or will be by the steps dispatched so far.
        num_cached: prompt tokens taken from the prefix cache at first admission; None before it.
        pages: page ids in order; they hold at least ``num_computed`` tokens.
        num_registered: leading pages known to the prefix cache under this sequence's keys.
        slot: row of the device's sampling state while running.
        mask: restricts each next token; None allows all that the parameters do.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    order: tuple[int, int]
    hashes: PageHashes
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    in_flight: int = 0
    num_computed: int = 0
    num_cached: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_registered: int = 0
    slot: int | None = None
    mask: TokenMask | None = None
    status: SequenceStatus = SequenceStatus.WAITING

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, the ones still in flight included."""
        return self.num_known + self.in_flight

    @property
    def num_outputs(self) -> int:
        """Output tokens, the ones still in flight included."""
        return len(self.output_token_ids) + self.in_flight

    @property
    def reads_cache(self) -> bool:
        """Whether cached KV may stand for its prompt: not where its logits are wanted."""
        return self.index > 0 or self.params.prompt_logprobs is None

    @property
    def awaits_token(self) -> bool:
        """Whether its next token may be sampled only once the last one is read back."""
        return self.mask is not None and self.in_flight > 0

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known token ids at positions [start, stop)."""
        P = len(self.prompt_token_ids)
        if stop <= P:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[max(0, start - P) : stop - P]
