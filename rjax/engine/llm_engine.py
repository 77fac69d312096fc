"""The engine: requests in, outputs out, one step at a time."""

import contextlib
import itertools
import pathlib
import time
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Tokens
from typing import no_type_check

from rjax.batch.compile_progress import CompileProgress
from rjax.batch.dispatched_step import DispatchedStep
from rjax.batch.kernel_use import KernelUse
from rjax.batch.page_operations import PageOperation
from rjax.batch.sequence import Sequence, SequenceStatus
from rjax.batch.step_worker import StepWorker
from rjax.batch.token_mask import TokenMask
from rjax.engine.deadlines import Deadlines
from rjax.engine.held_requests import HeldRequests
from rjax.engine.kv_events.event_stream import KvEventStream
from rjax.engine.lifecycle import EngineLifecycle, LifecycleState
from rjax.engine.live_requests import LiveRequests
from rjax.engine.named_prefixes import SHARED_PREFIX, NamedPrefixes
from rjax.engine.page_roots import PageRoots
from rjax.engine.pages.block_manager import BlockManager, check_sequence_fits
from rjax.engine.pages.host_pool import HostPool
from rjax.engine.pages.state_pool import StatePool
from rjax.engine.parts import EngineParts
from rjax.engine.preemption import PreemptionCost
from rjax.engine.prefix_refill import PrefixRefill
from rjax.engine.protocol import KeepAs, NamedPrefix
from rjax.engine.request import Request
from rjax.engine.request_checks import RequestChecks
from rjax.engine.request_masks import RequestMasks
from rjax.engine.scheduler import Scheduler
from rjax.engine.stats import EngineStats
from rjax.engine.step_timer import StepTimer
from rjax.engine.updatable_engine import UpdatableEngine
from rjax.engine.weight_updates import WeightUpdates
from rjax.errors import InvalidRequestError, OutOfMemoryError
from rjax.outputs import RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams, SlotRow, slot_row
from rjax.sampling.seeds import drawn_seed
from rjax.tokenization import Tokenizer

