"""A worker without a device, that knows what every page should hold and checks every read.

A token is a function of the tokens before it, so that any mix-up of pages changes what a sequence
says; the KV of a position is the hash of all tokens up to it. Layers with windows read only the
positions in them, and only those pages have to be there. The state behind a page is the hash of all
tokens up to there; a slot knows what its sequence has computed. New weights say something else, and
only requests that keep their KV may read that of others.
"""

import numpy as np

from rjax.batch.dispatched_step import DispatchedStep
from rjax.batch.page_hash import root_key
from rjax.batch.page_operations import CopyPages, SwapIn, SwapInState, SwapOut, SwapOutState
from rjax.batch.step_limits import StepLimits, step_limits
from rjax.batch.step_readout import HostLogprobs, StepReadout
from rjax.batch.step_worker import PoolSize, StatePoolSize
from rjax.config import EngineConfig
from rjax.engine.llm_engine import LLMEngine
from rjax.engine.parts import EngineParts
from rjax.models import CheckpointError
from rjax.pallas_kernels.attention.plan.host import PlanStats


def next_token(tokens, index: int, vocab: int, version: int = 0) -> int:
    """What the fake model says after these tokens in sample ``index``."""
    return hash((tuple(tokens[-3:]), len(tokens), index, version)) % vocab


