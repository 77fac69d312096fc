"""Check mode: concrete page tables, positions and plans against each other, on the host.

Tracing checks shapes and dtypes. Values are known only at run time, and a wrong value silently
makes a row read another sequence's pages, or skip tokens. Call these functions before the attention
to find such a value; they take much longer than planning.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan, IntArray, WorkList


def check_values(
    page_table: Int[IntArray, "B M"],
    positions: Int[IntArray, " T"],
    plan: AttentionPlan,
    *,
    num_pages: int,
    page_size: int,
    sequence_of_row: Int[IntArray, " T"] | None = None,
    sliding_window: int | None = None,
) -> None:
    """Raise ValueError unless each row reads every token that it sees once, from its own pages.

    Args:
        page_table, positions, plan: arguments of ``paged_attention``, as arrays with values.
        num_pages: P, pages of the pool.
        page_size: S, tokens a page.
        sequence_of_row: the table row of each query row. If given, a row that reads through another
            sequence's table must have the same pages there. Rows at negative positions may have any
            value.
        sliding_window: the window of the AttentionSpec, in tokens; tokens before it need not be
            covered.

    Raises:
        ValueError: the first fault and its place: a position beyond the table; an item outside the
            rows, the table or its split; a page outside the pool; a page of another sequence; a
            token covered twice or not at all; a merge of results that are not the row's own.
    """
    table, at = np.asarray(page_table), np.asarray(positions)
    T, end = at.size, table.shape[1] * page_size
    if plan.merge_indptr.shape[0] != T + 1:
        raise ValueError(
            f"the plan is for {plan.merge_indptr.shape[0] - 1} rows; there are {T} positions"
        )
    if at.max(initial=-1) >= end:
        t = int(at.argmax())
        raise ValueError(
            f"row {t} is at position {at[t]}; a table of {table.shape[1]} pages of {page_size} "
            f"tokens ends at {end - 1}"
        )
    reads, base = [], 0
    for which, work in enumerate(plan.lists):
        _check_items(f"list {which}", work, T, table.shape[0], end, page_size)
        _check_pages(f"list {which}", work, table, num_pages, page_size)
        reads.append(_reads(work, base))
        base += work.capacity * work.tile_rows
    computed = _Reads(*(np.concatenate(x) for x in zip(*map(_columns, reads), strict=True)))
    seen = computed.visible(at, sliding_window)
    if sequence_of_row is not None:
        _check_owners(seen, np.asarray(sequence_of_row), table, page_size)
    _check_coverage(seen, at, sliding_window)
    indptr, slots = np.asarray(plan.merge_indptr), np.asarray(plan.merge_slots)
    _check_merge(computed, seen, indptr, slots, num_slots=base)


def check_writes(kv_slots: Int[IntArray, " T"], *, num_pages: int, page_size: int) -> None:
    """Raise ValueError unless each row writes to its own KV slot of the pool.

    Args:
        kv_slots: page * S + offset of each row, -1 for none, as for ``rope_and_cache``.
        num_pages, page_size: P and S.
    """
    slots = np.asarray(kv_slots)
    beyond = np.flatnonzero((slots < -1) | (slots >= num_pages * page_size))
    if beyond.size:
        t = int(beyond[0])
        raise ValueError(
            f"row {t} writes to slot {slots[t]}; {num_pages} pages of {page_size} tokens have "
            f"slots 0 to {num_pages * page_size - 1}, and -1 is none"
        )
    used, first, count = np.unique(slots[slots >= 0], return_index=True, return_counts=True)
    if (count > 1).any():
        slot = int(used[count > 1][0])
        rows = np.flatnonzero(slots == slot)
        raise ValueError(f"rows {rows[0]} and {rows[1]} both write to slot {slot}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Reads:
    """Pairs (item, row): the tokens read, the table row used, and the slot of the result."""

    row: Int[np.ndarray, " X"]
    start: Int[np.ndarray, " X"]
    stop: Int[np.ndarray, " X"]
    owner: Int[np.ndarray, " X"]
    slot: Int[np.ndarray, " X"]

    def visible(self, at: np.ndarray, window: int | None) -> "_Reads":
        """Clip to each row's visible tokens, sort by row and token, drop empty reads."""
        first = np.zeros(at.size, np.int64) if window is None else np.maximum(at - window + 1, 0)
        start = np.maximum(self.start, first[self.row])
        stop = np.minimum(self.stop, at[self.row] + 1)
        clipped = dataclasses.replace(self, start=start, stop=stop)
        chosen = np.lexsort((start, self.row))
        chosen = chosen[(start < stop)[chosen]]
        return _Reads(*(column[chosen] for column in _columns(clipped)))


def _columns(reads: _Reads) -> tuple[np.ndarray, ...]:
    return (reads.row, reads.start, reads.stop, reads.owner, reads.slot)


def _reads(work: WorkList, base: int) -> _Reads:
    live = slice(0, int(work.num_items))
    count = np.asarray(work.row_count)[live].astype(np.int64)
    item = np.repeat(np.arange(count.size), count)
    offset = np.arange(item.size) - (count.cumsum() - count)[item]
    return _Reads(
        row=np.asarray(work.row_start)[item] + offset,
        start=np.asarray(work.kv_start)[item],
        stop=np.asarray(work.kv_stop)[item],
        owner=np.asarray(work.table_row)[item],
        slot=base + item * work.tile_rows + offset,
    )