_PREFILL = SamplingParams(
    temperature=0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
_IDLE_SECONDS = 0.01  # longest wait for a mask while nothing runs; commands wait meanwhile


class LLMEngine(EngineLifecycle, UpdatableEngine):
    """Continuous batching over one model, for one thread; see `Engine` for its methods.

    The next step is dispatched before the last one's tokens are read: a step's input tokens are
    already on the device. The end of a sequence is known one step late, and the token computed
    meanwhile is dropped.

    `rjax.build.engine_builder.build_engine` makes one. Its memory is freed with the last reference
    to it, or by `close`.

    Args:
        parts: the worker that runs the steps, and the limits that it was made for.
    """

    def __init__(self, parts: EngineParts) -> None:
        config = self.config = parts.config
        self.model_config, self.max_model_len = parts.model_config, parts.max_model_len
        self._tokenizer = parts.tokenizer
        self._vocab_size = parts.vocab_size
        self._worker: StepWorker = parts.worker
        pool, self._page_size = parts.worker.pool, config.cache.page_size
        check_sequence_fits(pool.num_pages, self._page_size, self.max_model_len, pool.windows)
        has_states = pool.states is not None
        self._kv_events = KvEventStream(config.cache, parts.identity, has_states=has_states)
        events = self._kv_events.log
        self._blocks = BlockManager(pool.num_pages, self._page_size, events)
        states = pool.states and StatePool(pool.states.num_states, self._blocks, events)
        self._scheduler = Scheduler(
            self._blocks,
            limits=parts.limits,
            max_pages=-(-self.max_model_len // self._page_size),
            enable_prefix_caching=config.cache.enable_prefix_caching,
            pool=pool,
            host=HostPool(self._worker.num_host_pages),
            cost=PreemptionCost(config.cache.preemption, self._worker.measure_page_seconds()),
            states=states,
            host_states=HostPool(self._worker.num_host_states),
        )
        self._held = HeldRequests(self._scheduler, self._worker.is_ready)
        self._roots = PageRoots(parts.identity)
        self._eos = self._tokenizer.eos_token_ids if self._tokenizer else frozenset[int]()
        self._checks = RequestChecks(
            vocab_size=parts.vocab_size,
            max_model_len=parts.max_model_len,
            max_logprobs=config.scheduler.max_logprobs,
            logprobs_mode=config.scheduler.logprobs_mode,
            eos_token_ids=self._eos,
            has_tokenizer=self._tokenizer is not None,
        )
        self._masks = RequestMasks(self._tokenizer, parts.vocab_size, self._eos)
        self.structured_masks = self._masks.structured  # any thread may call these two
        self.limit_grammar_cache = self._masks.limit_cache
        self._in_flight: deque[DispatchedStep] = deque()
        self._pending_outputs: list[RequestOutput] = []
        self._prefixes = NamedPrefixes(
            self._blocks,
            self._checks,
            max_model_len=self.max_model_len,
            enabled=config.cache.enable_prefix_caching,
            windows=pool.windows,
            states=self._scheduler.states,
        )
        self._refill = PrefixRefill(self._prefixes.pinned)
        self._state = LifecycleState()
        self._timer = StepTimer(self._scheduler.cost, parts.limits.max_num_batched_tokens)
        self._arrivals = itertools.count()
        self._stats = parts.new_stats()
        self._live = LiveRequests(
            self._scheduler,
            self._prefixes,
            self._masks,
            self._page_size,
            self._stats,
        )
        self._requests = self._live.by_id
        self._weights = WeightUpdates(
            self._roots, self._scheduler, self._live, self._prefixes, self._kv_events
        )
        self._deadlines = Deadlines(self._requests)
        self._startup_times, self.summary = parts.startup_times, dict(parts.summary)
        for path in config.cache.prefix_files:
            self.load_prefix(path)

    def __repr__(self) -> str:
        model, stats = self.config.model.model or "bundled model", self._stats
        if self._closed:
            return f"LLMEngine({model}, closed)"
        return (
            f"LLMEngine({model}, {stats.backend} on {stats.device}, up to {stats.max_num_seqs} "
            f"sequences of {self.max_model_len} tokens, {self._worker.pool.num_pages} pages of "
            f"{self._page_size} tokens, {len(self._requests)} requests)"
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def _free(self) -> None:
        for request_id in list(self._requests):
            self.abort_request(request_id)
        self._pending_outputs.clear()
        self._in_flight.clear()
        self._kv_events.close()
        self._masks.close()
        self._held.close()
        self._worker.close()
        del self._worker

    @no_type_check  # what users give is checked by hand, with messages for them
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Tokens[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        share: str | None = None,
        masks: Tokens[TokenMask] = (),
        prefix: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
        keep_as: KeepAs | None = None,
        logprob_start_len: int = 0,
        prompt_temperature: float = 1.0,
    ) -> None:
        self._check_open()
        self._check_awake()
        if request_id in self._requests:
            raise InvalidRequestError(f"request id {request_id!r} is in use; choose another")
        self._checks.queueing(priority, share)
        deadline = None if timeout is None else time.monotonic() + self._checks.timeout(timeout)
        if prefix is not None:
            named = self._prefixes.pinned.get(prefix)
            prompt_token_ids = [*named.token_ids, *prompt_token_ids]
            cache_salt = named.cache_salt if cache_salt is None else cache_salt
        root = self._salted_root(cache_salt)
        room = 0 if logprob_start_len else 1
        tokens, array = self._checks.prompt(prompt_token_ids, room)
        params = self._checks.params(params)
        self._checks.logprob_start(logprob_start_len, len(tokens))
        prompt_temperature = self._checks.prompt_temperature(prompt_temperature)
        pending = None
        if keep_as is not None:
            pending = self._prefixes.prepare(keep_as, tokens, cache_salt, root)
        else:
            self._refill_prefixes(tokens, cache_salt, priority, share)
        masks = self._masks.of_request(params, masks)
        longest = max(self.max_model_len - len(tokens), 1)
        arrival = next(self._arrivals)
        drawn = drawn_seed(self.config.model.seed, arrival)
        request = self._requests[request_id] = Request.start(
            request_id,
            tokens,
            array,
            params,
            prompt=prompt,
            max_tokens=min(params.max_tokens or longest, longest),
            seed=drawn if params.seed is None else params.seed,
            order=(arrival + priority * self.config.scheduler.priority_patience, arrival),
            root=root,
            page_size=self._page_size,
            masks=masks,
            tokenizer=self._tokenizer,
            eos=self._eos,
            deadline=deadline,
            logprob_start_len=logprob_start_len,
            prompt_temperature=prompt_temperature,
            cache_salt=cache_salt,
            weights_version=self.weights_version,
        )
        if pending is not None:
            self._prefixes.pending[request_id] = pending
        self._deadlines.add(request)
        self._held.add(request, share)

    def has_unfinished_requests(self) -> bool:
        return super().has_unfinished_requests() or self._weights.failure is not None

    def step(self) -> list[RequestOutput]:
        self._check_open()
        for request_id in self._deadlines.late():
            self.abort_request(request_id)
        self._pending_outputs += self._live.fail_masks()
        self._held.release_ready()
        dispatched = 0 if self._state.is_frozen else self._dispatch()
        outputs, self._pending_outputs = self._pending_outputs, []
        alone = len(self._in_flight) == dispatched + 1
        while len(self._in_flight) > dispatched:
            outputs += self._read(self._in_flight.popleft(), alone=alone)
        if self._in_flight and self._in_flight[-1].forward_only:
            self._in_flight[-1] = self._sample(self._in_flight[-1])
        elif not (outputs or self._in_flight):  # sequences may wait for their masks
            self._masks.wait_for_any(_IDLE_SECONDS)
        self._kv_events.flush(self._stats)
        return self._refill.without_refills(outputs)

    def _sample(self, step: DispatchedStep) -> DispatchedStep:
        """Sample a step whose token masks have the last tokens now; late ones leave it."""
        self._masks.wait(step.batch)
        self._pending_outputs += self._live.fail_masks()
        bitmasks, failed, late = self._masks.of_step(step.batch)
        self._end_failed(failed)
        sampled = self._worker.sample(step, bitmasks)
        for row in late:
            item = sampled.batch[row]
            if item.sequence.status is SequenceStatus.RUNNING:
                sampled.batch[row] = item._replace(samples=False)
                item.sequence.retract()
                self._scheduler.preempt(item.sequence)
        return sampled

    def _dispatch(self) -> int:
        """Schedule and dispatch the next step, and the decode steps of the same multi-step program.

        Returns:
            Steps dispatched.
        """
        most, tables = self._worker.num_decode_steps, self._scheduler.page_tables
        automatic = most > 1 and self.config.scheduler.num_decode_steps == "auto"
        for count in range(1, most + 1):
            schedule = self._scheduler.schedule()
            self._move(schedule.operations)
            failed = self._admit(schedule.admitted)
            if not schedule.scheduled:
                self._end_failed(failed)
                return count - 1
            self._count_memory()
            step = self._worker.dispatch(
                schedule.scheduled,
                tables,
                may_queue=most > 1 and not (automatic and self._scheduler.has_waiting),
                streams=automatic and any([r.wants_every_step for r in self._requests.values()]),
            )
            self._end_failed(failed)  # only now: other sequences may share the pages that it writes
            self._stats.count_step(step.num_tokens, step.stats)
            self._in_flight.append(step)
            if not step.is_queued:
                return count
        return most

    def _move(self, operations: list[PageOperation]) -> None:
        if operations:
            self._worker.move(operations)
            self._stats.count_operations(operations)

    def abort_request(self, request_id: str) -> None:
        self._held.release(request_id)
        if (output := self._live.abort(request_id)) is not None:
            self._pending_outputs.append(output)

    def stop_samples(self, request_id: str, samples: Collection[int]) -> None:
        if (output := self._live.stop(request_id, samples)) is not None:
            self._pending_outputs.append(output)

    def kernels(self) -> list[KernelUse]:
        self._check_open()
        return self._worker.kernels()

    def compile_progress(self) -> CompileProgress:
        self._check_open()
        return self._worker.compile_progress()

    def startup_seconds(self) -> dict[str, float]:
        return dict(self._startup_times.seconds)

    def reset_prefix_cache(self) -> None:
        self._check_open()
        if self._scheduler.states is not None:
            self._scheduler.states.pool.forget_cached()
        self._blocks.forget_cached()

    def pinned_pages(self) -> list[int]:
        """Pages held by shared prefixes, once for each that holds them."""
        return self._prefixes.pinned.pages()

    def stats(self) -> EngineStats:
        self._check_open()
        self._count_memory()
        return self._stats.now(
            self._scheduler,
            self._blocks,
            self.pinned_pages(),
            self._worker.pool,
            num_held=self._held.num_sequences,
        )

    def reset_stats(self) -> None:
        """Reset the counters. Figures of memory and of requests under way stay."""
        self._live.stats = self._stats = self._stats.anew()

    def set_shared_prefix(self, token_ids: Tokens[int]) -> None:
        self._check_open()
        if len(token_ids):
            self._compute_prefix(KeepAs(SHARED_PREFIX), token_ids, None)
        else:
            self._prefixes.pinned.drop(SHARED_PREFIX, missing_ok=True)

    @no_type_check
    def add_prefix(
        self,
        name: str,
        token_ids: Tokens[int],
        *,
        cache_salt: str | None = None,
        text: str | None = None,
    ) -> None:
        self._check_open()
        self._checks.prefix_name(name)
        self._compute_prefix(KeepAs(name, text), token_ids, cache_salt)

    def drop_prefix(self, name: str) -> None:
        self._check_open()
        self._prefixes.pinned.drop(name)

    def prefixes(self) -> list[NamedPrefix]:
        self._check_open()
        return self._prefixes.listed()

    def save_prefix(self, name: str, path: str | pathlib.Path) -> None:
        self._check_open()
        self._check_awake()
        if not (prefix := self._prefixes.pinned.get(name)).pages:
            self._compute_prefix(KeepAs(name, prefix.text), prefix.token_ids, prefix.cache_salt)
        self._prefixes.save(name, path, self._worker)

    def load_prefix(
        self, path: str | pathlib.Path, name: str | None = None, *, cache_salt: str | None = None
    ) -> NamedPrefix:
        self._check_open()
        self._check_awake()
        self._move(self._scheduler.take_operations())  # before pages are written
        return self._prefixes.load(
            path, name, cache_salt, self._salted_root(cache_salt), self._worker
        )

    @no_type_check
    def _compute_prefix(self, keep_as: KeepAs, tokens: Tokens[int], salt: str | None) -> None:
        """Run steps until a request of these tokens has finished and its prompt is pinned."""
        self._check_steps()
        self.add_request(SHARED_PREFIX, tokens, _PREFILL, cache_salt=salt, keep_as=keep_as)
        outputs: list[RequestOutput] = []
        try:
            while SHARED_PREFIX in self._requests:
                outputs += self.step()
        finally:
            self.abort_request(SHARED_PREFIX)
            outputs += self._pending_outputs
            self._pending_outputs = [o for o in outputs if o.request_id != SHARED_PREFIX]
        for output in outputs:
            if output.request_id == SHARED_PREFIX and output.error is not None:
                raise output.error

    def _refill_prefixes(
        self, tokens: list[int], salt: str | None, priority: int, share: str | None
    ) -> None:
        """Before a request: fill again the unloaded prefixes that its prompt starts with."""
        for request_id, prefix in self._refill.of_prompt(tokens, salt, self._requests):
            with contextlib.suppress(OutOfMemoryError):  # no room now; a later request tries again
                self.add_request(
                    request_id,
                    prefix.token_ids,
                    _PREFILL,
                    priority=priority,
                    share=share,
                    cache_salt=salt,
                    keep_as=KeepAs(prefix.name, prefix.text),
                )

    @no_type_check
    def _salted_root(self, salt: str | None) -> bytes:
        return self._roots.of(None if salt is None else self._checks.salt(salt))

    def _read_in_flight(self) -> None:
        while self._in_flight:
            self._pending_outputs += self._read(self._in_flight.popleft(), alone=False)

    def _admit(self, admitted: list[Sequence]) -> list[tuple[str, Exception]]:
        """Fill the sampling state of admitted sequences.

        Returns:
            The ids of requests whose state cannot be made, each with the error.
        """
        failed: list[tuple[str, Exception]] = []
        rows: dict[int, SlotRow] = {}
        for sequence in admitted:
            request = self._requests[sequence.request_id]
            if not sequence.num_preemptions:
                self._stats.count_admission(sequence, request.metrics)
            assert sequence.slot is not None
            try:
                rows[sequence.slot] = slot_row(
                    sequence.params,
                    seed=sequence.seed,
                    prompt_token_ids=sequence.prompt_array,
                    output_token_ids=sequence.output_token_ids,
                    eos_token_ids=self._eos,
                    vocab_size=self._vocab_size,
                )
            except Exception as error:  # in its parameters: only this request ends
                failed.append((sequence.request_id, error))
        if rows:
            self._worker.admit(rows)
        return failed

    def _end_failed(self, failed: list[tuple[str, Exception]]) -> None:
        """End and report requests whose sampling state or mask is not usable."""
        for request_id, error in failed:
            if request := self._requests.pop(request_id, None):  # n samples, one report
                self._live.fail(request, error)
                self._pending_outputs.append(request.snapshot())

    def _read(self, step: DispatchedStep, *, alone: bool) -> list[RequestOutput]:
        result = self._worker.read(step)
        self._timer.read(step, alone=alone, last=not self._in_flight)
        self._stats.multi_steps += result.num_steps > 1
        return self._live.take(step.batch, result)

    def _count_memory(self) -> None:
        unshared = sum([s.num_pages for s in self._scheduler.running])
        self._stats.count_pages(self._blocks.counts().used, unshared)
