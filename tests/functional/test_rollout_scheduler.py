"""The scheduler of a rollout alone: rows, pages and order, with lengths in place of a model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.functional import scheduler
from rjax.functional.free_pages import FreePages

S, STARTS, GROUP = 4, 3, 2


def make_jobs(rng, prompts, samples, most=13, longest=11, prompt_slots=0):
    lengths = rng.integers(1, longest + 1, prompts)
    return scheduler.Jobs(
        prompts=jnp.asarray(rng.integers(0, 50, (prompts, longest)), jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        max_tokens=jnp.asarray(rng.integers(1, most + 1, prompts * samples), jnp.int32),
        samples=samples,
        page_size=S,
        sample_pages=-(-(S - 1 + most) // S),
        prompt_slots=prompt_slots,
    )


needs_prompts = jax.jit(scheduler.needs_prompts, static_argnums=2)
take_prompts = jax.jit(scheduler.take_prompts, static_argnums=2)
can_start = jax.jit(scheduler.can_start, static_argnums=2)
start_samples = jax.jit(scheduler.start_samples, static_argnums=(2, 3))
take_pages = jax.jit(scheduler.take_pages)
free_rows = jax.jit(scheduler.free_rows)


def check(schedule, jobs, num_pages):
    """Every page has one owner, running samples are packed in order and have their pages."""
    rows, n = schedule.rows, jobs.samples
    job, table = np.asarray(rows.job), np.asarray(rows.table)
    running = job[job >= 0]
    assert (job[: running.size] >= 0).all()
    assert (np.diff(running) > 0).all()
    waiting = np.flatnonzero(schedule.waiting)
    assert not running.size or not waiting.size or running[-1] < waiting[0]
    assert not set(running) & set(np.flatnonzero(schedule.ended))
    owned = [np.asarray(schedule.free.ids)[: int(schedule.free.count)]]
    for a in np.flatnonzero(schedule.computed):
        pages = np.asarray(schedule.prompt_table[a])
        assert (pages >= 0).sum() == -(-int(jobs.shared[a]) // S)
        owned.append(pages[pages >= 0])
    for r in range(running.size):
        a = running[r] // n
        assert schedule.computed[a]
        whole = int(jobs.shared[a]) // S
        np.testing.assert_array_equal(table[r, :whole], schedule.prompt_table[a, :whole])
        own = table[r, whole:]
        stored = max(int(rows.length[r]), int(jobs.shared[a]))
        assert (own >= 0).sum() == -(-stored // S) - whole
        owned.append(own[own >= 0])
    assert (table[running.size :] == -1).all()
    np.testing.assert_array_equal(np.sort(np.concatenate(owned)), np.arange(num_pages))
    np.testing.assert_array_equal(np.sort(rows.slot), np.arange(job.size))
    if schedule.states is not None:
        check_slots(schedule, jobs)


def check_slots(schedule, jobs):
    """A slot has one owner: a computed prompt of which samples wait, the first of those."""
    slot, free = np.asarray(schedule.states.slot), schedule.states.free
    waits = np.asarray(schedule.waiting).reshape(-1, jobs.samples).any(axis=1)
    kept = slot >= 0
    assert not (kept & ~np.asarray(schedule.computed)).any()
    assert not (kept & ~waits).any()
    assert not (np.flatnonzero(kept)[:, None] > np.flatnonzero(waits & ~kept)).any()
    owned = np.concatenate([slot[kept], np.asarray(free.ids)[: int(free.count)]])
    np.testing.assert_array_equal(np.sort(owned), np.arange(jobs.prompt_slots))


def simulate(jobs, wanted, *, rows, num_pages, refill_rows=2):
    """Run all jobs, of ``wanted`` tokens each: tokens drawn in each step, the starts by job, and
    the prompts whose state alone was computed again.

    Of a state it keeps whose it is: each sample copies its own prompt's, into a slot of its own.
    """
    J, n = jobs.count, jobs.samples
    schedule = scheduler.new_schedule(jobs, rows=rows, num_pages=num_pages, table_pages=8)
    drawn, started, again = [], np.zeros(J, int), 0
    of_prompt, of_row = np.full(max(1, jobs.prompt_slots), -1), np.full(rows, -1)
    while not np.asarray(schedule.ended).all():
        while needs_prompts(schedule, jobs, refill_rows) or can_start(schedule, jobs, refill_rows):
            while needs_prompts(schedule, jobs, refill_rows):
                before = schedule
                schedule, batch = take_prompts(schedule, jobs, GROUP)
                new = np.flatnonzero(schedule.ready & ~before.ready)
                assert 1 <= new.size <= GROUP
                of_new = [np.asarray(field)[: new.size] for field in batch]
                np.testing.assert_array_equal(of_new[0], new)
                np.testing.assert_array_equal(of_new[1], schedule.prompt_table[new])
                np.testing.assert_array_equal(of_new[2], jobs.shared[new])
                np.testing.assert_array_equal(of_new[3], ~before.computed[new])
                assert not np.asarray(batch.length)[new.size :].any()
                again += int((~of_new[3]).sum())
                if schedule.states is not None:
                    kept = np.asarray(schedule.states.slot)
                    of_prompt[kept[kept >= 0]] = np.flatnonzero(kept >= 0)
            while can_start(schedule, jobs, refill_rows):
                before = np.asarray(schedule.waiting)
                schedule, copies = start_samples(schedule, jobs, STARTS, refill_rows)
                new = np.flatnonzero(before & ~np.asarray(schedule.waiting))
                assert 1 <= new.size <= STARTS
                started[new] += 1
                parts = (np.asarray(jobs.shared)[new // n] % S != 0).sum()
                assert (np.asarray(copies.to_page) < num_pages).sum() == parts
                to_slot = np.asarray(copies.to_slot)
                np.testing.assert_array_equal(to_slot < rows, np.arange(STARTS) < new.size)
                of_row[to_slot[: new.size]] = of_prompt[np.asarray(copies.slot)[: new.size]]
                check(schedule, jobs, num_pages)
        if schedule.states is not None:
            running = np.asarray(schedule.rows.job) >= 0
            np.testing.assert_array_equal(
                of_row[np.asarray(schedule.rows.slot)[running]],
                np.asarray(schedule.rows.job)[running] // n,
            )
        schedule, runs, writes = take_pages(schedule, jobs)
        job, first = np.asarray(schedule.rows.job), np.asarray(jobs.lengths)
        assert runs.any() or schedule.lacking
        length = schedule.rows.length + runs
        number = np.asarray(length) - first[np.maximum(job, 0) // n]
        runs = np.asarray(runs)
        np.testing.assert_array_equal(writes, runs & (number > (-1 if jobs.prompt_slots else 0)))
        drawn.append(int(runs.sum()))
        ended = np.asarray(schedule.ended).copy()
        ended[job[runs & (number + 1 >= wanted[job])]] = True
        schedule = dataclasses.replace(
            schedule,
            rows=dataclasses.replace(schedule.rows, length=length),
            ended=jnp.asarray(ended),
        )
        if schedule.lacking or ended[np.maximum(job, 0)].any():
            schedule = free_rows(schedule, jobs)
        check(schedule, jobs, num_pages)
        assert len(drawn) < 50 * J * S
    assert int(schedule.free.count) == num_pages
    assert int(schedule.running) == 0
    return drawn, started, again


def wanted_of(rng, jobs):
    return rng.integers(1, np.asarray(jobs.max_tokens) + 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_every_sample_runs_once_while_there_are_pages(seed):
    rng = np.random.default_rng(seed)
    jobs = make_jobs(rng, 5, 6)
    wanted = wanted_of(rng, jobs)
    drawn, started, _ = simulate(jobs, wanted, rows=7, num_pages=7 * 4 + 5 * 3)
    assert (started == 1).all()
    assert sum(drawn) == wanted.sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize("prompt_slots", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_states_of_few_prompts_serve_all(seed, prompt_slots):
    rng = np.random.default_rng(seed)
    jobs = make_jobs(rng, 9, 3, prompt_slots=prompt_slots)
    wanted = wanted_of(rng, jobs)
    drawn, started, again = simulate(jobs, wanted, rows=8, num_pages=9 * 3 + 8 * 4, refill_rows=1)
    assert (started == 1).all()
    assert not again
    assert sum(drawn) == wanted.sum()
    assert drawn[0] == 8, "rows beyond the samples of the prompts with a slot run too"


@pytest.mark.sample(2)
@pytest.mark.parametrize("prompt_slots", [0, 1, 2])
@pytest.mark.parametrize("num_pages", [7, 9, 12])
def test_preempted_samples_start_again_and_all_end(num_pages, prompt_slots):
    rng = np.random.default_rng(num_pages)
    jobs = make_jobs(rng, 5, 5, prompt_slots=prompt_slots)
    jobs = dataclasses.replace(jobs, max_tokens=jnp.full(25, 13, jnp.int32))
    wanted = rng.integers(8, 14, jobs.count)
    drawn, started, again = simulate(jobs, wanted, rows=7, num_pages=num_pages)
    assert (again > 0) == (prompt_slots > 0)
    assert started[0] == 1, "the oldest sample keeps its pages"
    assert started.min() == 1 < started.max()
    assert sum(drawn) > wanted.sum()


@pytest.mark.thorough
def test_rows_stay_occupied_while_samples_wait():
    rng = np.random.default_rng(0)
    jobs = make_jobs(rng, 8, 8)
    wanted = np.minimum(rng.geometric(0.3, jobs.count), 13)
    jobs = dataclasses.replace(jobs, max_tokens=jnp.full(64, 13, jnp.int32))
    drawn, *_ = simulate(jobs, wanted, rows=8, num_pages=8 * 4 + 8 * 3, refill_rows=1)
    assert set(drawn[:-13]) == {8}, "the last samples may take 13 steps"
    assert len(drawn) <= wanted.sum() / 8 + 13


def test_pages_are_taken_from_the_top_and_put_back():
    free = FreePages.all_of(4)
    free, pages = free.take(jnp.asarray([True, False, True]))
    assert pages.tolist() == [0, -1, 1]
    free, more = free.take(jnp.asarray([[True, True], [True, False]]))
    assert more.tolist() == [[2, 3], [-1, -1]]
    assert int(free.count) == 0
    free = free.put_back(jnp.asarray([5, 1, 3]), jnp.asarray([False, True, True]))
    free, pages = free.take(jnp.ones(3, bool))
    assert pages.tolist() == [3, 1, -1]
