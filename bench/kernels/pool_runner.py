"""Times many decode cases with the same heads with few compiled programs.

Compiling costs far more than timing. Cases of equal batch size share their programs: one pool of
pages serves them all, page tables have one width, and plans are padded to the same capacities.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.backends import Kernel
from bench.kernels.cases.attention import Case
from bench.kernels.kernel_profile import kernel_times
from bench.kernels.run_case import CACHE_BYTES
from bench.kernels.timing import seconds_per_call
from rjax.pallas_kernels.attention.plan.host import PlanShape, plan_attention
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan
from rjax.pallas_kernels.attention.reference import paged_attention_reference

_CHAIN = {"gpu": 48, "cpu": 2}  # calls in one program
_COPIES = {"gpu": 16, "cpu": 1}  # sets of pages that the calls of a program cycle through
_CHECKED_ROWS = 4


class PoolRunner:
    """Checks and times cases that differ only in batch, lengths, sharing and KV split size.

    Args:
        kernel: the backend.
        cases: all cases, with equal N, K, H, S and tile height, equal numbers of unique tokens, one
            prefix and one query row per sequence.
    """

    def __init__(self, kernel: Kernel, cases: Sequence[Case]) -> None:
        first = cases[0]
        assert len({(c.N, c.K, c.H, c.S, c.tile_rows) for c in cases}) == 1
        assert all(c.prefixes == c.queries == 1 for c in cases)
        self._kernel, self._platform = kernel, jax.default_backend()
        self._width = max(_pages(c, int(c.context[0])) for c in cases)
        self._cuts: dict[int, int] = {}
        for case in cases:
            cuts = math.ceil(int(case.context[0]) / case.split)
            self._cuts[case.batch] = max(cuts, self._cuts.get(case.batch, 1))
        self._longest_cut = max(c.split for c in cases)
        self._heads = (first.N, first.K, first.H)
        pages = max(self._copies(c) * _distinct_pages(c) for c in cases)
        shape = (pages, first.K, first.S, first.H)
        draw = jax.jit(lambda key: jax.random.normal(key, shape, kernel.dtype))
        self._k, self._v = draw(jax.random.key(0)), draw(jax.random.key(1))
        self._prepare = jax.jit(kernel.prepare, static_argnums=2)
        attend = functools.partial(kernel.attention, spec=first.spec)
        self._one = jax.jit(attend)
        self._chain = jax.jit(functools.partial(_chain, attend, _CHAIN[self._platform]))
        self._reference = jax.jit(functools.partial(paged_attention_reference, spec=first.spec))

    def measure(self, case: Case) -> tuple[float, float, AttentionPlan]:
        """(seconds of a call, relative error of a few rows, the plan); a result that is wrong by
        more than a hundredth is not timed and its time NaN."""
        tables = self._tables(case)
        plan = self._plan(case, tables[0])
        shape = (case.batch, case.N, case.H)
        q = jax.random.normal(jax.random.key(2), shape, self._kernel.dtype)
        positions = jnp.asarray(case.context - 1, jnp.int32)
        # Separate arrays: a slice inside the program would be timed too.
        on_device = tuple(jax.device_put(table) for table in tables)
        prepared = self._prepare(jax.tree.map(jnp.asarray, plan), positions, self._heads)
        one = functools.partial(self._one, q, self._k, self._v, on_device[0], positions, prepared)
        out, _ = one()
        error = self._error(out, q, on_device[0], positions)
        if not error < 1e-2:
            return float("nan"), error, plan
        chain = functools.partial(self._chain, q, self._k, self._v, on_device, positions, prepared)
        return self._seconds(chain), error, plan

    def _seconds(self, chain: Callable[[], object]) -> float:
        """Seconds of one call of the chain."""
        if self._platform == "gpu":
            # With short chains the host cost of the CUDA graph would be timed: it rewrites every
            # launch anew whenever the memory of the last run is still in use.
            _, busy = kernel_times(chain, runs=2)
        else:
            busy = seconds_per_call(chain, repeats=2, rounds=3)
        return busy / _CHAIN[self._platform]

    def _copies(self, case: Case) -> int:
        wanted = math.ceil(CACHE_BYTES / case.bytes(self._kernel.dtype.itemsize))
        return min(_COPIES[self._platform], wanted)

    def _tables(self, case: Case) -> np.ndarray:
        """Page tables of disjoint pages, [copies, B, M]; copies repeat if few are needed."""
        count, B = _distinct_pages(case), case.batch
        shared = case.shared // case.S
        copies = self._copies(case)
        ids = np.random.default_rng(3).permutation(copies * count).astype(np.int32)
        tables = np.zeros((_COPIES[self._platform], B, self._width), np.int32)
        for i in range(tables.shape[0]):
            mine = ids.reshape(copies, count)[i % copies]
            own = mine[shared:].reshape(B, -1)
            tables[i, :, :shared] = mine[:shared]
            tables[i, :, shared : shared + own.shape[1]] = own
        return tables

    def _plan(self, case: Case, table: np.ndarray) -> AttentionPlan:
        shape = PlanShape(
            rows=case.batch,
            seqs=case.batch,
            max_context=self._cuts[case.batch] * case.split,
            tile_rows=case.tile_rows,
            kv_split_size=case.split,
        )
        plan, _ = plan_attention(
            table,
            np.arange(case.batch + 1),
            case.context,
            page_size=case.S,
            shape=shape,
            sharing=case.share,
        )
        if self._kernel.name == "xla":  # whose program depends on the KV split size
            return plan
        # The bound of an item's length is part of the program's key: the same for all split sizes.
        lists = (dataclasses.replace(work, tile_tokens=self._longest_cut) for work in plan.lists)
        return dataclasses.replace(plan, lists=tuple(lists))

    def _error(self, out, q, table, positions) -> float:
        rows = np.unique(np.linspace(0, q.shape[0] - 1, _CHECKED_ROWS).astype(int))
        want = [
            self._reference(q[t][None], self._k, self._v, table[t][None], positions[t][None])[0]
            for t in rows
        ]
        want = jnp.concatenate(want)
        off = jnp.linalg.norm(out[rows].astype(jnp.float32) - want) / jnp.linalg.norm(want)
        return float(off)


def _chain(attend, length: int, q, k, v, tables, positions, plan):
    # Each call's output is the next one's query, as in a model's layers: they run in order.
    for i in range(length):
        q, _ = attend(q, k, v, tables[i % len(tables)], positions, plan)
    return q


def _pages(case: Case, tokens: int) -> int:
    return math.ceil(tokens / case.S)


def _distinct_pages(case: Case) -> int:
    return case.shared // case.S + case.batch * _pages(case, int(case.own_tokens[0]))
