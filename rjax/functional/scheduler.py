"""The scheduler of a rollout, on the device: which samples run in which rows, and on which pages.

Samples start in order and every row holds one. Rows stay packed in that order, so that the samples
of a prompt are neighbours, which read its KV together. A page belongs to a prompt or to one sample;
a sample takes its pages as it grows. If a page is lacking, prompts without a running sample give
theirs back, and then the youngest sample, which starts again later with the same random numbers.

Layers with a state in place of KV keep it in a slot, of a row or of a prompt. A sample starts from
a copy of its prompt's state, the one before the prompt's last token. When all samples of a prompt
have started, another prompt can take its slot. If one of them is preempted, the prompt's state is
computed again.

All functions are pure and their shapes fixed: A prompts, J = A * n samples, R rows, P pages.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from rjax.functional.free_pages import FreePages

_NOWHERE = np.iinfo(np.int32).max  # an index that is in no array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Jobs:
    """Prompts and their samples; sample i of prompt a is job a * n + i.

    Attributes:
        prompts: token ids, right-padded.
        lengths: tokens of each prompt. The last one is the first input of each sample.
        max_tokens: most tokens of each sample.
        samples: samples of each prompt, n.
        page_size: tokens per page, S.
        sample_pages: most pages that a sample takes.
        prompt_slots: prompts whose states are kept at once; 0 for a model without states.
    """

    prompts: Int[Array, "A Q"]
    lengths: Int[Array, " A"]
    max_tokens: Int[Array, " J"]
    samples: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    sample_pages: int = dataclasses.field(metadata={"static": True})
    prompt_slots: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def shared(self) -> Int[Array, " A"]:
        """Tokens of each prompt that are computed once for its samples.

        A state cannot be without its last token, as KV can: its samples compute that themselves.
        """
        return self.lengths - 1 if self.prompt_slots else self.lengths

    @property
    def count(self) -> int:
        """Number of jobs, J."""
        return self.prompts.shape[0] * self.samples

    @property
    def prompt_pages(self) -> Int[Array, " A"]:
        """Pages of the KV of each prompt."""
        return -(-self.shared // self.page_size)

    def prompt_of(self, job: Int[Array, " X"]) -> Int[Array, " X"]:
        """The prompt of each job; any prompt for job -1."""
        return jnp.maximum(job, 0) // self.samples


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """R rows, the running samples first, in the order of their jobs.

    Attributes:
        job: -1 in a row without a sample.
        token: the next input token.
        length: tokens before it.
        table: page ids, -1 beyond the last page.
        slot: slot of the row's state; a sample keeps it when its row moves.
    """

    job: Int[Array, " R"]
    token: Int[Array, " R"]
    length: Int[Array, " R"]
    table: Int[Array, "R M"]
    slot: Int[Array, " R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class PromptStates:
    """The slots of prompts, of which each computed prompt with a waiting job has one.

    Attributes:
        slot: slot of each prompt's state; -1 for none.
        free: the free slots, counted from 0.
    """

    slot: Int[Array, " A"]
    free: FreePages

    def without(self, gone: Bool[Array, " A"]) -> "PromptStates":
        """The slots of some prompts freed, where they have one."""
        free = self.free.put_back(self.slot, gone & (self.slot >= 0))
        return PromptStates(jnp.where(gone, -1, self.slot), free)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """What runs, what waits, and who holds which pages.

    Every running job precedes every waiting one, and every computed prompt with a waiting job
    precedes those that are not computed.

    Attributes:
        rows: the running samples.
        free: the free pages.
        waiting: jobs that have not started, or were preempted.
        ended: jobs that have ended.
        prompt_table: page ids of each prompt, -1 beyond the last page.
        computed: prompts whose pages hold their KV.
        lacking: whether a sample found no page in the last step.
        states: slots of the prompts; None for a model without states.
    """

    rows: Rows
    free: FreePages
    waiting: Bool[Array, " J"]
    ended: Bool[Array, " J"]
    prompt_table: Int[Array, "A M"]
    computed: Bool[Array, " A"]
    lacking: Bool[Array, ""]
    states: PromptStates | None = None

    @property
    def ready(self) -> Bool[Array, " A"]:
        """Prompts whose samples can start: computed ones, of which the state is there too."""
        return self.computed if self.states is None else self.computed & (self.states.slot >= 0)

    @property
    def running(self) -> Int[Array, ""]:
        """Number of running samples."""
        return jnp.sum(self.rows.job >= 0, dtype=jnp.int32)

    def growing(self, jobs: Jobs) -> Int[Array, ""]:
        """Number of running samples that may need another page."""
        rows, S, prompt = self.rows, jobs.page_size, jobs.prompt_of(self.rows.job)
        stored = jnp.maximum(rows.length, jobs.shared[prompt])
        most = jobs.lengths[prompt] + jobs.max_tokens[jnp.maximum(rows.job, 0)] - 1
        return jnp.sum((rows.job >= 0) & (-(-stored // S) * S < most), dtype=jnp.int32)

    def startable(self, jobs: Jobs) -> Bool[Array, " J"]:
        """Waiting jobs whose prompts are ready."""
        return self.waiting & jnp.repeat(self.ready, jobs.samples)


def new_schedule(jobs: Jobs, *, rows: int, num_pages: int, table_pages: int) -> Schedule:
    """All jobs wait, no prompt is computed, all pages are free."""
    A, J = jobs.prompts.shape[0], jobs.count
    nothing, table = jnp.zeros(rows, jnp.int32), jnp.full((rows, table_pages), -1, jnp.int32)
    states = None
    if jobs.prompt_slots:
        free = FreePages.all_of(jobs.prompt_slots)
        states = PromptStates(jnp.full(A, -1, jnp.int32), free)
    return Schedule(
        rows=Rows(nothing - 1, nothing, nothing, table, jnp.arange(rows, dtype=jnp.int32)),
        free=FreePages.all_of(num_pages),
        waiting=jnp.ones(J, bool),
        ended=jnp.zeros(J, bool),
        prompt_table=jnp.full((A, table_pages), -1, jnp.int32),
        computed=jnp.zeros(A, bool),
        lacking=jnp.zeros((), bool),
        states=states,
    )


def rows_to_fill(schedule: Schedule, jobs: Jobs, refill_rows: int) -> Int[Array, ""]:
    """Free rows that waiting jobs can take now: 0 until there are ``refill_rows``.

    Fewer count if they hold all waiting jobs, or if nothing else runs.
    """
    free = schedule.rows.job.shape[0] - schedule.running
    waiting = jnp.sum(schedule.waiting, dtype=jnp.int32)
    enough = free >= jnp.minimum(refill_rows, waiting)
    return jnp.where(enough | (schedule.running == 0), jnp.minimum(free, waiting), 0)


def _next_prompts(schedule: Schedule, jobs: Jobs, count: int) -> tuple[Array, Array]:
    """The next prompts to compute that free pages and slots hold: ids, and whether there is one.

    A page for each sample that may need one stays free, and at least those of one sample.
    """
    A = jobs.prompts.shape[0]
    wanted = ~schedule.ready & jnp.any(schedule.waiting.reshape(A, jobs.samples), axis=1)
    ids = jnp.nonzero(wanted, size=count, fill_value=A)[0].astype(jnp.int32)
    prompt = jnp.minimum(ids, A - 1)
    pages = jnp.cumsum(jnp.where(schedule.computed[prompt], 0, jobs.prompt_pages[prompt]))
    reserve = jnp.maximum(schedule.growing(jobs), jobs.sample_pages)
    fits = (ids < A) & (pages <= schedule.free.count - reserve)
    if schedule.states is not None:
        fits &= jnp.arange(count) < schedule.states.free.count
    return ids, fits


def needs_prompts(schedule: Schedule, jobs: Jobs, refill_rows: int) -> Bool[Array, ""]:
    """Whether rows are free for samples of a prompt that is not ready, and what it takes too."""
    startable = jnp.sum(schedule.startable(jobs), dtype=jnp.int32)
    _, fits = _next_prompts(schedule, jobs, 1)
    return (rows_to_fill(schedule, jobs, refill_rows) > startable) & fits[0]


class PromptBatch(NamedTuple):
    """Prompts that are computed together.

    Attributes:
        prompt: number of each.
        table: its page table.
        length: tokens that are to be computed.
        writes: whether their KV is to be written; else it is there, and the state alone is not.
        slot: slot of its state among those of prompts.
    """

    prompt: Int[Array, " G"]
    table: Int[Array, "G M"]
    length: Int[Array, " G"]
    writes: Bool[Array, " G"]
    slot: Int[Array, " G"]


class Copies(NamedTuple):
    """What starting samples copy: sources and targets, which are beyond the last where nothing is.

    Attributes:
        page, to_page: a sample that starts within a page gets a copy of it.
        slot, to_slot: slot of the prompt's state among those of prompts, and that of the row.
    """

    page: Int[Array, " F"]
    to_page: Int[Array, " F"]
    slot: Int[Array, " F"]
    to_slot: Int[Array, " F"]


def take_prompts(schedule: Schedule, jobs: Jobs, count: int) -> tuple[Schedule, PromptBatch]:
    """Give pages and slots to the next prompts, up to ``count``, and mark them as computed.

    Returns:
        The schedule, and the prompts: of length 0 where none is left, or nothing holds it.
    """
    A = jobs.prompts.shape[0]
    ids, fits = _next_prompts(schedule, jobs, count)
    prompt = jnp.minimum(ids, A - 1)
    column = jnp.arange(schedule.prompt_table.shape[1], dtype=jnp.int32)
    writes = fits & ~schedule.computed[prompt]
    wanted = writes[:, None] & (column < jobs.prompt_pages[prompt][:, None])
    free, table = schedule.free.take(wanted)
    table = jnp.where(writes[:, None], table, schedule.prompt_table[prompt])
    target, slot, states = jnp.where(fits, prompt, A), jnp.zeros(count, jnp.int32), schedule.states
    if states is not None:
        free_slots, slot = states.free.take(fits)
        states = PromptStates(states.slot.at[target].set(slot, mode="drop"), free_slots)
    schedule = dataclasses.replace(
        schedule,
        free=free,
        prompt_table=schedule.prompt_table.at[target].set(table, mode="drop"),
        computed=schedule.computed.at[target].set(True, mode="drop"),
        states=states,
    )
    length = jnp.where(fits, jobs.shared[prompt], 0)
    return schedule, PromptBatch(prompt, table, length, writes, jnp.maximum(slot, 0))


def _next_samples(
    schedule: Schedule, jobs: Jobs, count: int, refill_rows: int
) -> tuple[Array, Array]:
    """The next jobs to start: ids, and whether there is a job, a row and a page for it.

    A page for each running sample that may need one stays free.
    """
    ids = jnp.nonzero(schedule.startable(jobs), size=count, fill_value=jobs.count)[0]
    rank = jnp.arange(count, dtype=jnp.int32)
    spare = schedule.free.count - schedule.growing(jobs) > rank
    starts = (ids < jobs.count) & (rank < rows_to_fill(schedule, jobs, refill_rows)) & spare
    return ids.astype(jnp.int32), starts


def can_start(schedule: Schedule, jobs: Jobs, refill_rows: int) -> Bool[Array, ""]:
    """Whether a job can start."""
    return _next_samples(schedule, jobs, 1, refill_rows)[1][0]


def start_samples(
    schedule: Schedule, jobs: Jobs, count: int, refill_rows: int
) -> tuple[Schedule, Copies]:
    """Start the next jobs, up to ``count``, in the rows behind the running ones.

    Returns:
        The schedule, and what is to be copied before anything else is computed.
    """
    ids, starts = _next_samples(schedule, jobs, count, refill_rows)
    job = jnp.minimum(ids, jobs.count - 1)
    prompt = jobs.prompt_of(job)
    length = jobs.lengths[prompt]
    table = schedule.prompt_table[prompt]
    shared = jobs.shared[prompt]
    column = jnp.minimum(shared // jobs.page_size, table.shape[1] - 1)
    each = jnp.arange(count)
    source = table[each, column]
    copied = starts & (shared % jobs.page_size != 0)
    free, page = schedule.free.take(copied)
    table = table.at[each, column].set(jnp.where(copied, page, source))
    rows = schedule.rows
    R, P = rows.job.shape[0], schedule.free.ids.shape[0]
    row = jnp.where(starts, schedule.running + each, R)
    slot, to_slot = jnp.zeros_like(row), rows.slot.at[row].get(mode="fill", fill_value=_NOWHERE)
    rows = Rows(
        job=rows.job.at[row].set(job, mode="drop"),
        token=rows.token.at[row].set(jobs.prompts[prompt, length - 1], mode="drop"),
        length=rows.length.at[row].set(length - 1, mode="drop"),
        table=rows.table.at[row].set(table, mode="drop"),
        slot=rows.slot,
    )
    waiting = schedule.waiting.at[jnp.where(starts, job, jobs.count)].set(False, mode="drop")
    states = schedule.states
    if states is not None:
        slot = jnp.maximum(states.slot[prompt], 0)
        states = states.without(~jnp.any(waiting.reshape(-1, jobs.samples), axis=1))
    schedule = dataclasses.replace(schedule, rows=rows, free=free, waiting=waiting, states=states)
    return schedule, Copies(jnp.maximum(source, 0), jnp.where(copied, page, P), slot, to_slot)


def take_pages(
    schedule: Schedule, jobs: Jobs
) -> tuple[Schedule, Bool[Array, " R"], Bool[Array, " R"]]:
    """Give each row the page that its next token needs; the older samples come first.

    Returns:
        The schedule, which rows can run, and which of them write KV: the first step of a sample
        does not where the KV of the prompt's last token is stored.
    """
    rows, S = schedule.rows, jobs.page_size
    running = rows.job >= 0
    writes = running & (rows.length >= jobs.shared[jobs.prompt_of(rows.job)])
    wanted = writes & (rows.length % S == 0)
    free, page = schedule.free.take(wanted)
    given = page >= 0
    each, column = jnp.arange(rows.job.shape[0]), rows.length // S
    table = rows.table.at[each, column].set(jnp.where(given, page, rows.table[each, column]))
    lacking = jnp.any(wanted & ~given)
    rows = dataclasses.replace(rows, table=table)
    schedule = dataclasses.replace(schedule, rows=rows, free=free, lacking=lacking)
    runs = running & (~wanted | given)
    return schedule, runs, runs & writes


def free_rows(schedule: Schedule, jobs: Jobs) -> Schedule:
    """Take ended samples out of their rows, free the pages that nobody needs, and pack the rows.

    The pages of a prompt are freed when all its samples have ended. If a sample lacks a page and
    none has ended, the prompts without a running sample lose theirs; if there are none, the
    youngest of several samples is preempted.
    """
    rows, S, A = schedule.rows, jobs.page_size, jobs.prompts.shape[0]
    held = rows.job >= 0
    leaves = held & schedule.ended[jnp.maximum(rows.job, 0)]
    lacking = schedule.lacking & ~jnp.any(leaves)
    prompt = jobs.prompt_of(rows.job)
    used = jnp.zeros(A, bool).at[jnp.where(held, prompt, A)].set(True, mode="drop")
    idle = schedule.computed & ~used & lacking
    over = schedule.computed & jnp.all(schedule.ended.reshape(A, jobs.samples), axis=1)
    dropped = idle | over
    each = jnp.arange(rows.job.shape[0])
    youngest = (each == schedule.running - 1) & (each > 0) & lacking & ~jnp.any(idle)
    waiting = schedule.waiting.at[jnp.where(youngest, rows.job, jobs.count)].set(True, mode="drop")
    leaves |= youngest

    column = jnp.arange(rows.table.shape[1], dtype=jnp.int32)
    own = leaves[:, None] & (column >= (jobs.shared[prompt] // S)[:, None]) & (rows.table >= 0)
    shared = dropped[:, None] & (schedule.prompt_table >= 0)
    free = schedule.free.put_back(rows.table, own).put_back(schedule.prompt_table, shared)

    stays = held & ~leaves
    order = jnp.argsort(~stays, stable=True)
    kept = stays[order]
    return dataclasses.replace(
        schedule,
        rows=Rows(
            job=jnp.where(kept, rows.job[order], -1),
            token=jnp.where(kept, rows.token[order], 0),
            length=jnp.where(kept, rows.length[order], 0),
            table=jnp.where(kept[:, None], rows.table[order], -1),
            slot=rows.slot[order],
        ),
        free=free,
        waiting=waiting,
        prompt_table=jnp.where(dropped[:, None], -1, schedule.prompt_table),
        computed=schedule.computed & ~dropped,
        states=None if schedule.states is None else schedule.states.without(dropped),
    )