class FakeWorker:
    """Executes page operations and steps on lists; ``check`` turns the checking of reads off."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        vocab: int,
        num_host_pages: int = 0,
        limits: StepLimits | None = None,
        windows: tuple[int | None, ...] = (None,),
        states: StatePoolSize | None = None,
        num_host_states: int = 0,
    ) -> None:
        self.limits = limits or StepLimits(4, 7)
        self.num_decode_steps = 1
        self.pool = PoolSize(num_pages, 1, windows, states)
        self.states: list = [None] * (states.num_states if states else 0)
        self.tails: list = [None] * self.limits.num_slots
        self.num_host_pages, self.num_host_states = num_host_pages, num_host_states
        self.host_states: list = [None] * num_host_states
        self.page_size = page_size
        self.vocab = vocab
        self.pages = [[None] * page_size for _ in range(num_pages)]
        self.host = [[None] * page_size for _ in range(num_host_pages)]
        self.truth = {}
        self.asleep: set[str] = set()
        self.dropped = False  # the weights
        self.moved = {CopyPages: 0, SwapOut: 0, SwapIn: 0, SwapInState: 0}
        self.computed = 0
        self.compiling: set[str] = set()  # requests whose programs are missing
        self.version = 0
        self.keeping: set[str] = set()  # requests that keep the KV of older weights

    def is_ready(self, sequence) -> bool:
        return sequence.request_id not in self.compiling

    def admit(self, rows) -> None:
        assert all(0 <= slot < self.limits.num_slots for slot in rows)

    def close(self) -> None:
        pass

    def check_weights(self, tensors, *, partial):
        if not tensors and not partial:
            raise CheckpointError("there are none")
        return tensors

    def adopt_weights(self, update) -> None:
        self.version += 1

    def _is_right(self, sequence, found, right) -> bool:
        """Whether KV or a state, with the version of its weights, is of the right tokens and of
        weights that the sequence may read."""
        own = (found[0], self.version) if sequence.request_id in self.keeping else found
        return own == (right, self.version)

    def sleep(self, level: int) -> None:
        assert level in (1, 2)
        self.dropped |= level == 2
        self.asleep |= {"weights", "kv_cache"}
        self.pages, self.host = [None] * len(self.pages), [None] * len(self.host)
        self.states, self.tails = [None] * len(self.states), [None] * len(self.tails)

    def wake_up(self, tag: str) -> None:
        self.asleep.remove(tag)
        if tag == "weights" and self.dropped:
            self.dropped = False
            self.version += self.version > 0  # those that the engine started with, under a new name
        if tag == "kv_cache":
            self.pages = [[None] * self.page_size for _ in self.pages]
            self.host = [[None] * self.page_size for _ in self.host]

    def measure_page_seconds(self) -> float:
        """Some time."""
        return 1e-4

    def move(self, operations) -> None:
        for operation in operations:
            match operation:
                case CopyPages(source, target):
                    assert len(set(target)) == len(target)
                    read = [list(self.pages[page]) for page in source]
                    for page, content in zip(target, read, strict=True):
                        self.pages[page] = content
                    self.moved[CopyPages] += len(target)
                case SwapOut(pages, slots):
                    for page, slot in zip(pages, slots, strict=True):
                        self.host[slot] = list(self.pages[page])
                    self.moved[SwapOut] += len(pages)
                case SwapIn(slots, pages):
                    for slot, page in zip(slots, pages, strict=True):
                        self.pages[page] = list(self.host[slot])
                    self.moved[SwapIn] += len(pages)
                case SwapOutState(page, slot, host_slot):
                    of_page = None if page is None else self.states[page]
                    of_slot = None if slot is None else self.tails[slot]
                    self.host_states[host_slot] = of_page, of_slot
                case SwapInState(host_slot, page, slot):
                    of_page, of_slot = self.host_states[host_slot]
                    assert (page is None, slot is None) == (of_page is None, of_slot is None)
                    if page is not None:
                        self.states[page] = of_page
                    if slot is not None:
                        self.tails[slot] = of_slot
                    self.moved[SwapInState] += 1

    def _groups(self, sequence):
        """(number, window, pages) of each page group."""
        return [*zip(range(9), self.pool.windows, sequence.pages, strict=False)]

    def dispatch(self, batch, tables, *, may_queue, streams):
        S, limits = self.page_size, self.limits
        assert not self.asleep
        assert sum(item.samples for item in batch) <= limits.max_num_seqs
        assert len(batch) <= limits.max_num_seqs + limits.max_prefill_ahead_seqs
        assert sum(item.stop - item.start for item in batch) <= limits.max_num_batched_tokens
        written = set()
        for item in batch:
            sequence = item.sequence
            tokens = self.truth.setdefault(sequence, list(sequence.prompt_token_ids))
            known = sequence.tokens(0, sequence.num_known)
            assert known == tokens[: len(known)]
            for group, window, pages in self._groups(sequence):
                first = 0 if window is None else max(0, item.start - window + 1) // S
                assert list(tables[group, sequence.slot, first : len(pages)]) == pages[first:]
                assert all(page >= 0 for page in pages[first:]), "a page in the window is gone"
            assert item.start < item.stop <= len(tokens)
            self.computed += item.stop - item.start
            prefix = 0
            for position, token in enumerate(tokens[: item.stop]):
                prefix = hash((prefix, token))
                if position >= max(item.start, item.stored):
                    for group, _, pages in self._groups(sequence):
                        place = pages[position // S], position % S
                        assert place not in written, "two sequences write one place"
                        written.add(place)
                        self.pages[place[0]][place[1]] = (group, prefix), self.version
        if self.states:
            self._go_through_states(batch, tables[-1])
        drawn = np.full(len(batch), -1, np.int32)
        for b, item in enumerate(batch):
            sequence, tokens = item.sequence, self.truth[item.sequence]
            prefix = 0
            for position, token in enumerate(tokens[: item.stop]):
                prefix = hash((prefix, token))
                for group, window, pages in self._groups(sequence):
                    if window is None or position > item.start - window:
                        found = self.pages[pages[position // S]][position % S]
                        right = self._is_right(sequence, found, (group, prefix))
                        assert right, f"position {position} holds another's KV"
            if item.samples:
                assert item.stop == len(tokens)
                drawn[b] = next_token(tokens, sequence.index, self.vocab, self.version)
                tokens.append(int(drawn[b]))
        return DispatchedStep(list(batch), drawn, PlanStats(0, 0, 0), 1)

    def _go_through_states(self, batch, table):
        """Each sequence goes on from its slot or a page, and leaves states at the ends of pages."""
        S, written, read = self.page_size, set(), set()
        for item in batch:
            sequence, slot, start = item.sequence, item.sequence.slot, item.start
            tokens = self.truth[item.sequence][: item.stop]
            prefixes = [0]
            for token in tokens:
                prefixes.append(hash((prefixes[-1], token)))
            if start % S:
                tail = start, prefixes[start]
                assert self._is_right(sequence, self.tails[slot], tail), "another's tail"
            elif start:
                page = table[slot, start // S - 1]
                read.add(page)
                assert page >= 0, "no state to go on from"
                found = self._is_right(sequence, self.states[page], prefixes[start])
                assert found, "another's state"
            for number in range(start // S, item.stop // S):
                page = table[slot, number]
                assert page >= 0 or number < item.stop // S - 1, "the last state is lost"
                if page >= 0:
                    assert page not in written, "two sequences write one state"
                    written.add(page)
                    self.states[page] = prefixes[(number + 1) * S], self.version
            self.tails[slot] = (item.stop, prefixes[-1]), self.version
        assert not written & read, "a state is read in the step that writes it"

    def read(self, step) -> StepReadout:
        count = len(step.result)
        logprobs = HostLogprobs(
            logprob=np.linspace(-3, -1, count, dtype=np.float32),
            rank=np.ones(count, np.int32),
            top_ids=np.zeros((count, 1), np.int32),
            top_logprobs=np.zeros((count, 1), np.float32),
        )
        return StepReadout(step.result, logprobs, None)


def fake_engine(
    *,
    num_pages=12,
    page_size=2,
    vocab=2,
    host=8,
    host_states=0,
    max_model_len=16,
    spare_rows=0,
    windows=(None,),
    states=None,
    **options,
) -> LLMEngine:
    """An engine over a FakeWorker."""
    config = EngineConfig.from_options(
        {"page_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 7} | options
    )
    object.__setattr__(config.cache, "page_size", page_size)  # smaller than users may choose
    limits = step_limits(config.scheduler, most_tokens=7, spare_rows=spare_rows)
    return LLMEngine(
        EngineParts(
            config=config,
            worker=FakeWorker(
                num_pages, page_size, vocab, host, limits, windows, states, host_states
            ),
            vocab_size=vocab,
            max_model_len=max_model_len,
            limits=limits,
            identity=root_key("fake"),
        )
    )