def _check_items(
    name: str, work: WorkList, rows: int, sequences: int, end: int, page_size: int
) -> None:
    items = int(work.num_items)
    if not 0 <= items <= work.capacity:
        raise ValueError(f"{name} says it has {items} items; there is room for {work.capacity}")
    columns = ("row_start", "row_count", "table_row", "kv_start", "kv_stop")
    row, count, sequence, start, stop = (np.asarray(getattr(work, c))[:items] for c in columns)
    rules: tuple[tuple[np.ndarray, str], ...] = (
        ((count >= 1) & (count <= work.tile_rows), f"it must have 1 to {work.tile_rows} rows"),
        ((row >= 0) & (row + count <= rows), f"rows are 0 to {rows - 1}"),
        ((sequence >= 0) & (sequence < sequences), f"table rows are 0 to {sequences - 1}"),
        ((start >= 0) & (start % page_size == 0), f"it must begin with a page of {page_size}"),
        (
            (stop > start) & (stop - start <= work.tile_tokens),
            f"it must have 1 to {work.tile_tokens} tokens",
        ),
        (stop <= end, f"the table ends at token {end}"),
    )
    for holds, rule in rules:
        if not holds.all():
            i = int(holds.argmin())
            raise ValueError(
                f"item {i} of {name} has rows {row[i]} to {row[i] + count[i] - 1}, table row "
                f"{sequence[i]} and tokens {start[i]} to {stop[i] - 1}; {rule}"
            )


def _check_pages(
    name: str, work: WorkList, table: np.ndarray, num_pages: int, page_size: int
) -> None:
    for i in range(int(work.num_items)):
        b = int(work.table_row[i])
        first, last = int(work.kv_start[i]) // page_size, (int(work.kv_stop[i]) - 1) // page_size
        pages = table[b, first : last + 1]
        bad = np.flatnonzero((pages < 0) | (pages >= num_pages))
        if bad.size:
            page = first + int(bad[0])
            raise ValueError(
                f"item {i} of {name} reads page_table[{b}, {page}], which is {table[b, page]}; "
                f"the pool has pages 0 to {num_pages - 1}"
            )


def _check_owners(
    reads: _Reads, sequence_of_row: np.ndarray, table: np.ndarray, page_size: int
) -> None:
    own = sequence_of_row[reads.row]
    for i in np.flatnonzero(own != reads.owner):
        pages = slice(reads.start[i] // page_size, (reads.stop[i] - 1) // page_size + 1)
        other = np.flatnonzero(table[own[i], pages] != table[reads.owner[i], pages])
        if other.size:
            page = pages.start + int(other[0])
            raise ValueError(
                f"row {reads.row[i]} of sequence {own[i]} reads tokens {reads.start[i]} to "
                f"{reads.stop[i] - 1} by the table of sequence {reads.owner[i]}, but their pages "
                f"{page} are {table[own[i], page]} and {table[reads.owner[i], page]}"
            )


def _check_coverage(reads: _Reads, at: np.ndarray, window: int | None) -> None:
    """Sorted reads of a row must be contiguous, from its first visible token to its last."""
    T = at.size
    first = np.zeros(T, np.int64) if window is None else np.maximum(at - window + 1, 0)
    # Two sentinels enclose the reads of each row: one ends at the first visible token, the other
    # starts after the last.
    sees = np.flatnonzero(at >= 0)
    row = np.concatenate([sees, reads.row, sees])
    start = np.concatenate([np.full(sees.size, -1), reads.start, at[sees] + 1])
    stop = np.concatenate([first[sees], reads.stop, at[sees] + 2])
    order = np.lexsort((start, row))
    row, start, stop = row[order], start[order], stop[order]
    wrong = np.flatnonzero((row[1:] == row[:-1]) & (start[1:] != stop[:-1]))
    if wrong.size:
        i = int(wrong[0])
        t, begin, end = row[i], stop[i], start[i + 1]
        what = "no item covers" if end > begin else "more than one item covers"
        begin, end = min(begin, end), max(begin, end)
        raise ValueError(f"{what} tokens {begin} to {end - 1} for row {t} at position {at[t]}")


def _check_merge(
    computed: _Reads, seen: _Reads, indptr: np.ndarray, slots: np.ndarray, num_slots: int
) -> None:
    """Each row must merge every result that saw a token once, and no result of other rows."""
    if indptr[0] != 0 or (np.diff(indptr) < 0).any() or indptr[-1] > slots.size:
        raise ValueError(
            f"merge_indptr goes from {indptr[0]} to {indptr[-1]}; it must rise from 0 and end by "
            f"{slots.size}"
        )
    row, slot = np.repeat(np.arange(indptr.size - 1), np.diff(indptr)), slots[: indptr[-1]]
    merged = row * num_slots + slot
    has = np.isin(merged, computed.row * num_slots + computed.slot)
    has &= (slot >= 0) & (slot < num_slots)
    if not has.all():
        i = int(has.argmin())
        raise ValueError(f"row {row[i]} merges slot {slot[i]}, which no item computes for it")
    values, first = np.unique(merged, return_index=True)
    if values.size < merged.size:
        i = int(np.setdiff1d(np.arange(merged.size), first)[0])
        raise ValueError(f"row {row[i]} merges slot {slot[i]} twice")
    missing = np.flatnonzero(~np.isin(seen.row * num_slots + seen.slot, merged))
    if missing.size:
        i = int(missing[0])
        raise ValueError(
            f"row {seen.row[i]} does not merge slot {seen.slot[i]}, its result for tokens "
            f"{seen.start[i]} to {seen.stop[i] - 1}"
        )
