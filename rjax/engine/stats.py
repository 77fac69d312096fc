"""Counters and memory figures of an engine."""

import dataclasses
import time

from rjax.batch.page_operations import CopyPages, PageOperation, SwapIn, SwapOut
from rjax.batch.sequence import Sequence
from rjax.batch.step_worker import PoolSize
from rjax.engine.pages.block_manager import BlockManager
from rjax.engine.request_stats import RequestStats
from rjax.engine.scheduler import Scheduler
from rjax.outputs import RequestMetrics
from rjax.pallas_kernels.attention.plan.host import PlanStats


@dataclasses.dataclass(slots=True)
class EngineStats:
    """Counters since the engine started; tokens, steps and bytes.

    Attributes:
        backend: attention backend in use.
        device: device that the engine runs on.
        max_num_seqs: maximum sequences that decode at the same time.
        num_decode_steps: decode steps that start as one program, at most.
        steps: steps dispatched.
        multi_steps: decode steps read that ran with others in one program.
        step_tokens: tokens computed in all steps.
        steps_by_size: steps by size: those of key i computed at most 2**i tokens and more than
            2**(i - 1).
        prompt_tokens: prompt tokens of all sequences admitted.
        cached_tokens: those of ``prompt_tokens`` served from the prefix cache.
        shared_tokens: those of ``cached_tokens`` in pages that other live sequences held.
        output_tokens: output tokens read back.
        preemptions: number of times that a sequence was preempted.
        swaps: preemptions that swapped to host memory.
        pages_copied: pages copied within the pool.
        pages_swapped_out, pages_swapped_in: pages copied to and from host memory.
        kv_tokens_read: tokens of KV that attention read, in each layer.
        kv_tokens_unshared: tokens of KV that it would have read without sharing.
        shared_groups: groups of sequences whose shared pages were read once, over all steps.
        kv_event_batches: batches of KV events that were published.
        kv_event_batches_dropped: those that found the publisher's queue full.
        num_running, num_waiting, num_swapped: sequences now; prefill-ahead ones count as running.
        kv_bytes_used: pages in use now.
        kv_bytes_cached: pages without an owner that can serve a later prompt.
        kv_bytes_pinned: pages of pinned prefixes, part of ``kv_bytes_used``.
        kv_bytes_total: the whole pool.
        host_bytes_used: pages of swapped sequences in host memory.
        page_bytes: one page.
        kv_bytes_without_sharing: what the running sequences would take if each had its own pages.
        requests: figures of requests with vLLM's definitions.
        peak_kv_bytes, peak_kv_bytes_unshared: the highest values of ``kv_bytes_used`` and
            ``kv_bytes_without_sharing``.
    """

    backend: str
    device: str
    max_num_seqs: int = 0
    num_decode_steps: int = 1
    steps: int = 0
    multi_steps: int = 0
    step_tokens: int = 0
    steps_by_size: dict[int, int] = dataclasses.field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    shared_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    pages_copied: int = 0
    pages_swapped_out: int = 0
    pages_swapped_in: int = 0
    kv_tokens_read: int = 0
    kv_tokens_unshared: int = 0
    shared_groups: int = 0
    kv_event_batches: int = 0
    kv_event_batches_dropped: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_bytes_used: int = 0
    kv_bytes_cached: int = 0
    kv_bytes_pinned: int = 0
    kv_bytes_total: int = 0
    host_bytes_used: int = 0
    page_bytes: int = 0
    kv_bytes_without_sharing: int = 0
    peak_kv_bytes: int = 0
    peak_kv_bytes_unshared: int = 0
    requests: RequestStats = dataclasses.field(default_factory=lambda: RequestStats(1))

    def count_admission(self, sequence: Sequence, request: RequestMetrics) -> None:
        """Count the first admission of a sequence, and note its time."""
        sequence.first_scheduled_time = time.monotonic()
        if request.first_scheduled_time is None:
            request.first_scheduled_time = sequence.first_scheduled_time
        self.prompt_tokens += len(sequence.prompt_token_ids)
        self.cached_tokens += sequence.num_cached or 0
        self.shared_tokens += sequence.num_shared

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens served from the prefix cache; 0 before the first request."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def read_share(self) -> float:
        """``kv_tokens_read`` / ``kv_tokens_unshared``; 1 before the first step."""
        unshared = self.kv_tokens_unshared
        return self.kv_tokens_read / unshared if unshared else 1.0

    def count_step(self, tokens: int, plan: PlanStats) -> None:
        """Count a step of ``tokens`` tokens with this attention plan."""
        self.steps += 1
        self.step_tokens += tokens
        size = (tokens - 1).bit_length()
        self.steps_by_size[size] = self.steps_by_size.get(size, 0) + 1
        self.kv_tokens_read += plan.kv_tokens_read
        self.kv_tokens_unshared += plan.kv_tokens_unshared
        self.shared_groups += plan.shared_groups

    def count_operations(self, operations: list[PageOperation]) -> None:
        """Count page operations."""
        for operation in operations:
            match operation:
                case CopyPages(_, target):
                    self.pages_copied += len(target)
                case SwapOut(pages, _):
                    self.pages_swapped_out += len(pages)
                case SwapIn(_, pages):
                    self.pages_swapped_in += len(pages)

    def count_pages(self, used: int, unshared: int) -> None:
        """Record the pages in use, and the pages that would be in use without sharing."""
        self.kv_bytes_used = used * self.page_bytes
        self.kv_bytes_without_sharing = unshared * self.page_bytes
        self.peak_kv_bytes = max(self.peak_kv_bytes, self.kv_bytes_used)
        self.peak_kv_bytes_unshared = max(
            self.peak_kv_bytes_unshared, self.kv_bytes_without_sharing
        )

    def anew(self) -> "EngineStats":
        """The statistics of this engine if it had done nothing."""
        return EngineStats(
            self.backend,
            self.device,
            max_num_seqs=self.max_num_seqs,
            num_decode_steps=self.num_decode_steps,
            page_bytes=self.page_bytes,
            requests=RequestStats(self.requests.max_model_len),
        )

    def now(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        pinned: list[int],
        pool: PoolSize,
        *,
        num_held: int,
    ) -> "EngineStats":
        """A copy with the current figures of scheduler and pool.

        Args:
            scheduler: the engine's scheduler.
            blocks: its pool.
            pinned: pages of shared prefixes, once for each that holds them.
            pool: its size.
            num_held: sequences that the scheduler does not have yet.
        """
        return dataclasses.replace(
            self,
            steps_by_size=dict(self.steps_by_size),
            requests=self.requests.copy(),
            preemptions=scheduler.num_preemptions,
            swaps=scheduler.num_swaps,
            num_swapped=len(scheduler.swapped),
            host_bytes_used=scheduler.host.num_used * self.page_bytes
            + (scheduler.host_states.num_used * pool.states.host_bytes if pool.states else 0),
            kv_bytes_cached=blocks.counts().cached * self.page_bytes,
            kv_bytes_pinned=len(set(pinned)) * self.page_bytes,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + num_held,
            kv_bytes_total=pool.num_pages * self.page_bytes,
        )
