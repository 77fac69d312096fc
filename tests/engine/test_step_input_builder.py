"""The input of a decode step made from the one before it, beside one that is built anew."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax.batch.page_groups import PageGroups
from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.pallas_kernels.attention.plan.host import PlanShape
from rjax.pallas_kernels.attention.plan.splits import SplitPolicy
from rjax.pallas_kernels.attention.reference import paged_attention_reference
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.attention.xla.attention import paged_attention
from rjax.sampling import SamplingParams
from rjax.worker.step import builder as step_input_builder
from rjax.worker.step.builder import COALESCED_STEPS, StepInputBuilder
from rjax.worker.step.layout import PackedLayouts
from rjax.worker.step.prepare import build_step_input, mean_stats
from rjax.worker.step.shape import StepShape
from tests.properties import num_examples

from .tiny import make_engine, run

type Windows = tuple[int | None, ...]

PAGE, PAGES, SPLIT, SEQS = 4, 12, 8, 6
LAYOUTS = PackedLayouts()
POLICY = SplitPolicy(2, 3, 4, multi_row_lanes=2, single_lane_rows=2)


def step_shape(
    policy: SplitPolicy | None = None, windows: Windows = (None,), split: int = SPLIT
) -> StepShape:
    """Of layers with these windows, each in a page group of its own."""
    plans = [
        PlanShape(
            rows=8,
            seqs=8,
            max_context=PAGE * PAGES,
            tile_rows=4,
            kv_split_size=split,
            split_policy=policy,
            window=window,
        )
        for window in dict.fromkeys(windows)
    ]
    groups = PageGroups(windows, tuple((group, 0) for group in range(len(windows))))
    return StepShape(
        rows=8,
        seqs=8,
        table_pages=PAGES,
        page_size=PAGE,
        groups=groups,
        plans=tuple(plans),
    )


class Batches:
    """Sequences of a prefix tree that grow by a token each step, in pages of their own."""

    def __init__(self, lengths, shared, seed: int, groups: int = 1):
        self.rng = np.random.default_rng(seed)
        self.pages = groups * SEQS * PAGES
        tables = self.rng.permutation(self.pages).astype(np.int32).reshape(groups, SEQS, PAGES)
        for b in range(1, len(lengths)):
            common = min(shared, lengths[b] // PAGE, lengths[0] // PAGE)
            tables[:, b, :common] = tables[:, 0, :common]
        self.tables = tables.copy()
        self.lengths = list(lengths)
        slots = self.rng.permutation(SEQS)[: len(lengths)]
        self.tables[:, slots] = tables[:, : len(lengths)]
        self.sequences = [self.sequence(number, slot) for number, slot in enumerate(slots)]
        self.running = list(range(len(lengths)))

    def sequence(self, number: int, slot):
        return SimpleNamespace(
            slot=int(slot),
            num_known=0,
            tokens=lambda start, stop: [100 * number + n for n in range(start, stop)],
            token_array=lambda start, stop: 100 * number + np.arange(start, stop),
            params=SimpleNamespace(prompt_logprobs=None),
        )

    def step(self) -> list[ScheduledSequence]:
        """The next batch; now and then a sequence pauses or the order changes."""
        if self.rng.random() < 0.1:
            self.running = [b for b in range(len(self.lengths)) if self.rng.random() < 0.8]
            self.rng.shuffle(self.running)
        batch = []
        for b in self.running:
            start = self.lengths[b]
            if start < PAGE * PAGES:
                self.lengths[b] += 1
                self.sequences[b].num_known = start + int(self.rng.integers(0, 2))
                batch.append(ScheduledSequence(self.sequences[b], start, start + 1, True))
        return batch


LENGTHS = st.lists(st.integers(1, PAGE * PAGES - 1), min_size=1, max_size=SEQS)
WINDOWS = st.sampled_from([(None,), (None, 6), (None, 5, 5, 11), (9,), (17, 1)])


@settings(max_examples=num_examples(100))
@given(lengths=LENGTHS, shared=st.integers(0, PAGES), windows=WINDOWS, seed=st.integers(0, 99))
@pytest.mark.usefixtures("no_annotations_checked")
def test_it_is_what_is_built_anew(lengths, shared, windows, seed):
    """Array for array, where nothing coalesces splits by the load of the whole batch."""
    batches, shape = Batches(lengths, shared, seed, len(windows)), step_shape(None, windows)
    builder = StepInputBuilder(LAYOUTS, "on", batches.pages)
    for _ in range(30):
        if not (batch := batches.step()):
            break
        made = builder.build(batch, batches.tables, shape)
        assert sorted(map(id, made.batch)) == sorted(map(id, batch))
        anew, stats = build_step_input(made.batch, batches.tables, shape, "on")
        np.testing.assert_array_equal(made.packed, LAYOUTS[shape].pack(anew))
        assert made.stats == mean_stats(stats, shape.groups)


@pytest.mark.thorough
@settings(max_examples=num_examples(100))
@given(lengths=LENGTHS, shared=st.integers(0, PAGES), windows=WINDOWS, seed=st.integers(0, 99))
@pytest.mark.usefixtures("no_annotations_checked")
def test_plans_of_coalesced_splits_are_right(lengths, shared, windows, seed):
    """``check_step_input`` passes, no window has left an item, and little more than the tokens of
    a new plan is read."""
    batches = Batches(lengths, shared, seed, len(windows))
    shape = step_shape(POLICY, windows)
    builder = StepInputBuilder(LAYOUTS, "on", batches.pages)
    for _ in range(30):
        if not (batch := batches.step()):
            break
        made = builder.build(batch, batches.tables, shape)
        _, stats = build_step_input(made.batch, batches.tables, shape, "on")
        anew = mean_stats(stats, shape.groups)
        if windows == (None,):
            assert made.stats == anew
        else:  # a window may have left a split, but not the item that reads it
            beyond = (COALESCED_STEPS + SPLIT) * len(batch)
            assert 0 <= made.stats.kv_tokens_read - anew.kv_tokens_read <= beyond
        fields = LAYOUTS[shape].unpack(made.packed)
        for plan, plan_shape in zip(fields.plans, shape.plans, strict=True):
            if plan_shape.window is not None:
                assert_in_sight(plan, fields.positions, plan_shape.window)


def assert_in_sight(plan, positions, window: int):
    """Each item ends after the first token that each of its rows sees."""
    for items in plan.lists:
        for i in range(int(items.num_items)):
            start = items.row_start[i]
            furthest = positions[start : start + items.row_count[i]].max()
            assert items.kv_stop[i] > furthest - window + 1


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("windows", [(None,), (None, 6), (9,)])
@pytest.mark.usefixtures("no_annotations_checked")
def test_attention_of_items_that_grow_into_the_next_split(windows, monkeypatch):
    """It is that of the float32 reference, with pages that no row sees full of NaN."""
    built, grown = count_builds(monkeypatch), 0
    batches = Batches([1, 4, 15, 22, 23, 31], 3, 0, len(windows))
    batches.rng = SimpleNamespace(random=lambda: 1.0, integers=lambda *_: 0)
    shape = step_shape(POLICY, windows)
    builder = StepInputBuilder(LAYOUTS, "on", batches.pages)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((8, 4, 16)), jnp.float32)
    pools = rng.standard_normal((2, batches.pages, 2, PAGE, 16)).astype(np.float32)
    for _ in range(COALESCED_STEPS):
        before = len(built)
        fields = LAYOUTS[shape].unpack(builder.build(batches.step(), batches.tables, shape).packed)
        for group, (window, _, _) in zip(fields.groups, shape.kinds, strict=True):
            table, plan = group.page_tables(PAGES)[0], group.plan
            spec = AttentionSpec(0.25, window)
            k, v = unseen_pages_poisoned(pools, np.asarray(table), fields.positions, window)
            row_table = jnp.asarray(table)[jnp.clip(jnp.arange(8), 0, len(table) - 1)]
            positions = jnp.asarray(fields.positions)
            found = paged_attention(q, k, v, jnp.asarray(table), positions, plan, spec)
            want = paged_attention_reference(q, k, v, row_table, positions, spec)
            for mine, reference in zip(found, want, strict=True):
                np.testing.assert_allclose(mine, reference, rtol=1e-5, atol=1e-5)
        begins = (fields.positions > 0) & (fields.positions % SPLIT == 0)
        grown += int(begins.sum()) if len(built) == before else 0
    assert grown > 0


def unseen_pages_poisoned(pools, table, positions, window):
    """K and V, with NaN in the pages of which no row sees a token."""
    seen = np.zeros(pools.shape[1], bool)
    for row, position in enumerate(positions):
        if position >= 0:
            first = 0 if window is None else max(0, position - window + 1)
            seen[table[row, first // PAGE : position // PAGE + 1]] = True
    return jnp.asarray(np.where(seen[:, None, None, None], pools, np.nan))


@pytest.mark.thorough
@given(length=st.integers(1, PAGE * PAGES - 30), windows=WINDOWS)
@pytest.mark.usefixtures("no_annotations_checked")
def test_one_sequence_has_the_plan_of_its_length(length, windows):
    """Whatever was before, with coalesced splits too."""
    batches, shape = Batches([length], 0, 0, len(windows)), step_shape(POLICY, windows, 32)
    batches.rng = SimpleNamespace(random=lambda: 1.0, integers=lambda *_: 0)
    builder = StepInputBuilder(LAYOUTS, "on", batches.pages)
    for _ in range(30):
        made = builder.build(batches.step(), batches.tables, shape)
        anew, _ = build_step_input(made.batch, batches.tables, shape, "on")
        np.testing.assert_array_equal(made.packed, LAYOUTS[shape].pack(anew))


@pytest.mark.usefixtures("no_annotations_checked")
def test_coalesced_splits_are_planned_every_few_steps(monkeypatch):
    """However often one of many sequences begins a split."""
    plans = count_builds(monkeypatch)
    batches, shape = Batches([1, 2, 3, 4, 5, 6], 0, 0), step_shape(POLICY)
    batches.rng = SimpleNamespace(random=lambda: 1.0, integers=lambda *_: 0)
    builder = StepInputBuilder(LAYOUTS, "on", batches.pages)
    seen = []
    for _ in range(2 * COALESCED_STEPS + 1):
        builder.build(batches.step(), batches.tables, shape)
        seen.append(len(plans))
    assert seen == [1] * COALESCED_STEPS + [2] * COALESCED_STEPS + [3]


def count_builds(monkeypatch) -> list:
    """A list that grows with each input that is built anew."""
    built, build = [], step_input_builder.build_step_input

    def counted(*args):
        built.append(args)
        return build(*args)

    monkeypatch.setattr(step_input_builder, "build_step_input", counted)
    return built


# Positions 3 to 16 and 11 to 24. Splits begin at 8, 16 and 24; a window of 6 leaves them at 13, 21.
@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((None,), [1] * 5 + [2] * 8 + [3]),
        ((None, 6), [1] * 2 + [2] * 3 + [3] * 5 + [4] * 3 + [5]),
    ],
)
@pytest.mark.usefixtures("no_annotations_checked")
def test_a_plan_serves_until_splits_change(monkeypatch, windows, expected):
    built = count_builds(monkeypatch)
    batches, builder = Batches([3, 11], 0, 0, len(windows)), StepInputBuilder(LAYOUTS, "on")
    batches.rng = SimpleNamespace(random=lambda: 1.0, integers=lambda *_: 0)
    seen = []
    for _ in range(14):
        first = builder.build(batches.step(), batches.tables, step_shape(None, windows)).packed
        kept = first.copy()
        seen.append((len(built), first, kept))
    assert [n for n, _, _ in seen] == expected
    for _, packed, kept in seen:
        np.testing.assert_array_equal(packed, kept)


@pytest.mark.thorough
def test_an_engine_gives_the_same_tokens(tiny, monkeypatch):
    """With sequences that join, leave and are preempted, and each input checked."""
    requests = [
        (
            str(i),
            [*range(1, 20 + 7 * i), 50 + i],
            SamplingParams(temperature=0, max_tokens=80 - 9 * i),
        )
        for i in range(4)
    ]
    answers, followed, follow = [], [], StepInputBuilder._follow

    def counted(builder, last, *args):
        followed.append(len(last.stops))
        return follow(builder, last, *args)

    monkeypatch.setattr(StepInputBuilder, "_follow", counted)
    for follows in (True, False):
        if not follows:
            monkeypatch.setattr(step_input_builder._DecodeStep, "is_followed_by", lambda *_: False)
        engine = make_engine(tiny, check_values=True, num_pages=20)
        done = run(engine, requests)
        answers.append({name: dataclasses.astuple(done[name].outputs[0])[:3] for name in done})
        assert engine.stats().preemptions > 0
    assert set(followed) >= {1, 2, 3}  # sequences at once
    assert answers[0] == answers[1]
