"""Page operations gathered into few ones do what they would have done one by one."""

import random

from rjax.batch.page_operations import CopyPages, PageOperations, SwapIn, SwapOut


def execute(operations, pages, host):
    for operation in operations:
        match operation:
            case CopyPages(source, target):
                assert len(set(target)) == len(target), "order of equal targets is not defined"
                for page, content in zip(target, [pages[p] for p in source], strict=True):
                    pages[page] = content
            case SwapOut(taken, slots):
                for page, slot in zip(taken, slots, strict=True):
                    host[slot] = pages[page]
            case SwapIn(slots, filled):
                for page, slot in zip(filled, slots, strict=True):
                    pages[page] = host[slot]


def test_batches_keep_the_order_that_matters():
    rng = random.Random(0)
    fewer = 0
    for _ in range(300):
        gathered, one_by_one = PageOperations(), []
        for _ in range(rng.randrange(1, 12)):
            kind, a, b = rng.randrange(8), rng.randrange(6), rng.randrange(6)
            if kind == 0:
                gathered.swap_out([a], [b])
                one_by_one.append(SwapOut([a], [b]))
            elif kind == 1:
                gathered.swap_in([b], [a])
                one_by_one.append(SwapIn([b], [a]))
            else:
                gathered.copy(a, b)
                one_by_one.append(CopyPages([a], [b]))
        together = gathered.take()
        assert not gathered.take()
        found = list(range(6)), list(range(10, 16))
        want = list(range(6)), list(range(10, 16))
        execute(together, *found)
        execute(one_by_one, *want)
        assert found == want
        fewer += len(together) < len(one_by_one)
    assert fewer > 100
