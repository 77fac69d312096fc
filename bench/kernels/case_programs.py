"""All programs of one case, lowered before its large arrays are allocated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.backends import Kernel
from bench.kernels.cases.attention import Case, Inputs, draw_layer, fill, lay_out
from bench.kernels.check import UNTUNED, compare, picked_rows
from bench.kernels.program import Program

_SEED = 0


class CasePrograms:
    """Programs that create a case's inputs, run a chain of attention calls, and check a result.

    ``draw``: see ``draw_layer``. ``prepare``: (plan, positions) to the prepared plan. ``chain``:
    (queries, all layers' pages, page table, positions, prepared plan, options) to output and LSE of
    the first call and the output of the last. ``judge``: (two results of ``chain``, then its
    arguments with one layer's pages and no plan) to relative error, LSE error and whether the two
    are bit-equal. The checked kernel is the timed one: it is lowered once.

    Args:
        case, kernel: the case and the kernel.
        layers: number of page pools that the chain cycles through.
        length: calls in the chain.
    """

    def __init__(self, case: Case, kernel: Kernel, layers: int, length: int) -> None:
        self._case, self._dtype, self._layers = case, kernel.dtype, layers
        self.length = length
        self._layout = lay_out(case, _SEED)
        table, positions = self._layout.page_table, self._layout.positions
        options = self._layout.options
        rows = picked_rows(case)

        def chain(q, pools, table, positions, leaves, options):
            plan, results = self.prepare.tree.unflatten(leaves), []
            # Each call's output is the next one's query, as in a model's layers: they run in order.
            for i in range(length):
                args = (q, *pools[i % layers], table, positions, plan)
                results.append(kernel.attention(*args, spec=case.spec, **options))
                q = results[-1][0]
            return *results[0], q

        def judge(first, second, q, k, v, table, positions, options):
            args = (q, k, v, table, positions, options, *first[:2])
            same = [(x == y).all() for x, y in zip(first, second, strict=True)]
            return *compare(case.spec, *rows, *args), jnp.stack(same).all()

        draw = functools.partial(draw_layer, case, kernel.dtype)
        key = jax.random.key(_SEED)
        self.draw = Program(draw, key, np.int32(0), self._layout.used, compiler_options=UNTUNED)
        prepare = functools.partial(kernel.prepare, heads=(case.N, case.K, case.H))
        self.prepare = Program(prepare, self._layout.plan, positions)
        q = jax.ShapeDtypeStruct((positions.size, case.N, case.H), kernel.dtype)
        k, v = self.draw.leaves
        leaves = self.prepare.leaves
        self.chain = Program(chain, q, ((k, v),) * layers, table, positions, leaves, options)
        result = self.chain.leaves
        self.judge = Program(
            judge, result, result, q, k, v, table, positions, options, compiler_options=UNTUNED
        )

    @property
    def programs(self) -> tuple[Program, ...]:
        """Compile each program."""
        return self.draw, self.prepare, self.chain, self.judge

    def inputs(self) -> Inputs:
        """New arrays of the case."""
        args = (self._case, self._layout, _SEED, self._layers, self._dtype)
        return fill(*args, self.draw)
