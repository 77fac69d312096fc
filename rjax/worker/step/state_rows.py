"""The rows of a step as layers with states take them, from its batch."""

import numpy as np
from jaxtyping import Int

from rjax.pallas_kernels.gated_delta.states import CARRIED, NO_PAGE, StateRows, max_items


def empty_state_rows(
    *, rows: int, seqs: int, page_size: int, one_row_each: bool = False
) -> StateRows:
    """The rows of a step without sequences, as arrays that `write_state_rows` fills.

    one_row_each: a sequence has one row at most. Only then there are as many items as sequences.
    """
    items = seqs if one_row_each else max(max_items(rows, seqs, page_size), seqs + 1)

    def unused(size: int) -> Int[np.ndarray, " size"]:
        return np.full(size, -1, np.int32)

    def zeros(size: int) -> Int[np.ndarray, " size"]:
        return np.zeros(size, np.int32)

    return StateRows(
        sequence=unused(rows),
        first_row=unused(seqs),
        last_row=unused(seqs),
        slot=zeros(seqs),
        conv_page=unused(seqs),
        item_row=zeros(items),
        item_sequence=unused(items),
        start=zeros(items),
        stop=zeros(items),
        read_page=unused(items),
        write_page=unused(items),
        num_items=zeros(1),
    )


def write_state_rows(
    found: StateRows,
    table: Int[np.ndarray, "slots M"],
    *,
    page_size: int,
    slots: Int[np.ndarray, " A"],
    start: Int[np.ndarray, " A"],
    stop: Int[np.ndarray, " A"],
) -> None:
    """Write a step of A sequences into arrays of `empty_state_rows`, or of a step like it.

    Args:
        found: the arrays.
        table: state page at each page's end; row s is that of the sequence in slot s.
        page_size: tokens a page, S.
        slots: slot of each sequence.
        start, stop: positions of the first row of each sequence and behind its last.
    """
    A, S = slots.size, page_size
    rows = stop - start
    last_row = np.cumsum(rows, dtype=np.int32) - 1
    first_row = last_row - rows + 1
    first_page = start // S
    before = np.where(first_page > 0, table[slots, first_page - 1], NO_PAGE)
    found.sequence[: rows.sum()] = np.repeat(np.arange(A, dtype=np.int32), rows)
    found.first_row[:A], found.last_row[:A], found.slot[:A] = first_row, last_row, slots
    found.conv_page[:A] = np.where(start % S, CARRIED, before)
    pages = -(-stop // S) - first_page
    count = int(pages.sum())
    of = np.repeat(np.arange(A, dtype=np.int32), pages)
    number = np.arange(count, dtype=np.int32) - np.repeat(np.cumsum(pages) - pages, pages)
    page = first_page[of] + number
    item_start = np.maximum(start[of] - page * S, 0)
    item_stop = np.minimum(stop[of] - page * S, S)
    found.item_sequence[:count], found.start[:count], found.stop[:count] = of, item_start, item_stop
    found.item_row[:count] = first_row[of] + page * S + item_start - start[of]
    found.read_page[:count] = np.where(number > 0, CARRIED, before[of])
    full = item_stop == S
    found.write_page[:count] = np.where(full, table[slots[of], page], NO_PAGE)
    found.num_items[0] = count
